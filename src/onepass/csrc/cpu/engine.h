// engine.h: the CPU engine's entry points, one a compiled instruction set. No torch in them: ops.cpp brings the
// threads.
#pragma once

#include "../core/backward_layout.h"
#include "../core/problem.h"

namespace onepass {

// Pairs of types served in one pass; others are cast first (the same values, one more temporary).
inline bool cpu_fuses(Function function, DType x, DType y) {
  if (function == Function::softmin && x != y) return false;  // a rare call
  return x == y || (y == DType::float32 && size_of(x) == 2) || (x == DType::float32 && size_of(y) == 2);
}

// How many units (rows, tiles of rows, pieces of long rows) a call falls into, and how many elements a unit has. Where
// rows are cut into pieces, the states of all pieces come first, and are merged row by row.
struct Units {
  int64_t count, elements, pieces;  // pieces: of a row; 0 where a unit has whole rows
};
struct Piece {
  float m;
  double l, rest;
};

// Gradients likewise. Of rows that are cut into pieces a sum each comes first; `sums` then has one a row. A call with
// pieces may also be made whole rows at a time.
enum class BackwardStep { rows, sums, finish };

#define ONEPASS_DECLARE(isa)                                                                     \
  namespace isa {                                                                                \
  Units backward_units(const BackwardProblem& call);                                             \
  void backward(const BackwardProblem&, BackwardStep, double* sums, int64_t begin, int64_t end); \
  Units units(const ForwardProblem& call);                                                       \
  void run(const ForwardProblem& call, int64_t begin, int64_t end);                              \
  void states(const ForwardProblem& call, Piece* pieces, int64_t begin, int64_t end);            \
  void merge(const ForwardProblem& call, Piece* pieces);                                         \
  void finish(const ForwardProblem& call, const Piece* pieces, int64_t begin, int64_t end);      \
  }
ONEPASS_DECLARE(baseline)
#ifdef ONEPASS_AVX2
ONEPASS_DECLARE(avx2)
#endif
#ifdef ONEPASS_AVX512
ONEPASS_DECLARE(avx512)
#endif
#undef ONEPASS_DECLARE

}  // namespace onepass
