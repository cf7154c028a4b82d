// column_grad.cuh: gradients of columns, from the forward's results y and their gradients g. The state of a column is
// one sum. The gradient of logsumexp needs none: there `saved` is x, and In is the type of g and lse.
#pragma once

#include "column_load.cuh"
#include "column_reduce.cuh"
#include "epilogue.cuh"

enum GradTensor { DX, SAVED, GRAD, LSE };

// The operands of a gradient, from the BackwardConfig.
template <class Config>
struct GradConfig : Config {
  static constexpr bool kReduces = !is_same<typename Config::Grad, LogSumExpGrad>;
  static constexpr bool kVectorGrad = kReduces && !Config::kBroadcastGrad;  // g has vectors as y has
  typedef typename Conditional<kReduces, typename Config::In, typename Config::Out>::type First;
  typedef First Loaded;
  static constexpr int kOperands = kVectorGrad ? 2 : 1, kTensors = 1 + kOperands, kFirstTensor = SAVED,
                       kResultTensor = DX, kFirstVecs = 0;
  static constexpr bool kReadsOnce = false, kThreadMaxima = false, kProvisionalMax = false, kScoresOnLoad = false;
  static constexpr bool kSkipsHidden = Config::has(kScoreSkips);
};

template <class C>
struct GradTensors {
  typename C::Out* dx;
  const typename C::First* saved;
  const typename C::In *grad, *lse;
  typename C::Score score;
  __device__ Operands<C> operands() const { return {saved, grad, nullptr}; }
  __device__ typename C::Out* result() const { return dx; }
};

// What ColumnScoreGrad is for scores that follow from their elements alone.
template <class C>
struct PlainColumnGrad {
  static constexpr bool kMayHaveOutsiders = false;
  typename C::Score score;
  template <class Tile>
  __device__ PlainColumnGrad(const GradTensors<C>& tensors, const Tile&) : score(tensors.score) {}
  template <int>
  __device__ void begin(int) const {}
  template <bool, class A>
  __device__ A backward(A grad, A, int, int, int) const {
    return score.backward(grad);
  }
  __device__ bool is_far_column(int) const { return false; }
};

// The operation: a sum for each column.
template <class Config>
struct ReducedGrad {
  typedef GradConfig<Config> C;
  typedef typename C::Acc A;
  typedef typename C::Sum L;
  typedef typename Conditional<C::kIsScored, ScoredGradTensors<C>, GradTensors<C>>::type Tensors;
  typedef ColumnTile<C> Tile;
  typedef SumPartials<A, L> Partials;
  typedef A Epilogue;
  static constexpr int V = C::kVecSize;
  static constexpr bool kWritesOfColumn = false;
  static constexpr int kRegisters =
      fragment_registers<C, typename C::First> * C::kOperands + (sizeof(A) == 8 ? 2 : 1) * V + score_registers<C>;
  const Tensors& tensors;
  const Tile& tile;
  typedef typename Conditional<C::kIsScored, ColumnScoreGrad<C>, PlainColumnGrad<C>>::type Score;
  // Whether results are made by one of two functions, so that no element has a branch of its own.
  static constexpr bool kMayHaveOutsiders = Score::kMayHaveOutsiders && !C::Grad::kSumsGrad;
  static constexpr bool kInRegisters = !C::kTwoPass && !C::kInSmem && !C::kUsesSmemVecs;  // all vectors at once
  Score score;
  A broadcast_g, sums[V], epilogues[V];

  __device__ ReducedGrad(const Tensors& tensors, const Tile& tile)
      : tensors(tensors), tile(tile), score(tensors, tile), broadcast_g(0) {
    if constexpr (C::kBroadcastGrad) {
      const Tiles& tiles = tile.tiles;
      int64_t at[3] = {};
      add_offsets<3>(
          tiles.outer,
          C::kStrided ? (tile.first_col + tile.col < tiles.inner ? tile.first_col + tile.col : 0) : tile.slice, at);
      broadcast_g = to_acc(tensors.operands().second[at[GRAD]]);
    }
  }
  template <class Load, class Reduce, class G>
  __device__ void reduce(Load& load, Reduce&, bool, G wait_for_clear) {
    if constexpr (!kInRegisters) {
      L l[V];
      unroll<V>([&](int v) { l[v] = L{}; });
      load.for_each_stage([&](auto& vectors, auto release) { absorb(vectors, l), release(); }, wait_for_clear);
      unroll<V>([&](int v) { sums[v] = value_of(l[v]); });
    } else {
      score.template begin<C::kVecs>(0);
      load.for_each_stage(
          [&](auto& vectors, auto) { unroll<V>([&](int v) { sums[v] = partial_sum<C::kVecs>(vectors, v); }); },
          wait_for_clear);
    }
  }
  __device__ const A (&maxima() const)[V] { return sums; }  // there are none
  __device__ A make_epilogue(int, A sum, A) const { return sum; }
  __device__ void finish() {
    unroll<V>([&](int v) {
      if constexpr (C::kBroadcastGrad)
        epilogues[v] = broadcast_g * (C::Grad::kSumsGrad ? A(tile.tiles.n) : epilogues[v]);
    });
  }
  // Whether elements that do not take part are to be told from others (see ColumnScoreGrad).
  __device__ bool has_outsiders() const {
    bool any = false;
    unroll<V>([&](int v) { any |= has_outsiders(v); });
    return any;
  }
  // The gradient of element v of vector i, which is the thread's vector q. They come in their order.
  template <bool HasOutsiders = !kMayHaveOutsiders && Score::kMayHaveOutsiders, int Vecs>
  __device__ A result(const OperandFragments<C, Vecs>& vectors, int i, int v, int q = 0) {
    const A y = element_value<true>({}, vectors.first, i, v), g = grad_value<true>(vectors, i, v);
    if (!kInRegisters && i == 0 && v == 0) score.template begin<Vecs>(q);
    if constexpr (HasOutsiders) {
      if (has_outsiders(v) && !score.takes_part(q, i, v)) return 0;
    }
    return score.template backward<HasOutsiders>(C::Grad::template result<typename C::Out>(y, g, epilogues[v]), y, q, i,
                                                 v);
  }

 private:
  __device__ bool has_outsiders(int v) const {
    return C::Grad::kSumsGrad || !(abs_(epilogues[v]) < infinity()) || score.is_far_column(v);
  }
  template <bool Again, int Vecs>
  __device__ A grad_value(const OperandFragments<C, Vecs>& vectors, int i, int v) const {
    if constexpr (C::kVectorGrad)
      return element_value<Again>({}, vectors.second, i, v);
    else
      return broadcast_g;
  }
  template <int Count, int First = 0, int Vecs>
  __device__ A partial_sum(const OperandFragments<C, Vecs>& vectors, int v) const {
    return pairwise_sum<Count, First>([&](int i) {
      return C::Grad::template sum_term<C::kBroadcastGrad>(element_value<false>({}, vectors.first, i, v),
                                                           grad_value<false>(vectors, i, v));
    });
  }
  // Adds vectors to sums, a stage at a time.
  template <int First = 0, int Vecs>
  __device__ void absorb(const OperandFragments<C, Vecs>& vectors, L (&l)[V]) const {
    constexpr int kCount = Vecs - First < kStageVecs ? Vecs - First : kStageVecs;
    unroll<V>([&](int v) { l[v] = add(l[v], begin_sum<L>(partial_sum<kCount, First>(vectors, v))); });
    if constexpr (First + kCount < Vecs) absorb<First + kCount>(vectors, l);
  }
};

// The operation of logsumexp, which reduces nothing: g exp(x - lse).
template <class Config>
struct PointwiseGrad {
  typedef GradConfig<Config> C;
  static constexpr bool kMayHaveOutsiders = false;
  typedef typename C::Acc A;
  typedef GradTensors<C> Tensors;
  typedef ColumnTile<C> Tile;
  typedef SumPartials<A, A> Partials;
  typedef A Epilogue;
  static constexpr int V = C::kVecSize;
  static constexpr bool kWritesOfColumn = false;
  static constexpr int kRegisters = C::kVecs * V * sizeof(typename C::First) / 4 + V + (sizeof(A) == 8 ? 2 : 1) * V;
  const typename C::Score score;
  A g[V], lse[V];

  __device__ PointwiseGrad(const Tensors& tensors, const Tile& tile) : score(tensors.score) {
    const Tiles& tiles = tile.tiles;
    int64_t at[4] = {};
    if constexpr (!C::kStrided) add_offsets<4>(tiles.outer, tile.slice, at);
    int c = tile.col;
    unroll<V>([&](int v) {
      const int64_t column = tile.first_col + c;
      g[v] = lse[v] = 0;
      if ((uint64_t)column < (uint64_t)tiles.inner) {
        if constexpr (C::kStrided) {
          for (int t = 0; t < 4; ++t) at[t] = 0;
          add_offsets<4>(tiles.outer, column, at);
        }
        g[v] = to_acc(tensors.grad[at[GRAD] + (C::kStrided ? 0 : column * tiles.steps[GRAD])]);
        lse[v] = to_acc(tensors.lse[at[LSE] + (C::kStrided ? 0 : column * tiles.steps[LSE])]);
      }
      c = tile.next_col(c);
    });
  }
  template <int Vecs>
  __device__ auto result(const OperandFragments<C, Vecs>& vectors, int i, int v, int = 0) const {
    const A x = score(element_value<false>({}, vectors.first, i, v));
    return score.backward(C::Grad::template result<typename C::Out>(x, g[v], lse[v]));
  }
};

template <class Config>
using ColumnGrad = typename Conditional<GradConfig<Config>::kReduces, ReducedGrad<Config>, PointwiseGrad<Config>>::type;
