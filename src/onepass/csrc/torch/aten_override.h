// aten_override.h: the calls of aten's operators that are computed by onepass while onepass.patch() is on: which are
// served, and how; and how torch computes the same calls while it is off. A call is made of the arguments as the
// dispatcher has them on its stack, of which it takes nothing.
#pragma once

#include <atomic>

#include "operators.h"

namespace onepass::patched {

namespace stable = torch::stable::detail;

// What is served ------------------------------------------------------------------------------------------------------

// Why torch computes a call, by its number in _REASONS of patching.py.
enum class Reason : int64_t { off, arguments, dtype, engine, out, memory, error, none };

// Only Python knows whether an engine serves a GPU. It is asked once a device.
inline bool has_engine(const Operand& x) {
  static std::atomic<uint64_t> with{0}, without{0};
  if (!x.is_cuda()) return true;
  const uint64_t bit = uint64_t(1) << (x.device_index & 63);
  if (with.load(std::memory_order_relaxed) & bit) return true;
  if (without.load(std::memory_order_relaxed) & bit) return false;
  AtenTensorHandle given;
  checked(aoti_torch_new_tensor_handle(x.handle, &given));  // the dispatcher takes it
  StableIValue stack[] = {stable::from(given)};
  checked(torch_call_dispatcher("onepass::_has_engine", "", stack, TORCH_ABI_VERSION));
  const bool answer = stable::to<bool>(stack[0]);
  (answer ? with : without).fetch_or(bit, std::memory_order_relaxed);
  return answer;
}

inline Reason refusal(const Operand& x, const std::optional<DType>& type, const int64_t* dims, int count) {
  if (!type) return Reason::dtype;
  if (x.rank > kMaxDims) return Reason::error;  // before anything is put into an array of so many
  const int64_t bound = x.rank ? x.rank : 1;
  for (int i = 0; i < count; ++i) {
    if (dims[i] < -bound || dims[i] >= bound) return Reason::arguments;
    for (int j = 0; j < i; ++j) {
      if ((dims[i] - dims[j]) % bound == 0) return Reason::arguments;
    }
  }
  return Reason::none;
}

// The operators -------------------------------------------------------------------------------------------------------

inline Operand tensor(StableIValue value) { return Operand(stable::to<AtenTensorHandle>(value)); }

inline std::optional<DType> known_type(ScalarType type) {
  for (int i = 0; i < 4; ++i) {
    if (scalar_type_of(DType(i)) == type) return DType(i);
  }
  return std::nullopt;
}

inline Owned contiguous(const Operand& x, DType type) {
  int64_t strides[kMaxDims];
  contiguous_strides(x.rank, x.sizes, strides);
  Owned made = empty_strided(x.rank, x.sizes, strides, type, x);
  checked(aoti_torch_copy_(made.get(), x.handle, 0));
  return made;
}

inline AtenTensorHandle another_handle(const Operand& tensor) {
  AtenTensorHandle made;
  checked(aoti_torch_new_tensor_handle(tensor.handle, &made));
  return made;
}

// Has an operator of aten that gives its result in its last argument compute it into `out`; the stack's tensors and
// lists are the operator's.
template <size_t kCount>
AtenTensorHandle computed_into(const char* name, const char* overload, StableIValue (&given)[kCount], Owned out) {
  given[kCount - 1] = stable::from(another_handle(Operand(out.get())));
  checked(torch_call_dispatcher(name, overload, given, TORCH_ABI_VERSION));
  const Owned same(stable::to<AtenTensorHandle>(given[0]));
  return out.release();
}

// The calls below are made of
//   (Tensor self, int dim, bool half_to_float) of softmax and log_softmax,
//   (Tensor self, int dim, ScalarType? dtype, Tensor out) of the same into an `out`, and
//   (Tensor self, int[1] dim, bool keepdim) of logsumexp.
// Nothing on the stack is taken before there is a result.
template <Function function, bool kInto>
struct Forward {
  static constexpr int kTensors = 1;  // on the stack, which are not the result
  static constexpr bool kHasTorchs = !kInto;

  const StableIValue* stack;
  Operand x;
  std::optional<DType> type, result_type;
  bool keepdim = false;
  int count = 1;
  int64_t dims[kMaxDims];

  explicit Forward(const StableIValue* given) : stack(given), x(tensor(given[0])), type(x.known_type()) {
    result_type = type;
    if constexpr (reduces(function)) {
      keepdim = stable::to<bool>(given[2]);
      size_t size;
      checked(torch_list_size(list(), &size));
      count = int(size);
      for (int i = 0; i < count && i < kMaxDims; ++i) {
        StableIValue dim;
        checked(torch_list_get_item(list(), size_t(i), &dim));
        dims[i] = stable::to<int64_t>(dim);
      }
    } else {
      dims[0] = stable::to<int64_t>(given[1]);
      if (kInto && given[2] != stable::from(std::nullopt)) {
        result_type = known_type(stable::to<ScalarType>(*stable::to<StableIValue*>(given[2])));
      } else if (!kInto && stable::to<bool>(given[2])) {  // torch knows of one type that is widened, and on CUDA alone
        if (x.is_cuda() && type == DType::float16) {
          result_type = DType::float32;
        } else {
          result_type = std::nullopt;
        }
      }
    }
  }

  Reason refusal() const {
    if (count == 0 || count > kMaxDims) return Reason::arguments;
    if (result_type != type && !widens()) return Reason::arguments;
    const Reason reason = patched::refusal(x, type, dims, count);
    if (reason != Reason::none || !kInto) return reason;
    const Operand y = tensor(stack[3]);
    if (!Shape(function, x, mask(), false).is_of(y) || y.known_type() != result_type ||
        y.device_type != x.device_type || y.device_index != x.device_index) {
      return Reason::out;
    }
    return out_refusal(function, y, x) ? Reason::memory : Reason::none;
  }

  AtenTensorHandle serve() const {
    std::optional<Owned> copy;
    if (gathers()) copy.emplace(contiguous(x, *type));
    const Operand from = copy ? Operand(copy->get()) : x;
    if constexpr (kInto) {
      forward_into(function, from, mask(), false, tensor(stack[3]));
      return stable::to<AtenTensorHandle>(stack[3]);
    } else {
      Owned out = made();
      const Operand y(out.get());
      in_huge_pages(y, *result_type);
      forward_into(function, from, mask(), keepdim, y);
      return out.release();
    }
  }

  // torch's own result of a call that would be served.
  AtenTensorHandle torchs() const {
    StableIValue given[] = {stable::from(another_handle(x)), stack[1], stack[2], 0};
    if constexpr (reduces(function)) {
      StableListHandle copy;
      checked(torch_new_list_reserve_size(size_t(count), &copy));
      for (int i = 0; i < count; ++i) checked(torch_list_push_back(copy, stable::from(dims[i])));
      given[1] = stable::from(copy);
    }
    constexpr const char* kNames[] = {"aten::_softmax", "aten::_log_softmax", "", "aten::logsumexp"};
    return computed_into(kNames[int(function)], "out", given, made());
  }

  // Once there is a result: what of the stack is no tensor, but has memory of its own.
  void drop_others() const {
    if constexpr (reduces(function)) checked(torch_delete_list(list()));
    if constexpr (kInto) stable::to<std::optional<ScalarType>>(stack[2]);
  }

 private:
  Mask mask() const { return Mask(dims, count, x.rank); }
  StableListHandle list() const { return stable::to<StableListHandle>(stack[1]); }

  bool widens() const { return type && size_of(*type) == 2 && result_type == DType::float32; }

  Owned made() const {
    const Shape shape(function, x, mask(), keepdim);
    int64_t strides[kMaxDims];
    contiguous_strides(shape.rank, shape.sizes, strides);
    return empty_strided(shape.rank, shape.sizes, strides, *result_type, x);
  }

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
  static constexpr bool kHasTorchs = true;

  const StableIValue* stack;
  Operand grad, x;  // x: the forward's result
  std::optional<DType> type, result_type;
  int64_t dim;

  explicit Backward(const StableIValue* given)
      : stack(given),
        grad(tensor(given[0])),
        x(tensor(given[1])),
        type(x.known_type()),
        result_type(known_type(stable::to<ScalarType>(given[3]))),
        dim(stable::to<int64_t>(given[2])) {}

  Reason refusal() const {
    if (grad.type_code() != x.type_code() || grad.rank != x.rank ||
        !std::equal(x.sizes, x.sizes + x.rank, grad.sizes) || grad.device_type != x.device_type ||
        grad.device_index != x.device_index) {
      return Reason::arguments;
    }
    // torch takes another dtype of the input on CUDA alone, and none but this; on a CPU it may not even look at it.
    const bool narrows = x.is_cuda() && type == DType::float32 && result_type == DType::float16;
    if (type && result_type != type && !narrows) return Reason::arguments;
    return patched::refusal(x, type, &dim, 1);
  }

  AtenTensorHandle serve() const {
    std::optional<Owned> copy;
    if (!x.is_contiguous()) copy.emplace(contiguous(x, *type));
    return gradient(function, grad, copy ? Operand(copy->get()) : x, dim, *result_type).release();
  }

  AtenTensorHandle torchs() const {
    StableIValue given[] = {stable::from(another_handle(grad)), stable::from(another_handle(x)), stack[2], stack[3], 0};
    int64_t strides[kMaxDims];
    contiguous_strides(x.rank, x.sizes, strides);
    const bool log = function == Function::log_softmax;
    return computed_into(log ? "aten::_log_softmax_backward_data" : "aten::_softmax_backward_data", "out", given,
                         empty_strided(x.rank, x.sizes, strides, *result_type, x));
  }

  void drop_others() const {}
};

}  // namespace onepass::patched
