// row_backward.cuh: the gradient dx of a row, from the forward's result y and the gradient g of y.
//
//   softmax       dx = y (g - s),       s = sum(g y)       softmin: the negative
//   log_softmax   dx = g - exp(y) s,    s = sum(g)
//
// A thread keeps its elements of y and g in fragments while the sum s is reduced. `C` is the BackwardConfig.
#pragma once

#include "block_reduce.cuh"
#include "epilogue.cuh"
#include "row_fragment.cuh"
#include "scored_row.cuh"

// A gradient g that has one value per row.
template <class C>
struct BroadcastFragment {
  typedef typename C::Acc A;
  A value;
  __device__ void opaque_registers() {}
  __device__ A operator[](int) const { return value; }
  __device__ A reconverted(int) const { return value; }
};

template <class C>
constexpr bool uses_half2 = sizeof(typename C::In) == 2 && sizeof(typename C::Out) == 2 && (C::kVecSize > 1);

// The term that an element adds to the sum of its row. A broadcast g of softmax is factored out of the sum.
template <class C>
__device__ inline typename C::Acc sum_term(typename C::Acc y, typename C::Acc g) {
  return C::Grad::template sum_term<C::kBroadcastGrad>(y, g);
}

// A thread's vectors of y and g.
template <class C, int Vecs>
struct BackwardFragment {
  typedef typename C::In In;
  typedef typename C::Out Out;
  typedef typename C::Acc A;
  static constexpr int V = C::kVecSize;
  typedef typename Conditional<uses_half2<C>, Half2Vecs<C, Vecs>, AccVecs<C, Vecs>>::type Operand;
  typedef InputGrad<C> Grad;
  typedef typename Operand::Raw Raw;
  Operand y;
  typename Conditional<C::kBroadcastGrad, BroadcastFragment<C>, Operand>::type g;
  MoreVector<C> more[reads_more<C> ? Vecs : 1];

  // Loads Vecs vectors of a row. The first begins at element `first`, and each next one `step` elements further on.
  // Vectors that belong to the row only in part become zeros: their elements are the row's head or tail elements
  // (RowTails).
  template <class Index>
  __device__ void load(const BackwardRow<C>& row, Index first, Index step, Index n) {
    const auto vector = [](const In* at) { return *reinterpret_cast<const Raw*>(at); };
    unroll<Vecs>([&](int i) {
      const Index at = first + i * step;
      if constexpr (C::kScalar) {
        y.set_elements(i, row.y + at, at, n, {});
        if constexpr (!C::kBroadcastGrad) g.set_elements(i, row.g + at, at, n, {});
      } else {
        Raw y_vec = {}, g_vec = {};
        if constexpr (reads_more<C>) more[i] = {};
        if (is_full<C>(at, n) && overlaps(row, at)) {
          if constexpr (reads_more<C>) row.score.load_more(more[i], (int)at);
          y_vec = vector(row.y + at);
          if constexpr (!C::kBroadcastGrad) g_vec = vector(row.g + at);
        }
        y.set(i, y_vec, {});
        if constexpr (!C::kBroadcastGrad) g.set(i, g_vec, {});
      }
    });
    if constexpr (C::kBroadcastGrad) g.value = to_acc(*row.g);
  }
  template <bool EvictFirst>
  static __device__ Raw read(const In* at) {
    return __builtin_bit_cast(Raw, load_vector<uint32_t, sizeof(Raw) / 4, EvictFirst>(at));
  }
  // Sets vector i of both operands, or of y, and the one value of a broadcast g.
  __device__ void set(int i, Raw y_vec, Raw g_vec, A g_value) {
    y.set(i, y_vec, {});
    if constexpr (C::kBroadcastGrad)
      g.value = g_value;
    else
      g.set(i, g_vec, {});
  }
  __device__ void opaque_registers() { y.opaque_registers(), g.opaque_registers(); }

  __device__ typename C::Sum partial_sum() const {
    return accurate_sum<typename C::Sum, Vecs * V>([&](int i) { return sum_term<C>(y[i], g[i]); });
  }
  // Replaces y by dx in vector i, which begins with element `first` of the row.
  template <class Index = int>
  __device__ void apply_epilogue(int i, const Grad& grad, Index first = 0) {
    if (grad.has_outsiders())
      replace<true>(i, grad, first);
    else
      replace<false>(i, grad, first);
  }
  // Each vector is stored as soon as it is computed.
  template <class Index>
  __device__ void apply_epilogue_and_store(const Grad& grad, Out* row, Index first, Index step, Index n) {
    unroll<Vecs>([&](int i) {
      const Index at = first + i * step;
      if (!C::kScalar && !is_full<C>(at, n)) return;
      apply_epilogue(i, grad, at);
      store_predicated<C>(row, at, n, vec(i));
    });
  }
  __device__ auto vec(int i) const { return y.vec(i); }

 private:
  template <bool HasOutsiders, class Index>
  __device__ void replace(int i, const Grad& grad, Index first) {
    y.replace(i, [&](int e) {
      const int v = e - i * V;
      if constexpr (reads_more<C>)
        return grad.template at<HasOutsiders>(y.reconverted(e), g.reconverted(e), first + v, more[i][v]);
      else
        return grad.template at<HasOutsiders>(y.reconverted(e), g.reconverted(e), first + v);
    });
  }
  template <class Index>
  static __device__ bool overlaps(const BackwardRow<C>& row, Index at) {
    if constexpr (C::kIsScored)
      return row.score.overlaps(at);
    else
      return true;
  }
};

// The head and tail elements of a row: up to V - 1 elements before its first whole vector, and as many after its last.
// They are distributed over `Threads` threads. Then no vector has to be split for them, which would cost branches in
// each.
template <class C, int Threads>
struct RowTails {
  typedef typename C::In In;
  typedef typename C::Out Out;
  typedef typename C::Acc A;
  static constexpr int V = C::kVecSize;
  static constexpr int kEach = C::kAligned || C::kScalar || V == 1 ? 0 : (2 * (V - 1) + Threads - 1) / Threads;
  A y[kEach + 1], g[kEach + 1];

  // `thread`: the number of the thread; threads from `Threads` on get no elements. `before`: the misalignment of the
  // row.
  template <class Index>
  __device__ void load(const BackwardRow<C>& row, int thread, int before, Index n) {
    unroll<kEach>([&](int k) {
      const Index at = tail_position<V>(thread + k * Threads, before, n);
      y[k] = g[k] = 0;
      if (at >= 0) y[k] = to_acc(row.y[at]), g[k] = to_acc(row.g[C::kBroadcastGrad ? 0 : at]);
    });
  }
  __device__ typename C::Sum partial_sum() const {
    A sum = 0;
    unroll<kEach>([&](int k) { sum += sum_term<C>(y[k], g[k]); });
    return begin_sum<typename C::Sum>(sum);
  }
  template <class Index>
  __device__ void store(const InputGrad<C>& grad, Out* row, int thread, int before, Index n) const {
    unroll<kEach>([&](int k) {
      const Index at = tail_position<V>(thread + k * Threads, before, n);
      if (at >= 0) row[at] = from_acc<Out>(grad(y[k], g[k], at));
    });
  }
};

// The sum s of a row, from the sum of its terms and, if g has one value per row, from that value.
template <class C>
__device__ inline typename C::Acc row_sum(typename C::Sum terms, typename C::Acc g, int64_t n) {
  typedef typename C::Acc A;
  if constexpr (!C::kBroadcastGrad) return value_of(terms);
  return C::Grad::kSumsGrad ? g * A(n) : g * value_of(terms);
}
// Whether the sum s needs no element of the row.
template <class C>
constexpr bool needs_no_reduction = C::kBroadcastGrad && C::Grad::kSumsGrad;

// The reduction of a row's sum, over lanes or over blocks. For blocks, rows alternate between two storages.
template <int Lanes, class L>
struct WarpSumReduce {
  __device__ void init() {}
  __device__ L operator()(L sum, uint32_t) { return warp_reduce<Lanes>(sum, Sum()); }
};
template <int ClusterSize, class L>
struct BlockSumReduce {
  ReduceStorage<ClusterSize, L> storages[2];
  __device__ void init() { storages[0].barrier.init(), storages[1].barrier.init(); }
  __device__ L operator()(L sum, uint32_t iteration) {
    return block_reduce(sum, Sum(), storages[iteration % 2], iteration / 2 % 2);
  }
};
