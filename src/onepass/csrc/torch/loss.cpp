// loss.cpp: the operators of losses. They return whether an engine has a kernel for the call. If it has, the result has
// been computed; otherwise plain torch arithmetic computes it (loss_arithmetic.py).
#include "../core/loss_problem.h"

#include "operators.h"

namespace onepass {

namespace {

const void* data_of(const TensorRef* tensor) { return tensor ? tensor->data() : nullptr; }

// Adds up the losses of rows, and the weights of their classes, on the CPU. Losses of type A are added as doubles, in
// several sums that need not wait for each other. Losses that are doubles are added by Kahan's summation.
template <class A>
void add_up(const LossProblem& problem, const LossResult& loss) {
  constexpr int kSums = 16;
  const A* const losses = static_cast<const A*>(problem.terms) + 2 * problem.rows;
  const A* const weight = static_cast<const A*>(problem.weight);
  double sums[kSums] = {}, lost[kSums] = {}, weights = 0;  // lost: what rounding took from a sum
  const auto add = [&](int k, double term) {
    if constexpr (std::is_same_v<A, float>) {
      sums[k] += term;
    } else {
      term -= lost[k];
      const double next = sums[k] + term;
      lost[k] = std::isfinite(next) ? (next - sums[k]) - term : 0, sums[k] = next;
    }
  };
  int64_t row = 0, counted = 0;
  for (; row + kSums <= problem.rows; row += kSums) {
    for (int k = 0; k < kSums; ++k) add(k, losses[row + k]);
  }
  for (; row < problem.rows; ++row) add(0, losses[row]);
  for (int k = 1; k < kSums; ++k) add(0, sums[k]), add(0, -lost[k]);
  const int64_t* const index = problem.index;
  const int64_t ignored = problem.ignore_index;
#pragma omp simd reduction(+ : counted)
  for (row = 0; row < problem.rows; ++row) counted += index[row] != ignored;
  for (row = 0; weight && row < problem.rows; ++row) {
    if (index[row] != ignored) weights += weight[index[row]];
  }
  if (!weight) weights = double(counted);
  *static_cast<A*>(loss.total) = A(weights);
  *static_cast<A*>(loss.result) = A(loss.is_mean ? sums[0] / weights : sums[0]);
}

// Sets the members that both directions share, and runs the problem.
bool run(LossProblem& problem, const LossResult& loss, const TensorRef& x, const TensorRef* dx, const TensorRef* index,
         StackArguments& given) {
  const int dim = int(given.take<int64_t>());
  problem.factor = given.take<double>(), problem.softcap = given.take<double>();
  problem.has_spread = given.take<bool>(), problem.has_entropy = given.take<bool>();
  problem.is_cross = given.take<bool>(), problem.ignore_index = given.take<int64_t>();
  problem.smoothing = given.take<double>(), problem.z_loss = given.take<double>();
  problem.is_wide = given.take<bool>();
  if (dim < 0 || dim >= x.rank) fail("no such dim: " + std::to_string(dim));
  problem.type = x.dtype();
  problem.x = x.data();
  for (int d = 0; d < x.rank; ++d) {
    if (d != dim) problem.add_dim(x.sizes[d], x.strides[d], dx ? dx->strides[d] : 0);
  }
  problem.n = x.sizes[dim], problem.x_step = x.strides[dim], problem.dx_step = dx ? dx->strides[dim] : 1;
  if (problem.rows == 0 || problem.n == 0) return false;
  if (index) {
    problem.index = static_cast<const int64_t*>(index->data());
    problem.picks = index->numel() / problem.rows;
  }
  if (x.is_cuda()) return cuda::run_loss(problem, loss, x);
  run_loss_cpu(problem);
  if (!loss.result) return true;
  if (problem.type == DType::float64)
    add_up<double>(problem, loss);
  else
    add_up<float>(problem, loss);  // the operator's result is float32 on a CPU
  return true;
}

// (input, index, weight, weight_sum, scale, terms, result, loss, total, is_mean, numbers)
void run_loss_forward(StableIValue* stack, uint64_t, uint64_t) {
  StackArguments given(stack);
  LossProblem problem = {};
  problem.direction = Direction::forward;
  const TensorRef* const x = given.take_tensor();
  const TensorRef* const index = given.take_maybe_tensor();
  problem.weight = data_of(given.take_maybe_tensor()), problem.weight_sum = data_of(given.take_maybe_tensor());
  problem.scale = data_of(given.take_maybe_tensor());
  problem.terms = given.take_tensor()->mutable_data();
  if (const TensorRef* const result = given.take_maybe_tensor()) problem.result = result->mutable_data();
  const TensorRef *const loss = given.take_maybe_tensor(), *const total = given.take_maybe_tensor();
  const LossResult to = {loss ? loss->mutable_data() : nullptr, total ? total->mutable_data() : nullptr,
                         given.take<bool>()};
  stack[0] = stable::from(run(problem, to, *x, nullptr, index, given));
}

// (input, terms, index, weight, weight_sum, scale, grads, total, grad_lse, dx, numbers)
void run_loss_backward(StableIValue* stack, uint64_t, uint64_t) {
  StackArguments given(stack);
  LossProblem problem = {};
  problem.direction = Direction::backward;
  const TensorRef* const x = given.take_tensor();
  problem.terms = const_cast<void*>(given.take_tensor()->data());
  const TensorRef* const index = given.take_maybe_tensor();
  problem.weight = data_of(given.take_maybe_tensor()), problem.weight_sum = data_of(given.take_maybe_tensor());
  problem.scale = data_of(given.take_maybe_tensor());
  const TensorRef* const grads = given.take_tensor();
  problem.grads = grads->data(), problem.grads_per_row = grads->rank > 0;
  problem.total = data_of(given.take_maybe_tensor()), problem.grad_lse = data_of(given.take_maybe_tensor());
  const TensorRef* const dx = given.take_tensor();
  problem.dx = dx->mutable_data();
  advise_huge_pages(*dx, dx->dtype());
  stack[0] = stable::from(run(problem, {}, *x, dx, index, given));
}

// (parts, planes)
void run_state_merge(StableIValue* stack, uint64_t, uint64_t) {
  StackArguments given(stack);
  const TensorRef* const parts = given.take_tensor();
  cuda::merge_states(*parts, *given.take_tensor());
}

void implement_all(stable::StableLibrary& m) {
  m.impl("_loss_kernel", run_loss_forward);
  m.impl("_loss_backward_kernel", run_loss_backward);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(onepass, m) {
  const std::string numbers =
      "int dim, float factor, float softcap, bool spread, bool entropy, bool is_cross, int ignore_index, "
      "float smoothing, float z_loss, bool wide) -> bool";
  m.def(("_loss_kernel(Tensor input, Tensor? index, Tensor? weight, Tensor? weight_sum, Tensor? scale, "
         "Tensor(a!) terms, Tensor(b!)? result, Tensor(c!)? loss, Tensor(d!)? total, bool is_mean, " +
         numbers)
            .c_str());
  m.def("_merge_states_kernel(Tensor parts, Tensor(a!) planes) -> ()");
  m.def(("_loss_backward_kernel(Tensor input, Tensor terms, Tensor? index, Tensor? weight, Tensor? weight_sum, "
         "Tensor? scale, Tensor grads, Tensor? total, Tensor? grad_lse, Tensor(a!) dx, " +
         numbers)
            .c_str());
}
STABLE_TORCH_LIBRARY_IMPL(onepass, CPU, m) { implement_all(m); }
STABLE_TORCH_LIBRARY_IMPL(onepass, CUDA, m) {
  implement_all(m);
  m.impl("_merge_states_kernel", run_state_merge);
}

}  // namespace onepass
