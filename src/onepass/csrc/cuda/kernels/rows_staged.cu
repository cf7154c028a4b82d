// rows_staged.cu: the tier `staged`, for short rows of any length that are contiguous in memory, or nearly so, forward
// and backward. A block copies a tile of rows to shared memory as one span, in whole vectors, whatever the length of
// the rows and the gaps between them. Threads then read the rows from shared memory.
//
//   tile of each operand -> shared memory -> a few lanes per row: its state, or sum -> epilogue ->
//   shared memory -> tile of results
//
// A thread has kVecs elements of each operand. The elements of a row go to the same threads as in rows_onchip.cu with
// kVecSize 1, so that forward results have the same bits.
#include "block_reduce.cuh"
#include "config.cuh"
#include "row_backward.cuh"
#include "row_fragment.cuh"

// The type of an element together with the bias and mask of its score; only for scored rows.
template <class Operand, bool IsScored>
struct Elements {
  typedef typename Operand::Element Type;
};
template <class Operand>
struct Elements<Operand, false> {
  typedef char Type;
};

// A thread's elements of a row in the forward, and the state of the row.
template <class Config>
struct Forward {
  typedef Config C;
  typedef typename C::In In;
  typedef typename C::Out Out;
  typedef typename C::Acc A;
  typedef typename C::Sum L;
  typedef typename C::Epilogue Epilogue;
  typedef typename C::Rows Rows;
  static constexpr int kOperands = 1, kLanes = C::kThreadsPerRow;
  static constexpr bool kOnePerRow = Epilogue::kOnePerRow;
  A elements[C::kVecs];
  State<A> state;

  static __device__ const In* tensor(const Rows& rows, int) { return rows.operand(0); }
  static __device__ int64_t stride(const Rows& rows, int) { return rows.stride(0); }

  // The other tensors of the scores. They are read while the rows are being copied.
  struct Beside {
    typename C::Operand operand;
    typename Elements<typename C::Operand, C::kIsScored>::Type elements[C::kVecs];
    __device__ Beside(const Rows& rows, int64_t index, int lane, int length)
        : operand(rows.row(length ? index : 0, length).operand) {
      if constexpr (C::kIsScored)
        unroll<C::kVecs>([&](int i) { elements[i] = operand.load_beside_one(i * kLanes + lane); });
    }
  };
  __device__ Forward(Beside& beside, const In* const* row, int lane, int length) {
    auto& operand = beside.operand;
    unroll<C::kVecs>([&](int i) {
      const int j = i * kLanes + lane;
      const In raw = j < length ? row[0][j] : C::Operand::template neutral<In>();
      if constexpr (C::kIsScored)
        beside.elements[i].x = raw, elements[i] = operand.score_one(beside.elements[i], j);
      else
        elements[i] = operand(raw);
    });
    A m = -infinity();
    unroll<C::kVecs>([&](int i) { m = max_(elements[i], m); });
    if constexpr (C::kIsScored) m = operand.max_with_sink(m, lane == 0);
    m = warp_reduce<kLanes>(m, Max());
    const A base = finite_or_zero(m);
    L l = accurate_sum<L, C::kVecs>([&](int i) {
      if (Epilogue::kTakesX) return exp_for_sum<Out>(elements[i] - base);
      return elements[i] = exp_<Out>(elements[i] - base);
    });
    if constexpr (C::kIsScored) l = operand.add_sink(l, m, lane == 0);
    state = {m, value_of(warp_reduce<kLanes>(l, Sum()))};
    if constexpr (C::kIsScored) state = operand.finish(state, lane == 0);
  }
  template <class F>
  __device__ void for_each_result(F f) const {
    const Epilogue epilogue(state);
    unroll<C::kVecs>([&](int i) {
      if constexpr (Epilogue::kTakesX)
        f(i, epilogue(elements[i]));
      else
        f(i, epilogue.from_exp(elements[i]));
    });
  }
};

// The same for the backward.
template <class Config>
struct Backward {
  typedef Config C;
  typedef typename C::In In;
  typedef typename C::Out Out;
  typedef typename C::Acc A;
  typedef typename C::Rows Rows;
  static constexpr int kOperands = 2, kLanes = C::kThreadsPerRow;
  static constexpr bool kOnePerRow = false;
  const int lane;
  A y[C::kVecs], g[C::kVecs];
  A sum;

  static __device__ const In* tensor(const Rows& rows, int o) { return rows.operand(o); }
  static __device__ int64_t stride(const Rows& rows, int o) { return rows.stride(o); }

  struct Beside {
    typename C::Score score;
    Out x[C::has(kScoreSoftcap) ? C::kVecs : 1];
    __device__ Beside(const Rows& rows, int64_t index, int lane, int length)
        : score(rows.row(length ? index : 0, length).score) {
      if constexpr (C::has(kScoreSoftcap)) unroll<C::kVecs>([&](int i) { x[i] = score.load_x_one(i * kLanes + lane); });
    }
  };
  const Beside beside;
  __device__ Backward(const Beside& beside, const In* const* row, int lane, int length) : lane(lane), beside(beside) {
    unroll<C::kVecs>([&](int i) {
      const int j = i * kLanes + lane;
      y[i] = g[i] = 0;
      if (j < length) y[i] = to_acc(row[0][j]), g[i] = to_acc(row[1][j]);
    });
    const auto terms = accurate_sum<typename C::Sum, C::kVecs>([&](int i) { return sum_term<C>(y[i], g[i]); });
    sum = value_of(warp_reduce<kLanes>(terms, Sum()));
  }
  template <class F>
  __device__ void for_each_result(F f) const {
    const InputGrad<C> grad = {sum, beside.score};
    grad.has_outsiders() ? for_each_result<true>(grad, f) : for_each_result<false>(grad, f);
  }

 private:
  template <bool HasOutsiders, class F>
  __device__ void for_each_result(const InputGrad<C>& grad, F f) const {
    unroll<C::kVecs>([&](int i) {
      const int j = i * kLanes + lane;
      if constexpr (C::has(kScoreSoftcap))
        f(i, grad.template at<HasOutsiders>(y[i], g[i], j, beside.x[i]));
      else
        f(i, grad.template at<HasOutsiders>(y[i], g[i], j));
    });
  }
};

typedef KernelOp<Forward, Backward> Op;
typedef Op::C C;
constexpr int kLanes = C::kThreadsPerRow, kThreads = kLanes * C::kRowsPerBlock;
#if __CUDA_ARCH__ >= 900
constexpr int kOtherRegisters = C::kIsScored ? 48 : 32;  // registers besides those of the elements
#else
constexpr int kOtherRegisters = C::kIsScored ? 56 : 40;
#endif
constexpr int kBesideEach = C::kIsBackward ? C::has(kScoreSoftcap) : C::has(kScoreBias) + C::has(kScoreMask);
constexpr int kFit =
    65536 / (kThreads * (kOtherRegisters + (Op::kOperands * C::kVecs * 9 / 8) + kBesideEach * C::kVecs));
constexpr int kMinBlocks = kFit < 1 ? 1 : kFit > 16 ? 16 : kFit;
constexpr int kVecBytes = 16;

// The memory of a tile: `rows` rows of n elements, which begin `stride` elements apart. The tile begins at the same
// byte of a vector in shared memory as in global memory.
template <class T>
struct Span {
  T* memory;
  int rows, n, stride;
  int skip, end;  // the first vector has `skip` bytes before the tile, and the tile ends before byte `end`
  __device__ Span(T* tensor, int64_t first, int rows, int64_t n, int64_t stride)
      : memory(tensor + first * stride), rows(rows), n((int)n), stride((int)stride) {
    skip = (int)((uint64_t)memory % kVecBytes);
    end = skip + ((rows - 1) * this->stride + this->n) * (int)sizeof(T);
  }
  // Calls whole(byte) for each whole vector inside the tile, and element(byte) for each other element.
  template <class F, class G>
  __device__ void for_each_vector(F whole, G element) const {
    for (int at = threadIdx.x * kVecBytes; at < end; at += kThreads * kVecBytes) {
      if (at >= skip && at + kVecBytes <= end) {
        whole(at);
      } else {
        for (int i = at; i < at + kVecBytes; i += sizeof(T)) {
          if (i >= skip && i < end) element(i);
        }
      }
    }
  }
  // Calls element(byte) for each element of the rows.
  template <class F>
  __device__ void for_each_element(F element) const {
    const uint64_t by_n = ((uint64_t)1 << 32) / (unsigned)n + 1;  // exact for the elements of any tile
    for (unsigned i = threadIdx.x; i < (unsigned)(rows * n); i += kThreads) {
      const unsigned row = (unsigned)(i * by_n >> 32);
      element(skip + (int)(i + row * (unsigned)(stride - n)) * (int)sizeof(T));
    }
  }
};

__device__ inline void copy_in(const Span<const C::In>& span, unsigned char* smem) {
  typedef C::In In;
  const char* const aligned = reinterpret_cast<const char*>(span.memory) - span.skip;
  const uint32_t to = (uint32_t)__cvta_generic_to_shared(smem);
  span.for_each_vector([&](int at) { AsyncCopy::start<kVecBytes>(to + at, aligned + at); },
                       [&](int at) { *reinterpret_cast<In*>(smem + at) = *reinterpret_cast<const In*>(aligned + at); });
}

// Copies the results out. If rows have gaps, nothing is written to the gaps.
__device__ inline void copy_out(const Span<C::Out>& span, const unsigned char* smem) {
  typedef C::Out Out;
  char* const aligned = reinterpret_cast<char*>(span.memory) - span.skip;
  const auto element = [&](int at) {
    *reinterpret_cast<Out*>(aligned + at) = *reinterpret_cast<const Out*>(smem + at);
  };
  if (span.stride == span.n)
    span.for_each_vector(
        [&](int at) { store_vector(aligned + at, *reinterpret_cast<const Vector<uint32_t, 4>*>(smem + at)); }, element);
  else
    span.for_each_element(element);
}

// A block takes `tile_rows` rows at a time. The first operand is at the start of dynamic_smem, a second one `second_at`
// bytes after it, and the results are at `result_at`. If that is 0, the results replace the elements.
template <class Op>
__device__ inline void compute(const typename Op::Rows& rows, int tile_rows, int second_at, int result_at) {
  typedef typename Op::C C;
  typedef typename C::In In;
  typedef typename C::Result Result;
  const int n = (int)rows.n, lane = threadIdx.x % kLanes;

  for (int64_t begin = (int64_t)blockIdx.x * tile_rows; begin < rows.count; begin += (int64_t)gridDim.x * tile_rows) {
    const int here = rows.count - begin < tile_rows ? (int)(rows.count - begin) : tile_rows;
    const In* tiles[Op::kOperands];
    unroll<Op::kOperands>([&](int o) {
      const Span<const In> from(Op::tensor(rows, o), begin, here, n, Op::stride(rows, o));
      unsigned char* const smem = dynamic_smem + o * second_at;
      copy_in(from, smem);
      tiles[o] = reinterpret_cast<const In*>(smem + from.skip);
    });
    AsyncCopy::commit();
    const int of_block = threadIdx.x / kLanes;
    typename Op::Beside beside(rows, begin + of_block, lane, of_block < here ? n : 0);
    AsyncCopy::wait<0>();
    const Span<Result> to(rows.results(), begin, here, n, Op::kOnePerRow ? n : rows.result_stride());
    Result* const results = reinterpret_cast<Result*>(dynamic_smem + result_at + to.skip);
    __syncthreads();
    for (int first = 0; first < here; first += C::kRowsPerBlock) {
      const int row = first + of_block, next = row + C::kRowsPerBlock;
      const In* at[Op::kOperands];
      unroll<Op::kOperands>([&](int o) { at[o] = tiles[o] + row * (int)Op::stride(rows, o); });
      const Op op(beside, at, lane, row < here ? n : 0);
      if (first + C::kRowsPerBlock < here) beside = typename Op::Beside(rows, begin + next, lane, next < here ? n : 0);
      if (row >= here) continue;
      if constexpr (Op::kOnePerRow) {
        if (lane == 0) C::Epilogue::store(op.state, rows.result(begin + row, rows.row(begin + row)), rows.count);
      } else {
        Result* const result = results + row * to.stride;
        op.for_each_result([&](int i, typename C::Acc value) {
          const int j = i * kLanes + lane;
          if (j < n) result[j] = from_acc<Result>(value);
        });
      }
    }
    __syncthreads();
    if constexpr (!Op::kOnePerRow) copy_out(to, dynamic_smem + result_at);
    if (begin + (int64_t)gridDim.x * tile_rows < rows.count) __syncthreads();  // before the next tile comes in
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
    onepass_kernel(const Op::Rows rows, int tile_rows, int second_at, int result_at) {
  compute<Op>(rows, tile_rows, second_at, result_at);
}
