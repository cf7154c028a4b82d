// ranks.cpp: rows that are split over GPUs, as Python launches them on this one.
#include "../cuda/host/launch.h"
#include "c_api.h"

using namespace onepass;

// Bytes of the memory through which so many ranks exchange states.
ONEPASS_API int64_t onepass_rank_memory(int ranks) {
  return rank_memory_bytes(ranks, int(cuda::message_size(DType::float64, DType::float64)));
}

// Launches a forward, or a gradient, of contiguous rows of n elements. `tensors` are in the order of ForwardTensor or
// BackwardTensor; `memory`, on the GPU, has the address of each rank's; `fault` are two ints of the host.
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
