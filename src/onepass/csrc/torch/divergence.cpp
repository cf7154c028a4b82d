// divergence.cpp: the operators of divergences. They return whether an engine has a kernel for the call. If it has, the
// result has been computed; otherwise plain torch arithmetic computes it (loss_arithmetic.py).
#include "../core/divergence_problem.h"

#include "operators.h"

namespace onepass {

namespace {

// Sets the members that both directions share, and runs the problem.
bool run(DivergenceProblem& problem, const TensorRef* const (&tensors)[DivergenceProblem::kTensors],
         StackArguments& given) {
  const TensorRef &x = *tensors[0], &y = *tensors[1];
  const int dim = int(given.take<int64_t>());
  if (!problem.is_product) {
    problem.is_kl = given.take<bool>(), problem.factor = given.take<double>();
    problem.softcap = given.take<double>(), problem.smoothing = given.take<double>();
  }
  if (dim < 0 || dim >= x.rank) fail("no such dim: " + std::to_string(dim));
  problem.type = x.dtype(), problem.x = x.data(), problem.y = y.data();
  for (int d = 0; d < x.rank; ++d) {
    int64_t by[DivergenceProblem::kTensors];
    for (int t = 0; t < DivergenceProblem::kTensors; ++t) by[t] = tensors[t] ? tensors[t]->strides[d] : 0;
    if (d != dim) problem.add_dim(x.sizes[d], by);
  }
  problem.n = x.sizes[dim];
  for (int t = 0; t < DivergenceProblem::kTensors; ++t) problem.steps[t] = tensors[t] ? tensors[t]->strides[dim] : 1;
  if (problem.rows == 0 || problem.n == 0) return false;
  if (x.is_cuda()) return cuda::run_divergence(problem, x);
  run_divergence_cpu(problem);
  return true;
}

// (x, y, weight, terms, numbers)
void run_divergence_forward(StableIValue* stack, uint64_t, uint64_t) {
  StackArguments given(stack);
  DivergenceProblem problem = {};
  problem.direction = Direction::forward;
  const TensorRef *const x = given.take_tensor(), *const y = given.take_tensor();
  if (const TensorRef* const weight = given.take_maybe_tensor()) problem.weight = weight->data();
  problem.terms = given.take_tensor()->mutable_data();
  stack[0] = stable::from(run(problem, {x, y, nullptr, nullptr}, given));
}

// (x, y, weight, terms, grads, dx, dy, numbers)
void run_divergence_backward(StableIValue* stack, uint64_t, uint64_t) {
  StackArguments given(stack);
  DivergenceProblem problem = {};
  problem.direction = Direction::backward;
  const TensorRef *const x = given.take_tensor(), *const y = given.take_tensor();
  if (const TensorRef* const weight = given.take_maybe_tensor()) problem.weight = weight->data();
  problem.terms = const_cast<void*>(given.take_tensor()->data());
  problem.grads = given.take_tensor()->data();
  const TensorRef *const dx = given.take_maybe_tensor(), *const dy = given.take_maybe_tensor();
  for (const TensorRef* const made : {dx, dy}) {
    if (made) advise_huge_pages(*made, made->dtype());
  }
  if (dx) problem.dx = dx->mutable_data();
  if (dy) problem.dy = dy->mutable_data();
  stack[0] = stable::from(run(problem, {x, y, dx, dy}, given));
}

// (x, y, sums, dim)
void run_product_forward(StableIValue* stack, uint64_t, uint64_t) {
  StackArguments given(stack);
  DivergenceProblem problem = {};
  problem.direction = Direction::forward, problem.is_product = true;
  const TensorRef *const x = given.take_tensor(), *const y = given.take_tensor();
  problem.terms = given.take_tensor()->mutable_data();
  stack[0] = stable::from(run(problem, {x, y, nullptr, nullptr}, given));
}

// (x, y, sums, dx, dim)
void run_product_backward(StableIValue* stack, uint64_t, uint64_t) {
  StackArguments given(stack);
  DivergenceProblem problem = {};
  problem.direction = Direction::backward, problem.is_product = true;
  const TensorRef *const x = given.take_tensor(), *const y = given.take_tensor();
  problem.terms = const_cast<void*>(given.take_tensor()->data());
  const TensorRef* const dx = given.take_tensor();
  advise_huge_pages(*dx, dx->dtype());
  problem.dx = dx->mutable_data();
  stack[0] = stable::from(run(problem, {x, y, dx, nullptr}, given));
}

void implement_all(stable::StableLibrary& m) {
  m.impl("_divergence_kernel", run_divergence_forward);
  m.impl("_divergence_backward_kernel", run_divergence_backward);
  m.impl("_product_kernel", run_product_forward);
  m.impl("_product_backward_kernel", run_product_backward);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(onepass, m) {
  const std::string numbers = "int dim, bool is_kl, float factor, float softcap, float smoothing) -> bool";
  m.def(("_divergence_kernel(Tensor x, Tensor y, Tensor? weight, Tensor(a!) terms, " + numbers).c_str());
  m.def(("_divergence_backward_kernel(Tensor x, Tensor y, Tensor? weight, Tensor terms, Tensor grads, "
         "Tensor(a!)? dx, Tensor(b!)? dy, " +
         numbers)
            .c_str());
  m.def("_product_kernel(Tensor x, Tensor y, Tensor(a!) sums, int dim) -> bool");
  m.def("_product_backward_kernel(Tensor x, Tensor y, Tensor sums, Tensor(a!) dx, int dim) -> bool");
}
STABLE_TORCH_LIBRARY_IMPL(onepass, CPU, m) { implement_all(m); }
STABLE_TORCH_LIBRARY_IMPL(onepass, CUDA, m) { implement_all(m); }

}  // namespace onepass
