// segment_runs.cuh: reductions of the rows of a tile, as runs of items. Each thread has a strip: K consecutive items,
// with V heads. A row is a run of items, which may begin and end within any strip. Runs are reduced within strips, then
// over the lanes of a warp, then over the warps that have the same heads. K, V and the type of the numbers come from
// the parameter C.
#pragma once

#include "warp_reduce.cuh"

template <class C>
constexpr int kMostHeadLanes = C::kSingle ? 1 : 16 / C::kVecSize;  // lanes of a warp with different heads of one item

// What warps tell each other about their runs: the part of the run that is still open at the end of the warp, the part
// of the first run that is in the warp, and whether a row begins in the warp.
template <class C>
struct Exchange {
  static constexpr int kWarps = C::kRowsPerBlock / 32;
  Vector<typename C::A, C::kVecSize> open[kWarps][kMostHeadLanes<C>], first[kWarps][kMostHeadLanes<C>];
  bool has_begin[kWarps];
};
constexpr int kQuads = 16;  // entries of a table that is indexed by four bits

// The runs of a strip. `begins` has a bit for each item, which is set if a row begins there. `goes_on` is a table with
// an entry for each value of four such bits, of four numbers: 1 if the item is in the run of the item before it, else
// 0.
template <class C>
struct Runs {
  typedef typename C::A A;
  static constexpr int V = C::kVecSize, K = C::kVecs;
  typedef Vector<A, V> Values;

  const unsigned begins;
  const uint32_t quads;  // the address of the table in shared memory
  const int head_lanes, lane, warp, group_warps;
  int start;      // the last lane up to this one in which a row begins, or the first lane with these heads
  int next;       // the next lane in which a row begins, or -1
  bool is_inner;  // whether a row begins in a lane before this one

  static_assert(K % 4 == 0, "bits are looked up by four");
  static __device__ void fill(Vector<A, 4>* quads) {
    if (threadIdx.x >= kQuads) return;
    unroll<4>([&](int i) { quads[threadIdx.x].at[i] = threadIdx.x >> i & 1 ? 0 : 1; });
  }
  __device__ Runs(unsigned begins, const Vector<A, 4>* quads, int head_lanes, int group_warps)
      : begins(begins),
        quads(smem_address(quads)),
        head_lanes(head_lanes),
        lane(threadIdx.x % 32),
        warp(threadIdx.x / 32),
        group_warps(group_warps) {
    const unsigned same = (head_lanes == 32 ? 1u : 0xffffffffu / ((1u << head_lanes) - 1)) << (lane & (head_lanes - 1));
    const unsigned those = __ballot_sync(0xffffffffu, begins != 0) & same;
    const unsigned before = those & ((1u << lane) - 1), after = those & ~((2u << lane) - 1);
    is_inner = before != 0;
    start = begins ? lane : is_inner ? 31 - __clz((int)before) : lane & (head_lanes - 1);
    next = __ffs((int)after) - 1;
  }
  __device__ bool has(int k) const { return begins >> k & 1; }

  // Replaces the value of each item by the total of the item's run. All threads take part.
  template <class Op>
  __device__ void reduce(Values (&values)[K], Exchange<C>& exchange, Op op) const {
    Values first, last, before, total;
    find_ends(values, first, last, op);
    across(first, last, before, total, exchange, op);
    accumulate(values, before, op);
    spread(values, total);
  }
  // The same for sums. Each value is multiplied by 0 or 1 instead of being selected: the product is fused with the
  // addition, and needs no predicate. Unless `kAreFinite`, strips with numbers that are not finite select. `kGrows`: no
  // number is negative, so the total of a run is the maximum of its partial sums. Returns whether `is_right` holds in
  // all threads. If it does not, the values are not changed, and numbers that are not finite do no harm.
  template <bool kGrows, bool kAreFinite>
  __device__ bool add(Values (&values)[K], Exchange<C>& exchange, bool is_right = true) const {
    GoesOn goes_on(quads, begins);
    Values first = values[K - 1], last = all_of(0), before, total;
    unroll<K>([&](int k) { unroll<V>([&](int v) { last.at[v] = last.at[v] * goes_on.at(k) + values[k].at[v]; }); });
    unroll<K>([&](int i) {
      const int k = K - 1 - i, at = k ? k - 1 : 0;
      unroll<V>([&](int v) { first.at[v] = first.at[v] * goes_on.at(k) + (k ? values[at].at[v] : A(0)); });
    });
    // A number that is not finite has spread through all products, from either end.
    A check = 0;
    if (!kAreFinite) {
      unroll<V>([&](int v) { check += (first.at[v] + last.at[v]) * A(0); });
      if (check != 0) find_ends(values, first, last, Sum());
    }
    if (!across(first, last, before, total, exchange, Sum(), is_right)) return false;
    if (!kAreFinite) unroll<V>([&](int v) { check += (before.at[v] + total.at[v]) * A(0); });
    // Sums of numbers of either sign may overflow although their total does not.
    if (!kGrows || check != 0) {
      accumulate(values, before, Sum());
      spread(values, total);
      return true;
    }
    goes_on = GoesOn(quads, begins);  // looked up again, so that no registers hold them meanwhile
    unroll<K>([&](int k) {
      unroll<V>([&](int v) { before.at[v] = values[k].at[v] = before.at[v] * goes_on.at(k) + values[k].at[v]; });
    });
    constexpr bool kHoldsAll = GoesOn::kKept > 1;
    if (!kHoldsAll) goes_on = GoesOn(quads, begins >> 1);
    unroll<K>([&](int i) {
      const int k = K - 1 - i, after = k + 1 < K && kHoldsAll ? k + 1 : k;
      unroll<V>([&](int v) {
        total.at[v] = i == 0 ? total.at[v] : max_(total.at[v] * goes_on.at(after), values[k].at[v]);
        values[k].at[v] = total.at[v];
      });
    });
    return true;
  }

 private:
  // 1 if an item is in the run of the item before it, else 0. If threads have one of several heads, registers are
  // scarce, and hold only four of these numbers at a time.
  struct GoesOn {
    static constexpr int kKept = C::kSingle || V > 1 ? K / 4 : 1;
    uint32_t quads;
    unsigned begins;
    Vector<A, 4> kept[kKept];
    int first = -1;  // the entry that is kept

    __device__ GoesOn(uint32_t quads, unsigned begins) : quads(quads), begins(begins) {
      if (kKept > 1) unroll<kKept>([&](int i) { kept[i] = look_up(i); });
    }
    __device__ A at(int k) {
      if (kKept == 1 && first != k / 4) first = k / 4, kept[0] = look_up(first);
      return kept[kKept == 1 ? 0 : k / 4].at[k % 4];
    }
    __device__ Vector<A, 4> look_up(int i) const {
      return load_smem<Vector<A, 4>>(quads + (begins >> 4 * i & (kQuads - 1)) * (int)sizeof(Vector<A, 4>));
    }
  };
  static __device__ Values all_of(A value) {
    Values all;
    unroll<V>([&](int v) { all.at[v] = value; });
    return all;
  }
  template <class Op>
  static __device__ Values both(const Values& a, const Values& b, Op op) {
    Values made;
    unroll<V>([&](int v) { made.at[v] = op(a.at[v], b.at[v]); });
    return made;
  }
  // The first and the last run of the strip.
  template <class Op>
  __device__ void find_ends(const Values (&values)[K], Values& first, Values& last, Op op) const {
    first = has(0) ? all_of(Op::template identity<A>()) : values[0], last = values[0];
    bool is_first = !has(0);
    unroll<K - 1>([&](int i) {
      const int k = i + 1;
      last = has(k) ? values[k] : both(last, values[k], op);
      is_first = is_first && !has(k);
      if (is_first) first = last;
    });
  }
  // The partial sums of each run up to each item. `before` is the part of the first run that precedes the strip.
  template <class Op>
  __device__ void accumulate(Values (&values)[K], Values before, Op op) const {
    unroll<K>([&](int k) {
      if (!has(k)) values[k] = both(before, values[k], op);
      before = values[k];
    });
  }
  // Replaces the partial sums by the totals. `total` is that of the last run.
  __device__ void spread(Values (&values)[K], Values total) const {
    unroll<K>([&](int i) {
      const int k = K - 1 - i;
      if (k + 1 < K && has(k + 1)) total = values[k];
      values[k] = total;
    });
  }
  // From the first and the last run of the strip: the part of the first run that precedes the strip, and the total of
  // the last run. Returns whether `is_right` holds in all threads.
  template <class Op>
  __device__ bool across(Values first, const Values& last, Values& before, Values& total, Exchange<C>& exchange, Op op,
                         bool is_right = true) const {
    // Over the lanes of the warp.
    Values all = last;
    for (int by = head_lanes; by < 32; by *= 2) {
      Values there;
      unroll<V>([&](int v) { there.at[v] = __shfl_up_sync(0xffffffffu, all.at[v], by); });
      if (lane - by >= start) all = both(there, all, op);
    }
    unroll<V>([&](int v) { before.at[v] = __shfl_up_sync(0xffffffffu, all.at[v], head_lanes & 31); });
    if (lane < head_lanes) before = all_of(Op::template identity<A>());
    first = both(before, first, op);
    Values there;  // the total of the run that ends in the next lane in which a row begins
    unroll<V>([&](int v) { there.at[v] = __shfl_sync(0xffffffffu, first.at[v], next & 31); });
    // Over the warps that have the same heads.
    if (group_warps == 1) {
      unroll<V>([&](int v) { all.at[v] = __shfl_sync(0xffffffffu, all.at[v], (-head_lanes & 31) | lane); });
      total = next >= 0 ? there : all;
      return __syncthreads_and(is_right);
    }
    const int of_heads = lane & (head_lanes - 1);
    const bool has_any = is_inner || begins || next >= 0, is_last = lane >= 32 - head_lanes;
    if (is_last) exchange.open[warp][of_heads] = all;
    if (has_any ? begins && !is_inner : is_last) exchange.first[warp][of_heads] = has_any ? first : all;
    if (lane == 0) exchange.has_begin[warp] = has_any;
    if (!__syncthreads_and(is_right)) return false;
    Values from = all_of(Op::template identity<A>()), to = exchange.open[warp][of_heads];
#pragma unroll 1
    for (int i = warp - 1; i >= warp / group_warps * group_warps; --i) {
      from = both(exchange.open[i][of_heads], from, op);
      if (exchange.has_begin[i]) break;
    }
#pragma unroll 1
    for (int i = warp + 1; i < (warp / group_warps + 1) * group_warps; ++i) {
      to = both(to, exchange.first[i][of_heads], op);
      if (exchange.has_begin[i]) break;
    }
    total = next >= 0 ? there : to;
    if (!is_inner) {
      before = both(from, before, op);
      if (!begins) total = both(from, total, op);
    }
    return true;
  }
};
