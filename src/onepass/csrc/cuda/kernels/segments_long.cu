// segments_long.cu: the rows of unequal length that do not fit into a tile of segments_tiled.cu, whose blocks have
// listed them. A row is cut into pieces that fit into shared memory. Pieces are numbered over all rows. A block
// computes every n-th piece, where n is the number of blocks, and copies the next ones meanwhile. So each element is
// read once. The blocks of a row that has several pieces send each other the states of the pieces through global
// memory.
#include "grid_sync.cuh"
#include "segment_pieces.cuh"

constexpr int kMostHeads = C::kSingle ? 1 : kSegmentHeadBytes / (int)sizeof(In);  // of a block
constexpr int kMessages = 4;                                                      // that a thread reads together
constexpr int kMostAhead = 6;  // pieces that are copied ahead; AsyncCopy counts up to this
static_assert(kMostAhead <= kWarps, "pieces are found before those that are left are forgotten");

// For rows with small scores: whether exponentials replace the elements, and whether they are computed as powers of 2.
constexpr bool kStoresExp = kMayHaveNoMaxima<C> && !C::kReduces && sizeof(In) == sizeof(A);
constexpr bool kTakesExp2 = kMayHaveNoMaxima<C> && sizeof(Out) == 2 && !C::has(kSegmentBias);

typedef Vector<A, H> Values;
typedef GridMessage<C> Message;

struct Shared {
  Piece pieces[2 * kWarps];  // the next pieces of this block
  int64_t sums[kWarps];
  A of_warps[2][kWarps][kMostHeads];
  RowState states[kMostHeads];
};

__device__ inline RowState join(RowState a, RowState b) {
  if constexpr (C::kSums) return {A(0), a.l + b.l};
  const A m = max_(a.m, b.m), base = finite_for_sum(m);
  const auto scaled = [&](RowState s) { return s.l == 0 ? A(0) : s.l * exp_<A>(finite_for_sum(s.m) - base); };
  return {m, scaled(a) + scaled(b)};
}
__device__ inline RowState nothing() { return {C::kSums ? A(0) : -A(infinity()), A(0)}; }

__device__ inline void send(Message& message, State<float> state) { message.write(state.m, (double)state.l, 1); }
__device__ inline void send(Message& message, State<double> state) {
  message.write(state.m, Compensated<double>{state.l, 0}, 1);
}
// Whether the message has arrived.
__device__ inline bool receive(const Message& message, State<float>* state) {
  return message.read(&state->m, &state->l, 1);
}
__device__ inline bool receive(const Message& message, State<double>* state) {
  Compensated<double> sum;
  const bool is_there = message.read(&state->m, &sum, 1);
  state->l = sum.hi;
  return is_there;
}

// The states of a thread's heads, for one row.
struct States {
  Values m, l;

  __device__ RowState of(int h) const { return {m.at[h], l.at[h]}; }
};
__device__ inline Values all_of(A value) {
  Values all;
  unroll<H>([&](int h) { all.at[h] = value; });
  return all;
}
template <class Epilogue = C::Epilogue>
__device__ inline void store_row(const Lane& lane, int64_t segment, const States& states) {
  if constexpr (C::kReduces) {
    if (threadIdx.x >= lane.lanes || !lane.is_there) return;
    unroll<H>([&](int h) { Epilogue::store(states.of(h), lane.at_row<Out>(0, segment, h), lane.map.plane); });
  }
}

// The pieces of a block.
struct Pieces {
  const SegmentMap& map;
  Shared& shared;
  const Ring ring;
  int* const before;         // for each section, how many pieces the sections before it have
  int total, turn = 0;       // pieces of all rows; the buffer of the last reduction
  bool has_several = false;  // whether any row has several pieces
  bool awaits_barrier = false;
  int known = -1;  // the first piece of the row whose states are in shared.states
  GridBarrier barrier;

  __device__ Pieces(const SegmentMap& map, Shared& shared)
      : map(map), shared(shared), ring(map), before((int*)(dynamic_smem + ring.bytes())) {
    count();
  }
  __device__ int first_number() const { return blockIdx.x / map.chunks; }
  __device__ int step() const { return gridDim.x / map.chunks; }
  __device__ int own() const { return (max(total - first_number(), 0) + step() - 1) / step(); }
  __device__ Message& message(int number, int head) const {
    return ((Message*)map.messages)[((int64_t)number * map.chunks + ring.lane.chunk) * ring.lane.heads() + head];
  }
  // Clears the messages of the block's pieces. No block reads a message before all blocks have done this.
  __device__ void clear_messages() {
    if (threadIdx.x == 0) barrier.init();
    for (int i = threadIdx.x; i < own() * ring.lane.heads(); i += kThreads)
      message(first_number() + i / ring.lane.heads() * step(), i % ring.lane.heads()).clear();
    __syncthreads();
    if (threadIdx.x == 0) barrier.arrive(blockIdx.x, gridDim.x);
    awaits_barrier = true;
  }
  // Computes the pieces of the block or, with `is_second`, finishes the pieces of deferred rows. Returns whether there
  // are deferred rows.
  __device__ bool run(bool is_second) {
    const int count = own();
    int found = 0, ahead = 0;                // pieces
    int from = 0, to = 0, left = map.turns;  // turns of the ring
    bool has_deferred = false;
#pragma unroll 1
    for (int now = 0; now < count; ++now) {
#pragma unroll 1
      while (ahead < count && ahead - now < kMostAhead) {
        if (ahead == found) {
          __syncthreads();  // all threads have read the earlier pieces
          find(first_number() + (found + (int)threadIdx.x / 32) * step(), found, is_second);
          found += kWarps;
          __syncthreads();
        }
        const Piece& piece = shared.pieces[ahead % (2 * kWarps)];
        const int taken = turns_taken(to, piece);
        if (ahead > now && taken > left) break;
        to = to + taken <= map.turns ? to : 0;
        ring.copy(piece, to);
        to += piece.turns, left -= taken, ++ahead;
      }
      const Piece& piece = shared.pieces[now % (2 * kWarps)];
      AsyncCopy::wait_all_but(ahead - now - 1);
      has_deferred |= piece.is_deferred(map);
      const int taken = turns_taken(from, piece);
      from = from + taken <= map.turns ? from : 0;
      if (!is_second || piece.is_deferred(map)) compute(piece, from, is_second);
      from += piece.turns, left += taken;
    }
    return has_deferred;
  }

 private:
  // How many turns a piece takes. It is contiguous in the ring: if it does not fit before the end, the turns there are
  // skipped, and count too.
  __device__ int turns_taken(int turn, const Piece& piece) const {
    return piece.turns + (turn + piece.turns > map.turns ? map.turns - turn : 0);
  }
  // Counts for each section the pieces of all sections before it.
  __device__ void count() {
    const int warp = threadIdx.x / 32, each = (map.sections + kThreads - 1) / kThreads;
    const int first = min((int)threadIdx.x * each, map.sections), last = min(first + each, map.sections);
    const LongSection* const sections = (const LongSection*)map.section_counts;
    int64_t sum = 0;
    for (int s = first; s < last; ++s) {
      const LongSection section = sections[s];
      sum += section.pieces, has_several |= section.pieces > section.rows;
    }
    int64_t all = sum;
    for (int by = 1; by < 32; by *= 2) {
      const int64_t there = __shfl_up_sync(0xffffffffu, all, by);
      if (threadIdx.x % 32 >= by) all += there;
    }
    if (threadIdx.x % 32 == 31) shared.sums[warp] = all;
    has_several = __syncthreads_or(has_several);
    all -= sum;
    for (int i = 0; i < warp; ++i) all += shared.sums[i];
    for (int s = first; s < last; ++s) {
      before[s] = (int)min(all, (int64_t)map.most_pieces);
      all += sections[s].pieces;
    }
    if (threadIdx.x == kThreads - 1) before[map.sections] = (int)min(all, (int64_t)map.most_pieces);
    __syncthreads();
    total = before[map.sections];
  }
  // Finds the block's next pieces, beginning with its piece number `at`: one per warp. `number` is that of this warp's
  // piece.
  __device__ void find(int number, int at, bool is_second) const {
    const int thread = threadIdx.x % 32;
    if (number >= total) return;
    int section = 0, end = map.sections;
    while (end - section > 1) {
      const int middle = (section + end) / 2;
      if (before[middle] <= number)
        section = middle;
      else
        end = middle;
    }
    const LongRow* row = (const LongRow*)map.long_rows + (int64_t)section * (map.section_rows + 1);
    const int in_section = number - before[section];
    // The entry behind the last row has the number of all pieces of the section.
    for (unsigned is_behind = 0;; row += 32) {
      is_behind = __ballot_sync(0xffffffffu, row[thread].before > in_section);
      if (!is_behind) continue;
      row += __ffs((int)is_behind) - 2;
      break;
    }
    if (thread) return;
    Piece piece = {row->segment};
    const int in_row = in_section - row->before;
    piece.number = number, piece.first_number = number - in_row, piece.of_row = row[1].before - row->before;
    const int shift = C::kSingle ? ring.lane.misalignment(row->begin) : 0;
    const int64_t units = C::kSingle ? (shift + row->count + V - 1) / V : row->count;  // vectors, or items
    const int64_t each = divide(units + piece.of_row - 1, (int64_t)piece.of_row);
    const int64_t from = min(in_row * each, units);
    const bool needs_elements = !is_second || (!C::kReduces && piece.is_deferred(map));
    const int count = needs_elements ? (int)min(each, units - from) : 0;
    piece.begin = row->begin - shift + from * (C::kSingle ? V : 1);
    piece.low = from ? 0 : shift, piece.high = (int)min(shift + row->count - from * V, (int64_t)count * V);
    piece.first_whole = C::kSingle && piece.low > 0;
    piece.last_whole = C::kSingle ? piece.high / V : count << ring.lane.lanes_log2;
    // If offsets are wrong, there may be more pieces than messages.
    if (piece.first_number + piece.of_row > map.most_pieces) piece.of_row = 1;
    piece.vectors = count << ring.lane.lanes_log2;
    piece.turns = (piece.vectors + kThreads - 1) / kThreads;
    shared.pieces[(at + threadIdx.x / 32) % (2 * kWarps)] = piece;
  }

  __device__ void compute(const Piece& piece, int turn, bool is_second) {
    States states = {};
    bool is_small = false;
    if constexpr (!C::kPointwise) {
      if (!is_second) is_small = reduce(piece, turn, states);
      if (piece.of_row > 1) {
        if (!is_second && threadIdx.x < ring.lane.lanes)
          unroll<H>([&](int h) { send(message(piece.number, ring.lane.head + h), states.of(h)); });
        // A row of a reduction has one result. The block of the last piece stores it.
        if (is_second != piece.is_deferred(map) ||
            (C::kReduces && piece.number != piece.first_number + piece.of_row - 1))
          return;
        states = await(piece);
        bool has_maxima = false;  // whether another piece has a maximum that is not 0
        unroll<H>([&](int h) { has_maxima |= states.m.at[h] != 0; });
        if (is_small && has_maxima) restore(piece, turn), is_small = false;
      }
    }
    if constexpr (C::kReduces)
      store_row(ring.lane, piece.segment, states);
    else if (is_small)
      finish<true>(piece, turn, states);
    else
      finish<false>(piece, turn, states);
  }
  // Copies a piece again if exponentials have replaced its elements.
  __device__ void restore(const Piece& piece, int turn) const {
    if constexpr (kStoresExp) ring.copy(piece, turn), AsyncCopy::wait<0>();
  }
  __device__ A score(const Vector<In, V>& x, const Vector<Second, V>& bias, int v) const {
    return score_of<C>(map, x.at[v], bias.at[v]);
  }
  // The score, for half results times log2(e); and the exponential of a small score, from that.
  __device__ A exponent(const Vector<In, V>& x, const Vector<Second, V>& bias, int v) const {
    if constexpr (!kTakesExp2) return score(x, bias, v);
    return to_acc(x.at[v]) * (map.factor_f32 * kLog2e);
  }
  static __device__ float exp_of(float exponent) { return kTakesExp2 ? exp2_(exponent) : exp_of_small<Out>(exponent); }
  // Computes the states of a piece. Returns whether its scores are all small; the maxima are then 0.
  __device__ bool reduce(const Piece& piece, int turn, States& states) {
    const auto add = [&](auto term) {
      if constexpr (C::kSingle)
        states.l.at[0] += pairwise_sum<V, 0>(term);
      else
        unroll<V>([&](int v) { states.l.at[v] += term(v); });
    };
    if constexpr (kMayHaveNoMaxima<C>) {
      float most = 0;
      ring.for_vectors(piece, turn, [&](int of, int i, const auto& x, const auto& bias, auto belongs) {
        Vector<A, V> terms;
        unroll<V>([&](int v) {
          const float number = (float)exponent(x, bias, v);
          most = larger_or_nan(most, belongs(v) ? abs_(number) : 0);
          terms.at[v] = belongs(v) ? exp_of(number) : 0;
        });
        if constexpr (kStoresExp) ring.put(turn + of + i, terms);
        add([&](int v) { return terms.at[v]; });
      });
      bool is_small = most <= (kTakesExp2 ? kSmall * kLog2e : kSmall);
      states.l = over_block(states.l, Sum(), &is_small);
      if (is_small) return true;
      restore(piece, turn);
      states.l = {};
    }
    if constexpr (!C::kSums) {
      states.m = all_of(-A(infinity()));
      ring.for_vectors(piece, turn, [&](int, int, const auto& x, const auto& bias, auto belongs) {
        unroll<V>([&](int v) {
          states.m.at[v % H] = max_(states.m.at[v % H], belongs(v) ? score(x, bias, v) : A(-infinity()));
        });
      });
      states.m = over_block(states.m, Max());
    }
    Values base;
    unroll<H>([&](int h) { base.at[h] = finite_for_sum(states.m.at[h]); });
    ring.for_vectors(piece, turn, [&](int, int, const auto& one, const auto& two, auto belongs) {
      add([&](int v) {
        if constexpr (C::kSums)
          return belongs(v) ? term_of<C>(A(to_acc(one.at[v])), A(to_acc(two.at[v]))) : A(0);
        else
          return belongs(v) ? exp_for_sum<Out>(score(one, two, v) - base.at[v % H]) : A(0);
      });
    });
    states.l = over_block(states.l, Sum());
    return false;
  }
  // Reduces over the threads that have the same heads. The two buffers are used alternately, so that no thread
  // overwrites what another still reads. `all`: becomes whether it holds in all threads.
  template <class Op>
  __device__ Values over_block(Values values, Op op, bool* all = nullptr) {
    unroll<H>([&](int h) {
      values.at[h] =
          C::kSingle ? warp_reduce<32>(values.at[h], op) : warp_reduce_strided(values.at[h], ring.lane.lanes, op);
    });
    auto& of_warps = shared.of_warps[turn ^= 1];
    if (threadIdx.x % 32 < ring.lane.lanes)
      unroll<H>([&](int h) { of_warps[threadIdx.x / 32][ring.lane.head + h] = values.at[h]; });
    if (all)
      *all = __syncthreads_and(*all);
    else
      __syncthreads();
    unroll<H>([&](int h) { values.at[h] = of_warps[0][ring.lane.head + h]; });
    unroll<kWarps - 1>([&](int w) {
      unroll<H>([&](int h) { values.at[h] = op(values.at[h], of_warps[w + 1][ring.lane.head + h]); });
    });
    return values;
  }
  // The states of a row of several pieces. Waits until all of its messages have arrived.
  __device__ States await(const Piece& piece) {
    if (awaits_barrier && threadIdx.x == 0) barrier.wait();
    awaits_barrier = false;
    __syncthreads();
    if (known != piece.first_number) merge(piece);
    known = piece.first_number;
    __syncthreads();
    States states;
    unroll<H>([&](int h) {
      const RowState state = shared.states[ring.lane.head + h];
      states.m.at[h] = state.m, states.l.at[h] = state.l;
    });
    return states;
  }
  __device__ void merge(const Piece& piece) const {
    const int log2 = piece.of_row > 4 ? 5 : 2, lanes = 1 << log2, at = threadIdx.x & (lanes - 1);
    for (int round = (int)threadIdx.x / 32 << (5 - log2); round < ring.lane.heads(); round += kThreads >> log2) {
      const int head = round + ((int)threadIdx.x % 32 >> log2);
      RowState state = nothing(), there[kMessages];
      for (int i = at; head < ring.lane.heads() && i < piece.of_row; i += kMessages * lanes) {
        for (bool are_there = false; !are_there;) {
          are_there = true;
          unroll<kMessages>([&](int k) {
            there[k] = nothing();
            if (i + k * lanes < piece.of_row)
              are_there &= receive(message(piece.first_number + i + k * lanes, head), &there[k]);
          });
        }
        unroll<kMessages>([&](int k) { state = join(state, there[k]); });
      }
      for (int by = lanes / 2; by > 0; by /= 2) {
        const RowState there = {shuffle_xor(state.m, by), shuffle_xor(state.l, by)};
        state = at & by ? join(there, state) : join(state, there);
      }
      if (head < ring.lane.heads() && at == 0) shared.states[head] = state;
    }
  }
  template <bool kIsSmall>
  __device__ void finish(const Piece& piece, int turn, const States& states) const {
    Finish<C> finish[H];
    A factors[H];  // only if scores are small
    unroll<H>([&](int h) {
      if constexpr (kIsSmall) {
        factors[h] = reciprocal((float)states.l.at[h]);
      } else {
        finish[h] = Finish<C>(map, states.of(h));
      }
      if constexpr (C::kPointwise) {
        finish[h].lse = ring.lane.is_there ? *ring.lane.at_row<const A>(0, piece.segment, h) : A(0);
        finish[h].grad = ring.lane.is_there ? *ring.lane.at_row<const A>(1, piece.segment, h) : A(0);
      }
    });
    const bool is_aligned = ring.lane.is_aligned<Out>(kItemResult);
    const Walk<Out> walk(ring.lane, piece, kItemResult, C::kItemTensors - 1);
    ring.for_vectors(piece, turn, [&](int of, int i, const auto& one, const auto& two, auto belongs) {
      if (!C::kSingle && !belongs(0)) return;
      const auto result = [&](int v) -> A {
        if constexpr (kIsSmall && kStoresExp) return one.at[v] * factors[v % H];
        if constexpr (kIsSmall) return exp_of((float)exponent(one, two, v)) * factors[v % H];
        if constexpr (C::kSums) return finish[v % H](to_acc(one.at[v]), to_acc(two.at[v]));
        if constexpr (C::kPointwise) return finish[v % H](score(one, two, v), A(0));
        if constexpr (C::ElementEpilogue::kTakesExp)
          return finish[v % H].from_exp(exp_for_sum<Out>(score(one, two, v) - finish[v % H].epilogue.m));
        return finish[v % H](score(one, two, v), A(0));
      };
      Vector<Out, V> made;
      unroll<V>([&](int v) { made.at[v] = from_acc<Out>(result(v)); });
      Out* const to = walk.at(of, i);
      if (is_aligned && (!C::kSingle || (belongs(0) && belongs(V - 1)))) return store_vector(to, made);
      unroll<V>([&](int v) {
        if (belongs(v)) to[v] = made.at[v];
      });
    });
  }
};

extern "C" __global__ void __launch_bounds__(kThreads, sizeof(A) == 8 ? 2 : long_blocks(!C::kSingle))
    onepass_kernel(const __grid_constant__ SegmentMap map) {
  __shared__ Shared shared;
  Pieces pieces(map, shared);
  if (pieces.total == 0) return;
  bool goes_on = true;
  if (!C::kPointwise && pieces.has_several && map.steps_run == 3) pieces.clear_messages();
#pragma unroll 1
  for (int step = 1; step <= 2 && goes_on; ++step) {
    if (map.steps_run & step) goes_on = pieces.run(step == 2);
  }
}
