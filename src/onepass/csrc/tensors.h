// tensors.h: what onepass needs of a torch tensor, through libtorch's stable ABI.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "plan.h"

namespace onepass {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

[[noreturn]] inline void fail(const std::string& words) { throw std::runtime_error("onepass: " + words); }

// The C functions of the stable ABI return 0, or 1 having logged why.
inline void checked(AOTITorchError failed) {
  if (failed) fail("a call of libtorch failed");
}

inline DType dtype_of(ScalarType type) {
  switch (type) {
    case ScalarType::Float: return DType::float32;
    case ScalarType::Double: return DType::float64;
    case ScalarType::Half: return DType::float16;
    case ScalarType::BFloat16: return DType::bfloat16;
    default:
      fail(std::string("takes float32, float64, float16 and bfloat16, got ") + torch::headeronly::toString(type));
  }
}

inline ScalarType scalar_type_of(DType type) {
  constexpr ScalarType kTypes[] = {ScalarType::Float, ScalarType::Double, ScalarType::Half, ScalarType::BFloat16};
  return kTypes[int(type)];
}

// libtorch's own number of a scalar type.
inline int32_t torch_dtype(DType type) {
  return torch::stable::detail::to<int32_t>(torch::stable::detail::from(scalar_type_of(type)));
}

inline Tensor empty_strided(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides, DType type,
                            const Tensor& like) {
  int32_t device_type, device_index;
  checked(aoti_torch_get_device_type(like.get(), &device_type));
  checked(aoti_torch_get_device_index(like.get(), &device_index));
  AtenTensorHandle made;
  checked(aoti_torch_empty_strided(int64_t(sizes.size()), sizes.data(), strides.data(), torch_dtype(type), device_type,
                                   device_index, &made));
  return Tensor(made);
}

inline std::vector<int64_t> contiguous_strides(const std::vector<int64_t>& sizes) {
  std::vector<int64_t> strides(sizes.size());
  int64_t step = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    strides[i] = step;
    step *= sizes[i] > 1 ? sizes[i] : 1;
  }
  return strides;
}

// A view of `base` with other sizes and strides, at the same offset.
inline Tensor as_strided(const Tensor& base, const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides) {
  AtenTensorHandle view;
  checked(aoti_torch_as_strided(base.get(), sizes.data(), strides.data(), &view));
  return Tensor(view);
}

// An uninitialised tensor as torch.empty_like makes it: the strides of `like` where it is dense, else torch's choice
// for them.
inline Tensor empty_like(const Tensor& like, DType type) {
  if (like.is_contiguous()) {  // by far the most frequent, and 1 us cheaper than the dispatcher's way
    const auto sizes = like.sizes();
    const auto strides = like.strides();
    return empty_strided({sizes.begin(), sizes.end()}, {strides.begin(), strides.end()}, type, like);
  }
  std::array<StableIValue, 6> stack{torch::stable::detail::from(like),
                                    torch::stable::detail::from(std::optional<ScalarType>(scalar_type_of(type))),
                                    torch::stable::detail::from(std::nullopt),
                                    torch::stable::detail::from(std::nullopt),
                                    torch::stable::detail::from(std::nullopt),
                                    torch::stable::detail::from(std::nullopt)};
  checked(torch_call_dispatcher("aten::empty_like", "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

inline Tensor cast(const Tensor& input, DType type) {
  Tensor made = empty_like(input, type);
  checked(aoti_torch_copy_(made.get(), input.get(), 0));
  return made;
}

}  // namespace onepass
