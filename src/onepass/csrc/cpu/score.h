// score.h: what happens to an element before its row is reduced: x -> Score::apply(x), of a vector or of a number.
#pragma once

#include "simd.h"

namespace onepass::ONEPASS_ISA {

// softmax, log_softmax, logsumexp, state
struct Identity {
  static constexpr uint16_t kSignFlip = 0;  // what the score does to the bits of a 16-bit number
  static constexpr float kPadding = -std::numeric_limits<float>::infinity();  // the element whose score is -inf
  template <class V>
  static ONEPASS_INLINE V apply(V x) {
    return x;
  }
};

// softmin
struct Negate {
  static constexpr uint16_t kSignFlip = 0x8000;
  static constexpr float kPadding = std::numeric_limits<float>::infinity();
  template <class V>
  static ONEPASS_INLINE V apply(V x) {
    return -x;
  }
};

}  // namespace onepass::ONEPASS_ISA
