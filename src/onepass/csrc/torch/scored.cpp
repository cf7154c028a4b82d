// scored.cpp: the operators of scores. They return whether an engine has a kernel for the call. If it has, the result
// has been computed; otherwise plain torch arithmetic computes it (scored.py).
#include "../core/batch_invariant.h"
#include "../core/scored_problem.h"

#include "../core/stable_tensor.h"
#include "operators.h"

namespace onepass {

namespace {

// The strides of a tensor along the dims of the input, which are 0 where the tensor is broadcast.
void broadcast_strides(const TensorRef& tensor, const TensorRef& like, int64_t* strides) {
  const int lacking = int(like.rank - tensor.rank);
  if (lacking < 0) fail("a tensor of a scored call has more dims than its input");
  std::fill_n(strides, lacking, 0);
  for (int i = lacking; i < like.rank; ++i) {
    const int64_t size = tensor.sizes[i - lacking];
    if (size != 1 && size != like.sizes[i]) fail("a tensor of a scored call does not broadcast to its input");
    strides[i] = size == 1 ? 0 : tensor.strides[i - lacking];
  }
}

// Sets the layout and the numbers, which both directions share, and runs the problem.
bool run(ScoredProblem& problem, const TensorRef* const* tensors, const ReduceDims& dims, StackArguments& given) {
  const TensorRef& x = *tensors[kInput];
  problem.factor = given.take<double>(), problem.softcap = given.take<double>(), problem.sink = given.take<double>();
  const MaybeInt left = given.take<MaybeInt>(), right = given.take<MaybeInt>(), offset = given.take<MaybeInt>();
  problem.empty_is_zero = given.take<bool>();
  if (left) problem.least = -*left;
  if (right) problem.most = *right;
  int64_t strides[kDistance][kMaxDims];
  const int64_t* each[kDistance] = {};
  for (int t = 0; t < kDistance; ++t) {
    if (!tensors[t]) continue;
    problem.data[t] = const_cast<void*>(tensors[t]->data());
    problem.storage_end[t] = tensors[t]->storage_end();
    broadcast_strides(*tensors[t], x, strides[t]);
    each[t] = strides[t];
  }
  problem.lay_out(x.rank, x.sizes, each, dims.reduced, offset);
  if (problem.rows == 0 || problem.n == 0) return false;
  if (problem.is_backward() && !is_reduction(problem.function) && (problem.softcap != 0) != problem.has(kOfCap)) {
    fail("x goes with a softcap");
  }
  if (x.is_cuda()) return cuda::run_scored(problem, x);
  // The bits of a row depend on its layout, except in the gradient of logsumexp, which sums nothing.
  const bool sums = !problem.is_backward() || !is_reduction(problem.function);
  if (sums && batch_invariant() && !problem.has_rows()) return false;
  if (tensors[kResult]->data() != x.data()) advise_huge_pages(*tensors[kResult], problem.out);
  run_scored_cpu(problem);
  return true;
}

Function function_of(int64_t number) {
  for (const Function function : {Function::softmax, Function::log_softmax, Function::logsumexp}) {
    if (int64_t(function) == number) return function;
  }
  fail("scores have softmax, log_softmax and logsumexp, got the function number " + std::to_string(number));
}

// (input, scale, bias, alibi, sink, mask, out, lse, function, dims, numbers). A reduction's out still has the reduced
// dims.
void run_scored(StableIValue* stack, uint64_t, uint64_t) {
  StackArguments given(stack);
  const TensorRef* tensors[kScoredTensors] = {};
  tensors[kInput] = given.take_tensor();
  for (const ScoredTensor t : {kScale, kBias, kAlibi, kSink, kMask}) tensors[t] = given.take_maybe_tensor();
  tensors[kResult] = given.take_tensor();
  tensors[kRowLse] = given.take_maybe_tensor();
  ScoredProblem problem = {};
  problem.function = function_of(given.take<int64_t>()), problem.direction = Direction::forward;
  problem.in = tensors[kInput]->dtype(), problem.out = tensors[kResult]->dtype();
  if (tensors[kBias]) problem.bias_type = tensors[kBias]->dtype();
  const ReduceDims dims(given.take<Dims>(), tensors[kInput]->rank);
  stack[0] = stable::from(run(problem, tensors, dims, given));
}

// (grad, y, x, lse, scale, bias, mask, out, function, dims, numbers). x is given only with a softcap, in the type of
// out. With lse a GPU computes the slope of the softcap from it, y and the bias. With the gradient of a bias: (grad, y,
// x, scale, mask, out, grad_bias, parts, function, ...). grad_bias is the first of `parts` parts, which follow one
// another in memory.
template <bool MakesBiasGrad>
void run_scored_backward(StableIValue* stack, uint64_t, uint64_t) {
  StackArguments given(stack);
  const TensorRef* tensors[kScoredTensors] = {};
  tensors[kGradOf] = given.take_tensor(), tensors[kInput] = given.take_tensor();
  tensors[kOfCap] = given.take_maybe_tensor();
  if constexpr (!MakesBiasGrad) tensors[kRowLse] = given.take_maybe_tensor();
  tensors[kScale] = given.take_maybe_tensor();
  if constexpr (!MakesBiasGrad) {
    tensors[kBias] = given.take_maybe_tensor();
    if (!tensors[kRowLse] || !tensors[kInput]->is_cuda()) tensors[kRowLse] = tensors[kBias] = nullptr;
  }
  tensors[kMask] = given.take_maybe_tensor();
  tensors[kResult] = given.take_tensor();
  ScoredProblem problem = {};
  if constexpr (MakesBiasGrad) {
    tensors[kBias] = given.take_tensor();
    problem.bias_parts = int(given.take<int64_t>());
  }
  if (tensors[kBias]) problem.bias_type = tensors[kBias]->dtype();
  problem.function = function_of(given.take<int64_t>()), problem.direction = Direction::backward;
  problem.in = tensors[kInput]->dtype(), problem.out = tensors[kResult]->dtype();
  if (tensors[kOfCap] && tensors[kOfCap]->dtype() != problem.out) fail("x has another type than its gradient");
  if (tensors[kRowLse] && tensors[kRowLse]->dtype() != problem.accumulator()) fail("lse has the accumulator's type");
  const ReduceDims dims(given.take<Dims>(), tensors[kInput]->rank);
  stack[0] = stable::from(run(problem, tensors, dims, given));
}

// (grad, input, lse, scale, bias, alibi, mask, out, of_scores, function, dims, numbers). grad and lse have the type of
// the computation. With of_scores the result is the gradient of the scores.
void run_scored_logsumexp_backward(StableIValue* stack, uint64_t, uint64_t) {
  StackArguments given(stack);
  const TensorRef* tensors[kScoredTensors] = {};
  for (const ScoredTensor t : {kGradOf, kInput, kRowLse}) tensors[t] = given.take_tensor();
  for (const ScoredTensor t : {kScale, kBias, kAlibi, kMask}) tensors[t] = given.take_maybe_tensor();
  tensors[kResult] = given.take_tensor();
  ScoredProblem problem = {};
  problem.of_scores = given.take<bool>();
  problem.function = function_of(given.take<int64_t>()), problem.direction = Direction::backward;
  problem.in = tensors[kInput]->dtype(), problem.out = tensors[kResult]->dtype();
  if (tensors[kBias]) problem.bias_type = tensors[kBias]->dtype();
  for (const ScoredTensor t : {kGradOf, kRowLse}) {
    if (tensors[t]->dtype() != problem.accumulator()) fail("grad and lse have the type of the computation");
  }
  const ReduceDims dims(given.take<Dims>(), tensors[kInput]->rank);
  stack[0] = stable::from(run(problem, tensors, dims, given));
}

void implement_all(stable::StableLibrary& m) {
  m.impl("_scored_kernel", run_scored);
  m.impl("_scored_backward_kernel", run_scored_backward<false>);
  m.impl("_scored_logsumexp_backward_kernel", run_scored_logsumexp_backward);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(onepass, m) {
  const std::string numbers =
      "int function, int[] dim, float factor, float softcap, float sink_number, int? left, int? right, int? offset, "
      "bool empty_is_zero) -> bool";
  m.def(("_scored_kernel(Tensor input, Tensor? scale, Tensor? bias, Tensor? alibi, Tensor? sink, Tensor? mask, "
         "Tensor(a!) out, Tensor(b!)? lse, " +
         numbers)
            .c_str());
  m.def(("_scored_backward_kernel(Tensor grad, Tensor y, Tensor? x, Tensor? lse, Tensor? scale, Tensor? bias, "
         "Tensor? mask, Tensor(a!) out, " +
         numbers)
            .c_str());
  m.def(("_scored_bias_grad_kernel(Tensor grad, Tensor y, Tensor? x, Tensor? scale, Tensor? mask, Tensor(a!) out, "
         "Tensor(b!) grad_bias, int parts, " +
         numbers)
            .c_str());
  m.def(("_scored_logsumexp_backward_kernel(Tensor grad, Tensor input, Tensor lse, Tensor? scale, Tensor? bias, "
         "Tensor? alibi, Tensor? mask, Tensor(a!) out, bool of_scores, " +
         numbers)
            .c_str());
}
STABLE_TORCH_LIBRARY_IMPL(onepass, CPU, m) { implement_all(m); }
STABLE_TORCH_LIBRARY_IMPL(onepass, CUDA, m) {
  implement_all(m);
  m.impl("_scored_bias_grad_kernel", run_scored_backward<true>);
}

}  // namespace onepass
