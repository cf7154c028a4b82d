// nvrtc.cpp: compiles CUDA C++ to a cubin with NVRTC, when a kernel is first needed on this machine. NVRTC comes with
// torch's CUDA wheels, so users need no CUDA toolkit. Compiling needs no GPU.
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/stat.h>

#include <atomic>
#include <cstdlib>
#include <fstream>
#include <map>
#include <set>
#include <sstream>
#include <stdexcept>

#include "cuda_driver.h"

namespace onepass::cuda {

namespace {

using Program = struct ProgramOpaque*;

// The functions of NVRTC that are used: F(member, symbol, arguments).
#define ONEPASS_NVRTC_FUNCTIONS(F)                                                                                 \
  F(version, nvrtcVersion, (int*, int*))                                                                           \
  F(create, nvrtcCreateProgram, (Program*, const char*, const char*, int, const char* const*, const char* const*)) \
  F(compile, nvrtcCompileProgram, (Program, int, const char* const*))                                              \
  F(log_size, nvrtcGetProgramLogSize, (Program, size_t*))                                                          \
  F(log, nvrtcGetProgramLog, (Program, char*))                                                                     \
  F(cubin_size, nvrtcGetCUBINSize, (Program, size_t*))                                                             \
  F(cubin, nvrtcGetCUBIN, (Program, char*))                                                                        \
  F(destroy, nvrtcDestroyProgram, (Program*))

struct Nvrtc {
#define ONEPASS_MEMBER(member, symbol, arguments) int(*member) arguments;
  ONEPASS_NVRTC_FUNCTIONS(ONEPASS_MEMBER)
#undef ONEPASS_MEMBER
  std::string file;  // in the form of stamp()
};

std::string directory_of(const void* symbol) {
  Dl_info info;
  if (!dladdr(symbol, &info) || !info.dli_fname) return ".";
  const std::string file = info.dli_fname;
  const size_t slash = file.rfind('/');
  return slash == std::string::npos ? "." : file.substr(0, slash);
}

// The folder of this library, which is the folder of the package.
std::string package_folder() { return directory_of(reinterpret_cast<void*>(&nvrtc_version)); }

// The names in a directory, sorted; none if it cannot be read.
std::set<std::string> files_in(const std::string& directory) {
  std::set<std::string> names;
  if (DIR* const open = opendir(directory.c_str())) {
    while (const dirent* entry = readdir(open)) names.insert(entry->d_name);
    closedir(open);
  }
  return names;
}

// Where NVRTC may be, best first: the file that ONEPASS_NVRTC names; the folders of torch's wheels
// (<site-packages>/nvidia/<part>/lib beside <site-packages>/torch/lib, or beside this library); and libraries that are
// loaded already or on the loader's path.
std::vector<std::string> find_candidates() {
  std::vector<std::string> found;
  if (const char* named = std::getenv("ONEPASS_NVRTC"); named && *named) return {named};
  std::vector<std::string> sites;
  if (void* torch = dlsym(RTLD_DEFAULT, "aoti_torch_abi_version"))
    sites.push_back(directory_of(torch) + "/../../nvidia");
  sites.push_back(package_folder() + "/../nvidia");
  for (const std::string& site : sites) {
    for (const std::string& part : files_in(site)) {
      const std::string folder = site + "/" + part + "/lib";
      for (const std::string& file : files_in(folder)) {
        if (file.rfind("libnvrtc.so", 0) == 0) found.push_back(folder + "/" + file);
      }
    }
  }
  for (const char* name : {"libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"}) found.push_back(name);
  return found;
}

// Identifies a library file without opening it: path, size and time of change. Empty if there is no such file, or if
// only the loader knows its path.
std::string stamp(const std::string& path) {
  if (path.find('/') == std::string::npos) return "";
  char* const whole = realpath(path.c_str(), nullptr);
  if (!whole) return "";
  const std::string file = whole;
  std::free(whole);
  struct statx about;
  if (statx(AT_FDCWD, file.c_str(), 0, STATX_BASIC_STATS, &about) || !S_ISREG(about.stx_mode)) return "";
  const auto& time = about.stx_mtime;
  return file + " " + std::to_string(about.stx_size) + " " + std::to_string(time.tv_sec) + "." +
         std::to_string(time.tv_nsec);
}

Nvrtc open_nvrtc() {
  void* library = nullptr;
  std::string looked;
  for (const std::string& name : find_candidates()) {
    if ((library = dlopen(name.c_str(), RTLD_LAZY | RTLD_LOCAL))) break;
    looked += (looked.empty() ? "" : ", ") + name;
  }
  if (!library) {
    throw std::runtime_error("onepass: NVRTC not found, so no CUDA kernel can be compiled (looked for " + looked +
                             "); pip install nvidia-cuda-nvrtc, or name the library in ONEPASS_NVRTC");
  }
  Nvrtc n;
#define ONEPASS_LOAD(member, symbol, arguments) load_symbol(library, #symbol, &n.member, "NVRTC");
  ONEPASS_NVRTC_FUNCTIONS(ONEPASS_LOAD)
#undef ONEPASS_LOAD
  Dl_info info;
  if (dladdr(reinterpret_cast<void*>(n.version), &info) && info.dli_fname) n.file = stamp(info.dli_fname);
  return n;
}

const Nvrtc& nvrtc() {
  static const Nvrtc opened = open_nvrtc();
  return opened;
}

// The stamp of the NVRTC that will compile here. If a candidate is a file, it is not opened, which would take 50 ms or
// more. If only the loader finds NVRTC, it is opened.
const std::string& nvrtc_stamp() {
  static const std::string known = [] {
    for (const std::string& name : find_candidates()) {
      if (std::string file = stamp(name); !file.empty()) return file;
    }
    return nvrtc().file;
  }();
  return known;
}

// CUDA sources by name.
using Files = std::map<std::string, std::string>;

void read_source(const std::string& folder, const std::string& name, Files* files) {
  std::ifstream in(folder + "/" + name, std::ios::binary);
  (*files)[name] = (std::ostringstream() << in.rdbuf()).str();
}

// The sources of the engine, the list of functions, and the sources of the gallery. They are read once, from the folder
// of this library.
const Files& sources() {
  static const Files* const read = [] {
    const std::string package = package_folder(), csrc = package + "/csrc";
    Files* const files = new Files;
    for (const std::string& folder : {csrc + "/cuda/kernels", package + "/tools/gallery"}) {
      for (const std::string& name : files_in(folder)) {
        if (name.rfind(".cu") != std::string::npos) read_source(folder, name, files);
      }
      if (files->empty())
        throw std::runtime_error("onepass: no CUDA sources in " + folder + "; the package is incomplete");
    }
    read_source(csrc + "/core", "functions.h", files);
    return files;
  }();
  return *read;
}

// The text of one of these sources by its name, or of another file by its path. Throws if there is no such file.
std::string text_of(const std::string& source_file) {
  if (const auto found = sources().find(source_file); found != sources().end()) return found->second;
  std::ifstream in(source_file, std::ios::binary);
  if (!in) throw std::runtime_error("onepass: no CUDA source " + source_file);
  return (std::ostringstream() << in.rdbuf()).str();
}

std::string compile(const std::string& source_file, const std::vector<std::string>& options) {
  std::vector<const char*> names, texts, flags;
  for (const auto& [name, text] : sources()) {
    names.push_back(name.c_str());
    texts.push_back(text.c_str());
  }
  for (const std::string& option : options) flags.push_back(option.c_str());
  const std::string source = text_of(source_file);

  Program program;
  if (nvrtc().create(&program, source.c_str(), source_file.c_str(), int(names.size()), texts.data(), names.data())) {
    throw std::runtime_error("onepass: nvrtcCreateProgram failed");
  }
  const int result = nvrtc().compile(program, int(flags.size()), flags.data());
  size_t size = 0;
  (result ? nvrtc().log_size : nvrtc().cubin_size)(program, &size);
  std::string out(size, 0);
  (result ? nvrtc().log : nvrtc().cubin)(program, out.data());
  nvrtc().destroy(&program);
  if (result) throw std::runtime_error("onepass: " + source_file + " does not compile here:\n" + out);
  return out;
}

std::vector<std::string> options_of(const std::vector<std::string>& defines, int arch) {
  // Without this option NVRTC 13.0 takes a generic lambda in a kernel for a host function.
  std::vector<std::string> options = {"--gpu-architecture=sm_" + std::to_string(arch), "--std=c++17",
                                      "--device-as-default-execution-space"};
  options.insert(options.end(), defines.begin(), defines.end());
  return options;
}

// A key has the digest of the sources, which is computed once in a process. The text itself, half a megabyte, would
// cost three milliseconds for each kernel that is read.
std::string key_of(const std::string& compiler, const std::string& source_file,
                   const std::vector<std::string>& options) {
  static const std::string known = [] {
    std::string all;
    for (const auto& [name, text] : sources()) all += name + "\n" + text;
    return digest(all);
  }();
  std::string key = compiler + "\n" + known + "\n" + source_file + "\n";
  for (const std::string& option : options) key += option + "\n";
  if (!sources().count(source_file)) key += text_of(source_file);
  return key;
}

std::string nvrtc_key(const std::string& stamp, const std::string& source_file,
                      const std::vector<std::string>& options) {
  return key_of("nvrtc " + stamp, source_file, options);
}

// The folder of packaged kernels: the package onepass_kernels, beside this one, has kernels that were compiled
// elsewhere, by any NVRTC.
std::string packaged_folder(int arch) {
  const char* const set = std::getenv("ONEPASS_KERNELS");
  return (set && *set ? set : package_folder() + "/../onepass_kernels") + "/sm_" + std::to_string(arch);
}

std::string packaged_key(const std::string& source_file, const std::vector<std::string>& options) {
  return key_of("packaged", source_file, options);
}

std::string packaged_cubin(const std::string& source_file, const std::vector<std::string>& options, int arch) {
  return read_from(packaged_folder(arch), packaged_key(source_file, options));
}

std::atomic<int64_t> kernels_compiled{0}, kernels_read{0};

}  // namespace

Counts counts() { return {kernels_compiled, kernels_read}; }

std::string nvrtc_version() {
  int major = 0, minor = 0;
  nvrtc().version(&major, &minor);
  return std::to_string(major) + "." + std::to_string(minor);
}

std::string nvrtc_file() { return nvrtc_stamp().substr(0, nvrtc_stamp().find(' ')); }

bool is_cached(const std::string& source_file, const std::vector<std::string>& defines, int arch) {
  const std::vector<std::string> options = options_of(defines, arch);
  return !packaged_cubin(source_file, options, arch).empty() ||
         !cache_read(nvrtc_key(nvrtc_stamp(), source_file, options)).empty();
}

bool package(const std::string& source_file, const std::vector<std::string>& defines, int arch,
             const std::string& folder) {
  return write_to(folder, packaged_key(source_file, options_of(defines, arch)),
                  cubin(source_file, defines, arch, nullptr, false));
}

std::string cubin(const std::string& source_file, const std::vector<std::string>& defines, int arch, bool* is_stored,
                  bool packaged) {
  const std::vector<std::string> options = options_of(defines, arch);
  std::string code = packaged ? packaged_cubin(source_file, options, arch) : "";
  if (code.empty()) code = cache_read(nvrtc_key(nvrtc_stamp(), source_file, options));
  // The first file that was found may not load, or may have been replaced. Then the NVRTC that is open compiles.
  if (code.empty() && nvrtc().file != nvrtc_stamp()) code = cache_read(nvrtc_key(nvrtc().file, source_file, options));
  if (!code.empty()) {
    ++kernels_read;
    if (is_stored) *is_stored = true;
    return code;
  }
  code = compile(source_file, options);
  ++kernels_compiled;
  const bool is_written = cache_write(nvrtc_key(nvrtc().file, source_file, options), code);
  if (is_stored) *is_stored = is_written;
  return code;
}

}  // namespace onepass::cuda
