// launch_cache.h: what a thread has lately made of calls, by all that it follows from. Pure: no torch, no CUDA.
#pragma once

#include <cstring>
#include <initializer_list>

#include "../../core/backward_layout.h"
#include "../../core/problem.h"
#include "../kernels/column_params.cuh"

namespace onepass::cuda {

// What the plan and the launch of a call follow from, on one machine: calls of equal keys differ in their addresses and
// their stream alone. The small numbers that every key has are packed into one; `tables` is the version of the tables,
// read before they are. Of an address only its place within 16 bytes counts, since no vector is longer.
inline uint64_t kind_of(uint64_t tables, int device, bool invariant, Function function, DType from, DType to,
                        std::initializer_list<const void*> addresses) {
  uint64_t kind = tables;
  const auto add = [&](uint64_t value, int bits) { kind = kind << bits | value; };
  add(uint64_t(device), 8), add(invariant, 1);
  add(uint64_t(function), 3), add(uint64_t(from), 2), add(uint64_t(to), 2);
  for (const void* address : addresses) add(uint64_t(address) % 16, 4);
  return kind;
}

// Of rows.
struct RowKey {
  uint64_t kind;
  int64_t rows, n, x_stride, y_stride;

  RowKey() = default;
  RowKey(const Call& call, int device, bool invariant, uint64_t tables)
      : kind(kind_of(tables, device, invariant, call.function, call.x_type, call.y_type, {call.x, call.y})),
        rows(call.layout.rows),
        n(call.layout.n),
        x_stride(call.layout.row_x_stride()),
        y_stride(call.layout.row_y_stride()) {}

  bool operator==(const RowKey& other) const {
    return kind == other.kind && rows == other.rows && n == other.n && x_stride == other.x_stride &&
           y_stride == other.y_stride;
  }
  uint64_t mixed() const {
    uint64_t mixed = (kind ^ uint64_t(x_stride)) * 0x9e3779b97f4a7c15u;
    mixed = (mixed ^ mixed >> 32 ^ uint64_t(n)) * 0xbf58476d1ce4e5b9u;
    return (mixed ^ mixed >> 32 ^ uint64_t(rows)) * 0x94d049bb133111ebu;
  }
};

// Of columns: all dims that are left of a call or of a gradient, as their bags have them.
struct ColumnKey {
  uint64_t kind;
  int count;
  int64_t numbers[2 * kTileDims * (1 + kTileTensors)];

  ColumnKey() = default;
  ColumnKey(const Call& call, int device, bool invariant, uint64_t tables)
      : ColumnKey(kind_of(tables, device, invariant, call.function, call.x_type, call.y_type, {call.x, call.y}), false,
                  call.layout.outer, call.layout.reduced) {}
  // (No plan looks at where lse lies.)
  ColumnKey(const BackwardCall& call, int device, bool invariant, uint64_t tables)
      : ColumnKey(kind_of(tables, device, invariant, call.function, call.type, call.dx_type,
                          {call.dx, call.saved, call.grad}),
                  true, call.layout.outer, call.layout.reduced) {}

  bool operator==(const ColumnKey& other) const {
    return kind == other.kind && std::memcmp(numbers, other.numbers, size_t(count) * sizeof numbers[0]) == 0;
  }
  uint64_t mixed() const {
    uint64_t mixed = kind;
    for (int i = 0; i < count; ++i) mixed = (mixed ^ mixed >> 32 ^ uint64_t(numbers[i])) * 0x9e3779b97f4a7c15u;
    return mixed;
  }

 private:
  // The kind tells how many numbers there are.
  template <class Bag>
  ColumnKey(uint64_t of_call, bool gradient, const Bag& outer, const Bag& reduced) : count(0) {
    kind = ((of_call << 1 | gradient) << 3 | uint64_t(outer.count)) << 3 | uint64_t(reduced.count);
    static_assert(kTileDims < 8 && sizeof outer.dims[0] <= (1 + kTileTensors) * sizeof numbers[0]);
    for (const Bag* group : {&outer, &reduced}) {
      std::memcpy(numbers + count, group->dims, size_t(group->count) * sizeof group->dims[0]);
      count += group->count * int(sizeof group->dims[0] / sizeof numbers[0]);
    }
  }
};

// Values by key, each in the one place that its key has; another key of that place puts it out. A key has rows, or
// dims, so that a place that was never taken (all zeros) has no key. For thread_local: it is all zeros at first and
// needs no destructor.
template <class Key, class Value>
class Recent {
 public:
  // The value of `key`, or null.
  const Value* find(const Key& key) const {
    const Place& place = places_[place_of(key)];
    return place.key == key ? &place.value : nullptr;
  }
  void put(const Key& key, const Value& value) { places_[place_of(key)] = {key, value}; }

 private:
  static constexpr int kBits = 5;
  struct Place {
    Key key;
    Value value;
  };
  static size_t place_of(const Key& key) { return size_t(key.mixed() >> (64 - kBits)); }

  Place places_[1 << kBits] = {};
};

}  // namespace onepass::cuda
