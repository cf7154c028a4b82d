// stable_tensor.h: what onepass needs of a torch tensor, through libtorch's stable ABI.
#pragma once

#include <sys/mman.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "layout.h"
#include "types.h"

namespace onepass {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

[[noreturn]] inline void fail(const std::string& words) { throw std::runtime_error("onepass: " + words); }

// The C functions of the stable ABI return 0, or 1 having logged why.
inline void checked(AOTITorchError failed) {
  if (failed) fail("a call of libtorch failed");
}

// A tensor by its handle, deleted with this. (Tensor counts its owners, which a call that owns all it has does not
// need.)
class Owned {
 public:
  explicit Owned(AtenTensorHandle handle) : handle_(handle) {}
  Owned(Owned&& other) noexcept : handle_(other.release()) {}
  Owned& operator=(Owned&&) = delete;
  ~Owned() {
    if (handle_) aoti_torch_delete_tensor_object(handle_);
  }

  AtenTensorHandle get() const { return handle_; }
  AtenTensorHandle release() { return std::exchange(handle_, nullptr); }

 private:
  AtenTensorHandle handle_;
};

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
  switch (type) {
    case DType::float64: return aoti_torch_dtype_float64();
    case DType::float16: return aoti_torch_dtype_float16();
    case DType::bfloat16: return aoti_torch_dtype_bfloat16();
    default: return aoti_torch_dtype_float32();
  }
}

// What a call asks of a tensor, each asked once. The sizes and strides are the tensor's own.
struct Operand {
  AtenTensorHandle handle;
  int rank;
  const int64_t *sizes, *strides;
  int32_t device_type, device_index;

  explicit Operand(AtenTensorHandle given) : handle(given) {
    int64_t dims, *own_sizes, *own_strides;
    checked(aoti_torch_get_dim(handle, &dims));
    checked(aoti_torch_get_sizes(handle, &own_sizes));
    checked(aoti_torch_get_strides(handle, &own_strides));
    checked(aoti_torch_get_device_type(handle, &device_type));
    checked(aoti_torch_get_device_index(handle, &device_index));
    rank = int(dims), sizes = own_sizes, strides = own_strides;
  }

  bool is_cuda() const { return device_type == aoti_torch_device_type_cuda(); }
  bool is_contiguous() const {
    bool answer;
    return checked(aoti_torch_is_contiguous(handle, &answer)), answer;
  }
  int64_t numel() const {
    int64_t total = 1;
    for (int i = 0; i < rank; ++i) total *= sizes[i];
    return total;
  }
  // Its dtype, where it is one of those that onepass takes.
  std::optional<DType> known_type() const {
    const int32_t code = type_code();
    constexpr DType kTypes[] = {DType::float32, DType::bfloat16, DType::float16, DType::float64};
    static const int32_t codes[] = {torch_dtype(kTypes[0]), torch_dtype(kTypes[1]), torch_dtype(kTypes[2]),
                                    torch_dtype(kTypes[3])};
    for (int i = 0; i < 4; ++i) {
      if (code == codes[i]) return kTypes[i];
    }
    return std::nullopt;
  }
  DType type() const {
    if (const auto known = known_type()) return *known;
    return dtype_of(
        torch::stable::detail::to<ScalarType>(torch::stable::detail::from(type_code())));  // says what it is
  }
  int32_t type_code() const {
    int32_t code;
    return checked(aoti_torch_get_dtype(handle, &code)), code;
  }
  const void* data() const {
    const void* address;
    return checked(torch_get_const_data_ptr(handle, &address)), address;
  }
  void* mutable_data() const {
    void* address;
    return checked(torch_get_mutable_data_ptr(handle, &address)), address;
  }
};

// A second owner of a tensor, for those who take a Tensor.
inline Tensor shared(const Operand& tensor) {
  AtenTensorHandle made;
  checked(aoti_torch_new_tensor_handle(tensor.handle, &made));
  return Tensor(made);
}

// A new result that is not in the caches anyway comes from the system in huge pages, if it has them: of a page of 4 KB
// each first touch costs more than the arithmetic of its elements. Fewer are never larger than what was asked for.
constexpr int64_t kHugeLeast = 8 << 20, kHuge = 2 << 20;  // bytes

inline void in_huge_pages([[maybe_unused]] const Operand& made, [[maybe_unused]] DType type) {
#ifdef MADV_HUGEPAGE
  const int64_t bytes = made.numel() * size_of(type);
  if (bytes < kHugeLeast || made.device_type != aoti_torch_device_type_cpu()) return;
  const uintptr_t from = uintptr_t(made.mutable_data()), first = (from + kHuge - 1) / kHuge * kHuge;
  const uintptr_t end = (from + uintptr_t(bytes)) / kHuge * kHuge;
  if (first < end) madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE);  // a hint: it may fail
#endif
}

inline Owned empty_strided(int rank, const int64_t* sizes, const int64_t* strides, DType type, const Operand& like) {
  AtenTensorHandle made;
  checked(
      aoti_torch_empty_strided(rank, sizes, strides, torch_dtype(type), like.device_type, like.device_index, &made));
  return Owned(made);
}

inline Tensor empty_strided(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides, DType type,
                            const Tensor& like) {
  return Tensor(empty_strided(int(sizes.size()), sizes.data(), strides.data(), type, Operand(like.get())).release());
}

inline void contiguous_strides(int rank, const int64_t* sizes, int64_t* strides) {
  int64_t step = 1;
  for (int i = rank; i-- > 0;) {
    strides[i] = step;
    step *= sizes[i] > 1 ? sizes[i] : 1;
  }
}

inline std::vector<int64_t> contiguous_strides(const std::vector<int64_t>& sizes) {
  std::vector<int64_t> strides(sizes.size());
  contiguous_strides(int(sizes.size()), sizes.data(), strides.data());
  return strides;
}

// A view of `base` with other sizes and strides, as many as it has, at the same offset.
inline Tensor as_strided(const Tensor& base, const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides) {
  AtenTensorHandle view;
  checked(aoti_torch_as_strided(base.get(), sizes.data(), strides.data(), &view));
  return Tensor(view);
}

// Do the elements fill a piece of memory, in whatever order of the dims?
inline bool is_dense(const Operand& tensor) {
  const int64_t total = tensor.numel();
  for (int64_t step = 1; step < total;) {
    int dim = 0;
    while (dim < tensor.rank && (tensor.sizes[dim] < 2 || tensor.strides[dim] != step)) ++dim;
    if (dim == tensor.rank) return false;
    step *= tensor.sizes[dim];
  }
  return true;
}

// An uninitialised tensor as torch.empty_like makes it: the strides of `like` where it is dense, else torch's choice
// for them.
inline Owned empty_like(const Operand& like, DType type, bool contiguous) {
  if (contiguous || is_dense(like)) {  // by far the most frequent, and 1 us cheaper than the dispatcher's way
    return empty_strided(like.rank, like.sizes, like.strides, type, like);
  }
  AtenTensorHandle given;
  checked(aoti_torch_new_tensor_handle(like.handle, &given));  // the dispatcher takes it
  std::array<StableIValue, 6> stack{torch::stable::detail::from(given),
                                    torch::stable::detail::from(std::optional<ScalarType>(scalar_type_of(type))),
                                    torch::stable::detail::from(std::nullopt),
                                    torch::stable::detail::from(std::nullopt),
                                    torch::stable::detail::from(std::nullopt),
                                    torch::stable::detail::from(std::nullopt)};
  checked(torch_call_dispatcher("aten::empty_like", "", stack.data(), TORCH_ABI_VERSION));
  return Owned(torch::stable::detail::to<AtenTensorHandle>(stack[0]));
}

inline Owned cast(const Operand& input, DType type) {
  Owned made = empty_like(input, type, input.is_contiguous());
  checked(aoti_torch_copy_(made.get(), input.handle, 0));
  return made;
}

}  // namespace onepass
