// pick.h: the instruction set of the CPU engine, chosen once a process: the best this CPU has, or what ONEPASS_CPU
// names
// ("baseline", "avx2").
#pragma once

#include <cstdlib>
#include <string>

#include "engine.h"

namespace onepass {

inline bool cpu_has_avx2() {
#ifdef ONEPASS_AVX2
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
#else
  return false;
#endif
}

inline const char* cpu_isa() {
  static const char* const chosen = [] {
    const char* named = std::getenv("ONEPASS_CPU");
    if (named && std::string(named) == "baseline") return "baseline";
    return cpu_has_avx2() ? "avx2" : "baseline";
  }();
  return chosen;
}

using CpuRun = void (*)(const Call&, int64_t, int64_t);

inline CpuRun cpu_run() {
#ifdef ONEPASS_AVX2
  if (std::string(cpu_isa()) == "avx2") return avx2::run;
#endif
  return baseline::run;
}

// Units below which a second thread does not pay.
inline int64_t cpu_grain(const Units& units) {
  const int64_t elements = units.elements > 0 ? units.elements : 1;
  return elements < kCpuGrain ? kCpuGrain / elements : 1;
}

}  // namespace onepass
