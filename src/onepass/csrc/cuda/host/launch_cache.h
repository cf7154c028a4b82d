// launch_cache.h: a cache of what a thread has lately made for problems, such as launches. Pure: no torch, no CUDA.
#pragma once

#include <cstring>

#include "../../core/problem.h"
#include "../kernels/column_params.cuh"

namespace onepass::cuda {

// Everything that determines the plan and the launch of a problem on one machine. Problems with equal keys differ only
// in addresses and stream. No vector is longer than 16 bytes, so addresses count only modulo 16. No plan depends on the
// address of kLse.
class LaunchKey {
 public:
  LaunchKey() = default;
  // `tables` is the version of the tables, which the caller reads before it reads the tables. `scores`: what else the
  // plan of a scored problem depends on.
  LaunchKey(const Problem& problem, int device, bool invariant, uint64_t tables, unsigned scores = 0)
      : kind_(tables << 1 | 1), count_(0) {
    add_to_kind(uint64_t(device), 8), add_to_kind(invariant, 1), add_to_kind(problem.is_backward(), 1);
    add_to_kind(scores, 3);
    add_to_kind(uint64_t(problem.function), 3);
    add_to_kind(uint64_t(problem.in_type()), 2), add_to_kind(uint64_t(problem.out_type()), 2);
    for (int t = 0; t < problem.count_tensors(); ++t) add_to_kind(problem.address(t) % 16, 4);
    add_dims(problem.layout.outer), add_dims(problem.layout.reduced);
  }

  bool operator==(const LaunchKey& other) const {  // the kind implies how many numbers there are
    return kind_ == other.kind_ && std::memcmp(numbers_, other.numbers_, size_t(count_) * sizeof numbers_[0]) == 0;
  }
  // The top bits are well mixed. The products are independent of each other, so that the processor overlaps them.
  uint64_t hash() const {
    uint64_t sum = kind_ * 0x9e3779b97f4a7c15u, factor = 0xbf58476d1ce4e5b9u;
    for (int i = 0; i < count_; ++i, factor += 0x94d049bb133111eau) sum += uint64_t(numbers_[i]) * factor;
    return sum;
  }

 private:
  void add_to_kind(uint64_t value, int bits) { kind_ = kind_ << bits | value; }
  void add_dims(const DimGroup& dims) {
    static_assert(kTileDims < 8);
    add_to_kind(uint64_t(dims.count), 3);
    std::memcpy(numbers_ + count_, dims.dims, size_t(dims.count) * sizeof(Dim));
    count_ += dims.count * kDimNumbers;
  }

  static constexpr int kDimNumbers = sizeof(Dim) / sizeof(int64_t);
  uint64_t kind_;
  int count_;
  int64_t numbers_[2 * kTileDims * kDimNumbers];  // all dims of the layout
};

// Values by key. A key has one slot, and evicts another key from it. An empty slot is all zeros; no key has the kind 0.
// It needs no constructor and no destructor, so that it can be thread_local.
template <class Key, class Value>
class LaunchCache {
 public:
  // The value of `key`, or null.
  const Value* find(const Key& key) const {
    const Slot& slot = slots_[slot_of(key)];
    return slot.key == key ? &slot.value : nullptr;
  }
  const Value& put(const Key& key, const Value& value) {
    Slot& slot = slots_[slot_of(key)];
    slot = {key, value};
    return slot.value;
  }

 private:
  static constexpr int kBits = 5;
  struct Slot {
    Key key;
    Value value;
  };
  static size_t slot_of(const Key& key) { return size_t(key.hash() >> (64 - kBits)); }

  Slot slots_[1 << kBits] = {};
};

}  // namespace onepass::cuda
