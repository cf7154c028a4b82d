// broadcast_sum.cpp: the operator that sums over the dims along which a tensor was broadcast. It returns whether the
// engine has a kernel for the layout. If it has, the sums have been computed.
#include "../core/sum_problem.h"
#include "operators.h"

namespace onepass {

namespace {

// (input, out, divisor). out broadcasts to the input and has any strides. There is a kernel if adjacent elements of the
// input belong to one sum, or to neighbouring sums.
void run_sum_to(StableIValue* stack, uint64_t, uint64_t) {
  StackArguments given(stack);
  const TensorRef &x = *given.take_tensor(), &y = *given.take_tensor();
  SumProblem problem = {};
  problem.in = x.dtype(), problem.out = y.dtype(), problem.divisor = given.take<double>();
  problem.x = x.data(), problem.y = y.mutable_data();
  const int lacking = x.rank - y.rank;
  if (lacking < 0) fail("sums have at most the dims of the input");
  for (int i = 0; i < x.rank; ++i) {
    const int64_t size = i < lacking ? 1 : y.sizes[i - lacking];
    if (size != 1 && size != x.sizes[i]) fail("sums have the sizes of the input, or 1");
    problem.add(x.sizes[i], x.strides[i], i < lacking ? 0 : y.strides[i - lacking], size == 1);
  }
  bool served = problem.sums > 0 && problem.n > 0;
  if (served) {
    problem.kept.merge(), problem.summed.merge();
    const auto has_neighbours = [](const DimGroup& dims) { return dims.count && dims.innermost().strides[kX] == 1; };
    served = has_neighbours(problem.kept) || has_neighbours(problem.summed);
  }
  if (served) run_sum_cpu(problem);
  stack[0] = stable::from(served);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(onepass, m) {
  m.def("_sum_to_kernel(Tensor input, Tensor(a!) out, float divisor) -> bool");
}
STABLE_TORCH_LIBRARY_IMPL(onepass, CPU, m) { m.impl("_sum_to_kernel", run_sum_to); }

}  // namespace onepass
