// column_staged.cuh: short columns of slices that lie one after another in memory. (A slice is n lines of columns.) A
// block takes a group of slices as one span of memory, in whole vectors, whatever the number of columns is: the span
// begins at the same byte of a vector in shared memory as in global memory. Threads read the elements of their columns
// from shared memory, and results leave by the same way.
//
//   group -> shared memory -> registers: states of columns -> epilogue -> shared memory -> group
//
// While a group is computed the next one is on its way, if there is room for two. A tile is as many columns of a group
// as threads are side by side; a group may have several, which the block takes in turn.
#pragma once

#include "column_fragment.cuh"

constexpr int kSpanVecBytes = 16;

__device__ inline char* bytes_of(void* at) { return static_cast<char*>(at); }
__device__ inline const char* bytes_of(const void* at) { return static_cast<const char*>(at); }

// The slices of a group.
__device__ inline int slices_of(const Tiles& tiles, int64_t group) {
  const int64_t left = tiles.all_slices - group * tiles.group_slices;
  return left < tiles.group_slices ? (int)left : tiles.group_slices;
}

// The part of a tensor that belongs to a group. In shared memory there may be a gap of `gap` bytes after each slice: it
// lets lanes that read from different slices find their elements in different banks.
template <class T>
struct GroupSpan {
  const Tiles& tiles;
  T* begin;
  int skip, end;  // the first vector has `skip` bytes before the span, which ends before byte `end`
  __device__ GroupSpan(T* tensor, const Tiles& tiles, int64_t group) : tiles(tiles) {
    const int slice = (int)tiles.n * tiles.slice_cols;
    begin = tensor + group * tiles.group_slices * slice;
    skip = (int)((uint64_t)begin % kSpanVecBytes);
    end = skip + slices_of(tiles, group) * slice * (int)sizeof(T);
  }
  // Calls whole(smem, global) for each vector that is inside the bytes from `low` to `high`, a thread's vectors in
  // turn, and element(smem, global) for each element of the group outside of them. Bytes count from the first byte of
  // the first vector. `smem` is the address of that in shared memory.
  template <class F, class G>
  __device__ void for_each_vector(uint32_t smem, int gap, int low, int high, F whole, G element) const {
    auto* const global = bytes_of(begin) - skip;
    const int first = low > 0 ? kSpanVecBytes : 0, last = high / kSpanVecBytes * kSpanVecBytes;
    const int turn = blockDim.x * kSpanVecBytes;
    if (gap == 0) {
#pragma unroll 4
      for (int at = first + threadIdx.x * kSpanVecBytes; at < last; at += turn) whole(smem + at, global + at);
    } else {
#pragma unroll 2
      for (int at = first + threadIdx.x * kSpanVecBytes; at < last; at += turn)
        whole(smem + at + gap_before(at, gap), global + at);
    }
    constexpr int kEdge = kSpanVecBytes / sizeof(T);
    for (int i = threadIdx.x; i < 2 * kEdge; i += blockDim.x) {
      const int at = (i < kEdge ? skip : last - kSpanVecBytes) + i * (int)sizeof(T);
      if (i < kEdge ? at < first && at < end : at >= first && at < end)
        element(smem + at + gap_before(at, gap), global + at);
    }
  }

 private:
  __device__ int gap_before(int at, int gap) const { return gap * divide((unsigned)at / sizeof(T), tiles.by_slice); }
};

// What the tiles of a group have in common.
template <class C>
struct StagedGroup;

// A thread's vectors of a tile: each `threads_y`th of its columns. A line has `slice_vecs` vectors; where its columns
// are no whole vectors the last one has fewer. So that a tile is whole vectors too, it counts the columns that those
// lack.
template <class C>
struct StagedTile {
  static constexpr int V = C::kVecSize, before = 0;
  const Tiles& tiles;
  const int vecs_before;  // vectors of a line before the tile, of all slices of the group
  const int group_vecs;   // vectors of a line that the group's slices have
  int col;                // the thread's first column in the tile
  int rest;               // columns from that one to the end of its line
  int line;               // the thread's number along the column
  int first, step;        // the thread's first element in the group, and from one vector to the next
  int first_slice;        // the slice of the group that it is in
  int count;              // vectors of the thread
  int64_t group;          // which the tile is of
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
    rest = tiles.slice_cols - (vec - first_slice * tiles.slice_vecs) * V;
    first = vecs_before * V + group.first + first_slice * group.slice_step, step = group.step;
    count = vec < group_vecs ? group.count : 0;
  }
  __device__ bool has_column(int column) const {
    const int vec = vecs_before + column / V;
    return vec < group_vecs && column_of(vec, column) < tiles.slice_cols;
  }
  __device__ int64_t column_offset(int column) const {
    const int vec = vecs_before + column / V;
    const int64_t slice = group * tiles.group_slices + slice_of(vec);
    return (slice * tiles.slice_cols + column_of(vec, column)) * tiles.steps[1];
  }

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
  int x, line, vecs, count;     // of the thread, and as in StagedTile
  int first, step, slice_step;  // elements: to the thread's first one, from one to the next, and between slices

  __device__ StagedGroup(const Tiles& tiles, int64_t group, int, uint64_t) : tiles(tiles), group(group) {
    vecs = slices_of(tiles, group) * tiles.slice_vecs;
    line = divide(threadIdx.x, tiles.by_line);
    x = threadIdx.x - line * tiles.threads_x;
    first = x * C::kVecSize + line * tiles.slice_cols, step = tiles.threads_y * tiles.slice_cols;
    slice_step = (int)tiles.n * tiles.slice_cols - tiles.slice_vecs * C::kVecSize;
    count = line < tiles.threads_y ? tiles.existing.all + (line < tiles.existing.rest) : 0;
  }
  __device__ int turns() const { return (int)tiles.tiles_per_slice; }
  __device__ Tile tile(int turn) const { return {*this, turn}; }
};

// Stores to shared memory if `condition` holds. It does not branch: the compiler would move the computation of the
// value into the branch, and work on one value at a time.
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
// Loads an element in place of `value` if `condition` holds, in the same way.
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
// The same for two elements of 2 bytes that lie together: `word` is where they are one word, else they go one by one,
// if `low` and `high` hold.
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

// How a thread gets the elements of its tiles. Sequence is that of the block's groups.
template <class C, class Sequence>
struct StagedLoad {
  typedef StagedTile<C> Tile;
  typedef typename C::First First;
  typedef typename C::In In;
  typedef typename C::Out Out;
  static constexpr int kVecs = C::kVecs, V = C::kVecSize;
  static_assert(V <= 2);

  // The groups of a block, one after another.
  struct Stream {
    const Sequence& sequence;
    const uint32_t smem;
    int stage;          // where the current group is
    uint32_t first[2];  // its first element of each operand
    __device__ Stream(const Sequence& sequence) : sequence(sequence), smem(dynamic_smem_address()), stage(1), first{} {
      if (is_double_buffered()) copy_in(blockIdx.x, 0);
    }
    // Waits for a group. All threads are done with the one before.
    __device__ void begin(int64_t group) {
      if (is_double_buffered()) {
        AsyncCopy::wait<0>();
        __syncthreads();
        stage ^= 1;
        copy_in(group + gridDim.x, stage ^ 1);
      } else {
        stage = 0;
        __syncthreads();
        copy_in(group, 0);
        AsyncCopy::wait<0>();
        __syncthreads();
      }
      first[0] = operand(stage, 0) + GroupSpan<const First>(sequence.from.first, sequence.tiles, group).skip;
      if constexpr (C::kOperands > 1)
        first[1] = operand(stage, 1) + GroupSpan<const In>(sequence.from.second, sequence.tiles, group).skip;
    }
    // Where an operand of a group is in a stage.
    __device__ uint32_t operand(int stage, int which) const {
      return smem + (stage * C::kOperands + which) * sequence.tiles.span_bytes;
    }

   private:
    __device__ bool is_double_buffered() const { return sequence.tiles.stages > 1; }
    __device__ void copy_in(int64_t group, int to) const {
      if (group >= sequence.tiles.slices) return;
      copy_span(sequence.from.first, group, operand(to, 0));
      if constexpr (C::kOperands > 1) copy_span(sequence.from.second, group, operand(to, 1));
      AsyncCopy::commit();
    }
    // A vector that belongs to the group in part is copied whole where the rest belongs to the tensor.
    template <class T>
    __device__ void copy_span(const T* tensor, int64_t group, uint32_t smem) const {
      const Tiles& tiles = sequence.tiles;
      const GroupSpan<const T> span(tensor, tiles, group);
      span.for_each_vector(
          smem, tiles.operand_gap, group ? 0 : span.skip,
          group + 1 < tiles.slices ? span.end + kSpanVecBytes - 1 : span.end,
          [](uint32_t to, const char* from) { AsyncCopy::start<kSpanVecBytes>(to, from); },
          [](uint32_t to, const char* from) { store_smem_if(true, to, *reinterpret_cast<const T*>(from)); });
    }
  };

  Stream& stream;
  const Sequence& sequence;
  const Tile& tile;
  OperandFragments<C, kVecs> fragment;
  OperandFragments<C, kStageVecs> stage;  // none arrive apart

  __device__ StagedLoad(Stream& stream, const Sequence& sequence, const Tile& tile, int64_t)
      : stream(stream), sequence(sequence), tile(tile) {
    if (tile.begins) stream.begin(tile.group);
  }
  template <class F, class G>
  __device__ void for_each_stage(F absorb, G after_registers) {
    load_registers();
    after_registers();
    absorb(fragment, [] {});
  }
  __device__ void load_registers() {
    load(fragment.first, stream.first[0]);
    if constexpr (C::kOperands > 1) load(fragment.second, stream.first[1]);
  }
  __device__ void prefetch_next() const {}

  // The results take the places of the first operand, unless they have a place of their own.
  template <class F>
  __device__ void store(Out* out, F result) {
    const Tiles& tiles = sequence.tiles;
    uint32_t smem = stream.operand(stream.stage, 0), at = stream.first[0];
    const int step = tile.step * (int)sizeof(Out);
    if (tiles.result_at) {
      smem = stream.smem + tiles.result_at;
      at = smem + GroupSpan<Out>(out, tiles, tile.group).skip;
    }
    at += tile.first * (int)sizeof(Out) + tile.first_slice * tiles.result_gap;
    for_each_vec<Out>(at, step, [&](int i, PairAccess access) {
      if constexpr (is_half2<C, Out>) {
        store_smem_pair(access, at + i * step, pack_half2<Out>(result(fragment, i, 0), result(fragment, i, 1)));
      } else {
        unroll<V>([&](int v) {
          store_smem_if(v ? access.high : access.low, at + i * step + v * (int)sizeof(Out),
                        from_acc<Out>(result(fragment, i, v)));
        });
      }
    });
    if (!tile.ends) return;
    __syncthreads();
    const GroupSpan<Out> span(out, tiles, tile.group);
    typedef Vector<uint32_t, 4> Word;
    span.for_each_vector(
        smem, tiles.result_gap, span.skip, span.end,
        [](uint32_t from, char* to) { *reinterpret_cast<Word*>(to) = load_smem<Word>(from); },
        [](uint32_t from, char* to) { *reinterpret_cast<Out*>(to) = load_smem_element<Out>(from); });
  }

 private:
  // Calls f(i, access) for each vector of elements of type T, which exist, and are one word, as `access` says. The
  // first one is at `at`, and the next `step` bytes further. By the plans of ColumnPlanner all but kSpare vectors of a
  // thread exist.
  template <class T, class F>
  __device__ void for_each_vec(uint32_t at, int step, F f) const {
    constexpr bool kWords = is_half2<C, T>;
    constexpr int kSpare = kVecs <= 4 ? 1 : kVecs <= 16 ? 2 : 4;
    const bool has_high = V > 1 && tile.rest > 1;
    const bool begin = kWords && has_high && at % 4 == 0, next = kWords && has_high && (at + step) % 4 == 0;
    const auto all = [&](bool begin, bool next, bool has_high, bool exist) {
      unroll<kVecs>([&](int i) {
        const bool exists = (exist && i < kVecs - kSpare) || i < tile.count, is_word = i % 2 ? next : begin;
        f(i, PairAccess{exists && is_word, exists && !is_word, exists && has_high && !is_word});
      });
    };
    if (tile.count < kVecs - kSpare)
      all(begin, next, has_high, false);
    else if (kWords && begin && next)
      all(true, true, true, true);
    else
      all(begin, next, has_high, true);
  }
  // An element that does not exist is neutral. No load waits for a branch.
  template <class T>
  __device__ void load(ColumnFragment<C, T, kVecs>& to, uint32_t at) const {
    const int step = tile.step * (int)sizeof(T);
    at += tile.first * (int)sizeof(T) + tile.first_slice * sequence.tiles.operand_gap;
    const T none = C::Operand::template neutral<T>();
    for_each_vec<T>(at, step, [&](int i, PairAccess access) {
      if constexpr (is_half2<C, T>) {
        to.at[i].at[0] = load_smem_pair(access, at + i * step, none.bits * 0x10001u);
      } else {
        unroll<V>([&](int v) {
          to.set(i, v, load_smem_if(v ? access.high : access.low, at + i * step + v * (int)sizeof(T), none));
        });
      }
    });
  }
};
