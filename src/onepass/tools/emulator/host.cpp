// host.cpp: launches of translated kernels, for ctypes. A function gives what went wrong, or "".
#include "host.h"

#include <dlfcn.h>

namespace emulator {

Way way;

const Code& code_of(const std::string& library) {
  static std::map<std::string, Code> known;
  if (const auto found = known.find(library); found != known.end()) return found->second;
  void* const opened = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!opened) fail(dlerror());
  const auto number = [&](const char* name) { return static_cast<const uint32_t*>(dlsym(opened, name)); };
  const auto kernel = reinterpret_cast<Kernel>(dlsym(opened, "kernel"));
  return known[library] = {kernel, *number("static_shared"), *number("parameters"), number("sizes")};
}

void launch(const Launch& launch, const Code& code, void** arguments) {
  alignas(16) static char workspace[16];  // of the driver: cleared once
  std::vector<char> params;
  for (uint32_t i = 0; i < code.parameters; ++i) {
    params.resize((params.size() + 7) / 8 * 8);
    const char* const from = static_cast<const char*>(arguments[i]);
    params.insert(params.end(), from, from + code.sizes[i]);
  }
  Grid grid = {};
  grid.launch = launch;
  grid.params = params.data();
  grid.workspace = workspace;
  grid.ranges = way.ranges;
  grid.ranges.push_back({params.data(), int64_t(params.size()), false});
  grid.ranges.push_back({workspace, sizeof workspace, true});
  grid.draw.seed(way.seed);
  grid.lateness = way.lateness;
  grid.others = way.others;
  grid.yield = leave;
  run(&grid, code.kernel, code.static_shared, Order(way.order));
}

}  // namespace emulator

extern "C" {

void set_way(unsigned seed, int order, int lateness) { emulator::way = {seed, order, lateness, {}}; }
void add_range(const void* begin, int64_t size, bool writable) {
  emulator::way.ranges.push_back({static_cast<const char*>(begin), size, writable});
}

// `numbers`: blocks, threads of a block, of a cluster blocks or 0, bytes of shared memory, whether blocks are launched
// cooperatively.
const char* run_kernel(const char* library, const int* numbers, void** arguments) {
  return emulator::said_by([&] {
    const auto of = [&](int i) { return uint32_t(numbers[i]); };
    emulator::launch({of(0), 1, of(1), of(2), of(3), numbers[4] != 0}, emulator::code_of(library), arguments);
  });
}
}
