// operators.h: what the files with operators share: the shape of a result, the arguments on the dispatcher's stack, and
// the functions that run problems.
#pragma once

#include <deque>

#include "../core/divergence_problem.h"
#include "../core/loss_problem.h"
#include "../core/scored_problem.h"
#include "../core/segment_problem.h"
#include "../core/stable_tensor.h"
#include "../plan/rows.h"

namespace onepass {

// The shape of a forward's result. The array has room for the most dims: an allocation on the heap would take longer.
struct ResultShape {
  int rank = 0;
  int64_t sizes[kMaxDims + 1];

  ResultShape(Function function, const TensorRef& x, const ReduceDims& dims, bool keepdim) {
    if (const int planes = traits_of(function).leading_planes) sizes[rank++] = planes;
    for (int i = 0; i < x.rank; ++i) {
      if (!is_reduction(function) || !dims.reduced[i]) {
        sizes[rank++] = x.sizes[i];
      } else if (keepdim) {
        sizes[rank++] = 1;
      }
    }
    if (rank > kMaxDims) fail("a result of at most 64 dims, got " + std::to_string(rank));
  }
};

using MaybeTensor = std::optional<Tensor>;
using MaybeInt = std::optional<int64_t>;

// The arguments on the dispatcher's stack, taken one after another. Arguments that own something stay alive with this
// object.
class StackArguments {
 public:
  explicit StackArguments(const StableIValue* stack) : next_(stack) {}
  template <class T>
  T take() {
    return stable::to<T>(*next_++);
  }
  const TensorRef* take_tensor() {
    owned_.push_back(take<Tensor>());
    return &refs_.emplace_back(owned_.back().get());
  }
  const TensorRef* take_maybe_tensor() {
    MaybeTensor tensor = take<MaybeTensor>();
    if (!tensor) return nullptr;
    owned_.push_back(*tensor);
    return &refs_.emplace_back(owned_.back().get());
  }

 private:
  const StableIValue* next_;
  std::deque<Tensor> owned_;
  std::deque<TensorRef> refs_;
};

// Compute a forward, or a gradient (dispatch.cpp). All tensors exist, also the result, and have been checked. A CUDA
// problem may be given its plan.
void run_forward(const TensorArgs& args, DType x_type, DType y_type, bool contiguous, const CudaPlan* plan = nullptr);
void run_backward(const TensorArgs& args, DType result_type, DType dx_type, const CudaPlan* plan = nullptr);

// Where to write the sum or the mean of the losses of a cross-entropy, and the sum of the weights of their classes.
// Null if they are not asked for.
struct LossResult {
  void *result, *total;
  bool is_mean;
};

namespace cuda {

// Runs a problem whose result is not empty. Rows of unit stride go to the kernels of rows, other layouts to the kernels
// of columns. If there are more dims than these take, and in the batch-invariant mode, the tensors `args` are gathered:
// copied to rows, and the result is copied back. If a plan is given it is used, or an error says why it cannot be.
void run(const Problem& problem, const TensorArgs& args, const CudaPlan* plan);
// Runs a scored problem on the device of `like`; false if there is no kernel for it.
bool run_scored(const ScoredProblem& problem, const TensorRef& like);
// Runs a problem of losses; false if there is no kernel for it.
bool run_loss(const LossProblem& problem, const LossResult& loss, const TensorRef& like);
// Runs a problem of divergences; false if there is no kernel for it.
bool run_divergence(const DivergenceProblem& problem, const TensorRef& like);
// Runs a problem of segments; false if there is no kernel for it.
bool run_segments(const SegmentProblem& problem, const TensorRef& like);
// Computes the states of rows, contiguous (4, ...), from the states of their parts, contiguous (parts, 2, ...).
// StateMerge has the layout (kernels/loss_map.cuh).
void merge_states(const TensorRef& parts, const TensorRef& planes);
// Finds where the segments of a sorted index begin.
void find_offsets(const TensorRef& index, const TensorRef& offsets);
// One of the two passes that permute items into an order, or back.
void move_items(const TensorRef& from, const TensorRef& to, const TensorRef& local, const TensorRef* places,
                bool is_into_order);

}  // namespace cuda

// Computes a forward into `y`. Checks its shape, dtype and device, but not whether it overlaps `x`: see find_overlap.
void compute_into(Function function, const TensorRef& x, const ReduceDims& dims, bool keepdim, const TensorRef& y,
                  const CudaPlan* plan = nullptr);

// Why a forward may not write `y` while it reads `x`; null if it may.
const char* find_overlap(Function function, const TensorRef& y, const TensorRef& x);

// The gradient of softmax or log_softmax over `dim`, contiguous.
OwnedTensor compute_softmax_backward(Function function, const TensorRef& grad, const TensorRef& y, int64_t dim,
                                     DType dx_type);

}  // namespace onepass
