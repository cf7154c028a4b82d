// tables.cpp: the tables of each GPU: set by `onepass tune`, or else the built-in ones. An entry is validated when it
// is set; validate.h validates single plans.
#include "tables.h"

#include <atomic>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string_view>
#include <utility>

#include "../core/types.h"
#include "tables_h200.h"

namespace onepass {

namespace {

using Registry = std::map<std::string, Tables, std::less<>>;  // by the name of the GPU
std::atomic<const Registry*> registry{nullptr};  // replaced as a whole, never freed: a call may be reading one

// The most vectors per thread that kernels of columns are compiled for.
constexpr int kMaxVecs = 24, kMaxGradientVecs = 16;

std::string validate_column_entry(const Entry& entry, bool gradient) {
  const Tier tier = Tier(entry.tier);
  if (tier != Tier::columns && tier != Tier::columns_grid)
    return "the tables of columns have the tiers columns and columns-grid alone";
  if (!is_power_of_two(entry.blocks_per_row, 128)) return "tile_vecs is a power of two up to 128";
  if (tier == Tier::columns_grid)
    return entry.threads || entry.items_per_thread || entry.smem_vecs
               ? "columns-grid has tile_vecs alone, and 0 for the rest"
               : "";
  if (entry.threads < 64 || entry.threads > 512 || entry.threads % 32)
    return "threads is a multiple of 32 from 64 to 512";
  const int most = gradient ? kMaxGradientVecs : kMaxVecs;
  if (entry.items_per_thread < 1 || entry.items_per_thread > most ||
      (entry.items_per_thread > 16 && entry.items_per_thread % 2))
    return "vecs_per_thread is 1 to " + std::to_string(most) + ", and even beyond 16";
  if (entry.smem_vecs != 1 && (entry.smem_vecs < 0 || entry.smem_vecs > 48 || entry.smem_vecs % 4))
    return "smem_vecs is 1, or a multiple of 4 up to 48";
  return "";
}

std::string validate_entry(const Entry& entry, bool unaligned, bool few_rows) {
  if ((unaligned || few_rows) && entry.tier == kUseWriteTable) return "";
  if (entry.tier < 0 || entry.tier >= kTiers) return "no such tier";
  const Tier tier = Tier(entry.tier);
  if (unaligned && tier != Tier::staged) return "the unaligned tables have the tier staged alone";
  if (tier == Tier::warp || tier == Tier::staged) {
    const int64_t most = int64_t(entry.threads) * 64;
    if (!is_power_of_two(entry.threads, 32)) return "threads is a power of two up to 32";
    if (entry.limit > most) return "so few threads keep rows of up to " + std::to_string(most) + " elements";
    return "";
  }
  if (tier == Tier::grid || tier == Tier::twopass) {
    const int most = tier == Tier::grid ? 480 : 1024;
    if (entry.threads < 64 || entry.threads > most || entry.threads % 32)
      return "threads is a multiple of 32 from 64 to " + std::to_string(most);
    return entry.items_per_thread < 8 || entry.items_per_thread > 64 || entry.items_per_thread % 8
               ? "items_per_thread is a multiple of 8 up to 64"
               : "";
  }
  if (entry.threads < 0 || entry.threads > 1024 || entry.threads % 32)
    return "threads is 0 or a multiple of 32 up to 1024";
  if (entry.items_per_thread < 8 || entry.items_per_thread > 64 || entry.items_per_thread % 4)
    return "items_per_thread is a multiple of 4 from 8 to 64";
  if (entry.smem_vecs < 0 || entry.smem_vecs > 24 || entry.smem_vecs % 2) return "smem_vecs is an even number up to 24";
  if (tier == Tier::block ? entry.blocks_per_row != 1
                          : !is_power_of_two(entry.blocks_per_row, 16) || entry.blocks_per_row < 2)
    return "blocks_per_row is 1 for a block, and 2, 4, 8 or 16 for a cluster";
  return "";
}

void check(const char* name, const std::vector<Entry>& table) {
  const auto is_of = [&](const char* kind) { return std::string_view(name).rfind(kind, 0) == 0; };
  const bool unaligned = is_of("unaligned"), few_rows = is_of("few_rows"), gradient = is_of("columns_backward");
  const auto refuse = [&](const std::string& words) {
    throw std::runtime_error(std::string("onepass: table ") + name + ": " + words);
  };
  if (table.empty() || table.back().limit != kAnyLength) refuse("the last entry is for rows of any length");
  int64_t before = 0;
  for (const Entry& entry : table) {
    if (entry.limit <= before) refuse("limits rise, got " + std::to_string(entry.limit));
    before = entry.limit;
    const std::string words =
        is_of("column") ? validate_column_entry(entry, gradient) : validate_entry(entry, unaligned, few_rows);
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

const std::vector<Entry>& rows_backward_table(bool half) { return built_in_rows_backward(half); }
const std::vector<Entry>& unaligned_rows_backward_table(bool half) { return built_in_unaligned_rows_backward(half); }

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
