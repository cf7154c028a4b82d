// broadcast_sum.cpp: sums over the dims that a tensor was broadcast along, compiled once per instruction set
// (ONEPASS_ISA is its name and namespace).
//
//   columns  adjacent elements belong to different sums: a tile of sums stays in the cache, and slices are added to it
//            one after another. Narrow slices that are contiguous are added together, as one slice with more columns
//   rows     adjacent elements belong to one sum: sums are computed one at a time, in the lanes of vectors
//
// Sums are computed in the accumulator's type. The sum of a chunk is a sequence of additions, and the sums of chunks
// are added as doubles.
#include "broadcast_sum.h"

#include "dispatch.h"
#include "plan.h"
#include "reduce_simd.h"
#include "tiles.h"

namespace onepass::ONEPASS_ISA {

namespace {

constexpr int64_t kTileSums = 4096;   // of a tile: half of the L1 cache
constexpr int kTogether = 4;          // slices that are added together
constexpr int64_t kSlices = 128;      // of a chunk
constexpr int64_t kRowChunk = 16384;  // elements of a chunk of a row

// T is the type of the elements.
template <class T>
struct BroadcastSum {
  using A = Acc<T>;
  using Vector = V<A>;
  static constexpr int L = kLanes<A>;
  const SumProblem& p;
  const SumPlan& plan;
  const T* const x = static_cast<const T*>(p.x);

  template <int K>
  static ONEPASS_INLINE void load(const T* from, Vector (&v)[K]) {
    if constexpr (std::is_same_v<T, double>) {
      for (int k = 0; k < K; ++k) v[k] = load_as(from + k * L);
    } else {
      load_vectors<false>(from, v);
    }
  }
  static ONEPASS_INLINE Vector load_part(const T* from, int64_t count) {
    if constexpr (std::is_same_v<T, double>) {
      return load_tail(from, count);
    } else {
      return load_tail(from, count, 0);
    }
  }

  // Stores `count` sums, beginning at `at`. The first one is that of column `first` of its run.
  void store(const int64_t* at, int64_t first, int64_t count, A* from) const {
    if (p.divisor != 1) {
      for (int64_t j = 0; j < count; j += L) store_as(from + j, load_as(from + j) / A(p.divisor));
    }
    dispatch_type(p.out, [&](auto type) {
      using Y = TypeOf<decltype(type)>;
      const int64_t step = plan.in_columns ? p.kept.innermost().strides[kY] : 1;
      Y* const y = static_cast<Y*>(p.y) + at[kY] + first * step;
      if (step == 1) return store_run<true>(y, count, from, false);
      for (int64_t j = 0; j < count; ++j) y[j * step] = from_acc<Y>(from[j]);
    });
  }

  // Columns -----------------------------------------------------------------------------------------------------------

  // Calls work(tile, offsets of its run, its first column, number of its columns) for each tile.
  template <class Work>
  void for_each_tile(int64_t begin, int64_t end, Work work) const {
    const int64_t size = plan.in_columns ? p.kept.innermost().size : 1, of_run = ceil_div(size, plan.width);
    const int innermost = plan.in_columns ? 1 : 0;
    OffsetCalculator at(p.kept, begin / of_run, innermost);
    for (int64_t tile = begin; tile < end; ++tile) {
      const int64_t first = tile % of_run * plan.width;
      work(tile, at.offset, first, std::min(plan.width, size - first));
      if (first + plan.width >= size) at.next();
    }
  }
  // Adds the columns of kCount slices, one after another, to the sums. With the first slices the sums begin at 0. The
  // slices at `next` are prefetched.
  template <int kCount>
  static void add_slices(const T* const (&from)[kTogether], const T* next, int64_t count, bool is_first, A* to) {
    int64_t i = 0;
    const auto add = [&](auto& sum, auto load_columns) __attribute__((always_inline)) {
      constexpr int K = int(sizeof(sum) / sizeof(Vector));
#pragma GCC unroll 4
      for (int s = 0; s < kCount; ++s) {
        Vector v[K];
        load_columns(from[s] + i, v);
#pragma GCC unroll 4
        for (int k = 0; k < K; ++k) sum[k] = sum[k] + v[k];
      }
#pragma GCC unroll 4
      for (int k = 0; k < K; ++k) store_as(to + i + k * L, sum[k]);
    };
    for (; i + 4 * L <= count; i += 4 * L) {
      Vector sum[4];
      for (int64_t j = 0; j < 4 * L; j += kLine / int64_t(sizeof(T))) __builtin_prefetch(next + i + j);
#pragma GCC unroll 4
      for (int k = 0; k < 4; ++k) sum[k] = is_first ? Vector{} : load_as(to + i + k * L);
      add(sum, [](const T* columns, auto& v) __attribute__((always_inline)) { load(columns, v); });
    }
    for (; i < count; i += L) {
      Vector sum[1] = {};
      if (!is_first) sum[0] = load_as(to + i);
      if (i + L <= count) {
        add(sum, [](const T* columns, auto& v) __attribute__((always_inline)) { load(columns, v); });
      } else {
        add(sum,
            [=](const T* columns, auto& v) __attribute__((always_inline)) { v[0] = load_part(columns, count - i); });
      }
    }
  }
  // The sums of the slices [first, last) of a tile. Narrow slices that are contiguous are added as one.
  void sum_slices(const T* tile, int64_t first, int64_t last, int64_t count, A* sums) const {
    OffsetCalculator at(p.summed, first);
    if (plan.run > 1) {
      std::fill_n(sums, up_to(plan.run * count, L), A(0));
      const int64_t fast = p.summed.innermost().size;
      for (int64_t i = first, some; i < last; i += some, at.advance(some)) {
        some = std::min({plan.run, fast - i % fast, last - i});
        const T* const from[kTogether] = {tile + at.offset[kX]};
        add_slices<1>(from, from[0] + some * count, some * count, false, sums);
      }
      for (int64_t k = 1; k < plan.run; ++k) {
        for (int64_t j = 0; j < count; ++j) sums[j] += sums[k * count + j];
      }
      return;
    }
    for (int64_t i = first; i < last;) {
      const int64_t some = std::min<int64_t>(kTogether, last - i);
      const T* from[kTogether];
      for (int64_t s = 0; s < some; ++s, at.next()) from[s] = tile + at.offset[kX];
      const T* const next = tile + at.offset[kX];
      switch (some) {
        case 1: add_slices<1>(from, next, count, i == first, sums); break;
        case 2: add_slices<2>(from, next, count, i == first, sums); break;
        case 3: add_slices<3>(from, next, count, i == first, sums); break;
        default: add_slices<kTogether>(from, next, count, i == first, sums);
      }
      i += some;
    }
  }

  // Rows --------------------------------------------------------------------------------------------------------------

  struct Total {
    Vector sum{}, error{};
    ONEPASS_INLINE void add(Vector v) { add_compensated(sum, error, v); }
    double value() const {
      double total = 0;
      for (int j = 0; j < L; ++j) total += double(sum[j]);
      for (int j = 0; std::isfinite(total) && j < L; ++j) total += double(error[j]);
      return total;
    }
  };
  static void add_run(const T* from, int64_t count, Total& total) {
    constexpr int64_t step = 4 * L, block = 8 * step;  // a lane adds a few numbers, then a few sums
    int64_t i = 0;
    while (i + step <= count) {
      Vector part[4] = {}, v[4];
      for (const int64_t end = std::min(i + block, count); i + step <= end; i += step) {
        load(from + i, v);
#pragma GCC unroll 4
        for (int k = 0; k < 4; ++k) part[k] += v[k];
      }
      total.add((part[0] + part[1]) + (part[2] + part[3]));
    }
    Vector few{}, v[1];
    for (; i + L <= count; i += L) load(from + i, v), few += v[0];
    if (i < count) few += load_part(from + i, count - i);
    total.add(few);
  }
  // The sum of the elements [first, last) of a row.
  double sum_row(const T* row, int64_t first, int64_t last) const {
    const int64_t size = p.summed.innermost().size;
    OffsetCalculator at(p.summed, first / size, 1);
    Total total;
    for (int64_t i = first; i < last; at.next()) {
      const int64_t begin = i % size, count = std::min(size - begin, last - i);
      add_run(row + at.offset[kX] + begin, count, total), i += count;
    }
    return total.value();
  }

  static void keep(const A* sums, int64_t count, double* part) {
#pragma omp simd
    for (int64_t j = 0; j < count; ++j) part[j] = double(sums[j]);
  }

  // Chunks ------------------------------------------------------------------------------------------------------------

  void run(double* parts, int64_t begin, int64_t end) const {
    alignas(64) A sums[kTileSums + L];
    const auto work = [&](int64_t tile, const int64_t* at, int64_t first, int64_t count, int64_t from, int64_t to) {
      for (int64_t chunk = from; chunk < to; ++chunk) {
        const int64_t begins = chunk * plan.chunk, ends = std::min(begins + plan.chunk, p.n);
        double* const part = parts + (tile * plan.chunks + chunk) * plan.width;
        if (plan.in_columns) {
          sum_slices(x + at[kX] + first, begins, ends, count, sums);
          if (plan.chunks > 1) keep(sums, count, part);
        } else {
          const double sum = sum_row(x + at[kX], begins, ends);
          plan.chunks > 1 ? void(*part = sum) : void(sums[0] = A(sum));
        }
        if (plan.chunks == 1) store(at, first, count, sums);
      }
    };
    // The first and the last tile may have only some of their chunks here.
    const int64_t last = ceil_div(end, plan.chunks);
    for_each_tile(begin / plan.chunks, last, [&](int64_t tile, const int64_t* at, int64_t first, int64_t count) {
      const int64_t item = tile * plan.chunks;
      work(tile, at, first, count, std::max(begin - item, int64_t(0)), std::min(end - item, plan.chunks));
    });
  }
  void merge(const double* parts, int64_t begin, int64_t end) const {
    alignas(64) A sums[kTileSums + L];
    double total[kTileSums];
    for_each_tile(begin, end, [&](int64_t tile, const int64_t* at, int64_t first, int64_t count) {
      std::fill_n(total, count, 0.0);
      for (int64_t chunk = 0; chunk < plan.chunks; ++chunk) {
        const double* const part = parts + (tile * plan.chunks + chunk) * plan.width;
#pragma omp simd
        for (int64_t j = 0; j < count; ++j) total[j] += part[j];
      }
      for (int64_t j = 0; j < count; ++j) sums[j] = A(total[j]);
      store(at, first, count, sums);
    });
  }
};

}  // namespace

SumPlan plan_sum(const SumProblem& p) {
  SumPlan plan;
  const auto kept = p.kept.innermost(), summed = p.summed.innermost();
  plan.in_columns = p.kept.count > 0 && kept.strides[kX] == 1;
  plan.tiles = p.sums, plan.chunk = kRowChunk;
  if (plan.in_columns) {
    const int64_t of_run = ceil_div(kept.size, kTileSums);
    plan.width = ceil_div(kept.size, of_run), plan.tiles = p.sums / kept.size * of_run;
    if (summed.strides[kX] == kept.size) {
      plan.run = std::clamp<int64_t>(kTileSums / 2 / kept.size, 1, summed.size);
    }
    plan.chunk = kSlices * plan.run;
  }
  plan.chunks = ceil_div(p.n, plan.chunk);
  plan.grain_size = std::max<int64_t>(1, kCpuGrain / std::max<int64_t>(1, plan.width * std::min(plan.chunk, p.n)));
  return plan;
}

void run_sum(const SumProblem& p, const SumPlan& plan, double* parts, int64_t begin, int64_t end) {
  dispatch_type(p.in, [&](auto type) { BroadcastSum<TypeOf<decltype(type)>>{p, plan}.run(parts, begin, end); });
}
void merge_sums(const SumProblem& p, const SumPlan& plan, const double* parts, int64_t begin, int64_t end) {
  dispatch_type(p.in, [&](auto type) { BroadcastSum<TypeOf<decltype(type)>>{p, plan}.merge(parts, begin, end); });
}

}  // namespace onepass::ONEPASS_ISA
