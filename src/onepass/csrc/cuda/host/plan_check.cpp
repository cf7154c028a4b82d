// plan_check.cpp: whether a plan that a caller gives is a plan, and can serve a problem.
#include "plan_check.h"

#include <stdexcept>

namespace onepass::cuda {

namespace {

[[noreturn]] void fail(const std::string& why) { throw std::runtime_error("onepass: " + why); }

void refuse_columns(const CudaPlan& plan) {
  if (plan.of_columns()) fail("the tiers of columns are for rows that are not one piece of memory each");
}

}  // namespace

CudaPlan parse_plan(const std::vector<int64_t>& numbers) {
  const auto power = [](int64_t v, int64_t most) { return v >= 1 && v <= most && (v & (v - 1)) == 0; };
  if (numbers.size() != 8)
    fail(
        "a plan is (tier, threads_per_row, rows_per_block, items_per_thread, vec_size, blocks_per_row, smem_vecs, "
        "access)");
  if (numbers[0] < 0 || numbers[0] > int(Tier::columns_twopass)) {
    fail(
        "tier is 0 (warp), 1 (staged), 2 (block), 3 (cluster), 4 (grid), 5 (twopass), 6 (columns), 7 (columns-grid) or "
        "8 "
        "(columns-twopass), got " +
        std::to_string(numbers[0]));
  }
  const Tier tier = Tier(numbers[0]);
  const int64_t threads = numbers[1], rows = numbers[2], items = numbers[3], vec_size = numbers[4];
  const int64_t blocks = numbers[5], smem_vecs = numbers[6], vecs = power(vec_size, 8) ? items / vec_size : 0;
  if (numbers[7] < 0 || numbers[7] > int(VecAccess::strided))
    fail("access is 0 (predicated), 1 (scalar), 2 (aligned), 3 (slab), 4 (slab-aligned) or 5 (strided)");
  const VecAccess access = VecAccess(numbers[7]);
  if (is_of_columns(tier)) {
    if (!power(vec_size, 8) || items < vec_size || items > 32 * vec_size || items % vec_size)
      fail("vec_size is a power of two up to 8, items_per_thread 1 to 32 times as many");
    if (tier == Tier::columns ? !power(blocks, 16) : blocks < 1 || blocks > 1024)
      fail("blocks_per_tile is a power of two up to 16 in the tier columns, 1 to 1024 in the other tiers of columns");
    if (threads < 1 || rows < 1 || threads > 1024 || rows > 1024 || threads * rows > 1024)
      fail("the tiers of columns have 1 to 1024 threads, side by side and down a column");
    if (smem_vecs < 0 || smem_vecs > 64 || (smem_vecs % 4 && smem_vecs != kPrefetch) || (smem_vecs && vec_size == 1) ||
        (smem_vecs && tier == Tier::columns_twopass) || (smem_vecs == kPrefetch && tier != Tier::columns))
      fail("smem_vecs is a multiple of 4 up to 64 in the tiers of columns, or 1 for the next tile (tier columns)");
    if (access == VecAccess::scalar)
      fail("access is 0 (predicated), 2 (aligned), 3 (slab), 4 (slab-aligned) or 5 (strided) in the tiers of columns");
    if (smem_vecs > kPrefetch && access != VecAccess::aligned && access != VecAccess::slab_aligned)
      fail("shared memory holds whole vectors: access is 2 (aligned) or 4 (slab-aligned)");
    return {tier, int(threads), int(rows), int(items), int(vec_size), int(blocks), int(smem_vecs), access};
  }
  const int64_t most = tier == Tier::grid ? 128 : 64;
  if (!power(vec_size, 8) || items < (tier == Tier::grid ? 0 : vec_size) || items > most || items % vec_size)
    fail("vec_size is a power of two up to 8, items_per_thread a multiple of it up to " + std::to_string(most));
  if (tier == Tier::cluster ? !power(blocks, 16) || blocks < 2
      : tier == Tier::grid  ? blocks < 1 || blocks > 1024
                            : blocks != 1)
    fail(
        "blocks_per_row is a power of two from 2 to 16 in the tier cluster, 1 to 1024 in the tier grid, 1 in the "
        "others");
  if (tier == Tier::warp || tier == Tier::staged) {
    if (!power(threads, 32) || !power(rows, 1024) || threads * rows > 1024 || threads * rows < 32)
      fail("threads_per_row is a power of two up to 32 in the tiers warp and staged, with 32 to 1024 threads in all");
  } else if (threads % 32 || threads < 32 || threads > 1024 || rows != 1) {
    fail("the tiers block, cluster, grid and twopass have one row per block and a multiple of 32 threads up to 1024");
  }
  if (tier == Tier::staged && (vec_size != 1 || smem_vecs < 1 || smem_vecs > 1024))
    fail("the tier staged has vectors of one element, and rows_per_thread from 1 to 1024");
  if (tier != Tier::staged && (smem_vecs < 0 || smem_vecs > 64 || smem_vecs % (tier == Tier::grid ? 4 : 2)))
    fail("smem_vecs is up to 64, a multiple of 4 in the tier grid and of 2 in the tiers block and cluster");
  if (tier == Tier::grid && (vecs % 4 || vecs > 16 || threads > 480))
    fail("the tier grid has 0, 4, 8, 12 or 16 vectors per thread and up to 480 threads that share a row");
  if ((tier == Tier::warp || tier == Tier::twopass) && smem_vecs)
    fail("the tiers warp and twopass keep no vectors in shared memory");
  if (access > VecAccess::aligned) fail("access is 0 (predicated), 1 (scalar) or 2 (aligned) in the tiers of rows");
  return {tier, int(threads), int(rows), int(items), int(vec_size), int(blocks), int(smem_vecs), access};
}

void check_plan(const CudaPlan& plan, const ForwardProblem& problem, const Gpu& gpu) {
  refuse_columns(plan);
  const Layout& layout = problem.layout;
  const Alignment alignment(problem);
  const bool resident = plan.tier != Tier::twopass && plan.tier != Tier::grid,
             is_misaligned = alignment.begins_within(plan.vec_size);
  if (plan.vec_size > alignment.widest && plan.access != VecAccess::scalar) {
    fail("a vector of " + std::to_string(plan.vec_size) + " elements: the addresses or strides of this call allow " +
         std::to_string(alignment.widest));
  }
  if (plan.access == VecAccess::aligned && !alignment.whole(layout.n, plan.vec_size))
    fail("rows of whole vectors of " + std::to_string(plan.vec_size) + " elements, these are not");
  if (plan.access == VecAccess::aligned && (plan.tier == Tier::staged || !resident))
    fail("access is 2 (aligned) in the tiers warp, block and cluster only");
  if (plan.tier == Tier::cluster && plan.blocks_per_row > most_cluster(gpu))
    fail("clusters of up to " + std::to_string(most_cluster(gpu)) + " blocks, got " +
         std::to_string(plan.blocks_per_row));
  const int most = plan.tier == Tier::cluster ? plan.blocks_per_row : 1;
  if (resident && plan.threads() > most_threads(gpu.arch, most))
    fail("up to " + std::to_string(most_threads(gpu.arch, most)) + " threads per block here");
  if (plan.tier == Tier::grid && plan.blocks_per_row > gpu.sm_count)
    fail("up to " + std::to_string(gpu.sm_count) + " blocks per row here, got " + std::to_string(plan.blocks_per_row));
  if (plan.tier == Tier::staged && !RowPlanner(problem, gpu, false).is_contiguous)
    fail("the tier staged takes rows that lie one after another");
  if (plan.smem_vecs && plan.tier != Tier::staged && plan.vec_size * size_of(problem.type(kX)) < 4)
    fail("vectors in shared memory have 4 bytes at least");
  const int per_thread = plan.items_per_thread + (plan.tier == Tier::staged ? 0 : plan.smem_vecs * plan.vec_size);
  const int64_t room =
      int64_t(plan.threads_per_row) * per_thread * (plan.tier == Tier::cluster ? plan.blocks_per_row : 1);
  const int64_t span = is_misaligned && plan.access != VecAccess::scalar ? layout.n + plan.vec_size - 1 : layout.n;
  if (resident && room < span) {
    fail("a plan for rows of up to " + std::to_string(room) + " elements, got " + std::to_string(span) +
         (is_misaligned ? " (a row may begin within a vector)" : ""));
  }
}

void check_plan(const CudaPlan& plan, const BackwardProblem& problem, const Gpu& gpu) {
  refuse_columns(plan);
  const Alignment alignment(problem);
  const int64_t n = problem.layout.n;
  const bool begins_within = alignment.begins_within(plan.vec_size);
  if (plan.tier == Tier::staged || (plan.smem_vecs && plan.tier != Tier::grid))
    fail(
        "gradients have the tiers warp, block, cluster, grid and twopass; only the tier grid keeps vectors in shared "
        "memory");
  if (plan.tier == Tier::grid) {
    const int chunk = RowChunks(plan, n, 2).thread_vecs;
    if (plan.vecs_per_thread() % chunk || plan.vecs_per_thread() > 4 * chunk || plan.smem_vecs % chunk)
      fail("gradients in the tier grid keep up to " + std::to_string(4 * chunk) + " vectors per thread");
    if (plan.blocks_per_row > gpu.sm_count)
      fail("up to " + std::to_string(gpu.sm_count) + " blocks per row here, got " +
           std::to_string(plan.blocks_per_row));
  }
  if (problem.function == Function::logsumexp && plan.tier != Tier::warp && plan.tier != Tier::twopass)
    fail("the gradient of logsumexp has the tiers warp and twopass, which takes pieces of rows");
  if (plan.tier == Tier::twopass && plan.threads_per_row > 512) fail("the tier twopass has up to 512 threads here");
  if (plan.vec_size > alignment.widest && plan.access != VecAccess::scalar) {
    fail("a vector of " + std::to_string(plan.vec_size) + " elements: the addresses or strides of this call allow " +
         std::to_string(alignment.widest));
  }
  if (plan.access == VecAccess::aligned && (n % plan.vec_size || begins_within))
    fail("rows of whole vectors of " + std::to_string(plan.vec_size) + " elements, these are not");
  const bool resident = plan.tier != Tier::twopass && plan.tier != Tier::grid;
  const int split = plan.tier == Tier::cluster ? plan.blocks_per_row : 1;
  if (split > most_cluster(gpu))
    fail("clusters of up to " + std::to_string(most_cluster(gpu)) + " blocks, got " + std::to_string(split));
  if (resident && plan.threads() > most_threads(gpu.arch, split))
    fail("up to " + std::to_string(most_threads(gpu.arch, split)) + " threads per block here");
  const int64_t room = int64_t(plan.threads_per_row) * plan.items_per_thread * split;
  const int64_t span = begins_within && plan.access != VecAccess::scalar ? n + plan.vec_size - 1 : n;
  if (resident && room < span)
    fail("a plan for rows of up to " + std::to_string(room) + " elements, got " + std::to_string(span));
}

}  // namespace onepass::cuda
