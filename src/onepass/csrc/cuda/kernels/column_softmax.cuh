// column_softmax.cuh: the operation ColumnSoftmax, for softmaxes of columns and their reductions. A thread reduces its
// elements to the states of its columns, and computes results from the states of the whole columns.
#pragma once

#include "column_load.cuh"
#include "column_online.cuh"
#include "column_reduce.cuh"
#include "epilogue.cuh"
#include "exp_half.cuh"

template <class Config>
struct ForwardOperands : Config {
  static constexpr bool kScoresOnLoad = Config::kIsScored;
  typedef typename Config::In Loaded;
  typedef typename Conditional<kScoresOnLoad, typename Config::Acc, Loaded>::type In;
  typedef In First;
  typedef typename Conditional<kScoresOnLoad, MadeScores, typename Config::Operand>::type Operand;
  static constexpr int kOperands = 1, kTensors = 2, kFirstTensor = 0, kResultTensor = 1;
  static constexpr bool kReduces = true, kReadsOnce = Config::Epilogue::kOnePerRow;
};
// How columns are reduced, derived from the ForwardConfig.
template <class Config>
struct ColumnConfig : ForwardOperands<Config> {
  typedef typename ForwardOperands<Config>::In In;
  typedef typename ForwardOperands<Config>::Operand Operand;
  typedef typename Config::Out Out;
  typedef typename Config::Acc Acc;
  static constexpr bool kPipelined = is_pipelined<ForwardOperands<Config>>, kHalfOut = sizeof(Out) == 2;
  static constexpr bool kConvertsHalf2 = is_half2<Config, In> && !Operand::kIsRounded;
  // Softmaxes with half results are reduced while elements arrive, relative to a provisional maximum. This is the
  // maximum of the block's first elements, one stage, which stay in shared memory. (Functions with the logarithm of the
  // sum need the real maximum: if one element is far above the others, the logarithm is nearly 0.)
  static constexpr bool kProvisionalMax = kHalfOut && Config::kUsesSmemVecs && !Config::kIsScored &&
                                          !Config::kTwoPass && !kPipelined && Config::Epilogue::kTakesExp;
  static constexpr int kFirstVecs = kProvisionalMax ? kStageVecs : 0;
  // Whether exponentials are kept for half results, in the registers of float scores. (With a sink they would be
  // rescaled.)
  static constexpr bool kKeepsScoreExp = kHalfOut && Config::kIsScored && sizeof(In) == 4 && !Config::kTwoPass &&
                                         !Config::kUsesSmemVecs && !Config::has(kScoreRow) &&
                                         Config::Epilogue::kTakesExp;
  // Whether the sums of threads are relative to the thread's own maxima when they are reduced, and not to the block's.
  // Over the grid this is 2 to 4% faster, and for half results in one block up to 4%. For float results in blocks and
  // clusters it is as fast or 2% slower. For half results in clusters it is 7 to 13% slower, because of its shared
  // memory (H200, 2026-11-23).
  static constexpr bool kThreadMaxima =
      ((Config::kGrid || Config::kInSmem) && kPipelined) ||
      (kHalfOut && Config::kClusterSize == 1 && !Config::kTwoPass && !kProvisionalMax && !kKeepsScoreExp);
  // Whether exponentials replace their elements. Exponentials of doubles do not if blocks share columns: to make them
  // relative to another maximum would round them again.
  static constexpr bool kKeepsExp =
      !Config::kTwoPass && !kPipelined && Config::Epilogue::kTakesExp &&
      (sizeof(In) == sizeof(Out) || kKeepsScoreExp) && sizeof(Acc) == sizeof(In) &&
      (sizeof(Acc) == 4 || (Config::kClusterSize == 1 && !Config::kGrid && !Config::has(kScoreRow)));
  // Whether floats in shared memory are reduced while they arrive, relative to the maximum of the floats in registers.
  static constexpr bool kRescaleOnArrival = kKeepsExp && Config::kUsesSmemVecs && sizeof(Acc) == 4;
  // Whether exponentials of half results stay in registers as floats, in addition to the elements.
  static constexpr bool kKeepsFloatExp = Config::kStaged && kHalfOut && !kKeepsExp && Config::Epilogue::kTakesExp &&
                                         sizeof(Acc) == 4 && Config::kVecs * Config::kVecSize <= 16;
  static constexpr int kSlack = 2;  // an element may exceed the maximum so far by this much
};

// The type of a thread's sum of a column. With kRescaleOnArrival the sum has few terms, one of the registers and one
// per stage. A float is then exact enough, and leaves registers for the elements.
template <class C>
using ThreadSum = typename Conditional<C::kRescaleOnArrival, typename C::Acc, typename C::Sum>::type;

// Multiplies by exp(d), d <= 0, with the precision of two floats: the factor is (1 + low) * scale * scale_rest.
struct ScaledExp {
  float low, scale, scale_rest;
  __device__ explicit ScaledExp(float d) {
    d = fmaxf(d, -300.0f);
    const float j = rintf(d * kLog2e), r = fmaf(j, -1.42860677e-6f, fmaf(j, -0.693145752f, d));
    low = fmaf(r, 1.98412698e-4f, 1.38888889e-3f);
    low = fmaf(low, r, 8.33333333e-3f), low = fmaf(low, r, 4.16666667e-2f), low = fmaf(low, r, 1.66666667e-1f);
    low = fmaf(low, r, 0.5f), low = fmaf(low * r, r, r);
    scale = exp2_(rintf(j * 0.5f)), scale_rest = exp2_(j - rintf(j * 0.5f));
  }
  __device__ float operator()(float e) const { return fmaf(e, low, e) * scale * scale_rest; }
};

// Multiplies the exponentials of each column by exp(difference) of that column.
template <class C, int Vecs>
__device__ inline void rescale(ColumnFragment<C, float, Vecs>& fragment, const float (&difference)[C::kVecSize]) {
  unroll<C::kVecSize>([&](int v) {
    const ScaledExp factor(difference[v]);
    unroll<Vecs>([&](int i) { fragment.set(i, v, factor(fragment.get(i, v))); });
  });
}
template <int V>
__device__ inline void rescale_sums(float (&sums)[V], const float (&difference)[V]) {
  unroll<V>([&](int v) { sums[v] = ScaledExp(difference[v])(sums[v]); });
}

// The epilogue of the elements of a column. It is made once, from the column's state and the block's maximum.
template <class C>
struct ElementEpilogue {
  typedef typename C::Acc A;
  typedef typename C::Epilogue Own;
  typename Conditional<Own::kOnePerRow, SoftmaxEpilogue<typename C::Out>, Own>::type epilogue;
  __device__ static ElementEpilogue make(State<A> column, A) { return {{column}}; }
  __device__ A operator()(A x) const {
    if constexpr (sizeof(A) == 8 || C::kHalfOut || C::Epilogue::kTakesX) {
      return epilogue(x);
    } else {  // exp_for_sum with its correction in the factor: rounded once, in eight instructions instead of eleven
      const float v = x - epilogue.m, t = v * kLog2e, e = exp2_(t), off = fminf(fmaf(t, -0.693147181f, v), 1e-3f);
      return fmaf(e, epilogue.factor, e * fmaf(off, epilogue.factor, epilogue.factor_lo));
    }
  }
};
// For half results.
template <class C>
struct alignas(2 * sizeof(typename C::Acc)) HalfEpilogue {
  float scaled_m, log2_l;
  __device__ static HalfEpilogue make(State<float> column, float) {
    return {column.m * ShortLog2e<typename C::Out>::kFactor, is_finite(column.m) ? log2_(column.l) : nan_()};
  }
  __device__ float operator()(float x) const { return softmax_half<typename C::Out>(x, scaled_m, log2_l); }
};
// For exponentials exp(x - block_max) that are kept: each is multiplied by a factor.
template <class C>
struct alignas(2 * sizeof(typename C::Acc)) ExpEpilogue {
  typedef typename C::Acc A;
  A factor, factor_lo;
  __device__ static ExpEpilogue make(State<A> column, A block_max) {
    const typename C::Epilogue epilogue(column);
    ExpEpilogue made = {epilogue.factor, sizeof(A) == 8 ? 0 : epilogue.factor_lo};
    if constexpr (C::kClusterSize > 1 || C::kGrid || C::has(kScoreRow))
      made.rescale(block_max == -infinity() ? 0 : finite_or_zero(block_max) - finite_or_zero(column.m));
    return made;
  }
  __device__ A operator()(A e) const {
    if constexpr (sizeof(A) == 8)
      return e / factor;
    else
      return C::kHalfOut ? e * factor : fmaf(e, factor, e * factor_lo);
  }

 private:
  // Multiplies the factor by exp(d), d <= 0. (A NaN is already in the factor.)
  __device__ void rescale(float d) {
    const ScaledExp by(d);
    const float high = fmaf(factor, by.low, factor);
    factor_lo = (fmaf(factor, by.low, factor - high) + fmaf(factor_lo, by.low, factor_lo)) * by.scale * by.scale_rest;
    factor = high * by.scale * by.scale_rest;
  }
};
template <class C>
using ColumnEpilogue = typename Conditional<
    C::kKeepsExp, ExpEpilogue<C>,
    typename Conditional<C::kHalfOut && !C::Epilogue::kTakesX, HalfEpilogue<C>, ElementEpilogue<C>>::type>::type;

// The tensors that a kernel gets.
template <class C>
struct ColumnTensors {
  const typename C::In* x;
  typename C::Result* y;
  typename C::Score score;
  __device__ Operands<C> operands() const { return {x, x, nullptr}; }
  __device__ typename C::Result* result() const { return y; }
  __device__ typename C::Operand operand() const { return {score}; }
};

// The operation on columns: their states and results (see columns.cu).
template <class Config>
struct ColumnSoftmax {
  typedef ColumnConfig<Config> C;
  typedef typename C::In In;
  typedef typename C::Out Out;
  typedef typename C::Acc A;
  typedef typename C::Sum L;
  typedef ColumnTile<C> Tile;
  typedef StatePartials<A, L> Partials;
  typedef ColumnEpilogue<C> Epilogue;
  static constexpr int V = C::kVecSize;
  static constexpr bool kWritesOfColumn = C::kReadsOnce || C::has(kScoreRow);  // make_epilogue stores
  static constexpr bool kMayHaveOutsiders = false;                             // only gradients have them
  static constexpr int kRegisters =
      fragment_registers<C, In> + 2 * V * sizeof(A) / 4 + (C::kKeepsFloatExp ? C::kVecs * V : 0) + score_registers<C>;
  typedef typename Conditional<C::kIsScored, ScoredColumnTensors<C>, ColumnTensors<C>>::type Tensors;
  const Tensors& tensors;
  const Tile& tile;
  const typename C::Operand operand;
  A m[V], sums[V];
  Epilogue epilogues[V];
  float exps[C::kKeepsFloatExp ? C::kVecs : 1][V], factors[V];  // only with kKeepsFloatExp

  __device__ ColumnSoftmax(const Tensors& tensors, const Tile& tile)
      : tensors(tensors), tile(tile), operand(tensors.operand()) {}

  // Reduces the thread's elements to m and sums.
  template <class Load, class Reduce, class G>
  __device__ void reduce(Load& load, Reduce& column_reduce, bool is_shared, G wait_for_clear) {
    if constexpr (C::kTwoPass)
      reduce_by_fragments(load, column_reduce, is_shared, wait_for_clear);
    else if constexpr (C::kPipelined)
      reduce_online(load, column_reduce, is_shared, wait_for_clear);
    else if constexpr (C::kProvisionalMax)
      reduce_from_provisional_max(load, column_reduce, is_shared, wait_for_clear);
    else
      reduce_resident(load, column_reduce, is_shared, wait_for_clear);
  }
  __device__ const A (&maxima() const)[V] { return m; }
  // The epilogue of a whole column. If the function is a reduction, its result is stored here.
  __device__ Epilogue make_epilogue(int column, StatePair<A> state, A block_max) const {
    if constexpr (C::kIsScored) state = tensors.finish(tile, column, state);
    if constexpr (C::Epilogue::kOnePerRow) store_column(column, {state.m, state.l});
    return Epilogue::make({state.m, state.l}, block_max);
  }
  __device__ void finish() {
    if constexpr (C::kKeepsFloatExp) {
      unroll<V>([&](int v) { factors[v] = softmax_half<Out>(m[v], epilogues[v].scaled_m, epilogues[v].log2_l); });
    }
  }
  template <int Vecs>
  __device__ A result(const OperandFragments<C, Vecs>& vectors, int i, int v, int = 0) const {
    if constexpr (C::kKeepsFloatExp)
      return exps[i][v] * factors[v];
    else if constexpr (C::kKeepsExp)
      return epilogues[v](vectors.first.get(i, v));
    else
      return epilogues[v](value<true>(vectors.first, i, v));
  }

 private:
  template <bool Again, int Vecs>
  __device__ A value(const ColumnFragment<C, In, Vecs>& fragment, int i, int v) const {
    return element_value<Again>(operand, fragment, i, v);
  }
  // The maxima of a thread's elements of each column; half types have two in a word. `neutral` is -inf.
  template <int Vecs>
  __device__ void max_of(const ColumnFragment<C, In, Vecs>& fragment, uint32_t (&max)[(V + 1) / 2]) const {
    unroll<V / 2>([&](int w) {
      max[w] = operand.score.apply_half2(fragment.at[0].at[w]);
#pragma unroll
      for (int i = 1; i < Vecs; ++i) max[w] = max_half2<In>(max[w], operand.score.apply_half2(fragment.at[i].at[w]));
    });
  }
  template <int Vecs>
  __device__ void max_of(const ColumnFragment<C, In, Vecs>& fragment, A (&max)[V], A neutral = -infinity()) const {
    if constexpr (C::kConvertsHalf2) {
      uint32_t words[(V + 1) / 2];
      max_of(fragment, words);
      // A NaN does not count as a maximum.
      unroll<V>([&](int v) { max[v] = max_(A(to_acc(get_half<In>(words[v / 2], v % 2))), A(-infinity())); });
    } else {
      unroll<V>([&](int v) {
        max[v] = neutral;
        unroll<Vecs>([&](int i) { max[v] = max_(value<false>(fragment, i, v), max[v]); });
      });
    }
  }
  template <int Vecs>
  __device__ void update_max(const ColumnFragment<C, In, Vecs>& fragment) {
    A here[V];
    max_of(fragment, here);
    unroll<V>([&](int v) { m[v] = max_(m[v], here[v]); });
  }
  // The sum of exp(x - m) over a thread's elements of a column. No element is above m. With kKeepsExp the exponentials
  // replace the elements.
  template <int Vecs>
  __device__ A sum_exp(ColumnFragment<C, In, Vecs>& fragment, int v) {
    const A base = C::kProvisionalMax            ? m[v]
                   : C::kHalfOut || C::kKeepsExp ? finite_or_zero(m[v])
                                                 : finite_for_sum(m[v]);
    if constexpr (C::kKeepsExp) {
      return value_of(accurate_sum<L, Vecs>([&](int i) {
        const A e = exp_<Out>(value<true>(fragment, i, v) - base);
        fragment.set(i, v, e);
        return e;
      }));
    } else if constexpr (C::kHalfOut) {
      const A scaled_base = base * ShortLog2e<Out>::kFactor;
      A sum = 0;
      unroll<Vecs>([&](int i) {
        const A root = sqrt_exp<Out>(value<true>(fragment, i, v), scaled_base);
        if constexpr (C::kKeepsFloatExp)
          sum += exps[i][v] = root * root;
        else
          sum = fmaf(root, root, sum);
      });
      return sum;
    } else {
      return pairwise_sum<Vecs, 0>([&](int i) { return exp_for_sum(value<true>(fragment, i, v) - base); });
    }
  }

  template <class Load, class Reduce, class G>
  __device__ void reduce_by_fragments(Load& load, Reduce& column_reduce, bool is_shared, G wait_for_clear) {
    L l[V];
    unroll<V>([&](int v) { m[v] = -infinity(), l[v] = L{}; });
    load.for_each_stage(
        [&](auto& vectors, auto) {
          A here[V];
          max_of(vectors.first, here);
          vectors.opaque_registers();
          unroll<V>([&](int v) {
            const A old_m = m[v];
            m[v] = max_(old_m, here[v]);
            l[v] = add(scale(l[v], exp_for_sum(old_m - finite_for_sum(m[v]))), begin_sum<L>(sum_exp(vectors.first, v)));
          });
        },
        wait_for_clear);
    A max[V];
    unroll<V>([&](int v) { max[v] = m[v]; });
    if (is_shared) column_reduce.block_max(max, tile);
    unroll<V>(
        [&](int v) { sums[v] = value_of(scale(l[v], exp_for_sum(m[v] - finite_for_sum(max[v])))), m[v] = max[v]; });
  }

  template <class Load, class Reduce, class G>
  __device__ void reduce_online(Load& load, Reduce& column_reduce, bool is_shared, G wait_for_clear) {
    typedef ColumnOnlineState<C> Online;
    Online state;
    state.init();
    load.for_each_stage(
        [&](auto& stage, auto release) {
          typename Online::Maxima stage_max;
          max_of(stage.first, stage_max);
          stage.opaque_registers();
          state.update_max(stage_max);
          release();
#pragma unroll
          for (int v = 0; v < V; ++v)
            state.add_elements(v, stage.first, [&](int i) { return value<true>(stage.first, i, v); });
        },
        wait_for_clear);
    load.fragment.opaque_registers();
    unroll<V>([&](int v) { m[v] = state.max(v); });
    if (!C::kThreadMaxima && is_shared) column_reduce.block_max(m, tile);
    unroll<V>([&](int v) { sums[v] = state.sum_relative_to(v, m[v]); });
  }

  // If an element is so far above the provisional maximum that a sum overflows, the block starts again, relative to its
  // real maximum.
  template <class Load, class Reduce, class G>
  __device__ void reduce_from_provisional_max(Load& load, Reduce& column_reduce, bool is_shared, G wait_for_clear) {
    auto& stage = load.stage.first;
    auto& fragment = load.fragment.first;
    for (bool is_retry = false;; is_retry = true) {
      load.copy_vecs_to_smem(0, 0, C::kFirstVecs);
      load.load_registers();
      load.copy_vecs_to_smem(C::kVecs + C::kFirstVecs, C::kFirstVecs, load.smem_vecs());
      AsyncCopy::wait_all_but(is_retry ? 0 : load.smem_vecs() / kStageVecs - 1);
      load.load_stage(0, 0), max_of(stage, m), stage.opaque_registers();
      if (__builtin_expect(is_retry, false)) {
        update_max(fragment);
        load.template for_each_smem_stage<false>(C::kFirstVecs, [&](int) { update_max(stage); });
      } else {
        wait_for_clear();
      }
      unroll<V>([&](int v) { m[v] = max_(m[v], A(-3.40282347e38f)); });  // any element is far above -inf
      if (is_shared) column_reduce.block_max(m, tile);
      load.load_stage(0, 0);
      unroll<V>([&](int v) { sums[v] = sum_exp(stage, v); });
      unroll<V>([&](int v) { sums[v] += sum_exp(fragment, v); });
      fragment.opaque_registers();
      load.template for_each_smem_stage<true>(C::kFirstVecs,
                                              [&](int) { unroll<V>([&](int v) { sums[v] += sum_exp(stage, v); }); });
      bool overflows = false;
      unroll<V>([&](int v) { overflows |= sums[v] > 1e30f; });
      overflows &= !is_retry;
      if (is_shared) overflows = column_reduce.publish(sums, tile, overflows);
      if (__builtin_expect(!overflows, true)) break;
    }
  }

  // The maximum of all elements is reduced first. With kRescaleOnArrival it is the maximum of the elements in
  // registers. An element in shared memory that is far above it rescales what has been computed.
  template <class Load, class Reduce, class G>
  __device__ void reduce_resident(Load& load, Reduce& column_reduce, bool is_shared, G wait_for_clear) {
    auto& stage = load.stage.first;
    auto& fragment = load.fragment.first;
    uint32_t lowest = 0xff800000;  // -inf
    if constexpr (C::kUsesSmemVecs && !C::kRescaleOnArrival)
      load.copy_vecs_to_smem(C::kVecs, 0, load.smem_vecs(), lowest);
    load.load_registers();
    if constexpr (C::kRescaleOnArrival) lowest = load.copy_vecs_to_smem(C::kVecs, 0, load.smem_vecs(), lowest);
    max_of(fragment, m, C::kRescaleOnArrival ? A(__uint_as_float(lowest)) : A(-infinity()));
    fragment.opaque_registers();
    wait_for_clear();
    load.prefetch_next();
    if constexpr (C::kUsesSmemVecs && !C::kRescaleOnArrival) {
      AsyncCopy::wait<0>();
      load.template for_each_smem_stage<false>(0, [&](int) { update_max(stage); });
    }
    if (!C::kThreadMaxima && is_shared) column_reduce.block_max(m, tile);
    ThreadSum<C> l[V];
    unroll<V>([&](int v) { l[v] = begin_sum<ThreadSum<C>>(sum_exp(fragment, v)); });
    fragment.opaque_registers();
    bool was_rescaled = false;
    if constexpr (C::kUsesSmemVecs) {
      load.template for_each_smem_stage<C::kRescaleOnArrival>(0, [&](int c) {
        if constexpr (C::kRescaleOnArrival) {
          A here[V];
          bool is_higher = false;
          max_of(stage, here);
          unroll<V>([&](int v) { is_higher |= here[v] - m[v] > C::kSlack; });
          if (__builtin_expect(is_higher, false)) {
            unroll<V>([&](int v) { here[v] = max_(here[v], m[v]); });
            rescale_to(load, l, here, c), load.load_stage(C::kVecs + c, c), was_rescaled = true;
          }
        }
        unroll<V>([&](int v) { l[v] = add(l[v], begin_sum<ThreadSum<C>>(sum_exp(stage, v))); });
        if constexpr (C::kKeepsExp) write_back(stage, c);
      });
    }
    if constexpr (C::kRescaleOnArrival) {
      if (is_shared && __syncthreads_or(was_rescaled)) {
        A max[V];
        unroll<V>([&](int v) { max[v] = m[v]; });
        column_reduce.block_max(max, tile);
        rescale_to(load, l, max, load.smem_vecs());
      }
    }
    unroll<V>([&](int v) { sums[v] = value_of(l[v]); });
  }
  // Makes the exponentials in registers and in the slots before `end`, and their sums, relative to the larger maxima
  // `max`.
  template <class Load>
  __device__ void rescale_to(Load& load, ThreadSum<C> (&l)[V], const A (&max)[V], int end) {
    A difference[V];
    unroll<V>([&](int v) { difference[v] = m[v] - max[v], m[v] = max[v]; });
    rescale_sums(l, difference), rescale(load.fragment.first, difference);
#pragma unroll 1
    for (int c = 0; c < end; c += kStageVecs)
      load.load_stage(C::kVecs + c, c), rescale(load.stage.first, difference), write_back(load.stage.first, c);
  }

  __device__ void store_column(int column, State<A> state) const {
    if (sharing_rank<C>() > 0 || !tile.has_column(column)) return;
    C::Epilogue::store(state, tensors.result() + tile.column_offset(column), tile.tiles.plane_stride);
  }
};
