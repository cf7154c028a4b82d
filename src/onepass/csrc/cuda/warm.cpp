// warm.cpp: which kernels the plans of contiguous rows may ask for, and how to have them before they are asked for.
// Plain C functions for ctypes, as in inspect.cpp: each returns 0, or 1 with the reason in `text`.
#include <cstring>
#include <set>
#include <unordered_set>

#include "../call.h"
#include "../guarded.h"
#include "driver.h"
#include "launch.h"

namespace {

using namespace onepass;

constexpr int64_t kEvery = 4224;                      // up to here every length is walked
constexpr int64_t kLongest = (int64_t(1) << 33) + 1;  // and to here those at which a plan may change

// Lengths such that a plan of any length is the plan of one of these: all short ones, then those around each limit of
// the tables (and around its half and its double, for other sizes of elements), around the powers of two and their
// middles, and in steps of 1%.
std::vector<int64_t> lengths_to_walk(const Tables& tables) {
  std::set<int64_t> lengths;
  for (int64_t n = 1; n <= kEvery; ++n) lengths.insert(n);
  const auto around = [&](int64_t n) {
    if (n > kLongest) return;
    for (const int64_t step : {-17, -16, -9, -8, -7, -4, -1, 0, 1, 4, 7, 8, 9, 16, 17}) {
      if (n + step > kEvery) lengths.insert(n + step);
    }
  };
  const auto limits = [&](const auto& table) {
    for (const Entry& entry : table) {
      if (entry.limit == kAnyLength) continue;
      for (const int64_t n : {entry.limit / 2, entry.limit, entry.limit * 2}) around(n);
    }
  };
  for (const NamedTable& named : kTables) limits(tables.*named.table);
  for (int64_t n = 4096; n <= kLongest; n *= 2) around(n), around(n + n / 2);
  for (double n = kEvery; n < double(kLongest); n *= 1.01)
    lengths.insert(int64_t(n) | 1), lengths.insert(int64_t(n) & ~7);
  return {lengths.begin(), lengths.end()};
}

// A kernel: a plan that asks for it, and what tells it from others.
struct Kernel {
  CudaPlan plan;
  std::string name;
};

// Those that contiguous rows of `lengths` ask for.
std::vector<Kernel> kernels_of(Function function, DType x, DType y, const Gpu& gpu,
                               const std::vector<int64_t>& lengths) {
  Call call = {};
  call.function = function;
  const bool reduces = call.reduces();
  std::unordered_set<std::string> plans, names;
  std::vector<Kernel> found;
  const auto visit = [&](const Layout& layout, uint64_t x_at, uint64_t y_at) {
    const CudaPlan plan = plan_cuda(layout, x, y, Phase(x, y, x_at, y_at, layout, reduces), gpu);
    if (!plans.insert(std::string(reinterpret_cast<const char*>(&plan), sizeof plan)).second) return;
    std::string kernel = cuda::source_of(plan.tier);
    for (const std::string& define : cuda::defines_of(function, x, y, plan)) kernel += " " + define;
    if (names.insert(kernel).second) found.push_back({plan, kernel});
  };
  for (const int64_t n : lengths) {
    for (const int64_t rows : {1, 2, 3, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, 1000000}) {
      const Layout layout = contiguous_layout(rows, n, reduces);
      visit(layout, 0, 0);                 // from an address that the allocator gives
      for (const int first : {1, 2, 4}) {  // a view that begins with another element
        visit(layout, uint64_t(first * size_of(x)), 0);
        visit(layout, uint64_t(first * size_of(x)), uint64_t(first * size_of(y)));  // the same, in place
      }
    }
  }
  return found;
}

// A plan as it is, in hexadecimal digits, since Python hands it back without knowing what is in it; and after a dash a
// digest of the kernel's name.
std::string written(const Kernel& kernel) {
  unsigned char bytes[sizeof kernel.plan];
  std::memcpy(bytes, &kernel.plan, sizeof kernel.plan);
  std::string text;
  for (const unsigned char byte : bytes) {
    text += "0123456789abcdef"[byte >> 4];
    text += "0123456789abcdef"[byte & 15];
  }
  return text + "-" + std::to_string(std::hash<std::string>()(kernel.name));
}

CudaPlan read(const std::string& kernel) {
  const std::string text = kernel.substr(0, kernel.find('-'));
  unsigned char bytes[sizeof(CudaPlan)];
  if (text.size() != 2 * sizeof bytes || text.find_first_not_of("0123456789abcdef") != std::string::npos)
    throw std::runtime_error("onepass: not a plan: " + text);
  for (size_t i = 0; i < sizeof bytes; ++i) bytes[i] = (unsigned char)std::stoi(text.substr(2 * i, 2), nullptr, 16);
  CudaPlan plan;
  std::memcpy(&plan, bytes, sizeof plan);
  return plan;
}

}  // namespace

// The kernels that contiguous rows of `lengths` (`count` of them; none: of any length) may ask for, one a line, as
// onepass_warm takes them. On `device`, or where it is negative on a full GPU of `compute`.
ONEPASS_API int onepass_warm_list(int function, int x_type, int y_type, int device, int compute, const int64_t* lengths,
                                  int64_t count, char* text, int64_t size) {
  return guarded(text, size, [&] {
    const Gpu gpu = device < 0 ? typical(compute) : cuda::device_info(device);
    const std::vector<int64_t> every = count ? std::vector<int64_t>() : lengths_to_walk(tables_of(gpu.name));
    const auto kernels = kernels_of(Function(function), DType(x_type), DType(y_type), gpu,
                                    count ? std::vector<int64_t>(lengths, lengths + count) : every);
    std::string lines;
    for (const Kernel& kernel : kernels) lines += written(kernel) + "\n";
    if (int64_t(lines.size()) >= size) throw std::runtime_error("onepass: too many kernels");
    return lines;
  });
}

// Compiles `kernel` into the disk cache, or loads it on `device` if that is not negative. With `ask` it
// does neither, and says whether the cache has it: "yes" or "no".
ONEPASS_API int onepass_warm(int function, int x_type, int y_type, int device, int compute, bool ask,
                             const char* kernel, char* text, int64_t size) {
  return guarded(text, size, [&]() -> std::string {
    const CudaPlan made = read(kernel);
    const Function wanted = Function(function);
    const DType x = DType(x_type), y = DType(y_type);
    const char* source = cuda::source_of(made.tier);
    const auto defines = cuda::defines_of(wanted, x, y, made);
    if (ask) return cuda::is_cached(source, defines, compute) ? "yes" : "no";
    if (device >= 0) return cuda::prepare(wanted, x, y, made, device), "";
    std::string why;
    const std::string directory = cuda::cache_directory(&why);
    if (directory.empty()) throw std::runtime_error("onepass: no cache to compile into: " + why);
    bool kept = false;
    cuda::cubin(source, defines, compute, &kept);
    if (!kept) throw std::runtime_error("onepass: cannot write into " + directory);
    return "";
  });
}
