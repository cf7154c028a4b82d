// score.cuh: what a function computes of each element of x as it is loaded, before the softmax of the scores. A score
// has four members:
//
//   score(x)                the score of an element, in the accumulator's type
//   score.apply_half2(x)    the scores of two half elements, in their type
//   score.neutral()         an element whose score is -inf. It changes no state, and stands where a row has no element
//   score.backward(grad)    the gradient of x, from the gradient of its score
#pragma once

#include "state.cuh"

struct Identity {
  template <class A>
  __device__ A operator()(A x) const {
    return x;
  }
  __device__ uint32_t apply_half2(uint32_t x) const { return x; }
  __device__ float neutral() const { return -infinity(); }
  template <class A>
  __device__ A backward(A grad) const {
    return grad;
  }
};

// The score of softmin.
struct Negate {
  template <class A>
  __device__ A operator()(A x) const {
    return -x;
  }
  __device__ uint32_t apply_half2(uint32_t x) const { return x ^ 0x80008000u; }  // both half types have a sign bit
  __device__ float neutral() const { return infinity(); }
  template <class A>
  __device__ A backward(A grad) const {
    return -grad;
  }
};
