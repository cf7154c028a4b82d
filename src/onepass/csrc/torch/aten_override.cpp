// aten_override.cpp: the kernels by which onepass computes aten's softmax operators while onepass.patch() is on.
//
// A kernel here is called below autograd, with the arguments of its aten operator. It returns a contiguous result, as
// torch does. Kernels are installed once and never removed: the dispatcher replaces an entry by more than one store,
// without a lock for readers, so removing a kernel may crash its callers. A flag switches the kernels on and off.
//
// While they are off, a kernel calls the `out` variant of its operator, which is not overridden, ends in the same code
// and so computes torch's own result. A call that the variant or onepass does not take goes to a private operator, with
// the same arguments and the reason. The private operator's kernel is in Python: it counts the call and calls the
// kernel that was there before.
#include <atomic>
#include <exception>

#include "../capi/c_api.h"
#include "operators.h"

// A C function of libtorch returns an error code: that the error was an IndexError, for example, is lost.
// libtorch_python has an exception class for errors whose thrower chooses the Python type. It is recognised by its
// name, and read by two virtual functions. Our class has both the name and the functions, so nothing is linked and no
// member is shared. A torch without such a class catches the std::exception that ours also is, and raises RuntimeError
// with the same words.
namespace torch {

struct PyTorchError : std::exception {
  virtual void* python_type() = 0;
};

}  // namespace torch

namespace onepass {

namespace {

using stable::StableLibrary;

// Which calls are taken -----------------------------------------------------------------------------------------------

// Why torch computes a call. _REASONS in Python has the same numbers.
enum class Reason : int64_t { off, arguments, dtype, engine, out, memory, error, none };

// Whether an engine serves the tensor's device. For a GPU only Python knows this, and is asked once per device.
bool has_engine(const TensorRef& x) {
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

Reason find_reason(const TensorRef& x, const std::optional<DType>& type, const int64_t* dims, int count) {
  if (!type) return Reason::dtype;
  if (x.rank > kMaxDims) return Reason::error;  // before anything is written to an array of kMaxDims
  const int64_t bound = x.rank ? x.rank : 1;
  for (int i = 0; i < count; ++i) {
    if (dims[i] < -bound || dims[i] >= bound) return Reason::arguments;
    for (int j = 0; j < i; ++j) {
      if ((dims[i] - dims[j]) % bound == 0) return Reason::arguments;
    }
  }
  return Reason::none;
}

// The functions whose calls are counted, in the order of the reports.
enum Counted { kSoftmax, kLogSoftmax, kLogSumExp, kSoftmaxBackward, kLogSoftmaxBackward, kCountedCalls };

// Helpers -------------------------------------------------------------------------------------------------------------

TensorRef tensor_of(StableIValue value) { return TensorRef(stable::to<AtenTensorHandle>(value)); }

OwnedTensor copy_contiguous(const TensorRef& x, DType type) {
  OwnedTensor copy = empty_contiguous(x.rank, x.sizes, type, x);
  check_torch(aoti_torch_copy_(copy.get(), x.handle, 0));
  return copy;
}

// Calls the variant `out` of an operator of aten, whose last argument is the result. The operator takes ownership of
// the tensors and lists among `arguments`.
template <size_t kCount>
AtenTensorHandle call_out_variant(const std::string& name, StableIValue (&arguments)[kCount], OwnedTensor out) {
  arguments[kCount - 1] = stable::from(new_reference(TensorRef(out.get())));
  check_torch(torch_call_dispatcher(name.c_str(), "out", arguments, TORCH_ABI_VERSION));
  const OwnedTensor same(stable::to<AtenTensorHandle>(arguments[0]));
  return out.release();
}

// The calls -----------------------------------------------------------------------------------------------------------

// The members of a call that `kernel` needs, read from the arguments on the dispatcher's stack. The call takes
// ownership of no argument. The arguments are
//   (Tensor self, int dim, bool half_to_float) of softmax and log_softmax,
//   (Tensor self, int dim, ScalarType? dtype, Tensor out) of the same with `out`, and
//   (Tensor self, int[1] dim, bool keepdim) of logsumexp.
template <Function function, bool kHasOut>
struct Forward {
  static constexpr int kTensors = 1;  // on the stack, besides the result
  static constexpr Counted kCounted = function == Function::softmax       ? kSoftmax
                                      : function == Function::log_softmax ? kLogSoftmax
                                                                          : kLogSumExp;
  static constexpr const char* kOverload = kHasOut ? "int_out" : "";
  static std::string name() { return name_of(function); }
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
      } else if (!kHasOut && stable::to<bool>(stack[2])) {  // torch widens only float16, and only on CUDA
        const bool widens = x.is_cuda() && type == DType::float16;
        result_type = widens ? std::optional(DType::float32) : std::nullopt;
      }
    }
  }

  Reason find_reason() const {
    if (count == 0 || count > kMaxDims) return Reason::arguments;
    const bool widens = type && size_of(*type) == 2 && result_type == DType::float32;
    if (result_type != type && !widens) return Reason::arguments;
    const Reason reason = onepass::find_reason(x, type, dims, count);
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

  // Computes torch's own result, for a call that onepass could take.
  AtenTensorHandle compute_by_torch() const {
    StableIValue arguments[] = {stable::from(new_reference(x)), stack[1], stack[2], 0};
    if constexpr (is_reduction(function)) {
      StableListHandle copy;
      check_torch(torch_new_list_reserve_size(size_t(count), &copy));
      for (int i = 0; i < count; ++i) check_torch(torch_list_push_back(copy, stable::from(dims[i])));
      arguments[1] = stable::from(copy);
    }
    static const std::string aten = (is_reduction(function) ? "aten::" : "aten::_") + name();
    return call_out_variant(aten, arguments, empty_result());
  }

  // Frees the arguments that own memory and are not tensors. Called once there is a result.
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

  // Whether the call first copies the input to a contiguous tensor. On the CPU, rows of unit stride are read in place,
  // which takes 0.4 to 0.7 of the time. For other layouts the copy pays: the call takes 0.35 to 0.55 of the time
  // without a copy.
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
  static constexpr Counted kCounted = function == Function::softmax ? kSoftmaxBackward : kLogSoftmaxBackward;
  static constexpr const char* kOverload = "";
  static std::string name() { return name_of(function) + std::string("_backward_data"); }
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
    // The only other input_dtype that torch takes is this one, on CUDA. On a CPU it may not even look at the argument.
    const bool narrows = x.is_cuda() && type == DType::float32 && result_type == DType::float16;
    if (type && result_type != type && !narrows) return Reason::arguments;
    return onepass::find_reason(x, type, &dim, 1);
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
    static const std::string aten = "aten::_" + name();
    return call_out_variant(aten, arguments, empty_contiguous(x.rank, x.sizes, *result_type, x));
  }

  void free_arguments() const {}
};

// The kernels ---------------------------------------------------------------------------------------------------------

class PythonError final : public torch::PyTorchError {
 public:
  PythonError(void* type, std::string words) : type_(type), words_(std::move(words)) {}

  void* python_type() override { return type_; }
  const char* what() const noexcept override { return words_.c_str(); }

 private:
  void* type_;
  std::string words_;
};

std::atomic<int64_t> calls_computed[kCountedCalls];
std::atomic<bool> is_on{false};
// Whether the kernels that ours override are torch's own: on the CPU, and on CUDA.
bool overrides_torch[2];

// The error that torch's own kernel raised in this thread. The type is null if it returned a result.
thread_local void* error_type = nullptr;
thread_local std::string error_text;

// Calls the private operator that corresponds to an operator of aten. Its kernel is in Python.
StableIValue call_python(const std::string& name, const char* overload, Reason reason, const StableIValue* stack,
                         uint64_t count) {
  StableIValue arguments[6] = {stable::from(int64_t(reason))};
  std::copy(stack, stack + count, arguments + 1);
  check_torch(torch_call_dispatcher(("onepass::_torch_" + name).c_str(), overload, arguments, TORCH_ABI_VERSION));
  if (void* type = std::exchange(error_type, nullptr)) {
    const OwnedTensor placeholder(stable::to<AtenTensorHandle>(arguments[0]));
    throw PythonError(type, error_text);
  }
  return arguments[0];
}

// The result of a call; or null and the reason why Python has to call torch's kernel.
template <class Call>
AtenTensorHandle compute(const Call& call, Reason& reason) {
  if (!is_on.load(std::memory_order_relaxed)) {
    reason = Reason::off;
    if constexpr (Call::kHasOutVariant) {
      if (overrides_torch[call.x.is_cuda()] && call.find_reason() == Reason::none) return call.compute_by_torch();
    }
    return nullptr;
  }
  reason = call.find_reason();
  if (reason == Reason::none && !has_engine(call.x)) reason = Reason::engine;
  if (reason != Reason::none) return nullptr;
  const AtenTensorHandle result = call.compute();
  calls_computed[Call::kCounted].fetch_add(1, std::memory_order_relaxed);
  return result;
}

template <class Call>
void kernel(StableIValue* stack, uint64_t count, uint64_t) {
  Reason reason;
  try {
    const Call call(stack);
    if (const AtenTensorHandle result = onepass::compute(call, reason)) {
      call.free_arguments();
      for (int i = 0; i < Call::kTensors; ++i) const OwnedTensor argument(stable::to<AtenTensorHandle>(stack[i]));
      stack[0] = stable::from(result);
      return;
    }
  } catch (const std::exception&) {  // out of memory, for example: torch then raises what its users catch
    reason = Reason::error;
  }
  stack[0] = call_python(Call::name(), Call::kOverload, reason, stack, count);
}

void install(StableLibrary& library) {
  constexpr Function softmax = Function::softmax, log_softmax = Function::log_softmax;
  library.impl("_softmax", kernel<Forward<softmax, false>>);
  library.impl("softmax.int_out", kernel<Forward<softmax, true>>);
  library.impl("_log_softmax", kernel<Forward<log_softmax, false>>);
  library.impl("log_softmax.int_out", kernel<Forward<log_softmax, true>>);
  library.impl("logsumexp", kernel<Forward<Function::logsumexp, false>>);
  library.impl("_softmax_backward_data", kernel<Backward<softmax>>);
  library.impl("_log_softmax_backward_data", kernel<Backward<log_softmax>>);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(onepass, m) {
  for (const std::string name : {"_torch_softmax", "_torch_log_softmax"}) {
    const std::string arguments = "(int reason, Tensor self, int dim, ";
    m.def((name + arguments + "bool half_to_float) -> Tensor").c_str());
    m.def((name + ".int_out" + arguments + "ScalarType? dtype, *, Tensor(a!) out) -> Tensor(a!)").c_str());
    m.def((name + "_backward_data(int reason, Tensor grad_output, Tensor output, int dim, ScalarType input_dtype) -> "
                  "Tensor")
              .c_str());
  }
  m.def("_torch_logsumexp(int reason, Tensor self, int[1] dim, bool keepdim) -> Tensor");
  m.def("_has_engine(Tensor x) -> bool");
}

}  // namespace onepass

// Installs the kernels for the CPU and, with `cuda`, for CUDA; once per process. The other flags say whether the
// overridden kernels are torch's own.
ONEPASS_API int onepass_patch_install(bool cuda, bool torch_on_cpu, bool torch_on_cuda, char* text, int64_t size) {
  using namespace onepass;
  return return_text(text, size, [&] {
    overrides_torch[0] = torch_on_cpu, overrides_torch[1] = torch_on_cuda;
    for (int i = 0; i < 1 + cuda; ++i) {  // never deleted
      install(*new StableLibrary(StableLibrary::Kind::IMPL, "aten", i ? "CUDA" : "CPU", __FILE__, __LINE__));
    }
    return std::string();
  });
}

// From now on, onepass (true) or torch (false) computes the calls.
ONEPASS_API void onepass_patch_switch(bool to) { onepass::is_on = to; }

// How many calls of each function onepass has computed since the start of the process.
ONEPASS_API void onepass_patch_served(int64_t* counts) {
  for (int i = 0; i < onepass::kCountedCalls; ++i)
    counts[i] = onepass::calls_computed[i].load(std::memory_order_relaxed);
}

// Counts one more call of a function, one that was computed from Python.
ONEPASS_API void onepass_patch_count(int function) { ++onepass::calls_computed[function]; }

// Makes the kernel that called torch's own in this thread raise this error. `type`: a Python type, which must stay
// alive.
ONEPASS_API void onepass_patch_raised(void* type, const char* words) {
  onepass::error_type = type;
  onepass::error_text = words;
}
