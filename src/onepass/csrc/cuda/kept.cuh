// kept.cuh: a thread's elements of a row while the state of the row is merged.
#pragma once

#include "window.cuh"

// In the accumulator's type. With KeepExp their exponentials take their place, so that exp is called once an element.
template <int F, int V, int Slots, class In, class Out, bool KeepExp>
struct Wide {
  typedef typename Accumulator<Out>::type A;
  A at[Slots * V];

  template <class Index>
  __device__ void load(int slot, const In* row, Index first, Index n) {
    put(slot, load_window<F, V>(row, first, n));
  }
  __device__ void put(int slot, Vector<In, V> raw) {
    const A sign = F == SOFTMIN ? A(-1) : A(1);
#pragma unroll
    for (int v = 0; v < V; ++v) at[slot * V + v] = sign * load_value<In, Out>(raw.at[v]);
  }
  __device__ void forget() {}
  __device__ A maximum() const {
    A m = -INFINITY_;
#pragma unroll
    for (int i = 0; i < Slots * V; ++i) m = max_(at[i], m);
    return m;
  }
  __device__ A exp(int i, A s) {
    if (!KeepExp) return exp_to_add(at[i] - s);
    return at[i] = exp_<Out>(at[i] - s);
  }
  template <class Index>
  __device__ void store(int slot, Out* row, Index first, Index n, const Finish<F, Out, A>& finish) const {
    Vector<Out, V> result;
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const A value = at[slot * V + v];
      result.at[v] = narrow<Out>(KeepExp ? finish.from_exp(value) : finish(value));
    }
    store_window(row, first, n, result);
  }
};

// Half types to half types: as they came, two in a register, so that a row takes half the room; exp is called twice.
template <int F, int V, int Slots, class T>
struct Packed {
  uint32_t at[Slots * V / 2];

  template <class Index>
  __device__ void load(int slot, const T* row, Index first, Index n) {
    uint32_t* words = at + slot * (V / 2);
    if (in_one<V>(first, n)) {
      const Vector<uint32_t, V / 2> raw = *reinterpret_cast<const Vector<uint32_t, V / 2>*>(row + first);
#pragma unroll
      for (int w = 0; w < V / 2; ++w) words[w] = raw.at[w];
    } else {
#pragma unroll
      for (int w = 0; w < V / 2; ++w)
        words[w] = half_at(row, first + 2 * w, n) | half_at(row, first + 2 * w + 1, n) << 16;
    }
  }
  __device__ void put(int slot, Vector<T, V> raw) { memcpy(at + slot * (V / 2), &raw, sizeof(raw)); }
  // Between two passes: else the compiler keeps what it has widened in the first, in twice the registers.
  __device__ void forget() {
#pragma unroll
    for (int w = 0; w < Slots * V / 2; ++w) asm volatile("" : "+r"(at[w]));
  }
  __device__ float maximum() const {
    uint32_t m = at[0];
#pragma unroll
    for (int w = 1; w < Slots * V / 2; ++w) m = F == SOFTMIN ? min_of_pairs<T>(m, at[w]) : max_of_pairs<T>(m, at[w]);
    return max_(value(m, 0), value(m, 1));
  }
  __device__ float exp(int i, float s) const { return exp_<T>(value(at[i / 2], i % 2) - s); }
  template <class Index>
  __device__ void store(int slot, T* row, Index first, Index n, const Finish<F, T, float>& finish) const {
    uint32_t words[V / 2];
#pragma unroll
    for (int w = 0; w < V / 2; ++w) {
      const uint32_t word = at[slot * (V / 2) + w];
      words[w] = pack<T>(finish(value(word, 0)), finish(value(word, 1)));
    }
    if (in_one<V>(first, n)) {
      Vector<uint32_t, V / 2> raw;
#pragma unroll
      for (int w = 0; w < V / 2; ++w) raw.at[w] = words[w];
      ::store(row + first, raw);
    } else {
#pragma unroll
      for (int v = 0; v < V; ++v) {
        if (first + v >= 0 && first + v < n) row[first + v] = T{(uint16_t)(words[v / 2] >> v % 2 * 16)};
      }
    }
  }

 private:
  template <class Index>
  static __device__ uint32_t half_at(const T* row, Index i, Index n) {
    return i >= 0 && i < n ? row[i].bits : nothing<F, T>().bits;
  }
  static __device__ float value(uint32_t word, int half) {
    const float x = to_wide(T{(uint16_t)(word >> half * 16)});
    return F == SOFTMIN ? -x : x;
  }
};

// What keeps the elements of a call. A vector of one half cannot be packed.
template <int F, int V, int Slots, class In, class Out>
struct Keep {
  typedef Wide<F, V, Slots, In, Out, F == SOFTMAX || F == SOFTMIN> type;
};
template <int F, int V, int Slots, class T>
struct KeepHalves {
  typedef Packed<F, V, Slots, T> type;
};
template <int F, int Slots, class T>
struct KeepHalves<F, 1, Slots, T> {
  typedef Wide<F, 1, Slots, T, T, F == SOFTMAX || F == SOFTMIN> type;
};
template <int F, int V, int Slots>
struct Keep<F, V, Slots, half_t, half_t> : KeepHalves<F, V, Slots, half_t> {};
template <int F, int V, int Slots>
struct Keep<F, V, Slots, bfloat16_t, bfloat16_t> : KeepHalves<F, V, Slots, bfloat16_t> {};
