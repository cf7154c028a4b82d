// short.h: a call's short rows of unit stride, in groups (short_group.h).
#pragma once

#include "short_group.h"

namespace onepass::ONEPASS_ISA {

// Rows [first, first + count) of the `rows` of a call.
template <Function F, class X, class Y, int Few>
void some_short(const X* x, Y* y, int64_t n, int64_t x_stride, int64_t y_stride, int64_t first, int64_t count,
                int64_t rows, bool past) {
  alignas(64) float kept[kKept];
  Short<F, X, Y, Few> group;
  group.n = n, group.y_stride = y_stride, group.kept = kept;
  group.whole = n / kWidth, group.vectors = (n + kWidth - 1) / kWidth;
  group.last_lanes = first_lanes(n - (group.vectors - 1) * kWidth);
  const int64_t width = group.vectors * kWidth, end = (rows - 1) * x_stride + n, bytes = n * int64_t(sizeof(Y));
  const int64_t fit = kKept / (kWidth * width), most = kWidth * (fit < kGroups ? fit : kGroups);
  const bool lines =
      kStreams && past && bytes % kLine == 0 && uintptr_t(y) % kLine == 0 && y_stride * int64_t(sizeof(Y)) % kLine == 0;
  for (int64_t done = 0; done < count; done += group.count) {
    const int64_t at = first + done, left = count - done;
    const auto readable = [&](int64_t rows_read) {
      return x_stride >= 0 && (at + rows_read - 1) * x_stride + width <= end;
    };
    group.x = x + at * x_stride, group.x_stride = x_stride, group.y = y + at * y_stride;
    group.count = int(left < most ? left : most);
    if (!readable((group.count + kWidth - 1) / kWidth * kWidth)) group.count = int(left < kWidth ? left : kWidth);
    if (readable(kWidth)) {
      group.run(rows, lines);
    } else {  // what lies behind these rows may not be read
      alignas(64) X copy[kKept];
      std::memset(static_cast<void*>(copy), 0, sizeof(X) * size_t(kWidth * width));
      for (int64_t r = 0; r < group.count; ++r) std::memcpy(copy + r * width, group.x + r * x_stride, n * sizeof(X));
      group.x = copy, group.x_stride = width;
      group.run(rows, lines);
    }
  }
}

template <Function F, class X, class Y>
void short_rows(const X* x, Y* y, int64_t n, int64_t x_stride, int64_t y_stride, int64_t first, int64_t count,
                int64_t rows, bool past) {
  if (n <= kWidth) return some_short<F, X, Y, 1>(x, y, n, x_stride, y_stride, first, count, rows, past);
  if (n <= 2 * kWidth) return some_short<F, X, Y, 2>(x, y, n, x_stride, y_stride, first, count, rows, past);
  some_short<F, X, Y, 0>(x, y, n, x_stride, y_stride, first, count, rows, past);
}

}  // namespace onepass::ONEPASS_ISA
