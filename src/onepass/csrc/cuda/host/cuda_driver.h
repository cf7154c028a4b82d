// cuda_driver.h: the few calls of the CUDA driver and of NVRTC that onepass makes. Both libraries are opened at run
// time with dlopen: building needs no CUDA toolkit, and a machine without a GPU loads the same binary. Declarations
// follow the public CUDA 12 ABI.
#pragma once

#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "../../plan/rows.h"

namespace onepass::cuda {

using Result = int;             // CUresult: 0 is success
using Handle = struct Opaque*;  // CUcontext, CUmodule, CUfunction, CUstream

struct LaunchAttribute {  // CUlaunchAttribute, with the values that are set here
  int id;
  int unused;
  union {
    unsigned cluster[3];
    int cooperative, overlaps;
    char size[64];
  };
};
constexpr int kCooperative = 2;       // CU_LAUNCH_ATTRIBUTE_COOPERATIVE
constexpr int kClusterDimension = 4;  // CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
constexpr int kOverlaps = 6;          // CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION

struct LaunchConfig {  // CUlaunchConfig
  unsigned grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes;
  Handle stream;
  LaunchAttribute* attributes;
  unsigned attribute_count;
};

enum Attribute {  // CUdevice_attribute
  kMultiprocessors = 16,
  kMajor = 75,
  kMinor = 76,
  kCooperativeLaunch = 95,
  kSharedOfBlock = 97,  // with opting in
};

constexpr int kSharedStatic = 1, kSharedDynamic = 8, kNonPortableCluster = 14;  // CUfunction_attribute
constexpr Result kTooLarge = 720;  // CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE
constexpr Result kNotSupported = 801;

// The driver's functions that are called: F(member, symbol, arguments).
#define ONEPASS_DRIVER_FUNCTIONS(F)                                                          \
  F(init, cuInit, (unsigned))                                                                \
  F(error_string, cuGetErrorString, (Result, const char**))                                  \
  F(device_get, cuDeviceGet, (int*, int))                                                    \
  F(device_attribute, cuDeviceGetAttribute, (int*, int, int))                                \
  F(device_name, cuDeviceGetName, (char*, int, int))                                         \
  F(context_current, cuCtxGetCurrent, (Handle*))                                             \
  F(context_set, cuCtxSetCurrent, (Handle))                                                  \
  F(primary_retain, cuDevicePrimaryCtxRetain, (Handle*, int))                                \
  F(module_load, cuModuleLoadData, (Handle*, const void*))                                   \
  F(module_function, cuModuleGetFunction, (Handle*, Handle, const char*))                    \
  F(function_get, cuFuncGetAttribute, (int*, int, Handle))                                   \
  F(active_blocks, cuOccupancyMaxActiveBlocksPerMultiprocessor, (int*, Handle, int, size_t)) \
  F(active_clusters, cuOccupancyMaxActiveClusters, (int*, Handle, const LaunchConfig*))      \
  F(function_set, cuFuncSetAttribute, (Handle, int, int))                                    \
  F(launch, cuLaunchKernelEx, (const LaunchConfig*, Handle, void**, void**))

struct Driver {
#define ONEPASS_MEMBER(member, symbol, arguments) Result(*member) arguments;
  ONEPASS_DRIVER_FUNCTIONS(ONEPASS_MEMBER)
#undef ONEPASS_MEMBER
};

// Sets `function` to a symbol of a library that was opened.
template <class F>
void load_symbol(void* library, const char* symbol, F* function, const char* name) {
  *function = reinterpret_cast<F>(dlsym(library, symbol));
  if (!*function) throw std::runtime_error(std::string("onepass: ") + name + " has no " + symbol + "; it is too old");
}

// The driver, opened once; throws std::runtime_error where there is none.
const Driver& driver();

// Throws with the driver's own words unless `result` is success.
void check(Result result, const char* call);

const Gpu& device_info(int device);
// What device_info() answers in this thread while it makes launches for a GPU that need not be here (DryRun, launch.h).
inline thread_local const Gpu* gpu_of_dry_run = nullptr;

// Sets the primary context of `device` for the calling thread, which may never have touched the device through torch.
void enter_context(int device);

// Whether the calling thread is in the primary context of `device`, where torch's tensors are, so that it can launch.
bool in_context(int device);

// The cubin of `source_file`, a kernel of the engine or of the gallery or the path of another, compiled for sm_<arch>
// with `defines`: from the package of kernels (unless `packaged` is false, as for a driver that does not take it), from
// the disk cache, else by NVRTC. Throws std::runtime_error with the compiler's log where it fails. `is_stored` gets
// whether a later process need not compile it.
std::string cubin(const std::string& source_file, const std::vector<std::string>& defines, int arch,
                  bool* is_stored = nullptr, bool packaged = true);

// Whether the package of kernels or the disk cache has it; compiles nothing.
bool is_cached(const std::string& source_file, const std::vector<std::string>& defines, int arch);

// Puts it into a package of kernels that is made in `folder`; whether that could be written.
bool package(const std::string& source_file, const std::vector<std::string>& defines, int arch,
             const std::string& folder);

// "major.minor" of NVRTC; throws where it cannot be opened and says where it was looked for.
std::string nvrtc_version();
// The file of NVRTC, found without opening it where it can be; throws like the above.
std::string nvrtc_file();

// The directory of the disk cache; empty when it is switched off or not safe to use, and then `why` says so.
std::string cache_directory(std::string* why);
// A file of the cache: what was stored under `key`, or an empty string (absent, damaged, another key of the same name).
std::string cache_read(const std::string& key);
// Whether it is stored: a full or read-only disk is no error.
bool cache_write(const std::string& key, const std::string& value);
// Reads from, and writes to, a folder as it is: whoever can write there is trusted.
std::string read_from(const std::string& folder, const std::string& key);
bool write_to(const std::string& folder, const std::string& key, const std::string& value);
// 32 digits that tell texts apart, but not against an attacker.
std::string digest(const std::string& text);

struct Counts {
  int64_t compiled, from_disk;
};
Counts counts();

}  // namespace onepass::cuda
