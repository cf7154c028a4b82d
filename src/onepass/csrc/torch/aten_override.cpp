// aten_override.cpp: the kernels with which onepass computes aten's operators of the family while onepass.patch() is
// on.
//
// A kernel here is called below autograd, with the arguments of its aten operator, and gives a contiguous result as
// torch's does. The kernels are installed once and stay: the dispatcher replaces an entry by more than one store and
// has no lock for those who read it, so removing a kernel may crash its callers. A flag switches them on and off.
//
// While they are off, the operator's variant with an `out`, which is not overridden and ends in the same code, computes
// torch's own result. Calls that it does not take, or onepass does not, go to a private operator of the same arguments
// and the reason. Its kernel in Python counts the call and calls the kernel that was there before.
#include <atomic>

#include "../capi/c_api.h"
#include "aten_override.h"
#include "python_error.h"

namespace onepass {

namespace {

using aten::Backward, aten::Forward, aten::Reason;
using stable::StableLibrary;

enum Counted { kSoftmax, kLogSoftmax, kLogSumExp, kSoftmaxBackward, kLogSoftmaxBackward, kCounted };  // as in reports
std::atomic<int64_t> calls_computed[kCounted];
std::atomic<bool> is_on{false};
// Whether the kernels that ours override are torch's, of the CPU and of CUDA.
bool overrides_torch[2];

// A private operator, whose kernel is in Python.
struct PythonOperator {
  const char *name, *overload;
};

// The error of torch's own kernel in this thread; no type where it gave a result.
thread_local void* error_type = nullptr;
thread_local std::string error_text;

StableIValue call_python(const PythonOperator& op, Reason reason, const StableIValue* stack, uint64_t count) {
  StableIValue arguments[6] = {stable::from(int64_t(reason))};
  std::copy(stack, stack + count, arguments + 1);
  check_torch(torch_call_dispatcher(op.name, op.overload, arguments, TORCH_ABI_VERSION));
  if (void* type = std::exchange(error_type, nullptr)) {
    const OwnedTensor placeholder(stable::to<AtenTensorHandle>(arguments[0]));
    throw PythonError(type, error_text);
  }
  return arguments[0];
}

// The result of a call; or null and the reason why Python has to call torch's kernel.
template <class Call, Counted counted>
AtenTensorHandle compute(const Call& call, Reason& reason) {
  if (!is_on.load(std::memory_order_relaxed)) {
    reason = Reason::off;
    if constexpr (Call::kHasOutVariant) {
      if (overrides_torch[call.x.is_cuda()] && call.find_reason() == Reason::none) return call.compute_by_torch();
    }
    return nullptr;
  }
  reason = call.find_reason();
  if (reason == Reason::none && !aten::has_engine(call.x)) reason = Reason::engine;
  if (reason != Reason::none) return nullptr;
  const AtenTensorHandle result = call.compute();
  calls_computed[counted].fetch_add(1, std::memory_order_relaxed);
  return result;
}

template <class Call, Counted counted, const PythonOperator& op>
void kernel(StableIValue* stack, uint64_t count, uint64_t) {
  Reason reason;
  try {
    const Call call(stack);
    if (const AtenTensorHandle result = compute<Call, counted>(call, reason)) {
      call.free_arguments();
      for (int i = 0; i < Call::kTensors; ++i) const OwnedTensor argument(stable::to<AtenTensorHandle>(stack[i]));
      stack[0] = stable::from(result);
      return;
    }
  } catch (const std::exception&) {  // such as out of memory: torch raises what its users catch
    reason = Reason::error;
  }
  stack[0] = call_python(op, reason, stack, count);
}

constexpr PythonOperator kTorchSoftmax = {"onepass::_torch_softmax", ""},
                         kTorchSoftmaxOut = {"onepass::_torch_softmax", "int_out"},
                         kTorchLogSoftmax = {"onepass::_torch_log_softmax", ""},
                         kTorchLogSoftmaxOut = {"onepass::_torch_log_softmax", "int_out"},
                         kTorchLogSumExp = {"onepass::_torch_logsumexp", ""},
                         kTorchSoftmaxBackward = {"onepass::_torch_softmax_backward_data", ""},
                         kTorchLogSoftmaxBackward = {"onepass::_torch_log_softmax_backward_data", ""};

void install(StableLibrary& library) {
  constexpr Function softmax = Function::softmax, log_softmax = Function::log_softmax;
  library.impl("_softmax", kernel<Forward<softmax, false>, kSoftmax, kTorchSoftmax>);
  library.impl("softmax.int_out", kernel<Forward<softmax, true>, kSoftmax, kTorchSoftmaxOut>);
  library.impl("_log_softmax", kernel<Forward<log_softmax, false>, kLogSoftmax, kTorchLogSoftmax>);
  library.impl("log_softmax.int_out", kernel<Forward<log_softmax, true>, kLogSoftmax, kTorchLogSoftmaxOut>);
  library.impl("logsumexp", kernel<Forward<Function::logsumexp, false>, kLogSumExp, kTorchLogSumExp>);
  library.impl("_softmax_backward_data", kernel<Backward<softmax>, kSoftmaxBackward, kTorchSoftmaxBackward>);
  library.impl("_log_softmax_backward_data",
               kernel<Backward<log_softmax>, kLogSoftmaxBackward, kTorchLogSoftmaxBackward>);
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

// Installs the kernels of the CPU and, where `cuda`, of CUDA; once in a process. The others tell whether the kernels
// that were there are torch's.
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

// Has onepass compute the calls from now on, or torch.
ONEPASS_API void onepass_patch_switch(bool to) { onepass::is_on = to; }

// How many calls of each function onepass computed since the start of the process.
ONEPASS_API void onepass_patch_served(int64_t* counts) {
  for (int i = 0; i < onepass::kCounted; ++i) counts[i] = onepass::calls_computed[i].load(std::memory_order_relaxed);
}

// Counts one more call of a function, which Python computed.
ONEPASS_API void onepass_patch_count(int function) { ++onepass::calls_computed[function]; }

// Has the kernel of this thread that called torch's own raise its error: a Python type, which must live on.
ONEPASS_API void onepass_patch_raised(void* type, const char* words) {
  onepass::error_type = type;
  onepass::error_text = words;
}
