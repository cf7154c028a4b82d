// rows_over_ranks.cu: rows that are split over several GPUs (ranks). Each GPU launches this kernel on its part of the
// rows. All blocks that have a part of a row, on all GPUs, exchange their states while the next row arrives
// (pipelined_rows.cuh). So each element is read once and written once, and only states go from GPU to GPU.
//
// At the start the GPUs agree on the number of blocks per row, because their parts may have different lengths (agree).
// All use the same number of blocks, and a block has the same rows, in the same turns, on every GPU.
//
// Messages are read without a lock. A message and its epoch are one word of 128 bits. No earlier message in the same
// place had this epoch. When may a block overwrite a message? It sends the state of its row of turn t after its row of
// turn t - kSets has been merged. By then it has read messages of turn t - kSets from each block that it exchanges
// with, and those blocks sent them after they had read all messages of turn t - 2 kSets. So 2 kSets places are enough.
// A launch writes to the places of the launch before the last one. When a rank gets there, it has received messages of
// the last launch from all ranks, so all of them had ended the launch before that.
#include "config.cuh"
#include "pipelined_rows.cuh"
#include "rank_map.cuh"

static_assert(kRankMessages == kMessages);

__device__ inline uint64_t nanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

// A wait that ends after `limit` nanoseconds.
struct Patience {
  const uint64_t limit;
  uint64_t begin = 0;
  uint32_t looks = 0;
  bool is_lost = false;
  __device__ bool is_over() {
    if (++looks % 256 == 0) {
      const uint64_t now = nanoseconds();
      if (begin == 0) begin = now;
      is_lost = now - begin > limit;
    }
    return is_lost;
  }
};

template <class Op>
struct RankExchange {
  typedef typename Op::Message Message;
  const RankLinks& links;
  char* const* memory;  // of each rank
  int rows_at_once, all_blocks;
  uint32_t epoch, parity;  // of this launch. The epoch of a turn is epoch + turn
  bool is_lost;

  __device__ int blocks() const { return all_blocks; }
  __device__ int ahead(int) const { return links.ahead; }
  __device__ void open(bool) const {}
  template <class At>
  __device__ void send(const Op& op, const At& at) const {
    const int rank = threadIdx.x % 32;
    if (rank < links.ranks) op.send(states(rank, at.turn, blockIdx.x)[links.rank], epoch + at.turn);
  }
  // The messages of a row's blocks on all ranks lie one after another, in the same order on every rank. So all ranks
  // merge them to the same bits.
  template <class At>
  __device__ auto receive(Op& op, const At& at) {
    Patience patience = {is_lost ? 0 : links.patience};
    patience.is_lost = is_lost;
    const Message* const first = states(links.rank, at.turn, blockIdx.x - at.part);
    auto state = op.reduce_messages(first, at.blocks_per_row * links.ranks, epoch + at.turn, patience);
    if (!is_lost && __ballot_sync(0xffffffffu, patience.is_lost)) {
      is_lost = true;
      if (patience.is_lost) {
        int missing = threadIdx.x % 32;
        while (missing + 32 < at.blocks_per_row * links.ranks && first[missing].has_arrived(epoch + at.turn))
          missing += 32;
        report(links, kNoAnswer, missing % links.ranks);
      }
      __syncwarp();
    }
    if (is_lost) Op::spoil(state);
    return state;
  }
  static __device__ void report(const RankLinks& links, RankFault fault, int rank) {
    reinterpret_cast<RankHeader*>(links.memory[links.rank])->fault = fault;
    volatile int* const host = links.fault;
    host[1] = rank, host[0] = fault;
  }

 private:
  __device__ Message* states(int rank, uint32_t turn, int block) const {
    Message* const all = reinterpret_cast<Message*>(memory[rank] + kRankStates);
    return all + ((parity * kMessages + turn % kMessages) * (int64_t)kRankBlocks + block) * links.ranks;
  }
};

// What the ranks agree on. One warp of each block finds it out.
struct Agreement {
  int rows_at_once, blocks;
  uint32_t epoch, parity;
  bool is_lost;
};
typedef Word128<true> Greeting;

__device__ inline Agreement agree(const RankLinks& links, int64_t rows) {
  const int lane = threadIdx.x % 32, ranks = links.ranks;
  RankHeader* const header = reinterpret_cast<RankHeader*>(links.memory[links.rank]);
  const uint32_t epoch = *(volatile unsigned*)&header->epoch + 1, parity = *(volatile unsigned*)&header->parity;
  const bool was_lost = *(volatile unsigned*)&header->fault != kNoFault;
  const auto greetings = [&](int rank) {
    return reinterpret_cast<Greeting*>(links.memory[rank] + kRankGreetings) + parity * kMostRanks;
  };
  const uint64_t call = (uint64_t)rows << 16 | (uint64_t)links.kind;
  const uint32_t numbers = (uint32_t)links.blocks_per_row << 16 | gridDim.x;
  if (blockIdx.x == 0 && lane < ranks) greetings(lane)[links.rank].store(call, (uint64_t)epoch << 32 | numbers);

  Patience patience = {links.patience};
  patience.is_lost = was_lost;
  uint64_t its_call = call, high = numbers;
  while (lane < ranks) {
    greetings(links.rank)[lane].load(&its_call, &high);
    if (high >> 32 == epoch || patience.is_over()) break;
  }
  __syncwarp();
  const unsigned silent = __ballot_sync(0xffffffffu, patience.is_lost && high >> 32 != epoch);
  const unsigned differ = __ballot_sync(0xffffffffu, its_call != call);
  const bool is_lost = silent || differ;
  const auto least = [](int a, int b) { return a < b ? a : b; };
  const auto most = [](int a, int b) { return a > b ? a : b; };
  const bool counts = lane < ranks && !is_lost;
  const int its_blocks = counts ? int(high & 0xffff) : gridDim.x, least_blocks = links.blocks_per_row;
  const int blocks = warp_reduce<32>(its_blocks, least);
  const int per_row = warp_reduce<32>(counts ? int(high >> 16 & 0xffff) : least_blocks, most);
  const int at_once = int(rows < blocks / per_row ? rows : blocks / per_row);
  // Blocks beyond a multiple of at_once get no rows, not even in the last turn, because they have not kept up with the
  // turns.
  const int used = blocks / at_once * at_once;
  if (lane == 0) {
    if (is_lost && !was_lost && blockIdx.x == 0) {
      const unsigned which = silent ? silent : differ;
      RankExchange<KernelOp<Forward, Backward>>::report(links, silent ? kNoAnswer : kCallsDiffer, __ffs(which) - 1);
    }
    // The last block of this launch to get here sets the values that the next launch reads.
    if (atomicAdd(&header->readers, 1u) == gridDim.x - 1) {
      header->readers = 0, header->parity = parity ^ 1;
      header->epoch = epoch + uint32_t((rows + at_once - 1) / at_once);
    }
  }
  return {at_once, used, epoch, parity, is_lost};
}

typedef KernelOp<Forward, Backward> Op;
extern "C" __global__ void __launch_bounds__(kMaxThreads, 1)
    onepass_kernel(const Op::Rows rows, int places, const __grid_constant__ RankLinks links) {
  __shared__ Agreement agreement;
  __shared__ char* memory[kMostRanks];
  if (threadIdx.x < 32) {
    if (threadIdx.x < links.ranks) memory[threadIdx.x] = links.memory[threadIdx.x];
    const Agreement found = agree(links, rows.count);
    if (threadIdx.x == 0) agreement = found;
  }
  __syncthreads();
  const Agreement& a = agreement;
  compute<Op>(rows, places, RankExchange<Op>{links, memory, a.rows_at_once, a.blocks, a.epoch, a.parity, a.is_lost});
}
