// compile.cpp: CUDA C++ to a cubin with NVRTC, when a kernel is first needed on this machine. NVRTC comes with torch's
// CUDA wheels; nothing of a toolkit is asked of the user, and compiling needs no GPU.
#include <dirent.h>
#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <fstream>
#include <map>
#include <sstream>
#include <stdexcept>

#include "driver.h"

namespace onepass::cuda {

namespace {

using Program = struct ProgramOpaque*;

struct Nvrtc {
  int (*version)(int*, int*);
  int (*create)(Program*, const char*, const char*, int, const char* const*, const char* const*);
  int (*compile)(Program, int, const char* const*);
  int (*log_size)(Program, size_t*);
  int (*log)(Program, char*);
  int (*cubin_size)(Program, size_t*);
  int (*cubin)(Program, char*);
  int (*destroy)(Program*);
};

std::string directory_of(const void* symbol) {
  Dl_info info;
  if (!dladdr(symbol, &info) || !info.dli_fname) return ".";
  const std::string path = info.dli_fname;
  const size_t slash = path.rfind('/');
  return slash == std::string::npos ? "." : path.substr(0, slash);
}

std::vector<std::string> files_in(const std::string& directory) {
  std::vector<std::string> names;
  if (DIR* opened = opendir(directory.c_str())) {
    while (const dirent* entry = readdir(opened)) names.push_back(entry->d_name);
    closedir(opened);
  }
  std::sort(names.begin(), names.end());
  return names;
}

// Where NVRTC may be, best first: what ONEPASS_NVRTC names, what is loaded or on the loader's path, and the folders in
// which the wheels of torch keep it: <site-packages>/nvidia/<part>/lib beside <site-packages>/torch/lib, or beside this
// library.
std::vector<std::string> nvrtc_candidates() {
  std::vector<std::string> found;
  if (const char* named = std::getenv("ONEPASS_NVRTC"); named && *named) return {named};
  std::vector<std::string> sites;
  if (void* torch = dlsym(RTLD_DEFAULT, "aoti_torch_abi_version"))
    sites.push_back(directory_of(torch) + "/../../nvidia");
  sites.push_back(directory_of(reinterpret_cast<void*>(&nvrtc_version)) + "/../nvidia");
  for (const std::string& site : sites) {
    for (const std::string& part : files_in(site)) {
      if (part[0] == '.') continue;
      const std::string folder = site + "/" + part + "/lib";
      for (const std::string& file : files_in(folder)) {
        if (file.rfind("libnvrtc.so", 0) == 0) found.push_back(folder + "/" + file);
      }
    }
  }
  for (const char* name : {"libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"}) found.push_back(name);
  return found;
}

template <class F>
void take(void* library, const char* symbol, F* function) {
  void* found = dlsym(library, symbol);
  if (!found) throw std::runtime_error(std::string("onepass: NVRTC has no ") + symbol);
  *function = reinterpret_cast<F>(found);
}

Nvrtc open_nvrtc() {
  void* library = nullptr;
  std::string looked;
  for (const std::string& name : nvrtc_candidates()) {
    if ((library = dlopen(name.c_str(), RTLD_LAZY | RTLD_LOCAL))) break;
    looked += (looked.empty() ? "" : ", ") + name;
  }
  if (!library) {
    throw std::runtime_error("onepass: NVRTC not found, so no CUDA kernel can be compiled (looked for " + looked +
                             "); pip install nvidia-cuda-nvrtc, or name the library in ONEPASS_NVRTC");
  }
  Nvrtc n;
  take(library, "nvrtcVersion", &n.version);
  take(library, "nvrtcCreateProgram", &n.create);
  take(library, "nvrtcCompileProgram", &n.compile);
  take(library, "nvrtcGetProgramLogSize", &n.log_size);
  take(library, "nvrtcGetProgramLog", &n.log);
  take(library, "nvrtcGetCUBINSize", &n.cubin_size);
  take(library, "nvrtcGetCUBIN", &n.cubin);
  take(library, "nvrtcDestroyProgram", &n.destroy);
  return n;
}

const Nvrtc& nvrtc() {
  static const Nvrtc opened = open_nvrtc();
  return opened;
}

// CUDA sources by name.
using Files = std::map<std::string, std::string>;

void read_sources(const std::string& folder, Files* files) {
  for (const std::string& name : files_in(folder)) {
    if (name.rfind(".cu") == std::string::npos) continue;
    std::ifstream in(folder + "/" + name, std::ios::binary);
    (*files)[name] = (std::ostringstream() << in.rdbuf()).str();
  }
}

// Those that `source_file` is one of, with what it may include: the engine's, or the gallery's and the engine's
// headers. Read once from beside this library.
const Files& sources_with(const std::string& source_file) {
  static const Files* const read = [] {
    const std::string package = directory_of(reinterpret_cast<void*>(&nvrtc_version));
    Files* const sets = new Files[2];
    read_sources(package + "/csrc/cuda", &sets[0]);
    if (sets[0].empty())
      throw std::runtime_error("onepass: no CUDA sources in " + package + "/csrc/cuda; the package is incomplete");
    for (const auto& [name, text] : sets[0]) {
      if (name.back() == 'h') sets[1][name] = text;
    }
    read_sources(package + "/gallery", &sets[1]);
    return sets;
  }();
  for (const Files* set : {&read[0], &read[1]}) {
    if (set->count(source_file)) return *set;
  }
  throw std::runtime_error("onepass: no CUDA source " + source_file);
}

std::string compile(const Files& sources, const std::string& source_file, const std::vector<std::string>& options) {
  std::vector<const char*> names, texts, flags;
  for (const auto& [name, text] : sources) {
    names.push_back(name.c_str());
    texts.push_back(text.c_str());
  }
  for (const std::string& option : options) flags.push_back(option.c_str());
  const std::string& source = sources.at(source_file);

  Program program;
  if (nvrtc().create(&program, source.c_str(), source_file.c_str(), int(names.size()), texts.data(), names.data())) {
    throw std::runtime_error("onepass: nvrtcCreateProgram failed");
  }
  const int result = nvrtc().compile(program, int(flags.size()), flags.data());
  std::string out;
  size_t size = 0;
  if (result) {
    nvrtc().log_size(program, &size);
    out.resize(size);
    nvrtc().log(program, out.data());
  } else {
    nvrtc().cubin_size(program, &size);
    out.resize(size);
    nvrtc().cubin(program, out.data());
  }
  nvrtc().destroy(&program);
  if (result) throw std::runtime_error("onepass: " + source_file + " does not compile here:\n" + out);
  return out;
}

std::atomic<int64_t> compiled{0}, from_disk{0};

}  // namespace

Counts counts() { return {compiled, from_disk}; }

std::string nvrtc_version() {
  int major = 0, minor = 0;
  nvrtc().version(&major, &minor);
  return std::to_string(major) + "." + std::to_string(minor);
}

std::string cubin(const std::string& source_file, const std::vector<std::string>& defines, int compute) {
  std::vector<std::string> options = {"--gpu-architecture=sm_" + std::to_string(compute), "--std=c++17"};
  options.insert(options.end(), defines.begin(), defines.end());
  // Everything that the cubin depends on; the sources in full, so that no digest has to be trusted.
  const Files& sources = sources_with(source_file);
  std::string key = "nvrtc " + nvrtc_version() + "\n" + source_file + "\n";
  for (const std::string& option : options) key += option + "\n";
  for (const auto& [name, text] : sources) key += name + "\n" + text;

  std::string code = cache_read(key);
  if (!code.empty()) {
    ++from_disk;
    return code;
  }
  code = compile(sources, source_file, options);
  ++compiled;
  cache_write(key, code);
  return code;
}

}  // namespace onepass::cuda
