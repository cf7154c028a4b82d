// scratch.h: floats of a thread's own, as many as fit a core's second cache. They stay until the thread ends.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <new>

namespace onepass::ONEPASS_ISA {

constexpr int64_t kScratch = 131072;  // floats: 512 KB

inline float* scratch() {
  struct Owned {
    float* floats = static_cast<float*>(std::aligned_alloc(64, kScratch * sizeof(float)));
    Owned() {
      if (!floats) throw std::bad_alloc();
    }
    ~Owned() { std::free(floats); }
  };
  thread_local Owned owned;
  return owned.floats;
}

}  // namespace onepass::ONEPASS_ISA
