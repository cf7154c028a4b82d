// engine.cpp: from a call on torch tensors to launches.
#include "engine.h"

#include "../../plan/column_view.h"
#include "../../core/batch_invariant.h"
#include "column_launch.h"
#include "stream.h"

namespace onepass::cuda {

namespace {

// Whether a plan that was given can serve a call: an error says why not.
void check_forced(const CudaPlan& plan, const Call& call, const Gpu& gpu) {
  const Layout& layout = call.layout;
  const Alignment alignment(call.x_type, call.y_type, uint64_t(call.x), uint64_t(call.y), layout, call.reduces());
  const bool resident = plan.tier != Tier::twopass && plan.tier != Tier::grid,
             phased = alignment.begins_within(plan.vec_size);
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
  if (plan.tier == Tier::staged && !lies_flat(layout, call.reduces()))
    fail("the tier staged takes rows that lie one after another");
  if (plan.smem_vecs && plan.tier != Tier::staged && plan.vec_size * size_of(call.x_type) < 4)
    fail("vectors in shared memory have 4 bytes at least");
  const int kept = plan.items_per_thread + (plan.tier == Tier::staged ? 0 : plan.smem_vecs * plan.vec_size);
  const int64_t room = int64_t(plan.threads_per_row) * kept * (plan.tier == Tier::cluster ? plan.blocks_per_row : 1);
  const int64_t window = phased && plan.access != VecAccess::scalar ? layout.n + plan.vec_size - 1 : layout.n;
  if (resident && room < window) {
    fail("a plan for rows of up to " + std::to_string(room) + " elements, got " + std::to_string(window) +
         (phased ? " (a row may begin within a vector)" : ""));
  }
}

void run_rows(const Call& call, const Operand& like, const CudaPlan* forced) {
  const int device = like.device_index;
  const auto by = [&](const CudaPlan& plan) {
    check_forced(plan, call, device_info(device));
    return launch_by(plan, call, device);
  };
  serve(
      forced, by, [&](bool cooperative) { return launch_of(call, device, cooperative); },
      [&](const Launch& made) { return launched(made, call, like); });
}

}  // namespace

CudaPlan checked_plan(const std::vector<int64_t>& numbers) {
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

void run(const Call& call, const Operand& from, const Operand& to, const bool* reduced, bool keepdim,
         const CudaPlan* forced) {
  const Current current(from.device_index);
  if (call.layout.view == View::rows) {
    if (forced && forced->of_columns()) fail("the tiers of columns are for rows that are not one piece of memory each");
    return run_rows(call, from, forced);
  }
  if (!batch_invariant() && (!forced || forced->of_columns()) && fits_tiles(call.layout)) {
    return run_columns(call, from.device_index, forced, [&](ColumnLaunch made) { return launched(made, call, from); });
  }

  // The gather: outer dims first, then the reduced ones, contiguous.
  const Tensor input = shared(from), out = shared(to);
  std::vector<int64_t> sizes, x_strides, y_sizes, y_strides;
  const int rank = int(input.dim()), planes = call.function == Function::state;
  if (planes) {  // the maxima and the sums, before all other dims
    y_sizes.push_back(2);
    y_strides.push_back(out.stride(0));
  }
  for (const bool pass : {false, true}) {
    for (int i = 0, at = planes; i < rank; ++i) {
      const bool kept = !call.reduces() || !reduced[i] || keepdim;
      if (reduced[i] == pass) {
        sizes.push_back(input.size(i));
        x_strides.push_back(input.stride(i));
        if (kept) {
          y_sizes.push_back(out.size(at));
          y_strides.push_back(out.stride(at));
        }
      }
      at += kept;
    }
  }
  const Tensor x = empty_strided(sizes, contiguous_strides(sizes), call.x_type, input);
  checked(aoti_torch_copy_(x.get(), as_strided(input, sizes, x_strides).get(), 1));
  const Tensor y = empty_strided(y_sizes, contiguous_strides(y_sizes), call.y_type, input);
  Call gathered = call;
  gathered.x = x.const_data_ptr();
  gathered.y = y.mutable_data_ptr();
  gathered.layout.outer.count = gathered.layout.reduced.count = 0;
  gathered.layout.outer.insert({call.layout.rows, call.layout.n, call.reduces() ? 1 : call.layout.n});
  gathered.layout.reduced.insert({call.layout.n, 1, 1});
  gathered.layout.view = View::rows;
  run_rows(gathered, from, forced);
  checked(aoti_torch_copy_(as_strided(out, y_sizes, y_strides).get(), y.get(), 1));
}

}  // namespace onepass::cuda
