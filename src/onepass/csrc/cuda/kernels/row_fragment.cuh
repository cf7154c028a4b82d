// row_fragment.cuh: a fragment is the part of a row that one thread keeps in registers while the state of the row is
// reduced. This file loads fragments, reduces them, applies the epilogue and stores them. If it is exact, a register
// holds two half elements. `C` is the ForwardConfig. The backward has its own fragments (row_backward.cuh), which also
// use Half2Vecs.
#pragma once

#include "async_copy.cuh"
#include "row_map.cuh"
#include "vector_access.cuh"

// Calls any(i, position) for each of a thread's vectors, whose first elements are `step` apart, or full(i, position)
// for vectors that one common test shows to be full. If whole warps share a row and a thread has few vectors, the test
// is for all of them; otherwise it is for those between the first and the last. This saves ten instructions per vector.
// If rows are whole vectors, a test is one comparison, and each of a few vectors gets its own: then threads of the last
// warp that have one vector fewer do not diverge.
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

// The loads and stores of both kinds of fragments. `Self` is the fragment. It has the type Raw, a vector as it is read,
// and set(i, raw, operand), set_elements(i, at, first, n, operand), which reads element by element, and vec(i), a
// vector of results.
template <class C, class Self, int Vecs>
struct FragmentAccess {
  // `WholeOnly`: vectors that belong to the row only in part are left out.
  template <bool WholeOnly = false, class Index>
  __device__ void load(const ForwardRow<C>& row, Index first, Index step, Index n) {
    // Each path has a lambda of its own: the compiler takes more instructions where they share one.
    if constexpr (C::Operand::kIsPositional) {
      load_scored<WholeOnly>(row, first, step, n, [at = row.x + first](int, Index offset) { return at + offset; });
    } else {
      for_each_vec<C, Vecs>(
          first, step, n, [&](int i, Index at) { set_full(i, row.x + at, row); },
          [&](int i, Index at) {
            if (moves_as_vector<C>(at, n))
              set_full(i, row.x + at, row);
            else
              self()->set_elements(i, row.x + at, at, n, row.operand);
          });
    }
  }
  // The same from shared memory, beginning with the thread's vector number `smem_vec`.
  template <class Index>
  __device__ void load_smem(const ForwardRow<C>& row, int smem_vec, Index first, Index step, Index n) {
    if constexpr (C::Operand::kIsPositional) {
      load_scored<false>(row, first, step, n, [&](int i, Index) { return SmemVecs<C>::slot(smem_vec + i); });
    } else {
      for_each_vec<C, Vecs>(
          first, step, n, [&](int i, Index) { set_smem(i, SmemVecs<C>::slot(smem_vec + i), row); },
          [&](int i, Index at) {
            if (is_full<C>(at, n))
              set_smem(i, SmemVecs<C>::slot(smem_vec + i), row);
            else
              self()->set_elements(i, SmemVecs<C>::slot(smem_vec + i), at, n, row.operand);
          });
    }
  }
  template <bool WholeOnly = false, class Index>
  __device__ void store(typename C::Out* row, Index first, Index step, Index n) const {
    const Self& self = static_cast<const Self&>(*this);
    if constexpr (C::Operand::kIsPositional && (WholeOnly || C::kAligned)) {
      const auto to = row + first;
      for_each_whole(first, step, n, [&](int i) { store_vector(to + i * step, self.vec(i)); }, [](int) {});
    } else {
      for_each_vec<C, Vecs>(
          first, step, n, [&](int i, Index at) { store_vector(row + at, self.vec(i)); },
          [&](int i, Index at) { store_predicated<C>(row, at, n, self.vec(i)); });
    }
  }

 private:
  __device__ Self* self() { return static_cast<Self*>(this); }
  __device__ void set_full(int i, const typename C::In* from, const ForwardRow<C>& row) {
    self()->set(i, Self::template read<false>(from), row.operand);
  }
  __device__ void set_smem(int i, const typename C::In* from, const ForwardRow<C>& row) {
    self()->set(i, *reinterpret_cast<const typename Self::Raw*>(from), row.operand);
  }
  // Loads all vectors, and the other tensors of their scores, before it scores the first one. from(i, offset) is the
  // address of vector i, which begins with element `first + offset` of the row.
  template <bool WholeOnly, class Index, class F>
  __device__ void load_scored(const ForwardRow<C>& row, Index first, Index step, Index n, F from) {
    typename C::Operand::Vectors vectors[Vecs];
    const auto load = [&](int i) { row.operand.load(vectors[i], from(i, i * step), (int)first, (int)(i * step)); };
    const auto score = [&](int i) { self()->score(i, vectors[i], row.operand, (int)(first + i * step)); };
    if constexpr (WholeOnly || C::kAligned) {
      for_each_whole(first, step, n, load, [](int) {});
      for_each_whole(first, step, n, score, [&](int i) { self()->hide(i); });
    } else {
      const auto index = [&](auto f) { return [=](int i, Index) { f(i); }; };
      for_each_vec<C, Vecs>(first, step, n, index(load), [&](int i, Index at) {
        if (moves_as_vector<C>(at, n)) load(i);
      });
      for_each_vec<C, Vecs>(first, step, n, index(score), [&](int i, Index at) {
        moves_as_vector<C>(at, n)
            ? score(i)
            : self()->score_elements(i, from(i, i * step), row.operand, (int)first, (int)(i * step));
      });
    }
  }
  // Calls whole(i) for each vector whose elements are all the row's, and none(i) for every other vector. If the row
  // fills its threads, only a thread's last vector can be one of these.
  template <class Index, class F, class G>
  static __device__ void for_each_whole(Index first, Index step, Index n, F whole, G none) {
    const auto test = [&](int i) { is_full<C>(first + i * step, n) ? whole(i) : none(i); };
    if (Vecs > 1 && is_full<C>(first, n) && is_full<C>(first + (Vecs - 2) * step, n)) {
      unroll<Vecs - 1>(whole);
      test(Vecs - 1);
    } else {
      unroll<Vecs>(test);
    }
  }
};

// A thread's vectors, of half elements with half results: as they were read, but scored, two elements per register.
// (The compiler would split vectors of half elements, and wait for each load.)
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
  __device__ void set(int i, Raw raw, const Operand& operand) {
    unroll<kWords>([&](int w) { at[i * kWords + w] = operand.score.apply_half2(raw.at[w]); });
  }
  template <class Index>
  __device__ void set_elements(int i, const In* from, Index first, Index n, const Operand& operand) {
    const auto bits = [&](int v) -> uint32_t {
      return (!C::kAligned && is_inside(first + v, n) ? from[v] : Operand::template neutral<In>()).bits;
    };
    Raw raw;
    unroll<kWords>([&](int w) { raw.at[w] = bits(2 * w) | bits(2 * w + 1) << 16; });
    set(i, raw, operand);
  }
  // Makes the compiler believe that the registers have changed between two passes. Otherwise it keeps the converted
  // elements of the first pass, in twice the registers.
  __device__ void opaque_registers() {
    unroll<Vecs * kWords>([&](int w) { asm volatile("" : "+r"(at[w])); });
  }
  __device__ float operator[](int i) const { return to_acc(get_half<In>(at[i / 2], i % 2)); }
  __device__ float reconverted(int i) const { return reconvert<In>(at[i / 2], i % 2); }
  // Results replace the elements.
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

// A thread's vectors in the accumulator's type.
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
  __device__ void set(int i, Raw raw, const Operand& operand) {
    unroll<V>([&](int v) { at[i * V + v] = operand(raw.at[v]); });
  }
  template <class Index>
  __device__ void set_elements(int i, const In* from, Index first, Index n, const Operand& operand) {
    unroll<V>([&](int v) {
      at[i * V + v] = operand(!C::kAligned && is_inside(first + v, n) ? from[v] : Operand::template neutral<In>());
    });
  }
  // The scores of a vector that begins with element `first` of the row.
  template <class Vectors>
  __device__ void score(int i, const Vectors& vectors, const Operand& operand, int first) {
    operand.template score<true>(vectors, first, at + i * V);
  }
  // The scores of a vector that may have elements outside the row.
  __device__ void score_elements(int i, const In* from, const Operand& operand, int first, int offset) {
    operand.score_elements(from, first, offset, at + i * V);
  }
  __device__ void hide(int i) {
    unroll<V>([&](int v) { at[i * V + v] = -infinity(); });
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

// The fragment of rows of a half type with results of the same type: two elements per register, so that a row takes
// half the registers. exp is computed twice per element.
//
// exp(x - m) is computed as exp2(x * log2(e) - m * log2(e)): one fused multiply-add before the exponential. The factor
// 1 / l goes into the exponent too. For a maximum of up to `kNearMax` the error is 2^-24 * 1.44 * kNearMax, an eighth
// of the rounding error of a result. A larger maximum is first subtracted from the elements, in the half type. The
// subtraction is exact if the two are within a factor of two; any other element is so far below the maximum that its
// exponential is 0.
template <class C, int Vecs>
struct FragmentHalf2 : Half2Vecs<C, Vecs>, FragmentAccess<C, FragmentHalf2<C, Vecs>, Vecs> {
  typedef typename C::In T;
  typedef typename C::Epilogue Epilogue;
  typedef Half2Vecs<C, Vecs> Base;
  static constexpr bool kKeepsExp = false, kTakesX = Epilogue::kTakesX;
  // Whether x - m is computed in float: the epilogue takes x, or the result is a sum that is not rounded to the half
  // type.
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
  // Prepares the elements for m, the maximum of the row, or of the part of the row that has these elements.
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
  // If all vectors are whole, each is stored as soon as it is computed.
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

// exp(x - m) of the elements of a row, where m is the maximum of the row. If exponentials of half results are kept, it
// is exp2(x log2(e) - m log2(e)), with one fused multiply-add before the exponential. The rounding error of the second
// product then is one factor of all elements and of their sum, and cancels. The sink is summed without that factor, so
// a larger maximum is subtracted first.
template <class C, bool KeepExp>
struct ShiftedExp {
  typedef typename C::Out Out;
  typedef typename C::Acc A;
  static constexpr bool kFused = KeepExp && sizeof(Out) == 2;
  A base;

  __device__ ShiftedExp(A m)
      : base(kFused    ? (subtracts(m) ? 0 : -m * kLog2e)
             : KeepExp ? finite_or_zero(m)
                       : finite_for_sum(m)) {}
  // Whether m, if it is finite, must be subtracted from the elements first.
  static __device__ bool subtracts(A m) { return kFused && !(abs_(m) < 1024); }
  static __device__ A subtract(A x, A m) { return x - finite_or_zero(m); }
  __device__ A operator()(A x) const {
    if constexpr (kFused)
      return exp2_(fmaf(x, kLog2e, base));
    else
      return KeepExp ? exp_<Out>(x - base) : exp_for_sum<Out>(x - base);
  }
};

// The fragment with elements in the accumulator's type. With KeepExp the exponentials replace the elements, so that exp
// is computed once per element.
template <class C, int Vecs, bool KeepExp>
struct Fragment : AccVecs<C, Vecs>, FragmentAccess<C, Fragment<C, Vecs, KeepExp>, Vecs> {
  typedef typename C::Out Out;
  typedef typename C::Acc A;
  typedef typename C::Epilogue Epilogue;
  static constexpr int V = C::kVecSize;
  static constexpr bool kKeepsExp = KeepExp;
  using AccVecs<C, Vecs>::at;

  // Writes exponentials to the slots of their elements in shared memory, and reads them back. Both types have one size.
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
  // Prepares the elements for the maximum of the row.
  __device__ void subtract_max(A m) {
    typedef ShiftedExp<C, KeepExp> Shifted;
    if (Shifted::subtracts(m)) unroll<Vecs * V>([&](int i) { at[i] = Shifted::subtract(at[i], m); });
  }
  // The sum of exp(x - m), where m is the maximum of the row.
  __device__ typename C::Sum sum_exp(A m) {
    const ShiftedExp<C, KeepExp> shifted(m);
    return accurate_sum<typename C::Sum, Vecs * V>([&](int i) {
      if (!KeepExp) return shifted(at[i]);
      return at[i] = shifted(at[i]);
    });
  }
  // The same for any m that is not below the elements, which are not changed. The result is one term of a sum over many
  // threads.
  __device__ A sum_exp_relative_to(A m) const {
    const A base = finite_for_sum(m);
    return pairwise_sum<Vecs * V, 0>([&](int i) { return exp_for_sum<Out>(at[i] - base); });
  }
  template <bool WholeOnly = false, class Index>
  __device__ void apply_epilogue_and_store(State<A> state, Out* row, Index first, Index step, Index n) {
    apply_epilogue(state);
    this->template store<WholeOnly>(row, first, step, n);
  }
  // Results replace the elements.
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

// The fragment of a kernel. FragmentHalf2 needs vectors of more than one element.
template <class C, int Vecs, bool KeepExp>
using RowFragment =
    typename Conditional<is_same<typename C::In, typename C::Out> && sizeof(typename C::In) == 2 && (C::kVecSize > 1) &&
                             !C::Operand::kIsPositional,
                         FragmentHalf2<C, Vecs>, Fragment<C, Vecs, KeepExp && C::Epilogue::kTakesExp>>::type;

// The head and tail elements of a scored row (tail_position), distributed over `Threads` threads. Then no vector has to
// be split for them.
template <class C, int Threads, bool KeepExp>
struct ScoredTails {
  typedef typename C::Acc A;
  typedef typename C::Out Out;
  static constexpr int V = C::kVecSize, kEach = (2 * (V - 1) + Threads - 1) / Threads;
  typename C::Operand::Element loaded[kEach];
  int position[kEach];
  A at[kEach];

  __device__ void load(const ForwardRow<C>& row, int thread, int before, int n) {
    unroll<kEach>([&](int k) {
      position[k] = tail_position<V>(thread + k * Threads, before, n);
      loaded[k] = row.operand.load_beside_one(position[k]);
      if (position[k] >= 0) loaded[k].x = row.x[position[k]];
    });
  }
  __device__ void score(const ForwardRow<C>& row) {
    unroll<kEach>([&](int k) { at[k] = row.operand.score_one(loaded[k], position[k]); });
  }
  __device__ A max() const {
    A m = at[0];
    unroll<kEach>([&](int k) { m = max_(m, at[k]); });
    return m;
  }
  __device__ A sum_exp(A m) {
    const ShiftedExp<C, KeepExp> shifted(m);
    A sum = 0;
    unroll<kEach>([&](int k) {
      if (shifted.subtracts(m)) at[k] = shifted.subtract(at[k], m);
      const A e = shifted(at[k]);
      if (KeepExp) at[k] = e;
      sum += e;
    });
    return sum;
  }
  __device__ void store(State<A> state, Out* row) const {
    const typename C::Epilogue epilogue(state);
    unroll<kEach>([&](int k) {
      if (position[k] < 0) return;
      if constexpr (KeepExp)
        row[position[k]] = from_acc<Out>(epilogue.from_exp(at[k]));
      else
        row[position[k]] = from_acc<Out>(epilogue(at[k]));
    });
  }
};
// Takes the place of ScoredTails if there are no head and tail elements.
struct NoTails {};

// The state of the elements that a thread has read so far.
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
