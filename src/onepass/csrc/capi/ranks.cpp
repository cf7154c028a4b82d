// ranks.cpp: plain C functions by which Python launches, on one GPU, its part of rows that are split over GPUs.
#include "../cuda/host/launch.h"
#include "c_api.h"

using namespace onepass;

// Bytes of the memory through which this number of ranks exchanges states.
ONEPASS_API int64_t onepass_rank_memory(int ranks) {
  return rank_memory_bytes(ranks, int(cuda::message_size(DType::float64, DType::float64)));
}

// Launches a forward, or a gradient, of contiguous rows of n elements. `tensors` are in the order of ForwardTensor or
// BackwardTensor. `memory`: on the GPU, the address of each rank's memory. `fault`: two ints in host memory.
ONEPASS_API int onepass_over_ranks(int function, bool backward, int in_type, int out_type, int64_t rows, int64_t n,
                                   void* const* tensors, int device, void* stream, void* memory, void* fault,
                                   int64_t patience, int ranks, int rank, char* text, int64_t size) {
  return return_text(text, size, [&] {
    const RankLinks links = {
        static_cast<char**>(memory), static_cast<int*>(fault), uint64_t(patience), ranks, rank, 0, 0, 0};
    cuda::enter_context(device);
    cuda::start_over_ranks(Function(function), backward, DType(in_type), DType(out_type), tensors, rows, n, links,
                           device, stream);
    return std::string();
  });
}
