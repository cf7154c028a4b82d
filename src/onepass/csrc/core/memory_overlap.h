// memory_overlap.h: whether a call may write its output while it reads its input. Pure: no torch, no CUDA.
//
// An element at indices i starts at byte first + sum(i_k * stride_k). Two tensors share a byte if and only if a bounded
// linear equation has an integer solution. A depth-first search with pruning finds a solution or proves that there is
// none. In general this is NP-hard. For the strides of real views, nearly every branch is cut at its first step. A
// search that takes more than kSteps steps gives up and reports a shared byte, which is the safe answer. The functions
// named `surely_` use only strides: they decide nearly all calls, in nanoseconds.
//
// Source: numpy.shares_memory (numpy/core/src/common/mem_overlap.c) treats the same equation in the same way.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <utility>
#include <vector>

namespace onepass {

// A strided tensor in memory: the address of its first element, and its elements' size in bytes.
struct MemoryRange {
  uint64_t first;
  int size, rank;
  const int64_t *sizes, *strides;

  bool is_empty() const { return std::find(sizes, sizes + rank, 0) != sizes + rank; }
  uint64_t end() const {  // the address behind its last byte; only for a tensor that has elements
    int64_t last = 0;
    for (int i = 0; i < rank; ++i) last += (sizes[i] - 1) * strides[i];
    return first + uint64_t(last * size + size);
  }
};

// Whether each element has its own memory, as shown by strides: a step of each dim is longer than everything that the
// dims of smaller strides reach. False proves nothing.
inline bool surely_distinct(const MemoryRange& t) {
  for (int i = 0; i < t.rank; ++i) {
    if (t.sizes[i] <= 1) continue;
    int64_t reach = 0;
    for (int j = 0; j < t.rank; ++j) {
      const bool below = t.strides[j] < t.strides[i] || (t.strides[j] == t.strides[i] && j > i);
      if (j != i && t.sizes[j] > 1 && below) reach += (t.sizes[j] - 1) * t.strides[j];
    }
    if (t.strides[i] <= reach) return false;
  }
  return true;
}

// Whether one of two tensors that have elements lies completely behind the other. False proves nothing.
inline bool surely_apart(const MemoryRange& a, const MemoryRange& b) {
  return a.end() <= b.first || b.end() <= a.first;
}

// Whether two tensors of one shape are the same elements in the same order.
inline bool same_elements(const MemoryRange& a, const MemoryRange& b) {
  if (a.first != b.first || a.size != b.size || a.rank != b.rank) return false;
  for (int i = 0; i < a.rank; ++i) {
    if (a.sizes[i] != b.sizes[i] || (a.sizes[i] > 1 && a.strides[i] != b.strides[i])) return false;
  }
  return true;
}

// Whether sum(step * variable) can equal a target, for variables in 0 .. bound.
class Search {
 public:
  struct Term {
    int64_t step, bound;
  };

  explicit Search(const std::vector<Term>& given) {
    for (const Term& term : given) {
      if (!term.step || !term.bound) continue;
      const auto alike = [&](const Term& other) { return other.step == term.step; };
      const auto found = std::find_if(terms_.begin(), terms_.end(), alike);  // equal steps are one variable
      found == terms_.end() ? terms_.push_back(term) : void(found->bound += term.bound);
    }
    std::sort(terms_.begin(), terms_.end(), [](const Term& a, const Term& b) { return a.step > b.step; });
    reach_.assign(terms_.size() + 1, 0), divisor_.assign(terms_.size() + 1, 0);
    for (size_t k = terms_.size(); k-- > 0;) {
      reach_[k] = reach_[k + 1] + terms_[k].step * terms_[k].bound;
      divisor_[k] = std::gcd(divisor_[k + 1], terms_[k].step);
    }
  }

  // Also true if kSteps steps did not decide it.
  bool hits(int64_t target) { return target >= 0 && target <= reach_[0] && hits(0, target); }

 private:
  static constexpr int kSteps = 10'000;  // well under a millisecond

  std::vector<Term> terms_;               // the largest step first
  std::vector<int64_t> reach_, divisor_;  // of the terms from k on: the largest sum, and the greatest common divisor
  int steps_ = 0;

  static int64_t modulo(int64_t a, int64_t m) { return (a % m + m) % m; }
  // The x in 0 .. m - 1 with a * x = 1 (mod m), where `a` and m have no common divisor.
  static int64_t inverse(int64_t a, int64_t m) {
    int64_t x = 0, next_x = 1, r = m, next_r = modulo(a, m);
    while (next_r) {
      const int64_t q = r / next_r;
      x = std::exchange(next_x, x - q * next_x);
      r = std::exchange(next_r, r - q * next_r);
    }
    return modulo(x, m);
  }

  bool hits(size_t k, int64_t left) {
    if (left == 0) return true;
    if (k == terms_.size() || left % divisor_[k]) return false;
    if (++steps_ > kSteps) return true;
    const auto [step, bound] = terms_[k];
    const int64_t short_of = left - reach_[k + 1];  // what the later terms cannot reach
    const int64_t low = short_of > 0 ? (short_of + step - 1) / step : 0, high = std::min(bound, left / step);
    if (k + 1 == terms_.size()) return low <= high;
    // The remainder must be divisible by the divisor of the later terms. So the variable takes steps of `jump` from a
    // residue.
    const int64_t jump = divisor_[k + 1] / divisor_[k];
    const __int128 residue = __int128(left / divisor_[k] % jump) * inverse(step / divisor_[k], jump) % jump;
    for (int64_t value = low + modulo(int64_t(residue) - low, jump); value <= high; value += jump) {
      if (hits(k + 1, left - step * value)) return true;
    }
    return false;
  }
};

enum class Overlap { none, same, partial };

// How the memory of two tensors overlaps. `same`: they are the same elements in the same order, so that an element-wise
// kernel may write one while it reads the other. `partial`: they share a byte, or the search did not exclude it.
inline Overlap overlap(const MemoryRange& a, const MemoryRange& b) {
  if (a.is_empty() || b.is_empty() || surely_apart(a, b)) return Overlap::none;
  if (same_elements(a, b)) return Overlap::same;
  // a.first + i*s + u = b.first + j*t + v, with bytes u of a's element and v of b's. Counting j and v from their ends
  // (j' = max - j, v' = max - v) makes every coefficient positive: i*s + j'*t + (u + v') = b.end - 1 - a.first.
  std::vector<Search::Term> terms{{1, a.size + b.size - 2}};
  for (const MemoryRange* t : {&a, &b}) {
    for (int i = 0; i < t->rank; ++i) terms.push_back({t->strides[i] * t->size, t->sizes[i] - 1});
  }
  return Search(terms).hits(int64_t(b.end() - 1 - a.first)) ? Overlap::partial : Overlap::none;
}

// Whether two indices address the same element, as in an expanded tensor. Also true if the search did not exclude it.
inline bool self_overlap(const MemoryRange& t) {
  if (t.is_empty() || surely_distinct(t)) return false;
  std::vector<Search::Term> dims;  // the largest stride first
  for (int i = 0; i < t.rank; ++i) {
    if (t.sizes[i] > 1 && t.strides[i] == 0) return true;
    if (t.sizes[i] > 1) dims.push_back({t.strides[i], t.sizes[i] - 1});
  }
  std::sort(dims.begin(), dims.end(), [](const auto& a, const auto& b) { return a.step > b.step; });
  // Two indices of one address differ, from the largest stride down, first in some k, by 1 + z (z in 0 .. bound - 1).
  // Later dims, of strides s, compensate by differences d: sum(d * s) = (1 + z) * step. With d' = d + bound_s in 0 .. 2
  // * bound_s and z' = bound - 1 - z no coefficient is negative: sum(d' * s) + z' * step = rest + bound * step.
  for (size_t k = 0; k < dims.size(); ++k) {
    std::vector<Search::Term> terms{{dims[k].step, dims[k].bound - 1}};
    int64_t rest = 0;  // how far the smaller strides reach
    for (size_t j = k + 1; j < dims.size(); ++j) {
      terms.push_back({dims[j].step, 2 * dims[j].bound});
      rest += dims[j].step * dims[j].bound;
    }
    if (dims[k].step <= rest && Search(terms).hits(rest + dims[k].bound * dims[k].step)) return true;
  }
  return false;
}

}  // namespace onepass
