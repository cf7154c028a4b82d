// gathered_rows.h: computes tensors of any layout as contiguous rows: copies them to rows, and copies the result back.
#pragma once

#include <algorithm>
#include <optional>

#include "operators.h"

namespace onepass {

// A tensor of a problem with its dims in another order: leading planes, outer dims, reduced dims. With `is_one_per_row`
// it has only the first element along the reduced dims.
struct Reordered {
  const TensorRef& tensor;
  int64_t sizes[kMaxDims + 1], strides[kMaxDims + 1];

  Reordered(const TensorArgs& args, int t, bool is_one_per_row) : tensor(*args.tensors[t]) {
    int64_t by_input_dim[kMaxDims];
    args.get_strides(t, by_input_dim);
    int rank = 0;
    if (args.has_planes(t)) sizes[rank] = tensor.sizes[0], strides[rank++] = tensor.strides[0];
    const bool lacks_reduced = args.is_one_per_row(t) && !args.keepdim;
    for (const bool reduced : {false, true}) {
      for (int i = 0; i < args.like().rank; ++i) {
        if (args.dims.reduced[i] != reduced || (reduced && lacks_reduced)) continue;
        sizes[rank] = reduced && is_one_per_row ? 1 : args.like().sizes[i];
        strides[rank++] = by_input_dim[i];
      }
    }
  }
  OwnedTensor view() const { return as_strided(tensor, sizes, strides); }
  OwnedTensor empty_rows(DType type) const { return empty_contiguous(tensor.rank, sizes, type, tensor); }
};

// The layout of contiguous rows; some tensors have one element per row.
inline Layout rows_of(const Layout& of, const bool* is_one_per_row) {
  Layout layout;
  Dim outer = {of.rows, {}}, reduced = {of.n, {}};
  for (int t = 0; t < kMaxTensors; ++t) {
    outer.strides[t] = is_one_per_row[t] ? 1 : of.n, reduced.strides[t] = is_one_per_row[t] ? 0 : 1;
  }
  layout.add(outer, false), layout.add(reduced, true);
  layout.view = View::rows;
  return layout;
}

// Copies the operands to contiguous rows, calls run(the problem of these rows), and copies the result back.
template <class Run>
void run_gathered(const Problem& problem, const TensorArgs& args, Run run) {
  std::optional<OwnedTensor> rows[kMaxTensors], result;
  bool is_one_per_row[kMaxTensors] = {};
  Problem gathered = problem;
  for (int t = 0; t < kMaxTensors; ++t) {
    is_one_per_row[t] = !args.tensors[t] || args.is_one_per_row(t);
    if (!args.tensors[t]) continue;
    if (problem.is_backward() && t == kGrad && !is_one_per_row[t]) {
      int64_t strides[kMaxDims];
      args.get_strides(t, strides);
      is_one_per_row[t] = true;  // if it is broadcast along all reduced dims
      for (int i = 0; i < args.like().rank; ++i)
        is_one_per_row[t] &= !args.dims.reduced[i] || args.like().sizes[i] == 1 || strides[i] == 0;
    }
    const Reordered reordered(args, t, is_one_per_row[t]);
    rows[t].emplace(reordered.empty_rows(problem.type(t)));
    gathered.tensors[t].data = TensorRef(rows[t]->get()).mutable_data();
    if (t == args.output()) {
      result.emplace(reordered.view());
    } else {
      check_torch(aoti_torch_copy_(rows[t]->get(), reordered.view().get(), 1));
    }
  }
  gathered.layout = rows_of(problem.layout, is_one_per_row);
  run(gathered);
  check_torch(aoti_torch_copy_(result->get(), rows[args.output()]->get(), 1));
}

}  // namespace onepass
