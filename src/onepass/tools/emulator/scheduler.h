// scheduler.h: runs a translated kernel: the blocks of a cluster together, or all of a cooperative launch.
#pragma once

#include <csetjmp>
#include <memory>
#include <sys/mman.h>
#include <unistd.h>
#include <ucontext.h>

#include "barriers.h"

namespace emulator {

using Kernel = void (*)(Thread*);

// kForwards, kBackwards: a warp goes on as far as it gets before the next. kInStep: all by turns, which hides races.
enum Order { kForwards, kBackwards, kDrawn, kInStep };

// A thread's own stack, and where it has stopped.
struct Context {
  static constexpr size_t kStack = 256 * 1024;
  Thread* thread = nullptr;
  char* stack;
  jmp_buf at;
  bool begun = false, over = false;

  Context() {
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* const made = mmap(nullptr, kStack, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (made == MAP_FAILED) fail("no memory for stacks");
    stack = static_cast<char*>(made);
  }
};

inline struct {
  jmp_buf home;
  Context* running;
  Kernel kernel;
  std::string error;
  std::vector<std::unique_ptr<Context>> contexts;  // of all threads that ever ran together
} scheduler;

inline std::string name_of(const Thread& t) {
  return "thread " + std::to_string(t.index) + " of block " + std::to_string(t.block->x) + ", " +
         std::to_string(t.block->y);
}

inline void leave(Thread*) {
  if (_setjmp(scheduler.running->at) == 0) _longjmp(scheduler.home, 1);
}

inline void begin() {
  Context& mine = *scheduler.running;
  try {
    scheduler.kernel(mine.thread);
  } catch (const std::exception& error) {
    scheduler.error = error.what() + (": " + name_of(*mine.thread));
  }
  mine.over = true;
  _longjmp(scheduler.home, 1);
}

// Until it waits or is over.
inline void go_on(Context* context) {
  scheduler.running = context;
  if (_setjmp(scheduler.home)) return;
  if (context->begun) _longjmp(context->at, 1);
  context->begun = true;
  ucontext_t fresh;
  getcontext(&fresh);
  fresh.uc_stack.ss_sp = context->stack, fresh.uc_stack.ss_size = Context::kStack, fresh.uc_link = nullptr;
  makecontext(&fresh, begin, 0);
  setcontext(&fresh);
}

// All messages, or about half of them, in any order.
inline void deliver(Grid* grid, bool all) {
  std::vector<std::function<void()>> now, later;
  for (auto& message : grid->messages) (all || grid->draw() & 1 ? now : later).push_back(std::move(message));
  grid->messages = std::move(later);
  std::shuffle(now.begin(), now.end(), grid->draw);
  for (const auto& message : now) message();
}

// Of each block.
inline std::vector<std::vector<Context*>> contexts_of(const Grid& grid) {
  std::vector<std::vector<Context*>> made;
  size_t count = 0;
  for (Block* block : grid.together) {
    made.emplace_back();
    for (Thread& thread : block->threads) {
      if (count == scheduler.contexts.size()) scheduler.contexts.push_back(std::make_unique<Context>());
      Context* const context = scheduler.contexts[count++].get();
      context->thread = &thread, context->begun = context->over = false;
      made.back().push_back(context);
    }
  }
  return made;
}

// Threads of a warp as far as they get while all others stand still: one may be that far before another begins.
inline void go_on_alone(Grid* grid, const std::vector<Context*>& warp) {
  for (uint64_t before = grid->progress + 1; grid->progress != before;) {
    before = grid->progress;
    for (Context* context : warp) {
      if (context->over) continue;
      go_on(context);
      if (!scheduler.error.empty()) fail(scheduler.error);
      if (context->over) ++grid->progress;
    }
  }
}

// One turn of the threads of a block, or as many as bring it any further: it may be that far before others.
inline void go_on_by_turns(Grid* grid, Order order, std::vector<Context*>* block) {
  for (uint64_t before = grid->progress + 1; grid->progress != before && !block->empty();) {
    before = grid->progress;
    if (order == kDrawn) std::shuffle(block->begin(), block->end(), grid->draw);
    if (order == kForwards || order == kBackwards || (order == kDrawn && grid->draw() & 1)) {
      std::map<uint32_t, std::vector<Context*>> warps;
      for (Context* context : *block) warps[context->thread->index / 32].push_back(context);
      if (order == kBackwards)
        std::for_each(warps.rbegin(), warps.rend(), [&](const auto& warp) { go_on_alone(grid, warp.second); });
      else
        for (const auto& [first, warp] : warps) go_on_alone(grid, warp);
    } else {
      for (Context* context : *block) {
        go_on(context);
        if (!scheduler.error.empty()) fail(scheduler.error);
      }
    }
    const auto left = std::remove_if(block->begin(), block->end(), [](const Context* c) { return c->over; });
    if (left != block->end()) ++grid->progress;
    block->erase(left, block->end());
    if (order == kDrawn && grid->draw() & 1) return;
  }
}

inline void run_together(Grid* grid, Kernel kernel, Order order) {
  constexpr int kIdle = 100;  // rounds in which nothing happens, though some threads only look
  scheduler.kernel = kernel;
  scheduler.error.clear();
  std::vector<std::vector<Context*>> active = contexts_of(*grid);
  if (order == kBackwards) {
    std::reverse(active.begin(), active.end());
    for (auto& block : active) std::reverse(block.begin(), block.end());
  }
  for (int idle = 0; !active.empty();) {
    const uint64_t before = grid->progress;
    if (order == kDrawn) std::shuffle(active.begin(), active.end(), grid->draw);
    if (grid->lateness == 2) deliver(grid, false);
    for (auto& block : active) go_on_by_turns(grid, order, &block);
    const auto left = std::remove_if(active.begin(), active.end(), [](const auto& block) { return block.empty(); });
    active.erase(left, active.end());
    if (grid->progress != before)
      idle = 0;
    else if (!grid->messages.empty())
      deliver(grid, true);
    else if (grid->others)
      usleep(20);
    else if (++idle > kIdle)
      fail("waits for ever: " + name_of(*active[0][0]->thread));
  }
  if (!grid->messages.empty()) fail("a message to a block that is over");
}

// What others have left in shared memory: NaNs of every type, any bits, or the largest numbers of either sign.
inline void fill_shared(std::vector<char>& memory, std::mt19937& draw) {
  const uint32_t kind = draw() % 3;
  uint32_t words[61];
  for (uint32_t& word : words)
    word = kind == 0 ? ~0u : kind == 1 ? uint32_t(draw()) : draw() & 1 ? 0xff7fff7fu : 0x7f7f7f7fu;
  for (size_t at = 0; at < memory.size(); at += sizeof words)
    std::memcpy(&memory[at], words, std::min(sizeof words, memory.size() - at));
}

inline std::unique_ptr<Block> made_block(Grid* grid, uint32_t number, uint32_t rank, size_t shared) {
  const Launch& launch = grid->launch;
  auto block = std::make_unique<Block>();
  block->grid = grid, block->rank = rank;
  block->x = number % launch.grid_x, block->y = number / launch.grid_x;
  block->size = shared;
  block->memory.resize(shared + 16);
  fill_shared(block->memory, grid->draw);
  block->shared = block->memory.data() + (16 - uint64_t(block->memory.data()) % 16) % 16;
  block->threads.resize(launch.block);
  for (uint32_t t = 0; t < launch.block; ++t) {
    block->threads[t].block = block.get(), block->threads[t].index = t, block->threads[t].lane = t % 32;
  }
  return block;
}

inline void run(Grid* grid, Kernel kernel, uint32_t static_shared, Order order) {
  const Launch& launch = grid->launch;
  const uint32_t all = launch.grid_x * launch.grid_y;
  const uint32_t at_a_time = launch.cooperative ? all : launch.cluster ? launch.cluster : 1;
  for (uint32_t first = 0; first < all; first += at_a_time) {
    std::vector<std::unique_ptr<Block>> blocks;
    grid->together.clear();
    grid->cluster_arrived = 0, grid->cluster_turn = 0;
    for (uint32_t i = 0; i < at_a_time; ++i) {
      blocks.push_back(made_block(grid, first + i, launch.cluster ? i : 0, static_shared + launch.shared));
      grid->together.push_back(blocks.back().get());
    }
    run_together(grid, kernel, order);
  }
}

}  // namespace emulator
