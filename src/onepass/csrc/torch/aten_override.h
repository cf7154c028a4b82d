// aten_override.h: calls of aten's operators that onepass computes while onepass.patch() is on: which it takes, how it
// computes them, and how torch computes the same calls while the patch is off. A call is made of the arguments on the
// dispatcher's stack, and takes ownership of none of them.
#pragma once

#include <atomic>

#include "operators.h"

namespace onepass::aten {

// Which calls are taken -----------------------------------------------------------------------------------------------

// Why torch computes a call, as _REASONS in Python numbers it.
enum class Reason : int64_t { off, arguments, dtype, engine, out, memory, error, none };

// Whether an engine serves the tensor's device. Only Python knows that of a GPU, and is asked once per device.
inline bool has_engine(const TensorRef& x) {
  static std::atomic<uint64_t> with{0}, without{0};
  if (!x.is_cuda()) return true;
  const uint64_t bit = uint64_t(1) << (x.device_index & 63);
  if (with.load(std::memory_order_relaxed) & bit) return true;
  if (without.load(std::memory_order_relaxed) & bit) return false;
  StableIValue stack[] = {stable::from(new_reference(x))};
  check_torch(torch_call_dispatcher("onepass::_has_engine", "", stack, TORCH_ABI_VERSION));
  const bool answer = stable::to<bool>(stack[0]);
  (answer ? with : without).fetch_or(bit, std::memory_order_relaxed);
  return answer;
}

inline Reason find_reason(const TensorRef& x, const std::optional<DType>& type, const int64_t* dims, int count) {
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

// Helpers -------------------------------------------------------------------------------------------------------------

inline TensorRef tensor_of(StableIValue value) { return TensorRef(stable::to<AtenTensorHandle>(value)); }

inline std::optional<DType> dtype_or_none(ScalarType type) {
  for (int i = 0; i < 4; ++i) {
    if (scalar_type_of(DType(i)) == type) return DType(i);
  }
  return std::nullopt;
}

inline OwnedTensor copy_contiguous(const TensorRef& x, DType type) {
  OwnedTensor copy = empty_contiguous(x.rank, x.sizes, type, x);
  check_torch(aoti_torch_copy_(copy.get(), x.handle, 0));
  return copy;
}

// Calls the variant `out` of an operator of aten, whose last argument is the result. The operator takes ownership of
// the tensors and lists among `arguments`.
template <size_t kCount>
AtenTensorHandle call_out_variant(const char* name, StableIValue (&arguments)[kCount], OwnedTensor out) {
  arguments[kCount - 1] = stable::from(new_reference(TensorRef(out.get())));
  check_torch(torch_call_dispatcher(name, "out", arguments, TORCH_ABI_VERSION));
  const OwnedTensor same(stable::to<AtenTensorHandle>(arguments[0]));
  return out.release();
}

// The calls -----------------------------------------------------------------------------------------------------------

// The arguments are
//   (Tensor self, int dim, bool half_to_float) of softmax and log_softmax,
//   (Tensor self, int dim, ScalarType? dtype, Tensor out) of the same with `out`, and
//   (Tensor self, int[1] dim, bool keepdim) of logsumexp.
template <Function function, bool kHasOut>
struct Forward {
  static constexpr int kTensors = 1;  // on the stack, besides the result
  static constexpr bool kHasOutVariant = !kHasOut;

  const StableIValue* stack;
  TensorRef x;
  std::optional<DType> type, result_type;
  bool keepdim = false;
  int count = 1;
  int64_t dims[kMaxDims];

  explicit Forward(const StableIValue* arguments)
      : stack(arguments), x(tensor_of(stack[0])), type(x.maybe_dtype()), result_type(type) {
    if constexpr (is_reduction(function)) {
      keepdim = stable::to<bool>(stack[2]);
      size_t size;
      check_torch(torch_list_size(list(), &size));
      count = int(size);
      for (int i = 0; i < count && i < kMaxDims; ++i) {
        StableIValue dim;
        check_torch(torch_list_get_item(list(), size_t(i), &dim));
        dims[i] = stable::to<int64_t>(dim);
      }
    } else {
      dims[0] = stable::to<int64_t>(stack[1]);
      if (kHasOut && stack[2] != stable::from(std::nullopt)) {
        result_type = dtype_or_none(stable::to<ScalarType>(*stable::to<StableIValue*>(stack[2])));
      } else if (!kHasOut && stable::to<bool>(stack[2])) {  // torch widens float16 alone, and on CUDA alone
        const bool widens = x.is_cuda() && type == DType::float16;
        result_type = widens ? std::optional(DType::float32) : std::nullopt;
      }
    }
  }

  Reason find_reason() const {
    if (count == 0 || count > kMaxDims) return Reason::arguments;
    const bool widens = type && size_of(*type) == 2 && result_type == DType::float32;
    if (result_type != type && !widens) return Reason::arguments;
    const Reason reason = aten::find_reason(x, type, dims, count);
    if (reason != Reason::none || !kHasOut) return reason;
    const TensorRef y = tensor_of(stack[3]);
    const ResultShape shape(function, x, reduce_dims(), false);
    if (!y.has_sizes(shape.sizes, shape.rank) || y.maybe_dtype() != result_type || !y.is_on_device_of(x)) {
      return Reason::out;
    }
    return find_overlap(function, y, x) ? Reason::memory : Reason::none;
  }

  AtenTensorHandle compute() const {
    std::optional<OwnedTensor> copy;
    if (begins_with_copy()) copy.emplace(copy_contiguous(x, *type));
    const TensorRef from = copy ? TensorRef(copy->get()) : x;
    if constexpr (kHasOut) {
      compute_into(function, from, reduce_dims(), false, tensor_of(stack[3]));
      return stable::to<AtenTensorHandle>(stack[3]);
    } else {
      OwnedTensor out = empty_result();
      const TensorRef y(out.get());
      advise_huge_pages(y, *result_type);
      compute_into(function, from, reduce_dims(), keepdim, y);
      return out.release();
    }
  }

  // torch's own result, of a call that onepass would take.
  AtenTensorHandle compute_by_torch() const {
    StableIValue arguments[] = {stable::from(new_reference(x)), stack[1], stack[2], 0};
    if constexpr (is_reduction(function)) {
      StableListHandle copy;
      check_torch(torch_new_list_reserve_size(size_t(count), &copy));
      for (int i = 0; i < count; ++i) check_torch(torch_list_push_back(copy, stable::from(dims[i])));
      arguments[1] = stable::from(copy);
    }
    static const std::string name =
        std::string(is_reduction(function) ? "aten::" : "aten::_") + traits_of(function).name;
    return call_out_variant(name.c_str(), arguments, empty_result());
  }

  // Once there is a result: frees the arguments that are no tensors, but have memory of their own.
  void free_arguments() const {
    if constexpr (is_reduction(function)) check_torch(torch_delete_list(list()));
    if constexpr (kHasOut) stable::to<std::optional<ScalarType>>(stack[2]);
  }

 private:
  ReduceDims reduce_dims() const { return ReduceDims(dims, count, x.rank); }
  StableListHandle list() const { return stable::to<StableListHandle>(stack[1]); }

  OwnedTensor empty_result() const {
    const ResultShape shape(function, x, reduce_dims(), keepdim);
    return empty_contiguous(shape.rank, shape.sizes, *result_type, x);
  }

  // Whether the call begins with a contiguous copy. On the CPU rows that lie flat are read as they are, in 0.4 to 0.7
  // of the time. For other layouts the copy pays: it takes 0.35 to 0.55 of the time of reading them as they are.
  bool begins_with_copy() const {
    if (x.is_contiguous()) return false;
    if (x.is_cuda()) return true;
    if (kHasOut || is_reduction(function)) return false;
    return !(reduce_dims().is_last && x.strides[x.rank - 1] == 1);
  }
};

// (Tensor grad_output, Tensor output, int dim, ScalarType input_dtype) of softmax and log_softmax.
template <Function function>
struct Backward {
  static constexpr int kTensors = 2;
  static constexpr bool kHasOutVariant = true;

  const StableIValue* stack;
  TensorRef grad, x;  // x: the forward's result
  std::optional<DType> type, result_type;
  int64_t dim;

  explicit Backward(const StableIValue* arguments)
      : stack(arguments),
        grad(tensor_of(stack[0])),
        x(tensor_of(stack[1])),
        type(x.maybe_dtype()),
        result_type(dtype_or_none(stable::to<ScalarType>(stack[3]))),
        dim(stable::to<int64_t>(stack[2])) {}

  Reason find_reason() const {
    if (grad.dtype_code() != x.dtype_code() || !grad.has_sizes(x.sizes, x.rank) || !x.is_on_device_of(grad)) {
      return Reason::arguments;
    }
    // torch takes another dtype of the input on CUDA alone, and none but this; on a CPU it may not even look at it.
    const bool narrows = x.is_cuda() && type == DType::float32 && result_type == DType::float16;
    if (type && result_type != type && !narrows) return Reason::arguments;
    return aten::find_reason(x, type, &dim, 1);
  }

  AtenTensorHandle compute() const {
    std::optional<OwnedTensor> copy;
    if (!x.is_contiguous()) copy.emplace(copy_contiguous(x, *type));
    const TensorRef y = copy ? TensorRef(copy->get()) : x;
    return compute_softmax_backward(function, grad, y, dim, *result_type).release();
  }

  AtenTensorHandle compute_by_torch() const {
    StableIValue arguments[] = {stable::from(new_reference(grad)), stable::from(new_reference(x)), stack[2], stack[3],
                                0};
    static const std::string name = std::string("aten::_") + traits_of(function).name + "_backward_data";
    return call_out_variant(name.c_str(), arguments, empty_contiguous(x.rank, x.sizes, *result_type, x));
  }

  void free_arguments() const {}
};

}  // namespace onepass::aten
