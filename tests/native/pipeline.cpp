// pipeline.cpp: the pipeline of pipeline.cuh with copies that arrive as late as they may, over three tiles. Each stage
// has its vectors when it is read, and the stages that stay in shared memory are found again. Prints how many pipelines
// were checked.
#include <cstdint>
#include <cstdio>
#include <map>
#include <utility>
#include <vector>

#define __device__
#define __builtin_assume(condition)
#include "cuda/kernels/pipeline.cuh"

constexpr int kTile = 1 << 20;
constexpr unsigned kSmem = 4096;  // address of the buffer

struct C {
  using In = float;
  static constexpr int kOperands = 2, kBlockThreads = 8, kVecSize = 4;
  static constexpr bool kSlab = true, kAligned = false;
};
using In = C::In;

std::map<unsigned, const In*> smem;  // which vector is at an address
struct LateCopy {
  using Copies = std::vector<std::pair<unsigned, const In*>>;
  static inline std::vector<Copies> on_way;  // groups, the oldest first
  static inline Copies group;

  template <int Bytes>
  static void start(unsigned to, const In* from) {
    group.push_back({to, from});
  }
  static void commit() { on_way.push_back(std::exchange(group, {})); }
  template <int Pending>
  static void wait() {
    while (on_way.size() > Pending) {
      for (const auto& [to, from] : on_way.front()) smem[to] = from;
      on_way.erase(on_way.begin());
    }
  }
};
using TestPipeline = Pipeline<C, LateCopy>;

struct Tile {
  const Tiles& tiles;
  int64_t at[3];
  int full, first;
  static constexpr bool kMayBeginBefore = false;
};

std::vector<In> memory(8 * kTile);

// `registers` and `places` are numbers of stages, `vecs` of vectors. The last vector is not full, nor is the first if
// `first_is_partial`.
bool is_sound(int registers, int places, int vecs, bool first_is_partial) {
  smem.clear(), LateCopy::on_way.clear(), LateCopy::group.clear();
  Tiles tiles = {};
  tiles.vecs_per_thread_max = vecs, tiles.smem_vecs = places * kStageVecs;
  tiles.vec_strides[1] = 7, tiles.vec_strides[2] = 9;
  const In *one = memory.data(), *other = memory.data() + 4 * kTile;
  const auto tile_of = [&](int tile) {
    return Tile{tiles, {0, int64_t(tile) * kTile, int64_t(tile) * kTile + 5}, vecs - 1, first_is_partial};
  };
  TestPipeline pipeline(tiles, kSmem);
  pipeline.begin_tile(tile_of(0), true, 1, one, other);
  pipeline.fill();
  for (int tile = 0; tile < 3; ++tile) {
    const auto has_stage = [&](unsigned at, int q) {
      for (int i = 0; i < kStageVecs; ++i) {
        if (q + i >= vecs - 1 || (first_is_partial && q + i == 0)) continue;
        for (int o = 0; o < C::kOperands; ++o) {
          const In* const vector = o ? other + tile * kTile + 5 + (q + i) * 9 : one + tile * kTile + (q + i) * 7;
          if (smem[at + i * TestPipeline::kSlotBytes + o * (TestPipeline::kSlotBytes / C::kOperands)] != vector)
            return false;
        }
      }
      return at >= kSmem && at + TestPipeline::kStageBytes <= kSmem + places * TestPipeline::kStageBytes;
    };
    const auto prefetch = [&] {
      if (pipeline.rest <= 0) pipeline.begin_tile(tile_of(tile + 1), tile < 2, 1, one, other);
      pipeline.prefetch();
    };
    const int kept = registers * kStageVecs, resident = vecs > kept ? (vecs - kept + kStageVecs - 1) / kStageVecs : 0;
    for (int q = 0; q < vecs; q += kStageVecs) {
      if (!has_stage(pipeline.wait_next(q < kept ? 0 : (q - kept) / kStageVecs), q)) return false;
      if (q < kept) prefetch();
    }
    pipeline.rewind(resident);
    for (int q = kept; q < vecs; q += kStageVecs) {
      if (!has_stage(pipeline.next(), q)) return false;
      prefetch();
    }
  }
  return true;
}

int main() {
  int sound = 0;
  for (int registers = 1; registers <= 6; ++registers) {
    for (int places = 1; places <= 14; ++places) {
      for (int vecs = kStageVecs * registers - 3; vecs <= kStageVecs * (registers + places); ++vecs) {
        for (const bool first_is_partial : {false, true}) {
          if (!is_sound(registers, places, vecs, first_is_partial)) {
            std::printf("%d stages in registers, %d in shared memory, %d vectors", registers, places, vecs);
            return 1;
          }
          ++sound;
        }
      }
    }
  }
  std::printf("%d", sound);
}
