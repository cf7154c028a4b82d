// column_features.h: what ColumnSpeed (column_speed.h) tells its network of a plan of columns.
#pragma once

namespace onepass {

// Logarithms have base 2.
enum SpeedFeature {
  // The problem: half types, two tensors that are kept on the chip, whether columns are reduced while vectors arrive,
  // the elements of a column, the columns of a slice, whether lines are whole lines of the cache.
  kIsHalf,
  kIsTwo,
  kIsEarly,
  kLogN,
  kLogInner,
  kWholeLines,
  // The kind of plan: one of these is 1.
  kAlignedTile,
  kShiftedTile,
  kSlab,
  kAlignedSlab,
  kOverGrid,
  kAlignedTwice,
  kShiftedTwice,
  kGroups,
  kSmemSlab,
  kSmemLines,
  // Its numbers: bytes of a vector, threads of a block and down a column, blocks of a tile, vectors of a thread in
  // shared memory and in registers, registers of those, vectors of a column that a thread has.
  kLogVecBytes,
  kLogThreads,
  kLogDown,
  kLogBlocks,
  kLogSmemVecs,
  kLogVecs,
  kRegisterWords,
  kLogEach,
  kIsKept,       // whether all vectors stay on the chip
  kIsPipelined,  // whether all come through shared memory (is_pipelined, cuda/kernels/column_load.cuh)
  // What follows: blocks of a multiprocessor, its threads, the KB that those load at a time, the part of vectors that
  // exists, the waves of blocks, the part of the last wave that exists, bytes of a line, KB of a tile, MB of all tiles
  // at a time, tiles side by side.
  kLogResident,
  kLogBusyThreads,
  kLogOnWay,
  kLogUsed,
  kLogWaves,
  kLogFull,
  kLogLine,
  kLogTile,
  kLogAtATime,
  kLogTiles,
  kSpeedFeatures
};

}  // namespace onepass
