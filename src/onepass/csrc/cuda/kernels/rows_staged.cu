// rows_staged.cu: short rows of any length that are contiguous in memory, or nearly so in the input. A block takes a
// tile of rows, and copies it as one span of memory, in whole vectors, whatever the length of the rows and the gaps
// between them. The rows are read from shared memory.
//
//   tile -> shared memory -> a few lanes per row: maximum, sum of exp -> epilogue -> shared memory -> tile
//
// A thread keeps kVecs elements. The elements of a row go to the threads as in rows_onchip.cu with kVecSize 1, so that
// the bits are the same.
#include "block_reduce.cuh"
#include "config.cuh"
#include "row_fragment.cuh"

typedef ForwardConfig C;
typedef C::Acc A;
typedef C::Sum L;

constexpr int kLanes = C::kThreadsPerRow, kThreads = kLanes * C::kRowsPerBlock;
#if __CUDA_ARCH__ >= 900
constexpr int kOtherRegisters = 32;  // beside those of the elements
#else
constexpr int kOtherRegisters = 40;
#endif
constexpr int kFit = 65536 / (kThreads * (kOtherRegisters + C::kVecs * 9 / 8));
constexpr int kMinBlocks = kFit < 1 ? 1 : kFit > 16 ? 16 : kFit;
constexpr int kVecBytes = 16;

// A span of memory. It begins at the same byte of a vector in shared memory as in global memory.
struct Span {
  int skip, bytes;  // `skip` bytes of the first vector come before it
  __device__ Span(const void* memory, int64_t bytes) : skip((int)((uint64_t)memory % kVecBytes)), bytes((int)bytes) {}
  __device__ int vectors() const { return (skip + bytes + kVecBytes - 1) / kVecBytes; }
};

__device__ inline void copy_in(const C::In* memory, Span span, unsigned char* smem) {
  typedef C::In In;
  const char* const aligned = reinterpret_cast<const char*>(memory) - span.skip;
  for (int at = threadIdx.x * kVecBytes; at < span.vectors() * kVecBytes; at += kThreads * kVecBytes) {
    if (at >= span.skip && at + kVecBytes <= span.skip + span.bytes) {
      AsyncCopy::start<kVecBytes>((uint32_t)__cvta_generic_to_shared(smem + at), aligned + at);
    } else {
      for (int i = at; i < at + kVecBytes; i += sizeof(In)) {
        if (i >= span.skip && i < span.skip + span.bytes)
          *reinterpret_cast<In*>(smem + i) = *reinterpret_cast<const In*>(aligned + i);
      }
    }
  }
  AsyncCopy::commit();
  AsyncCopy::wait<0>();
}

__device__ inline void copy_out(C::Out* memory, Span span, const unsigned char* smem) {
  typedef C::Out Out;
  char* const aligned = reinterpret_cast<char*>(memory) - span.skip;
  for (int at = threadIdx.x * kVecBytes; at < span.vectors() * kVecBytes; at += kThreads * kVecBytes) {
    if (at >= span.skip && at + kVecBytes <= span.skip + span.bytes) {
      store_vector(aligned + at, *reinterpret_cast<const Vector<uint32_t, 4>*>(smem + at));
    } else {
      for (int i = at; i < at + kVecBytes; i += sizeof(Out)) {
        if (i >= span.skip && i < span.skip + span.bytes)
          *reinterpret_cast<Out*>(aligned + i) = *reinterpret_cast<const Out*>(smem + i);
      }
    }
  }
}

// A block takes `tile_rows` rows. They are read at the start of dynamic_smem and written `out_offset` bytes further on;
// with 0 the results take the place of the elements.
template <class C>
__device__ inline void compute(const ForwardRows<C>& rows, int tile_rows, int out_offset) {
  typedef typename C::In In;
  typedef typename C::Out Out;
  typedef typename C::Epilogue Epilogue;
  const int n = (int)rows.n, lane = threadIdx.x % kLanes;
  const typename C::Operand operand = {rows.score};

  for (int64_t begin = (int64_t)blockIdx.x * tile_rows; begin < rows.count; begin += (int64_t)gridDim.x * tile_rows) {
    const int here = rows.count - begin < tile_rows ? (int)(rows.count - begin) : tile_rows;
    const Span from(rows.x + begin * rows.x_stride, ((int64_t)(here - 1) * rows.x_stride + n) * sizeof(In)),
        to(rows.y + begin * n, (int64_t)here * n * sizeof(Out));
    const In* const in = reinterpret_cast<const In*>(dynamic_smem + from.skip);
    Out* const out = reinterpret_cast<Out*>(dynamic_smem + out_offset + to.skip);
    copy_in(rows.x + begin * rows.x_stride, from, dynamic_smem);
    __syncthreads();
    for (int first = 0; first < here; first += C::kRowsPerBlock) {
      const int row = first + threadIdx.x / kLanes, length = row < here ? n : 0;
      const In* const x_row = in + row * (int)rows.x_stride;
      A elements[C::kVecs];
      unroll<C::kVecs>([&](int i) {
        const int j = i * kLanes + lane;
        elements[i] = operand(j < length ? x_row[j] : C::Operand::template neutral<In>());
      });
      A m = -infinity();
      unroll<C::kVecs>([&](int i) { m = max_(elements[i], m); });
      m = warp_reduce<kLanes>(m, Max());
      const A base = finite_or_zero(m);
      const L l = warp_reduce<kLanes>(accurate_sum<L, C::kVecs>([&](int i) {
                                        if (Epilogue::kTakesX) return exp_for_sum(elements[i] - base);
                                        return elements[i] = exp_<Out>(elements[i] - base);
                                      }),
                                      Sum());
      if (row >= here) continue;
      const State<A> state = {m, value_of(l)};
      if constexpr (Epilogue::kOnePerRow) {
        if (lane == 0) Epilogue::store(state, rows.result(begin + row), rows.count);
      } else {
        const Epilogue epilogue(state);
        const auto result = [&](A element) {
          if constexpr (Epilogue::kTakesX)
            return epilogue(element);
          else
            return epilogue.from_exp(element);
        };
        Out* const y_row = out + row * n;
        unroll<C::kVecs>([&](int i) {
          const int j = i * kLanes + lane;
          if (j < n) y_row[j] = from_acc<Out>(result(elements[i]));
        });
      }
    }
    __syncthreads();
    if (!Epilogue::kOnePerRow) copy_out(rows.y + begin * n, to, dynamic_smem + out_offset);
    if (begin + (int64_t)gridDim.x * tile_rows < rows.count) __syncthreads();  // before the next tile comes in
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
    onepass_kernel(const ForwardRows<C> rows, int tile_rows, int out_offset) {
  compute(rows, tile_rows, out_offset);
}
