// row_backward.cuh: the gradient of a row, from what the forward gave, y, and from that result's gradient, g.
//
//   softmax       dx = y (g - s),       s = sum(g y)       softmin: the negative
//   log_softmax   dx = g - exp(y) s,    s = sum(g)
//
// A thread's elements of both while the row's sum is merged. Beside IN (of y and g), OUT (of dx), FUNCTION and VECTOR:
//   EVEN   1: g has one value a row
#pragma once

#include "block_reduce.cuh"
#include "vector_access.cuh"

typedef Accumulator<IN>::type A;

// In what the sum is added up where parts meet: beside a half result's rounding that of a plain float is nothing.
template <bool Exact>
struct SumOf {
  typedef A type;
};
template <>
struct SumOf<false> {
  typedef half_t type;
};
typedef SumOf<(sizeof(OUT) > 2 || sizeof(IN) == 8)>::type Summed;
typedef Adder<Summed>::type L;

constexpr bool kLog = FUNCTION == LOG_SOFTMAX;
constexpr bool kPack = sizeof(IN) == 2 && sizeof(OUT) == 2 && VECTOR > 1;

// Vectors of one operand, in the accumulator's type.
template <bool Packed, int Slots>
struct Cells {
  typedef Vector<IN, VECTOR> Raw;
  A at[Slots * VECTOR];

  __device__ void put(int slot, Raw raw) {
#pragma unroll
    for (int v = 0; v < VECTOR; ++v) at[slot * VECTOR + v] = to_wide(raw.at[v]);
  }
  template <class Index>
  __device__ void put_part(int slot, const IN* from, Index first, Index n) {
#pragma unroll
    for (int v = 0; v < VECTOR; ++v) at[slot * VECTOR + v] = !kWhole && inside(first + v, n) ? to_wide(from[v]) : A(0);
  }
  __device__ void forget() {}
  __device__ A operator[](int i) const { return at[i]; }
  __device__ A again(int i) const { return at[i]; }
  // The results take the place of the elements.
  template <class F>
  __device__ void become(int slot, F result) {
#pragma unroll
    for (int i = slot * VECTOR; i < (slot + 1) * VECTOR; ++i) at[i] = result(i);
  }
  __device__ Vector<OUT, VECTOR> vector(int slot) const {
    Vector<OUT, VECTOR> made;
#pragma unroll
    for (int v = 0; v < VECTOR; ++v) made.at[v] = narrow<OUT>(at[slot * VECTOR + v]);
    return made;
  }
  __device__ OUT element(int i) const { return narrow<OUT>(at[i]); }
};

// Half types to half types: as they came, two in a register. (As a vector of halves it would be taken apart, and each
// load waited for.)
template <int Slots>
struct Cells<true, Slots> {
  static constexpr int kWords = VECTOR / 2;
  typedef Vector<uint32_t, kWords> Raw;
  uint32_t at[Slots * kWords];

  __device__ void put(int slot, Raw raw) {
#pragma unroll
    for (int w = 0; w < kWords; ++w) at[slot * kWords + w] = raw.at[w];
  }
  template <class Index>
  __device__ void put_part(int slot, const IN* from, Index first, Index n) {
    const auto half = [&](int v) -> uint32_t { return inside(first + v, n) ? from[v].bits : 0; };
#pragma unroll
    for (int w = 0; w < kWords; ++w) at[slot * kWords + w] = half(2 * w) | half(2 * w + 1) << 16;
  }
  // Between two passes: else the compiler keeps what it has widened in the first, in twice the registers.
  __device__ void forget() {
#pragma unroll
    for (int w = 0; w < Slots * kWords; ++w) asm volatile("" : "+r"(at[w]));
  }
  __device__ float operator[](int i) const { return to_wide(IN{(uint16_t)(at[i / 2] >> i % 2 * 16)}); }
  __device__ float again(int i) const { return widen_again<IN>(at[i / 2], i % 2); }
  template <class F>
  __device__ void become(int slot, F result) {
#pragma unroll
    for (int w = slot * kWords; w < (slot + 1) * kWords; ++w) at[w] = pack<OUT>(result(2 * w), result(2 * w + 1));
  }
  __device__ Raw vector(int slot) const {
    Raw made;
#pragma unroll
    for (int w = 0; w < kWords; ++w) made.at[w] = at[slot * kWords + w];
    return made;
  }
  __device__ OUT element(int i) const { return OUT{(uint16_t)(at[i / 2] >> i % 2 * 16)}; }
};

// Of an operand that has one value a row.
struct One {
  A value;
  __device__ void forget() {}
  __device__ A operator[](int) const { return value; }
  __device__ A again(int) const { return value; }
};
template <bool Even, int Slots>
struct OfGradient {
  typedef Cells<kPack, Slots> type;
};
template <int Slots>
struct OfGradient<true, Slots> {
  typedef One type;
};

// What an element adds to the sum of its row: where g is one value, of softmax without it.
__device__ inline A term(A y, A g) { return kLog ? g : EVEN ? y : g * y; }
// dx of an element, from the sum of its row.
__device__ inline A gradient(A y, A g, A s) {
  return kLog ? g - exp_<OUT>(y) * s : y * (FUNCTION == SOFTMIN ? s - g : g - s);
}

template <int Slots>
struct Terms {
  typedef typename Cells<kPack, Slots>::Raw Raw;
  Cells<kPack, Slots> y;
  typename OfGradient<EVEN, Slots>::type g;

  // Slots vectors of a row, of which the first begins at element `first` and the others `step` further on each. Those
  // that are not the row's as a whole are zeros: what they have of it is loose.
  template <class Index>
  __device__ void load(const IN* y_row, const IN* g_row, Index first, Index step, Index n) {
    const auto vector = [](const IN* at) { return *reinterpret_cast<const Raw*>(at); };
#pragma unroll
    for (int i = 0; i < Slots; ++i) {
      const Index at = first + i * step;
      if constexpr (kApart) {
        y.put_part(i, y_row + at, at, n);
        if constexpr (!EVEN) g.put_part(i, g_row + at, at, n);
      } else {
        Raw of_y = {}, of_g = {};
        if (whole<VECTOR>(at, n)) {
          of_y = vector(y_row + at);
          if constexpr (!EVEN) of_g = vector(g_row + at);
        }
        y.put(i, of_y);
        if constexpr (!EVEN) g.put(i, of_g);
      }
    }
    if constexpr (EVEN) g.value = to_wide(*g_row);
  }
  // One vector of each, or of y and the one value of g.
  __device__ void put(int slot, Raw of_y, Raw of_g, A even) {
    y.put(slot, of_y);
    if constexpr (EVEN)
      g.value = even;
    else
      g.put(slot, of_g);
  }
  __device__ void forget() { y.forget(), g.forget(); }

  __device__ L part() const {
    return tree_sum<Summed, Slots * VECTOR>([&](int i) { return term(y[i], g[i]); });
  }
  // dx of the vector `slot` takes the place of y.
  __device__ void finish(int slot, A s) {
    y.become(slot, [&](int i) { return gradient(y.again(i), g.again(i), s); });
  }
  // One by one: the first are on their way out while the others are worked on.
  template <class Index>
  __device__ void finish_and_store(A s, OUT* row, Index first, Index step, Index n) {
#pragma unroll
    for (int i = 0; i < Slots; ++i) {
      const Index at = first + i * step;
      if constexpr (kApart) {
        finish(i, s);
        store_part(i, row + at, at, n);
      } else if (whole<VECTOR>(at, n)) {
        finish(i, s);
        ::store(row + at, y.vector(i));
      }
    }
  }
  // One whole vector.
  __device__ void store_vector(int slot, OUT* to) const {
    if constexpr (kApart)
      store_part<int>(slot, to, 0, VECTOR);
    else
      ::store(to, y.vector(slot));
  }

 private:
  template <class Index>
  __device__ void store_part(int slot, OUT* to, Index first, Index n) const {
#pragma unroll
    for (int v = 0; v < VECTOR; ++v) {
      if (inside(first + v, n)) to[v] = y.element(slot * VECTOR + v);
    }
  }
};

// The elements of a row before its first and after its last whole vector, up to VECTOR - 1 each: of Lanes threads each
// takes some. No vector has to be taken apart for them, which costs branches in every one.
template <int Lanes>
struct Loose {
  static constexpr int kEach = kWhole || kApart || VECTOR == 1 ? 0 : (2 * (VECTOR - 1) + Lanes - 1) / Lanes;
  A y[kEach + 1], g[kEach + 1];

  // `lane`: which of the threads; those beyond have none. `phase`: the element of a vector that the row begins with.
  template <class Index>
  __device__ void load(const IN* y_row, const IN* g_row, int lane, int phase, Index n) {
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      const Index at = element(lane + k * Lanes, phase, n);
      y[k] = g[k] = 0;
      if (at >= 0) y[k] = to_wide(y_row[at]), g[k] = to_wide(g_row[EVEN ? 0 : at]);
    }
  }
  __device__ L part() const {
    A sum = 0;
#pragma unroll
    for (int k = 0; k < kEach; ++k) sum += term(y[k], g[k]);
    return Adder<Summed>::of(sum);
  }
  template <class Index>
  __device__ void store(A s, OUT* row, int lane, int phase, Index n) const {
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      const Index at = element(lane + k * Lanes, phase, n);
      if (at >= 0) row[at] = narrow<OUT>(gradient(y[k], g[k], s));
    }
  }

 private:
  // The loose element number `i`, or -1.
  template <class Index>
  static __device__ Index element(int i, int phase, Index n) {
    const int before = (VECTOR - phase) % VECTOR, head = before < n ? before : (int)n;
    if (i < head) return i;
    const int tail = (int)((n - head) % VECTOR), at = i - head;
    return at < tail ? n - tail + at : -1;
  }
};

// The sum of a row, from what its parts have added up to, and from its g where that is one value.
__device__ inline A sum_of(L total, A g, int64_t n) {
  if constexpr (!EVEN) return value_of(total);
  return kLog ? g * A(n) : g * value_of(total);
}
