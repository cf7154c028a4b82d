// patched.h: the calls of aten's operators that are computed by onepass while onepass.patch() is on: which are served,
// and how. A call is made of the arguments as the dispatcher has them on its stack, of which it takes nothing.
#pragma once

#include <atomic>

#include "operators.h"

namespace onepass::patched {

namespace stable = torch::stable::detail;

// What is served ------------------------------------------------------------------------------------------------------

// Why a call is left to torch, as a report says it with {0} for the first tensor; null where it is served.
using Reason = const char*;
constexpr Reason kArguments = "arguments that onepass does not take";  // most of which torch refuses, in its own words

// Only Python knows whether an engine serves a GPU. It is asked once a device.
inline bool has_engine(const Operand& x) {
  static std::atomic<uint64_t> served{0}, left{0};
  if (!x.is_cuda()) return true;
  const uint64_t bit = uint64_t(1) << (x.device_index & 63);
  if (served.load(std::memory_order_relaxed) & bit) return true;
  if (left.load(std::memory_order_relaxed) & bit) return false;
  AtenTensorHandle given;
  checked(aoti_torch_new_tensor_handle(x.handle, &given));  // the dispatcher takes it
  StableIValue stack[] = {stable::from(given)};
  checked(torch_call_dispatcher("onepass::_has_engine", "", stack, TORCH_ABI_VERSION));
  const bool answer = stable::to<bool>(stack[0]);
  (answer ? served : left).fetch_or(bit, std::memory_order_relaxed);
  return answer;
}

inline Reason refusal(const Operand& x, const std::optional<DType>& type, const int64_t* dims, int count) {
  if (!type) return "dtype {0.dtype}";
  const int64_t bound = x.rank ? x.rank : 1;
  for (int i = 0; i < count; ++i) {
    if (dims[i] < -bound || dims[i] >= bound) return kArguments;
    for (int j = 0; j < i; ++j) {
      if ((dims[i] - dims[j]) % bound == 0) return kArguments;
    }
  }
  if (!has_engine(x)) return "no native engine serves this {0.device.type} device";
  return nullptr;
}

// The operators -------------------------------------------------------------------------------------------------------

inline Operand tensor(StableIValue value) { return Operand(stable::to<AtenTensorHandle>(value)); }

inline Owned contiguous(const Operand& x, DType type) {
  int64_t strides[kMaxDims];
  contiguous_strides(x.rank, x.sizes, strides);
  Owned made = empty_strided(x.rank, x.sizes, strides, type, x);
  checked(aoti_torch_copy_(made.get(), x.handle, 0));
  return made;
}

// (Tensor self, int dim, bool half_to_float) of softmax and log_softmax, (Tensor self, int[1] dim, bool keepdim) of
// logsumexp; with a Tensor out behind them or without. Nothing on the stack is taken before the call is served.
template <Function function, bool kInto>
struct Forward {
  static constexpr int kTensors = 1;  // on the stack, which are not the result

  const StableIValue* stack;
  Operand x;
  std::optional<DType> type;
  bool option;
  int count = 1;
  int64_t dims[kMaxDims];

  explicit Forward(const StableIValue* given)
      : stack(given), x(tensor(given[0])), type(x.known_type()), option(stable::to<bool>(given[2])) {
    if constexpr (!reduces(function)) {
      dims[0] = stable::to<int64_t>(given[1]);
    } else {
      size_t size;
      checked(torch_list_size(list(), &size));
      count = int(size);
      for (int i = 0; i < count && i < kMaxDims; ++i) {
        StableIValue dim;
        checked(torch_list_get_item(list(), size_t(i), &dim));
        dims[i] = stable::to<int64_t>(dim);
      }
    }
  }

  Reason refusal() const {
    if (count == 0 || count > kMaxDims) return kArguments;
    if (widens() && !(x.is_cuda() && type && size_of(*type) == 2)) return kArguments;
    const Reason reason = patched::refusal(x, type, dims, count);
    if (reason || !kInto) return reason;
    const Operand y = tensor(stack[3]);
    if (!Shape(function, x, mask(), keepdim()).is_of(y) || y.known_type() != result_type() ||
        y.device_type != x.device_type || y.device_index != x.device_index) {
      return "out= of another shape, dtype or device than the result";
    }
    if (out_refusal(function, y, x)) return "out= that shares memory with the input or with itself";
    return nullptr;
  }

  AtenTensorHandle serve() const {
    std::optional<Owned> copy;
    if (gathers()) copy.emplace(contiguous(x, *type));
    const Operand from = copy ? Operand(copy->get()) : x;
    if constexpr (kInto) {
      forward_into(function, from, mask(), keepdim(), tensor(stack[3]));
      return stable::to<AtenTensorHandle>(stack[3]);
    } else {
      const Shape shape(function, x, mask(), keepdim());
      int64_t strides[kMaxDims];
      contiguous_strides(shape.rank, shape.sizes, strides);
      Owned out = empty_strided(shape.rank, shape.sizes, strides, result_type(), x);
      const Operand y(out.get());
      in_huge_pages(y, result_type());
      forward_into(function, from, mask(), keepdim(), y);
      return out.release();
    }
  }

  // Once it is served.
  void drop_list() const {
    if (reduces(function)) checked(torch_delete_list(list()));
  }

 private:
  Mask mask() const { return Mask(dims, count, x.rank); }
  bool keepdim() const { return reduces(function) && option; }
  bool widens() const { return !reduces(function) && option; }
  DType result_type() const { return widens() ? DType::float32 : *type; }
  StableListHandle list() const { return stable::to<StableListHandle>(stack[1]); }

  // Whether the call begins with a contiguous copy. On the CPU rows that lie flat are read as they are, in 0.4 to 0.7
  // of the time; of other layouts the copy is the quicker part, 0.35 to 0.55 of the time of reading them as they are.
  bool gathers() const {
    if (x.is_contiguous()) return false;
    if (x.is_cuda()) return true;
    if (kInto || reduces(function)) return false;
    return !(mask().only_last && x.strides[x.rank - 1] == 1);
  }
};

// (Tensor grad_output, Tensor output, int dim, ScalarType input_dtype) of softmax and log_softmax.
template <Function function>
struct Backward {
  static constexpr int kTensors = 2;

  const StableIValue* stack;
  Operand grad, y;
  std::optional<DType> type;
  int64_t dim;

  explicit Backward(const StableIValue* given)
      : stack(given),
        grad(tensor(given[0])),
        y(tensor(given[1])),
        type(y.known_type()),
        dim(stable::to<int64_t>(given[2])) {}

  Reason refusal() const {
    if (grad.type_code() != y.type_code() || grad.rank != y.rank ||
        !std::equal(y.sizes, y.sizes + y.rank, grad.sizes) || grad.device_type != y.device_type ||
        grad.device_index != y.device_index) {
      return kArguments;
    }
    return patched::refusal(y, type, &dim, 1);
  }

  AtenTensorHandle serve() const {
    std::optional<Owned> copy;
    if (!y.is_contiguous()) copy.emplace(contiguous(y, *type));
    const DType dx_type = dtype_of(stable::to<ScalarType>(stack[3]));
    return gradient(function, grad, copy ? Operand(copy->get()) : y, dim, dx_type).release();
  }

  void drop_list() const {}
};

}  // namespace onepass::patched
