// rows.h: RowPlanner chooses the kernel and the launch numbers for rows of unit stride, forward and backward. Pure: no
// torch, no CUDA; tested without a GPU.
#pragma once

#include <algorithm>
#include <optional>

#include "plan.h"

namespace onepass {

constexpr int kThreads = 128;   // threads per block in the tiers warp and staged
constexpr int kShortRow = 128;  // elements of two bytes
// Rows of these lengths take narrower vectors if all rows together have at most so many bytes: kFewBytes in vectors of
// several elements, and less in vectors of one element.
constexpr int kShortest = 16, kLongest = 512;
constexpr int64_t kFewBytes = 16 << 20, kFewWords = 8 << 20, kFewHalfWords = 4 << 20;
// The longest row of a reduction for which the tier staged pays. For half types it pays for longer rows too, unless
// they are aligned vectors of four.
constexpr int kStagedReduced = 40, kStagedReducedHalf = 160;
constexpr bool staged_pays_reduced(int64_t n, bool half) {
  return n <= kStagedReduced || (half && n <= kStagedReducedHalf && n % 4);
}
// The most bytes of a tile of the tier staged, and the least number of tiles per multiprocessor: calls of few megabytes
// take smaller tiles (benchmarks/results/sweep-rows-h200-2026-11-26.txt).
constexpr int64_t kTile = 14336, kTilesPerSm = 32;
// The number of threads of a row differs from the table's if a warp would read more words of one bank of shared memory
// at once than this (rows of 65 half elements begin one bank after another).
constexpr int kMostWords = 3;
// Half of a row's threads suffice if each then has at most so many elements, and takes a logarithm or writes nothing.
constexpr int kFewerThreads = 36;
constexpr int kStaticShared = 16384;  // the most bytes of shared memory that a kernel declares
// Lengths in elements of 4 bytes, or of half types. From kLongRow on, few rows are spread over several blocks each.
// From kWholeChip on (half of it with two operands), up to kFewWhole rows take the whole chip.
constexpr int64_t kLongRow = 16384, kWholeChip = 196608, kWholeChipHalf = 393216;
constexpr int kFewWhole = 8;
constexpr int64_t kFewRows = 8192;   // the tables few_rows serve up to so many rows
constexpr int64_t kPaired = 131072;  // from here on, up to half as many rows as multiprocessors take the whole chip too
// Reductions stream rows of more than kStreamed elements if there are at most kStreamedPerSm rows per multiprocessor.
// At most kStreaming threads of a multiprocessor do this.
constexpr int kStreamed = 18000, kStreamedPerSm = 5, kStreaming = 2048;

// Rows of half types that are not whole vectors keep few vectors in registers, where more would spill, and the other
// vectors in shared memory. The least and the most threads of a block, and the vectors of a thread with the least and
// the most threads (two sweeps of 120 lengths from 900 to 275000, benchmarks/results/sweep-rows-h200-2026-11-26.txt).
constexpr int kHalfThreads = 64, kMostHalfThreads = 160, kManyHalfThreads = 128, kHalfVecs = 8, kMostHalfVecs = 12;
// The same in gradients, and for vectors narrower than 16 bytes: elements, and vectors in shared memory.
constexpr int kUnalignedHalf = 40, kUnalignedInCluster = 24, kUnalignedSmemVecs = 4;
constexpr int kGridVectors = 448;  // vectors of a row, over all operands, that make a block of the tier grid worthwhile
// If rows are longer than kMuchLonger times what the chip holds, registers keep nothing, and shared memory keeps
// kLittle vectors per thread, so that the L1 cache has room for loads in flight (1x256M float32: 810 us with all of
// shared memory, 754 with kLittle).
constexpr int kMuchLonger = 4, kLittle = 16;
// The tier pipelined: threads per block that share rows, and vectors of each operand that a thread takes of a chunk.
// The cost model was fitted to 400 plans of 20 random shapes (H100, 2026-11-25): a turn of rows costs its bytes in a
// block, and kTurnBytes more. If fewer than kSparePlaces chunks fit beyond a row, each missing one costs kPlaceBytes.
constexpr int kPipelinedThreads = 448, kPipelinedVecs = 2;
constexpr int kTurnBytes = 24 << 10, kPlaceBytes = 6 << 10, kSparePlaces = 4;
// Plans of clusters become pipelined too, for few rows of at least so many bytes: in the last of a few waves of
// clusters most of the chip is empty.
constexpr int64_t kPipelinedRow = int64_t(1) << 20, kPipelinedRows = 64;
// The gradient of logsumexp: the longest row that the lanes of a warp take whole; the longest row that they take in
// pieces; the elements of a lane; and the lanes of a piece.
constexpr int kPointwiseRow = 512, kPieces = 16384, kPiece = 8, kPieceLanes = 8;

// Plans one problem. With `invariant` the plan depends only on the types and the length of a row, and so do the
// elements that a thread adds up. The bits of a row are then the same among any number of rows, wherever the row is in
// memory.
struct RowPlanner {
  const Gpu& gpu;
  const bool invariant;
  const Alignment alignment;
  const int64_t rows, n;
  const int operands;  // tensors that are kept on the chip: 2 in a gradient
  const bool is_backward, is_reduction;
  const bool takes_log;            // each thread of a row computes the logarithm of its sum
  const int64_t pitch;             // elements from row to row of the first operand
  const bool is_tiled;             // rows lie one after another, with small gaps
  const int read_size, item_size;  // bytes of an element as it is read, and as it is kept on the chip

  const bool half = item_size == 2;
  const int part = item_size == 8 ? 2 : 1;  // a thread keeps half as many elements of float64
  // The length of a row, as it is kept on the chip, in elements of 4 bytes, or of half types.
  const int64_t length = half || n > kAnyLength / 2 ? n : n * item_size / 4;
  int vec_size = invariant ? alignment.full : alignment.widest;
  // Whether elements are assigned to threads only by their index in the row. (In a gradient the tail of a row is not.)
  bool scalar = invariant && (alignment.begins_within(vec_size) || (is_backward && n % vec_size));
  int64_t vecs = count_vecs();  // vectors of a row, including those that it shares with its neighbours

  // `is_scored`: for calls with scores, whose elements are kept in the type of the scores.
  RowPlanner(const Problem& problem, const Gpu& gpu, bool invariant, bool is_scored = false)
      : gpu(gpu),
        invariant(invariant),
        alignment(problem),
        rows(problem.layout.rows),
        n(problem.layout.n),
        operands(problem.is_backward() ? 2 : 1),
        is_backward(problem.is_backward()),
        is_reduction(problem.is_reduction()),
        takes_log(!is_backward && (is_reduction || problem.function == Function::log_softmax)),
        pitch(rows == 1 ? n : problem.layout.row_stride(problem.is_backward() ? int(kSaved) : int(kX))),
        is_tiled(are_tiled(problem)),
        read_size(size_of(problem.in_type())),
        item_size(is_backward                                    ? 16 / alignment.full
                  : is_reduction && read_size == 2 && !is_scored ? read_size
                                                                 : std::max(read_size, size_of(problem.type(kY)))) {}

  CudaPlan plan() {
    if (is_backward && is_reduction) return plan_pointwise();
    if (is_backward) {
      const Entry& unaligned = look_up(unaligned_rows_backward_table(half), n);
      const bool staged = unaligned.tier != kUseWriteTable && !invariant && is_tiled && item_size < 8;
      if (staged && !alignment.whole(n, alignment.full)) return plan_staged(unaligned);
      return plan_on_chip(look_up(rows_backward_table(half), length));
    }
    const Tables& tables = tables_of(gpu.name);
    const bool begins_anywhere = !invariant && is_tiled && alignment.begins_within(alignment.full);
    if (item_size < 8 && (n % (16 / read_size) || begins_anywhere) && (!is_reduction || staged_pays_reduced(n, half))) {
      const Entry& unaligned = look_up(half ? tables.unaligned_f16 : tables.unaligned_f32, n);
      if (unaligned.tier != kUseWriteTable && (invariant || is_tiled)) {
        const std::optional<CudaPlan> narrow = plan_narrow();
        return narrow ? *narrow : plan_staged(unaligned);
      }
    }
    if (!is_reduction) return plan_on_chip(writing_entry(tables));
    const Entry& entry = look_up(tables.of(true, half), length);
    if (invariant) return plan_on_chip(entry);
    // Few long rows that are streamed: each by so many threads that all rows are computed at once, unless half of the
    // chip would be idle at the end.
    const int64_t chip = gpu.sm_count, per_sm = ceil_div(rows, chip);
    if (length > kStreamed && per_sm <= kStreamedPerSm && 5 * rows >= 3 * chip * per_sm) {
      int threads = 1024;
      while (rows * threads > chip * kStreaming) threads /= 2;
      return plan_twopass(threads, half ? 24 : 16);
    }
    // If there are too few rows for the chip, a reduction is served as softmax is.
    const bool too_few = Tier(entry.tier) == Tier::twopass && rows * entry.threads < chip * kStreaming / 2;
    return plan_on_chip(too_few ? writing_entry(tables) : entry);
  }

  // The plan that a table entry alone gives; none if it cannot hold the row.
  std::optional<CudaPlan> plan_by(const Entry& entry) {
    switch (Tier(entry.tier)) {
      case Tier::warp: return plan_warp(entry);
      case Tier::staged: {
        const CudaPlan plan = plan_staged(entry);
        const int64_t bytes = plan.group() * pitch * read_size + 2 * 16;
        return plan.tier == Tier::staged && bytes > gpu.shared - kStaticShared ? std::nullopt : std::optional(plan);
      }
      case Tier::twopass: return plan_twopass(entry.threads, entry.items_per_thread);
      default:
        const auto plan = Tier(entry.tier) == Tier::grid ? spread_over_grid() : keep_in_blocks(entry);
        return plan ? std::optional(pipelined(*plan)) : std::nullopt;
    }
  }

  // The fastest plan of the tier pipelined, if a block has room for its part of a row. `spare`: how many chunks should
  // fit beyond it. The rows of the last turn are spread over all blocks.
  std::optional<CudaPlan> pipelined_plan(int spare) const {
    const int64_t chip = gpu.sm_count, each = int64_t(kPipelinedThreads) * kPipelinedVecs;
    const int vec_bytes = vec_size * read_size * operands;
    const int64_t places = std::min<int64_t>((gpu.shared - kStaticShared) / (each * vec_bytes), 64 / kPipelinedVecs);
    const auto vecs_of = [&](int64_t blocks) { return ceil_div(vecs, blocks); };
    int64_t best = INT64_MAX, best_blocks = 0;
    for (int64_t at_once = std::min(rows, chip); at_once >= 1; --at_once) {
      const int64_t blocks = chip / at_once;
      if (at_once != std::min(rows, chip / blocks)) continue;  // as many rows as there are blocks for
      const int64_t turns = rows / at_once, last = rows % at_once;
      const int64_t lacking = spare - (places - ceil_div(vecs_of(blocks), each));
      if (lacking > spare - 2) continue;  // at least one chunk is prefetched
      int64_t cost = turns * (vecs_of(blocks) * vec_bytes + kTurnBytes + std::max<int64_t>(lacking, 0) * kPlaceBytes);
      if (last) cost += vecs_of(blocks * at_once / last) * vec_bytes + kTurnBytes;
      if (cost < best) best = cost, best_blocks = blocks;
    }
    if (!best_blocks) return {};
    return CudaPlan{Tier::pipelined,
                    kPipelinedThreads,
                    1,
                    kPipelinedVecs * vec_size,
                    vec_size,
                    int(best_blocks),
                    int(places) * kPipelinedVecs,
                    VecAccess::predicated};
  }

 private:
  static bool are_tiled(const Problem& problem) {
    const int64_t n = problem.layout.n;
    for (int t = 0; t < problem.count_tensors(); ++t) {
      const int64_t pitch = problem.layout.row_stride(t);
      if (!problem.is_one_per_row(t) && problem.layout.rows > 1 && (pitch < n || pitch > n + n / 2)) return false;
    }
    return !(problem.is_backward() && problem.grad_is_broadcast());
  }
  int64_t count_vecs() const {
    return ceil_div(!scalar && alignment.begins_within(vec_size) ? n + vec_size - 1 : n, vec_size);
  }
  // There are no kernels for rows of whole vectors if vectors are narrower than 16 bytes; such calls are rare.
  VecAccess access() const {
    return scalar                                                       ? VecAccess::scalar
           : vec_size == alignment.full && alignment.whole(n, vec_size) ? VecAccess::aligned
                                                                        : VecAccess::predicated;
  }
  VecAccess unaligned_access() const { return scalar ? VecAccess::scalar : VecAccess::predicated; }

  CudaPlan plan_warp(const Entry& entry) {
    // In a short row, the two vectors that are not whole cost more than narrow vectors: rows of 100 bfloat16 run at
    // 0.78 of the speed of a copy in vectors of 4, and at 0.70 in vectors of 8. (For 33 float32 it is the other way
    // round.)
    while (!is_backward && !invariant && half && n < kShortRow && alignment.begins_within(vec_size)) vec_size /= 2;
    vecs = count_vecs();
    return warp_of(entry.threads);
  }
  CudaPlan warp_of(int threads) const {
    const int items = int(up_to(ceil_div(vecs, threads) * vec_size, std::max(vec_size, 4)));
    return {Tier::warp, threads, kThreads / threads, items, vec_size, 1, 0, access()};
  }

  // How many words of one bank of shared memory a warp reads at once, if `threads` of its lanes read a row.
  int words_of_a_bank(int threads) const {
    int words[32] = {}, most = 0;
    int64_t before = -1;
    for (int lane = 0; lane < 32; ++lane) {
      const int64_t word = (lane / threads * n + lane % threads) * read_size / 4;
      if (word != before) most = std::max(most, ++words[word % 32]);
      before = word;
    }
    return most;
  }
  // Tiles of whole vectors, if rows lie one after another with small gaps. Otherwise the tier warp, element by element,
  // which gives the same bits.
  CudaPlan plan_staged(const Entry& entry) const {
    int threads = entry.threads;
    if ((half ? takes_log : is_reduction) && threads > 1 && n <= kFewerThreads * threads / 2) threads /= 2;
    if (words_of_a_bank(threads) > kMostWords) {
      if (threads > 1 && n <= kFewerThreads * threads / 2 && words_of_a_bank(threads / 2) <= kMostWords) threads /= 2;
      while (words_of_a_bank(threads) > kMostWords) threads *= 2;
    }
    const int rows_per_block = kThreads / threads, items = int(up_to(ceil_div(n, threads), 2));
    if (!is_tiled) return {Tier::warp, threads, rows_per_block, items, 1, 1, 0, VecAccess::predicated};
    const int64_t row = pitch * read_size * operands,
                  tile = std::clamp<int64_t>(rows * row / (gpu.sm_count * kTilesPerSm), 1, kTile);
    int rows_per_thread = int(ceil_div(tile, row * rows_per_block));
    while (rows_per_thread * rows_per_block % (16 / read_size)) ++rows_per_thread;
    return {Tier::staged, threads, rows_per_block, items, 1, 1, rows_per_thread, VecAccess::predicated};
  }

  // Few rows that are not whole vectors of 16 bytes, in whole narrower vectors: as tiles they would be too few for the
  // chip (5120 rows of 196 bfloat16 take 5.3 us instead of 7.2, measured on an H200, 2026-11-22).
  std::optional<CudaPlan> plan_narrow() const {
    if (invariant || is_reduction || pitch != n || n < kShortest || n > kLongest) return {};
    int width = half ? 4 : 2;
    while (width > 1 && !alignment.whole(n, width)) width /= 2;
    if (rows * n * read_size > (width > 1 ? kFewBytes : half ? kFewHalfWords : kFewWords)) return {};
    const int threads = n < kShortRow / 2 ? 8 : n <= 2 * kShortRow || width == 4 ? 16 : 32;
    const int items = int(up_to(ceil_div(n, int64_t(width) * threads) * width, 4));
    if (4 * n < 3 * threads * items) return {};  // too many threads would be idle
    return CudaPlan{Tier::warp, threads, kThreads / threads, items, width, 1, 0, VecAccess::aligned};
  }

  // A plan with `blocks` blocks of at least `least_threads` threads that keep a row in registers and shared memory, if
  // they can.
  std::optional<CudaPlan> share_row(int blocks, int least_threads, int items, int smem_vecs) const {
    const int most_doubles = 24 / operands;
    int64_t in_registers = (item_size == 8 && items > most_doubles ? most_doubles : items) / part / vec_size;
    if (in_registers < 1) in_registers = 1;
    if (vec_size * read_size < 8) smem_vecs = 0;
    const int64_t threads =
        std::max<int64_t>(least_threads, up_to(ceil_div(vecs, (in_registers + smem_vecs) * blocks), 32));
    if (blocks > most_cluster(gpu) || threads > most_threads(gpu.arch, blocks)) return {};
    const int64_t each = ceil_div(vecs, threads * blocks);
    const int64_t few_kinds = alignment.full / vec_size;  // narrow vectors come in no more numbers than wide ones
    if (each <= in_registers) in_registers = up_to(each, few_kinds);
    smem_vecs = each > in_registers ? int(up_to(each - in_registers, 2)) : 0;
    if (smem_vecs * threads * vec_size * read_size > gpu.shared - kStaticShared) return {};
    return CudaPlan{blocks > 1 ? Tier::cluster : Tier::block,
                    int(threads),
                    1,
                    int(in_registers) * vec_size,
                    vec_size,
                    blocks,
                    smem_vecs,
                    smem_vecs ? unaligned_access() : access()};
  }

  // The same for rows of a half type that are not whole vectors: as few blocks as possible, with few threads each. None
  // if a cluster would need many threads.
  std::optional<CudaPlan> share_half_row() const {
    const int in_registers = is_reduction ? 8 : takes_log ? 6 : 7;  // one more would spill
    for (int blocks = 1; blocks <= (is_reduction ? 1 : most_cluster(gpu)); blocks *= 2) {
      const auto threads_of = [&](int vecs_per_thread) {
        return std::max(int(up_to(ceil_div(vecs, int64_t(vecs_per_thread) * blocks), 32)), kHalfThreads);
      };
      const int threads = std::max(threads_of(kMostHalfVecs), std::min(threads_of(kHalfVecs), kManyHalfThreads));
      if (threads > (blocks < most_cluster(gpu) ? 1 : 2) * kMostHalfThreads) continue;
      const int each = int(ceil_div(vecs, int64_t(threads) * blocks));
      const int smem_vecs = is_reduction ? int(up_to(std::max(each - in_registers, 0), 2))
                            : each == 4  ? 2
                            : each < 6   ? 0
                            : each < 8   ? 4
                                         : int(up_to(each - in_registers, 2));
      return share_row(blocks, threads, (each - smem_vecs) * vec_size, smem_vecs);
    }
    return {};
  }

  // The plan of the tiers block and cluster by a table entry.
  std::optional<CudaPlan> keep_in_blocks(const Entry& entry) const {
    const bool unaligned = invariant ? n % vec_size != 0 : access() != VecAccess::aligned;
    if (half && unaligned && !is_backward && vec_size == alignment.full) {
      if (const auto plan = share_half_row()) return plan;
    }
    const bool fewer = half && unaligned && !entry.smem_vecs && entry.items_per_thread > kUnalignedHalf;
    if (fewer && entry.blocks_per_row > 1)
      return share_row(entry.blocks_per_row, 0, kUnalignedInCluster, kUnalignedSmemVecs);
    return share_row(entry.blocks_per_row, entry.threads, fewer ? kUnalignedHalf : entry.items_per_thread,
                     entry.smem_vecs);
  }

  // The whole chip, or as much of it as pays, on a few rows at a time: as many as it holds together.
  std::optional<CudaPlan> spread_over_grid() {
    if (!gpu.cooperative) return {};
    if (vec_size != alignment.full) vec_size = alignment.full, scalar = true, vecs = count_vecs();
    const int unit = is_backward ? (item_size == 8 ? 1 : 2) : 4;                 // vectors come in multiples of it
    const int most_in_registers = is_backward ? (gpu.arch == 90 ? 4 : 2) * unit  // elsewhere more would spill
                                              : (gpu.arch == 90 ? 16 : 12) / part / 4 * 4;
    const auto places = [&](int threads) {
      return int((gpu.shared - kStaticShared) / (operands * threads * vec_size * read_size) / unit * unit);
    };
    int threads = 480, in_registers = most_in_registers;
    const int64_t chip = gpu.sm_count, holds = threads * int64_t(in_registers + places(threads));
    const int64_t fewest = ceil_div(vecs, holds);  // the fewest blocks that hold a row together
    int64_t blocks = std::min(fewest, chip);
    if (!invariant && fewest < chip) {
      const int64_t together = std::min(rows, chip / fewest);
      const int64_t useful = ceil_div(vecs, kGridVectors / operands);  // blocks that have something to do
      blocks = std::min(chip / together, std::max(useful, fewest));
    }
    // Fewer threads if there is less to keep. Vectors in registers are processed first.
    const int64_t each = ceil_div(vecs, blocks);
    if (!is_backward && item_size < 8 && each > kMuchLonger * holds) in_registers = 0;
    const auto little = [&](int threads) { return std::min(places(threads), kLittle); };
    const auto takes = [&](int few, int registers, int smem) {
      registers = std::min(registers, most_in_registers);
      if (each > int64_t(few) * (registers + smem)) return false;
      threads = few, in_registers = registers;
      return true;
    };
    (void)(takes(256, unit, 0) || takes(256, 2 * unit, 0) || (!is_backward && takes(256, 3 * unit, 0)) ||
           takes(256, 4 * unit, 0) || (!is_backward && takes(352, 8, little(352))));
    const int64_t rest = ceil_div(each, threads) - in_registers, wanted = rest > 0 ? up_to(rest, unit) : 0;
    const int most = in_registers ? places(threads) : little(threads);
    return CudaPlan{Tier::grid,
                    threads,
                    1,
                    in_registers * vec_size,
                    vec_size,
                    int(blocks),
                    int(std::min<int64_t>(wanted, most)),
                    unaligned_access()};
  }

  CudaPlan plan_twopass(int threads, int items) const {
    const int in_flight = items / part < vec_size ? vec_size : items / part / vec_size * vec_size;
    return {Tier::twopass, int(up_to(threads / part, 32)), 1, in_flight, vec_size, 1, 0, unaligned_access()};
  }

  // The gradient of logsumexp, which merges nothing and takes rows in pieces. By a sweep of plans (H200, 2026-11-27)
  // blocks take pieces of whole vectors. If rows begin within vectors, a few lanes take a piece, unless rows are long.
  CudaPlan plan_pointwise() const {
    if (length <= kPointwiseRow) {
      int threads = 1;
      while (threads < 32 && threads * vec_size * 4 < n) threads *= 2;
      return warp_of(threads);
    }
    const bool are_whole = access() == VecAccess::aligned;
    if (!are_whole && length <= kPieces) {
      const int items = std::max(kPiece / part, vec_size);
      return {Tier::warp, kPieceLanes, kThreads / kPieceLanes, items, vec_size, 1, 0, access()};
    }
    const int each = are_whole ? 2 : 4, most = are_whole ? 128 : 64;
    const int threads = int(std::min<int64_t>(most, up_to(ceil_div(vecs, each), 32)));
    return {Tier::twopass, threads, 1, each * vec_size, vec_size, 1, 0, access()};
  }

  // The table entry of a function that writes a row for each row.
  const Entry& writing_entry(const Tables& tables) const {
    if (!invariant && rows <= kFewRows && n % alignment.full == 0) {
      const Entry& few = look_up(half ? tables.few_rows_f16 : tables.few_rows_f32, length);
      if (few.tier != kUseWriteTable) return few;
    }
    return look_up(tables.of(false, half), length);
  }

  // Few long rows: each over the whole chip, or over as many blocks as fill the chip.
  std::optional<CudaPlan> spread_few_rows(const Entry& entry) {
    if (invariant || length < kLongRow) return {};
    const int64_t whole = (half ? kWholeChipHalf : kWholeChip) / operands, chip = gpu.sm_count;
    const bool few = length >= whole && rows <= kFewWhole;
    const bool paired =
        is_backward ? !half && length >= whole && rows <= chip / 4 : length >= kPaired && rows > 32 && rows <= chip / 2;
    if ((few || paired) && vec_size == alignment.full) {
      const std::optional<CudaPlan> plan = spread_over_grid();
      if (plan && (few || !RowChunks(*plan, n, operands).unkept)) return plan;
    }
    for (int blocks = 16; blocks >= entry.blocks_per_row && blocks > 1; blocks /= 2) {
      if (rows * blocks > 4 * chip) continue;
      // If a multiprocessor has several blocks: smaller blocks, with more elements per thread.
      const bool several = half && vec_size == alignment.full && rows * blocks > 2 * chip;
      for (const int items : {several ? 48 : 32, 16, 8}) {
        if (is_backward && items > 16) continue;
        const auto plan = share_row(blocks, 0, is_backward && half ? 2 * items : items, 0);
        if (plan && plan->threads_per_row >= kThreads) return plan;
      }
    }
    return {};
  }

  // A plan of the tier pipelined, if `plan` would need several turns of rows over the chip, and a block has room for
  // its part of a row and of the next one. Otherwise `plan` itself.
  CudaPlan pipelined(const CudaPlan& plan) const {
    const bool has_turns = rows > gpu.sm_count / plan.blocks_per_row,
               few_huge = n * read_size * operands >= kPipelinedRow && rows <= kPipelinedRows;
    const bool pays = has_turns && (plan.tier == Tier::grid || (plan.tier == Tier::cluster && few_huge));
    const bool whole_vectors = vec_size == alignment.full && !scalar && item_size < 8;  // as cp.async needs them
    if (!pays || !whole_vectors || invariant || is_reduction || !gpu.cooperative) return plan;
    return pipelined_plan(kSparePlaces).value_or(plan);
  }

  CudaPlan plan_on_chip(const Entry& entry) { return pipelined(plan_one_turn(entry)); }

  CudaPlan plan_one_turn(const Entry& entry) {
    const Tier tier = Tier(entry.tier);
    if (tier == Tier::warp) return plan_warp(entry);
    if (tier == Tier::staged) return plan_staged(entry);
    if (const auto plan = spread_few_rows(entry)) return *plan;
    if (tier == Tier::block || tier == Tier::cluster) {
      if (const auto plan = keep_in_blocks(entry)) return *plan;
      // The GPU has no clusters as large as the table's; or vectors are narrow, and a thread keeps fewer elements of
      // them.
      const int items = is_backward ? (half ? 32 : 16) : half ? 40 : 32, most = most_cluster(gpu);
      for (int blocks = 1; blocks <= most; blocks *= 2) {
        if (!is_backward && (blocks > entry.blocks_per_row || (blocks > 1 && blocks < most))) continue;
        for (const int smem_vecs : {0, 8, 16, 24}) {
          if (is_backward && smem_vecs) break;
          if (const auto plan = share_row(blocks, 0, items, smem_vecs)) return *plan;
        }
      }
    }
    if (tier == Tier::twopass) return plan_twopass(entry.threads, entry.items_per_thread);
    if (const auto plan = spread_over_grid()) return *plan;
    return plan_twopass(half || is_backward ? 512 : 1024, 16);
  }
};

inline CudaPlan plan_rows(const Problem& problem, const Gpu& gpu, bool invariant, bool is_scored = false) {
  return RowPlanner(problem, gpu, invariant, is_scored).plan();
}

}  // namespace onepass
