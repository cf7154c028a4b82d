// column_staged.cuh: the tier `columns-staged`, for short columns of slices that follow one another in memory, with or
// without gaps between their lines. (A slice is `n` lines of adjacent columns.) A block copies a group of slices as one
// span of memory, in whole vectors, whatever the number of columns: the span begins at the same byte of a vector in
// shared memory as in global memory. Threads read the elements of their columns from shared memory, and results take
// the same way back.
//
//   group -> shared memory -> registers: states of columns -> epilogue -> shared memory -> group
//
// While a group is computed, the next one is copied, if shared memory has room for two. A tile is as many columns of a
// group as a block has threads side by side. A group may have several tiles, which the block computes in turn.
#pragma once

#include "column_fragment.cuh"

constexpr int kSpanVecBytes = 16;

__device__ inline char* bytes_of(void* at) { return static_cast<char*>(at); }
__device__ inline const char* bytes_of(const void* at) { return static_cast<const char*>(at); }

// The number of slices in a group.
__device__ inline int slices_of(const Tiles& tiles, int64_t group) {
  const int64_t left = tiles.all_slices - group * tiles.group_slices;
  return left < tiles.group_slices ? (int)left : tiles.group_slices;
}

// The part of a tensor that belongs to a group. In shared memory a few bytes may follow each slice, so that lanes that
// read from different slices use different banks.
template <class T>
struct GroupSpan {
  const StagedTensor& tensor;
  T* begin;
  int skip, end;  // the first vector has `skip` bytes before the span, and the span ends before byte `end`
  __device__ GroupSpan(T* first, const Tiles& tiles, StagedOperand which, int64_t group) : tensor(tiles.staged[which]) {
    begin = first + group * tiles.group_slices * tensor.slice;
    skip = (int)((uint64_t)begin % kSpanVecBytes);
    const int last = (slices_of(tiles, group) - 1) * tensor.slice + ((int)tiles.n - 1) * tensor.line;
    end = skip + (last + tiles.slice_cols) * (int)sizeof(T);
  }
  // Bytes are counted from the first byte of the first vector, whose address in shared memory is `smem`.
  // for_each_vector calls f(smem, global) for each vector between the bytes `low` and `high`; the threads take vectors
  // in turns. for_each_element calls it for each element of the group outside of these vectors. for_each_piece calls
  // f(smem, global, bytes), in lanes of the first warp, for runs of vectors that are contiguous in shared memory too.
  template <class F>
  __device__ void for_each_vector(uint32_t smem, int low, int high, F f) const {
    auto* const global = bytes_of(begin) - skip;
    const int first = first_byte(low), last = last_byte(high), turn = blockDim.x * kSpanVecBytes;
    if (tensor.gap == 0) {
#pragma unroll 4
      for (int at = first + threadIdx.x * kSpanVecBytes; at < last; at += turn) f(smem + at, global + at);
    } else {
#pragma unroll 2
      for (int at = first + threadIdx.x * kSpanVecBytes; at < last; at += turn)
        f(smem + at + gap_before(at), global + at);
    }
  }
  template <class F>
  __device__ void for_each_element(uint32_t smem, int low, int high, F f) const {
    const int first = first_byte(low), last = last_byte(high);
    if (first <= skip && last >= end) return;
    auto* const global = bytes_of(begin) - skip;
    constexpr int kEdge = kSpanVecBytes / sizeof(T);
    for (int i = threadIdx.x; i < 2 * kEdge; i += blockDim.x) {
      const int at = (i < kEdge ? skip : last - kSpanVecBytes) + i * (int)sizeof(T);
      if (i < kEdge ? at < first && at < end : at >= first && at < end) f(smem + at + gap_before(at), global + at);
    }
  }
  template <class F>
  __device__ void for_each_piece(uint32_t smem, int low, int high, F f) const {
    auto* const global = bytes_of(begin) - skip;
    const int first = first_byte(low), last = last_byte(high), slice = tensor.slice * (int)sizeof(T);
    if (first >= last) return;
    const int piece = tensor.gap ? slice : last - first;
    int to = smem + first + threadIdx.x * (piece + tensor.gap);
    for (int at = first + threadIdx.x * piece; at < last; at += 32 * piece, to += 32 * (piece + tensor.gap))
      f(to, global + at, at + piece < last ? piece : last - at);
  }
  __device__ int count_bytes(int low, int high) const { return max(last_byte(high) - first_byte(low), 0); }

 private:
  static __device__ int first_byte(int low) { return low > 0 ? kSpanVecBytes : 0; }
  static __device__ int last_byte(int high) { return high / kSpanVecBytes * kSpanVecBytes; }
  __device__ int gap_before(int at) const { return tensor.gap * divide((unsigned)at / sizeof(T), tensor.by_slice); }
};

// What the tiles of a group share.
template <class C>
struct StagedGroup;

// A thread's vectors of a tile: every `threads_y`th line of its columns. A line has `slice_vecs` vectors. If the
// columns are not whole vectors, the last vector has fewer, and the tile counts the missing columns too, so that it is
// whole vectors.
template <class C>
struct StagedTile {
  static constexpr int V = C::kVecSize, before = 0;
  const Tiles& tiles;
  const int vecs_before;  // vectors of a line before the tile, counted over all slices of the group
  const int group_vecs;   // vectors of a line in all slices of the group
  int col;                // the thread's first column in the tile
  int rest;               // columns from the thread's first one to the end of its line
  int line;               // the thread's number along the column
  int slice_col;          // the thread's first column, counted in the slice
  int first_slice;        // the slice of the group that this column is in
  int count;              // vectors of the thread
  int64_t group;          // the group of the tile
  bool begins, ends;      // whether it is the group's first tile, and its last

  __device__ StagedTile(const StagedGroup<C>& group, int turn)
      : tiles(group.tiles),
        vecs_before(turn * group.tiles.threads_x),
        group_vecs(group.vecs),
        col(group.x * V),
        line(group.line),
        group(group.group) {
    const int vec = vecs_before + group.x;
    begins = turn == 0, ends = turn + 1 == group.turns();
    first_slice = slice_of(vec);
    slice_col = (vec - first_slice * tiles.slice_vecs) * V;
    rest = tiles.slice_cols - slice_col;
    count = vec < group_vecs ? group.count : 0;
  }
  // The bytes in shared memory from the group's first element to the thread's first one, and from one vector to the
  // next.
  template <class T>
  __device__ int first_byte(StagedOperand which) const {
    const StagedTensor& tensor = tiles.staged[which];
    return (first_slice * tensor.slice + line * tensor.line + slice_col) * (int)sizeof(T) + first_slice * tensor.gap;
  }
  template <class T>
  __device__ int step_bytes(StagedOperand which) const {
    return tiles.threads_y * tiles.staged[which].line * (int)sizeof(T);
  }
  __device__ bool has_column(int column) const {
    const int vec = vecs_before + column / V;
    return vec < group_vecs && column_of(vec, column) < tiles.slice_cols;
  }
  __device__ int64_t column_offset(int column) const { return columns_before(column) * tiles.steps[1]; }
  // As in ThreadTile.
  __device__ int64_t slice_column() const { return slice_col; }
  __device__ int64_t columns_before() const { return (group * tiles.group_slices + first_slice) * tiles.slice_cols; }
  __device__ int64_t columns_before(int column) const {
    const int vec = vecs_before + column / V;
    return (group * tiles.group_slices + slice_of(vec)) * tiles.slice_cols + column_of(vec, column);
  }
  __device__ bool is_whole() const { return count > 0 && rest >= V; }
  __device__ bool has_own(int v) const { return count > 0 && v < rest; }

 private:
  __device__ int slice_of(int vec) const { return divide((unsigned)vec, tiles.by_slice_vecs); }
  __device__ int column_of(int vec, int column) const {
    return (vec - slice_of(vec) * tiles.slice_vecs) * V + column % V;
  }
};

template <class C>
struct StagedGroup {
  typedef StagedTile<C> Tile;
  const Tiles& tiles;
  const int64_t group;
  int x, line, vecs, count;  // of the thread; see StagedTile

  __device__ StagedGroup(const Tiles& tiles, int64_t group, int, uint64_t) : tiles(tiles), group(group) {
    vecs = slices_of(tiles, group) * tiles.slice_vecs;
    line = divide(threadIdx.x, tiles.by_line);
    x = threadIdx.x - line * tiles.threads_x;
    count = line < tiles.threads_y ? tiles.existing.all + (line < tiles.existing.rest) : 0;
  }
  __device__ int turns() const { return (int)tiles.tiles_per_slice; }
  __device__ Tile tile(int turn) const { return {*this, turn}; }
};

// Stores to shared memory if `condition` holds, without a branch. With one, the compiler would move the computation of
// the value into the branch, and compute one value at a time.
template <class T>
__device__ inline void store_smem_if(bool condition, uint32_t at, T value) {
  const uint32_t yes = condition;
  if constexpr (sizeof(T) == 2) {
    asm volatile("{\n.reg .pred yes;\nsetp.ne.u32 yes, %0, 0;\n@yes st.shared.b16 [%1], %2;\n}" ::"r"(yes), "r"(at),
                 "h"(value.bits)
                 : "memory");
  } else if constexpr (sizeof(T) == 4) {
    asm volatile("{\n.reg .pred yes;\nsetp.ne.u32 yes, %0, 0;\n@yes st.shared.b32 [%1], %2;\n}" ::"r"(yes), "r"(at),
                 "r"(__builtin_bit_cast(uint32_t, value))
                 : "memory");
  } else {
    asm volatile("{\n.reg .pred yes;\nsetp.ne.u32 yes, %0, 0;\n@yes st.shared.b64 [%1], %2;\n}" ::"r"(yes), "r"(at),
                 "l"(__double_as_longlong(value))
                 : "memory");
  }
}
// Loads an element if `condition` holds, and returns `value` otherwise. There is no branch either.
template <class T>
__device__ inline T load_smem_if(bool condition, uint32_t at, T value) {
  const uint32_t yes = condition;
  if constexpr (sizeof(T) == 2) {
    asm volatile("{\n.reg .pred yes;\nsetp.ne.u32 yes, %1, 0;\n@yes ld.shared.b16 %0, [%2];\n}"
                 : "+h"(value.bits)
                 : "r"(yes), "r"(at));
  } else if constexpr (sizeof(T) == 4) {
    asm volatile("{\n.reg .pred yes;\nsetp.ne.u32 yes, %1, 0;\n@yes ld.shared.b32 %0, [%2];\n}"
                 : "+r"(reinterpret_cast<uint32_t&>(value))
                 : "r"(yes), "r"(at));
  } else {
    asm volatile("{\n.reg .pred yes;\nsetp.ne.u32 yes, %1, 0;\n@yes ld.shared.f64 %0, [%2];\n}"
                 : "+d"(value)
                 : "r"(yes), "r"(at));
  }
  return value;
}
// The same for two adjacent elements of 2 bytes. If `word` is set they are accessed as one word; otherwise one by one,
// if `low` and `high` are set.
struct PairAccess {
  uint32_t word, low, high;
};
__device__ inline uint32_t load_smem_pair(PairAccess access, uint32_t at, uint32_t pair) {
  asm volatile(
      "{\n.reg .pred word;\n.reg .pred low;\n.reg .pred high;\n.reg .b16 a;\n.reg .b16 b;\n"
      "setp.ne.u32 word, %1, 0;\nsetp.ne.u32 low, %2, 0;\nsetp.ne.u32 high, %3, 0;\n"
      "mov.b32 {a, b}, %0;\n@low ld.shared.b16 a, [%4];\n@high ld.shared.b16 b, [%4+2];\n"
      "@word ld.shared.b32 %0, [%4];\n@low mov.b32 %0, {a, b};\n}"
      : "+r"(pair)
      : "r"(access.word), "r"(access.low), "r"(access.high), "r"(at));
  return pair;
}
__device__ inline void store_smem_pair(PairAccess access, uint32_t at, uint32_t pair) {
  asm volatile(
      "{\n.reg .pred word;\n.reg .pred low;\n.reg .pred high;\n.reg .b16 a;\n.reg .b16 b;\n"
      "setp.ne.u32 word, %0, 0;\nsetp.ne.u32 low, %1, 0;\nsetp.ne.u32 high, %2, 0;\n"
      "mov.b32 {a, b}, %4;\n@word st.shared.b32 [%3], %4;\n@low st.shared.b16 [%3], a;\n"
      "@high st.shared.b16 [%3+2], b;\n}" ::"r"(access.word),
      "r"(access.low), "r"(access.high), "r"(at), "r"(pair)
      : "memory");
}
template <class T>
__device__ inline T load_smem_element(uint32_t at) {
  return load_smem_if(true, at, T{});
}

// How a thread gets the elements of its tiles or, with kScoresOnLoad, their scores (by Scoring). Sequence has the
// groups of the block.
template <class C, class Sequence, class Scoring>
struct StagedLoad {
  typedef StagedTile<C> Tile;
  typedef typename C::Loaded First;  // in memory
  typedef typename C::In In;
  typedef typename C::Out Out;
  static constexpr int kVecs = C::kVecs, V = C::kVecSize, kPairs = (V + 1) / 2;

  // The groups of a block, one after another.
  struct Stream {
    const Sequence& sequence;
    const uint32_t smem;
    TxBarrier* const arrivals;  // of groups that are copied by bulk copies, one for each stage
    uint32_t turn;              // how many groups have begun
    int stage;                  // the stage that holds the current group
    uint32_t first[2];          // the address of the group's first element of each operand
    __device__ Stream(const Sequence& sequence)
        : sequence(sequence), smem(dynamic_smem_address()), arrivals(make_barriers()), turn(0), stage(1), first{} {
      if (is_double_buffered()) copy_in(blockIdx.x, 0);
    }
    __device__ ~Stream() { wait_until_results_are_read(); }
    // Waits for a group. All threads have finished the group before it.
    __device__ void begin(int64_t group) {
      const bool has_next = is_double_buffered();
      if (has_next && !is_bulk()) AsyncCopy::wait<0>();
      if (sequence.tiles.result_at) wait_until_results_are_read();
      __syncthreads();
      if (!sequence.tiles.result_at) wait_until_results_are_read();
      stage = has_next ? stage ^ 1 : 0;
      copy_in(has_next ? group + gridDim.x : group, has_next ? stage ^ 1 : 0);
      if (is_bulk()) arrivals[stage].wait((has_next ? turn / 2 : turn) & 1);
      if (!has_next) {
        AsyncCopy::wait<0>();
        __syncthreads();
      }
      ++turn;
      const Tiles& tiles = sequence.tiles;
      first[0] =
          operand(stage, kStagedFirst) + GroupSpan<const First>(sequence.from.first, tiles, kStagedFirst, group).skip;
      if constexpr (C::kOperands > 1)
        first[1] =
            operand(stage, kStagedSecond) + GroupSpan<const In>(sequence.from.second, tiles, kStagedSecond, group).skip;
    }
    // The address of an operand of a group in a stage.
    __device__ uint32_t operand(int stage, int which) const {
      return smem + (stage * C::kOperands + which) * sequence.tiles.span_bytes;
    }
    __device__ bool is_bulk() const { return BulkCopy::kExists && sequence.tiles.is_bulk; }

   private:
    __device__ void wait_until_results_are_read() const {
      if (!C::kReadsOnce && is_bulk() && threadIdx.x < 32) BulkCopy::wait_until_read();
    }
    static __device__ TxBarrier* make_barriers() {
      __shared__ TxBarrier barriers[2];
      if constexpr (BulkCopy::kExists) {
        if (threadIdx.x < 2) barriers[threadIdx.x].init();
        __syncthreads();
      }
      return barriers;
    }
    __device__ bool is_double_buffered() const { return sequence.tiles.stages > 1; }
    __device__ void copy_in(int64_t group, int to) const {
      if (group >= sequence.tiles.slices) return;
      int bytes = copy_span(sequence.from.first, kStagedFirst, group, to);
      if constexpr (C::kOperands > 1) bytes += copy_span(sequence.from.second, kStagedSecond, group, to);
      if (!is_bulk()) return AsyncCopy::commit();
      if (threadIdx.x == 0) arrivals[to].expect_tx(bytes);
    }
    // Returns how many bytes of an operand arrive by bulk copies. A vector that belongs to the group only in part is
    // copied whole if the rest of it belongs to the tensor.
    template <class T>
    __device__ int copy_span(const T* tensor, StagedOperand which, int64_t group, int to) const {
      const GroupSpan<const T> span(tensor, sequence.tiles, which, group);
      const Tiles& tiles = sequence.tiles;
      const uint32_t smem = operand(to, which);
      const int64_t bytes_after =
          (tiles.all_slices - (group + 1) * tiles.group_slices) * ((int)tiles.n * tiles.slice_cols * (int)sizeof(T));
      const int low = group ? 0 : span.skip,
                high = bytes_after >= kSpanVecBytes ? span.end + kSpanVecBytes - 1 : span.end;
      if (!is_bulk()) {
        span.for_each_vector(smem, low, high,
                             [](uint32_t to, const char* from) { AsyncCopy::start<kSpanVecBytes>(to, from); });
      } else if (threadIdx.x < 32) {
        span.for_each_piece(smem, low, high, [&](uint32_t smem, const char* from, int bytes) {
          BulkCopy::load(smem, from, bytes, arrivals + to);
        });
      }
      span.for_each_element(smem, low, high, [&](uint32_t to, const char* from) {
        store_smem_if(true, to, *reinterpret_cast<const T*>(from));
        BulkCopy::fence();
      });
      return span.count_bytes(low, high);
    }
  };

  Stream& stream;
  const Sequence& sequence;
  const Tile& tile;
  const Scoring scoring;
  OperandFragments<C, kVecs> fragment;
  OperandFragments<C, kStageVecs> stage;  // only a placeholder: all vectors arrive together

  __device__ StagedLoad(Stream& stream, const Sequence& sequence, const Tile& tile, int64_t)
      : stream(stream), sequence(sequence), tile(tile), scoring(sequence.from, tile) {
    if (tile.begins) stream.begin(tile.group);
  }
  template <class F, class G>
  __device__ void for_each_stage(F absorb, G after_registers) {
    load_registers();
    after_registers();
    absorb(fragment, [] {});
  }
  __device__ void load_registers() {
    if constexpr (C::kScoresOnLoad) {
      ColumnFragment<C, First, kVecs> raw;
      load(raw, kStagedFirst);
      scoring.score(fragment.first, 0, [&](int i, int v) { return raw.get(i, v); });
    } else {
      load(fragment.first, kStagedFirst);
    }
    if constexpr (C::kOperands > 1) load(fragment.second, kStagedSecond);
  }
  __device__ void prefetch_next() const {}

  // The results replace the first operand, unless they have their own place in shared memory.
  template <class F>
  __device__ void store(Out* out, F result) {
    const Tiles& tiles = sequence.tiles;
    uint32_t smem = stream.operand(stream.stage, kStagedFirst), at = stream.first[0];
    const int step = tile.template step_bytes<Out>(kStagedResult);
    if (tiles.result_at) {
      smem = stream.smem + tiles.result_at;
      at = smem + (tiles.result_line ? 0 : GroupSpan<Out>(out, tiles, kStagedResult, tile.group).skip);
    }
    at += tile.template first_byte<Out>(kStagedResult);
    for_each_pair<Out>(at, step, [&](int i, int p, uint32_t at, PairAccess access) {
      if constexpr (is_half2<C, Out>) {
        store_smem_pair(access, at, pack_half2<Out>(result(fragment, i, 2 * p, i), result(fragment, i, 2 * p + 1, i)));
      } else {
        store_smem_if(access.low, at, from_acc<Out>(result(fragment, i, 2 * p, i)));
        if constexpr (V > 1)
          store_smem_if(access.high, at + (int)sizeof(Out), from_acc<Out>(result(fragment, i, 2 * p + 1, i)));
      }
    });
    if (!tile.ends) return;
    if (stream.is_bulk()) BulkCopy::fence();
    __syncthreads();
    if (tiles.result_line) return store_with_gaps(out, smem);
    const GroupSpan<Out> span(out, tiles, kStagedResult, tile.group);
    typedef Vector<uint32_t, 4> Word;
    if (!stream.is_bulk()) {
      span.for_each_vector(smem, span.skip, span.end,
                           [](uint32_t from, char* to) { *reinterpret_cast<Word*>(to) = load_smem<Word>(from); });
    } else if (threadIdx.x < 32) {
      span.for_each_piece(smem, span.skip, span.end,
                          [](uint32_t from, char* to, int bytes) { BulkCopy::store(to, from, bytes); });
      BulkCopy::commit_stores();
    }
    span.for_each_element(smem, span.skip, span.end,
                          [](uint32_t from, char* to) { *reinterpret_cast<Out*>(to) = load_smem_element<Out>(from); });
  }

 private:
  // Stores the results of a group that has gaps in memory, one element per lane.
  __device__ void store_with_gaps(Out* out, uint32_t smem) const {
    const Tiles& tiles = sequence.tiles;
    const int gap = tiles.staged[kStagedResult].gap, n = (int)tiles.n;
    const int all = slices_of(tiles, tile.group) * n * tiles.slice_cols;
    Out* const to = out + tile.group * tiles.group_slices * tiles.result_slice;
#pragma unroll 2
    for (int i = threadIdx.x; i < all; i += blockDim.x) {
      const int row = divide((unsigned)i, tiles.by_slice_cols), slice = divide((unsigned)row, tiles.by_slice_lines);
      to[slice * tiles.result_slice + (row - slice * n) * tiles.result_line + i - row * tiles.slice_cols] =
          load_smem_element<Out>(smem + i * (int)sizeof(Out) + slice * gap);
    }
  }
  // Calls f(i, p, at, access) for pair p of the elements of each vector i, which are of type T. `access` says which
  // elements exist and whether the pair is one word. The first pair is at `at`, and the next vector `step` bytes
  // further on. By the plans of ColumnPlanner all but kSpare vectors of a thread exist. If vectors are whole, each
  // pattern of pairs that are words has its own code: a predicate for each access would take longer.
  template <class T, class F>
  __device__ void for_each_pair(uint32_t at, int step, F f) const {
    constexpr bool kWords = is_half2<C, T>;
    constexpr int kSpare = kVecs <= 16 ? 1 : 4;
    const bool begin = kWords && at % 4 == 0, next = kWords && (at + step) % 4 == 0;
    const auto all = [&](bool begin, bool next, bool whole) {
      unroll<kVecs>([&](int i) {
        const bool exists = (whole && i < kVecs - kSpare) || i < tile.count;
        unroll<kPairs>([&](int p) {
          const bool low = exists && (whole || tile.rest > 2 * p),
                     high = exists && V > 1 && (whole || tile.rest > 2 * p + 1), word = (i % 2 ? next : begin) && high;
          f(i, p, at + i * step + 2 * p * (int)sizeof(T), PairAccess{word, low && !word, high && !word});
        });
      });
    };
    if (tile.count < kVecs - kSpare || tile.rest < V)
      all(begin, next, false);
    else if (!kWords || (!begin && !next))
      all(false, false, true);
    else if (begin && next)
      all(true, true, true);
    else if (begin)
      all(true, false, true);
    else
      all(false, true, true);
  }
  // Loads the elements of all vectors; those that do not exist become neutral. There is no branch that a load waits
  // for.
  template <class T>
  __device__ void load(ColumnFragment<C, T, kVecs>& to, StagedOperand which) const {
    const int step = tile.template step_bytes<T>(which);
    const uint32_t at = stream.first[which] + tile.template first_byte<T>(which);
    const T none = C::Operand::template neutral<T>();
    for_each_pair<T>(at, step, [&](int i, int p, uint32_t at, PairAccess access) {
      if constexpr (is_half2<C, T>) {
        to.at[i].at[p] = load_smem_pair(access, at, none.bits * 0x10001u);
      } else {
        to.set(i, 2 * p, load_smem_if(access.low, at, none));
        if constexpr (V > 1) to.set(i, 2 * p + 1, load_smem_if(access.high, at + (int)sizeof(T), none));
      }
    });
  }
};
