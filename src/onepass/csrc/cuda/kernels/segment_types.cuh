// segment_types.cuh: what a kernel of segments calls its parameters.
#pragma once

#include "config.cuh"

typedef SegmentConfig C;
typedef C::A A;
typedef C::In In;
typedef C::Out Out;
typedef C::Second Second;
typedef State<A> RowState;  // backward: l is the sum

constexpr int V = C::kVecSize;  // elements of a vector
