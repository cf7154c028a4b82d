// stable_tensor.h: what onepass needs of a torch tensor, through libtorch's stable ABI; and the dims and tensors that
// an operator was called with.
#pragma once

#include <sys/mman.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <array>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "problem.h"

namespace onepass {

namespace stable = torch::stable::detail;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

[[noreturn]] inline void fail(const std::string& words) { throw std::runtime_error("onepass: " + words); }

// The C functions of the stable ABI return 0; or they log an error and return 1.
inline void check_torch(AOTITorchError failed) {
  if (failed) fail("a call of libtorch failed");
}

// Owns the handle of a tensor. (torch's Tensor counts references; a call that owns everything it has needs no count.)
class OwnedTensor {
 public:
  explicit OwnedTensor(AtenTensorHandle handle) : handle_(handle) {}
  OwnedTensor(OwnedTensor&& other) noexcept : handle_(other.release()) {}
  OwnedTensor& operator=(OwnedTensor&&) = delete;
  ~OwnedTensor() {
    if (handle_) aoti_torch_delete_tensor_object(handle_);
  }

  AtenTensorHandle get() const { return handle_; }
  AtenTensorHandle release() { return std::exchange(handle_, nullptr); }

 private:
  AtenTensorHandle handle_;
};

inline ScalarType scalar_type_of(DType type) {
  constexpr ScalarType kTypes[] = {ScalarType::Float, ScalarType::Double, ScalarType::Half, ScalarType::BFloat16};
  return kTypes[int(type)];
}

inline std::optional<DType> dtype_or_none(ScalarType type) {
  for (const DType ours : kDTypes) {
    if (scalar_type_of(ours) == type) return ours;
  }
  return std::nullopt;
}

inline DType dtype_of(ScalarType type) {
  if (const auto ours = dtype_or_none(type)) return *ours;
  fail(std::string("takes float32, float64, float16 and bfloat16, got ") + torch::headeronly::toString(type));
}

// libtorch's own number of a scalar type.
inline int32_t torch_dtype(DType type) {
  static const int32_t codes[] = {aoti_torch_dtype_float32(), aoti_torch_dtype_float64(), aoti_torch_dtype_float16(),
                                  aoti_torch_dtype_bfloat16()};
  return codes[int(type)];
}

// A tensor by its handle, with the properties that a call needs, each queried once. Sizes and strides point into the
// tensor.
struct TensorRef {
  AtenTensorHandle handle;
  int rank;
  const int64_t *sizes, *strides;
  int32_t device_type, device_index;

  explicit TensorRef(AtenTensorHandle tensor) : handle(tensor) {
    int64_t dims, *own_sizes, *own_strides;
    check_torch(aoti_torch_get_dim(handle, &dims));
    check_torch(aoti_torch_get_sizes(handle, &own_sizes));
    check_torch(aoti_torch_get_strides(handle, &own_strides));
    check_torch(aoti_torch_get_device_type(handle, &device_type));
    check_torch(aoti_torch_get_device_index(handle, &device_index));
    rank = int(dims), sizes = own_sizes, strides = own_strides;
  }

  bool is_cuda() const { return device_type == aoti_torch_device_type_cuda(); }
  bool is_on_device_of(const TensorRef& other) const {
    return device_type == other.device_type && device_index == other.device_index;
  }
  bool has_sizes(const int64_t* others, int count) const {
    return rank == count && std::equal(sizes, sizes + rank, others);
  }
  bool is_contiguous() const {
    bool answer;
    return check_torch(aoti_torch_is_contiguous(handle, &answer)), answer;
  }
  int64_t numel() const {
    int64_t total = 1;
    for (int i = 0; i < rank; ++i) total *= sizes[i];
    return total;
  }
  // Its dtype, if it is one that onepass supports.
  std::optional<DType> maybe_dtype() const {
    const int32_t code = dtype_code();
    for (const DType type : kDTypes) {
      if (code == torch_dtype(type)) return type;
    }
    return std::nullopt;
  }
  DType dtype() const {
    if (const auto known = maybe_dtype()) return *known;
    return dtype_of(stable::to<ScalarType>(stable::from(dtype_code())));  // raises an error that names it
  }
  int32_t dtype_code() const {
    int32_t code;
    return check_torch(aoti_torch_get_dtype(handle, &code)), code;
  }
  const void* data() const {
    const void* address;
    return check_torch(torch_get_const_data_ptr(handle, &address)), address;
  }
  // The end of the memory that holds the tensor.
  const void* storage_end() const {
    int64_t bytes, offset;
    check_torch(aoti_torch_get_storage_size(handle, &bytes));
    check_torch(aoti_torch_get_storage_offset(handle, &offset));
    return static_cast<const char*>(data()) - offset * size_of_element() + bytes;
  }
  int64_t size_of_element() const {
    const auto type = maybe_dtype();
    return type ? size_of(*type) : 1;
  }
  void* mutable_data() const {
    void* address;
    return check_torch(torch_get_mutable_data_ptr(handle, &address)), address;
  }
};

// A new reference to a tensor, for a callee that takes ownership of its arguments.
inline AtenTensorHandle new_reference(const TensorRef& tensor) {
  AtenTensorHandle reference;
  return check_torch(aoti_torch_new_tensor_handle(tensor.handle, &reference)), reference;
}

// Asks the system for huge pages for a new result that does not fit into the caches anyway: the first access to a page
// of 4 KB costs more than the arithmetic on its elements. Only pages that lie completely in the result are asked for.
constexpr int64_t kHugeLeast = 8 << 20, kHuge = 2 << 20;  // bytes

inline void advise_huge_pages([[maybe_unused]] const TensorRef& result, [[maybe_unused]] DType type) {
#ifdef MADV_HUGEPAGE
  const int64_t bytes = result.numel() * size_of(type);
  if (bytes < kHugeLeast || result.device_type != aoti_torch_device_type_cpu()) return;
  const uintptr_t from = uintptr_t(result.mutable_data()), first = (from + kHuge - 1) / kHuge * kHuge;
  const uintptr_t end = (from + uintptr_t(bytes)) / kHuge * kHuge;
  if (first < end) madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE);  // a hint: it may fail
#endif
}

inline OwnedTensor empty_strided(int rank, const int64_t* sizes, const int64_t* strides, DType type,
                                 const TensorRef& like) {
  AtenTensorHandle result;
  check_torch(
      aoti_torch_empty_strided(rank, sizes, strides, torch_dtype(type), like.device_type, like.device_index, &result));
  return OwnedTensor(result);
}

inline OwnedTensor empty_contiguous(int rank, const int64_t* sizes, DType type, const TensorRef& like) {
  int64_t strides[kMaxDims + 1], step = 1;
  for (int i = rank; i-- > 0;) {
    strides[i] = step;
    step *= sizes[i] > 1 ? sizes[i] : 1;
  }
  return empty_strided(rank, sizes, strides, type, like);
}

// A view of `base` with other sizes and strides, of the same rank and at the same offset.
inline OwnedTensor as_strided(const TensorRef& base, const int64_t* sizes, const int64_t* strides) {
  AtenTensorHandle view;
  return check_torch(aoti_torch_as_strided(base.handle, sizes, strides, &view)), OwnedTensor(view);
}

// Whether the elements fill one piece of memory, in any order of the dims.
inline bool is_dense(const TensorRef& tensor) {
  const int64_t total = tensor.numel();
  for (int64_t step = 1; step < total;) {
    int dim = 0;
    while (dim < tensor.rank && (tensor.sizes[dim] < 2 || tensor.strides[dim] != step)) ++dim;
    if (dim == tensor.rank) return false;
    step *= tensor.sizes[dim];
  }
  return true;
}

// An uninitialised tensor as torch.empty_like makes it: with the strides of `like` if it is dense, and otherwise with
// the strides that torch chooses.
inline OwnedTensor empty_like(const TensorRef& like, DType type, bool contiguous) {
  if (contiguous || is_dense(like)) {  // by far the most frequent case, and 1 us faster than the dispatcher
    return empty_strided(like.rank, like.sizes, like.strides, type, like);
  }
  std::array<StableIValue, 6> stack{
      stable::from(new_reference(like)), stable::from(std::optional<ScalarType>(scalar_type_of(type))),
      stable::from(std::nullopt),        stable::from(std::nullopt),
      stable::from(std::nullopt),        stable::from(std::nullopt)};
  check_torch(torch_call_dispatcher("aten::empty_like", "", stack.data(), TORCH_ABI_VERSION));
  return OwnedTensor(stable::to<AtenTensorHandle>(stack[0]));
}

inline OwnedTensor cast(const TensorRef& input, DType type) {
  OwnedTensor result = empty_like(input, type, input.is_contiguous());
  check_torch(aoti_torch_copy_(result.get(), input.handle, 0));
  return result;
}

using Dims = std::vector<int64_t>;

inline std::string to_text(const int64_t* values, int count) {
  std::string text = "[";
  for (int i = 0; i < count; ++i) text += (i ? ", " : "") + std::to_string(values[i]);
  return text + "]";
}

// The reduced dims, checked. A 0-d tensor has one dim, 0 (or -1), of size 1, as in torch.
struct ReduceDims {
  bool reduced[kMaxDims] = {};
  bool is_last;  // the last dim is reduced, and no other

  ReduceDims(const int64_t* dims, int count, int rank) {
    if (rank > kMaxDims) fail("takes at most 64 dims, got " + std::to_string(rank));
    for (int i = 0; i < count; ++i) {
      const int64_t dim = dims[i], bound = rank ? rank : 1, at = dim < 0 ? dim + bound : dim;
      if (at < 0 || at >= bound) {
        fail("dim " + std::to_string(dim) + " is out of range for a tensor of " + std::to_string(rank) + " dims");
      }
      if (rank && reduced[at]) fail("dim " + std::to_string(at) + " appears twice in " + to_text(dims, count));
      if (rank) reduced[at] = true;
    }
    is_last = count == 1 && rank && reduced[rank - 1];
  }
  ReduceDims(const Dims& dims, int rank) : ReduceDims(dims.data(), int(dims.size()), rank) {}
  ReduceDims(int64_t dim, int rank) : ReduceDims(&dim, 1, rank) {}
};

// The tensors of a problem, in the order of Problem; null if there is no such tensor.
struct TensorArgs {
  Function function;
  Direction direction;
  const TensorRef* tensors[kMaxTensors];
  const ReduceDims& dims;
  bool keepdim;  // whether a reduction's result has the reduced dims, of size 1

  bool is_reduction() const { return onepass::is_reduction(function); }
  // A tensor with the shape of the input.
  const TensorRef& like() const { return *tensors[direction == Direction::forward ? int(kX) : int(kSaved)]; }
  int output() const { return direction == Direction::forward ? int(kY) : int(kDx); }
  bool is_one_per_row(int tensor) const {
    if (!is_reduction()) return false;
    return direction == Direction::forward ? tensor == kY : tensor == kGrad || tensor == kLse;
  }
  bool has_planes(int tensor) const {
    return direction == Direction::forward && tensor == kY && traits_of(function).leading_planes;
  }

  // A tensor's strides along the dims of the input: 0 for a dim that the tensor lacks, or has only in size 1.
  void get_strides(int tensor, int64_t* strides) const {
    const bool drops = is_one_per_row(tensor);
    for (int i = 0, at = has_planes(tensor); i < like().rank; ++i) {
      const bool is_dropped = drops && dims.reduced[i];
      strides[i] = is_dropped ? 0 : tensors[tensor]->strides[at];
      at += !is_dropped || keepdim;
    }
  }
};

}  // namespace onepass
