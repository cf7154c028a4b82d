// config.cuh: the compile-time parameters of a kernel. The engine gives them to NVRTC as -D macros (`defines_of` in
// host/launch.cpp). No other file reads those macros: headers take a struct like this one as their parameter C.
#pragma once

#include "vector_access.cuh"

struct Config {
  typedef IN_TYPE In;    // forward: of x. Backward: of the gradient and of the forward's result
  typedef OUT_TYPE Out;  // forward: of y. Backward: of the input's gradient, and of the input
  static constexpr Function kFunction = FUNCTION;
  static constexpr bool kIsReduction = is_reduction(kFunction);
  static constexpr bool kLog = kFunction == Function::log_softmax;

  static constexpr int kVecs = VECS_PER_THREAD;  // vectors of a thread, in registers
  static constexpr int kVecSize = VEC_SIZE;      // elements of a vector
  // The access that a plan has for vectors, and the questions that the kernels ask of it.
  static constexpr VecAccess kAccess = VecAccess(VEC_ACCESS);
  static constexpr bool kScalar = kAccess == VecAccess::scalar, kStrided = kAccess == VecAccess::strided;
  static constexpr bool kSlab = kAccess == VecAccess::slab || kAccess == VecAccess::slab_aligned;
  static constexpr bool kAligned = kAccess == VecAccess::aligned || kAccess == VecAccess::slab_aligned;

  static constexpr int kThreadsPerRow = THREADS_PER_ROW;  // up to 32; 0 where whole blocks share a row
  static constexpr int kRowsPerBlock = ROWS_PER_BLOCK;
  static constexpr int kClusterSize = CLUSTER_SIZE;         // blocks that share a row, or columns
  static constexpr bool kUsesSmemVecs = USES_SMEM_VECS;     // threads keep vectors in shared memory too
  static constexpr bool kBroadcastGrad = BROADCAST_GRAD;    // backward: the gradient has one value per row
  static constexpr int kBlockThreads = BLOCK_THREADS;       // columns: of a block, at most
  static constexpr bool kPrefetchesTile = PREFETCHES_TILE;  // columns: the next tile is copied to shared memory
  static constexpr bool kGrid = USES_GRID;                  // columns: blocks share columns through global memory
  static constexpr bool kTwoPass = TWO_PASS;                // columns: nothing is kept, elements are read twice
};

struct ForwardConfig : Config {
  typedef AccType<Out> Acc;
  typedef SumType<Out> Sum;
};

struct BackwardConfig : Config {
  typedef AccType<In> Acc;
  // Beside the rounding of a half result that of a plain float sum is nothing.
  static constexpr bool kIsExact = sizeof(Out) > 2 || sizeof(In) == 8;
  typedef Conditional<kIsExact, Compensated<Acc>, Acc>::type Sum;
};
