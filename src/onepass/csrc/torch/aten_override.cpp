// aten_override.cpp: aten's operators of the family, computed by onepass while onepass.patch() is on (patching.py).
//
// A kernel here is called below autograd, with the arguments of its aten operator, and gives a contiguous result as
// torch's does. The kernels are installed once and stay: the dispatcher replaces an entry by more than one store and
// has no lock for those who read it, so a kernel that is taken away may crash its callers. On and off are a flag.
//
// While it is off, torch's own result is asked of the operator's variant with an `out`, which is not overridden and
// ends in the same code. What that does not do, or what is not served, goes to a private operator of the same arguments
// and the reason, whose kernel in Python (patching.py) counts the call and calls the kernel that was there before.
#include <atomic>

#include "../capi/c_api.h"
#include "aten_override.h"
#include "python_error.h"

namespace onepass {

namespace {

using patched::Backward, patched::Forward, patched::Reason;
namespace stable = torch::stable::detail;
using stable::StableLibrary;

enum Counted { kSoftmax, kLogSoftmax, kLogSumExp, kSoftmaxBackward, kLogSoftmaxBackward, kCounted };  // as in reports
std::atomic<int64_t> served[kCounted];
std::atomic<bool> on{false};
// Whether the kernels that ours override are torch's, of the CPU and of CUDA.
bool overrides_torchs[2];

// A private operator.
struct Private {
  const char *name, *overload;
};

// What torch's own kernel raised in this thread; no type where it gave a result.
thread_local void* raised_type = nullptr;
thread_local std::string raised_words;

StableIValue in_python(const Private& operation, Reason reason, const StableIValue* stack, uint64_t count) {
  StableIValue given[6] = {stable::from(int64_t(reason))};
  std::copy(stack, stack + count, given + 1);
  checked(torch_call_dispatcher(operation.name, operation.overload, given, TORCH_ABI_VERSION));
  if (void* type = std::exchange(raised_type, nullptr)) {
    const Owned something(stable::to<AtenTensorHandle>(given[0]));
    throw Raised(type, raised_words);
  }
  return given[0];
}

// The result of a call, or null and the reason why Python is to see to it.
template <class Call, Counted counted>
AtenTensorHandle result_of(const Call& call, Reason& reason) {
  const bool serves = on.load(std::memory_order_relaxed);
  reason = serves ? call.refusal() : Reason::off;
  if (!serves) {
    if constexpr (Call::kHasTorchs) {
      if (overrides_torchs[call.x.is_cuda()] && call.refusal() == Reason::none) return call.torchs();
    }
    return nullptr;
  }
  if (reason == Reason::none && !patched::has_engine(call.x)) reason = Reason::engine;
  if (reason != Reason::none) return nullptr;
  const AtenTensorHandle result = call.serve();
  served[counted].fetch_add(1, std::memory_order_relaxed);
  return result;
}

template <class Call, Counted counted, const Private& operation>
void kernel(StableIValue* stack, uint64_t count, uint64_t) {
  Reason reason;
  try {
    const Call call(stack);
    if (const AtenTensorHandle result = result_of<Call, counted>(call, reason)) {
      call.drop_others();
      for (int i = 0; i < Call::kTensors; ++i) const Owned taken(stable::to<AtenTensorHandle>(stack[i]));
      stack[0] = stable::from(result);
      return;
    }
  } catch (const std::exception&) {  // out of memory, say: torch raises what its users catch
    reason = Reason::error;
  }
  stack[0] = in_python(operation, reason, stack, count);
}

constexpr Private kTorchSoftmax = {"onepass::_torch_softmax", ""},
                  kTorchSoftmaxOut = {"onepass::_torch_softmax", "int_out"},
                  kTorchLogSoftmax = {"onepass::_torch_log_softmax", ""},
                  kTorchLogSoftmaxOut = {"onepass::_torch_log_softmax", "int_out"},
                  kTorchLogSumExp = {"onepass::_torch_logsumexp", ""},
                  kTorchSoftmaxBackward = {"onepass::_torch_softmax_backward_data", ""},
                  kTorchLogSoftmaxBackward = {"onepass::_torch_log_softmax_backward_data", ""};

void override(StableLibrary& aten) {
  constexpr Function softmax = Function::softmax, log_softmax = Function::log_softmax;
  aten.impl("_softmax", kernel<Forward<softmax, false>, kSoftmax, kTorchSoftmax>);
  aten.impl("softmax.int_out", kernel<Forward<softmax, true>, kSoftmax, kTorchSoftmaxOut>);
  aten.impl("_log_softmax", kernel<Forward<log_softmax, false>, kLogSoftmax, kTorchLogSoftmax>);
  aten.impl("log_softmax.int_out", kernel<Forward<log_softmax, true>, kLogSoftmax, kTorchLogSoftmaxOut>);
  aten.impl("logsumexp", kernel<Forward<Function::logsumexp, false>, kLogSumExp, kTorchLogSumExp>);
  aten.impl("_softmax_backward_data", kernel<Backward<softmax>, kSoftmaxBackward, kTorchSoftmaxBackward>);
  aten.impl("_log_softmax_backward_data", kernel<Backward<log_softmax>, kLogSoftmaxBackward, kTorchLogSoftmaxBackward>);
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

// Installs the kernels of the CPU, and of CUDA where `cuda`; once in a process. The others: whether the kernels that
// were there are torch's.
ONEPASS_API int onepass_patch_install(bool cuda, bool torchs_on_cpu, bool torchs_on_cuda, char* text, int64_t size) {
  using namespace onepass;
  return guarded(text, size, [&] {
    overrides_torchs[0] = torchs_on_cpu, overrides_torchs[1] = torchs_on_cuda;
    for (int i = 0; i < 1 + cuda; ++i) {  // never deleted
      override(*new StableLibrary(StableLibrary::Kind::IMPL, "aten", i ? "CUDA" : "CPU", __FILE__, __LINE__));
    }
    return std::string();
  });
}

// From now on onepass computes the calls, or torch does.
ONEPASS_API void onepass_patch_switch(bool to) { onepass::on = to; }

// How many calls of each function were served since the start of the process.
ONEPASS_API void onepass_patch_served(int64_t* counts) {
  for (int i = 0; i < onepass::kCounted; ++i) counts[i] = onepass::served[i].load(std::memory_order_relaxed);
}

// One more call of a function, which was served in Python.
ONEPASS_API void onepass_patch_count(int function) { ++onepass::served[function]; }

// What torch's kernel raised, for the kernel of this thread that called for it: a Python type, which lives on.
ONEPASS_API void onepass_patch_raised(void* type, const char* words) {
  onepass::raised_type = type;
  onepass::raised_words = words;
}
