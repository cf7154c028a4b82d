// layouts.cpp: contiguous_layout is what make_forward_layout makes of contiguous rows; prints how many were compared.
#include <cstdio>
#include <initializer_list>
#include "core/layout.h"
using namespace onepass;

bool same(const DimGroup& a, const DimGroup& b) {
  if (a.count != b.count) return false;
  for (int i = 0; i < a.count; ++i) {
    const Dim &p = a.dims[i], &q = b.dims[i];
    if (p.size != q.size || !std::equal(p.strides, p.strides + kMaxTensors, q.strides)) return false;
  }
  return true;
}

int main() {
  int checked = 0;
  for (int rank = 1; rank <= 5; ++rank)
    for (int code = 0, most = 1 << (2 * rank); code < most; ++code)
      for (const bool odd : {false, true})  // a dim of size 1 may have any stride, a tensor is contiguous all the same
        for (const bool reduced : {false, true}) {
          int64_t sizes[5], x[5], y[5], x_step = 1, y_step = 1, rows = 1;
          bool reduce[5] = {};
          reduce[rank - 1] = true;
          for (int i = rank - 1; i >= 0; --i) {
            sizes[i] = (const int64_t[]){1, 2, 3, 7}[code >> (2 * i) & 3];
            const bool gone = reduced && i == rank - 1;
            x[i] = odd && sizes[i] == 1 ? 5 + 3 * i : x_step;
            y[i] = gone ? 0 : odd && sizes[i] == 1 ? 2 * i : y_step;
            x_step *= sizes[i];
            y_step *= gone ? 1 : sizes[i];
            rows *= i < rank - 1 ? sizes[i] : 1;
          }
          const Layout want = make_forward_layout(rank, sizes, x, y, reduce, reduced);
          const Layout got = contiguous_layout(rows, sizes[rank - 1], reduced);
          if (!same(want.outer, got.outer) || !same(want.reduced, got.reduced) || want.rows != got.rows ||
              want.n != got.n || want.view != got.view)
            return std::printf("differs: rank %d code %d odd %d reduced %d", rank, code, odd, reduced), 1;
          ++checked;
        }
  std::printf("%d", checked);
}
