// column_fragment.cuh: a thread's vectors of a tile of columns in registers, their loads from global or shared memory,
// and their stores. `C` has the constants of config.cuh and those of an operation on columns (column_softmax.cuh,
// column_grad.cuh):
//
//   kOperands       how many tensors are read vector by vector, 1 or 2. Their types in registers are First and In
//   Loaded          the type of the first operand in memory
//   kTensors        how many tensors are read or written by vectors
//   kFirstTensor    the number of the first operand among these
//   kResultTensor   the number of the result, whose type is Out
#pragma once

#include "async_copy.cuh"
#include "column_tile.cuh"
#include "pipeline.cuh"
#include "score_map.cuh"

// Vectors as they were read.
template <class C, class T, int Vecs>
struct UnpackedColumnFragment {
  static constexpr int V = C::kVecSize;
  typedef Vector<T, V> Raw;
  Raw at[Vecs];
  __device__ void set(int i, Raw raw) { at[i] = raw; }
  __device__ void set(int i, int v, T value) { at[i].at[v] = value; }
  __device__ void fill(int i, T value) {
    unroll<V>([&](int v) { at[i].at[v] = value; });
  }
  __device__ void opaque_registers() {}
  __device__ T get(int i, int v) const { return at[i].at[v]; }
};
// Half types, two elements per register. (The compiler would split vectors of half elements, and wait for each load.)
template <class C, class T, int Vecs>
struct ColumnFragmentHalf2 {
  static constexpr int V = C::kVecSize;
  typedef Vector<uint32_t, (V + 1) / 2> Raw;
  Raw at[Vecs];
  __device__ void set(int i, Raw raw) { at[i] = raw; }
  __device__ void set(int i, int v, T value) {
    uint32_t& word = at[i].at[v / 2];
    word = v % 2 ? (word & 0xffff) | (uint32_t)value.bits << 16 : (word & 0xffff0000) | value.bits;
  }
  __device__ void fill(int i, T value) {
    unroll<V / 2>([&](int w) { at[i].at[w] = value.bits * 0x10001u; });
  }
  // Makes the compiler believe that the registers have changed between two passes. Otherwise it keeps the converted
  // elements of the first pass, in twice the registers.
  __device__ void opaque_registers() {
    unroll<Vecs>([&](int i) { unroll<V / 2>([&](int w) { asm volatile("" : "+r"(at[i].at[w])); }); });
  }
  __device__ T get(int i, int v) const { return get_half<T>(at[i].at[v / 2], v % 2); }
};
template <class C, class T>
constexpr bool is_half2 = sizeof(T) == 2 && (C::kVecSize > 1);
// How many registers a thread's vectors take. A lone element of a small type takes one too.
template <class C, class T>
constexpr int fragment_registers =
    sizeof(T) < 4 ? C::kVecs * ((C::kVecSize + 1) / 2) : C::kVecs * C::kVecSize * sizeof(T) / 4;
template <class C, class T, int Vecs>
struct ColumnFragment
    : Conditional<is_half2<C, T>, ColumnFragmentHalf2<C, T, Vecs>, UnpackedColumnFragment<C, T, Vecs>>::type {};

// An element of an operand. `Again`: it is converted a second time, with another instruction.
template <bool Again, class C, class T, int Vecs>
__device__ inline typename C::Acc element_value(const typename C::Operand& operand,
                                                const ColumnFragment<C, T, Vecs>& fragment, int i, int v) {
  if constexpr (Again && is_half2<C, T> && !C::Operand::kIsRounded)
    return operand.score(typename C::Acc(reconvert<T>(fragment.at[i].at[v / 2], v % 2)));
  else
    return operand(fragment.get(i, v));
}

// The address of a thread's vector in shared memory. The vectors of all operands of a slot are adjacent.
template <class C>
__device__ inline uint32_t smem_vec_address(int operand, int slot) {
  constexpr int kBytes = C::kVecSize * sizeof(typename C::In);
  return dynamic_smem_address() + ((slot * C::kOperands + operand) * C::kBlockThreads + threadIdx.x) * kBytes;
}

// Begins to copy the full vectors among the first `count` vectors of a tensor to shared memory.
template <class C, class T, int Tensors>
__device__ inline void copy_vecs(int operand, const T* from, const ThreadTile<C, Tensors>& tile, int tensor,
                                 int count) {
#pragma unroll 4
  for (int i = 0; i < count; ++i) {
    if (tile.is_full(i))
      AsyncCopy::start<C::kVecSize * sizeof(typename C::In)>(smem_vec_address<C>(operand, i),
                                                             from + tile.offset(tensor, i));
  }
}
// Copies the elements of a vector that exist to shared memory; the other elements become neutral.
template <class C, class T, int Tensors>
__device__ inline void copy_elements(uint32_t to, const T* at, const ThreadTile<C, Tensors>& tile, int q) {
  ColumnFragment<C, T, 1> fragment;
  fragment.fill(0, C::Operand::template neutral<T>());
  unroll<C::kVecSize>([&](int v) {
    if (tile.has_element(q, v)) fragment.set(0, v, at[v]);
  });
  store_smem(to, fragment.at[0]);
}
// Begins to copy vectors of all operands, stage by stage: from vector q on, to the slots from `begin` to `end`. Returns
// `bits` in a way that the compiler cannot see through, so that what depends on it is computed after the copies start.
template <class C, class T, int Tensors>
__device__ inline uint32_t copy_stages(const T* one, const T* other, const ThreadTile<C, Tensors>& tile, int tensor,
                                       int q, int begin, int end, uint32_t bits = 0) {
  const T* at[2] = {one + tile.offset(tensor, q), C::kOperands > 1 ? other + tile.offset(tensor + 1, q) : other};
  q -= begin;
#pragma unroll 1
  for (int c = begin; c < end; c += kStageVecs) {
    unroll<kStageVecs>([&](int i) {
      unroll<C::kOperands>([&](int o) {
        if (tile.is_full(q + c + i))
          AsyncCopy::start<C::kVecSize * sizeof(T)>(smem_vec_address<C>(o, c + i), at[o]);
        else if (C::kShifted && q + c + i < tile.count)
          copy_elements(smem_vec_address<C>(o, c + i), at[o], tile, q + c + i);
        at[o] = advance(at[o], tile.tiles.vec_strides[tensor + o]);
      });
    });
    AsyncCopy::commit();
    bits = bits > c ? bits : c;
  }
  return bits;
}
// Writes the elements of a stage back to shared memory.
template <class C, class T>
__device__ inline void write_back(const ColumnFragment<C, T, kStageVecs>& stage, int slot) {
  unroll<kStageVecs>([&](int i) { store_smem(smem_vec_address<C>(0, slot + i), stage.at[i]); });
}

// Loads a vector from global memory. (The compiler does not know that an opaque address is in global memory.) With
// `PrefetchL2` the neighbouring bytes, which a tile beside this one reads, are fetched into the L2 cache too.
template <class Raw, bool PrefetchL2 = false>
__device__ inline Raw load_global(const void* at) {
  constexpr int kBytes = sizeof(Raw);
  uint32_t words[4] = {};
  if constexpr (kBytes == 16 && PrefetchL2) {
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

template <class C>
constexpr bool can_prefetch_l2 = !C::kSlab && !C::kStrided && C::kVecSize * sizeof(typename C::In) == 16;

// Loads the vectors q, q + 1, ... of a tensor. Elements that do not exist become `neutral`.
template <class C, class T, int Vecs, int Tensors>
__device__ inline void load_vecs(ColumnFragment<C, T, Vecs>& fragment, const T* from,
                                 const ThreadTile<C, Tensors>& tile, int tensor, int q, T neutral) {
  typedef typename ColumnFragment<C, T, Vecs>::Raw Raw;
  const T* at = C::kStrided ? from : from + tile.offset(tensor, q);
  const auto move_on = [&] {
    if constexpr (!C::kStrided) at = advance(at, tile.tiles.vec_strides[tensor]);
  };
  if (!C::kStrided && tile.are_full(q, Vecs)) {
    if (can_prefetch_l2<C> && tile.tiles.is_narrow)
      unroll<Vecs>([&](int i) { fragment.set(i, load_global<Raw, true>(at)), move_on(); });
    else
      unroll<Vecs>([&](int i) { fragment.set(i, load_global<Raw>(at)), move_on(); });
    return;
  }
  unroll<Vecs>([&](int i) {
    if (tile.is_full(q + i)) {
      fragment.set(i, load_global<Raw>(C::kStrided ? from + tile.offset(tensor, q + i) : at));
    } else {
      fragment.fill(i, neutral);
      if constexpr (!C::kAligned && !C::kStrided) {
        unroll<C::kVecSize>([&](int v) {
          if (tile.has_element(q + i, v)) fragment.set(i, v, at[v]);
        });
      }
    }
    move_on();
  });
}
// The same for vectors whose full ones are in shared memory, from the address `smem` on.
template <class C, class T, int Vecs, int Tensors>
__device__ inline void load_vecs(ColumnFragment<C, T, Vecs>& fragment, const T* from,
                                 const ThreadTile<C, Tensors>& tile, int tensor, int q, T neutral, uint32_t smem) {
  constexpr int kStride = Pipeline<C, AsyncCopy>::kSlotBytes;
  const auto set_full = [&](int i) {
    fragment.set(i, load_smem<typename ColumnFragment<C, T, Vecs>::Raw>(smem + i * kStride));
  };
  if (tile.are_full(q, Vecs)) return unroll<Vecs>(set_full);
  unroll<Vecs>([&](int i) {
    if (tile.is_full(q + i)) return set_full(i);
    fragment.fill(i, neutral);
    if constexpr (!C::kAligned && !C::kStrided) {
      unroll<C::kVecSize>([&](int v) {
        if (tile.has_element(q + i, v)) fragment.set(i, v, from[tile.offset(tensor, q + i) + v]);
      });
    }
  });
}

// The same if all vectors are in shared memory, including those that are not full.
template <class C, class T, int Vecs, int Tensors>
__device__ inline void load_smem_vecs(ColumnFragment<C, T, Vecs>& fragment, const ThreadTile<C, Tensors>& tile, int q,
                                      T neutral, uint32_t smem) {
  unroll<Vecs>([&](int i) {
    fragment.fill(i, neutral);
    if (q + i < tile.count)
      fragment.set(i,
                   load_smem<typename ColumnFragment<C, T, Vecs>::Raw>(smem + i * Pipeline<C, AsyncCopy>::kSlotBytes));
  });
}

// The tensors that are read vector by vector.
template <class C>
struct Operands {
  const typename C::Loaded* first;
  const typename C::In* second;
  const ScoreMap* map;  // of scores
};

// A thread's vectors of the operands.
template <class C, int Vecs>
struct OperandFragments {
  typedef ThreadTile<C, C::kTensors> Tile;
  typedef typename C::First First;
  typedef typename C::In In;
  static constexpr bool kHasSecond = C::kOperands > 1;
  ColumnFragment<C, First, Vecs> first;
  ColumnFragment<C, In, kHasSecond ? Vecs : 1> second;

  // Loads the vectors q, q + 1, ... from global memory, or, with `smem`, from that address in shared memory. There all
  // operands of a vector are adjacent.
  template <class... Smem>
  __device__ void load(const Operands<C>& from, const Tile& tile, int q, Smem... smem) {
    constexpr int kOperandBytes = C::kBlockThreads * C::kVecSize * sizeof(In);
    load_vecs(first, from.first, tile, C::kFirstTensor, q, C::Operand::template neutral<First>(), smem...);
    if constexpr (kHasSecond)
      load_vecs(second, from.second, tile, C::kFirstTensor + 1, q, C::Operand::template neutral<In>(),
                smem + kOperandBytes...);
  }
  __device__ void load_from_smem(const Tile& tile, int q, uint32_t smem) {
    load_smem_vecs(first, tile, q, C::Operand::template neutral<First>(), smem);
    if constexpr (kHasSecond)
      load_smem_vecs(second, tile, q, C::Operand::template neutral<In>(),
                     smem + C::kBlockThreads * C::kVecSize * sizeof(In));
  }
  // Loads vectors of the two operands alternately, so that products of vectors that have arrived can be computed.
  __device__ void load_in_turn(const Operands<C>& from, const Tile& tile, int q) {
    if constexpr (!kHasSecond || C::kStrided) return load(from, tile, q);
    if (!tile.are_full(q, Vecs)) return load(from, tile, q);
    if (can_prefetch_l2<C> && tile.tiles.is_narrow)
      load_interleaved<true>(from, tile, q);
    else
      load_interleaved<false>(from, tile, q);
  }
  __device__ void opaque_registers() { first.opaque_registers(), second.opaque_registers(); }
  // Copies a stage into the vectors q, q + 1, ..., and back.
  __device__ void set_stage(int q, const OperandFragments<C, kStageVecs>& stage) {
    unroll<kStageVecs>([&](int i) {
      first.at[q + i] = stage.first.at[i];
      if constexpr (kHasSecond) second.at[q + i] = stage.second.at[i];
    });
  }
  __device__ void get_stage(int q, OperandFragments<C, kStageVecs>& stage) const {
    unroll<kStageVecs>([&](int i) {
      stage.first.at[i] = first.at[q + i];
      if constexpr (kHasSecond) stage.second.at[i] = second.at[q + i];
    });
  }

 private:
  template <bool PrefetchL2>
  __device__ void load_interleaved(const Operands<C>& from, const Tile& tile, int q) {
    if constexpr (kHasSecond) {
      const First* one = from.first + tile.offset(C::kFirstTensor, q);
      const In* other = from.second + tile.offset(C::kFirstTensor + 1, q);
      unroll<Vecs>([&](int i) {
        first.set(i, load_global<typename decltype(first)::Raw, PrefetchL2>(one));
        second.set(i, load_global<typename decltype(second)::Raw, PrefetchL2>(other));
        one = advance(one, tile.tiles.vec_strides[C::kFirstTensor]);
        other = advance(other, tile.tiles.vec_strides[C::kFirstTensor + 1]);
      });
    }
  }
};

// Stores a vector if `condition` holds, without a branch. With one, the compiler would move the computation of the
// vector into the branch, and compute one vector at a time.
template <class T, int Count>
__device__ inline void store_if(bool condition, T* at, Vector<T, Count> vector) {
  constexpr int kBytes = sizeof(vector);
  uint32_t words[4] = {};
  memcpy(words, &vector, kBytes);
  if constexpr (kBytes == 16) {
    asm volatile("{\n.reg .pred yes;\nsetp.ne.u32 yes, %0, 0;\n@yes st.global.v4.b32 [%1], {%2, %3, %4, %5};\n}" ::"r"(
                     (uint32_t)condition),
                 "l"(at), "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
                 : "memory");
  } else if constexpr (kBytes == 8) {
    asm volatile("{\n.reg .pred yes;\nsetp.ne.u32 yes, %0, 0;\n@yes st.global.v2.b32 [%1], {%2, %3};\n}" ::"r"(
                     (uint32_t)condition),
                 "l"(at), "r"(words[0]), "r"(words[1])
                 : "memory");
  } else {
    if (condition) *reinterpret_cast<Vector<T, Count>*>(at) = vector;
  }
}

// Stores the vectors q, q + 1, ..., which consist of `result(i, v)`, beginning at `at`. Returns the address for the
// next.
template <int Vecs, class C, class T, int Tensors, class F>
__device__ inline T* store_vecs_at(T* at, T* to, const ThreadTile<C, Tensors>& tile, int tensor, int q, F result) {
  constexpr int V = C::kVecSize;
  unroll<Vecs>([&](int i) {
    const bool is_full = tile.is_stored_whole(q + i);
    if constexpr (C::kStrided) at = to + (is_full ? tile.offset(tensor, q + i) : 0);
    Vector<T, V> made;
    if constexpr (is_half2<C, T>) {
      Vector<uint32_t, (V + 1) / 2> words;
      unroll<V / 2>([&](int w) { words.at[w] = pack_half2<T>(result(i, 2 * w), result(i, 2 * w + 1)); });
      memcpy(&made, &words, sizeof(made));
    } else {
      unroll<V>([&](int v) { made.at[v] = from_acc<T>(result(i, v)); });
    }
    store_if(is_full, at, made);
    if constexpr (!C::kAligned && !C::kStrided) {
      if (!is_full) {
        unroll<V>([&](int v) {
          if (tile.has_element(q + i, v)) at[v] = made.at[v];
        });
      }
    }
    if constexpr (!C::kStrided) at = advance(at, tile.tiles.vec_strides[tensor]);
  });
  return at;
}
template <int Vecs, class C, class T, int Tensors, class F>
__device__ inline void store_vecs(T* to, const ThreadTile<C, Tensors>& tile, int tensor, int q, F result) {
  store_vecs_at<Vecs>(C::kStrided ? to : to + tile.offset(tensor, q), to, tile, tensor, q, result);
}
