// config.cuh: the compile-time parameters of a kernel. The engine passes them to NVRTC as -D macros (`defines_of` in
// host/launch.cpp). This file turns them into structs: ForwardConfig, BackwardConfig, LossConfig and SegmentConfig.
//
// No other file reads the macros: the other headers take such a struct as their template parameter C. It names the
// element types, the policies of the function (Score, Epilogue, Grad), the vector size and access, and how threads
// share rows.
#pragma once

#include "epilogue.cuh"
#include "functions.h"
#include "loss_map.cuh"
#include "score.cuh"
#include "scored_row.cuh"
#include "segment_map.cuh"
#include "vector_access.cuh"

#ifndef SCORE_PARTS  // only defined for kernels with scores
#define SCORE_PARTS 0
#endif
#ifndef BIAS_TYPE  // of kernels with scores or segments
#define BIAS_TYPE float
#endif
#ifndef LOSS_PARTS  // only defined for kernels of losses
#define LOSS_PARTS 0
#endif
#ifndef SEGMENT_PARTS  // only defined for kernels of segments
#define SEGMENT_PARTS 0
#endif
#ifndef OVER_RANKS
#define OVER_RANKS 0
#endif

#define ENUMERATOR(name, is_reduction, leading_planes) name,
enum class Function { ONEPASS_FUNCTIONS(ENUMERATOR) };
#undef ENUMERATOR

// The policies of each function. Kernels use only these, and never ask which function they compute.
template <class TheScore, template <class> class TheEpilogue, class TheGrad>
struct PolicySet {
  typedef TheScore Score;
  template <class Out>
  using Epilogue = TheEpilogue<Out>;
  typedef TheGrad Grad;
};
template <Function>
struct Policies;
template <>
struct Policies<Function::softmax> : PolicySet<Identity, SoftmaxEpilogue, SoftmaxGrad> {};
template <>
struct Policies<Function::log_softmax> : PolicySet<Identity, LogSoftmaxEpilogue, LogSoftmaxGrad> {};
template <>
struct Policies<Function::softmin> : PolicySet<Negate, SoftmaxEpilogue, SoftmaxGrad> {};
template <>
struct Policies<Function::logsumexp> : PolicySet<Identity, LogSumExpEpilogue, LogSumExpGrad> {};
template <>
struct Policies<Function::state> : PolicySet<Identity, StateEpilogue, SoftmaxGrad> {};  // has no gradient

struct Config {
  static constexpr bool kIsBackward = IS_BACKWARD;
  typedef IN_TYPE In;    // forward: of x. Backward: of the gradient and of the forward's result
  typedef OUT_TYPE Out;  // forward: of y. Backward: of the input and of its gradient
  typedef Policies<FUNCTION> Policy;
  typedef Policy::Score Score;
  typedef BIAS_TYPE Bias;  // of a score's bias
  static constexpr bool has(ScorePart part) { return SCORE_PARTS & part; }
  static constexpr bool has(LossPart part) { return LOSS_PARTS & part; }
  static constexpr bool has(SegmentPart part) { return SEGMENT_PARTS & part; }
  static constexpr bool kIsScored = SCORE_PARTS != 0;
  static constexpr bool kOverRanks = OVER_RANKS;  // messages also go to other GPUs
  static constexpr bool kSkipsHidden = false;     // columns: whether vectors outside the window are skipped
  static constexpr bool kIsPointwise = kIsBackward && is_same<Policy::Grad, LogSumExpGrad>;  // no reduction

  static constexpr int kVecs = VECS_PER_THREAD;  // vectors that a thread has in registers
  static constexpr int kVecSize = VEC_SIZE;      // elements of a vector
  // The vector access that the plan chose, as the questions that kernels ask about it.
  static constexpr VecAccess kAccess = VecAccess(VEC_ACCESS);
  static constexpr bool kScalar = kAccess == VecAccess::scalar, kStrided = kAccess == VecAccess::strided;
  static constexpr bool kSlab = kAccess == VecAccess::slab || kAccess == VecAccess::slab_aligned;
  static constexpr bool kShifted = kAccess == VecAccess::shifted;
  static constexpr bool kAligned = kAccess == VecAccess::aligned || kAccess == VecAccess::slab_aligned;

  static constexpr int kThreadsPerRow = THREADS_PER_ROW;  // up to 32; 0 if whole blocks share a row
  static constexpr int kRowsPerBlock = ROWS_PER_BLOCK;
  static constexpr int kClusterSize = CLUSTER_SIZE;         // blocks that share a row, or columns
  static constexpr bool kUsesSmemVecs = USES_SMEM_VECS;     // threads also keep vectors in shared memory
  static constexpr bool kBroadcastGrad = BROADCAST_GRAD;    // backward: the gradient has one value per row
  static constexpr int kBlockThreads = BLOCK_THREADS;       // columns, scored rows: the most threads of a block
  static constexpr bool kPrefetchesTile = PREFETCHES_TILE;  // columns: the next tile is copied to shared memory
  static constexpr bool kGrid = USES_GRID;                  // columns: blocks share columns through global memory
  static constexpr bool kStaged = STAGES_GROUPS;            // columns: groups of slices go through shared memory
  static constexpr bool kInSmem = KEEPS_TILE_IN_SMEM;       // columns: tiles stay in shared memory
  static constexpr bool kTwoPass = TWO_PASS;                // columns: elements are not kept but read twice
};

template <bool kOfRows>
struct ForwardConfigOf : Config {
  typedef Config::Out Result;  // the type that is written
  static constexpr bool kOnePerRow = Policy::Epilogue<Result>::kOnePerRow;
  // A reduction of rows of a half type computes with that type as Out, so that two elements share a register.
  typedef typename Conditional<kOfRows && kOnePerRow && sizeof(In) == 2 && !kIsScored, In, Result>::type Out;
  typedef AccType<Out> Acc;
  typedef SumType<Out> Sum;
  typedef Policy::Epilogue<Out> Epilogue;
  typedef
      typename Conditional<kIsScored, PositionalOperand<ForwardConfigOf>, ScoredOperand<ForwardConfigOf>>::type Operand;
  typedef typename Conditional<kIsScored, ScoredForwardRows<ForwardConfigOf>, ForwardRows<ForwardConfigOf>>::type Rows;
};
typedef ForwardConfigOf<true> ForwardConfig;

struct BackwardConfig : Config {
  typedef Config::Out Result;
  typedef AccType<In> Acc;
  typedef Policy::Grad Grad;
  typedef PlainOperand<BackwardConfig> Operand;
  typedef Conditional<kIsScored, PositionalGrad<BackwardConfig>, Policy::Score>::type Score;
  typedef Conditional<kIsScored, ScoredBackwardRows<BackwardConfig>, BackwardRows<BackwardConfig>>::type Rows;
  // A half result is rounded far more coarsely than a plain sum of floats.
  static constexpr bool kIsExact = sizeof(Out) > 2 || sizeof(In) == 8;
  typedef Conditional<kIsExact, Compensated<Acc>, Acc>::type Sum;
};

// For kernels of losses. They read and write elements of one type.
struct LossConfig : Config {
  typedef AccType<In> Acc;
  typedef Acc A;
  // The type in which a vector is loaded. Half types have two elements in a register, so that a vector takes as many
  // registers as the load instruction writes.
  static constexpr bool kHalf2 = sizeof(In) == 2 && kVecSize > 1;
  typedef Conditional<kHalf2, Vector<uint32_t, (kVecSize + 1) / 2>, Vector<In, kVecSize>>::type Raw;
  // Whether an element of -inf has the score -inf. Kernels put such an element where a row has none.
  static constexpr bool kHasNeutral = !has(kLossSoftcap) && !has(kLossScale);
  // How many numbers a state has.
  static constexpr int kStateNumbers = 2 + has(kLossEntropy) + has(kLossSpread);
};

// For kernels of segments.
struct SegmentConfig : Config {
  typedef AccType<Conditional<kIsBackward, In, Out>::type> A;
  typedef Policy::Epilogue<Out> Epilogue;
  static constexpr bool kReduces = !kIsBackward && Epilogue::kOnePerRow;
  static constexpr bool kPointwise = kIsPointwise;             // the gradient of logsumexp
  static constexpr bool kSums = kIsBackward && !kIsPointwise;  // all other gradients
  static constexpr bool kOrder = has(kSegmentOrder), kSingle = has(kSegmentSingle);
  static constexpr bool kHasSecond = kSums || has(kSegmentBias);
  typedef Conditional<kSums, In, Bias>::type Second;
  static constexpr bool kHasResult = !kReduces;  // one for each item
  static constexpr int kItemTensors = 1 + kHasSecond + kHasResult;
  static constexpr int kRowTensors = kPointwise ? 2 : kReduces;
  // The tensor number of a line, where only the tensors that the kernel has get a line.
  static __device__ constexpr int tensor_of(int line) {
    if (line >= kItemTensors) return kRowFirst + line - kItemTensors;
    return line == 0 && !kHasResult ? kItemFirst : line == kItemTensors - 1 && kHasResult ? kItemResult : line;
  }
  // The epilogue of elements. In a reduction it is only a placeholder that nothing uses.
  typedef Conditional<Epilogue::kOnePerRow, SoftmaxEpilogue<Out>, Epilogue>::type ElementEpilogue;
  static __device__ float of_type(float, double, float narrow) { return narrow; }
  static __device__ double of_type(double, double wide, float) { return wide; }
};

// The parameters and the operation of a kernel that has both directions.
typedef Conditional<Config::kIsBackward, BackwardConfig, ForwardConfig>::type KernelConfig;
template <template <class> class Forward, template <class> class Backward>
using KernelOp = typename Conditional<Config::kIsBackward, Backward<BackwardConfig>, Forward<ForwardConfig>>::type;
