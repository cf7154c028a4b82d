// tables.cpp: the tables that come with onepass, and those that `onepass tune` has made.
#include "tables.h"

#include <atomic>
#include <map>
#include <mutex>
#include <stdexcept>
#include <utility>

namespace onepass {

namespace {

constexpr int kWarp = int(Tier::warp), kFlat = int(Tier::flat), kBlock = int(Tier::block),
              kCluster = int(Tier::cluster), kGrid = int(Tier::grid);

// H200, 2026-11-21: the fastest plans of a sweep over inputs of 1 GiB
// (benchmarks/results/sweep-rows-h200-2026-11-21.json).
const Tables& built_in() {
  static const Tables tables = {
      "built in, of an H200 (2026-11-21)",
      {
          {4, kWarp, 1, 0, 1, 0},
          {24, kWarp, 2, 0, 1, 0},
          {48, kWarp, 4, 0, 1, 0},
          {112, kWarp, 8, 0, 1, 0},
          {224, kWarp, 16, 0, 1, 0},
          {256, kWarp, 32, 0, 1, 0},
          {320, kWarp, 16, 0, 1, 0},
          {896, kWarp, 32, 0, 1, 0},
          {4160, kBlock, 0, 20, 1, 0},
          {7168, kBlock, 0, 24, 1, 0},
          {8256, kBlock, 0, 28, 1, 0},
          {13312, kCluster, 0, 32, 2, 0},
          {20480, kCluster, 0, 28, 4, 0},
          {36864, kCluster, 128, 32, 8, 4},
          {61440, kCluster, 128, 28, 8, 8},
          {66560, kCluster, 128, 32, 16, 0},
          {122880, kCluster, 128, 28, 16, 8},
          {139264, kCluster, 192, 28, 16, 8},
          {163840, kCluster, 160, 28, 16, 8},
          {204800, kCluster, 192, 28, 16, 12},
          {245760, kCluster, 256, 28, 16, 12},
          {280000, kCluster, 256, 32, 16, 12},
          {557056, kCluster, 320, 32, 16, 12},
          {kAnyLength, kGrid, 512, 16, 1, 0},
      },
      {
          {8, kWarp, 1, 0, 1, 0},
          {16, kWarp, 2, 0, 1, 0},
          {24, kFlat, 2, 0, 1, 0},
          {48, kWarp, 2, 0, 1, 0},
          {112, kWarp, 4, 0, 1, 0},
          {224, kWarp, 8, 0, 1, 0},
          {448, kWarp, 16, 0, 1, 0},
          {1280, kWarp, 32, 0, 1, 0},
          {12800, kBlock, 0, 40, 1, 0},
          {15360, kCluster, 128, 32, 2, 4},
          {17408, kBlock, 0, 56, 1, 0},
          {22528, kCluster, 160, 32, 2, 6},
          {25600, kCluster, 0, 56, 2, 0},
          {29696, kCluster, 128, 56, 4, 0},
          {34816, kCluster, 128, 32, 4, 4},
          {37888, kCluster, 128, 40, 4, 4},
          {41984, kCluster, 160, 32, 4, 4},
          {47104, kCluster, 160, 40, 4, 4},
          {53248, kCluster, 128, 40, 4, 8},
          {58368, kCluster, 128, 56, 8, 0},
          {67584, kCluster, 128, 32, 8, 4},
          {75776, kCluster, 128, 40, 8, 4},
          {84992, kCluster, 160, 32, 8, 4},
          {106496, kCluster, 128, 32, 8, 8},
          {118784, kCluster, 128, 32, 8, 12},
          {135168, kCluster, 256, 32, 8, 4},
          {163840, kCluster, 192, 40, 8, 8},
          {189440, kCluster, 192, 32, 8, 12},
          {212992, kCluster, 128, 40, 16, 8},
          {245760, kCluster, 256, 32, 8, 12},
          {270336, kCluster, 160, 40, 16, 8},
          {557056, kCluster, 192, 40, 16, 12},
          {1100000, kCluster, 480, 48, 16, 12},
          {kAnyLength, kGrid, 512, 32, 1, 0},
      },
      {
          {40, kFlat, 1, 0, 1, 0},
          {60, kFlat, 2, 0, 1, 0},
          {130, kFlat, 4, 0, 1, 0},
          {260, kFlat, 8, 0, 1, 0},
          {420, kFlat, 16, 0, 1, 0},
          {kAnyLength, kAsRows, 0, 0, 1, 0},
      },
      {
          {40, kFlat, 1, 0, 1, 0},
          {60, kFlat, 2, 0, 1, 0},
          {150, kFlat, 4, 0, 1, 0},
          {260, kFlat, 8, 0, 1, 0},
          {600, kFlat, 16, 0, 1, 0},
          {1536, kFlat, 32, 0, 1, 0},
          {kAnyLength, kAsRows, 0, 0, 1, 0},
      },
  };
  return tables;
}

using Registry = std::map<std::pair<int, int>, Tables>;
std::atomic<const Registry*> registry{nullptr};  // replaced as a whole, never freed: a call may be reading one

std::string fault(const Entry& entry, bool odd) {
  const auto power = [](int v, int most) { return v >= 1 && v <= most && (v & (v - 1)) == 0; };
  if (odd && entry.tier == kAsRows) return "";
  if (entry.tier < 0 || entry.tier >= kTiers) return "no such tier";
  const Tier tier = Tier(entry.tier);
  if (odd && tier != Tier::flat) return "the odd tables have the flat tier alone";
  if (tier == Tier::warp || tier == Tier::flat) {
    const int64_t most = int64_t(entry.lanes) * 64;
    if (!power(entry.lanes, 32)) return "lanes is a power of two up to 32";
    if (entry.limit > most) return "so few lanes keep rows of up to " + std::to_string(most) + " elements";
    return "";
  }
  if (tier == Tier::grid || tier == Tier::stream) {
    const int most = tier == Tier::grid ? 512 : 1024;
    if (entry.lanes < 64 || entry.lanes > most || entry.lanes % 32)
      return "lanes is a multiple of 32 from 64 to " + std::to_string(most);
    return entry.values < 8 || entry.values > 64 || entry.values % 8 ? "values is a multiple of 8 up to 64" : "";
  }
  if (entry.lanes < 0 || entry.lanes > 1024 || entry.lanes % 32) return "lanes is 0 or a multiple of 32 up to 1024";
  if (entry.values < 8 || entry.values > 64 || entry.values % 4) return "values is a multiple of 4 from 8 to 64";
  if (entry.shelf < 0 || entry.shelf > 24 || entry.shelf % 2) return "shelf is an even number up to 24";
  if (tier == Tier::block ? entry.split != 1 : !power(entry.split, 16) || entry.split < 2)
    return "split is 1 for a block, and 2, 4, 8 or 16 for a cluster";
  return "";
}

void check(const char* name, const std::vector<Entry>& table, bool odd) {
  const auto refuse = [&](const std::string& words) {
    throw std::runtime_error(std::string("onepass: table ") + name + ": " + words);
  };
  if (table.empty() || table.back().limit != kAnyLength) refuse("the last entry is for rows of any length");
  int64_t before = 0;
  for (const Entry& entry : table) {
    if (entry.limit <= before) refuse("limits rise, got " + std::to_string(entry.limit));
    before = entry.limit;
    const std::string words = fault(entry, odd);
    if (!words.empty()) refuse("limit " + std::to_string(entry.limit) + ": " + words);
  }
}

}  // namespace

const Tables& tables_of(int compute, int multiprocessors) {
  if (const Registry* now = registry.load(std::memory_order_acquire)) {
    if (const auto found = now->find({compute, multiprocessors}); found != now->end()) return found->second;
  }
  return built_in();
}

void set_tables(int compute, int multiprocessors, Tables tables) {
  check("rows32", tables.rows32, false);
  check("rows16", tables.rows16, false);
  check("odd32", tables.odd32, true);
  check("odd16", tables.odd16, true);
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  const Registry* const now = registry.load();
  Registry* const next = now ? new Registry(*now) : new Registry;
  (*next)[{compute, multiprocessors}] = std::move(tables);
  registry.store(next, std::memory_order_release);
  tables_version.fetch_add(1, std::memory_order_release);
}

}  // namespace onepass
