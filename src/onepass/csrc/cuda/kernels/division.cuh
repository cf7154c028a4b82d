// division.cuh: faster integer divisions, for index arithmetic.
#pragma once

#include "column_params.cuh"
#include "types.cuh"

// A 64-bit division takes a hundred instructions and a 32-bit one twenty, so numbers below 2^32 are divided as 32-bit.
__device__ inline int64_t divide(int64_t a, int64_t b) {
  if (((uint64_t)a | (uint64_t)b) >> 32 == 0) return (uint32_t)a / (uint32_t)b;
  return a / b;
}

struct Quotient {
  int64_t whole, rest;
};
__device__ inline Quotient divide(int64_t a, int64_t b, const FastDivisor& by) {
  if ((uint64_t)a >> 31) return {a / b, a % b};
  const uint32_t low = (uint32_t)a, whole = (uint32_t)((uint64_t)low * by.multiplier >> by.shift);
  return {whole, low - whole * (uint32_t)b};
}
__device__ inline int divide(unsigned a, const FastDivisor& by) {
  return (int)((uint64_t)a * by.multiplier >> by.shift);
}
