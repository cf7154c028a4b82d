// gpu.h: what plans depend on of a GPU. Pure: no torch, no CUDA.
#pragma once

#include <cstdint>

namespace onepass {

constexpr int kTuned = 132;  // multiprocessors of an H200, which the built-in tables are of

struct Gpu {
  int arch;  // 90 for sm_90
  int sm_count;
  int shared;             // bytes of shared memory that a block may have
  int cooperative;        // whether it takes cooperative launches
  const char* name = "";  // by which its tables are found
};

// A GPU of which no more is known: with as much shared memory as its architecture has at most.
constexpr Gpu typical(int arch, int sm_count = kTuned, const char* name = "") {
  const int kilobytes = arch == 80 ? 163 : arch == 90 || arch / 10 == 10 ? 227 : 99;
  return {arch, sm_count, kilobytes * 1024, 1, name};
}

// The most threads of a block that shares a row, as rows_onchip.cu has it, and the most blocks of a cluster.
constexpr int most_threads(int arch, int cluster) { return cluster > 1 ? 512 : arch == 90 ? 1024 : 896; }
// Sixteen, more than every GPU takes, are offered on the chip with all its 132 multiprocessors alone: on a part of it
// no sixteen may lie together.
constexpr int most_cluster(const Gpu& gpu) {
  return gpu.arch < 90 ? 1 : gpu.arch == 90 && gpu.sm_count >= kTuned ? 16 : 8;
}

}  // namespace onepass
