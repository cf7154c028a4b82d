// plan.h: which way a gradient goes: in what arithmetic, past the cache or not, and which rows go together.
#pragma once

#include "small_rows_backward.h"

namespace onepass::ONEPASS_ISA {

constexpr int64_t kShortest = 16;  // elements of a row of floats that goes with others, if no exponential is in it
constexpr int64_t kTogetherMost = kWidth == 16 ? 64 : kPair;  // of one of floats with exponentials
// Elements of the longest row of which dx goes past the cache as a whole, or not at all.
constexpr int64_t kUneven = 512;

inline Kind kind_of(Function function) {
  return function == Function::logsumexp ? Kind::lse : function == Function::log_softmax ? Kind::log : Kind::soft;
}
// Computed in vectors of floats?
inline bool vectors(const BackwardProblem& call) {
  const DType y = call.type(kGrad), dx = call.type(kDx);
  return call.layout.view != View::strided && y != DType::float64 && dx != DType::float64 &&
         (y == dx || y == DType::float32 || dx == DType::float32);
}
// In loops over doubles?
inline bool doubles(const BackwardProblem& call) {
  return call.layout.view != View::strided && call.type(kGrad) == DType::float64 && call.type(kDx) == DType::float64;
}

// Of rows in pieces from fewer bytes on: their operands come through the cache a second time.
constexpr int64_t kPastPieces = 2 << 20;
inline bool past_cache(const BackwardProblem& call) {
  const int64_t least = call.layout.view == View::rows && call.layout.n > kLong ? kPastPieces : kPast;
  return kStreams && call.tensors[kDx].data != call.tensors[kSaved].data &&
         call.tensors[kDx].data != call.tensors[kGrad].data &&
         call.layout.rows * call.layout.n * size_of(call.type(kDx)) >= least;
}
inline bool floats(const BackwardProblem& call) {
  return call.type(kGrad) == DType::float32 && call.type(kDx) == DType::float32;
}
// Does each row's dx go past the cache as a whole? Rows of which a part does not are slower than those of which none
// does: 65536 x 100 floats by a fifth to a third.
inline bool evenly_past(const BackwardProblem& call) {
  const int64_t n = call.layout.n, stride = call.layout.outer.innermost().strides[kDx] * size_of(call.type(kDx));
  return call.address(kDx) % kLine == 0 && stride % kLine == 0 && n % (n > kShortMost / 2 ? kBackwardStep : kPair) == 0;
}
// Rows that go one by one? The shortest are faster a vector's lanes of them together, and so are longer ones of whole
// pairs of vectors, of half types or with exponentials.
inline bool one_by_one(const BackwardProblem& call) {
  const int64_t n = call.layout.n;
  if (call.function == Function::logsumexp || call.grad_is_broadcast() || n > kLong) return false;
  if (floats(call) && call.function != Function::log_softmax) return n > kShortest;
  return n > (n % kPair ? kPair : floats(call) ? kTogetherMost : kShortMost);
}
// Rows that go a vector's lanes of them together?
inline bool together(const BackwardProblem& call) { return call.layout.n <= kShortMost && !one_by_one(call); }
// Does dx go past the cache?
inline bool goes_past(const BackwardProblem& call) {
  return past_cache(call) && (call.layout.n > kUneven || evenly_past(call) || !one_by_one(call));
}

}  // namespace onepass::ONEPASS_ISA
