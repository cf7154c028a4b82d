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
  if (numbers.size() != 8) fail("a plan is (tier, lanes, rows a block, values, vector, split, shelf, edges)");
  if (numbers[0] < 0 || numbers[0] > int(Tier::columns_stream)) {
    fail(
        "tier is 0 (warp), 1 (flat), 2 (block), 3 (cluster), 4 (grid), 5 (stream), 6 (columns), 7 (columns-grid) or 8 "
        "(columns-stream), got " +
        std::to_string(numbers[0]));
  }
  const Tier tier = Tier(numbers[0]);
  const int64_t lanes = numbers[1], rows = numbers[2], values = numbers[3], vector = numbers[4];
  const int64_t split = numbers[5], shelf = numbers[6], edges = numbers[7],
                slots = power(vector, 8) ? values / vector : 0;
  if (is_of_columns(tier)) {
    if (!power(vector, 8) || values < vector || values > 32 * vector || values % vector)
      fail("vector is a power of two up to 8, values 1 to 32 times as many");
    if (tier == Tier::columns ? !power(split, 16) : split < 1 || split > 1024)
      fail("split is a power of two up to 16 in the tier columns, 1 to 1024 in the others of columns");
    if (lanes < 1 || rows < 1 || lanes > 1024 || rows > 1024 || lanes * rows > 1024)
      fail("the tiers of columns have 1 to 1024 threads, side by side and down a column");
    if (shelf < 0 || shelf > 64 || (shelf % 4 && shelf != kAhead) || (shelf && vector == 1) ||
        (shelf && tier == Tier::columns_stream) || (shelf == kAhead && tier != Tier::columns))
      fail("a shelf of columns has up to 64 vectors, a multiple of 4, or is 1 for the next tile (tier columns)");
    if (edges < kWindow || edges > kStrided || edges == kApart)
      fail("edges is 0 (window), 2 (whole), 3 (slab), 4 (whole slab) or 5 (strided) in the tiers of columns");
    if (shelf > kAhead && edges != kWhole && edges != kWholeSlab) fail("a shelf takes whole vectors");
    return {tier, int(lanes), int(rows), int(values), int(vector), int(split), int(shelf), int(edges)};
  }
  const int64_t most = tier == Tier::grid ? 128 : 64;
  if (!power(vector, 8) || values < (tier == Tier::grid ? 0 : vector) || values > most || values % vector)
    fail("vector is a power of two up to 8, values a multiple of it up to " + std::to_string(most));
  if (tier == Tier::cluster ? !power(split, 16) || split < 2
      : tier == Tier::grid  ? split < 1 || split > 1024
                            : split != 1)
    fail("split is a power of two from 2 to 16 in the cluster tier, 1 to 1024 in the grid tier, 1 in the others");
  if (tier == Tier::warp || tier == Tier::flat) {
    if (!power(lanes, 32) || !power(rows, 1024) || lanes * rows > 1024 || lanes * rows < 32)
      fail("the warp and flat tiers have a power of two of lanes up to 32, and 32 to 1024 threads");
  } else if (lanes % 32 || lanes < 32 || lanes > 1024 || rows != 1) {
    fail("the block, cluster, grid and stream tiers have one row a block and a multiple of 32 threads up to 1024");
  }
  if (tier == Tier::flat && (vector != 1 || shelf < 1 || shelf > 1024))
    fail("the flat tier has vectors of one element, and 1 to 1024 rows a thread in its shelf");
  if (tier != Tier::flat && (shelf < 0 || shelf > 64 || shelf % (tier == Tier::grid ? 4 : 2)))
    fail("a shelf has up to 64 vectors, a multiple of 4 in the grid tier and of 2 in the block and cluster tiers");
  if (tier == Tier::grid && (slots % 4 || slots > 16 || lanes > 480))
    fail("the grid tier has 0, 4, 8, 12 or 16 vectors a thread and up to 480 threads that share a row");
  if ((tier == Tier::warp || tier == Tier::stream) && shelf) fail("the warp and stream tiers have no shelf");
  if (edges < kWindow || edges > kWhole) fail("edges is 0 (window), 1 (apart) or 2 (whole)");
  return {tier, int(lanes), int(rows), int(values), int(vector), int(split), int(shelf), int(edges)};
}

void check_plan(const CudaPlan& plan, const ForwardProblem& problem, const Gpu& gpu) {
  refuse_columns(plan);
  const Layout& layout = problem.layout;
  const Phase phase(problem.type(kX), problem.type(kY), problem.address(kX), problem.address(kY), layout,
                    problem.is_reduction());
  const bool resident = plan.tier != Tier::stream && plan.tier != Tier::grid, phased = phase.begins_within(plan.vector);
  if (plan.vector > phase.widest && plan.edges != kApart) {
    fail("a vector of " + std::to_string(plan.vector) + " elements: the addresses or strides of this call allow " +
         std::to_string(phase.widest));
  }
  if (plan.edges == kWhole && !phase.whole(layout.n, plan.vector))
    fail("rows of whole vectors of " + std::to_string(plan.vector) + " elements, these are not");
  if (plan.edges == kWhole && (plan.tier == Tier::flat || !resident))
    fail("the tiers warp, block and cluster take rows for whole vectors, the others do not");
  if (plan.tier == Tier::cluster && plan.split > most_cluster(gpu))
    fail("clusters of up to " + std::to_string(most_cluster(gpu)) + " blocks, got " + std::to_string(plan.split));
  const int most = plan.tier == Tier::cluster ? plan.split : 1;
  if (resident && plan.threads() > most_threads(gpu.compute, most))
    fail("up to " + std::to_string(most_threads(gpu.compute, most)) + " threads a block here");
  if (plan.tier == Tier::grid && plan.split > gpu.multiprocessors)
    fail("up to " + std::to_string(gpu.multiprocessors) + " blocks a row here, got " + std::to_string(plan.split));
  if (plan.tier == Tier::flat && !lies_flat(layout, problem.is_reduction()))
    fail("the flat tier takes rows that lie one after another");
  if (plan.shelf && plan.tier != Tier::flat && plan.vector * size_of(problem.type(kX)) < 4)
    fail("vectors in shared memory have 4 bytes at least");
  const int kept = plan.values + (plan.tier == Tier::flat ? 0 : plan.shelf * plan.vector);
  const int64_t room = int64_t(plan.lanes) * kept * (plan.tier == Tier::cluster ? plan.split : 1);
  const int64_t window = phased && plan.edges != kApart ? layout.n + plan.vector - 1 : layout.n;
  if (resident && room < window) {
    fail("a plan for rows of up to " + std::to_string(room) + " elements, got " + std::to_string(window) +
         (phased ? " (a row may begin within a vector)" : ""));
  }
}

void check_plan(const CudaPlan& plan, const BackwardProblem& problem, const Gpu& gpu) {
  refuse_columns(plan);
  const BackwardPhase phase(problem, problem.grad_is_broadcast());
  const int64_t n = problem.layout.n;
  const bool begins_within = phase.begins_within(plan.vector);
  if (plan.tier == Tier::flat || (plan.shelf && plan.tier != Tier::grid))
    fail("gradients have the tiers warp, block, cluster, grid and stream, and a shelf in the tier grid alone");
  if (plan.tier == Tier::grid) {
    const int chunk = GridCut(plan, n).chunk;
    if (plan.slots() % chunk || plan.slots() > 4 * chunk || plan.shelf % chunk)
      fail("gradients in the tier grid keep up to " + std::to_string(4 * chunk) + " vectors a thread");
    if (plan.split > gpu.multiprocessors)
      fail("up to " + std::to_string(gpu.multiprocessors) + " blocks a row here, got " + std::to_string(plan.split));
  }
  if (problem.function == Function::logsumexp && plan.tier != Tier::warp && plan.tier != Tier::stream)
    fail("the gradient of logsumexp has the tiers warp and stream, which takes pieces of rows");
  if (plan.tier == Tier::stream && plan.lanes > 512) fail("the tier stream has up to 512 threads here");
  if (plan.vector > phase.widest && plan.edges != kApart) {
    fail("a vector of " + std::to_string(plan.vector) + " elements: the addresses or strides of this call allow " +
         std::to_string(phase.widest));
  }
  if (plan.edges == kWhole && (n % plan.vector || begins_within))
    fail("rows of whole vectors of " + std::to_string(plan.vector) + " elements, these are not");
  const bool resident = plan.tier != Tier::stream && plan.tier != Tier::grid;
  const int split = plan.tier == Tier::cluster ? plan.split : 1;
  if (split > most_cluster(gpu))
    fail("clusters of up to " + std::to_string(most_cluster(gpu)) + " blocks, got " + std::to_string(split));
  if (resident && plan.threads() > most_threads(gpu.compute, split))
    fail("up to " + std::to_string(most_threads(gpu.compute, split)) + " threads a block here");
  const int64_t room = int64_t(plan.lanes) * plan.values * split;
  const int64_t window = begins_within && plan.edges != kApart ? n + plan.vector - 1 : n;
  if (resident && room < window)
    fail("a plan for rows of up to " + std::to_string(room) + " elements, got " + std::to_string(window));
}

}  // namespace onepass::cuda
