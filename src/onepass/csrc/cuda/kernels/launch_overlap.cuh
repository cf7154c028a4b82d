// launch_overlap.cuh: two kernels of one call, where the second reads what the first wrote. The blocks of the second
// start as soon as there is room for them, and wait for the end of the first. So no time passes between the two (CUDA's
// programmatic dependent launch, from compute capability 9.0 on; before, a kernel starts when the last one has ended).
#pragma once

// In the first kernel: the blocks of the next one may start once all blocks of this one have called this.
__device__ inline void let_next_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// In the second kernel, called by all threads before they access memory: waits until all writes of the first are
// visible.
__device__ inline void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
