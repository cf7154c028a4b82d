// fake_driver.h: a driver without a GPU, for programs that link the host code of the CUDA engine. A kernel is the words
// that it would be made from.
#pragma once

#include <atomic>
#include <stdexcept>

#include "cuda/host/launch.h"

using namespace onepass;
using namespace onepass::cuda;

namespace onepass::cuda {

// The program's own: takes a launch.
Result taken(const LaunchConfig& config, Handle kernel, void** arguments);

// What the driver was given. (Structs have bytes that belong to no member.)
struct Seen {
  Handle kernel = nullptr, stream = nullptr;
  bool cooperative = false;
  std::vector<int64_t> numbers;  // grid, block, bytes of shared memory, cluster; then of the kernel's arguments
  std::vector<const void*> addresses;
  const void* messages = nullptr;

  Seen() = default;
  Seen(const LaunchConfig& config, Handle kernel) : kernel(kernel), stream(config.stream) {
    numbers = {config.grid_x,  config.grid_y,  config.grid_z,      config.block_x,
               config.block_y, config.block_z, config.shared_bytes};
    const LaunchAttribute* const attribute = config.attribute_count ? config.attributes : nullptr;
    cooperative = attribute && attribute->id == kCooperative && attribute->cooperative;
    const bool cluster = attribute && attribute->id == kClusterDimension;
    for (int i = 0; i < 3; ++i) numbers.push_back(cluster ? attribute->cluster[i] : 0);
    numbers.push_back(config.attribute_count);
  }
  int64_t grid_x() const { return numbers[0]; }
  int64_t grid_y() const { return numbers[1]; }
  int64_t threads() const { return numbers[3]; }
  int64_t shared() const { return numbers[6]; }
  int64_t cluster() const { return numbers[7]; }
  bool operator==(const Seen& other) const {
    return kernel == other.kernel && stream == other.stream && cooperative == other.cooperative &&
           numbers == other.numbers && addresses == other.addresses;
  }
};

// Blocks that a multiprocessor takes at a time, or 0: as many as fit.
inline int at_a_time = 0;

inline const std::string& words_of(Handle kernel) { return *reinterpret_cast<const std::string*>(kernel); }

const Driver& driver() {
  static const Driver fake = [] {
    Driver d = {};
    d.module_load = [](Handle* module, const void* code) {
      *module = reinterpret_cast<Handle>(new std::string(static_cast<const char*>(code)));
      return 0;
    };
    d.module_function = [](Handle* function, Handle module, const char*) { return *function = module, 0; };
    d.function_get = [](int* value, int, Handle) { return *value = 0; };
    d.function_set = [](Handle, int, int) { return 0; };
    d.active_blocks = [](int* count, Handle, int threads, size_t shared) {
      const int by_threads = 2048 / threads, by_shared = int(233472 / (shared + 1024));
      return *count = at_a_time ? at_a_time : by_threads < by_shared ? by_threads : by_shared, 0;
    };
    d.active_clusters = [](int* count, Handle, const LaunchConfig* config) {
      return *count = int(120 / config->attributes->cluster[0] * (2048 / config->block_x)), 0;
    };
    d.launch = [](const LaunchConfig* config, Handle kernel, void** arguments, void**) {
      return taken(*config, kernel, arguments);
    };
    return d;
  }();
  return fake;
}

void check(Result result, const char* call) {
  if (result) throw std::runtime_error(call);
}

// Three devices that plan differently. A plan asks for one, a cached launch does not.
inline thread_local int planned = 0;
const Gpu& device_info(int device) {
  static const Gpu kinds[] = {
      typical(90, kTuned, "first"), {90, 60, 227 * 1024, 0, "second"}, typical(80, kTuned, "third")};
  ++planned;
  return kinds[device];
}

void enter_context(int) {}

inline std::atomic<int> loaded{0};
std::string cubin(const std::string& source, const std::vector<std::string>& defines, int arch, bool*) {
  ++loaded;
  std::string words = source + " " + std::to_string(arch);
  for (const std::string& define : defines) words += " " + define;
  return words;
}

}  // namespace onepass::cuda

namespace {

// Of the GPU that is called "first": other ones every turn.
[[maybe_unused]] Tables other_tables(int turn) {
  constexpr int kBlock = int(Tier::block), kWarp = int(Tier::warp);
  const std::vector<Entry> odd = {{kAnyLength, kUseWriteTable, 0, 0, 1, 0}};
  const std::vector<Entry> rows = {{64, kWarp, turn % 2 ? 8 : 32, 0, 1, 0},
                                   {kAnyLength, kBlock, 0, 8 + turn * 4 % 32, 1, 0}};
  const std::vector<Entry> few = {{256, kUseWriteTable, 0, 0, 1, 0}, {kAnyLength, kBlock, 0, 12 + turn * 4 % 20, 1, 0}};
  const std::vector<Entry> columns = {{64, int(Tier::columns), turn % 2 ? 128 : 256, 8, 8, 0},
                                      {kAnyLength, int(Tier::columns), 128, 8 + turn % 3 * 4, 8, 0}};
  return {"a test's", rows, rows, rows, rows, odd, odd, few, few, columns, columns, columns, columns};
}

}  // namespace
