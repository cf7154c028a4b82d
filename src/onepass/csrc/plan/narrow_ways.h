// narrow_ways.h: how tiles of lines that are no whole vectors of 16 bytes are cut, as sweeps of random shapes have it.
// Pure: no torch, no CUDA.
#pragma once

namespace onepass {

// Lines of so many bytes, of so many threads, each of which has so many vectors in registers and in shared memory at
// most, in up to so many blocks. Blocks of 512 threads have fewer vectors in registers, so that two fit a
// multiprocessor.
struct NarrowWay {
  int line_bytes, threads, vecs, smem_vecs, blocks;
};
constexpr int kMostWays = 5;
struct NarrowWays {
  NarrowWay all[kMostWays];  // the first that holds a column is taken; those that are left out are zero
};

// The fastest of 100 random shapes (H100, 2026-11-25). Words are vectors of 4 bytes or less, pairs those of 8.
inline constexpr NarrowWays kWords = {{{256, 256, 28, 0, 2},
                                       {256, 256, 22, 24, 8},
                                       {128, 256, 28, 0, 16},
                                       {128, 256, 8, 48, 16},
                                       {128, 512, 22, 24, 16}}};
inline constexpr NarrowWays kPairs = {{{256, 256, 16, 0, 8},
                                       {256, 256, 16, 24, 8},
                                       {128, 256, 20, 0, 16},
                                       {128, 256, 12, 24, 16},
                                       {128, 512, 16, 24, 16}}};
inline constexpr NarrowWays kFloatPairs = {{{256, 256, 20, 0, 8},
                                            {256, 256, 12, 24, 8},
                                            {128, 256, 20, 0, 16},
                                            {128, 256, 12, 24, 16},
                                            {128, 512, 12, 24, 16}}};
inline constexpr NarrowWays kRegisters = {{{256, 256, 28, 0, 16}, {128, 256, 28, 0, 16}, {128, 512, 28, 0, 16}}};
inline constexpr NarrowWays kShiftedWords = {{{256, 512, 24, 0, 1},
                                              {256, 256, 12, 24, 4},
                                              {256, 512, 12, 24, 8},
                                              {256, 512, 22, 24, 16},
                                              {128, 512, 22, 24, 16}}};
inline constexpr NarrowWays kShiftedPairs = {{{512, 512, 8, 12, 4},
                                              {256, 256, 12, 8, 8},
                                              {256, 512, 8, 24, 16},
                                              {256, 512, 16, 24, 16},
                                              {128, 512, 16, 24, 16}}};
inline constexpr NarrowWays kShiftedVecs = {{{512, 256, 8, 8, 8}, {512, 256, 12, 24, 16}, {256, 512, 12, 24, 16}}};
inline constexpr NarrowWays kGradWords = {
    {{256, 256, 14, 0, 2}, {256, 256, 12, 12, 8}, {128, 256, 12, 12, 16}, {128, 512, 14, 12, 16}}};
inline constexpr NarrowWays kGradPairs = {{{256, 512, 10, 0, 1}, {256, 256, 8, 12, 8}, {128, 512, 8, 12, 16}}};
inline constexpr NarrowWays kGradRegisters = {
    {{128, 256, 14, 0, 1}, {128, 512, 14, 0, 1}, {128, 256, 14, 0, 16}, {128, 512, 14, 0, 16}}};
inline constexpr NarrowWays kGradShiftedPairs = {{{512, 512, 6, 12, 4}, {256, 512, 6, 12, 16}, {128, 512, 6, 12, 16}}};
inline constexpr NarrowWays kGradShiftedVecs = {{{256, 512, 6, 12, 16}, {128, 512, 6, 12, 16}}};

// The ways of vectors of `vec_bytes`, of elements of `bytes`. `in_smem`: shared memory takes them.
constexpr const NarrowWays& narrow_ways(int vec_bytes, int bytes, bool in_smem, bool shifted, bool gradient) {
  if (!in_smem) return gradient ? kGradRegisters : kRegisters;
  if (vec_bytes <= 4) return gradient ? kGradWords : shifted ? kShiftedWords : kWords;
  if (vec_bytes > 8) return gradient ? kGradShiftedVecs : kShiftedVecs;
  if (gradient) return shifted ? kGradShiftedPairs : kGradPairs;
  return shifted ? kShiftedPairs : bytes > 2 ? kFloatPairs : kPairs;
}

}  // namespace onepass
