// online.cuh: columns whose elements come one chunk after another, worked on while later ones are on their way.
#pragma once

#include "held.cuh"

// All vectors of a thread come through its shelf, chunk after chunk: the first kRegisters go on to registers, and into
// their places come others, the last of which stay there. (Loads into registers would be waited for all together: the
// compiler has six counters for them, and across a branch one.) `Held` has all operands of so many vectors.
constexpr int kRegisters = (SLOTS + kChunk - 1) / kChunk;  // chunks that go on to registers
constexpr int kMany = 6, kFew = 4;                         // chunks on their way, where there is room for so many

template <class T, int Tensors>
__device__ inline void fetch_chunk(int operand, const T* from, const Place<Tensors>& place, int tensor, int q, int to) {
  const T* at = kStrided ? from : from + place.element(tensor, q);
  const uint32_t there = place_of(operand, to);
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    if constexpr (kStrided) at = from + (place.is_whole(q + i) ? place.element(tensor, q + i) : 0);
    if (place.is_whole(q + i)) fetch<V * sizeof(T)>(there + i * (kOperands * THREADS * V * (int)sizeof(T)), at);
    if constexpr (!kStrided) at = next(at, place.tiles.jump[tensor]);
  }
}
// Takes the vectors q, q + 1, ..., which wait from the slot `waits` on.
template <class T, int Slots, int Tensors>
__device__ inline void take_chunk(Held<T, Slots>& held, const T* from, const Place<Tensors>& place, int tensor, int q,
                                  T none, int operand, int waits) {
  typedef typename Held<T, Slots>::Raw Raw;
  if (!place.all_whole(q, Slots)) return take<true>(held, from, place, tensor, q, none, operand, waits);
  const uint32_t there = place_of(operand, waits);
#pragma unroll
  for (int i = 0; i < Slots; ++i) held.put(i, load_shared<Raw>(there + i * (kOperands * THREADS * (int)sizeof(Raw))));
}

// Which chunk is where. `ask(q, slot)` begins to fetch the vectors from q on to the slots from `slot` on.
struct Ring {
  int places, lead;       // chunks: in the shelf, and on their way
  int coming, from, to;   // the next to ask for; the places of the next to take, and of that

  template <class Ask>
  __device__ void begin(int shelf, Ask ask) {
    places = shelf / kChunk, lead = places >= kMany ? kMany : places >= kFew ? kFew : places;
    coming = from = to = 0;
#pragma unroll 1
    for (int k = 0; k < lead; ++k) refill(ask);
  }
  static __device__ int first_of(int chunk) {
    return SLOTS % kChunk == 0 || chunk < kRegisters ? chunk * kChunk : SLOTS + (chunk - kRegisters) * kChunk;
  }
  // Once the next chunk has been taken.
  template <class Ask>
  __device__ void refill(Ask ask) {
    if (coming < kRegisters + places) ask(first_of(coming), to * kChunk);
    commit_copies();
    ++coming, to = after(to);
  }
  // Until the next chunk is there.
  __device__ void await() const {
    if (lead == kMany)
      await_copies<kMany - 1>();
    else if (lead == kFew)
      await_copies<kFew - 1>();
    else
      await_copies<0>();
  }
  // Its slot, again and again from the first that stays in the shelf.
  __device__ int next() {
    const int slot = from * kChunk;
    from = after(from);
    return slot;
  }

 private:
  __device__ int after(int at) const { return at + 1 < places ? at + 1 : 0; }
};

// What sums of exponentials are relative to, as float results and doubles have it: a value x. And the exponentials:
// all where no element is more than kSlack above it. For all that a maximum may be there is one: for -inf one that only
// -inf is below.
template <bool Half, class A>
struct Base {
  static __device__ A lowest(float) { return -3.40282347e38f; }
  static __device__ A lowest(double) { return -1.7976931348623157e308; }
  static __device__ A of(A m) { return m == INFINITY_ ? A(0) : max_(m, lowest(m)); }
  static __device__ A above(A x, A base) { return x - base; }
  static __device__ A exp(A x, A base) { return exp_to_add(x - base); }
  static __device__ A between(A base, A other) { return exp_to_add(base - other); }
  static __device__ A between_value(A base, A x) { return exp_to_add(base - x); }
};
// Of half results x log2(e): an exponential is one fused multiply-add, and exact in what it is relative to.
template <>
struct Base<true, float> {
  static __device__ float of(float m) { return m == INFINITY_ ? 0 : fmaxf(m * kLog2e, -3.40282347e38f); }
  static __device__ float above(float x, float base) { return fmaf(x, kLog2e, -base); }
  static __device__ float exp(float x, float base) { return exp2_(fmaf(x, kLog2e, -base)); }
  static __device__ float between(float base, float other) { return exp2_(base - other); }
  static __device__ float between_value(float base, float x) { return exp2_(fmaf(-x, kLog2e, base)); }
};

template <class A>
__device__ inline Total<A> add(Total<A> total, A value) {
  const A sum = total.sum + value, part = sum - total.sum;
  return {sum, total.rest + ((total.sum - (sum - part)) + (value - part))};
}

// The states of a thread's columns. Sums are relative not to the maximum but to what it was when an element was last so
// much above that: hardly any chunk but the first has them scaled.
template <class Out>
struct Online {
  typedef typename Accumulator<Out>::type A;
  typedef typename Adder<Out>::type L;
  typedef Base<sizeof(Out) == 2, A> Scale;
  static constexpr int kSlack = 8;
  A m[V], base[V];
  L l[V];

  // The maxima of the first chunk.
  __device__ void begin(const A (&here)[V]) {
#pragma unroll
    for (int v = 0; v < V; ++v) m[v] = here[v], base[v] = Scale::of(here[v]), l[v] = L{};
  }
  // Of another, before its elements are added.
  __device__ void raise(const A (&here)[V]) {
    bool higher = false;
#pragma unroll
    for (int v = 0; v < V; ++v) m[v] = max_(m[v], here[v]), higher |= Scale::above(here[v], base[v]) > kSlack;
    if (!higher) return;
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const A before = base[v];
      base[v] = Scale::of(m[v]);
      l[v] = scaled(l[v], Scale::between(before, base[v]));
    }
  }
  // Adds `element(0)`, ... of a column, as many as `some` has.
  template <class T, int Slots, class F>
  __device__ void add_up(int v, const Held<T, Slots>&, F element) {
    l[v] = add(l[v], plain_sum<Slots, 0>([&](int i) { return Scale::exp(element(i), base[v]); }));
  }
  // The sum relative to `top`, which is no less than the maximum.
  __device__ A below(int v, A top) const {
    return value_of(scaled(l[v], Scale::between_value(base[v], shift(top))));
  }
};
