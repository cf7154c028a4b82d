// rank_map.cuh: RankLinks, which tells a kernel about the GPUs (ranks) that share its rows, and the layout of the
// memory through which they exchange states. Every rank has a part of this memory, and all ranks read and write all
// parts (symmetric memory). It is cleared once, before the first launch, and serves one process group on one stream at
// a time.
#pragma once

constexpr int kMostRanks = 32;    // one lane of a warp for each
constexpr int kRankBlocks = 256;  // the most blocks of a launch
constexpr int kRankMessages = 8;  // per block, as in pipelined_rows.cuh
constexpr int kRankParities = 2;  // launches alternate between two parts of the memory

// Why results are NaN.
enum RankFault { kNoFault, kNoAnswer, kCallsDiffer };

// The header, at the beginning of the memory, has this GPU's own counters. They go on from launch to launch, so that a
// replayed graph uses new ones. Greetings and messages have 128 bits each, because two words of 64 bits could be torn.
struct RankHeader {
  unsigned epoch;    // the last one of all launches so far
  unsigned parity;   // of the next launch
  unsigned readers;  // how many blocks of this launch have read epoch and parity
  unsigned fault;    // RankFault of an earlier launch. If it is set, nothing is exchanged any more
};
constexpr int kRankGreetings = 128;  // bytes before the greetings, of 16 bytes each
constexpr int kRankStates = kRankGreetings + kRankParities * kMostRanks * 16;  // bytes before the messages

// `message_size`: bytes of a message (GridMessage in grid_sync.cuh).
constexpr long long rank_memory_bytes(int ranks, int message_size) {
  return kRankStates + (long long)kRankParities * kRankMessages * kRankBlocks * ranks * message_size;
}

struct RankLinks {
  char* const* memory;          // the memory of each rank, as this GPU addresses it; the array is on this GPU
  int* fault;                   // on the host: a RankFault, and the first rank that it was noticed for
  unsigned long long patience;  // how many nanoseconds to wait for a rank
  int ranks, rank;
  int blocks_per_row;  // the least
  int ahead;           // chunks to prefetch
  int kind;            // of the call; ranks whose kinds differ are in different calls
};
