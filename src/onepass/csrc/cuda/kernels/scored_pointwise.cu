// scored_pointwise.cu: the gradient of the logsumexp of scores, dx = g exp(score - lse) times the derivative of the
// score. There is no reduction, so a line is not a row: it is the elements along the dim whose elements of x are
// adjacent in memory, whether that dim is reduced or not. `line_threads` threads compute a line, kVecs vectors each. In
// is the type of x.
#include "config.cuh"

typedef BackwardConfig C;
typedef C::Acc A;
constexpr int V = C::kVecSize, kVecs = C::kVecs;

// Scores are computed from x without rounding it to another type.
struct Exact : C {
  typedef C::In Out;
};

// Where the vectors of a thread are in each tensor.
struct LinePlace {
  const ScoreMap& map;
  const RowOffsets<C> at;
  const ScoreWindow<C> window;

  __device__ LinePlace(const ScoreMap& map, int64_t line) : map(map), at(map, line), window(map, at.distance, map.n) {}
  // Loads the vectors that begin at the elements `first` of the line. Vectors outside of the window are zeros.
  template <BesideAccess Access, class T, int Count>
  __device__ void load(BesideVector<C, T> (&to)[Count], MapTensor t, const int (&first)[kVecs]) const {
    const int n = (int)map.n;
    const int64_t step = Access == BesideAccess::vectors ? 1 : map.steps[t];
    const T* const line = at.template pointer<const T>(map, t);
    unroll<Count>([&](int i) {
      to[i] = {};
      if (!overlaps_row<C>(first[i], n) || !window.overlaps(first[i])) return;
      to[i].template load<Access>(line + first[i] * step, step, C::kScalar || is_full<C>(first[i], n),
                                  [&](int v) { return is_inside(first[i] + v, n); });
    });
  }
};

// A tensor with one value per row. A line has one value of it, or one for each of its elements.
template <bool Exists>
struct OfRows {
  static constexpr bool kIsOne = !C::has(kScoreRowsInLine);
  static constexpr BesideAccess kAccess = C::has(kScoreRowVectors) ? BesideAccess::vectors : BesideAccess::elements;
  BesideVector<C, A> vectors[Exists && !kIsOne ? kVecs : 1];
  A one;

  __device__ OfRows(const LinePlace& place, MapTensor t, const int (&first)[kVecs]) {
    if constexpr (Exists && kIsOne) one = *place.at.template pointer<const A>(place.map, t);
    if constexpr (Exists && !kIsOne) place.template load<kAccess>(vectors, t, first);
  }
  __device__ A operator()(int i, int v) const {
    if constexpr (!Exists || kIsOne) return one;
    return vectors[Exists && !kIsOne ? i : 0][v];
  }
};

extern "C" __global__ void __launch_bounds__(C::kBlockThreads)
    onepass_kernel(const __grid_constant__ ScoreMap map, int line_threads, int, int) {
  typedef C::In In;
  typedef C::Out Out;
  const int n = (int)map.n;
  const int64_t threads = map.count * line_threads, stride = (int64_t)gridDim.x * blockDim.x;
  for (int64_t index = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; index < threads; index += stride) {
    const int64_t line = threads >> 32 ? index / line_threads : (unsigned)index / (unsigned)line_threads;
    const LinePlace place(map, line);
    const bool begins_aligned = C::kAligned || C::kScalar;
    const int before = begins_aligned ? 0 : misalignment<C>(place.at.pointer<const In>(map, kMapInput));
    int first[kVecs];
    unroll<kVecs>([&](int i) { first[i] = ((int)(index - line * line_threads) + i * line_threads) * V - before; });

    BesideVector<C, In> elements[kVecs];
    BesideVector<C, C::Bias> biases[C::has(kScoreBias) ? kVecs : 1];
    BesideVector<C, unsigned char> masks[C::has(kScoreMask) ? kVecs : 1];
    place.load<C::kScalar ? BesideAccess::elements : BesideAccess::vectors>(elements, kMapInput, first);
    if constexpr (C::has(kScoreBias)) place.load<bias_access<C>>(biases, kMapBias, first);
    if constexpr (C::has(kScoreMask)) place.load<mask_access<C>>(masks, kMapMask, first);
    const OfRows<C::has(kScoreScale)> scales(place, kMapScale, first);
    const OfRows<C::has(kScoreAlibi)> slopes(place, kMapAlibi, first);
    const OfRows<true> gradients(place, kMapGrad, first), results(place, kMapLse, first);

    Out* const row = place.at.pointer<Out>(map, kMapResult);
    unroll<kVecs>([&](int i) {
      if (!overlaps_row<C>(first[i], n)) return;
      Vector<Out, V> dx;
      unroll<V>([&](int v) {
        const int at = first[i] + v;
        A factor = factor_of(map, A()), bias = 0, slope = 0;
        if constexpr (C::has(kScoreScale)) factor *= scales(i, v);
        if constexpr (C::has(kScoreBias)) bias = to_acc(biases[i][v]);
        if constexpr (C::has(kScoreAlibi)) slope = slopes(i, v);
        const A lse = results(i, v), distance = A(place.at.distance + at * map.distance_step);
        const A s = score_element<Exact>(map, elements[i][v], factor, bias, slope, distance);
        A grad = gradients(i, v) * exp_<Out>(s - lse);
        if (map.empty_is_zero && lse == -infinity()) grad = 0;  // nothing takes part in the row
        if (!map.of_scores) grad = score_gradient<C>(map, grad, elements[i][v], factor);
        bool takes_part = !C::has(kScoreWindow) || place.window.has(at);
        if constexpr (C::has(kScoreMask)) takes_part &= masks[i].is_set(v);
        dx.at[v] = from_acc<Out>(takes_part ? grad : A(0));
      });
      if constexpr (C::kScalar)
        row[first[i] * map.steps[kMapResult]] = dx.at[0];
      else
        store_predicated<C>(row, first[i], n, dx);
    });
  }
}
