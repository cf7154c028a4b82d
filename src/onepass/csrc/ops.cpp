// ops.cpp: the operators' schemas and their way into the engines. With this library loaded, a graph that holds them
// runs from C++ alone. No Python here; fake kernels and gradients are in ops.py.
#include <limits>

#include "cpu/pick.h"
#include "cuda/engine.h"
#include "tensors.h"

namespace onepass {

namespace {

using Dims = std::vector<int64_t>;
using MaybeType = std::optional<ScalarType>;

std::string text_of(const int64_t* values, size_t count) {
  std::string text = "[";
  for (size_t i = 0; i < count; ++i) text += (i ? ", " : "") + std::to_string(values[i]);
  return text + "]";
}

// Which dims are reduced. A 0-d tensor has the one dim 0 (or -1) of size 1, as in torch.
struct Mask {
  bool reduced[kMaxDims] = {};

  Mask(const Dims& dims, int64_t rank) {
    if (rank > kMaxDims) fail("takes at most 64 dims, got " + std::to_string(rank));
    for (const int64_t dim : dims) {
      const int64_t bound = rank ? rank : 1, at = dim < 0 ? dim + bound : dim;
      if (at < 0 || at >= bound) {
        fail("dim " + std::to_string(dim) + " is out of range for a tensor of " + std::to_string(rank) + " dims");
      }
      if (rank && reduced[at])
        fail("dim " + std::to_string(at) + " appears twice in " + text_of(dims.data(), dims.size()));
      if (rank) reduced[at] = true;
    }
  }
};

struct Shape {
  Dims sizes, strides;

  explicit Shape(const Tensor& tensor) {
    const auto s = tensor.sizes(), t = tensor.strides();
    sizes.assign(s.begin(), s.end());
    strides.assign(t.begin(), t.end());
  }
};

Call make_call(Function function, const Tensor& input, const Tensor& out, const Mask& mask, bool keepdim) {
  const Shape x(input), y(out);
  const int rank = int(x.sizes.size());
  const bool reduced = function == Function::logsumexp;
  Dims y_sizes, y_strides(size_t(rank), 0);
  for (int i = 0; i < rank; ++i) {
    if (!mask.reduced[i] || !reduced) {
      const size_t at = y_sizes.size();
      if (at < y.strides.size()) y_strides[size_t(i)] = y.strides[at];
      y_sizes.push_back(x.sizes[size_t(i)]);
    } else if (keepdim) {
      y_sizes.push_back(1);
    }
  }
  if (y_sizes != y.sizes) {
    fail("the result has shape " + text_of(y_sizes.data(), y_sizes.size()) + ", got an out of shape " +
         text_of(y.sizes.data(), y.sizes.size()));
  }
  if (input.is_cuda() != out.is_cuda() || input.get_device_index() != out.get_device_index()) {
    fail("input and out must be on the same device");
  }
  Call call = {function,
               dtype_of(input.scalar_type()),
               dtype_of(out.scalar_type()),
               input.const_data_ptr(),
               out.mutable_data_ptr(),
               {}};
  call.layout = make_layout(rank, x.sizes.data(), x.strides.data(), y_strides.data(), mask.reduced, reduced);
  return call;
}

// CPU ---------------------------------------------------------------------------------------------------------------

void run_cpu(const Call& call) {
  static const CpuRun run = cpu_run();
  const Units units = baseline::units(call.layout);
  const int64_t grain = cpu_grain(units);
  if (units.count <= grain) return run(call, 0, units.count);
  torch::stable::parallel_for(0, units.count, grain, [&](int64_t begin, int64_t end) { run(call, begin, end); });
}

// Both --------------------------------------------------------------------------------------------------------------

void forward_into(Function function, const Tensor& given, const Tensor& out, const Mask& mask, bool keepdim,
                  const CudaPlan* forced) {
  Tensor input = given;
  const DType y_type = dtype_of(out.scalar_type());
  const DType x_type = dtype_of(input.scalar_type());
  if (function == Function::logsumexp && x_type != y_type) {
    fail(std::string("logsumexp of ") + kDTypeNames[int(x_type)] + " gives the same type, got an out of " +
         kDTypeNames[int(y_type)]);
  }
  if (out.numel() == 0) return;
  if (!input.is_cuda() && !cpu_fuses(x_type, y_type)) input = cast(input, y_type);
  const Call call = make_call(function, input, out, mask, keepdim);
  if (call.layout.n == 0) {  // only logsumexp gets here: a sum of nothing
    Tensor fill = out;
    torch::stable::fill_(fill, -std::numeric_limits<double>::infinity());
  } else if (input.is_cuda()) {
    cuda::run(call, input, out, mask.reduced, keepdim, forced);
  } else {
    run_cpu(call);
  }
}

Tensor family(Function function, const Tensor& input, const Dims& dims, const MaybeType& dtype) {
  const Mask mask(dims, input.dim());
  const DType x_type = dtype_of(input.scalar_type());
  const DType y_type = dtype ? dtype_of(*dtype) : x_type;
  Tensor out = empty_like(input, y_type);
  forward_into(function, input, out, mask, false, nullptr);
  return out;
}

Tensor softmax(const Tensor& input, Dims dims, MaybeType dtype) {
  return family(Function::softmax, input, dims, dtype);
}
Tensor log_softmax(const Tensor& input, Dims dims, MaybeType dtype) {
  return family(Function::log_softmax, input, dims, dtype);
}
Tensor softmin(const Tensor& input, Dims dims, MaybeType dtype) {
  return family(Function::softmin, input, dims, dtype);
}

Tensor logsumexp(const Tensor& input, Dims dims, bool keepdim) {
  const Mask mask(dims, input.dim());
  Dims sizes;
  for (int i = 0; i < int(input.dim()); ++i) {
    if (!mask.reduced[i])
      sizes.push_back(input.size(i));
    else if (keepdim)
      sizes.push_back(1);
  }
  Tensor out = empty_strided(sizes, contiguous_strides(sizes), dtype_of(input.scalar_type()), input);
  forward_into(Function::logsumexp, input, out, mask, keepdim, nullptr);
  return out;
}

void family_out(Function function, const Tensor& input, const Dims& dims, const MaybeType& dtype, const Tensor& out) {
  const DType y_type = dtype_of(out.scalar_type());
  if (y_type != (dtype ? dtype_of(*dtype) : dtype_of(input.scalar_type()))) {
    fail(std::string("the result has another dtype than out, which is ") + kDTypeNames[int(y_type)]);
  }
  forward_into(function, input, out, Mask(dims, input.dim()), false, nullptr);
}

void softmax_out(const Tensor& input, Dims dims, MaybeType dtype, Tensor out) {
  family_out(Function::softmax, input, dims, dtype, out);
}
void log_softmax_out(const Tensor& input, Dims dims, MaybeType dtype, Tensor out) {
  family_out(Function::log_softmax, input, dims, dtype, out);
}
void softmin_out(const Tensor& input, Dims dims, MaybeType dtype, Tensor out) {
  family_out(Function::softmin, input, dims, dtype, out);
}
void logsumexp_out(const Tensor& input, Dims dims, bool keepdim, Tensor out) {
  forward_into(Function::logsumexp, input, out, Mask(dims, input.dim()), keepdim, nullptr);
}

// Private: a CUDA call with its plan given (tier, lanes, rows a block, values, vector), so that tests force every tier.
void forced(const Tensor& input, int64_t function, Dims dims, bool keepdim, Dims plan, Tensor out) {
  if (function < 0 || function > 3) fail("function is 0 to 3, got " + std::to_string(function));
  if (!input.is_cuda()) fail("only CUDA calls have a plan to force");
  const CudaPlan given = cuda::checked_plan(plan);
  forward_into(Function(function), input, out, Mask(dims, input.dim()), keepdim, &given);
}

}  // namespace

STABLE_TORCH_LIBRARY(onepass, m) {
  for (const char* name : {"softmax", "log_softmax", "softmin"}) {
    const std::string arguments = "(Tensor input, int[1] dim, *, ScalarType? dtype=None";
    m.def((name + arguments + ") -> Tensor").c_str());
    m.def((name + (".out" + arguments) + ", Tensor(a!) out) -> ()").c_str());
    // The same without gradients: the way of a call that needs none pays for no Python autograd kernel.
    m.def(("_" + (name + arguments) + ") -> Tensor").c_str());
  }
  for (const char* name : {"logsumexp", "_logsumexp"}) {
    m.def((std::string(name) + "(Tensor input, int[1] dim, bool keepdim=False) -> Tensor").c_str());
  }
  m.def("logsumexp.out(Tensor input, int[1] dim, bool keepdim=False, *, Tensor(a!) out) -> ()");
  m.def("_forced(Tensor input, int function, int[] dim, bool keepdim, int[] plan, Tensor(a!) out) -> ()");
}

static void implement(torch::stable::detail::StableLibrary& m) {
  m.impl("softmax", TORCH_BOX(&softmax));
  m.impl("log_softmax", TORCH_BOX(&log_softmax));
  m.impl("softmin", TORCH_BOX(&softmin));
  m.impl("logsumexp", TORCH_BOX(&logsumexp));
  m.impl("_softmax", TORCH_BOX(&softmax));
  m.impl("_log_softmax", TORCH_BOX(&log_softmax));
  m.impl("_softmin", TORCH_BOX(&softmin));
  m.impl("_logsumexp", TORCH_BOX(&logsumexp));
  m.impl("softmax.out", TORCH_BOX(&softmax_out));
  m.impl("log_softmax.out", TORCH_BOX(&log_softmax_out));
  m.impl("softmin.out", TORCH_BOX(&softmin_out));
  m.impl("logsumexp.out", TORCH_BOX(&logsumexp_out));
  m.impl("_forced", TORCH_BOX(&forced));
}

STABLE_TORCH_LIBRARY_IMPL(onepass, CPU, m) { implement(m); }
STABLE_TORCH_LIBRARY_IMPL(onepass, CUDA, m) { implement(m); }

}  // namespace onepass
