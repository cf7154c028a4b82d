// score.cuh: how an element x becomes its score when it is loaded. The softmax is taken of the scores. Each row has a
// score object, which is stateless here; that of scored rows has members (scored_row.cuh).
//
//   score(x)                the score of an element, in the accumulator's type
//   score.apply_half2(x)    the scores of two half elements, in their type
//   score.neutral()         an element whose score is -inf. It changes no state, and stands where a row has no element
//   score.backward(grad)    the gradient of x, from the gradient of its score
#pragma once

#include "state.cuh"

struct Identity {
  static constexpr bool kIsPositional = false;
  template <class A>
  __device__ A operator()(A x) const {
    return x;
  }
  __device__ uint32_t apply_half2(uint32_t x) const { return x; }
  static __device__ float neutral() { return -infinity(); }
  template <class A>
  __device__ A backward(A grad) const {
    return grad;
  }
};

// The score of softmin.
struct Negate {
  static constexpr bool kIsPositional = false;
  template <class A>
  __device__ A operator()(A x) const {
    return -x;
  }
  __device__ uint32_t apply_half2(uint32_t x) const { return x ^ 0x80008000u; }  // both half types have a sign bit
  static __device__ float neutral() { return infinity(); }
  template <class A>
  __device__ A backward(A grad) const {
    return -grad;
  }
};

// An operand converts the raw elements of a tensor: operand(raw) is the score, in the accumulator's type. neutral<T>()
// is an element that changes no state or sum.

// x of a forward function. It is rounded to Out first if Out loses bits of it, as torch's `dtype=` does.
template <class C>
struct ScoredOperand {
  static constexpr bool kIsPositional = false;
  static constexpr bool kIsRounded = !is_lossless<typename C::In, typename C::Out>;
  typename C::Score score;
  template <class T>
  __device__ typename C::Acc operator()(T raw) const {
    return score(round_through<typename C::Out>(raw));
  }
  template <class T>
  static __device__ T neutral() {
    return from_acc<T>(C::Score::neutral());
  }
};

// y and g of a gradient. They have no score, and their neutral element is 0.
template <class C>
struct PlainOperand {
  static constexpr bool kIsPositional = false;
  static constexpr bool kIsRounded = false;
  Identity score;
  template <class T>
  __device__ auto operator()(T raw) const {
    return to_acc(raw);
  }
  template <class T>
  static __device__ T neutral() {
    return from_acc<T>(0.0f);
  }
};
