// loss_total.cu: the sum of the losses of all rows, or their mean weighted by their classes, from the sums that the
// blocks have stored. One block adds them, with compensation, in an order that depends only on the number of blocks.
#include "config.cuh"
#include "loss.cuh"

typedef LossConfig C;
typedef C::A A;
typedef Compensated<A> Sum2;

extern "C" __global__ void __launch_bounds__(C::kBlockThreads) onepass_kernel(const LossTotal total) {
  wait_for_kernel_before();
  __shared__ ReduceStorage<1, Sum2> of_losses, of_weights;
  const A* const sums = (const A*)total.partials;
  Sum2 loss = {0, 0}, weight = {0, 0};
#pragma unroll 4
  for (int64_t i = threadIdx.x; i < total.count; i += blockDim.x) {
    loss = add(loss, Sum2{sums[i], sums[total.count + i]});
    weight = add(weight, Sum2{sums[2 * total.count + i], sums[3 * total.count + i]});
  }
  loss = block_reduce(loss, Sum(), of_losses), weight = block_reduce(weight, Sum(), of_weights);
  if (threadIdx.x) return;
  const A of_all = value_of(weight), result = total.is_mean ? value_of(loss) / of_all : value_of(loss);
  *(A*)total.total = of_all;
  if (total.is_wide)
    *(A*)total.result = result;
  else
    *(C::In*)total.result = from_acc<C::In>(result);
}
