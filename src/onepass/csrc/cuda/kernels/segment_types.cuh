// segment_types.cuh: short names for the parameters of a kernel of segments.
#pragma once

#include "config.cuh"

typedef SegmentConfig C;
typedef C::A A;
typedef C::In In;
typedef C::Out Out;
typedef C::Second Second;
typedef State<A> RowState;  // in the backward l is the sum

constexpr int V = C::kVecSize;  // elements of a vector
