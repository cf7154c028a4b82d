// launch_overlap.cuh: kernels of one call, of which the second reads what the first wrote. Its blocks start as soon as
// there is room for them, and wait for the first one's end, so that no time passes between the two (CUDA's programmatic
// dependent launch, from compute capability 9.0 on; before that a kernel starts when the one before it has ended).
#pragma once

// In the first kernel: the next one's blocks may start once all blocks of this one have come here.
__device__ inline void let_next_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// In the second kernel, by all threads, before memory is read or written: what the first one wrote is there.
__device__ inline void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
