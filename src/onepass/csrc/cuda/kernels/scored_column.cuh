// scored_column.cuh: columns whose elements are scored from other tensors and from where they lie (score_map.cuh).
// Scores are made as elements are loaded, and stay in registers in the accumulator's type; or elements are read twice.
#pragma once

#include "column_fragment.cuh"
#include "column_reduce.cuh"
#include "column_staged.cuh"
#include "score.cuh"
#include "scored_row.cuh"

// Where a thread's next vector of a tensor is. With Opaque the compiler adds the stride each time; otherwise it may
// compute each address anew, which takes more instructions and fewer registers. Vectors of one element are faster with
// it, by up to a fifth; wider ones are up to a tenth slower (H200, 2026-11-30).
template <class T, bool Opaque>
struct VectorCursor {
  const T* at;
  int64_t stride;
  __device__ VectorCursor(const T* at, int64_t stride) : at(at), stride(stride) {
    if constexpr (Opaque) asm volatile("" : "+l"(this->stride));
  }
  __device__ void move_on() { at = Opaque ? advance(at, stride) : at + stride; }
};

// Where the elements of a thread's vectors are in the tensors, and whether they are inside the window.
template <class C>
struct ColumnPlaces {
  typedef typename Conditional<C::kStaged, StagedTile<C>, ThreadTile<C, C::kTensors>>::type Tile;
  static constexpr int V = C::kVecSize;
  template <class T>
  using Cursor = VectorCursor<T, V == 1>;
  const ScoreMap& map;
  const Tile& tile;
  RowOffsets<C> first;  // of the thread's first column
  int row, turn;        // elements of a column before the thread's first one, and from one of its vectors to the next
  bool is_whole;        // whether all columns of its vectors exist

  __device__ ColumnPlaces(const ScoreMap& map, const Tile& tile)
      : map(map), tile(tile), first(map, C::kStrided ? tile.slice_column() : tile.columns_before()) {
    if constexpr (!C::kStrided) first.move(map, 0, tile.slice_column());
    row = tile.line + sharing_rank<C>() * tile.tiles.threads_y;
    turn = sharing_blocks<C>() * tile.tiles.threads_y;
    is_whole = tile.is_whole();
  }
  __device__ bool has_column(int v) const { return tile.has_own(v); }
  // From one column of a vector to the next.
  __device__ int64_t column_step(MapTensor t) const { return C::kStrided ? 0 : map.strides[t][0]; }
  // Where the first element of vector q is.
  template <class T>
  __device__ const T* pointer(MapTensor t, int q) const {
    int64_t at = first.at[t];
    if (C::kStrided && map.reduced_dims > 1)
      for_each_reduced(q, [&](int d, int index) { at += index * map.reduced_strides[t][d]; });
    else
      at += (int64_t)(row + q * turn) * map.steps[t];
    return static_cast<const T*>(map.data[t]) + at;
  }
  __device__ int distance(int q) const {
    int sum = first.distance;
    if (C::kStrided && map.reduced_dims > 1)
      for_each_reduced(q, [&](int d, int index) { sum += index * (int)map.reduced_distances[d]; });
    else
      sum += (row + q * turn) * map.distance_step;
    return sum;
  }
  __device__ int distance_step() const { return C::kStrided ? 0 : (int)map.distances[0]; }
  // Whether an element, or any of a vector whose first element has this distance, is inside the window.
  __device__ bool is_inside(int distance) const {
    return !C::has(kScoreWindow) || (distance >= map.least && distance <= map.most);
  }
  __device__ bool overlaps(int distance) const {
    if (!C::has(kScoreWindow)) return true;
    const int last = distance + (V - 1) * distance_step();
    return max(distance, last) >= map.least && min(distance, last) <= map.most;
  }
  // The vectors that overlap the window, in a tile that forgets the others.
  __device__ Tile within_window() const {
    Tile within = tile;
    const int step = turn * map.distance_step, here = distance(0), across = (V - 1) * distance_step();
    const int least = map.least - max(across, 0), most = map.most - min(across, 0);  // of a vector's first element
    if (step == 0 || C::kStrided) {
      if (!C::kStrided && (here < least || here > most)) within.keep(0, 0);
    } else {  // from one vector to the next distances rise, or fall
      const int from = step > 0 ? least - here : here - most, to = (step > 0 ? most - here : here - least) + abs(step);
      within.keep(from > 0 ? (from + abs(step) - 1) / abs(step) : 0, to > 0 ? to / abs(step) : 0);
    }
    return within;
  }
  // The scale or the slope of a column.
  template <class A>
  __device__ A of_column(MapTensor t, int v) const {
    return has_column(v) ? static_cast<const A*>(map.data[t])[first.at[t] + v * column_step(t)] : A(0);
  }
  // At vector q.
  template <class T>
  __device__ Cursor<T> cursor(MapTensor t, int q) const {
    return {C::kStrided ? nullptr : pointer<T>(t, q), C::kStrided ? 0 : (int64_t)turn * map.steps[t]};
  }
  // Loads the vectors q, q + 1, ... of a tensor, at the cursor, but those that are outside the window.
  template <BesideAccess Access, class T, int Vecs>
  __device__ void load_vectors(BesideVector<C, T> (&to)[Vecs], MapTensor t, int q, Cursor<T>& from) const {
    const auto load_all = [&](bool is_whole) {
      unroll<Vecs>([&](int i) {
        to[i] = {};
        if (q + i < tile.count && (!C::has(kScoreWindow) || overlaps(distance(q + i))))
          to[i].template load<Access>(C::kStrided ? pointer<T>(t, q + i) : from.at, column_step(t), is_whole,
                                      [&](int v) { return has_column(v); });
        if (!C::kStrided) from.move_on();
      });
    };
    if ((C::kAligned && !C::kStaged) || C::kStrided || Access == BesideAccess::same || is_whole)
      load_all(true);
    else
      load_all(false);
  }

 private:
  template <class F>
  __device__ void for_each_reduced(int q, F f) const {
    unsigned rest = row + q * turn;
#pragma unroll 1
    for (int d = map.reduced_dims - 1; d >= 0; --d) {
      const unsigned next = d ? divide(rest, map.reduced_divisors[d]) : 0;
      f(d, (int)(rest - next * (unsigned)map.reduced_sizes[d]));
      rest = next;
    }
  }
};

// About so many registers of a thread are for what is loaded beside x.
template <class C>
constexpr int score_registers = reads_more<C>                                                   ? 16
                                : (C::has(kScoreBias) || C::has(kScoreMask)) && !C::kIsBackward ? 12
                                                                                                : 0;

// The number or the tensor that a column's elements are multiplied by.
template <class C, class A>
struct ColumnFactors {
  A values[C::has(kScoreScale) ? C::kVecSize : 1];
  __device__ explicit ColumnFactors(const ColumnPlaces<C>& places) {
    values[0] = factor_of(places.map, A());
    if constexpr (C::has(kScoreScale)) {
      unroll<C::kVecSize>(
          [&](int v) { values[v] = factor_of(places.map, A()) * places.template of_column<A>(kMapScale, v); });
    }
  }
  __device__ A operator[](int v) const { return values[C::has(kScoreScale) ? v : 0]; }
};

// Scores as they wait in registers. They need nothing more.
struct MadeScores {
  static constexpr bool kIsPositional = false, kIsRounded = false;
  Identity score;
  template <class T>
  __device__ T operator()(T raw) const {
    return raw;
  }
  template <class T>
  static __device__ T neutral() {
    return from_acc<T>(-infinity());
  }
};

// Loads x of a thread's vectors and scores it.
template <class C>
struct ScoringLoad : ColumnPlaces<C> {
  typedef ColumnPlaces<C> Base;
  typedef typename C::Acc A;
  typedef typename C::Loaded T;
  typedef typename C::Bias Bias;
  using BiasCursor = typename Base::template Cursor<Bias>;
  using MaskCursor = typename Base::template Cursor<unsigned char>;
  using Base::map, Base::tile, Base::V;
  const ColumnFactors<C, A> factors;
  A slopes[C::has(kScoreAlibi) ? V : 1];

  __device__ ScoringLoad(const Operands<C>& from, const typename Base::Tile& tile)
      : Base(*from.map, tile), factors(*this) {
    if constexpr (C::has(kScoreAlibi)) unroll<V>([&](int v) { slopes[v] = this->template of_column<A>(kMapAlibi, v); });
  }
  // The scores of the vectors q, q + 1, ...; -inf where an element does not take part.
  template <int Vecs>
  __device__ void load(ColumnFragment<C, A, Vecs>& to, int q) const {
    BesideVector<C, T> raw[Vecs];
    load_x(raw, q);
    score(to, q, [&](int i, int v) { return raw[i][v]; });
  }
  // Scores the elements x(i, v) in the same way.
  template <int Vecs, class X>
  __device__ void score(ColumnFragment<C, A, Vecs>& to, int q, X x) const {
    auto biases = cursor_of<Bias, C::has(kScoreBias)>(kMapBias, q);
    auto masks = cursor_of<unsigned char, C::has(kScoreMask)>(kMapMask, q);
    score_stages<0>(to, q, x, biases, masks);
  }

 private:
  template <class B, bool Has>
  __device__ typename Base::template Cursor<B> cursor_of(MapTensor t, int q) const {
    if constexpr (Has)
      return this->template cursor<B>(t, q);
    else
      return {nullptr, 0};
  }
  // Scores from the vector `First` on, a stage at a time.
  template <int First, int Vecs, class X>
  __device__ void score_stages(ColumnFragment<C, A, Vecs>& to, int q, X x, BiasCursor& bias_at,
                               MaskCursor& mask_at) const {
    constexpr int kCount = Vecs - First < kStageVecs ? Vecs - First : kStageVecs;
    BesideVector<C, Bias> biases[kCount];
    BesideVector<C, unsigned char> masks[kCount];
    if constexpr (C::has(kScoreBias)) this->template load_vectors<bias_access<C>>(biases, kMapBias, q + First, bias_at);
    if constexpr (C::has(kScoreMask)) this->template load_vectors<mask_access<C>>(masks, kMapMask, q + First, mask_at);
    unroll<kCount>([&](int i) {
      const int vec = q + First + i, distance = this->distance(vec), step = this->distance_step();
      unroll<V>([&](int v) {
        const A bias = C::has(kScoreBias) ? A(to_acc(biases[i][v])) : A(0);
        const A s = score_element<C>(map, x(First + i, v), factors[v], bias, slopes[C::has(kScoreAlibi) ? v : 0],
                                     A(distance + v * step));
        // A mask that was not loaded is 0.
        const bool takes_part =
            (C::has(kScoreMask) ? masks[i].is_set(v) : vec < tile.count) & this->is_inside(distance + v * step);
        to.set(First + i, v, takes_part ? s : A(-infinity()));
      });
    });
    if constexpr (First + kCount < Vecs) score_stages<First + kCount>(to, q, x, bias_at, mask_at);
  }
  // A vector of which some columns are another tile's is loaded whole.
  template <int Vecs>
  __device__ void load_x(BesideVector<C, T> (&to)[Vecs], int q) const {
    auto from = this->template cursor<T>(kMapInput, q);
    unroll<Vecs>([&](int i) {
      if constexpr (C::kStrided) from.at = this->template pointer<T>(kMapInput, q + i);
      to[i] = {};
      if (q + i < tile.count && (!C::has(kScoreWindow) || this->overlaps(this->distance(q + i)))) {
        if (C::kAligned || C::kStrided || tile.is_full(q + i))
          to[i].template load<BesideAccess::vectors>(from.at, 1, true, [](int) { return true; });
        else
          to[i].template load<BesideAccess::vectors>(from.at, 1, false, [&](int v) { return this->has_column(v); });
      }
      if constexpr (!C::kStrided) from.move_on();
    });
  }
};

// The tensors of a kernel, where the parameters of a plain one have their addresses (column_softmax.cuh).
template <class C>
struct ScoredColumnTensors : ScoreMap {
  typedef typename C::Acc A;
  __device__ Operands<C> operands() const {
    return {static_cast<const typename C::Loaded*>(data[kMapInput]), nullptr, this};
  }
  __device__ typename C::Out* result() const { return static_cast<typename C::Out*>(data[kMapResult]); }
  __device__ MadeScores operand() const { return {}; }
  // The state from which the results of a column are made: with the sink. The column's logsumexp is written on the way.
  template <class Tile>
  __device__ StatePair<A> finish(const Tile& tile, int column, StatePair<A> state) const {
    if constexpr (C::has(kScoreRow)) {
      if (!tile.has_column(column)) return state;
      A sink = sink_of(*this, A());
      A* lse = nullptr;
      if (sink_is_same && !data[kMapLse]) {
        sink = *static_cast<const A*>(data[kMapSink]);
      } else if (data[kMapSink] || data[kMapLse]) {
        const RowOffsets<C> at(*this, tile.columns_before(column));
        if (data[kMapSink]) sink = *at.template pointer<const A>(*this, kMapSink);
        if (data[kMapLse]) lse = at.template pointer<A>(*this, kMapLse);
      }
      const StatePair<A> other[1] = {{sink, 1}};
      state = StatePartials<A, typename C::Sum>::merge(state, other);
      if (lse && sharing_rank<C>() == 0) *lse = finite_or_zero(state.m) + log_(state.l);
      if (!C::Epilogue::kOnePerRow && empty_is_zero && state.m == -infinity() && state.l == 0) return {0, 1};
    }
    return state;
  }
};

// The gradients of x from those of a thread's scores, vector by vector.
template <class C>
struct ColumnScoreGrad : ColumnPlaces<C> {
  typedef ColumnPlaces<C> Base;
  typedef typename C::Acc A;
  typedef typename C::Out Out;
  using Base::map, Base::tile, Base::V;
  static constexpr int kMostVecs = C::kVecs > kStageVecs ? C::kVecs : kStageVecs;
  static constexpr bool kMayHaveOutsiders = C::has(kScoreWindow) || C::has(kScoreMask) || may_be_far<C>;
  static constexpr bool kAsksMasks = C::has(kScoreMask) && C::Grad::kSumsGrad;  // of each element
  const ColumnFactors<C, A> factors;
  A lse[C::has(kScoreSlopeOfY) ? V : 1];
  MoreVector<C> more[reads_more<C> ? kMostVecs : 1];  // of the vectors that were begun
  BesideVector<C, unsigned char> masks[kAsksMasks ? kMostVecs : 1];

  __device__ ColumnScoreGrad(const ScoreMap& map, const typename Base::Tile& tile) : Base(map, tile), factors(*this) {
    if constexpr (C::has(kScoreSlopeOfY)) unroll<V>([&](int v) { lse[v] = this->template of_column<A>(kMapLse, v); });
  }
  // Begins with the vectors q, q + 1, ...
  template <int Vecs>
  __device__ void begin(int q) {
    if constexpr (reads_more<C>) {
      typedef typename Conditional<reads_x<C>, Out, typename C::Bias>::type More;
      constexpr BesideAccess kOfX = C::has(kScoreXVectors) ? BesideAccess::vectors : BesideAccess::elements;
      constexpr MapTensor kMore = reads_x<C> ? kMapX : kMapBias;
      auto from = this->template cursor<More>(kMore, q);
      this->template load_vectors<reads_x<C> ? kOfX : bias_access<C>>(reinterpret_cast<MoreVector<C>(&)[Vecs]>(more),
                                                                      kMore, q, from);
    }
    if constexpr (kAsksMasks) {
      auto from = this->template cursor<unsigned char>(kMapMask, q);
      this->template load_vectors<mask_access<C>>(reinterpret_cast<BesideVector<C, unsigned char>(&)[Vecs]>(masks),
                                                  kMapMask, q, from);
    }
  }
  // The gradient of element v of the i'th of those vectors, which is the thread's vector q, from that of its score and
  // from its result y.
  template <bool HasOutsiders>
  __device__ A backward(A grad, A y, int q, int i, int v) const {
    if constexpr (HasOutsiders && may_be_far<C>) {
      if (is_far_column(v))
        return score_gradient<C>(map, grad, this->template pointer<Out>(kMapX, q)[v * this->column_step(kMapX)],
                                 factors[v]);
    }
    if constexpr (C::has(kScoreSlopeOfY))
      return score_gradient_of_result<C>(map, grad, y, factors[v], lse[v], more[reads_more<C> ? i : 0][v]);
    else
      return score_gradient<C>(map, grad, more[reads_more<C> ? i : 0][v], factors[v]);
  }
  __device__ bool is_far_column(int v) const {
    if constexpr (may_be_far<C>) return is_far(lse[v]);
    return false;
  }
  // Whether that element, of vector q, takes part. If not it has no gradient, which a softmax gives by itself: its
  // result is 0 there, unless the sum of the column is not finite.
  __device__ bool takes_part(int q, int i, int v) const {
    if (q >= tile.count || !this->has_column(v)) return false;
    if (!this->is_inside(this->distance(q) + v * this->distance_step())) return false;
    if constexpr (!C::has(kScoreMask)) return true;
    if constexpr (kAsksMasks) return masks[i].is_set(v);
    return this->template pointer<unsigned char>(kMapMask, q)[v * this->column_step(kMapMask)];
  }
};

template <class C>
struct ScoredGradTensors : ScoreMap {
  __device__ Operands<C> operands() const {
    return {static_cast<const typename C::Loaded*>(data[kMapInput]), static_cast<const typename C::In*>(data[kMapGrad]),
            this};
  }
  __device__ typename C::Out* result() const { return static_cast<typename C::Out*>(data[kMapResult]); }
};
