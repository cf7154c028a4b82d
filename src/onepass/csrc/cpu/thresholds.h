// thresholds.h: what fits where, forward and backward alike.
#pragma once

#include <cstdint>

namespace onepass::ONEPASS_ISA {

constexpr int64_t kLine = 64;       // bytes; a line of which a row has a part does not go past the cache
constexpr int64_t kPast = 8 << 20;  // bytes of an output that goes past the cache
constexpr int64_t kLong = 65536;    // elements of the longest row that is not cut into pieces
constexpr int64_t kPiece = 8192;    // elements of a piece

}  // namespace onepass::ONEPASS_ISA
