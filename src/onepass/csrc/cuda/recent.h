// recent.h: what a thread has lately made of calls, by all that it follows from. Pure: no torch, no CUDA.
#pragma once

#include "../call.h"

namespace onepass::cuda {

// What the plan and the launch of a call follow from, on one machine: calls of equal keys differ in their addresses and
// their stream alone. Of an address only its place within 16 bytes counts, since no vector is longer.
struct Key {
  uint64_t kind;
  int64_t rows, n, x_stride, y_stride;

  bool operator==(const Key& other) const {
    return kind == other.kind && rows == other.rows && n == other.n && x_stride == other.x_stride &&
           y_stride == other.y_stride;
  }
};

// `tables` is the version of the tables, read before they are.
inline Key key_of(const Call& call, int device, bool invariant, uint64_t tables) {
  uint64_t kind = tables;
  const auto add = [&](uint64_t value, int bits) { kind = kind << bits | value; };
  add(uint64_t(device), 8), add(invariant, 1);
  add(uint64_t(call.function), 3), add(uint64_t(call.x_type), 2), add(uint64_t(call.y_type), 2);
  add(uint64_t(call.x) % 16, 4), add(uint64_t(call.y) % 16, 4);
  const Layout& layout = call.layout;
  return {kind, layout.rows, layout.n, layout.row_x_stride(), layout.row_y_stride()};
}

// Values by key, each in the one place that its key has; another key of that place puts it out. A key has rows, so that
// a place that was never taken (all zeros) has no key. For thread_local: it is all zeros at first and needs no
// destructor.
template <class Value>
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
  static size_t place_of(const Key& key) {
    uint64_t mixed = (key.kind ^ uint64_t(key.x_stride)) * 0x9e3779b97f4a7c15u;
    mixed = (mixed ^ mixed >> 32 ^ uint64_t(key.n)) * 0xbf58476d1ce4e5b9u;
    mixed = (mixed ^ mixed >> 32 ^ uint64_t(key.rows)) * 0x94d049bb133111ebu;
    return size_t(mixed >> (64 - kBits));
  }

  Place places_[1 << kBits] = {};
};

}  // namespace onepass::cuda
