// engine.h: the CPU engine's entry points, one a compiled instruction set. No torch in them: ops.cpp brings the
// threads.
#pragma once

#include "../call.h"

namespace onepass {

// Pairs of types served in one pass; others are cast first (the same values, one more temporary).
inline bool cpu_fuses(DType x, DType y) {
  return x == y || (y == DType::float32 && size_of(x) == 2) || (x == DType::float32 && size_of(y) == 2);
}

// How many units (rows, or tiles of columns) a call falls into, and how many elements a unit has.
struct Units {
  int64_t count, elements;
};

#define ONEPASS_DECLARE(isa)                              \
  namespace isa {                                         \
  Units units(const Layout& layout);                      \
  void run(const Call& call, int64_t begin, int64_t end); \
  }
ONEPASS_DECLARE(baseline)
#ifdef ONEPASS_AVX2
ONEPASS_DECLARE(avx2)
#endif
#undef ONEPASS_DECLARE

}  // namespace onepass
