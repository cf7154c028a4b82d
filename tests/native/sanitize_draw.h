// sanitize_draw.h: what sanitize_cpu.cpp and sanitize_backward.h draw at random.
#pragma once

#include <algorithm>
#include <array>
#include <numeric>

#include "sanitize_cpu.h"

namespace {

constexpr int64_t kMost = 20000, kReach = 250000;  // elements of a call, but for some long rows; how far they lie apart

struct Draw {
  std::mt19937_64 engine;
  int64_t upto(int64_t last) { return int64_t(engine() % uint64_t(last + 1)); }
  bool one_in(int64_t n) { return upto(n - 1) == 0; }
  template <class T>
  T of(std::initializer_list<T> from) {
    return from.begin()[upto(int64_t(from.size()) - 1)];
  }
};

int64_t length(Draw& draw) {
  switch (draw.upto(4)) {
    case 0: return draw.of<int64_t>({1, 2, 3, 4, 7, 8, 15, 16, 17, 31, 32, 33});
    case 1: return draw.of<int64_t>({63, 64, 65, 127, 128, 129, 255, 257, 512, 781, 1000, 1023, 1024, 1025});
    case 2: return draw.of<int64_t>({2047, 2048, 2049, 4095, 4096, 4097, 5003, 8192, 8193, 12289});
    default: return 1 + draw.upto(300);
  }
}

// Strides of a tensor whose dims lie in some order, with gaps between them or not; `zeros`: some may be expanded. Those
// of `reduced`, if given, are 0.
inline void strides(Draw& draw, int rank, const int64_t* sizes, const bool* reduced, int64_t* made, bool gaps,
                    bool zeros) {
  int order[5] = {0, 1, 2, 3, 4};
  if (draw.one_in(2)) std::shuffle(order, order + rank, draw.engine);
  int64_t step = gaps ? draw.of<int64_t>({1, 1, 1, 2, 3}) : 1;
  for (int i = rank - 1; i >= 0; --i) {  // from the innermost out
    const int d = order[i];
    made[d] = reduced && reduced[d] ? 0 : step + (gaps && draw.one_in(3) ? draw.of<int64_t>({1, 7, step}) : 0);
    if (zeros && draw.one_in(8)) made[d] = 0;
    step = std::max(step, made[d] * sizes[d]);
  }
}

// Calls work(begin, end) for some parts of [0, count), in any order; or once for all.
template <class Work>
void in_parts(Draw& draw, int64_t count, bool whole, Work&& work) {
  std::vector<int64_t> cuts = {0, count};
  for (int64_t i = whole ? 0 : draw.upto(5); i > 0; --i) cuts.push_back(draw.upto(count));
  std::sort(cuts.begin(), cuts.end());
  std::vector<size_t> order(cuts.size() - 1);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), draw.engine);
  for (size_t i : order) {
    if (cuts[i] < cuts[i + 1]) work(cuts[i], cuts[i + 1]);
  }
}

}  // namespace
