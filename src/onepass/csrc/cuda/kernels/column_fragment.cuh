// column_fragment.cuh: a thread's vectors of a tile of columns: how they come, wait and go.
#pragma once

#include "column_tile.cuh"
#include "async_copy.cuh"

// Vectors as they were read: halves two in a register. (As a vector of halves it would be taken apart, and each load
// waited for.)
template <class T, int Slots, bool Paired = sizeof(T) == 2 && (V > 1)>
struct Held {
  typedef Vector<T, V> Raw;
  Raw at[Slots];
  __device__ void put(int slot, Raw raw) { at[slot] = raw; }
  __device__ void put(int slot, int v, T value) { at[slot].at[v] = value; }
  __device__ void fill(int slot, T value) {
#pragma unroll
    for (int v = 0; v < V; ++v) at[slot].at[v] = value;
  }
  __device__ void forget() {}
  __device__ T get(int slot, int v) const { return at[slot].at[v]; }
  __device__ T again(int slot, int v) const { return at[slot].at[v]; }
};
template <class T, int Slots>
struct Held<T, Slots, true> {
  typedef Vector<uint32_t, (V + 1) / 2> Raw;
  Raw at[Slots];
  __device__ void put(int slot, Raw raw) { at[slot] = raw; }
  __device__ void put(int slot, int v, T value) {
    uint32_t& word = at[slot].at[v / 2];
    word = v % 2 ? (word & 0xffff) | (uint32_t)value.bits << 16 : (word & 0xffff0000) | value.bits;
  }
  __device__ void fill(int slot, T value) {
#pragma unroll
    for (int w = 0; w < V / 2; ++w) at[slot].at[w] = value.bits * 0x10001u;
  }
  // Between two passes: else the compiler keeps what it has widened in the first, in twice the registers.
  __device__ void forget() {
#pragma unroll
    for (int i = 0; i < Slots; ++i) {
#pragma unroll
      for (int w = 0; w < V / 2; ++w) asm volatile("" : "+r"(at[i].at[w]));
    }
  }
  __device__ T get(int slot, int v) const { return T{(uint16_t)(at[slot].at[v / 2] >> v % 2 * 16)}; }
};

constexpr int kChunk = 4;  // vectors that are taken from the shelf at a time

// A chunk to where the vectors q, q + 1, ... are kept, or from there.
template <class T, int Slots>
__device__ inline void keep(Held<T, Slots>& held, int q, const Held<T, kChunk>& chunk) {
#pragma unroll
  for (int i = 0; i < kChunk; ++i) held.at[q + i] = chunk.at[i];
}
template <class T, int Slots>
__device__ inline void kept(const Held<T, Slots>& held, int q, Held<T, kChunk>& chunk) {
#pragma unroll
  for (int i = 0; i < kChunk; ++i) chunk.at[i] = held.at[q + i];
}

// Where a thread's vectors wait in shared memory, each vector of all operands together.
__device__ inline uint32_t place_of(int operand, int slot) {
  constexpr int kBytes = V * sizeof(IN);
  return shelf_address() + ((slot * kOperands + operand) * THREADS + threadIdx.x) * kBytes;
}
// From a thread's vector to its next. Opaque: the compiler would else compute each address anew, in ten instructions.
template <class T>
__device__ inline T* next(T* at, int64_t step) {
  at += step;
  asm volatile("" : "+l"(at));
  return at;
}

// Begins to fetch the whole one of the vectors q, q + 1, ... of a tensor to the slots 0, 1, ...
template <class T, int Tensors>
__device__ inline void fetch_vectors(int operand, const T* from, const Place<Tensors>& place, int tensor, int q,
                                     int count) {
#pragma unroll 4
  for (int i = 0; i < count; ++i) {
    if (place.is_whole(q + i)) fetch<V * sizeof(IN)>(place_of(operand, i), from + place.element(tensor, q + i));
  }
}
// The same a chunk at a time, from q on: those for the shelf's slots from `from` to `to`. Returns `bits`, as the
// compiler does not know: what depends on it comes later.
template <class T, int Tensors>
__device__ inline uint32_t fetch_chunks(const T* one, const T* other, const Place<Tensors>& place, int tensor, int q,
                                        int from, int to, uint32_t bits = 0) {
  const T* at[2] = {one + place.element(tensor, q), kOperands > 1 ? other + place.element(tensor + 1, q) : other};
  q -= from;
#pragma unroll 1
  for (int c = from; c < to; c += kChunk) {
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
#pragma unroll
      for (int o = 0; o < kOperands; ++o) {
        if (place.is_whole(q + c + i)) fetch<V * sizeof(T)>(place_of(o, c + i), at[o]);
        at[o] = next(at[o], place.tiles.jump[tensor + o]);
      }
    }
    commit_copies();
    bits = bits > c ? bits : c;
  }
  return bits;
}
// Puts a chunk back there.
template <class T>
__device__ inline void shelve(const Held<T, kChunk>& chunk, int from) {
#pragma unroll
  for (int i = 0; i < kChunk; ++i) store_shared(place_of(0, from + i), chunk.at[i]);
}

// Loads a vector of global memory, which the compiler does not know an opaque address to be of. `Near`: into the L2
// cache comes also what lies beside it, for a tile beside this one.
template <class Raw, bool Near = false>
__device__ inline Raw load_global(const void* at) {
  constexpr int kBytes = sizeof(Raw);
  uint32_t words[4] = {};
  if constexpr (kBytes == 16 && Near) {
    asm volatile("ld.global.L2::256B.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "l"(at));
  } else if constexpr (kBytes == 16) {
    asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "l"(at));
  } else if constexpr (kBytes == 8) {
    asm volatile("ld.global.v2.b32 {%0, %1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "l"(at));
  } else {
    return *reinterpret_cast<const Raw*>(at);
  }
  Raw raw;
  memcpy(&raw, words, kBytes);
  return raw;
}

constexpr bool kNears = !kSlab && !kStrided && V * sizeof(IN) == 16;

// Takes the vectors q, q + 1, ... of a tensor, of which those that are not there become `none`. Whole ones may wait in
// shared memory, from the slot `waits` on.
template <bool Waits, class T, int Slots, int Tensors>
__device__ inline void take(Held<T, Slots>& held, const T* from, const Place<Tensors>& place, int tensor, int q, T none,
                            int operand, int waits) {
  typedef typename Held<T, Slots>::Raw Raw;
  const T* at = kStrided ? from : from + place.element(tensor, q);
  const auto whole = [&](int i) {
    if constexpr (Waits)
      return load_shared<Raw>(place_of(operand, waits + i));
    else
      return load_global<Raw>(kStrided ? from + place.element(tensor, q + i) : at);
  };
  if (!kStrided && place.all_whole(q, Slots)) {
    if (kNears && !Waits && place.tiles.narrow) {
#pragma unroll
      for (int i = 0; i < Slots; ++i) held.put(i, load_global<Raw, true>(at)), at = next(at, place.tiles.jump[tensor]);
    } else {
#pragma unroll
      for (int i = 0; i < Slots; ++i) held.put(i, whole(i)), at = next(at, place.tiles.jump[tensor]);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < Slots; ++i) {
    if (place.is_whole(q + i)) {
      held.put(i, whole(i));
    } else {
      held.fill(i, none);
      if constexpr (!kFull && !kStrided) {
#pragma unroll
        for (int v = 0; v < V; ++v) {
          if (place.has(q + i, v)) held.put(i, v, at[v]);
        }
      }
    }
    if constexpr (!kStrided) at = next(at, place.tiles.jump[tensor]);
  }
}

// Stores a vector, if so. Not by a branch: the compiler would move into it what is stored, and work on one vector at a
// time.
template <class T, int Count>
__device__ inline void store_if(bool yes, T* at, Vector<T, Count> vector) {
  constexpr int kBytes = sizeof(vector);
  uint32_t words[4] = {};
  memcpy(words, &vector, kBytes);
  if constexpr (kBytes == 16) {
    asm volatile("{\n.reg .pred yes;\nsetp.ne.u32 yes, %0, 0;\n@yes st.global.v4.b32 [%1], {%2, %3, %4, %5};\n}" ::"r"(
                     (uint32_t)yes),
                 "l"(at), "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
                 : "memory");
  } else if constexpr (kBytes == 8) {
    asm volatile(
        "{\n.reg .pred yes;\nsetp.ne.u32 yes, %0, 0;\n@yes st.global.v2.b32 [%1], {%2, %3};\n}" ::"r"((uint32_t)yes),
        "l"(at), "r"(words[0]), "r"(words[1])
        : "memory");
  } else {
    if (yes) *reinterpret_cast<Vector<T, Count>*>(at) = vector;
  }
}

// Stores the vectors q, q + 1, ..., the results of `result(slot, v)`, from `at` on: where the next is to go.
template <int Slots, class T, int Tensors, class F>
__device__ inline T* give_from(T* at, T* to, const Place<Tensors>& place, int tensor, int q, F result) {
#pragma unroll
  for (int i = 0; i < Slots; ++i) {
    const bool whole = place.is_whole(q + i);
    if constexpr (kStrided) at = to + (whole ? place.element(tensor, q + i) : 0);
    Vector<T, V> made;
    if constexpr (sizeof(T) == 2 && V > 1) {
      Vector<uint32_t, (V + 1) / 2> pairs;
#pragma unroll
      for (int w = 0; w < V / 2; ++w) pairs.at[w] = pack<T>(result(i, 2 * w), result(i, 2 * w + 1));
      memcpy(&made, &pairs, sizeof(made));
    } else {
#pragma unroll
      for (int v = 0; v < V; ++v) made.at[v] = narrow<T>(result(i, v));
    }
    store_if(whole, at, made);
    if constexpr (!kFull && !kStrided) {
      if (!whole) {
#pragma unroll
        for (int v = 0; v < V; ++v) {
          if (place.has(q + i, v)) at[v] = made.at[v];
        }
      }
    }
    if constexpr (!kStrided) at = next(at, place.tiles.jump[tensor]);
  }
  return at;
}
template <int Slots, class T, int Tensors, class F>
__device__ inline void give(T* to, const Place<Tensors>& place, int tensor, int q, F result) {
  give_from<Slots>(kStrided ? to : to + place.element(tensor, q), to, place, tensor, q, result);
}
