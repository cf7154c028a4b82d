// ring.cpp: the ring of cuda/ring.cuh by a shelf that is filled as late as it may be: each chunk has its vectors when
// it is taken, and those that stay in the shelf are found again. Prints how many rings were looked at.
#include <cstdio>
#include <map>
#include <utility>
#include <vector>

#define __device__
constexpr int kChunk = 4;
using Copy = std::pair<int, int>;  // a slot, and the vector that comes to it

std::map<int, int> shelf;               // slot -> vector
std::vector<std::vector<Copy>> on_way;  // groups, the oldest first
std::vector<Copy> open_group;

void commit_copies() { on_way.push_back(std::exchange(open_group, {})); }
template <int Pending>
void await_copies() {
  while (on_way.size() > Pending) {
    for (const auto& [slot, vector] : on_way.front()) shelf[slot] = vector;
    on_way.erase(on_way.begin());
  }
}
#include "cuda/ring.cuh"

template <int Slots>
bool is_sound(int places) {
  shelf.clear(), on_way.clear(), open_group.clear();
  Ring<Slots> ring;
  size_t most = 0;
  const auto ask = [&](int q, int slot) {
    for (int i = 0; i < kChunk; ++i) open_group.push_back({slot + i, q + i});
  };
  const auto is_there = [&](int slot, int q, int count) {
    for (int i = 0; i < count; ++i) {
      if (slot + i >= places || !shelf.count(slot + i) || shelf[slot + i] != q + i) return false;
    }
    return true;
  };
  int taken = 0;
  const auto take = [&](int q, int count) {
    ring.await();
    const bool there = is_there(ring.next(), q, count);
    ring.refill(taken++, ask);
    size_t copies = 0;
    for (const auto& group : on_way) copies += !group.empty();
    most = copies > most ? copies : most;
    return there;
  };
  ring.begin(places, ask);
  for (int q = 0; q < Slots; q += kChunk) {
    if (!take(q, Slots - q < kChunk ? Slots - q : kChunk)) return false;
  }
  for (int c = 0; c < places; c += kChunk) {
    if (!take(Slots + c, kChunk)) return false;
  }
  for (int again = 0; again < 2; ++again) {
    for (int c = 0; c < places; c += kChunk) {
      if (!is_there(ring.next(), Slots + c, kChunk)) return false;
    }
  }
  return places < kFew * kChunk || most >= kFew;
}

template <int... Slots>
int count(std::integer_sequence<int, Slots...>) {
  int sound = 0;
  for (int places = kChunk; places <= 64; places += kChunk) {
    const auto look = [&](bool yes, int slots) {
      if (!yes) std::printf("%d vectors in registers, %d in the shelf: ", slots, places);
      return sound += yes, yes;
    };
    if (!(look(is_sound<Slots + 1>(places), Slots + 1) && ...)) return -1;
  }
  return sound;
}

int main() {
  const int sound = count(std::make_integer_sequence<int, 24>());
  std::printf("%d", sound);
  return sound < 0;
}
