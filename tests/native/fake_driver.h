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
Result take_launch(const LaunchConfig& config, Handle kernel, void** arguments);

inline bool is_cooperative(const LaunchConfig& config) {
  return config.attribute_count && config.attributes->id == kCooperative && config.attributes->cooperative;
}
// Blocks of a cluster, 0 where there are none.
inline unsigned cluster_of(const LaunchConfig& config) {
  return config.attribute_count && config.attributes->id == kClusterDimension ? config.attributes->cluster[0] : 0;
}

// Blocks that a multiprocessor takes at a time, or 0: as many as fit.
inline int at_a_time = 0;

// A packaged kernel that this driver does not take.
constexpr char kTooNew[] = "too new";

inline const std::string& words_of(Handle kernel) { return *reinterpret_cast<const std::string*>(kernel); }

const Driver& driver() {
  static const Driver fake = [] {
    Driver d = {};
    d.module_load = [](Handle* module, const void* code) {
      if (std::string(static_cast<const char*>(code)) == kTooNew) return 1;
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
      return take_launch(*config, kernel, arguments);
    };
    return d;
  }();
  return fake;
}

void check(Result result, const char* call) {
  if (result) throw std::runtime_error(call);
}

// Devices that plan differently; on the fourth, few rows are many, and the fifth is small. A plan asks for one, a
// cached launch does not.
inline thread_local int planned = 0;
const Gpu& device_info(int device) {
  static const Gpu kinds[] = {typical(90, kTuned, "first"),
                              {90, 60, 227 * 1024, 0, "second"},
                              typical(80, kTuned, "third"),
                              {90, 1, 227 * 1024, 0, "fourth"},
                              {90, 5, 100 * 1024, 1, "fifth"}};
  ++planned;
  return kinds[device];
}

void enter_context(int) {}

inline std::atomic<int> loaded{0};
std::string cubin(const std::string& source, const std::vector<std::string>& defines, int arch, bool*, bool packaged) {
  if (packaged && arch == 80) return kTooNew;
  ++loaded;
  std::string words = source + " " + std::to_string(arch);
  for (const std::string& define : defines) words += " " + define;
  return words;
}

}  // namespace onepass::cuda
