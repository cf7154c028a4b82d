// types.h: functions and element types, with the numbers that the operators and Python use. Pure: no torch, no CUDA.
#pragma once

#include <cstdint>

#include "functions.h"

namespace onepass {

#define ONEPASS_ENUMERATOR(name, is_reduction, leading_planes) name,
enum class Function { ONEPASS_FUNCTIONS(ONEPASS_ENUMERATOR) };
#undef ONEPASS_ENUMERATOR

struct FunctionTraits {
  const char* name;
  bool is_reduction;
  int leading_planes;
};
#define ONEPASS_TRAITS(name, is_reduction, leading_planes) {#name, is_reduction, leading_planes},
constexpr FunctionTraits kFunctions[] = {ONEPASS_FUNCTIONS(ONEPASS_TRAITS)};
#undef ONEPASS_TRAITS

constexpr const FunctionTraits& traits_of(Function function) { return kFunctions[int(function)]; }
constexpr const char* name_of(Function function) { return traits_of(function).name; }
constexpr bool is_reduction(Function function) { return traits_of(function).is_reduction; }

enum class DType { float32, float64, float16, bfloat16 };
constexpr DType kDTypes[] = {DType::float32, DType::float64, DType::float16, DType::bfloat16};
constexpr const char* kDTypeNames[] = {"float32", "float64", "float16", "bfloat16"};
constexpr const char* name_of(DType type) { return kDTypeNames[int(type)]; }

inline int size_of(DType type) { return type == DType::float64 ? 8 : type == DType::float32 ? 4 : 2; }

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr bool is_power_of_two(int64_t v, int64_t most) { return v >= 1 && v <= most && (v & (v - 1)) == 0; }
constexpr int64_t up_to(int64_t a, int64_t multiple) { return ceil_div(a, multiple) * multiple; }

}  // namespace onepass
