// columns.cu: the kernel of columns, forward and backward. A tile of columns stays on chip, in a block or in the blocks
// of a cluster or of the grid, so that each element is read once and written once. If it does not fit, elements are
// read twice.
//
//   load -> each thread reduces its columns -> block -> cluster or grid -> epilogue -> store
//
// An operation (column_softmax.cuh, column_grad.cuh) says what a thread reduces its elements to, and what the results
// are. A way to load (column_load.cuh) says where the elements are kept meanwhile.
#include "column_grad.cuh"
#include "column_softmax.cuh"
#include "config.cuh"

typedef Conditional<Config::kIsBackward, ColumnGrad<BackwardConfig>, ColumnSoftmax<ForwardConfigOf<false>>>::type Op;

constexpr int kMinBlocks = Op::C::kInSmem ? smem_blocks<Op::C>
                           : (Op::C::kGrid || is_pipelined<Op::C>) && !Op::C::kTwoPass
                               ? pipelined_blocks<Op::C>
                               : min_blocks<Op::C>(Op::kRegisters);

template <class Op>
__device__ inline void compute(const typename Op::Tensors& tensors, const Tiles& tiles) {
  typedef typename Op::C C;
  typedef ColumnLoad<C> Load;
  __shared__ ColumnReduce<C, typename Op::Partials, typename Op::Epilogue, C::kThreadMaxima> column_reduce;
  GridBarrier messages_clear;
  if constexpr (C::kReduces) column_reduce.init(tiles, &messages_clear);
  const TileSequence<C> sequence(tiles, tensors.operands());
  uint32_t iteration = 0;
  typename Load::Stream stream(sequence);
  for (int64_t index = sequence.first; index < sequence.count; index += sequence.stride) {
    const auto group = sequence.group(index);
#pragma unroll 1
    for (int turn = 0; turn < group.turns(); ++turn) {
      const auto& tile = group.tile(turn);
      Op op(tensors, tile);
      Load load(stream, sequence, tile, index);
      if constexpr (C::kReduces) {
        const bool is_shared = C::kClusterSize > 1 || C::kGrid || C::kSlab || tiles.partials > 1;
        op.reduce(load, column_reduce, is_shared, [&] {
          if (iteration == 0) column_reduce.wait_for_clear(&messages_clear);
        });
        if (is_shared) {
          column_reduce.template reduce<C::kProvisionalMax>(
              op.maxima(), op.sums, op.epilogues, tile, iteration++,
              [&](int column, auto partial, auto block_max) { return op.make_epilogue(column, partial, block_max); });
        } else if (!Op::kWritesOfColumn || threadIdx.x < tiles.threads_x) {  // the thread has whole columns
          unroll<C::kVecSize>([&](int v) {
            op.epilogues[v] =
                op.make_epilogue(tile.col + v, Op::Partials::make(op.maxima()[v], op.sums[v]), op.maxima()[v]);
          });
        }
        op.finish();
      }
      if constexpr (!C::kReadsOnce) {
        const auto result = [&](const auto& vectors, int i, int v, auto... q) {
          return op.result(vectors, i, v, q...);
        };
        if constexpr (Op::kMayHaveOutsiders) {
          if (op.has_outsiders())
            load.store(tensors.result(), [&](const auto& vectors, int i, int v, auto... q) {
              return op.template result<true>(vectors, i, v, q...);
            });
          else
            load.store(tensors.result(), result);
        } else {
          load.store(tensors.result(), result);
        }
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(Op::C::kBlockThreads, kMinBlocks)
    onepass_kernel(const __grid_constant__ Op::Tensors tensors, const __grid_constant__ Tiles tiles) {
  compute<Op>(tensors, tiles);
}
