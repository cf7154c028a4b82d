// types.h: functions and element types, as the operators and Python number them. Pure: no torch, no CUDA.
#pragma once

#include <cstdint>

namespace onepass {

enum class Function { softmax, log_softmax, softmin, logsumexp, state };
constexpr const char* kFunctionNames[] = {"softmax", "log_softmax", "softmin", "logsumexp", "state"};

enum class DType { float32, float64, float16, bfloat16 };
constexpr const char* kDTypeNames[] = {"float32", "float64", "float16", "bfloat16"};

inline int size_of(DType type) { return type == DType::float64 ? 8 : type == DType::float32 ? 4 : 2; }

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t up_to(int64_t a, int64_t multiple) { return ceil_div(a, multiple) * multiple; }

}  // namespace onepass
