// row_fragment.cuh: the elements of a row that one thread keeps in registers while the state of the row is reduced: how
// they are loaded, kept (two half elements per register, where that is exact) and stored. `C` is the ForwardConfig; the
// backward has fragments of its own (row_backward.cuh), of which Half2Vecs is a part.
#pragma once

#include "async_copy.cuh"
#include "row_map.cuh"
#include "vector_access.cuh"

// Calls `any(i, position)` for each of a thread's vectors, whose first elements are `step` apart, or `full(i,
// position)` for those that one test shows to be full: all of a few vectors where whole warps share a row, otherwise
// those between the first and the last. That saves ten instructions per vector. Where rows are whole vectors a test is
// one comparison, and each of a few vectors gets its own: threads of the last warp with one vector fewer then do not
// diverge.
template <class C, int Vecs, class Index, class Full, class Any>
__device__ inline void for_each_vec(Index first, Index step, Index n, Full full, Any any) {
  constexpr bool kFew = Vecs <= 4, kTestAll = C::kThreadsPerRow == 0 && kFew && !C::kAligned;
  constexpr bool kTestMiddle = Vecs > 2 && !(C::kAligned && kFew);
  if (!C::kScalar && kTestAll && first >= 0 && first + (Vecs - 1) * step + C::kVecSize <= n) {
#pragma unroll
    for (int i = 0; i < Vecs; ++i) full(i, first + i * step);
  } else if (!C::kScalar && !kTestAll && kTestMiddle && is_full<C>(first + (Vecs - 2) * step, n)) {
    C::kAligned ? full(0, first) : any(0, first);
#pragma unroll
    for (int i = 1; i < Vecs - 1; ++i) full(i, first + i * step);
    any(Vecs - 1, first + (Vecs - 1) * step);
  } else {
#pragma unroll
    for (int i = 0; i < Vecs; ++i) any(i, first + i * step);
  }
}

// The loads and stores of both fragments. `Self` has Raw, a vector as it is read, set(i, raw, operand), set_elements(i,
// at, first, n, operand), which reads element by element, and vec(i), a vector of results.
template <class C, class Self, int Vecs>
struct FragmentAccess {
  template <class Index>
  __device__ void load(const ForwardRow<C>& row, Index first, Index step, Index n) {
    // Each path has a lambda of its own: the compiler takes more instructions where they share one.
    for_each_vec<C, Vecs>(
        first, step, n, [&](int i, Index at) { self()->set(i, read_inside(row, at), row.operand, at); },
        [&](int i, Index at) {
          if (moves_as_vector<C>(at, n))
            self()->set(i, read_inside(row, at), row.operand, at);
          else
            self()->set_elements(i, row.x + at, at, n, row.operand);
        });
  }
  // The same from shared memory, from the vector number `smem_vec` on.
  template <class Index>
  __device__ void load_smem(const ForwardRow<C>& row, int smem_vec, Index first, Index step, Index n) {
    for_each_vec<C, Vecs>(
        first, step, n, [&](int i, Index at) { set_full(i, SmemVecs<C>::slot(smem_vec + i), row, at); },
        [&](int i, Index at) {
          if (is_full<C>(at, n))
            set_full(i, SmemVecs<C>::slot(smem_vec + i), row, at);
          else
            self()->set_elements(i, SmemVecs<C>::slot(smem_vec + i), at, n, row.operand);
        });
  }
  template <class Index>
  __device__ void store(typename C::Out* row, Index first, Index step, Index n) const {
    const Self& self = static_cast<const Self&>(*this);
    for_each_vec<C, Vecs>(
        first, step, n, [&](int i, Index at) { store_vector(row + at, self.vec(i)); },
        [&](int i, Index at) { store_predicated<C>(row, at, n, self.vec(i)); });
  }

 private:
  __device__ Self* self() { return static_cast<Self*>(this); }
  // A vector of a row. One that is outside the row's window is not read.
  template <class Index>
  static __device__ auto read_inside(const ForwardRow<C>& row, Index at) {
    if constexpr (!C::Operand::kIsPositional) {
      return Self::template read<false>(row.x + at);
    } else {
      typename Self::Raw raw = {};
      if (row.operand.overlaps(at)) raw = Self::template read<false>(row.x + at);
      return raw;
    }
  }
  template <class Index>
  __device__ void set_full(int i, const typename C::In* from, const ForwardRow<C>& row, Index at) {
    self()->set(i, *reinterpret_cast<const typename Self::Raw*>(from), row.operand, at);
  }
};

// The vectors of a thread, of half elements to half results: as they were read, but scored, two elements per register.
// (The compiler splits vectors of half elements, and waits for each load.)
template <class C, int Vecs>
struct Half2Vecs {
  typedef typename C::In In;
  typedef typename C::Out Out;
  typedef typename C::Operand Operand;
  static constexpr int V = C::kVecSize, kWords = V / 2;
  typedef Vector<uint32_t, kWords> Raw;
  uint32_t at[Vecs * kWords];

  template <bool EvictFirst>
  static __device__ Raw read(const In* at) {
    return load_vector<uint32_t, kWords, EvictFirst>(at);
  }
  __device__ void set(int i, Raw raw, const Operand& operand, int64_t = 0) {
    unroll<kWords>([&](int w) { at[i * kWords + w] = operand.score.apply_half2(raw.at[w]); });
  }
  template <class Index>
  __device__ void set_elements(int i, const In* from, Index first, Index n, const Operand& operand) {
    const auto bits = [&](int v) -> uint32_t {
      return (!C::kAligned && is_inside(first + v, n) ? from[v] : Operand::template neutral<In>()).bits;
    };
    Raw raw;
    unroll<kWords>([&](int w) { raw.at[w] = bits(2 * w) | bits(2 * w + 1) << 16; });
    set(i, raw, operand, first);
  }
  // Hides between two passes that the registers are unchanged: otherwise the compiler keeps the converted elements of
  // the first pass, in twice the registers.
  __device__ void opaque_registers() {
    unroll<Vecs * kWords>([&](int w) { asm volatile("" : "+r"(at[w])); });
  }
  __device__ float operator[](int i) const { return to_acc(get_half<In>(at[i / 2], i % 2)); }
  __device__ float reconverted(int i) const { return reconvert<In>(at[i / 2], i % 2); }
  // The results take the place of the elements.
  template <class F>
  __device__ void replace(int i, F result) {
#pragma unroll
    for (int w = i * kWords; w < (i + 1) * kWords; ++w) at[w] = pack_half2<Out>(result(2 * w), result(2 * w + 1));
  }
  __device__ Raw vec(int i) const {
    Raw made;
    unroll<kWords>([&](int w) { made.at[w] = at[i * kWords + w]; });
    return made;
  }
};

// The vectors of a thread in the accumulator's type.
template <class C, int Vecs>
struct AccVecs {
  typedef typename C::In In;
  typedef typename C::Out Out;
  typedef typename C::Acc A;
  typedef typename C::Operand Operand;
  static constexpr int V = C::kVecSize;
  typedef Vector<In, V> Raw;
  A at[Vecs * V];

  template <bool EvictFirst>
  static __device__ Raw read(const In* at) {
    return load_vector<In, V, EvictFirst>(at);
  }
  // `first` is the element of the row that the vector begins with; `Full`: all its elements are the row's.
  template <bool Full = true, class Index = int>
  __device__ void set(int i, Raw raw, const Operand& operand, [[maybe_unused]] Index first = 0) {
    if constexpr (Operand::kIsPositional)
      operand.template score<Full>(raw, (int)first, at + i * V);
    else
      unroll<V>([&](int v) { at[i * V + v] = operand(raw.at[v]); });
  }
  template <class Index>
  __device__ void set_elements(int i, const In* from, Index first, Index n, const Operand& operand) {
    if constexpr (C::kAligned && Operand::kIsPositional) {  // no element is the row's
      unroll<V>([&](int v) { at[i * V + v] = -infinity(); });
      return;
    }
    Raw raw;
    unroll<V>([&](int v) {
      raw.at[v] = !C::kAligned && is_inside(first + v, n) ? from[v] : Operand::template neutral<In>();
    });
    set<false>(i, raw, operand, first);
  }
  __device__ void opaque_registers() {}
  __device__ A operator[](int i) const { return at[i]; }
  __device__ A reconverted(int i) const { return at[i]; }
  template <class F>
  __device__ void replace(int i, F result) {
#pragma unroll
    for (int e = i * V; e < (i + 1) * V; ++e) at[e] = result(e);
  }
  __device__ Vector<Out, V> vec(int i) const {
    Vector<Out, V> made;
    unroll<V>([&](int v) { made.at[v] = from_acc<Out>(at[i * V + v]); });
    return made;
  }
};

// Half types to the same half type, two elements per register, so that a row takes half the registers. exp is called
// twice per element.
//
// exp(x - m) is exp2(x * log2(e) - m * log2(e)): one fused multiply-add before the exponential, and 1 / l goes into the
// exponent too. For a maximum of up to `kNearMax` that is off by 2^-24 * 1.44 * kNearMax, an eighth of what a result is
// rounded by. A larger maximum is first subtracted from the elements, in the half type. That is exact where the two are
// within a factor of two; other elements are so far below that their exponential is 0.
template <class C, int Vecs>
struct FragmentHalf2 : Half2Vecs<C, Vecs>, FragmentAccess<C, FragmentHalf2<C, Vecs>, Vecs> {
  typedef typename C::In T;
  typedef typename C::Epilogue Epilogue;
  typedef Half2Vecs<C, Vecs> Base;
  static constexpr bool kKeepsExp = false, kTakesX = Epilogue::kTakesX;
  // A sum that is the result itself is not rounded to the half type.
  static constexpr bool kSubtracts = kTakesX || sizeof(typename C::Result) > 2;
  using Base::at;
  using Base::V;
  float subtracted;  // from all elements

  __device__ float max() const {
    uint32_t m = at[0];
#pragma unroll
    for (int w = 1; w < Vecs * V / 2; ++w) m = max_half2<T>(m, at[w]);
    return max_(to_acc(get_half<T>(m, 0)), to_acc(get_half<T>(m, 1)));
  }
  // Prepares the elements for the maximum of the row, or of a part of it that has them.
  __device__ void subtract_max(float m) {
    subtracted = 0;
    if (kSubtracts || fabsf(m) < kNearMax || m == infinity() || m == -infinity()) return;
    subtracted = m;
    const uint32_t half2 = pack_half2<T>(-m, -m);
    unroll<Vecs * V / 2>([&](int w) { at[w] = add_half2<T>(at[w], half2); });
  }
  __device__ float sum_exp(float m) const {
    if (kSubtracts) return sum_exp_relative_to(m);
    const float offset = (subtracted - finite_or_zero(m)) * kLog2e;
    return pairwise_sum<Vecs * V, 0>([&](int i) { return exp2_(fmaf((*this)[i], kLog2e, offset)); });
  }
  __device__ float sum_exp_relative_to(float m) const {
    const float base = finite_or_zero(m);
    return pairwise_sum<Vecs * V, 0>([&](int i) { return exp_<T>((*this)[i] - base); });
  }
  __device__ void apply_epilogue(State<float> state) {
    const Epilogue epilogue(state);
    const float offset = offset_of(state);
    unroll<Vecs>([&](int i) { apply_to_vec(i, epilogue, offset); });
  }
  // Where vectors are whole each is stored as soon as it is computed.
  template <class Index>
  __device__ void apply_epilogue_and_store(State<float> state, T* row, Index first, Index step, Index n) {
    if constexpr (!C::kAligned) {
      apply_epilogue(state);
      this->store(row, first, step, n);
    } else {
      const Epilogue epilogue(state);
      const float offset = offset_of(state);
#pragma unroll
      for (int i = 0; i < Vecs; ++i) {
        if (first + i * step >= n) continue;
        apply_to_vec(i, epilogue, offset);
        store_vector(row + (first + i * step), this->vec(i));
      }
    }
  }

 private:
  __device__ float offset_of(State<float> state) const {
    return is_finite(state.m) ? (subtracted - state.m) * kLog2e - log2_(state.l) : nan_();
  }
  __device__ void apply_to_vec(int i, const Epilogue& epilogue, float offset) {
    this->replace(i, [&](int e) {
      const float x = this->reconverted(e);
      return kTakesX ? epilogue(x) : exp2_(fmaf(x, kLog2e, offset));
    });
  }
  static constexpr float kNearMax = is_same<T, half_t> ? 1024 : 4096;
};

// Elements in the accumulator's type. With KeepExp their exponentials take their place, so that exp is called once per
// element.
template <class C, int Vecs, bool KeepExp>
struct Fragment : AccVecs<C, Vecs>, FragmentAccess<C, Fragment<C, Vecs, KeepExp>, Vecs> {
  typedef typename C::Out Out;
  typedef typename C::Acc A;
  typedef typename C::Epilogue Epilogue;
  static constexpr int V = C::kVecSize;
  static constexpr bool kKeepsExp = KeepExp;
  using AccVecs<C, Vecs>::at;

  // Writes exponentials to where their elements were in shared memory, and reads them. The types are of one size.
  __device__ void write_back(int smem_vec) const {
    unroll<Vecs>([&](int i) {
      Vector<A, V> raw;
      unroll<V>([&](int v) { raw.at[v] = at[i * V + v]; });
      *reinterpret_cast<Vector<A, V>*>(SmemVecs<C>::slot(smem_vec + i)) = raw;
    });
  }
  __device__ void read_back(int smem_vec) {
    unroll<Vecs>([&](int i) {
      const Vector<A, V> raw = *reinterpret_cast<const Vector<A, V>*>(SmemVecs<C>::slot(smem_vec + i));
      unroll<V>([&](int v) { at[i * V + v] = raw.at[v]; });
    });
  }
  __device__ A max() const {
    A m = -infinity();
    unroll<Vecs * V>([&](int i) { m = max_(at[i], m); });
    return m;
  }
  __device__ void subtract_max(A) {}
  // The sum of exp(x - m), where m is the maximum of the row.
  __device__ typename C::Sum sum_exp(A m) {
    const A base = KeepExp ? finite_or_zero(m) : finite_for_sum(m);
    return accurate_sum<typename C::Sum, Vecs * V>([&](int i) {
      if (!KeepExp) return exp_for_sum<Out>(at[i] - base);
      return at[i] = exp_<Out>(at[i] - base);
    });
  }
  // The same for any m that is not below these elements. They stay as they are. It is a part of the sum of many
  // threads.
  __device__ A sum_exp_relative_to(A m) const {
    const A base = finite_for_sum(m);
    return pairwise_sum<Vecs * V, 0>([&](int i) { return exp_for_sum<Out>(at[i] - base); });
  }
  template <class Index>
  __device__ void apply_epilogue_and_store(State<A> state, Out* row, Index first, Index step, Index n) {
    apply_epilogue(state);
    this->store(row, first, step, n);
  }
  // The results take the place of the elements.
  __device__ void apply_epilogue(State<A> state) {
    const Epilogue epilogue(state);
    unroll<Vecs * V>([&](int i) {
      if constexpr (KeepExp)
        at[i] = epilogue.from_exp(at[i]);
      else
        at[i] = epilogue(at[i]);
    });
  }
};

// The fragment of a kernel. A vector of one half does not make a half2.
template <class C, int Vecs, bool KeepExp>
using RowFragment =
    typename Conditional<is_same<typename C::In, typename C::Out> && sizeof(typename C::In) == 2 && (C::kVecSize > 1) &&
                             !C::Operand::kIsPositional,
                         FragmentHalf2<C, Vecs>, Fragment<C, Vecs, KeepExp && C::Epilogue::kTakesExp>>::type;

// The state of the elements that a thread has had.
template <class C, class Sum>
struct ThreadState {
  typedef typename C::Acc A;
  A m = -infinity();
  Sum l = begin_sum<Sum>(A(0));

  // Adds a fragment, with one rescaling.
  template <class AnyFragment>
  __device__ void absorb(AnyFragment& fragment) {
    const A old_m = m;
    m = max_(old_m, fragment.max());
    fragment.opaque_registers();
    l = add(scale(l, exp_<A>(old_m - finite_or_zero(m))), begin_sum<Sum>(fragment.sum_exp_relative_to(m)));
  }
};
