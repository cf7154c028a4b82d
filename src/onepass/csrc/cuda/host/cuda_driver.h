// cuda_driver.h: the few functions of the CUDA driver and of NVRTC that onepass uses. Both libraries are opened with
// dlopen at run time: building needs no CUDA toolkit, and the same binary loads on a machine without a GPU. The
// declarations follow the public ABI of CUDA 12.
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

struct LaunchAttribute {  // CUlaunchAttribute, with the values that are used here
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
  kSharedOfBlock = 97,  // the opt-in limit
};

constexpr int kSharedStatic = 1, kSharedDynamic = 8, kNonPortableCluster = 14;  // CUfunction_attribute
constexpr Result kTooLarge = 720;  // CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE
constexpr Result kNotSupported = 801;

// The functions of the driver that are used: F(member, symbol, arguments).
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

// Sets `function` to a symbol of an open library.
template <class F>
void load_symbol(void* library, const char* symbol, F* function, const char* name) {
  *function = reinterpret_cast<F>(dlsym(library, symbol));
  if (!*function) throw std::runtime_error(std::string("onepass: ") + name + " has no " + symbol + "; it is too old");
}

// The driver, opened once. Throws std::runtime_error if there is none.
const Driver& driver();

// Throws with the driver's message unless `result` is success.
void check(Result result, const char* call);

const Gpu& device_info(int device);
// What device_info() returns in this thread during a DryRun (launch.h), for a GPU that need not exist.
inline thread_local const Gpu* gpu_of_dry_run = nullptr;

// Sets the primary context of `device` for the calling thread if it has no context, for example because it never used
// the device through torch.
void enter_context(int device);

// Whether the calling thread is in the primary context of `device`, which has torch's tensors, so that it can launch.
bool in_context(int device);

// The cubin of `source_file`, compiled for sm_<arch> with `defines`. The file is a kernel of the engine or of the
// gallery, or another one by its path. The cubin comes from the package of kernels (unless `packaged` is false, for a
// driver that refuses it), from the disk cache, or else from NVRTC. Throws std::runtime_error with the compiler's log
// if compiling fails. `is_stored` is set to whether later processes find it compiled.
std::string cubin(const std::string& source_file, const std::vector<std::string>& defines, int arch,
                  bool* is_stored = nullptr, bool packaged = true);

// Whether the package of kernels or the disk cache has the cubin. Compiles nothing.
bool is_cached(const std::string& source_file, const std::vector<std::string>& defines, int arch);

// Puts the cubin into a package of kernels in `folder`. Returns whether it could be written.
bool package(const std::string& source_file, const std::vector<std::string>& defines, int arch,
             const std::string& folder);

// "major.minor" of NVRTC. If it cannot be opened, throws and says where it was looked for.
std::string nvrtc_version();
// The file of NVRTC. It is found without opening it if possible. Throws as nvrtc_version does.
std::string nvrtc_file();

// The directory of the disk cache. Empty if the cache is switched off or not safe to use; `why` then says the reason.
std::string cache_directory(std::string* why);
// The value stored under `key`; empty if it is absent or damaged, or if the file has another key.
std::string cache_read(const std::string& key);
// Returns whether the value was stored. A full or read-only disk is no error.
bool cache_write(const std::string& key, const std::string& value);
// The same for any folder, without checks: everybody who can write to it is trusted.
std::string read_from(const std::string& folder, const std::string& key);
bool write_to(const std::string& folder, const std::string& key, const std::string& value);
// 32 hexadecimal digits that identify a text, but not against an attacker.
std::string digest(const std::string& text);

struct Counts {
  int64_t compiled, from_disk;
};
Counts counts();

}  // namespace onepass::cuda
