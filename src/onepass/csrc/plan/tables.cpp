// tables.cpp: the tables of each GPU: those that `onepass tune` has made, else the built-in ones.
#include "tables.h"

#include <atomic>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string_view>
#include <utility>

#include "tables_h200.h"

namespace onepass {

namespace {

using Registry = std::map<std::string, Tables, std::less<>>;  // by the name of the GPU
std::atomic<const Registry*> registry{nullptr};  // replaced as a whole, never freed: a call may be reading one

constexpr int kMostSlots = 24, kMostGradientSlots = 16;  // that kernels of columns are compiled for

bool power(int v, int most) { return v >= 1 && v <= most && (v & (v - 1)) == 0; }

std::string fault_of_columns(const Entry& entry, bool gradient) {
  const Tier tier = Tier(entry.tier);
  if (tier != Tier::columns && tier != Tier::columns_grid)
    return "the tables of columns have the tiers columns and columns-grid alone";
  if (!power(entry.split, 128)) return "split is a power of two up to 128";
  if (tier == Tier::columns_grid)
    return entry.lanes || entry.values || entry.shelf ? "columns-grid has a split alone, and 0 for the rest" : "";
  if (entry.lanes < 64 || entry.lanes > 512 || entry.lanes % 32) return "lanes is a multiple of 32 from 64 to 512";
  const int most = gradient ? kMostGradientSlots : kMostSlots;
  if (entry.values < 1 || entry.values > most || (entry.values > 16 && entry.values % 2))
    return "values is 1 to " + std::to_string(most) + ", and even beyond 16";
  if (entry.shelf != 1 && (entry.shelf < 0 || entry.shelf > 48 || entry.shelf % 4))
    return "shelf is 1, or a multiple of 4 up to 48";
  return "";
}

std::string fault(const Entry& entry, bool odd, bool few) {
  if ((odd || few) && entry.tier == kAsRows) return "";
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
    const int most = tier == Tier::grid ? 480 : 1024;
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

void check(const char* name, const std::vector<Entry>& table) {
  const std::string_view of = name;
  const auto is_of = [&](std::string_view kind) { return of.substr(0, kind.size()) == kind; };
  const bool odd = is_of("odd"), few = is_of("few"), columns = is_of("column"), gradient = is_of("column_gradients");
  const auto refuse = [&](const std::string& words) {
    throw std::runtime_error(std::string("onepass: table ") + name + ": " + words);
  };
  if (table.empty() || table.back().limit != kAnyLength) refuse("the last entry is for rows of any length");
  int64_t before = 0;
  for (const Entry& entry : table) {
    if (entry.limit <= before) refuse("limits rise, got " + std::to_string(entry.limit));
    before = entry.limit;
    const std::string words = columns ? fault_of_columns(entry, gradient) : fault(entry, odd, few);
    if (!words.empty()) refuse("limit " + std::to_string(entry.limit) + ": " + words);
  }
}

}  // namespace

const Tables& tables_of(const char* gpu) {
  if (const Registry* now = registry.load(std::memory_order_acquire)) {
    if (const auto found = now->find(gpu); found != now->end()) return found->second;
  }
  return built_in();
}

void set_tables(const char* gpu, Tables tables) {
  if (!*gpu) throw std::runtime_error("onepass: tables are of a GPU that has a name");
  for (const auto& [name, table] : kTables) check(name, tables.*table);
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  const Registry* const now = registry.load();
  Registry* const next = now ? new Registry(*now) : new Registry;
  (*next)[gpu] = std::move(tables);
  registry.store(next, std::memory_order_release);
  tables_version.fetch_add(1, std::memory_order_release);
}

}  // namespace onepass
