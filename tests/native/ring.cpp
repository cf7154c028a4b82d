// ring.cpp: the ring of pipeline.cuh by a shelf that is filled as late as it may be, over three tiles: each chunk has
// its vectors when it is taken, and those that stay on the shelf are found again. Prints how many rings were looked at.
#include <cstdint>
#include <cstdio>
#include <map>
#include <utility>
#include <vector>

#define __device__
constexpr int kChunk = 4, kOperands = 2, THREADS = 8, V = 4, kTile = 1 << 20;
constexpr bool kSlab = true, kFull = false;
using IN = float;
using Copy = std::pair<uint32_t, const IN*>;  // where to, and the vector that comes there

std::map<uint32_t, const IN*> shelf;
std::vector<std::vector<Copy>> on_way;  // groups, the oldest first
std::vector<Copy> open_group;

struct Tiles {
  int turns, shelf;
  int64_t jump[3];
};
template <int Tensors>
struct Place {
  const Tiles& tiles;
  int64_t at[3];
  int whole, first;
};
uint32_t place_of(int, int) { return 4096; }
const IN* next(const IN* at, int64_t step) { return at + step; }
template <int Bytes>
void fetch(uint32_t to, const IN* at) {
  open_group.push_back({to, at});
}
void commit_copies() { on_way.push_back(std::exchange(open_group, {})); }
template <int Pending>
void await_copies() {
  while (on_way.size() > Pending) {
    for (const auto& [to, at] : on_way.front()) shelf[to] = at;
    on_way.erase(on_way.begin());
  }
}
#include "cuda/kernels/pipeline.cuh"

std::vector<IN> memory(8 * kTile);

// `registers` and `places` in chunks, `turns` vectors, of which the last is no whole one, nor, if `part`, the first.
bool is_sound(int registers, int places, int turns, bool part) {
  shelf.clear(), on_way.clear(), open_group.clear();
  const Tiles tiles = {turns, places * kChunk, {0, 7, 9}};
  const IN *one = memory.data(), *other = memory.data() + 4 * kTile;
  const auto place = [&](int tile) {
    return Place<3>{tiles, {0, int64_t(tile) * kTile, int64_t(tile) * kTile + 5}, turns - 1, part};
  };
  Ring ring(tiles);
  ring.turn_to(place(0), true, 1, one, other);
  do ring.ask();
  while (ring.to != ring.begin);
  for (int tile = 0; tile < 3; ++tile) {
    const auto has = [&](uint32_t at, int q) {
      for (int i = 0; i < kChunk; ++i) {
        if (q + i >= turns - 1 || (part && q + i == 0)) continue;
        for (int o = 0; o < kOperands; ++o) {
          const IN* const vector = o ? other + tile * kTile + 5 + (q + i) * 9 : one + tile * kTile + (q + i) * 7;
          if (shelf[at + i * Ring::kSlot + o * (Ring::kSlot / kOperands)] != vector) return false;
        }
      }
      return at >= 4096 && at + Ring::kStep <= 4096u + places * Ring::kStep;
    };
    const auto ask = [&] {
      if (ring.rest <= 0) ring.turn_to(place(tile + 1), tile < 2, 1, one, other);
      ring.ask();
    };
    const int kept = registers * kChunk, staying = turns > kept ? (turns - kept + kChunk - 1) / kChunk : 0;
    for (int q = 0; q < turns; q += kChunk) {
      if (!has(ring.take(q < kept ? 0 : (q - kept) / kChunk), q)) return false;
      if (q < kept) ask();
    }
    ring.back(staying);
    for (int q = kept; q < turns; q += kChunk) {
      if (!has(ring.again(), q)) return false;
      ask();
    }
  }
  return true;
}

int main() {
  int sound = 0;
  for (int registers = 1; registers <= 6; ++registers) {
    for (int places = 1; places <= 14; ++places) {
      for (int turns = kChunk * registers - 3; turns <= kChunk * (registers + places); ++turns) {
        for (const bool part : {false, true}) {
          if (!is_sound(registers, places, turns, part))
            return std::printf("%d chunks in registers, %d on the shelf, %d vectors", registers, places, turns), 1;
          ++sound;
        }
      }
    }
  }
  std::printf("%d", sound);
}
