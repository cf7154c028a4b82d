// row_fragment.cuh: the elements of a row that one thread keeps in registers, and in shared memory, while the state of
// the row is merged: how they are loaded, kept (two half elements in a register, where that is exact), and stored.
#pragma once

#include "async_copy.cuh"

// Does `any(i, position)` for each of a thread's vectors, whose first elements are `step` apart; `full` instead for
// those that are whole by one look at the lot: all of a few where a row has whole warps, else those between the first
// and the last. Ten instructions a vector less. Where rows are whole vectors a look is one comparison, and a few
// vectors get one each: threads of the last warp that have one fewer take no other way then.
template <int V, int Slots, class Index, class Full, class Any>
__device__ inline void for_slots(Index first, Index step, Index n, Full full, Any any) {
  constexpr bool kFew = Slots <= 4, kAll = LANES == 0 && kFew && !kWhole;
  constexpr bool kMiddle = Slots > 2 && !(kWhole && kFew);
  if (!kApart && kAll && first >= 0 && first + (Slots - 1) * step + V <= n) {
#pragma unroll
    for (int i = 0; i < Slots; ++i) full(i, first + i * step);
  } else if (!kApart && !kAll && kMiddle && whole<V>(first + (Slots - 2) * step, n)) {
    kWhole ? full(0, first) : any(0, first);
#pragma unroll
    for (int i = 1; i < Slots - 1; ++i) full(i, first + i * step);
    any(Slots - 1, first + (Slots - 1) * step);
  } else {
#pragma unroll
    for (int i = 0; i < Slots; ++i) any(i, first + i * step);
  }
}

// What both ways of keeping elements share: how they come. `Self` has Raw, a vector as it is read, put(slot, raw), and
// put_part(slot, at, first, n): element by element, from where they are.
template <class Self, int F, int V, int Slots, class In>
struct Loads {
  template <class Index>
  __device__ void load(const In* row, Index first, Index step, Index n) {
    for_slots<V, Slots>(
        first, step, n, [&](int i, Index at) { self()->put(i, Self::template read<false>(row + at)); },
        [&](int i, Index at) {
          if (in_one<V>(at, n))
            self()->put(i, Self::template read<false>(row + at));
          else
            self()->put_part(i, row + at, at, n);
        });
  }
  // The same from the shelf, from its slot `shelf` on.
  template <class Index>
  __device__ void take(int shelf, Index first, Index step, Index n) {
    typedef Shelf<V, In> Shared;
    for_slots<V, Slots>(
        first, step, n, [&](int i, Index) { put_whole(i, Shared::slot(shelf + i)); },
        [&](int i, Index at) {
          if (whole<V>(at, n))
            put_whole(i, Shared::slot(shelf + i));
          else
            self()->put_part(i, Shared::slot(shelf + i), at, n);
        });
  }

 private:
  __device__ Self* self() { return static_cast<Self*>(this); }
  __device__ void put_whole(int slot, const In* at) {
    self()->put(slot, *reinterpret_cast<const typename Self::Raw*>(at));
  }
};

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

// In the accumulator's type. With KeepExp their exponentials take their place, so that exp is called once an element.
template <int F, int V, int Slots, class In, class Out, bool KeepExp>
struct Wide : Loads<Wide<F, V, Slots, In, Out, KeepExp>, F, V, Slots, In> {
  typedef typename Accumulator<Out>::type A;
  typedef Vector<In, V> Raw;
  template <bool Once>
  static __device__ Raw read(const In* at) {
    return ::load<In, V, Once>(at);
  }
  A at[Slots * V];

  __device__ void put(int slot, Raw raw) {
    const A sign = F == SOFTMIN ? A(-1) : A(1);
#pragma unroll
    for (int v = 0; v < V; ++v) at[slot * V + v] = sign * load_value<In, Out>(raw.at[v]);
  }
  // Back to the shelf, where elements are of the accumulator's type.
  __device__ void give(int shelf) const {
#pragma unroll
    for (int i = 0; i < Slots; ++i) {
      Vector<A, V> raw;
#pragma unroll
      for (int v = 0; v < V; ++v) raw.at[v] = at[i * V + v];
      *reinterpret_cast<Vector<A, V>*>(Shelf<V, In>::slot(shelf + i)) = raw;
    }
  }
  template <class Index>
  __device__ void put_part(int slot, const In* from, Index first, Index n) {
    Raw raw;
#pragma unroll
    for (int v = 0; v < V; ++v) raw.at[v] = !kWhole && inside(first + v, n) ? from[v] : nothing<F, In>();
    put(slot, raw);
  }
  __device__ void forget() {}
  __device__ A maximum() const {
    A m = -INFINITY_;
#pragma unroll
    for (int i = 0; i < Slots * V; ++i) m = max_(at[i], m);
    return m;
  }
  __device__ void lower(A) {}
  // The sum of exp(x - m), m being the maximum of the row.
  __device__ typename Adder<Out>::type sum(A m) {
    const A s = KeepExp ? shift(m) : shift_to_add(m);
    return tree_sum<Out, Slots * V>([&](int i) {
      if (!KeepExp) return exp_to_add(at[i] - s);
      return at[i] = exp_<Out>(at[i] - s);
    });
  }
  // The same for any m that is not below these elements, which stay as they are: a part of the sum of many threads.
  __device__ A sum_below(A m) const {
    const A s = shift_to_add(m);
    return plain_sum<Slots * V, 0>([&](int i) { return exp_to_add(at[i] - s); });
  }
  template <class Index>
  __device__ void finish_and_store(State<A> state, Out* row, Index first, Index step, Index n) {
    finish(state);
    store(row, first, step, n);
  }
  // The results take the place of the elements.
  __device__ void finish(State<A> state) {
    const Finish<F, Out, A> finish(state);
#pragma unroll
    for (int i = 0; i < Slots * V; ++i) at[i] = KeepExp ? finish.from_exp(at[i]) : finish(at[i]);
  }
  template <class Index>
  __device__ void store(Out* row, Index first, Index step, Index n) const {
    for_slots<V, Slots>(
        first, step, n, [&](int i, Index at) { ::store(row + at, result(i)); },
        [&](int i, Index at) { store_window(row, at, n, result(i)); });
  }
  // One whole vector.
  __device__ void store_vector(int slot, Out* to) const { store_window<V, Out, int>(to, 0, V, result(slot)); }

 private:
  __device__ Vector<Out, V> result(int slot) const {
    Vector<Out, V> made;
#pragma unroll
    for (int v = 0; v < V; ++v) made.at[v] = narrow<Out>(at[slot * V + v]);
    return made;
  }
};

// What keeps the elements of a call. A vector of one half cannot be packed.
template <int F, int V, int Slots, class In, class Out, bool KeepExp>
struct Keep {
  typedef Wide<F, V, Slots, In, Out, KeepExp && (F == SOFTMAX || F == SOFTMIN)> type;
};
template <int F, int V, int Slots, class T, bool KeepExp>
struct KeepHalves {
  typedef Packed<F, V, Slots, T> type;
};
template <int F, int Slots, class T, bool KeepExp>
struct KeepHalves<F, 1, Slots, T, KeepExp> {
  typedef Wide<F, 1, Slots, T, T, KeepExp && (F == SOFTMAX || F == SOFTMIN)> type;
};
template <int F, int V, int Slots, bool KeepExp>
struct Keep<F, V, Slots, half_t, half_t, KeepExp> : KeepHalves<F, V, Slots, half_t, KeepExp> {};
template <int F, int V, int Slots, bool KeepExp>
struct Keep<F, V, Slots, bfloat16_t, bfloat16_t, KeepExp> : KeepHalves<F, V, Slots, bfloat16_t, KeepExp> {};
