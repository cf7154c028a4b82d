// patch.cpp: aten's operators of the family, computed by onepass while onepass.patch() is on (patch.py).
//
// A kernel here is called below autograd, with the arguments of its aten operator, and gives a contiguous result as
// torch's does. What it does not serve goes to a private operator of the same arguments and the reason, whose kernel in
// Python (patch_kernels.py) counts the call and has torch's own kernel compute it.
#include <atomic>
#include <chrono>
#include <thread>

#include "guarded.h"
#include "patched.h"
#include "raised.h"

namespace onepass {

namespace {

using patched::Backward, patched::Forward, patched::Reason;
namespace stable = torch::stable::detail;
using stable::StableLibrary;

enum Counted { kSoftmax, kLogSoftmax, kLogSumExp, kSoftmaxBackward, kLogSoftmaxBackward, kCounted };  // as in reports
std::atomic<int64_t> served[kCounted];

// Where a call that is not served goes, by its operator.
struct Left {
  const char *name, *overload;
};

// What torch's own kernel raised in this thread; no type where it gave a result.
thread_local void* raised_type = nullptr;
thread_local std::string raised_words;

StableIValue left_to_torch(const Left& left, Reason reason, const StableIValue* stack, uint64_t count) {
  StableIValue given[6] = {stable::from(std::string(reason))};
  std::copy(stack, stack + count, given + 1);
  checked(torch_call_dispatcher(left.name, left.overload, given, TORCH_ABI_VERSION));
  if (void* type = std::exchange(raised_type, nullptr)) {
    const Owned something(stable::to<AtenTensorHandle>(given[0]));
    throw Raised(type, raised_words);
  }
  return given[0];
}

// Set while torch's kernels are put back. The dispatcher does that by more than one store, and has no lock for those
// who read: a call that comes between two of them would crash. Threads with many calls therefore soon wait in here,
// each in one call, before the first store.
std::atomic<bool> giving_back{false};

void wait_while_giving_back() {
  for (int i = 0; i < 100 && giving_back.load(std::memory_order_relaxed); ++i) {
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
}

template <class Call, Counted counted, const Left& left>
void kernel(StableIValue* stack, uint64_t count, uint64_t) {
  wait_while_giving_back();
  Reason reason;
  try {
    const Call call(stack);
    reason = call.refusal();
    if (!reason) {
      const AtenTensorHandle result = call.serve();
      served[counted].fetch_add(1, std::memory_order_relaxed);
      call.drop_list();
      for (int i = 0; i < Call::kTensors; ++i) const Owned taken(stable::to<AtenTensorHandle>(stack[i]));
      stack[0] = stable::from(result);
      return;
    }
  } catch (const std::exception&) {  // out of memory, say: torch raises what its users catch
    reason = "an error of onepass";
  }
  stack[0] = left_to_torch(left, reason, stack, count);
}

constexpr Left kLeftSoftmax = {"onepass::_left_softmax", ""}, kLeftSoftmaxOut = {"onepass::_left_softmax", "out"},
               kLeftLogSoftmax = {"onepass::_left_log_softmax", ""},
               kLeftLogSoftmaxOut = {"onepass::_left_log_softmax", "out"},
               kLeftLogSumExp = {"onepass::_left_logsumexp", ""},
               kLeftLogSumExpOut = {"onepass::_left_logsumexp", "out"},
               kLeftSoftmaxBackward = {"onepass::_left_softmax_backward_data", ""},
               kLeftLogSoftmaxBackward = {"onepass::_left_log_softmax_backward_data", ""};

void override(StableLibrary& aten) {
  aten.impl("_softmax", kernel<Forward<Function::softmax, false>, kSoftmax, kLeftSoftmax>);
  aten.impl("_softmax.out", kernel<Forward<Function::softmax, true>, kSoftmax, kLeftSoftmaxOut>);
  aten.impl("_log_softmax", kernel<Forward<Function::log_softmax, false>, kLogSoftmax, kLeftLogSoftmax>);
  aten.impl("_log_softmax.out", kernel<Forward<Function::log_softmax, true>, kLogSoftmax, kLeftLogSoftmaxOut>);
  aten.impl("logsumexp", kernel<Forward<Function::logsumexp, false>, kLogSumExp, kLeftLogSumExp>);
  aten.impl("logsumexp.out", kernel<Forward<Function::logsumexp, true>, kLogSumExp, kLeftLogSumExpOut>);
  aten.impl("_softmax_backward_data", kernel<Backward<Function::softmax>, kSoftmaxBackward, kLeftSoftmaxBackward>);
  aten.impl("_log_softmax_backward_data",
            kernel<Backward<Function::log_softmax>, kLogSoftmaxBackward, kLeftLogSoftmaxBackward>);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(onepass, m) {
  for (const std::string name : {"_left_softmax", "_left_log_softmax"}) {
    const std::string arguments = "(str reason, Tensor self, int dim, bool half_to_float";
    m.def((name + arguments + ") -> Tensor").c_str());
    m.def((name + ".out" + arguments + ", *, Tensor(a!) out) -> Tensor(a!)").c_str());
    m.def((name + "_backward_data(str reason, Tensor grad_output, Tensor output, int dim, ScalarType input_dtype) -> "
                  "Tensor")
              .c_str());
  }
  m.def("_left_logsumexp(str reason, Tensor self, int[1] dim, bool keepdim) -> Tensor");
  m.def("_left_logsumexp.out(str reason, Tensor self, int[1] dim, bool keepdim, *, Tensor(a!) out) -> Tensor(a!)");
  m.def("_has_engine(Tensor x) -> bool");
}

}  // namespace onepass

// Overrides the kernels of the CPU, and of CUDA where `cuda`, or gives torch's back. One thread at a time.
ONEPASS_API int onepass_patch(bool on, bool cuda, char* text, int64_t size) {
  using namespace onepass;
  static StableLibrary* libraries[2];  // not deleted with the process: other threads may still compute
  return guarded(text, size, [&] {
    if (!on) {
      giving_back = true;
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    for (int i = 0; i < 1 + cuda; ++i) {
      delete std::exchange(libraries[i], nullptr);
      if (!on) continue;
      libraries[i] = new StableLibrary(StableLibrary::Kind::IMPL, "aten", i ? "CUDA" : "CPU", __FILE__, __LINE__);
      override(*libraries[i]);
    }
    giving_back = false;
    return std::string();
  });
}

// How many calls of each function were served since the start of the process.
ONEPASS_API void onepass_patch_served(int64_t* counts) {
  for (int i = 0; i < onepass::kCounted; ++i) counts[i] = onepass::served[i].load(std::memory_order_relaxed);
}

// What torch's kernel raised, for the kernel of this thread that left the call to it: a Python type, which lives on.
ONEPASS_API void onepass_patch_raised(void* type, const char* words) {
  onepass::raised_type = type;
  onepass::raised_words = words;
}
