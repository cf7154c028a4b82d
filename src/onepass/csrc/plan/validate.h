// validate.h: whether the numbers that a caller gives are a valid plan, and whether a plan can serve a problem. A Fault
// says what is wrong, in words that end an error message. Pure: no torch, no CUDA.
#pragma once

#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "column_view.h"
#include "rows.h"

namespace onepass {

using Fault = std::optional<std::string>;

// Checks the numbers of a plan by themselves, without a problem.
inline Fault validate(const CudaPlan& plan) {
  const Tier tier = plan.tier;
  const VecAccess access = plan.access;
  const int threads = plan.threads_per_row, rows = plan.rows_per_block, items = plan.items_per_thread;
  const int vec_size = plan.vec_size, blocks = plan.blocks_per_row, smem_vecs = plan.smem_vecs;
  if (tier < Tier::warp || tier > Tier::pipelined) {
    return "tier is 0 (warp), 1 (staged), 2 (block), 3 (cluster), 4 (grid), 5 (twopass), 6 (columns), "
           "7 (columns-grid), 8 (columns-twopass), 9 (columns-staged), 10 (columns-smem) or 11 (pipelined), got " +
           std::to_string(int(tier));
  }
  if (access < VecAccess::predicated || access > VecAccess::shifted)
    return "access is 0 (predicated), 1 (scalar), 2 (aligned), 3 (slab), 4 (slab-aligned), 5 (strided) or 6 (shifted)";
  if (plan.of_columns()) {
    if (!is_power_of_two(vec_size, 8) || items < vec_size || items % vec_size ||
        items > (plan.is_staged() ? 64 : 32) * vec_size)
      return "vec_size is a power of two up to 8, items_per_thread 1 to 32 times as many (64 in columns-staged)";
    if (threads < 1 || rows < 1 || threads > 1024 || rows > 1024 || threads * rows > 1024)
      return "the tiers of columns have 1 to 1024 threads, side by side and down a column";
    if (plan.is_staged()) {
      if (vec_size > 4 || access != VecAccess::aligned || smem_vecs < 1 || blocks < 1 || blocks > 2)
        return "the tier columns-staged has vec_size 1, 2 or 4, access 2 (aligned), 1 or more slices per group, 1 "
               "or 2 stages";
      return {};
    }
    if (plan.is_in_smem()) {
      if ((access != VecAccess::slab && access != VecAccess::shifted) || !is_power_of_two(blocks, 16) || smem_vecs ||
          items != kStageVecs * vec_size)
        return "the tier columns-smem has access 3 (slab) or 6 (shifted), items_per_thread 4 times vec_size, "
               "blocks_per_tile a power of two up to 16, no smem_vecs";
      return {};
    }
    if (tier == Tier::columns ? !is_power_of_two(blocks, 16) : blocks < 1 || blocks > 1024)
      return "blocks_per_tile is a power of two up to 16 in the tier columns, 1 to 1024 in the other tiers of columns";
    if (smem_vecs < 0 || smem_vecs > 64 || (smem_vecs % 4 && smem_vecs != kPrefetch) || (smem_vecs && vec_size == 1) ||
        (smem_vecs && tier == Tier::columns_twopass) || (smem_vecs == kPrefetch && tier != Tier::columns))
      return "smem_vecs is a multiple of 4 up to 64 in the tiers of columns, or 1 for the next tile (tier columns)";
    if (access == VecAccess::scalar)
      return "access is 0 (predicated), 2 (aligned), 3 (slab), 4 (slab-aligned), 5 (strided) or 6 (shifted) in the "
             "tiers of columns";
    if (access == VecAccess::shifted && threads < 3) return "access 6 (shifted) has 3 threads side by side at least";
    if (smem_vecs > kPrefetch && access != VecAccess::aligned && access != VecAccess::slab_aligned &&
        access != VecAccess::shifted)
      return "shared memory holds whole vectors: access is 2 (aligned), 4 (slab-aligned) or 6 (shifted)";
    return {};
  }
  const int most = tier == Tier::grid ? 128 : 64;
  if (!is_power_of_two(vec_size, 8) || items < (tier == Tier::grid ? 0 : vec_size) || items > most || items % vec_size)
    return "vec_size is a power of two up to 8, items_per_thread a multiple of it up to " + std::to_string(most);
  if (tier == Tier::cluster   ? !is_power_of_two(blocks, 16) || blocks < 2
      : plan.sends_messages() ? blocks < 1 || blocks > 1024
                              : blocks != 1)
    return "blocks_per_row is a power of two from 2 to 16 in the tier cluster, 1 to 1024 in the tiers grid and "
           "pipelined, 1 in the others";
  if (tier == Tier::warp || tier == Tier::staged) {
    if (!is_power_of_two(threads, 32) || !is_power_of_two(rows, 1024) || threads * rows > 1024 || threads * rows < 32)
      return "threads_per_row is a power of two up to 32 in the tiers warp and staged, with 32 to 1024 threads in all";
  } else if (threads % 32 || threads < 32 || threads > 1024 || rows != 1) {
    return "the tiers block, cluster, grid, twopass and pipelined have one row per block and a multiple of 32 threads "
           "up to 1024";
  }
  if (tier == Tier::staged && (vec_size != 1 || smem_vecs < 1 || smem_vecs > 1024))
    return "the tier staged has vectors of one element, and rows_per_thread from 1 to 1024";
  if (tier == Tier::pipelined && (plan.vecs_per_thread() > 4 || threads > 448 || smem_vecs % plan.vecs_per_thread() ||
                                  smem_vecs < 1 || smem_vecs > 64))
    return "the tier pipelined has up to 4 vectors per thread, a multiple of them in shared memory and up to 448 "
           "threads that share a row";
  if (tier != Tier::staged && tier != Tier::pipelined && (smem_vecs < 0 || smem_vecs > 64 || smem_vecs % 2))
    return "smem_vecs is an even number up to 64 in the tiers block, cluster and grid";
  if (tier == Tier::grid && (plan.vecs_per_thread() % 4 || plan.vecs_per_thread() > 16 || threads > 480))
    return "the tier grid has 0, 4, 8, 12 or 16 vectors per thread and up to 480 threads that share a row";
  if ((tier == Tier::warp || tier == Tier::twopass) && smem_vecs)
    return "the tiers warp and twopass keep no vectors in shared memory";
  if (access > VecAccess::aligned) return "access is 0 (predicated), 1 (scalar) or 2 (aligned) in the tiers of rows";
  return {};
}

// A plan from its numbers, in the order of CudaPlan. A number that no int holds becomes the nearest int, which is not
// valid either.
inline CudaPlan make_plan(const std::vector<int64_t>& numbers) {
  const auto number = [&](size_t i) { return int(std::clamp<int64_t>(numbers[i], INT32_MIN, INT32_MAX)); };
  return {Tier(number(0)), number(1), number(2), number(3), number(4), number(5), number(6), VecAccess(number(7))};
}

// A plan that a caller gives. Throws if a number is wrong.
inline CudaPlan parse_plan(const std::vector<int64_t>& numbers) {
  if (numbers.size() != 8) {
    throw std::runtime_error(
        "onepass: a plan is (tier, threads_per_row, rows_per_block, items_per_thread, vec_size, blocks_per_row, "
        "smem_vecs, access)");
  }
  const CudaPlan plan = make_plan(numbers);
  if (const Fault fault = validate(plan)) throw std::runtime_error("onepass: " + *fault);
  return plan;
}

// Checks a plan whose numbers are valid by themselves for a problem that the kernels of rows take.
inline Fault validate_rows(const CudaPlan& plan, const Problem& problem, const Gpu& gpu) {
  const auto text = [](int64_t number) { return std::to_string(number); };
  const Tier tier = plan.tier;
  const int64_t n = problem.layout.n;
  const bool backward = problem.is_backward(), is_pointwise = backward && problem.is_reduction(),
             is_resident = tier != Tier::twopass && !plan.sends_messages() && !is_pointwise;
  const Alignment alignment(problem);
  const bool begins_within = alignment.begins_within(plan.vec_size);
  const int cluster = tier == Tier::cluster ? plan.blocks_per_row : 1;
  if (plan.of_columns()) return "the tiers of columns are for rows that are not one piece of memory each";
  if (backward) {
    if (plan.smem_vecs && tier != Tier::staged && !plan.sends_messages())
      return "gradients in the tiers block and cluster keep no vectors in shared memory";
    if (tier == Tier::grid) {
      const int chunk = RowChunks(plan, n, 2).thread_vecs;
      if (plan.vecs_per_thread() % chunk || plan.vecs_per_thread() > 4 * chunk || plan.smem_vecs % chunk)
        return "gradients in the tier grid keep up to " + text(4 * chunk) + " vectors per thread";
    }
    if (is_pointwise && tier != Tier::warp && tier != Tier::twopass)
      return "the gradient of logsumexp has the tiers warp and twopass, which take pieces of rows";
    if (tier == Tier::twopass && plan.threads_per_row > 512) return "the tier twopass has up to 512 threads here";
  } else {
    if (tier == Tier::grid && plan.smem_vecs % RowChunks(plan, n, 1).thread_vecs)
      return "the tier grid keeps multiples of " + text(RowChunks(plan, n, 1).thread_vecs) +
             " vectors in shared memory";
    if (plan.access == VecAccess::aligned && (tier == Tier::staged || !is_resident))
      return "access is 2 (aligned) in the tiers warp, block and cluster only";
    if (plan.smem_vecs && tier != Tier::staged && plan.vec_size * size_of(problem.type(kX)) < 4)
      return "vectors in shared memory have 4 bytes at least";
  }
  if (tier == Tier::staged && !RowPlanner(problem, gpu, false).is_tiled)
    return "the tier staged takes rows that lie one after another with gaps of up to half a row, and gradients of each "
           "element";
  if (plan.vec_size > alignment.widest && plan.access != VecAccess::scalar) {
    return "a vector of " + text(plan.vec_size) + " elements: the addresses or strides of this call allow " +
           text(alignment.widest);
  }
  if (plan.access == VecAccess::aligned && !alignment.whole(n, plan.vec_size))
    return "rows of whole vectors of " + text(plan.vec_size) + " elements, these are not";
  if (cluster > most_cluster(gpu))
    return "clusters of up to " + text(most_cluster(gpu)) + " blocks, got " + text(cluster);
  if (is_resident && plan.threads() > most_threads(gpu.arch, cluster))
    return "up to " + text(most_threads(gpu.arch, cluster)) + " threads per block here";
  if (tier == Tier::pipelined) {
    if (plan.access != VecAccess::predicated || problem.is_reduction())
      return "the tier pipelined serves functions that write rows, with access 0 (predicated)";
    const RowChunks chunks(plan, n, backward ? 2 : 1);
    if (chunks.count >= plan.smem_vecs / chunks.thread_vecs)
      return "the tier pipelined has room for more chunks than the " + text(chunks.count) + " of a row";
  }
  if (plan.sends_messages() && plan.blocks_per_row > gpu.sm_count)
    return "up to " + text(gpu.sm_count) + " blocks per row here, got " + text(plan.blocks_per_row);
  const int smem_items = tier == Tier::staged ? 0 : plan.smem_vecs * plan.vec_size;
  const int64_t room = int64_t(plan.threads_per_row) * (plan.items_per_thread + smem_items) * cluster;
  const int64_t span = begins_within && plan.access != VecAccess::scalar ? n + plan.vec_size - 1 : n;
  if (is_resident && room < span) {
    return "a plan for rows of up to " + text(room) + " elements, got " + text(span) +
           (begins_within ? " (a row may begin within a vector)" : "");
  }
  return {};
}

// The same for a problem that the kernels of columns take.
inline Fault validate_columns(const CudaPlan& plan, const Problem& problem, const Gpu& gpu) {
  const auto with = [](const char* words, int64_t number) { return words + std::to_string(number); };
  const ColumnView view = column_view(problem, plan);
  const bool slab = plan.takes_slabs();
  if (!plan.of_columns()) return "rows that are not one piece of memory each have the tiers of columns";
  if (view.strided && plan.access != VecAccess::strided) return "columns of such strides have the access strided";
  if (plan.is_staged()) {
    if (!view.slices_follow) return "the tier columns-staged takes slices that follow one another";
    if (plan.threads_y() * plan.vecs_per_thread() < view.n())
      return with("a plan for columns of so many elements: ", plan.threads_y() * plan.vecs_per_thread());
    if (plan.slices_per_group() * view.n() * view.inner() * view.narrowest < 16 &&
        plan.slices_per_group() < view.slices())
      return "a group of slices has 16 bytes at least";
    const int64_t group = plan.slices_per_group() < view.slices() ? plan.slices_per_group() : view.slices();
    const int64_t slice = *std::max_element(view.slice_steps, view.slice_steps + kMaxTensors);
    if (slice > gpu.shared || group > gpu.shared / (slice * view.narrowest))
      return with("shared memory has no room for groups of so many slices: ", group);
    return {};
  }
  const int widest = view.strided        ? 1
                     : slab              ? view.slab
                     : plan.is_shifted() ? plan.is_in_smem() ? view.shift_in : view.shift
                                         : view.tile;
  if (!view.strided && !widest) return slab ? "these columns are no slab" : "these columns are in no tiles";
  if (plan.vec_size > widest) return with("the addresses or strides of this call allow vectors of ", widest);
  const int lines = plan.threads_y() * (plan.is_in_smem() ? 1 : plan.blocks_per_tile());
  const int period = plan.is_in_smem() ? view.operand_period(plan.vec_size) : view.period(plan.vec_size);
  if (plan.is_shifted() && lines % period)
    return with("access shifted: threads down a column, over all blocks (columns-smem: in one), are a multiple of ",
                period);
  if (plan.access == VecAccess::aligned && view.inner() % plan.vec_size)
    return "access aligned: the columns are no whole vectors";
  if (plan.access == VecAccess::slab_aligned && !(view.slab_whole && plan.vec_size <= view.slab))
    return "access slab-aligned: these slabs are no whole vectors";
  if ((plan.tier == Tier::columns || plan.is_in_smem()) && plan.blocks_per_tile() > most_cluster(gpu))
    return with("clusters of blocks up to ", most_cluster(gpu));
  if (slab && (plan.threads_y() != 1 || int64_t(plan.threads_x()) * plan.vec_size % view.inner()))
    return "threads take a whole number of lines of a slab";
  if (plan.in_grid() && plan.blocks_per_tile() > gpu.sm_count)
    return with("blocks that share columns: up to ", gpu.sm_count);
  if (plan.is_in_smem() && problem.is_backward() && problem.is_reduction())
    return "the gradient of logsumexp, which merges nothing, has no tier columns-smem";
  if (plan.tier == Tier::columns_twopass || plan.is_in_smem()) return {};
  const int64_t vecs =
      int64_t(plan.vecs_per_thread() + (plan.prefetches() ? 0 : plan.smem_vecs)) * plan.blocks_per_tile();
  const int64_t room = slab ? vecs * plan.threads_x() * plan.vec_size : vecs * plan.threads_y();
  const int64_t span = slab ? view.n() * view.inner() + (view.slab_begins ? 0 : plan.vec_size - 1) : view.n();
  if (room < span) return with("a plan for columns (or slabs) of so many elements: ", room);
  return {};
}

// Whether a plan whose numbers are valid by themselves can serve a problem on a GPU.
inline Fault validate(const CudaPlan& plan, const Problem& problem, const Gpu& gpu) {
  return problem.has_rows() ? validate_rows(plan, problem, gpu) : validate_columns(plan, problem, gpu);
}

}  // namespace onepass
