// packed.cuh: a thread's elements of a row of halves, two in a register.
#pragma once

#include "slots.cuh"

// Half types to half types: as they came, two in a register, so that a row takes half the room; exp is called twice.
//
// exp(x - m) is exp2(x * log2(e) - m * log2(e)), one fused multiply-add before the exponential, and 1 / l goes into the
// exponent too. For a maximum of up to Near that is off by 2^-24 * 1.44 * Near, an eighth of what a result is rounded
// by. Beyond it the maximum is first subtracted from the elements, in the half type: exactly, where the two are within
// a factor of two, and others are so far below that their exponential is 0.
template <class T>
struct Near;
template <>
struct Near<half_t> {
  static constexpr float value = 1024;
};
template <>
struct Near<bfloat16_t> {
  static constexpr float value = 4096;
};

template <int F, int V, int Slots, class T>
struct Packed : Loads<Packed<F, V, Slots, T>, F, V, Slots, T> {
  uint32_t at[Slots * V / 2];
  float taken;  // what has been subtracted from the elements

  typedef Vector<uint32_t, V / 2> Raw;  // as a vector of halves it would be taken apart, and the load waited for

  template <bool Once>
  static __device__ Raw read(const T* at) {
    return ::load<uint32_t, V / 2, Once>(at);
  }
  __device__ void put(int slot, Raw raw) {
#pragma unroll
    for (int w = 0; w < V / 2; ++w) at[slot * (V / 2) + w] = raw.at[w];
  }
  template <class Index>
  __device__ void put_part(int slot, const T* from, Index first, Index n) {
    const auto half = [&](int v) -> uint32_t {
      return !kWhole && inside(first + v, n) ? from[v].bits : nothing<F, T>().bits;
    };
#pragma unroll
    for (int w = 0; w < V / 2; ++w) at[slot * (V / 2) + w] = half(2 * w) | half(2 * w + 1) << 16;
  }
  __device__ void give(int) const {}  // no room for exponentials there
  // Between two passes: else the compiler keeps what it has widened in the first, in twice the registers.
  __device__ void forget() {
#pragma unroll
    for (int w = 0; w < Slots * V / 2; ++w) asm volatile("" : "+r"(at[w]));
  }
  __device__ float maximum() const {
    uint32_t m = at[0];
#pragma unroll
    for (int w = 1; w < Slots * V / 2; ++w) m = F == SOFTMIN ? min_of_pairs<T>(m, at[w]) : max_of_pairs<T>(m, at[w]);
    return max_(kSign * value(m, 0), kSign * value(m, 1));
  }
  // To be called once the maximum of the row, or of a part that these are of, is known.
  __device__ void lower(float m) {
    taken = 0;
    if (F == LOG_SOFTMAX || fabsf(m) < kNear || m == INFINITY_ || m == -INFINITY_) return;
    taken = m;
    const uint32_t pair = pack<T>(-kSign * m, -kSign * m);
#pragma unroll
    for (int w = 0; w < Slots * V / 2; ++w) at[w] = add_pairs<T>(at[w], pair);
  }
  __device__ float sum(float m) const {
    if (F == LOG_SOFTMAX) return sum_below(m);
    const float offset = (taken - shift(m)) * kLog2e;
    return plain_sum<Slots * V, 0>([&](int i) { return exp2_(fmaf(value(at[i / 2], i % 2), kSign * kLog2e, offset)); });
  }
  __device__ float sum_below(float m) const {
    const float s = shift(m);
    return plain_sum<Slots * V, 0>([&](int i) { return exp_<T>(kSign * value(at[i / 2], i % 2) - s); });
  }
  __device__ void finish(State<float> state) {
    const Finish<F, T, float> finish(state);
    const float offset = offset_of(state);
#pragma unroll
    for (int i = 0; i < Slots; ++i) finish_slot(i, finish, offset);
  }
  // Whole vectors one by one: the first are on their way out while the others are worked on.
  template <class Index>
  __device__ void finish_and_store(State<float> state, T* row, Index first, Index step, Index n) {
    if constexpr (!kWhole) {
      finish(state);
      store(row, first, step, n);
    } else {
      const Finish<F, T, float> finish(state);
      const float offset = offset_of(state);
#pragma unroll
      for (int i = 0; i < Slots; ++i) {
        if (first + i * step >= n) continue;
        finish_slot(i, finish, offset);
        ::store(row + (first + i * step), result(i));
      }
    }
  }
  template <class Index>
  __device__ void store(T* row, Index first, Index step, Index n) const {
    for_slots<V, Slots>(
        first, step, n, [&](int i, Index at) { ::store(row + at, result(i)); },
        [&](int i, Index at) {
          if (in_one<V>(at, n))
            ::store(row + at, result(i));
          else
            store_part(i, row + at, at, n);
        });
  }
  // One whole vector.
  __device__ void store_vector(int slot, T* to) const {
    if constexpr (kApart)
      store_part<int>(slot, to, 0, V);
    else
      ::store(to, result(slot));
  }

 private:
  __device__ Raw result(int slot) const {
    Raw made;
#pragma unroll
    for (int w = 0; w < V / 2; ++w) made.at[w] = at[slot * (V / 2) + w];
    return made;
  }
  __device__ float offset_of(State<float> state) const {
    return isfinite_(state.m) ? (taken - state.m) * kLog2e - log2_(state.l) : NAN_;
  }
  __device__ void finish_slot(int slot, const Finish<F, T, float>& finish, float offset) {
#pragma unroll
    for (int w = slot * V / 2; w < (slot + 1) * V / 2; ++w) {
      const auto result = [&](int half) {
        const float x = widen_again<T>(at[w], half);
        return F == LOG_SOFTMAX ? finish(x) : exp2_(fmaf(x, kSign * kLog2e, offset));
      };
      at[w] = pack<T>(result(0), result(1));
    }
  }
  template <class Index>
  __device__ void store_part(int slot, T* to, Index first, Index n) const {
    if constexpr (kWhole) return;
#pragma unroll
    for (int v = 0; v < V; ++v) {
      if (inside(first + v, n)) to[v] = T{(uint16_t)(at[slot * (V / 2) + v / 2] >> v % 2 * 16)};
    }
  }
  static constexpr float kSign = F == SOFTMIN ? -1 : 1;
  static constexpr float kNear = Near<T>::value;
  static __device__ float value(uint32_t word, int half) { return to_wide(T{(uint16_t)(word >> half * 16)}); }
};
