// kept.cuh: a thread's elements of a row while the state of the row is merged.
#pragma once

#include "packed.cuh"
#include "slots.cuh"

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
