// column_load.cuh: how a thread gets the vectors of its tiles. Each of these types reads the operands of a tile once
// for the reduction, and provides them again for the results:
//
//   TwoPassLoad     keeps nothing on chip: columns of any length are read twice
//   ResidentLoad    vectors stay in registers, and more in shared memory; or the next tile is copied to shared memory
//                   while this one is computed
//   PipelinedLoad   all vectors arrive through a pipeline in shared memory (see pipeline.cuh)
//   StagedLoad      whole slices arrive in shared memory, and leave from there (column_staged.cuh)
//   SmemLoad        all vectors of a tile are in shared memory until results leave from there (column_smem.cuh)
//
// load.for_each_stage(absorb, after_registers) calls absorb(vectors, release) for all vectors of the tile, several at a
// time. absorb calls release() once it has read them; then their place may be filled again. after_registers() is called
// once the loads of the tile have been started. load.store(out, result) stores result(vectors, i, v) for all elements.
//
// A Stream is the state that the tiles of a block share.
#pragma once

#include "column_smem.cuh"
#include "scored_column.cuh"

// Blocks per multiprocessor: for 128 registers per thread, or all that there are for doubles, whose exponentials take
// many.
template <class C>
constexpr int pipelined_blocks =
    C::kBlockThreads >= 512 ? 1 : (sizeof(typename C::Out) == 8 ? 256 : 512) / C::kBlockThreads;

// Whether all vectors arrive through a pipeline in shared memory.
template <class C>
constexpr bool is_pipelined =
    C::kInSmem || (C::kUsesSmemVecs && !C::kScoresOnLoad && C::kVecs % kStageVecs == 0 &&
                   ((C::kGrid && sizeof(typename C::Out) < 8) ||
                    (C::kOperands == 1 && sizeof(typename C::Out) == 2 && C::kClusterSize <= 2)));

// A thread's part of a tile.
template <class C>
using ColumnTile =
    typename Conditional<C::kStaged, StagedTile<C>,
                         typename Conditional<C::kInSmem, SmemTile<C>, ThreadTile<C, C::kTensors>>::type>::type;

// A group that has one tile.
template <class Tile>
struct LoneTile {
  const Tile only;
  __device__ LoneTile(const Tiles& tiles, int64_t index, int rank, uint64_t misalignment)
      : only(tiles, index, rank, misalignment) {}
  static __device__ int turns() { return 1; }
  __device__ const Tile& tile(int) const { return only; }
};

// The tiles of a block, in groups of one tile or, in the tier columns-staged, several. The block has every `stride`th
// group of `count` groups, beginning with `first`.
template <class C>
struct TileSequence {
  typedef ColumnTile<C> Tile;
  typedef typename Conditional<C::kStaged, StagedGroup<C>, LoneTile<Tile>>::type Group;
  const Tiles& tiles;
  const Operands<C> from;
  const int rank;  // of this block among those that share a tile
  const uint64_t misalignment;
  const int64_t count, stride, first;

  __device__ TileSequence(const Tiles& tiles, const Operands<C>& from)
      : tiles(tiles),
        from(from),
        rank(sharing_rank<C>()),
        misalignment((uint64_t)from.first / sizeof(typename C::Loaded) % C::kVecSize),
        count(C::kStaged ? tiles.slices : tiles.tiles_per_slice * tiles.slices),
        stride(C::kGrid ? gridDim.y : gridDim.x / C::kClusterSize),
        first(C::kGrid ? blockIdx.y : blockIdx.x / C::kClusterSize) {}
  __device__ Group group(int64_t index) const { return Group(tiles, index, rank, misalignment); }
  __device__ Tile tile(int64_t index) const { return Tile(tiles, index, rank, misalignment); }
};

// For elements that are reduced as they were loaded, without a score.
struct PlainLoad {
  template <class From, class Tile>
  __device__ PlainLoad(const From&, const Tile&) {}
};

template <class C>
using Scoring = typename Conditional<C::kScoresOnLoad, ScoringLoad<C>, PlainLoad>::type;

// The tile as it is read: with kSkipsHidden, without the vectors outside the window.
template <class C, class From, class Tile>
__device__ inline decltype(auto) read_tile(const From& from, const Tile& tile) {
  if constexpr (C::kSkipsHidden)
    return ColumnPlaces<C>(*from.map, tile).within_window();
  else
    return (tile);
}

// The base of all ways to load.
template <class C>
struct TileLoad {
  typedef TileSequence<C> Sequence;
  typedef typename Sequence::Tile Tile;
  typedef typename C::Out Out;
  static constexpr int kVecs = C::kVecs;
  const Sequence& sequence;
  const Tile& tile;
  const typename Conditional<C::kSkipsHidden, Tile, const Tile&>::type seen;
  const Scoring<C> scoring;
  OperandFragments<C, kVecs> fragment;

  __device__ TileLoad(const Sequence& sequence, const Tile& tile)
      : sequence(sequence), tile(tile), seen(read_tile<C>(sequence.from, tile)), scoring(sequence.from, tile) {}
  // Loads the vectors q, q + 1, ... of the tile.
  __device__ void load_fragment(int q) {
    if constexpr (C::kScoresOnLoad)
      scoring.load(fragment.first, q);
    else if constexpr (C::kTwoPass || !C::kReduces)
      fragment.load(sequence.from, seen, q);
    else
      fragment.load_in_turn(sequence.from, seen, q);
  }
  __device__ int vecs() const { return sequence.tiles.vecs_per_thread_max; }
  // Makes the compiler compute the address of shared memory once, before the loop over tiles. Otherwise it does so at
  // each use, in 3 to 6% more instructions (sm_90, 2026-11-24).
  static __device__ void hoist_smem_address() { dynamic_smem_address(); }
  // Stores the results of the vectors q, q + 1, ...
  template <int Vecs, class F>
  __device__ void store_vecs_of(const OperandFragments<C, Vecs>& vectors, int q, Out* out, F result) const {
    store_vecs<Vecs>(out, tile, C::kResultTensor, q, [&](int i, int v) { return result(vectors, i, v, q + i); });
  }
};

template <class C>
struct TwoPassLoad : TileLoad<C> {
  typedef TileLoad<C> Base;
  using Base::fragment, Base::kVecs;
  struct Stream {
    __device__ Stream(const typename Base::Sequence&) { Base::hoist_smem_address(); }
  };
  __device__ TwoPassLoad(Stream&, const typename Base::Sequence& sequence, const typename Base::Tile& tile, int64_t)
      : Base(sequence, tile) {}

  template <class F, class G>
  __device__ void for_each_stage(F absorb, G after_registers) {
    for (int q = 0; q < this->vecs(); q += kVecs) this->load_fragment(q), absorb(fragment, [] {});
    after_registers();
  }
  // After a reduction, in the opposite order: what was read last may still be in the L2 cache.
  template <class F>
  __device__ void store(typename C::Out* out, F result) {
    const int last = (this->vecs() - 1) / kVecs * kVecs;
    for (int q = C::kReduces ? last : 0; C::kReduces ? q >= 0 : q <= last; q += C::kReduces ? -kVecs : kVecs)
      this->load_fragment(q), this->store_vecs_of(fragment, q, out, result);
  }
};

template <class C>
struct ResidentLoad : TileLoad<C> {
  typedef TileLoad<C> Base;
  typedef typename Base::Sequence Sequence;
  using Base::fragment, Base::kVecs, Base::sequence, Base::seen;
  struct Stream {
    __device__ Stream(const Sequence& sequence) { prefetch_tile(sequence, sequence.first), Base::hoist_smem_address(); }
  };
  OperandFragments<C, kStageVecs> stage;
  const int64_t next;

  __device__ ResidentLoad(Stream&, const Sequence& sequence, const typename Base::Tile& tile, int64_t index)
      : Base(sequence, tile), next(index + sequence.stride) {}

  template <class F, class G>
  __device__ void for_each_stage(F absorb, G after_registers) {
    if constexpr (C::kUsesSmemVecs) copy_vecs_to_smem(kVecs, 0, smem_vecs());
    load_registers();
    if constexpr (!C::kUsesSmemVecs) after_registers();
    absorb(fragment, [] {});
    fragment.opaque_registers();
    if constexpr (C::kUsesSmemVecs) {
      for_each_smem_stage<true>(0, [&](int) { absorb(stage, [] {}); });
      after_registers();
    }
    prefetch_next();
  }
  template <class F>
  __device__ void store(typename C::Out* out, F result) {
    this->store_vecs_of(fragment, C::kFirstVecs, out, result);
    if constexpr (C::kUsesSmemVecs) {
#pragma unroll 1
      for (int c = 0; c < smem_vecs(); c += kStageVecs) {
        const int q = C::kFirstVecs && !c ? 0 : kVecs + c;
        load_stage(q, c), this->store_vecs_of(stage, q, out, result);
      }
    }
  }

  __device__ int smem_vecs() const { return sequence.tiles.smem_vecs; }
  // Begins to copy vectors, from q on, to the slots from `begin` to `end`. See copy_stages for `bits`.
  __device__ uint32_t copy_vecs_to_smem(int q, int begin, int end, uint32_t bits = 0) {
    if constexpr (C::kScoresOnLoad) {
#pragma unroll 1
      for (int c = begin; c < end; c += kStageVecs)
        this->scoring.load(stage.first, q + c - begin), write_back(stage.first, c), bits = bits > c ? bits : c;
      return bits;
    }
    return copy_stages<C>((const typename C::In*)sequence.from.first, sequence.from.second, seen, C::kFirstTensor, q,
                          begin, end, bits);
  }
  // The kFirstVecs vectors before those in registers are in shared memory.
  __device__ void load_registers() {
    if constexpr (C::kPrefetchesTile)
      AsyncCopy::wait<0>(), fragment.load(sequence.from, seen, C::kFirstVecs, smem_vec_address<C>(0, 0));
    else
      this->load_fragment(C::kFirstVecs);
  }
  // Loads the vectors q, q + 1, ..., which are in shared memory, beginning with slot c.
  __device__ void load_stage(int q, int c) {
    if constexpr (C::kShifted || C::kScoresOnLoad)
      stage.load_from_smem(seen, q, smem_vec_address<C>(0, c));
    else
      stage.load(sequence.from, seen, q, smem_vec_address<C>(0, c));
  }
  // Loads the stages in shared memory, beginning with slot `c`, and calls f(c) for each. With Arriving it waits for
  // each.
  template <bool Arriving, class F>
  __device__ void for_each_smem_stage(int c, F f) {
#pragma unroll 1
    for (; c < smem_vecs(); c += kStageVecs) {
      if constexpr (Arriving) AsyncCopy::wait_all_but((smem_vecs() - c) / kStageVecs - 1);
      load_stage(kVecs + c, c), f(c);
    }
  }
  __device__ void prefetch_next() const { prefetch_tile(sequence, next); }

 private:
  static __device__ void prefetch_tile(const Sequence& sequence, int64_t index) {
    if constexpr (C::kPrefetchesTile) {
      if (index < sequence.count) {
        const auto tile = sequence.tile(index);
        copy_vecs(0, sequence.from.first, tile, C::kFirstTensor, kVecs);
        if constexpr (C::kOperands > 1) copy_vecs(1, sequence.from.second, tile, C::kFirstTensor + 1, kVecs);
      }
      AsyncCopy::commit();
    }
  }
};

template <class C>
struct PipelinedLoad : TileLoad<C> {
  typedef TileLoad<C> Base;
  typedef typename Base::Sequence Sequence;
  typedef typename Base::Tile Tile;
  using Base::fragment, Base::kVecs, Base::sequence, Base::tile;
  struct Stream : Pipeline<C, AsyncCopy> {
    __device__ Stream(const Sequence& sequence) : Pipeline<C, AsyncCopy>(sequence.tiles, smem_vec_address<C>(0, 0)) {}
  };
  static constexpr int kRegisterVecs = C::kReadsOnce ? 0 : kVecs;
  Stream& pipeline;
  const bool has_next;
  const Tile next_tile;
  OperandFragments<C, kStageVecs> stage;

  __device__ PipelinedLoad(Stream& pipeline, const Sequence& sequence, const Tile& tile, int64_t index)
      : Base(sequence, tile),
        pipeline(pipeline),
        has_next((begin(index), index + sequence.stride < sequence.count)),
        next_tile(sequence.tile(has_next ? index + sequence.stride : index)) {}

  template <class F, class G>
  __device__ void for_each_stage(F absorb, G after_registers) {
#pragma unroll
    for (int q = 0; q < kRegisterVecs; q += kStageVecs) {
      if (q < this->vecs()) {
        receive(q, 0);
        absorb(stage, [&] { prefetch_stage(), fragment.set_stage(q, stage); });
      }
    }
    after_registers();
#pragma unroll 1
    for (int q = kRegisterVecs; q < this->vecs(); q += kStageVecs) {
      receive(q, C::kReadsOnce ? 0 : (q - kVecs) / kStageVecs);
      absorb(stage, [&] {
        if constexpr (C::kReadsOnce) prefetch_stage();
      });
    }
  }
  template <class F>
  __device__ void store(typename C::Out* out, F result) {
    const int beyond_registers = this->vecs() - kVecs;
    pipeline.rewind(beyond_registers > 0 ? (beyond_registers + kStageVecs - 1) / kStageVecs : 0);
    typename C::Out* to = out + tile.offset(C::kResultTensor, 0);
    const auto store_stage = [&](int q) {
      to = store_vecs_at<kStageVecs>(to, out, tile, C::kResultTensor, q,
                                     [&](int i, int v) { return result(stage, i, v, q + i); });
    };
#pragma unroll
    for (int q = 0; q < kVecs; q += kStageVecs) {
      if (q < this->vecs()) fragment.get_stage(q, stage), store_stage(q);
    }
#pragma unroll 1
    for (int q = kVecs; q < this->vecs(); q += kStageVecs) {
      stage.load(sequence.from, tile, q, pipeline.next());
      store_stage(q);
      prefetch_stage();
    }
  }

 private:
  __device__ void begin(int64_t index) {
    if (index == sequence.first) begin_tile(tile, true), pipeline.fill();
  }
  __device__ void begin_tile(const Tile& tile, bool exists) {
    pipeline.begin_tile(tile, exists, C::kFirstTensor, sequence.from.first, sequence.from.second);
  }
  // Loads a stage. `resident`: how many stages before it are still in shared memory.
  __device__ void receive(int q, int resident) { stage.load(sequence.from, tile, q, pipeline.wait_next(resident)); }
  __device__ void prefetch_stage() {
    if (pipeline.rest <= 0) begin_tile(next_tile, has_next);
    pipeline.prefetch();
  }
};

template <class C>
using ColumnLoad = typename Conditional<
    C::kStaged, StagedLoad<C, TileSequence<C>, Scoring<C>>,
    typename Conditional<C::kInSmem, SmemLoad<C, TileSequence<C>>,
                         typename Conditional<C::kTwoPass || !C::kReduces, TwoPassLoad<C>,
                                              typename Conditional<is_pipelined<C>, PipelinedLoad<C>,
                                                                   ResidentLoad<C>>::type>::type>::type>::type;
