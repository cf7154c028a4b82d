// rank_map.cuh: what a kernel knows of the GPUs that share its rows, and the memory through which they exchange states.
// Every rank has such memory, which all of them read and write (symmetric memory). It is cleared once, before the first
// launch, and belongs to one process group on one stream at a time.
#pragma once

constexpr int kMostRanks = 32;    // a lane of a warp for each
constexpr int kRankBlocks = 256;  // blocks of a launch, at most
constexpr int kRankMessages = 8;  // of a block, as in pipelined_rows.cuh
constexpr int kRankParities = 2;  // launches take turns at two parts of the memory

// Why results are NaN.
enum RankFault { kNoFault, kNoAnswer, kCallsDiffer };

// At the beginning of the memory: this GPU's own numbers, which go on from launch to launch, so that a graph that is
// replayed takes the next ones. Two words of 64 bits would tear a greeting or a message: both have 128.
struct RankHeader {
  unsigned epoch;    // the last one of the launches so far
  unsigned parity;   // of the next launch
  unsigned readers;  // blocks of this launch that have read the two
  unsigned fault;    // RankFault of an earlier launch, after which nothing is exchanged any more
};
constexpr int kRankGreetings = 128;  // bytes before the greetings, of 16 bytes each
constexpr int kRankStates = kRankGreetings + kRankParities * kMostRanks * 16;  // bytes before the messages

// `message_size`: bytes of a message (GridMessage in grid_sync.cuh).
constexpr long long rank_memory_bytes(int ranks, int message_size) {
  return kRankStates + (long long)kRankParities * kRankMessages * kRankBlocks * ranks * message_size;
}

struct RankLinks {
  char* const* memory;          // of each rank, on this GPU: where its memory is as this GPU sees it
  int* fault;                   // of the host: RankFault, and the first rank that it was seen of
  unsigned long long patience;  // nanoseconds for which a rank is waited for
  int ranks, rank;
  int blocks_per_row;  // at least
  int ahead;           // chunks that are to be on their way
  int kind;            // of the call: ranks that have different ones do not belong together
};
