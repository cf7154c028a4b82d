// ops.cpp: the operators' schemas and their way into the engines. With this library loaded, a graph that holds them
// runs from C++ alone. No Python here; fake kernels and gradients are in ops.py.
#include <algorithm>
#include <limits>
#include <numeric>

#include "../cpu/isa_dispatch.h"
#include "../cuda/host/engine.h"
#include "operators.h"
#include "../core/memory_overlap.h"

namespace onepass {

namespace {

namespace stable = torch::stable::detail;
using MaybeType = std::optional<ScalarType>;

// The type of a result for which no dtype was given.
DType result_type(Function function, DType x_type) {
  return function != Function::state || x_type == DType::float64 ? x_type : DType::float32;
}

void check_type(Function function, DType x_type, DType y_type, const char* got) {
  if (!reduces(function) || reduces_to(function, x_type, y_type)) return;
  const DType own = result_type(function, x_type);
  const bool widens = own != DType::float32 && reduces_to(function, x_type, DType::float32);
  fail(std::string(kFunctionNames[int(function)]) + " of " + kDTypeNames[int(x_type)] + " gives " +
       kDTypeNames[int(own)] + (widens ? " or float32" : "") + ", got " + got + kDTypeNames[int(y_type)]);
}

Layout layout_of(Function function, const Operand& x, const Operand& y, const Mask& mask, bool keepdim,
                 bool contiguous) {
  const bool reduced = reduces(function);
  const int64_t numel = contiguous && mask.only_last ? x.numel() : 0;
  if (numel) return contiguous_layout(numel / x.sizes[x.rank - 1], x.sizes[x.rank - 1], reduced);
  int64_t y_strides[kMaxDims];  // by the dims of the input
  for (int i = 0, at = planes(function); i < x.rank; ++i) {
    const bool gone = reduced && mask.reduced[i];
    y_strides[i] = gone ? 0 : y.strides[at];
    at += !gone || keepdim;
  }
  return make_layout(x.rank, x.sizes, x.strides, y_strides, mask.reduced, reduced);
}

void run_cpu(const Call& call) {
  const CpuEngine& engine = cpu_engine();
  const Units units = engine.units(call);
  const int64_t grain = cpu_grain(units);
  const auto parallel = [&](auto&& work) {
    if (units.count <= grain) return work(int64_t(0), units.count);
    torch::stable::parallel_for(0, units.count, grain, work);
  };
  if (!units.pieces) return parallel([&](int64_t begin, int64_t end) { engine.run(call, begin, end); });
  std::vector<Piece> pieces(units.count + units.count / units.pieces);
  parallel([&](int64_t begin, int64_t end) { engine.states(call, pieces.data(), begin, end); });
  engine.merge(call, pieces.data());
  if (!call.reduces()) {
    parallel([&](int64_t begin, int64_t end) { engine.finish(call, pieces.data(), begin, end); });
  }
}

// y <- x of one shape and any strides, with the dims in the order of y's strides: torch copies to the contiguous tensor
// that y then mostly is by tiles, and to the same tensor seen transposed element by element, five times as long.
void copy_in_order(const Operand& y, const Operand& x) {
  int order[kMaxDims];
  std::iota(order, order + y.rank, 0);
  std::stable_sort(order, order + y.rank, [&](int a, int b) { return y.strides[a] > y.strides[b]; });
  AtenTensorHandle seen[2];
  for (const Operand* t : {&y, &x}) {
    int64_t sizes[kMaxDims], strides[kMaxDims];
    for (int i = 0; i < y.rank; ++i) sizes[i] = t->sizes[order[i]], strides[i] = t->strides[order[i]];
    checked(aoti_torch_as_strided(t->handle, sizes, strides, &seen[t == &x]));
  }
  const Owned to(seen[0]), from(seen[1]);
  checked(aoti_torch_copy_(to.get(), from.get(), 0));
}

// A call whose result has its shape and is on its device. `contiguous`: input and result both are.
void run(Function function, const Operand& x, DType x_type, const Operand& y, DType y_type, const Mask& mask,
         bool keepdim, bool contiguous, const CudaPlan* forced) {
  if (y.numel() == 0) return;
  if (!x.is_cuda() && !cpu_fuses(function, x_type, y_type)) {
    const Owned rounded = cast(x, y_type);
    return run(function, Operand(rounded.get()), y_type, y, y_type, mask, keepdim, contiguous, forced);
  }
  const Call call = {function, x_type,           y_type,
                     x.data(), y.mutable_data(), layout_of(function, x, y, mask, keepdim, contiguous)};
  if (!x.is_cuda() && !reduces(function) && call.layout.view == View::strided) {
    const auto of = [&](const Operand& a, const Operand& b) { return layout_of(function, a, b, mask, keepdim, false); };
    const Copied what = copied(call.layout, of(x, x), of(y, y));
    if (what == Copied::input) {
      copy_in_order(y, x);  // which rounds to the type of the result, as the call has to do first
      return run(function, y, y_type, y, y_type, mask, keepdim, y.is_contiguous(), forced);
    }
    if (what == Copied::result) {
      const Owned own = empty_like(x, y_type, false);
      const Operand made(own.get());
      if (of(x, made).unit_rows() || of(x, made).view == View::columns) {  // it may not: an expanded input
        run(function, x, x_type, made, y_type, mask, keepdim, false, forced);
        return copy_in_order(y, made);
      }
    }
  }
  if (call.layout.n == 0) {  // only what reduces gets here: the maximum of nothing, log(0); and for a state the sum, 0
    Tensor fill = shared(y);
    if (planes(function)) {
      torch::stable::fill_(fill, 0);
      fill = torch::stable::narrow(fill, 0, 0, 1);
    }
    torch::stable::fill_(fill, -std::numeric_limits<double>::infinity());
  } else if (x.is_cuda()) {
    cuda::run(call, x, y, mask.reduced, keepdim, forced);
  } else {
    run_cpu(call);
  }
}

// Results made here ---------------------------------------------------------------------------------------------------

Owned forward(Function function, const Operand& x, const Mask& mask, const MaybeType& dtype, bool keepdim) {
  const DType x_type = x.type();
  const DType y_type = dtype ? dtype_of(*dtype) : result_type(function, x_type);
  check_type(function, x_type, y_type, "dtype=");
  const bool contiguous = x.is_contiguous();
  if (!reduces(function)) {
    Owned out = empty_like(x, y_type, contiguous);
    Operand y = x;
    y.handle = out.get();
    if (!contiguous) y = Operand(out.get());
    in_huge_pages(y, y_type);
    run(function, x, x_type, y, y_type, mask, keepdim, contiguous, nullptr);
    return out;
  }
  const Shape shape(function, x, mask, keepdim);
  int64_t strides[kMaxDims];
  contiguous_strides(shape.rank, shape.sizes, strides);
  Owned out = empty_strided(shape.rank, shape.sizes, strides, y_type, x);
  run(function, x, x_type, Operand(out.get()), y_type, mask, keepdim, contiguous, nullptr);
  return out;
}

// The kernels as the dispatcher calls them: they own what they find on the stack, and leave the result there. TORCH_BOX
// would count the owners of both tensors, and make one more reference to the result.
struct Options {
  MaybeType dtype;
  bool keepdim = false;

  // From their place on the stack; `widens`: keepdim with a dtype behind it.
  Options(Function function, const StableIValue* given, bool widens = false) {
    if (reduces(function)) keepdim = stable::to<bool>(*given++);
    if (!reduces(function) || widens) dtype = stable::to<MaybeType>(*given);
  }
};

template <Function function>
void over_dims(StableIValue* stack, uint64_t, uint64_t) {
  const Owned input(stable::to<AtenTensorHandle>(stack[0]));
  const Dims dims = stable::to<Dims>(stack[1]);
  const Options options(function, stack + 2, function == Function::logsumexp);
  const Operand x(input.get());
  stack[0] = stable::from(forward(function, x, Mask(dims, x.rank), options.dtype, options.keepdim).release());
}

template <Function function>
void over_dim(StableIValue* stack, uint64_t, uint64_t) {
  const Owned input(stable::to<AtenTensorHandle>(stack[0]));
  const int64_t dim = stable::to<int64_t>(stack[1]);
  const Options options(function, stack + 2);
  const Operand x(input.get());
  stack[0] = stable::from(forward(function, x, Mask(&dim, 1, x.rank), options.dtype, options.keepdim).release());
}

// Results given -------------------------------------------------------------------------------------------------------

}  // namespace

void forward_into(Function function, const Operand& x, const Mask& mask, bool keepdim, const Operand& y,
                  const CudaPlan* forced) {
  const DType y_type = y.type(), x_type = x.type();
  check_type(function, x_type, y_type, "an out of ");
  if (planes(function) && !y.is_contiguous()) fail("a state is written to a contiguous out");
  const Shape shape(function, x, mask, keepdim);
  if (!shape.is_of(y)) {
    fail("the result has shape " + text_of(shape.sizes, shape.rank) + ", got an out of shape " +
         text_of(y.sizes, y.rank));
  }
  if (x.device_type != y.device_type || x.device_index != y.device_index) {
    fail("input and out must be on the same device");
  }
  run(function, x, x_type, y, y_type, mask, keepdim, x.is_contiguous() && y.is_contiguous(), forced);
}

const char* out_refusal(Function function, const Operand& y, const Operand& x) {
  const Extent to = {uint64_t(y.mutable_data()), size_of(y.type()), y.rank, y.sizes, y.strides};
  const Extent from = {uint64_t(x.data()), size_of(x.type()), x.rank, x.sizes, x.strides};
  if (surely_distinct(to) && surely_apart(to, from)) return nullptr;  // by far the most frequent
  if (self_overlap(to)) return "elements of out share memory; clone() it first";
  const Overlap shared = overlap(to, from);
  const bool in_place = shared == Overlap::same && (!reduces(function) || x.numel() == 1);
  if (shared == Overlap::none || in_place) return nullptr;
  return "out must be the input itself or share no memory with it; they overlap";
}

namespace {

// A call into an `out` of which nothing is known: graphs and C++ come here as well as Python.
void checked_out(Function function, const Operand& x, const Mask& mask, const MaybeType& dtype, bool keepdim,
                 const Operand& y) {
  const DType y_type = y.type();
  if (y_type != (dtype ? dtype_of(*dtype) : x.type())) {
    fail(std::string("the result has another dtype than out, which is ") + kDTypeNames[int(y_type)]);
  }
  if (const char* reason = out_refusal(function, y, x)) {
    throw std::runtime_error(std::string("onepass.") + kFunctionNames[int(function)] + "(): " + reason);
  }
  forward_into(function, x, mask, keepdim, y);
}

template <Function function>
void over_dim_into(StableIValue* stack, uint64_t, uint64_t) {
  const Owned input(stable::to<AtenTensorHandle>(stack[0])), out(stable::to<AtenTensorHandle>(stack[3]));
  const int64_t dim = stable::to<int64_t>(stack[1]);
  const Options options(function, stack + 2);
  const Operand x(input.get());
  checked_out(function, x, Mask(&dim, 1, x.rank), options.dtype, options.keepdim, Operand(out.get()));
}

void logsumexp_out(const Tensor& input, Dims dims, bool keepdim, MaybeType dtype, Tensor out) {
  const Operand x(input.get());
  checked_out(Function::logsumexp, x, Mask(dims, x.rank), dtype, keepdim, Operand(out.get()));
}

template <Function function>
void family_out(const Tensor& input, Dims dims, MaybeType dtype, Tensor out) {
  const Operand x(input.get());
  checked_out(function, x, Mask(dims, x.rank), dtype, false, Operand(out.get()));
}

// Private: a CUDA call with its plan given (tier, lanes, rows a block, values, vector, split, shelf, edges), so that
// tests force every tier.
void forced(const Tensor& input, int64_t function, Dims dims, bool keepdim, Dims plan, Tensor out) {
  if (function < 0 || function > 4) fail("function is 0 to 4, got " + std::to_string(function));
  if (!input.is_cuda()) fail("only CUDA calls have a plan to force");
  const CudaPlan given = cuda::checked_plan(plan);
  const Operand x(input.get());
  forward_into(Function(function), x, Mask(dims, x.rank), keepdim, Operand(out.get()), &given);
}

}  // namespace

STABLE_TORCH_LIBRARY(onepass, m) {
  for (const char* name : {"softmax", "log_softmax", "softmin"}) {
    const std::string arguments = "(Tensor input, int[1] dim, *, ScalarType? dtype=None";
    m.def((name + arguments + ") -> Tensor").c_str());
    m.def((name + (".out" + arguments) + ", Tensor(a!) out) -> ()").c_str());
    // The same without gradients: the way of a call that needs none pays for no Python autograd kernel. The plainest
    // call, of one dim, pays for no list either.
    m.def(("_" + (name + arguments) + ") -> Tensor").c_str());
    m.def(("_" + std::string(name) + ".int(Tensor input, int dim, ScalarType? dtype=None) -> Tensor").c_str());
    m.def(
        ("_" + std::string(name) + ".int_out(Tensor input, int dim, ScalarType? dtype, Tensor(a!) out) -> ()").c_str());
  }
  // logsumexp of a half type gives that type or, with dtype=, float32.
  const std::string reduced = "(Tensor input, int[1] dim, bool keepdim=False";
  for (const std::string name : {"logsumexp", "_logsumexp"}) {
    m.def((name + reduced + ", *, ScalarType? dtype=None) -> Tensor").c_str());
  }
  for (const std::string name : {"state", "_state"}) m.def((name + reduced + ") -> Tensor").c_str());
  m.def("_logsumexp.int(Tensor input, int dim, bool keepdim=False) -> Tensor");
  m.def("_logsumexp.int_out(Tensor input, int dim, bool keepdim, Tensor(a!) out) -> ()");
  m.def(("logsumexp.out" + reduced + ", *, ScalarType? dtype=None, Tensor(a!) out) -> ()").c_str());
  m.def("_softmax_with_plan(Tensor input, int function, int[] dim, bool keepdim, int[] plan, Tensor(a!) out) -> ()");
}

static void implement(torch::stable::detail::StableLibrary& m) {
  m.impl("softmax", over_dims<Function::softmax>);
  m.impl("log_softmax", over_dims<Function::log_softmax>);
  m.impl("softmin", over_dims<Function::softmin>);
  m.impl("logsumexp", over_dims<Function::logsumexp>);
  m.impl("state", over_dims<Function::state>);
  m.impl("_softmax", over_dims<Function::softmax>);
  m.impl("_log_softmax", over_dims<Function::log_softmax>);
  m.impl("_softmin", over_dims<Function::softmin>);
  m.impl("_logsumexp", over_dims<Function::logsumexp>);
  m.impl("_state", over_dims<Function::state>);
  m.impl("_softmax.int", over_dim<Function::softmax>);
  m.impl("_log_softmax.int", over_dim<Function::log_softmax>);
  m.impl("_softmin.int", over_dim<Function::softmin>);
  m.impl("_logsumexp.int", over_dim<Function::logsumexp>);
  m.impl("_softmax.int_out", over_dim_into<Function::softmax>);
  m.impl("_log_softmax.int_out", over_dim_into<Function::log_softmax>);
  m.impl("_softmin.int_out", over_dim_into<Function::softmin>);
  m.impl("_logsumexp.int_out", over_dim_into<Function::logsumexp>);
  m.impl("softmax.out", TORCH_BOX(&family_out<Function::softmax>));
  m.impl("log_softmax.out", TORCH_BOX(&family_out<Function::log_softmax>));
  m.impl("softmin.out", TORCH_BOX(&family_out<Function::softmin>));
  m.impl("logsumexp.out", TORCH_BOX(&logsumexp_out));
  m.impl("_softmax_with_plan", TORCH_BOX(&forced));
}

STABLE_TORCH_LIBRARY_IMPL(onepass, CPU, m) { implement(m); }
STABLE_TORCH_LIBRARY_IMPL(onepass, CUDA, m) { implement(m); }

}  // namespace onepass
