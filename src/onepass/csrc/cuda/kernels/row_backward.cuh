// row_backward.cuh: the gradient dx of a row, from the forward's result y and the gradient g of that result.
//
//   softmax       dx = y (g - s),       s = sum(g y)       softmin: the negative
//   log_softmax   dx = g - exp(y) s,    s = sum(g)
//
// It has a thread's elements of both while the sum of the row is reduced. `C` is the BackwardConfig.
#pragma once

#include "block_reduce.cuh"
#include "vector_access.cuh"

// The vectors of one operand, in the accumulator's type.
template <class C, int Vecs>
struct OperandFragment {
  typedef typename C::In In;
  typedef typename C::Out Out;
  typedef typename C::Acc A;
  static constexpr int V = C::kVecSize;
  typedef Vector<In, V> Raw;
  A at[Vecs * V];

  __device__ void set(int i, Raw raw) {
#pragma unroll
    for (int v = 0; v < V; ++v) at[i * V + v] = to_acc(raw.at[v]);
  }
  template <class Index>
  __device__ void set_elements(int i, const In* from, Index first, Index n) {
#pragma unroll
    for (int v = 0; v < V; ++v) at[i * V + v] = !C::kAligned && is_inside(first + v, n) ? to_acc(from[v]) : A(0);
  }
  __device__ void opaque_registers() {}
  __device__ A operator[](int i) const { return at[i]; }
  __device__ A reconverted(int i) const { return at[i]; }
  // The results take the place of the elements.
  template <class F>
  __device__ void replace(int i, F result) {
#pragma unroll
    for (int e = i * V; e < (i + 1) * V; ++e) at[e] = result(e);
  }
  __device__ Vector<Out, V> vec(int i) const {
    Vector<Out, V> made;
#pragma unroll
    for (int v = 0; v < V; ++v) made.at[v] = from_acc<Out>(at[i * V + v]);
    return made;
  }
  __device__ Out element(int e) const { return from_acc<Out>(at[e]); }
};

// Half types to half types: as they were read, two per register. (The compiler splits vectors of half elements, and
// waits for each load.)
template <class C, int Vecs>
struct OperandFragmentHalf2 {
  typedef typename C::In In;
  typedef typename C::Out Out;
  static constexpr int V = C::kVecSize, kWords = V / 2;
  typedef Vector<uint32_t, kWords> Raw;
  uint32_t at[Vecs * kWords];

  __device__ void set(int i, Raw raw) {
#pragma unroll
    for (int w = 0; w < kWords; ++w) at[i * kWords + w] = raw.at[w];
  }
  template <class Index>
  __device__ void set_elements(int i, const In* from, Index first, Index n) {
    const auto bits = [&](int v) -> uint32_t { return is_inside(first + v, n) ? from[v].bits : 0; };
#pragma unroll
    for (int w = 0; w < kWords; ++w) at[i * kWords + w] = bits(2 * w) | bits(2 * w + 1) << 16;
  }
  // Hides between two passes that the registers are unchanged: otherwise the compiler keeps the converted elements of
  // the first pass, in twice the registers.
  __device__ void opaque_registers() {
#pragma unroll
    for (int w = 0; w < Vecs * kWords; ++w) asm volatile("" : "+r"(at[w]));
  }
  __device__ float operator[](int i) const { return to_acc(get_half<In>(at[i / 2], i % 2)); }
  __device__ float reconverted(int i) const { return reconvert<In>(at[i / 2], i % 2); }
  template <class F>
  __device__ void replace(int i, F result) {
#pragma unroll
    for (int w = i * kWords; w < (i + 1) * kWords; ++w) at[w] = pack_half2<Out>(result(2 * w), result(2 * w + 1));
  }
  __device__ Raw vec(int i) const {
    Raw made;
#pragma unroll
    for (int w = 0; w < kWords; ++w) made.at[w] = at[i * kWords + w];
    return made;
  }
  __device__ Out element(int e) const { return get_half<Out>(at[e / 2], e % 2); }
};

// An operand that has one value per row.
template <class C>
struct BroadcastFragment {
  typedef typename C::Acc A;
  A value;
  __device__ void opaque_registers() {}
  __device__ A operator[](int) const { return value; }
  __device__ A reconverted(int) const { return value; }
};

template <class C>
constexpr bool uses_half2 = sizeof(typename C::In) == 2 && sizeof(typename C::Out) == 2 && (C::kVecSize > 1);

// What an element adds to the sum of its row. A broadcast gradient of softmax is a factor of the sum instead.
template <class C>
__device__ inline typename C::Acc sum_term(typename C::Acc y, typename C::Acc g) {
  return C::kLog ? g : C::kBroadcastGrad ? y : g * y;
}
// dx of an element, from the sum of its row.
template <class C>
__device__ inline typename C::Acc input_grad(typename C::Acc y, typename C::Acc g, typename C::Acc s) {
  return C::kLog ? g - exp_<typename C::Out>(y) * s : y * (C::kFunction == Function::softmin ? s - g : g - s);
}

// A thread's vectors of both operands.
template <class C, int Vecs>
struct BackwardFragment {
  typedef typename C::In In;
  typedef typename C::Out Out;
  typedef typename C::Acc A;
  static constexpr int V = C::kVecSize;
  typedef typename Conditional<uses_half2<C>, OperandFragmentHalf2<C, Vecs>, OperandFragment<C, Vecs>>::type Operand;
  typedef typename Operand::Raw Raw;
  Operand y;
  typename Conditional<C::kBroadcastGrad, BroadcastFragment<C>, Operand>::type g;

  // Loads Vecs vectors of a row; the first begins at element `first`, and each other `step` elements further on.
  // Vectors that belong to the row in part become zeros: their elements are head or tail elements.
  template <class Index>
  __device__ void load(const In* y_row, const In* g_row, Index first, Index step, Index n) {
    const auto vector = [](const In* at) { return *reinterpret_cast<const Raw*>(at); };
#pragma unroll
    for (int i = 0; i < Vecs; ++i) {
      const Index at = first + i * step;
      if constexpr (C::kScalar) {
        y.set_elements(i, y_row + at, at, n);
        if constexpr (!C::kBroadcastGrad) g.set_elements(i, g_row + at, at, n);
      } else {
        Raw y_vec = {}, g_vec = {};
        if (is_full<C>(at, n)) {
          y_vec = vector(y_row + at);
          if constexpr (!C::kBroadcastGrad) g_vec = vector(g_row + at);
        }
        y.set(i, y_vec);
        if constexpr (!C::kBroadcastGrad) g.set(i, g_vec);
      }
    }
    if constexpr (C::kBroadcastGrad) g.value = to_acc(*g_row);
  }
  // Sets one vector of each operand, or of y and the one value of g.
  __device__ void set(int i, Raw y_vec, Raw g_vec, A g_value) {
    y.set(i, y_vec);
    if constexpr (C::kBroadcastGrad)
      g.value = g_value;
    else
      g.set(i, g_vec);
  }
  __device__ void opaque_registers() { y.opaque_registers(), g.opaque_registers(); }

  __device__ typename C::Sum partial_sum() const {
    return accurate_sum<typename C::Sum, Vecs * V>([&](int i) { return sum_term<C>(y[i], g[i]); });
  }
  // dx of vector i takes the place of y.
  __device__ void apply_epilogue(int i, A s) {
    y.replace(i, [&](int e) { return input_grad<C>(y.reconverted(e), g.reconverted(e), s); });
  }
  // Each vector is stored as soon as it is computed.
  template <class Index>
  __device__ void apply_epilogue_and_store(A s, Out* row, Index first, Index step, Index n) {
#pragma unroll
    for (int i = 0; i < Vecs; ++i) {
      const Index at = first + i * step;
      if constexpr (C::kScalar) {
        apply_epilogue(i, s);
        store_elements(i, row + at, at, n);
      } else if (is_full<C>(at, n)) {
        apply_epilogue(i, s);
        store_vector(row + at, y.vec(i));
      }
    }
  }
  __device__ void store_full_vec(int i, Out* to) const {
    if constexpr (C::kScalar)
      store_elements<int>(i, to, 0, V);
    else
      store_vector(to, y.vec(i));
  }

 private:
  template <class Index>
  __device__ void store_elements(int i, Out* to, Index first, Index n) const {
#pragma unroll
    for (int v = 0; v < V; ++v) {
      if (is_inside(first + v, n)) to[v] = y.element(i * V + v);
    }
  }
};

// The head and tail elements of a row, before its first and after its last whole vector, up to V - 1 each. Each of
// `Threads` threads takes some. So no vector has to be split for them, which would cost branches in every one.
template <class C, int Threads>
struct RowTails {
  typedef typename C::In In;
  typedef typename C::Out Out;
  typedef typename C::Acc A;
  static constexpr int V = C::kVecSize;
  static constexpr int kEach = C::kAligned || C::kScalar || V == 1 ? 0 : (2 * (V - 1) + Threads - 1) / Threads;
  A y[kEach + 1], g[kEach + 1];

  // `thread`: its number; threads beyond `Threads` have no elements. `before`: the misalignment of the row.
  template <class Index>
  __device__ void load(const In* y_row, const In* g_row, int thread, int before, Index n) {
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      const Index at = position(thread + k * Threads, before, n);
      y[k] = g[k] = 0;
      if (at >= 0) y[k] = to_acc(y_row[at]), g[k] = to_acc(g_row[C::kBroadcastGrad ? 0 : at]);
    }
  }
  __device__ typename C::Sum partial_sum() const {
    A sum = 0;
#pragma unroll
    for (int k = 0; k < kEach; ++k) sum += sum_term<C>(y[k], g[k]);
    return begin_sum<typename C::Sum>(sum);
  }
  template <class Index>
  __device__ void store(A s, Out* row, int thread, int before, Index n) const {
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      const Index at = position(thread + k * Threads, before, n);
      if (at >= 0) row[at] = from_acc<Out>(input_grad<C>(y[k], g[k], s));
    }
  }

 private:
  // Where head or tail element `i` is in the row, or -1.
  template <class Index>
  static __device__ Index position(int i, int before, Index n) {
    const int to_aligned = (V - before) % V, head = to_aligned < n ? to_aligned : (int)n;
    if (i < head) return i;
    const int tail = (int)((n - head) % V), at = i - head;
    return at < tail ? n - tail + at : -1;
  }
};

// The sum of a row, from the sum of its terms, and from its g where that has one value.
template <class C>
__device__ inline typename C::Acc row_sum(typename C::Sum terms, typename C::Acc g, int64_t n) {
  typedef typename C::Acc A;
  if constexpr (!C::kBroadcastGrad) return value_of(terms);
  return C::kLog ? g * A(n) : g * value_of(terms);
}
// Whether the sum needs no element of a row.
template <class C>
constexpr bool needs_no_reduction = C::kBroadcastGrad && C::kLog;
