// rows_staged.cu: the tier `staged`, for short rows of any length that are contiguous in memory, or nearly so, forward
// and backward. A block copies a tile of rows to shared memory as one span, in whole vectors, whatever the length of
// the rows and the gaps between them. Threads then read the rows from shared memory.
//
//   tile of each operand -> shared memory -> a few lanes per row: its state, or sum -> epilogue ->
//   shared memory -> tile of results
//
// A thread has kVecs vectors of kVecSize elements of each operand. Vectors of scored rows have several elements, so
// that a thread also reads a bias or a mask in vectors. In other rows they have one. Then the elements of a row go to
// the same threads as in rows_onchip.cu with kVecSize 1, so that forward results have the same bits.
#include "block_reduce.cuh"
#include "config.cuh"
#include "row_backward.cuh"
#include "row_fragment.cuh"

// The vectors of a bias and a mask; only for scored rows.
template <class Operand, bool IsScored>
struct BesideOf {
  typedef typename Operand::Vectors Type;
};
template <class Operand>
struct BesideOf<Operand, false> {
  typedef char Type;
};

// The elements of a row of n elements that a lane has, numbered from 0. n is 0 if there is no row.
template <class C>
struct LaneElements {
  static constexpr int V = C::kVecSize, kLanes = C::kThreadsPerRow, kCount = C::kVecs * V;
  const int lane, n;

  // Where an element is in the row.
  __device__ int position(int e) const { return (e / V * kLanes + lane) * V + e % V; }
  // Whether a vector belongs to the row whole. By their plan, all vectors of a scored row but the last do.
  __device__ bool is_whole(int i) const { return (C::kIsScored && i + 1 < C::kVecs) || position(i * V) + V <= n; }
  __device__ bool exists(int e) const { return (C::kIsScored && e / V + 1 < C::kVecs) || position(e) < n; }
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
  static constexpr int kOperands = 1, kLanes = C::kThreadsPerRow, V = C::kVecSize, kCount = C::kVecs * V;
  static constexpr bool kOnePerRow = Epilogue::kOnePerRow;
  A elements[kCount];
  State<A> state;

  static __device__ const In* tensor(const Rows& rows, int) { return rows.operand(0); }
  static __device__ int64_t stride(const Rows& rows, int) { return rows.stride(0); }

  // The other tensors of the scores. They are read while the rows are being copied.
  struct Beside {
    typename C::Operand operand;
    typename BesideOf<typename C::Operand, C::kIsScored>::Type vectors[C::kVecs];
    __device__ Beside(const Rows& rows, int64_t index, const LaneElements<C>& own)
        : operand(rows.row(own.n ? index : 0, own.n).operand) {
      if constexpr (C::kIsScored) {
        unroll<C::kVecs>([&](int i) {
          if (own.is_whole(i))
            operand.template load_beside<true>(vectors[i], own.position(i * V), 0);
          else
            operand.template load_beside<false>(vectors[i], own.position(i * V), 0);
        });
      }
    }
  };
  __device__ Forward(const Beside& beside, const In* const* row, const LaneElements<C>& own) {
    const auto& operand = beside.operand;
    const auto raw = [&](int e) {
      return own.exists(e) ? row[0][own.position(e)] : C::Operand::template neutral<In>();
    };
    if constexpr (C::kIsScored) {
      if (own.n) {
        unroll<C::kVecs>([&](int i) {
          const auto x = [&](int v) { return raw(i * V + v); };
          const int first = own.position(i * V);
          if (own.is_whole(i))
            operand.template score<true>(beside.vectors[i], x, first, elements + i * V);
          else
            operand.template score<false>(beside.vectors[i], x, first, elements + i * V);
        });
      } else {
        unroll<kCount>([&](int e) { elements[e] = -infinity(); });
      }
    } else {
      unroll<kCount>([&](int e) { elements[e] = operand(raw(e)); });
    }
    A m = -infinity();
    unroll<kCount>([&](int e) { m = max_(elements[e], m); });
    if constexpr (C::kIsScored) m = operand.max_with_sink(m, own.lane == 0);
    m = warp_reduce<kLanes>(m, Max());
    typedef ShiftedExp<C, C::kIsScored && !Epilogue::kTakesX> Shifted;
    if (Shifted::subtracts(m)) unroll<kCount>([&](int e) { elements[e] = Shifted::subtract(elements[e], m); });
    const Shifted shifted(m);
    const A base = finite_or_zero(m);
    L l = accurate_sum<L, kCount>([&](int e) {
      if constexpr (Epilogue::kTakesX) return exp_for_sum<Out>(elements[e] - base);
      return elements[e] = C::kIsScored ? shifted(elements[e]) : exp_<Out>(elements[e] - base);
    });
    if constexpr (C::kIsScored) l = operand.add_sink(l, m, own.lane == 0);
    state = {m, value_of(warp_reduce<kLanes>(l, Sum()))};
    if constexpr (C::kIsScored) state = operand.finish(state, own.lane == 0);
  }
  template <class F>
  __device__ void for_each_result(F f) const {
    const Epilogue epilogue(state);
    unroll<kCount>([&](int e) {
      if constexpr (Epilogue::kTakesX)
        f(e, epilogue(elements[e]));
      else
        f(e, epilogue.from_exp(elements[e]));
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
  static constexpr int kOperands = 2, kLanes = C::kThreadsPerRow, V = C::kVecSize, kCount = C::kVecs * V;
  static constexpr bool kOnePerRow = false;
  const LaneElements<C> own;
  A y[kCount], g[kCount];
  A sum;

  static __device__ const In* tensor(const Rows& rows, int o) { return rows.operand(o); }
  static __device__ int64_t stride(const Rows& rows, int o) { return rows.stride(o); }

  struct Beside {
    typename C::Score score;
    MoreVector<C> more[reads_more<C> ? C::kVecs : 1];
    __device__ Beside(const Rows& rows, int64_t index, const LaneElements<C>& own)
        : score(rows.row(own.n ? index : 0, own.n).score) {
      if constexpr (reads_more<C>)
        unroll<C::kVecs>([&](int i) { score.load_more(more[i], own.position(i * V), own.is_whole(i)); });
    }
  };
  const Beside& beside;
  __device__ Backward(const Beside& beside, const In* const* row, const LaneElements<C>& own)
      : own(own), beside(beside) {
    unroll<kCount>([&](int e) {
      y[e] = g[e] = 0;
      if ((!C::kIsScored || own.n) && own.exists(e))
        y[e] = to_acc(row[0][own.position(e)]), g[e] = to_acc(row[1][own.position(e)]);
    });
    const auto terms = accurate_sum<typename C::Sum, kCount>([&](int e) { return sum_term<C>(y[e], g[e]); });
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
    unroll<kCount>([&](int e) {
      const int j = own.position(e);
      if constexpr (reads_more<C>)
        f(e, grad.template at<HasOutsiders>(y[e], g[e], j, beside.more[e / V][e % V]));
      else
        f(e, grad.template at<HasOutsiders>(y[e], g[e], j));
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
constexpr int kBesideEach = C::kIsBackward ? reads_more<C> : C::has(kScoreBias) + C::has(kScoreMask);
constexpr int kFit =
    65536 / (kThreads * (kOtherRegisters + (Op::kOperands * Op::kCount * 9 / 8) + kBesideEach * Op::kCount));
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
  const int n = (int)rows.n;

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
    const auto elements_of = [&](int row) { return LaneElements<C>{(int)(threadIdx.x % kLanes), row < here ? n : 0}; };
    typename Op::Beside beside(rows, begin + of_block, elements_of(of_block));
    AsyncCopy::wait<0>();
    const Span<Result> to(rows.results(), begin, here, n, Op::kOnePerRow ? n : rows.result_stride());
    Result* const results = reinterpret_cast<Result*>(dynamic_smem + result_at + to.skip);
    __syncthreads();
    for (int first = 0; first < here; first += C::kRowsPerBlock) {
      const int row = first + of_block, next = row + C::kRowsPerBlock;
      const LaneElements<C> own = elements_of(row);
      const In* at[Op::kOperands];
      unroll<Op::kOperands>([&](int o) { at[o] = tiles[o] + row * (int)Op::stride(rows, o); });
      const Op op(beside, at, own);
      if (row < here) {
        if constexpr (Op::kOnePerRow) {
          if (own.lane == 0) C::Epilogue::store(op.state, rows.result(begin + row, rows.row(begin + row)), rows.count);
        } else {
          Result* const result = results + row * to.stride;
          const LaneElements<C> of_whole = {own.lane, n};
          op.for_each_result([&](int e, typename C::Acc value) {
            if (of_whole.exists(e)) result[of_whole.position(e)] = from_acc<Result>(value);
          });
        }
      }
      if (first + C::kRowsPerBlock < here) beside = typename Op::Beside(rows, begin + next, elements_of(next));
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
