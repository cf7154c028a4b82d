// emulated.cpp: calls, and gradients over columns, as the CUDA engine serves them, with a driver that runs the kernels'
// translations. For ctypes: functions give what went wrong, or "".
#include <dlfcn.h>

#include "../native/fake_driver.h"
#include "plan/columns.h"
#include "cuda/host/column_launch.h"
#include "scheduler.h"

namespace {

// Makes of a source file, an architecture and defines the library of a kernel's translation; null where it fails.
const char* (*translate)(const char* words);

struct Code {
  emulator::Kernel kernel;
  uint32_t static_shared, parameters;
  const uint32_t* sizes;  // of parameters

  explicit Code(const std::string& words) {
    const char* const file = translate(words.c_str());
    void* const library = file ? dlopen(file, RTLD_NOW | RTLD_LOCAL) : nullptr;
    if (!library) throw std::runtime_error("no translation of " + words);
    kernel = reinterpret_cast<emulator::Kernel>(dlsym(library, "kernel"));
    static_shared = *static_cast<const uint32_t*>(dlsym(library, "static_shared"));
    parameters = *static_cast<const uint32_t*>(dlsym(library, "parameters"));
    sizes = static_cast<const uint32_t*>(dlsym(library, "sizes"));
  }
};
const Code& code_of(const std::string& words) {
  static std::map<std::string, Code> known;
  return known.try_emplace(words, words).first->second;
}

// How the next launches go.
struct Way {
  unsigned seed;
  int order, lateness;
  std::vector<emulator::Range> ranges;
} way;

void run(const emulator::Launch& launch, const Code& code, void** arguments) {
  alignas(16) static char workspace[16];  // of the driver: cleared once
  std::vector<char> params;
  for (uint32_t i = 0; i < code.parameters; ++i) {
    params.resize((params.size() + 7) / 8 * 8);
    const char* const from = static_cast<const char*>(arguments[i]);
    params.insert(params.end(), from, from + code.sizes[i]);
  }
  emulator::Grid grid = {};
  grid.launch = launch;
  grid.params = params.data();
  grid.workspace = workspace;
  grid.ranges = way.ranges;
  grid.ranges.push_back({params.data(), int64_t(params.size()), false});
  grid.ranges.push_back({workspace, sizeof workspace, true});
  grid.draw.seed(way.seed);
  grid.lateness = way.lateness;
  grid.yield = emulator::leave;
  emulator::run(&grid, code.kernel, code.static_shared, emulator::Order(way.order));
}

template <class Call>
const char* said_by(Call call) {
  static std::string said;
  said.clear();
  try {
    call();
  } catch (const std::exception& error) {
    said = error.what();
  }
  return said.c_str();
}

// Launches with room for what blocks tell each other, which may have held anything before.
template <class Made, class AnyCall>
bool launched(Made made, const AnyCall& call) {
  std::vector<char> room(size_t(made.parts) + 16);
  std::mt19937 draw(way.seed);
  for (char& byte : room) byte = char(draw());
  char* const parts = room.data() + (16 - uint64_t(room.data()) % 16) % 16;
  way.ranges.push_back({parts, made.parts, true});
  return launch(made, call, made.parts ? parts : nullptr, nullptr);
}

CudaPlan plan_of(const int* numbers) {
  return {Tier(numbers[0]), numbers[1], numbers[2], numbers[3], numbers[4], numbers[5], numbers[6], numbers[7]};
}

// As the engine does it, by a plan that is given or by its own.
template <class AnyCall>
void serve_columns(const AnyCall& call, const CudaPlan* plan) {
  run_columns(call, 0, plan, [&](ColumnLaunch made) { return launched(made, call); });
}
void serve_rows(const Call& call, const CudaPlan* plan) {
  serve(
      plan, [&](const CudaPlan& given) { return launch_by(given, call, 0); },
      [&](bool cooperative) { return launch_of(call, 0, cooperative); },
      [&](const Launch& made) { return launched(made, call); });
}

}  // namespace

// A launch, on the emulator.
Result onepass::cuda::taken(const LaunchConfig& config, Handle kernel, void** arguments) {
  const Seen seen(config, kernel);
  run({config.grid_x, config.grid_y, config.block_x, uint32_t(seen.cluster()), config.shared_bytes, seen.cooperative},
      code_of(words_of(kernel)), arguments);
  return 0;
}

extern "C" {

void translate_by(const char* (*by)(const char*)) {
  translate = by;
  at_a_time = 1;  // so that few tiles are more than the chip takes at a time
}

// For the next launch: what is drawn, the order of threads, how late copies are (scheduler.h, machine.h).
void set_way(unsigned seed, int order, int lateness) { way = {seed, order, lateness, {}}; }
void add_range(const void* begin, int64_t size, bool writable) {
  way.ranges.push_back({static_cast<const char*>(begin), size, writable});
}

const char* forward(int function, int x_type, int y_type, const void* x, void* y, int rank, const int64_t* sizes,
                    const int64_t* x_strides, const int64_t* y_strides, const bool* reduce, const int* plan) {
  Call call = {Function(function), DType(x_type), DType(y_type), x, y, {}};
  call.layout = make_layout(rank, sizes, x_strides, y_strides, reduce, call.reduces());
  const CudaPlan given = plan ? plan_of(plan) : CudaPlan{};
  return said_by(
      [&] { (call.layout.view == View::rows ? serve_rows : serve_columns<Call>)(call, plan ? &given : nullptr); });
}

// `strides`: of dx, of what was saved, of the result's gradient and of the result of logsumexp.
const char* backward(int function, int type, int dx_type, void* dx, const void* saved, const void* grad,
                     const void* lse, int rank, const int64_t* sizes, const int64_t* strides, const bool* reduce,
                     const int* plan) {
  const Function of = Function(function);
  const int64_t* const each[] = {strides, strides + rank, strides + 2 * rank, strides + 3 * rank};
  BackwardCall call = {of, DType(type), DType(dx_type), dx, saved, grad, lse, {}};
  call.layout = make_backward_layout(rank, sizes, each, reduce, of == Function::logsumexp);
  const CudaPlan given = plan ? plan_of(plan) : CudaPlan{};
  if (call.layout.view == View::rows && call.layout.outer.count <= 1)
    return "gradients of rows, which are launched with torch";
  return said_by([&] { serve_columns(call, plan ? &given : nullptr); });
}

// A kernel by itself. `numbers`: blocks, threads of a block, of a cluster blocks or 0, bytes of shared memory, whether
// blocks are launched cooperatively.
const char* run_kernel(const char* words, const int* numbers, void** arguments) {
  return said_by([&] {
    const auto of = [&](int i) { return uint32_t(numbers[i]); };
    run({of(0), 1, of(1), of(2), of(3), numbers[4] != 0}, code_of(words), arguments);
  });
}
}
