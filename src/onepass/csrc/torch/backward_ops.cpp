// backward_ops.cpp: the operators of gradients. No Python here, fake kernels are in ops.py.
#include <algorithm>

#include "../cpu/isa_dispatch.h"
#include "../cuda/host/backward.h"
#include "../cuda/host/engine.h"
#include "operators.h"
#include "../core/memory_overlap.h"

namespace onepass {

namespace {

bool same_shape(const Operand& a, const Operand& b) {
  return a.rank == b.rank && std::equal(a.sizes, a.sizes + a.rank, b.sizes);
}

// What a gradient is made from.
struct Given {
  Function function;
  Operand grad, saved;
  const Operand* lse;
  Mask mask;
  bool keepdim;
  DType type;  // of the result and its gradient

  Given(Function of, const Tensor& of_grad, const Tensor& of_saved, const Operand* of_lse, const Dims& dims, bool keep)
      : Given(of, Operand(of_grad.get()), Operand(of_saved.get()), of_lse, dims.data(), int(dims.size()), keep) {}
  Given(Function of, const Operand& of_grad, const Operand& of_saved, const Operand* of_lse, const int64_t* dims,
        int count, bool keep)
      : function(of), grad(of_grad), saved(of_saved), lse(of_lse), mask(dims, count, of_saved.rank), keepdim(keep) {
    type = (lse ? *lse : saved).type();
    alike("grad", grad, "the result", lse ? *lse : saved);
    if (!lse) return;
    of_one("lse", *lse);
    if (!reduces_to(Function::logsumexp, saved.type(), type)) {
      fail(std::string("logsumexp of ") + kDTypeNames[int(saved.type())] + " does not give " + kDTypeNames[int(type)] +
           ", which is the dtype of lse");
    }
    int rank = 0;
    int64_t sizes[kMaxDims];
    for (int i = 0; i < saved.rank; ++i) {
      if (!mask.reduced[i] || keepdim) sizes[rank++] = mask.reduced[i] ? 1 : saved.sizes[i];
    }
    if (rank != lse->rank || !std::equal(sizes, sizes + rank, lse->sizes)) {
      fail("logsumexp gives shape " + text_of(sizes, rank) + " of this input and these dims, got an lse of shape " +
           text_of(lse->sizes, lse->rank));
    }
  }

 private:
  void of_one(const char* name, const Operand& tensor) const {
    if (tensor.type() != type) {
      fail(std::string(name) + " has dtype " + kDTypeNames[int(tensor.type())] + ", but it goes with a tensor of " +
           kDTypeNames[int(type)]);
    }
    if (tensor.device_type != saved.device_type || tensor.device_index != saved.device_index) {
      fail(std::string(name) + " is on another device than what the forward saved");
    }
  }
  void alike(const char* name, const Operand& tensor, const char* other, const Operand& like) const {
    of_one(name, tensor);
    if (!same_shape(tensor, like)) {
      fail(std::string(name) + " has the shape of " + other + ", " + text_of(like.sizes, like.rank) + ", got " +
           text_of(tensor.sizes, tensor.rank));
    }
  }
};

// The strides of a tensor by the dims of the input.
void strides_of(const Given& given, const Operand& tensor, bool reduced, int64_t* strides) {
  for (int i = 0, at = 0; i < given.saved.rank; ++i) {
    const bool gone = reduced && given.mask.reduced[i];
    strides[i] = gone ? 0 : tensor.strides[at];
    at += !gone || given.keepdim;
  }
}

void run_cpu(BackwardCall call) {
  call.threads = int64_t(torch::stable::get_num_threads());
  const CpuEngine& engine = cpu_engine();
  const Units units = engine.backward_units(call);
  const int64_t rows = call.layout.rows;
  std::vector<double> sums;
  const auto parallel = [&](BackwardStep step, double* of, int64_t count, int64_t grain) {
    const auto work = [&](int64_t begin, int64_t end) { engine.backward(call, step, of, begin, end); };
    if (count <= grain) return work(0, count);
    torch::stable::parallel_for(0, count, grain, work);
  };
  const int64_t grain = cpu_grain(units);
  if (!units.pieces) return parallel(BackwardStep::rows, nullptr, units.count, grain);
  // Rows enough for all threads go whole: the second look at a row is then soon after the first.
  if (rows >= 2 * call.threads) return parallel(BackwardStep::rows, nullptr, rows, 1);
  sums.resize(size_t(units.count + rows));
  parallel(BackwardStep::sums, sums.data(), units.count, grain);
  double* const totals = sums.data() + units.count;
  for (int64_t i = 0; i < units.count; ++i) totals[i / units.pieces] += sums[size_t(i)];
  parallel(BackwardStep::finish, totals, units.count, grain);
}

void run(const Given& given, const Operand& dx, DType dx_type, const CudaPlan* forced = nullptr) {
  if (dx.numel() == 0) return;
  const int rank = dx.rank;
  int64_t strides[kBackwardTensors][kMaxDims];
  strides_of(given, dx, false, strides[kDx]);
  strides_of(given, given.saved, false, strides[kSaved]);
  strides_of(given, given.grad, given.lse != nullptr, strides[kGrad]);
  std::fill_n(strides[kLse], rank, 0);
  if (given.lse) strides_of(given, *given.lse, true, strides[kLse]);
  const int64_t* const each[kBackwardTensors] = {strides[0], strides[1], strides[2], strides[3]};
  const BackwardCall call = {given.function,
                             given.type,
                             dx_type,
                             dx.mutable_data(),
                             given.saved.data(),
                             given.grad.data(),
                             given.lse ? given.lse->data() : nullptr,
                             make_backward_layout(rank, dx.sizes, each, given.mask.reduced, given.lse != nullptr)};
  if (!dx.is_cuda()) return run_cpu(call);
  cuda::run_backward(call,
                     {{&dx, &given.saved, &given.grad, given.lse},
                      {strides[0], strides[1], strides[2], strides[3]},
                      rank,
                      dx.sizes,
                      given.mask.reduced},
                     forced);
}

Tensor made(const Given& given, DType dx_type) {
  Owned out = empty_like(given.saved, dx_type, given.saved.is_contiguous());
  const Operand dx(out.get());
  in_huge_pages(dx, dx_type);
  run(given, dx, dx_type);
  return Tensor(out.release());
}

}  // namespace

Owned gradient(Function function, const Operand& grad, const Operand& y, int64_t dim, DType dx_type) {
  const Given given(function, grad, y, nullptr, &dim, 1, true);
  int64_t strides[kMaxDims];
  contiguous_strides(y.rank, y.sizes, strides);
  Owned out = empty_strided(y.rank, y.sizes, strides, dx_type, y);
  const Operand dx(out.get());
  in_huge_pages(dx, dx_type);
  run(given, dx, dx_type);
  return out;
}

namespace {

Extent extent_of(const Operand& tensor) {
  return {uint64_t(tensor.data()), size_of(tensor.type()), tensor.rank, tensor.sizes, tensor.strides};
}

void made_in(const Given& given, const Tensor& out, const CudaPlan* forced = nullptr) {
  const Operand dx(out.get());
  if (!same_shape(dx, given.saved)) {
    fail("the gradient has shape " + text_of(given.saved.sizes, given.saved.rank) + ", got an out of shape " +
         text_of(dx.sizes, dx.rank));
  }
  if (dx.device_type != given.saved.device_type || dx.device_index != given.saved.device_index) {
    fail("out is on another device than what the forward saved");
  }
  const DType type = dx.type();
  if (given.lse && type != given.saved.type()) {
    fail(std::string("the gradient of logsumexp has its input's dtype ") + kDTypeNames[int(given.saved.type())] +
         ", got an out of " + kDTypeNames[int(type)]);
  }
  if (dx.numel()) {
    const Extent to = extent_of(dx);
    bool good = surely_distinct(to);
    for (const Operand* from : {&given.saved, &given.grad, given.lse}) {
      if (!from) continue;
      good &= surely_apart(to, extent_of(*from)) || (from->rank == dx.rank && same_elements(to, extent_of(*from)));
    }
    if (!good) fail("out may share memory with itself, or with elements of an operand that are not its own");
  }
  run(given, dx, type, forced);
}

Function softmax_function(int64_t function) {
  if (function < 0 || function > 2) {
    fail("function is 0 (softmax), 1 (log_softmax) or 2 (softmin), got " + std::to_string(function));
  }
  return Function(function);
}

Tensor softmax_backward(const Tensor& grad, const Tensor& y, int64_t function, Dims dim, ScalarType dtype) {
  return made(Given(softmax_function(function), grad, y, nullptr, dim, true), dtype_of(dtype));
}
void softmax_backward_out(const Tensor& grad, const Tensor& y, int64_t function, Dims dim, Tensor out) {
  made_in(Given(softmax_function(function), grad, y, nullptr, dim, true), out);
}
Tensor logsumexp_backward(const Tensor& grad, const Tensor& x, const Tensor& lse, Dims dim, bool keepdim) {
  const Operand result(lse.get());
  const Given given(Function::logsumexp, grad, x, &result, dim, keepdim);
  return made(given, given.saved.type());
}
void logsumexp_backward_out(const Tensor& grad, const Tensor& x, const Tensor& lse, Dims dim, bool keepdim,
                            Tensor out) {
  const Operand result(lse.get());
  made_in(Given(Function::logsumexp, grad, x, &result, dim, keepdim), out);
}
// Private, for tests: a gradient on a GPU with its plan given.
void forced_backward(const Tensor& grad, const Tensor& saved, std::optional<Tensor> lse, int64_t function, Dims dim,
                     Dims plan, Tensor out) {
  const CudaPlan given = cuda::checked_plan(plan);
  if (!out.is_cuda()) fail("only CUDA calls have a plan to force");
  if (!lse) return made_in(Given(softmax_function(function), grad, saved, nullptr, dim, true), out, &given);
  const Operand result(lse->get());
  made_in(Given(Function::logsumexp, grad, saved, &result, dim, result.rank == saved.dim()), out, &given);
}

}  // namespace

// Private: what autograd.py calls. `grad` and `y` (or `lse`) have one dtype; dx has any, as has the input of a forward
// with dtype=, but of logsumexp that of `x`.
STABLE_TORCH_LIBRARY_FRAGMENT(onepass, m) {
  const std::string family = "(Tensor grad, Tensor y, int function, int[1] dim, ";
  m.def(("_softmax_backward" + family + "ScalarType dtype) -> Tensor").c_str());
  m.def(("_softmax_backward.out" + family + "Tensor(a!) out) -> ()").c_str());
  const std::string logsumexp = "(Tensor grad, Tensor x, Tensor lse, int[1] dim, bool keepdim";
  m.def(("_logsumexp_backward" + logsumexp + "=False) -> Tensor").c_str());
  m.def(("_logsumexp_backward.out" + logsumexp + ", Tensor(a!) out) -> ()").c_str());
  m.def(
      "_softmax_backward_with_plan(Tensor grad, Tensor saved, Tensor? lse, int function, int[] dim, int[] plan, "
      "Tensor(a!) out) "
      "-> ()");
}

static void implement_backward(torch::stable::detail::StableLibrary& m) {
  m.impl("_softmax_backward", TORCH_BOX(&softmax_backward));
  m.impl("_softmax_backward.out", TORCH_BOX(&softmax_backward_out));
  m.impl("_logsumexp_backward", TORCH_BOX(&logsumexp_backward));
  m.impl("_logsumexp_backward.out", TORCH_BOX(&logsumexp_backward_out));
  m.impl("_softmax_backward_with_plan", TORCH_BOX(&forced_backward));
}

STABLE_TORCH_LIBRARY_IMPL(onepass, CPU, m) { implement_backward(m); }
STABLE_TORCH_LIBRARY_IMPL(onepass, CUDA, m) { implement_backward(m); }

}  // namespace onepass
