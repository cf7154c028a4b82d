// sanitize_cpu.h: what sanitize_cpu.cpp stands on: memory that ends where a tensor ends, and the definition of a row.
#pragma once

#include <sanitizer/asan_interface.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/problem.h"

namespace {

// Memory
// ---------------------------------------------------------------------------------------------------------------

// Pages that may be touched between two that may not.
class Island {
 public:
  static constexpr int64_t kBytes = 32 << 20;
  uint8_t* begin;

  Island() {
    const int64_t page = sysconf(_SC_PAGESIZE);
    void* const all = mmap(nullptr, size_t(kBytes + 2 * page), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    begin = static_cast<uint8_t*>(all) + page;
    if (all == MAP_FAILED || mprotect(begin, kBytes, PROT_READ | PROT_WRITE)) std::abort();
    ASAN_POISON_MEMORY_REGION(begin, kBytes);
  }
};

enum class Place { heap, begin, end };

// `count` elements: from the heap, or on an island, where what is beside them is poisoned.
template <class T>
class Buffer {
 public:
  T* data;

  // `lead`: elements between the beginning of the island and the buffer.
  Buffer(const Island& island, Place place, int64_t count, int64_t lead)
      : place_(place), bytes_(count * int64_t(sizeof(T))) {
    if (bytes_ + lead * int64_t(sizeof(T)) > Island::kBytes) std::abort();
    uint8_t* const at = place == Place::heap    ? static_cast<uint8_t*>(std::malloc(size_t(bytes_)))
                        : place == Place::begin ? island.begin + lead * int64_t(sizeof(T))
                                                : island.begin + Island::kBytes - bytes_;
    if (place != Place::heap) ASAN_UNPOISON_MEMORY_REGION(at, size_t(bytes_));
    data = reinterpret_cast<T*>(at);
  }
  ~Buffer() {
    if (place_ == Place::heap) {
      std::free(data);
    } else {
      ASAN_POISON_MEMORY_REGION(data, size_t(bytes_));
    }
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

 private:
  Place place_;
  int64_t bytes_;
};

// A read that AddressSanitizer does not see, as those of masked vector instructions.
__attribute__((noinline, no_sanitize_address)) int unseen(const void* at) {
  return *static_cast<const volatile uint8_t*>(at);
}

// Types
// ----------------------------------------------------------------------------------------------------------------

struct bfloat16 {
  uint16_t bits;
};
using float16 = _Float16;

inline double wide(double v) { return v; }
inline double wide(float v) { return double(v); }
inline double wide(float16 v) { return double(float(v)); }
inline double wide(bfloat16 v) {
  const uint32_t bits = uint32_t(v.bits) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return double(value);
}

template <class T>
T rounded(double v) {
  if constexpr (std::is_same_v<T, bfloat16>) {
    const float value = float(v);
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    if (value != value) return {0x7fc0};
    const uint32_t low = bits & 0xffff, up = bits >> 16;
    return {uint16_t(up + (low > 0x8000 || (low == 0x8000 && up % 2)))};
  } else if constexpr (std::is_same_v<T, float16>) {
    return float16(float(v));
  } else {
    return T(v);
  }
}

struct Numbers {
  double eps, tiny, top;  // distance of 1 to the next number, smallest normal number, largest number
};
template <class T>
constexpr Numbers kNumbers = {std::numeric_limits<T>::epsilon(), std::numeric_limits<T>::min(),
                              std::numeric_limits<T>::max()};
template <>
constexpr Numbers kNumbers<float16> = {0x1p-10, 0x1p-14, 65504.0};
template <>
constexpr Numbers kNumbers<bfloat16> = {0x1p-7, 0x1p-126, 0x1.fep127};

// The definition
// -------------------------------------------------------------------------------------------------------

// A row by the definition, in double, or in long double where the result is double. The input is rounded to the
// result's type first. The errors allowed are those of tests/support.py.
template <class Y>
class Row {
  using Real = std::conditional_t<std::is_same_v<Y, double>, long double, double>;
  using Function = onepass::Function;
  static constexpr Numbers kOut = kNumbers<Y>, kSum = kNumbers<std::conditional_t<sizeof(Y) == 8, double, float>>;
  static constexpr Real kInf = std::numeric_limits<Real>::infinity();

  Function function_;
  std::vector<Real> x_;
  Real m_ = -kInf, s_, l_ = 0;

 public:
  template <class X>
  Row(Function function, const X* x, const std::vector<std::pair<int64_t, int64_t>>& elements) : function_(function) {
    for (const auto& at : elements) {
      const double value = sizeof(X) > sizeof(Y) ? wide(rounded<Y>(wide(x[at.first]))) : wide(x[at.first]);
      x_.push_back(function == Function::softmin ? -value : value);
      if (x_.back() > m_) m_ = x_.back();
    }
    s_ = std::isinf(m_) ? 0 : m_;
    for (const Real v : x_) l_ += std::exp(v - s_);
  }

  // Its first elements, for a message.
  std::string begin() const {
    std::string text;
    for (size_t i = 0; i < x_.size() && i < 8; ++i) text += (i ? ", " : "") + std::to_string(double(x_[i]));
    return text;
  }

  // Of element i; of a state the maximum or, `second`, the sum.
  Real value(size_t i, bool second) const {
    if (function_ == Function::state) return second ? l_ : m_;
    if (function_ == Function::logsumexp) return s_ + std::log(l_);
    if (std::isinf(m_)) return std::numeric_limits<Real>::quiet_NaN();
    if (function_ == Function::log_softmax) return x_[i] - m_ - std::log(l_);
    return std::exp(x_[i] - m_) / l_;
  }

  Real limit(size_t i, bool second) const {
    const Real size = std::fabs(value(i, second)), roundings = 6 + Real(x_.size()) / 8;
    if (function_ == Function::state) return second ? (kOut.eps + roundings * kSum.eps) * size : 0;
    if (function_ == Function::logsumexp || function_ == Function::log_softmax)
      return (kOut.eps + roundings * kSum.eps) * (size > 1 ? size : 1);
    const Real below = std::isfinite(m_ - x_[i]) ? m_ - x_[i] : 0;
    return (kOut.eps + (roundings + below) * kSum.eps) * size + std::max(kSum.tiny, kOut.tiny * kOut.eps);
  }

  bool good(Y got, size_t i, bool second) const {
    Real want = value(i, second);
    if (std::fabs(want) > Real(kOut.top) * (1 + Real(kOut.eps) / 4)) want = want > 0 ? kInf : -kInf;
    const Real y = wide(got);
    if (std::isnan(want)) return std::isnan(y);
    return y == want || (std::isfinite(want) && std::fabs(y - want) <= limit(i, second));
  }
};

}  // namespace
