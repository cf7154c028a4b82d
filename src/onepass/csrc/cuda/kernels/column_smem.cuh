// column_smem.cuh: the tier `columns-smem`. The elements of a tile are in the shared memory of a block, or of the
// blocks of a cluster, from their arrival until results leave. The memory of a block's part of a tile is cut into
// pieces. A piece is a line of a tile (access shifted), or a turn of a slab: a whole number of lines, and as many
// vectors as the block has threads. A piece begins at the same byte of a vector in shared memory as in global memory,
// and is copied with the vectors that belong to it only in part. So threads always access whole vectors, wherever lines
// begin.
//
//   pieces -> shared memory, chunk after chunk -> states of columns -> block -> cluster -> results -> pieces
//
// All lines of a thread begin at the same element of a vector, so that it always has the same columns. A vector at the
// edge of a tile also has columns of the neighbouring tile; their results are not stored.
#pragma once

#include "column_staged.cuh"
#include "warp_reduce.cuh"

constexpr int kSmemChunks = 4;  // parts of a block's pieces that arrive separately

// Blocks per multiprocessor: as many as have 768 threads, or 512 threads for doubles.
template <class C>
constexpr int smem_blocks = C::kBlockThreads >= 512 ? 1 : (sizeof(typename C::Out) == 8 ? 512 : 768) / C::kBlockThreads;

// A thread's part of a tile. Vector q of the thread is in piece `line + q * threads_y` of the block.
template <class C>
struct SmemTile {
  static constexpr int V = C::kVecSize, Tensors = C::kTensors;
  const Tiles& tiles;
  int64_t at[Tensors];               // where the block's first piece begins in each tensor
  int64_t slice, first_col, origin;  // as in ThreadTile
  int width;                         // elements of a piece
  int pieces;                        // of the block
  int line;                          // the thread's first piece
  int col;                           // the thread's first column, which may be before the tile
  int before;                        // slab: the elements of the first vector that come before the slab
  int begin, end;                    // slab: its begin and end, in elements from the block's first piece
  int count;                         // vectors of the thread
  unsigned in_tile;                  // shifted: a bit for each column of its vectors that is in the tile

  __device__ SmemTile(const Tiles& tiles, int64_t tile, int rank, uint64_t misalignment)
      : tiles(tiles), at{}, line(0), before(0), begin(0), end(0), count(0), in_tile(0) {
    const Quotient here = divide(tile, tiles.tiles_per_slice, tiles.by_tiles_per_slice);
    slice = here.whole, first_col = here.rest * tiles.tile_cols;
    add_offsets<Tensors>(tiles.outer, slice, at);
    origin = at[1];
    const int first_piece = rank * tiles.pieces_per_block, thread = threadIdx.x;
    if constexpr (C::kSlab) {
      width = tiles.threads_x * V;
      before = (int)((misalignment + (uint64_t)at[C::kFirstTensor]) % V);
      const int64_t from = (int64_t)first_piece * width, slab_end = tiles.n * tiles.inner + before;
      unroll<Tensors>([&](int t) { at[t] += from - before; });
      begin = rank ? 0 : before;
      end = slab_end > from ? (int)min(slab_end - from, (int64_t)tiles.pieces_per_block * width) : 0;
      pieces = (end + width - 1) / width;
      const int position = thread * V + V * tiles.tile_cols - before;
      col = position - divide(position, tiles.by_line) * tiles.tile_cols;
      if (thread < tiles.threads_x && pieces) count = pieces - (thread * V >= end - (pieces - 1) * width);
    } else {
      width = (int)min(tiles.inner - first_col, (int64_t)tiles.tile_cols);
      pieces = (int)max(min(tiles.n - first_piece, (int64_t)tiles.pieces_per_block), (int64_t)0);
      unroll<Tensors>([&](int t) { at[t] += first_piece * tiles.steps[t] + first_col; });
      line = divide((unsigned)thread, tiles.by_line);
      const int x = thread - line * tiles.threads_x;
      const uint64_t first = misalignment + (uint64_t)(at[C::kFirstTensor] + line * tiles.steps[C::kFirstTensor]);
      col = x * V - (int)(first % V);
      unroll<V>([&](int v) { in_tile |= (unsigned)is_inside(col + v, width) << v; });
      if (line < tiles.threads_y && in_tile && line < pieces)
        count = divide((unsigned)(pieces - line + tiles.threads_y - 1), tiles.by_threads_y);
    }
  }
  // Whether some elements of the thread's first or last vector do not exist. Only slabs have such vectors. In other
  // tiles a vector is in the tile for some of its columns only.
  __device__ bool has_gap() const { return count && (position(0) < begin || position(count - 1) + V > end); }
  __device__ bool has_element(int q, int v) const { return position(q) + v >= begin && position(q) + v < end; }
  __device__ bool has_column(int column) const { return C::kSlab || column < width; }
  __device__ int64_t column_offset(int column) const { return origin + (first_col + column) * tiles.steps[1]; }
  __device__ int next_col(int col) const { return !C::kSlab || col + 1 < tiles.tile_cols ? col + 1 : 0; }

 private:
  __device__ int position(int q) const { return q * width + (int)threadIdx.x * V; }
};

// The pieces of a tensor that a block has. T is the type of the elements. A slab is one span of memory.
template <class C, class T>
struct SmemPieces {
  static constexpr int kVec = kSpanVecBytes, kEdge = kVec / sizeof(T), kSize = sizeof(T);
  const SmemTile<C>& tile;
  char* const first;    // where the first piece begins in memory
  const uint32_t smem;  // and in shared memory
  const int64_t step;   // bytes from piece to piece in memory
  const int pitch;      // and in shared memory
  const char *const tensor_begin, *const tensor_end;

  __device__ SmemPieces(const SmemTile<C>& tile, T* tensor, int which, StagedOperand staged, uint32_t smem)
      : tile(tile),
        first(const_cast<char*>(bytes_of(tensor + tile.at[which]))),
        smem(smem + (uint32_t)((uint64_t)first % kVec)),
        step(tile.tiles.steps[which] * kSize),
        pitch(tile.tiles.staged[staged].line * kSize),
        tensor_begin(bytes_of(tensor)),
        tensor_end(bytes_of(tensor + tile.tiles.extents[which])) {}

  __device__ uint32_t first_vec() const {
    return smem + (C::kSlab ? (int)threadIdx.x * C::kVecSize * kSize : tile.line * pitch + tile.col * kSize);
  }
  __device__ int vec_step() const { return C::kSlab ? pitch : tile.tiles.threads_y * pitch; }

  // Slabs: a range of bytes, counted from the first piece. slab(k, end) is that of the pieces from `k` to `end`.
  struct Range {
    int low, high;
  };
  __device__ Range slab(int k, int end) const {
    return {max(k * tile.width, tile.begin) * kSize, min(end * tile.width, tile.end) * kSize};
  }
  // around(range) extends a range to the vectors that have any of its bytes and lie in the tensor. inside(range) is the
  // vectors that neither have elements of later pieces nor begin before the slab.
  __device__ Range around(Range range) const {
    const int skip = (int)((uint64_t)first % kVec);
    range.low = (range.low + skip) / kVec * kVec - skip;
    range.high = (range.high + skip + kVec - 1) / kVec * kVec - skip;
    if (first + range.low < tensor_begin) range.low += kVec;
    if (first + range.high > tensor_end) range.high -= kVec;
    return range;
  }
  __device__ Range inside(Range range) const {
    const int skip = (int)((uint64_t)first % kVec), up = range.low == tile.begin * kSize ? kVec - 1 : 0;
    return {(range.low + skip + up) / kVec * kVec - skip, (range.high + skip) / kVec * kVec - skip};
  }

  // Slabs: calls f(smem, global) for a thread's vectors in a range.
  template <class F>
  __device__ void for_each_vector(Range range, F f) const {
    for (int i = range.low + (int)threadIdx.x * kVec; i < range.high; i += blockDim.x * kVec) f(smem + i, first + i);
  }
  // Lines: calls f(smem, global) for a thread's vectors of the pieces from `k` to `end`. With `Around` these are all
  // vectors that have an element of a piece, with `Checks` only if they lie in the tensor as a whole. Without `Around`
  // they are the vectors that have only elements of a piece. All pieces of a thread begin at the same byte of a vector.
  template <bool Around, bool Checks, class F>
  __device__ void for_each_vector(int k, int end, F f) const {
    const Tiles& tiles = tile.tiles;
    const int row = divide(threadIdx.x, tiles.by_copy_lanes), lane = threadIdx.x - row * tiles.copy_lanes;
    if (row >= tiles.copy_rows) return;
    k += row;
    const int64_t turn = tiles.copy_rows * step;
    const int turn_pitch = tiles.copy_rows * pitch;
    char* const line = first + k * step;
    const int skip = (int)((uint64_t)line % kVec), bytes = skip + tile.width * kSize;
    for (int before = lane * kVec; before < bytes; before += tiles.copy_lanes * kVec) {
      if (!Around && (before < skip || before + kVec > bytes)) continue;
      char* at = line + (before - skip);
      uint32_t there = smem + k * pitch + before - skip;
#pragma unroll 4
      for (int piece = k; piece < end; piece += tiles.copy_rows, at += turn, there += turn_pitch)
        if (!Checks || (at >= tensor_begin && at + kVec <= tensor_end)) f(there, at);
    }
  }
  // Calls f(smem, global) for each element in a vector that lies in the tensor only in part.
  template <class F>
  __device__ void for_each_clipped(F f) const {
    const int pieces = C::kSlab ? 1 : tile.pieces;
    const Range all = C::kSlab ? slab(0, tile.pieces) : Range{0, tile.width * kSize};
    for (int i = threadIdx.x; i < 2 * kEdge * kEdge; i += blockDim.x) {
      const int element = i % kEdge * kSize, piece = i / kEdge % kEdge;
      const bool is_last = i >= kEdge * kEdge;  // the last elements of the last pieces, or the first of the first
      if (piece >= pieces || element >= all.high - all.low) continue;
      const int64_t k = is_last ? pieces - 1 - piece : piece;
      char* const at = first + k * step + (is_last ? all.high - kSize - element : all.low + element);
      char* const vec = at - (uint64_t)at % kVec;
      if (is_last ? vec + kVec > tensor_end : vec < tensor_begin)
        f(smem + (int)k * pitch + (int)(at - first - k * step), at);
    }
  }
  // Whether such elements may exist.
  __device__ bool may_be_clipped() const {
    const int64_t all = C::kSlab ? (int64_t)tile.end * kSize : (tile.pieces - 1) * step + tile.width * kSize;
    return first < tensor_begin + kVec || first + all + kVec > tensor_end;
  }
  // Whether lines are whole vectors.
  __device__ bool are_whole() const { return ((uint64_t)first | (uint64_t)step | tile.width * kSize) % kVec == 0; }
  // Stores the elements of the pieces from `k` to `end` that are not in a whole vector. At each end of a piece these
  // are at most one word each of 8, 4 and 2 bytes.
  __device__ void store_edges(int k, int end) const {
    const Range all = C::kSlab ? slab(0, tile.pieces) : Range{0, tile.width * kSize};
    for (int i = 2 * k + (int)threadIdx.x; i < 2 * end; i += blockDim.x) {
      const int piece = i / 2, bytes = all.high - all.low;
      char* at = first + piece * step + all.low;
      uint32_t from = smem + piece * pitch + all.low;
      const int skip = (int)((uint64_t)at % kVec), head = (kVec - skip) % kVec;
      if (skip + bytes < kVec) {  // all in one vector, which it neither begins nor ends
#pragma unroll 1
        for (int byte = 0; byte < bytes && i % 2 == 0; byte += kSize)
          *reinterpret_cast<T*>(at + byte) = load_smem_element<T>(from + byte);
      } else if (i % 2 == 0) {
        at += head, from += head;
        if (head & 8) at -= 8, from -= 8, copy_word<8>(at, from);
        if (head & 4) at -= 4, from -= 4, copy_word<4>(at, from);
        if (head & 2) at -= 2, from -= 2, copy_word<2>(at, from);
      } else {
        const int tail = (skip + bytes) % kVec;
        at += bytes - tail, from += bytes - tail;
        if (tail & 8) copy_word<8>(at, from), at += 8, from += 8;
        if (tail & 4) copy_word<4>(at, from), at += 4, from += 4;
        if (tail & 2) copy_word<2>(at, from);
      }
    }
  }

 private:
  template <int Bytes>
  static __device__ void copy_word(char* to, uint32_t from) {
    if constexpr (Bytes == 2) {
      if constexpr (kSize == 2) *reinterpret_cast<T*>(to) = load_smem_element<T>(from);
    } else if constexpr (Bytes >= kSize) {
      typedef Vector<uint32_t, Bytes / 4> Word;
      *reinterpret_cast<Word*>(to) = load_smem<Word>(from);
    }
  }
};

template <class C, class Sequence>
struct SmemLoad {
  typedef SmemTile<C> Tile;
  typedef typename C::First First;
  typedef typename C::In In;
  typedef typename C::Out Out;
  static constexpr int V = C::kVecSize;
  // Slabs are copied by bulk copies, one for each chunk. Lines are too short: the threads copy their vectors sooner
  // than one thread can start as many bulk copies.
  static constexpr bool kBulk = C::kSlab && BulkCopy::kExists;

  struct Stream {
    TxBarrier* const arrivals;  // one for each chunk
    uint32_t turn;              // how many tiles have begun
    __device__ Stream(const Sequence&) : arrivals(make_barriers()), turn(0) {}
    __device__ ~Stream() { wait_until_results_are_read(); }
    __device__ void wait_until_results_are_read() const {
      if (kBulk && !C::kReadsOnce && threadIdx.x == 0) BulkCopy::wait_until_read();
    }

   private:
    static __device__ TxBarrier* make_barriers() {
      __shared__ TxBarrier barriers[kBulk ? kSmemChunks : 1];
      if constexpr (kBulk) {
        if (threadIdx.x < kSmemChunks) barriers[threadIdx.x].init();
        __syncthreads();
      }
      return barriers;
    }
  };
  Stream& stream;
  const Tiles& tiles;
  const Tile& tile;
  const SmemPieces<C, const First> pieces;
  const SmemPieces<C, const In> second_pieces;  // only used with two operands
  const bool has_gap;                           // see SmemTile
  const bool has_clipped;                       // whether some elements must be copied one by one
  OperandFragments<C, kStageVecs> fragment;

  __device__ SmemLoad(Stream& stream, const Sequence& sequence, const Tile& tile, int64_t)
      : stream(stream),
        tiles(sequence.tiles),
        tile(tile),
        pieces(tile, sequence.from.first, C::kFirstTensor, kStagedFirst, dynamic_smem_address()),
        second_pieces(tile, sequence.from.second, C::kOperands > 1 ? C::kFirstTensor + 1 : C::kFirstTensor,
                      kStagedSecond, dynamic_smem_address() + sequence.tiles.span_bytes),
        has_gap(C::kSlab && tile.has_gap()),
        has_clipped(pieces.may_be_clipped() || (C::kOperands > 1 && second_pieces.may_be_clipped())) {
    if (stream.turn) {
      stream.wait_until_results_are_read();
      __syncthreads();
    }
    if (C::kSlab || !has_clipped)
      copy_chunks<false>();
    else
      copy_chunks<true>();
    if (has_clipped) copy_clipped();
  }

  template <class F, class G>
  __device__ void for_each_stage(F absorb, G after_registers) {
#pragma unroll 1
    for (int chunk = 0, q = 0; q < tiles.vecs_per_thread_max; ++chunk) {
      wait_for_chunk(chunk);
      const int end = min(q + tiles.chunk_vecs, tiles.vecs_per_thread_max);
#pragma unroll 1
      for (; q < end; q += kStageVecs) load_stage(q), absorb(fragment, [] {});
    }
    after_registers();
    ++stream.turn;
  }
  template <class F>
  __device__ void store(Out* out, F result) {
    const uint32_t place = dynamic_smem_address() + tiles.result_at;
    const SmemPieces<C, Out> results(tile, out, C::kResultTensor, tiles.result_at ? kStagedResult : kStagedFirst,
                                     place);
    const int step = results.vec_step();
    uint32_t at = results.first_vec();
#pragma unroll 1
    for (int chunk = 0, q = 0; q < tiles.vecs_per_thread_max; ++chunk) {
      const int end = min(q + tiles.chunk_vecs, tiles.vecs_per_thread_max);
#pragma unroll 1
      for (; q < end; q += kStageVecs) {
        load_stage(q);
        fragment.opaque_registers();
        unroll<kStageVecs>([&](int i) {
          Vector<Out, V> made;
          if constexpr (is_half2<C, Out>) {
            Vector<uint32_t, V / 2> words;
            unroll<V / 2>([&](int w) {
              words.at[w] = pack_half2<Out>(result(fragment, i, 2 * w), result(fragment, i, 2 * w + 1));
            });
            memcpy(&made, &words, sizeof(made));
          } else {
            unroll<V>([&](int v) { made.at[v] = from_acc<Out>(result(fragment, i, v)); });
          }
          const bool exists = q + i < tile.count;
          if (exists && !C::kSlab && tiles.results_are_elements)
            unroll<V>([&](int v) { store_smem_if(tile.in_tile >> v & 1, at + v * (int)sizeof(Out), made.at[v]); });
          else if (exists)
            store_smem_vec(at, made);
          at += step;
        });
      }
      if (kBulk) BulkCopy::fence();
      __syncthreads();
      send_chunk(results, chunk);
    }
  }

 private:
  __device__ int chunk_end(int chunk) const { return min((chunk + 1) * tiles.chunk_pieces, tile.pieces); }

  template <bool Checks>
  __device__ void copy_chunks() const {
#pragma unroll 1
    for (int c = 0; c < tiles.chunks; ++c) {
      const int k = c * tiles.chunk_pieces, end = chunk_end(c);
      if constexpr (kBulk) {
        if (threadIdx.x) return;
        const auto copy = [&](const auto& pieces) {
          const auto range = pieces.around(pieces.slab(k, end));
          const int bytes = k < end ? max(range.high - range.low, 0) : 0;
          if (bytes) BulkCopy::load(pieces.smem + range.low, pieces.first + range.low, bytes, stream.arrivals + c);
          return bytes;
        };
        stream.arrivals[c].expect_tx(copy(pieces) + (C::kOperands > 1 ? copy(second_pieces) : 0));
      } else {
        const auto copy = [&](const auto& pieces) {
          const auto start = [](uint32_t to, const char* from) { AsyncCopy::start<kSpanVecBytes>(to, from); };
          if constexpr (C::kSlab)
            pieces.for_each_vector(pieces.around(pieces.slab(k, end)), start);
          else
            pieces.template for_each_vector<true, Checks>(k, end, start);
        };
        if (k < end) {
          copy(pieces);
          if constexpr (C::kOperands > 1) copy(second_pieces);
        }
        AsyncCopy::commit();
      }
    }
  }
  __device__ void copy_clipped() const {
    pieces.for_each_clipped(
        [](uint32_t to, const char* from) { store_smem_if(true, to, *reinterpret_cast<const First*>(from)); });
    if constexpr (C::kOperands > 1)
      second_pieces.for_each_clipped(
          [](uint32_t to, const char* from) { store_smem_if(true, to, *reinterpret_cast<const In*>(from)); });
  }
  __device__ void wait_for_chunk(int chunk) const {
    if constexpr (kBulk)
      stream.arrivals[chunk].wait(stream.turn & 1);
    else
      AsyncCopy::wait_all_but(tiles.chunks - 1 - chunk);
    if (!kBulk || (has_clipped && chunk == 0)) __syncthreads();
  }
  // Loads the vectors q, q + 1, ... Elements that do not exist become neutral.
  __device__ void load_stage(int q) {
    load_stage(fragment.first, pieces, q);
    if constexpr (C::kOperands > 1) load_stage(fragment.second, second_pieces, q);
  }
  template <class T>
  __device__ void load_stage(ColumnFragment<C, T, kStageVecs>& to, const SmemPieces<C, const T>& from, int q) const {
    typedef typename ColumnFragment<C, T, kStageVecs>::Raw Raw;
    const int step = from.vec_step();
    const uint32_t at = from.first_vec() + q * step;
    if (q + kStageVecs <= tile.count) {
      unroll<kStageVecs>([&](int i) { to.set(i, load_smem_vec<Raw, T>(at + i * step)); });
    } else {
      unroll<kStageVecs>([&](int i) {
        to.fill(i, C::Operand::template neutral<T>());
        if (q + i < tile.count) to.set(i, load_smem_vec<Raw, T>(at + i * step));
      });
    }
    if (C::kSlab && has_gap && (q == 0 || q + kStageVecs >= tile.count)) {
      unroll<kStageVecs>([&](int i) {
        unroll<V>([&](int v) {
          if (!tile.has_element(q + i, v)) to.set(i, v, C::Operand::template neutral<T>());
        });
      });
    }
  }
  // Stores the results of a chunk.
  __device__ void send_chunk(const SmemPieces<C, Out>& results, int chunk) const {
    const int k = chunk * tiles.chunk_pieces, end = chunk_end(chunk);
    if (k >= end) return;
    if constexpr (C::kSlab) {
      const auto range = results.inside(results.slab(k, end));
      if constexpr (!kBulk) {
        results.for_each_vector(range, store_vec);
      } else if (threadIdx.x == 0 && range.low < range.high) {
        BulkCopy::store(results.first + range.low, results.smem + range.low, range.high - range.low);
        BulkCopy::commit_stores();
      }
      if (end == tile.pieces) results.store_edges(0, 1);
    } else {
      results.template for_each_vector<false, false>(k, end, store_vec);
      if (!results.are_whole()) results.store_edges(k, end);
    }
  }
  static __device__ void store_vec(uint32_t from, char* to) {
    typedef Vector<uint32_t, 4> Word;
    *reinterpret_cast<Word*>(to) = load_smem<Word>(from);
  }
  template <class Raw, class T>
  static __device__ Raw load_smem_vec(uint32_t at) {
    if constexpr (sizeof(Raw) == 2)
      return Raw{{load_smem_element<T>(at)}};
    else
      return load_smem<Raw>(at);
  }
  static __device__ void store_smem_vec(uint32_t at, Vector<Out, V> vector) {
    if constexpr (sizeof(vector) == 2)
      store_smem_if(true, at, vector.at[0]);
    else
      store_smem(at, vector);
  }
};
