// rows_pipelined.cu: the tier `pipelined`, for many long rows that several blocks of one GPU share. The launch is
// cooperative. pipelined_rows.cuh has the computation; this file has the exchange through global memory.
#include "config.cuh"
#include "pipelined_rows.cuh"

// The blocks of a row send their states to each other through global memory.
template <class Op>
struct GridExchange {
  typedef typename Op::Message Message;
  const int rows_at_once;
  Message* const messages;

  __device__ int blocks() const { return gridDim.x; }
  __device__ int ahead(int spare) const { return spare < 4 ? 2 : (spare + 1) / 2; }
  // As in rows_grid.cu: every block clears its messages before any is sent or received.
  __device__ void open(bool sends) const {
    const int lane = threadIdx.x % 32;
    if (sends) {
      GridBarrier messages_clear;
      if (lane < kMessages) messages[lane * blocks() + blockIdx.x].clear();
      __syncwarp();
      if (lane == 0) messages_clear.init(), messages_clear.arrive(blockIdx.x, blocks()), messages_clear.wait();
    }
    sync_communication();
  }
  template <class At>
  __device__ void send(const Op& op, const At& at) const {
    if (threadIdx.x % 32 == 0) op.send(*message_of(at), at.turn);
  }
  template <class At>
  __device__ auto receive(Op& op, const At& at) const {
    return op.reduce_messages(message_of(at) - at.part, at.blocks_per_row, at.turn);
  }

 private:
  template <class At>
  __device__ Message* message_of(const At& at) const {
    return messages + at.turn % kMessages * blocks() + blockIdx.x;
  }
};

typedef KernelOp<Forward, Backward> Op;
extern "C" __global__ void __launch_bounds__(kMaxThreads, 1)
    onepass_kernel(const Op::Rows rows, int places, int rows_at_once, int, Op::Message* messages) {
  compute<Op>(rows, places, GridExchange<Op>{rows_at_once, messages});
}
