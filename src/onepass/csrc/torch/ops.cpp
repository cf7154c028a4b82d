// ops.cpp: the schemas of the operators of functions and gradients, the checks of their arguments, and the fast path.
// Once this library is loaded, a graph with these operators runs from C++ alone. There is no Python here: fake kernels
// and autograd are in Python.
#include "../core/memory_overlap.h"
#include "../plan/validate.h"
#include "operators.h"

namespace onepass {

namespace {

using MaybeType = std::optional<ScalarType>;

// Forward -------------------------------------------------------------------------------------------------------------

// The type of the result if no dtype is given.
DType result_type(Function function, DType x_type) {
  return function != Function::state || x_type == DType::float64 ? x_type : DType::float32;
}

void check_type(Function function, DType x_type, DType y_type, const char* got) {
  if (!is_reduction(function) || reduces_to(function, x_type, y_type)) return;
  const DType own = result_type(function, x_type);
  const bool widens = own != DType::float32 && reduces_to(function, x_type, DType::float32);
  fail(std::string(name_of(function)) + " of " + name_of(x_type) + " gives " + name_of(own) +
       (widens ? " or float32" : "") + ", got " + got + name_of(y_type));
}

OwnedTensor compute(Function function, const TensorRef& x, const ReduceDims& dims, const MaybeType& dtype,
                    bool keepdim) {
  const DType x_type = x.dtype();
  const DType y_type = dtype ? dtype_of(*dtype) : result_type(function, x_type);
  check_type(function, x_type, y_type, "dtype=");
  const bool contiguous = x.is_contiguous();
  const auto run = [&](const TensorRef& y) {
    run_forward({function, Direction::forward, {&x, &y}, dims, keepdim}, x_type, y_type, contiguous);
  };
  if (is_reduction(function)) {
    const ResultShape shape(function, x, dims, keepdim);
    OwnedTensor out = empty_contiguous(shape.rank, shape.sizes, y_type, x);
    return run(TensorRef(out.get())), std::move(out);
  }
  OwnedTensor out = empty_like(x, y_type, contiguous);
  TensorRef y = x;
  y.handle = out.get();
  if (!contiguous) y = TensorRef(out.get());
  advise_huge_pages(y, y_type);
  return run(y), std::move(out);
}

MemoryRange range_of(const TensorRef& tensor) {
  return {uint64_t(tensor.data()), size_of(tensor.dtype()), tensor.rank, tensor.sizes, tensor.strides};
}

}  // namespace

void compute_into(Function function, const TensorRef& x, const ReduceDims& dims, bool keepdim, const TensorRef& y,
                  const CudaPlan* plan) {
  const DType y_type = y.dtype(), x_type = x.dtype();
  check_type(function, x_type, y_type, "an out of ");
  if (traits_of(function).leading_planes && !y.is_contiguous()) fail("a state is written to a contiguous out");
  const ResultShape shape(function, x, dims, keepdim);
  if (!y.has_sizes(shape.sizes, shape.rank)) {
    fail("the result has shape " + to_text(shape.sizes, shape.rank) + ", got an out of shape " +
         to_text(y.sizes, y.rank));
  }
  if (!x.is_on_device_of(y)) fail("input and out must be on the same device");
  run_forward({function, Direction::forward, {&x, &y}, dims, keepdim}, x_type, y_type,
              x.is_contiguous() && y.is_contiguous(), plan);
}

const char* find_overlap(Function function, const TensorRef& y, const TensorRef& x) {
  const MemoryRange to = range_of(y), from = range_of(x);
  if (surely_distinct(to) && surely_apart(to, from)) return nullptr;  // by far the most frequent case
  if (self_overlap(to)) return "elements of out share memory; clone() it first";
  const Overlap shared = overlap(to, from);
  const bool in_place = shared == Overlap::same && (!is_reduction(function) || x.numel() == 1);
  if (shared == Overlap::none || in_place) return nullptr;
  return "out must be the input itself or share no memory with it; they overlap";
}

// Backward ------------------------------------------------------------------------------------------------------------

namespace {

// Checks the operands. Returns the type of the forward's result, which its gradient has too.
DType check_gradient(const TensorArgs& args) {
  const TensorRef &saved = *args.tensors[kSaved], &grad = *args.tensors[kGrad], *const lse = args.tensors[kLse];
  const TensorRef& result = lse ? *lse : saved;
  const DType type = result.dtype();
  const auto check = [&](const std::string& name, const TensorRef& tensor) {
    if (tensor.dtype() != type) {
      fail(name + " has dtype " + name_of(tensor.dtype()) + ", but it goes with a tensor of " + name_of(type));
    }
    if (!tensor.is_on_device_of(saved)) fail(name + " is on another device than what the forward saved");
  };
  check("grad", grad);
  if (!grad.has_sizes(result.sizes, result.rank)) {
    fail("grad has the shape of the result, " + to_text(result.sizes, result.rank) + ", got " +
         to_text(grad.sizes, grad.rank));
  }
  if (!lse) return type;
  check("lse", *lse);
  if (!reduces_to(args.function, saved.dtype(), type)) {
    fail(std::string("logsumexp of ") + name_of(saved.dtype()) + " does not give " + name_of(type) +
         ", which is the dtype of lse");
  }
  const ResultShape shape(args.function, saved, args.dims, args.keepdim);
  if (!lse->has_sizes(shape.sizes, shape.rank)) {
    fail("logsumexp gives shape " + to_text(shape.sizes, shape.rank) +
         " of this input and these dims, got an lse of shape " + to_text(lse->sizes, lse->rank));
  }
  return type;
}

// Computes a gradient into a new tensor. `args` has all tensors but the result.
OwnedTensor compute_gradient(TensorArgs args, DType dx_type, bool contiguous) {
  const DType result_type = check_gradient(args);
  const TensorRef& saved = args.like();
  OwnedTensor out = contiguous ? empty_contiguous(saved.rank, saved.sizes, dx_type, saved)
                               : empty_like(saved, dx_type, saved.is_contiguous());
  const TensorRef dx(out.get());
  advise_huge_pages(dx, dx_type);
  args.tensors[kDx] = &dx;
  return run_backward(args, result_type, dx_type), std::move(out);
}

void compute_gradient_into(TensorArgs args, const TensorRef& dx, const CudaPlan* plan = nullptr) {
  const DType result_type = check_gradient(args), type = dx.dtype();
  const TensorRef& saved = args.like();
  if (!dx.has_sizes(saved.sizes, saved.rank)) {
    fail("the gradient has shape " + to_text(saved.sizes, saved.rank) + ", got an out of shape " +
         to_text(dx.sizes, dx.rank));
  }
  if (!dx.is_on_device_of(saved)) fail("out is on another device than what the forward saved");
  if (args.is_reduction() && type != saved.dtype()) {
    fail(std::string("the gradient of logsumexp has its input's dtype ") + name_of(saved.dtype()) + ", got an out of " +
         name_of(type));
  }
  if (dx.numel()) {
    const MemoryRange to = range_of(dx);
    bool is_safe = surely_distinct(to);
    for (const TensorRef* operand : {args.tensors[kSaved], args.tensors[kGrad], args.tensors[kLse]}) {
      if (!operand) continue;
      const MemoryRange from = range_of(*operand);
      is_safe &= surely_apart(to, from) || (from.rank == to.rank && same_elements(to, from));
    }
    if (!is_safe) fail("out may share memory with itself, or with elements of an operand that are not its own");
  }
  args.tensors[kDx] = &dx;
  run_backward(args, result_type, type, plan);
}

}  // namespace

OwnedTensor compute_softmax_backward(Function function, const TensorRef& grad, const TensorRef& y, int64_t dim,
                                     DType dx_type) {
  const ReduceDims dims(dim, y.rank);
  return compute_gradient({function, Direction::backward, {nullptr, &y, &grad}, dims, false}, dx_type, true);
}

// Kernels as the dispatcher calls them --------------------------------------------------------------------------------

namespace {

// A tensor on the dispatcher's stack that a kernel was given and owns. (torch's Tensor would count references.)
struct TensorArgument : TensorRef {
  using TensorRef::TensorRef;
  TensorArgument(const TensorArgument&) = delete;
  ~TensorArgument() { aoti_torch_delete_tensor_object(handle); }
};

// The arguments on the dispatcher's stack, taken one after another. A kernel leaves its result there.
class Arguments {
 public:
  explicit Arguments(const StableIValue* stack) : next_(stack) {}

  template <class T>
  T take() {
    return stable::to<T>(*next_++);
  }
  TensorArgument take_tensor() { return TensorArgument(take<AtenTensorHandle>()); }
  // The tensor, if the operator has it.
  void take_tensor_if(bool is_there, std::optional<TensorArgument>& tensor) {
    if (is_there) tensor.emplace(take<AtenTensorHandle>());
  }

 private:
  const StableIValue* next_;
};

// (input, dims, [keepdim], [dtype], [out]). Only a reduction has keepdim, and a state has no dtype.
template <Function function, bool kHasOut>
void run_operator(StableIValue* stack, uint64_t, uint64_t) {
  Arguments given(stack);
  const TensorArgument x = given.take_tensor();
  const Dims dim = given.take<Dims>();
  bool keepdim = false;
  MaybeType dtype;
  if constexpr (is_reduction(function)) keepdim = given.take<bool>();
  if constexpr (!traits_of(function).leading_planes) dtype = given.take<MaybeType>();
  std::optional<TensorArgument> out;
  given.take_tensor_if(kHasOut, out);
  const ReduceDims dims(dim, x.rank);
  if constexpr (kHasOut) {  // it has not been checked: graphs and C++ call this as well as Python
    const TensorRef& y = *out;
    const DType y_type = y.dtype();
    if (y_type != (dtype ? dtype_of(*dtype) : x.dtype())) {
      fail(std::string("the result has another dtype than out, which is ") + name_of(y_type));
    }
    if (const char* reason = find_overlap(function, y, x)) {
      throw std::runtime_error(std::string("onepass.") + name_of(function) + "(): " + reason);
    }
    compute_into(function, x, dims, keepdim, y);
  } else {
    stack[0] = stable::from(compute(function, x, dims, dtype, keepdim).release());
  }
}

// The fast path: (input, dim, keepdim or dtype, [out]). It raises no errors. For a call that it does not take, it
// returns an undefined tensor, which is None in Python, or false for an out. The caller then takes the slow path, which
// says what is wrong with the call.
template <Function function, bool kHasOut>
void run_fast_path(StableIValue* stack, uint64_t, uint64_t) {
  Arguments given(stack);
  const TensorArgument x = given.take_tensor();
  const int64_t dim = given.take<int64_t>();
  bool keepdim = false;
  MaybeType dtype;
  if constexpr (is_reduction(function)) {
    keepdim = given.take<bool>();
  } else {
    dtype = given.take<MaybeType>();
  }
  std::optional<TensorArgument> out;
  given.take_tensor_if(kHasOut, out);
  const std::optional<DType> x_type = x.maybe_dtype();
  const int64_t rank = x.rank ? x.rank : 1;
  const bool is_taken = x_type && (!dtype || dtype_or_none(*dtype)) && x.rank <= kMaxDims && -rank <= dim && dim < rank;
  if constexpr (kHasOut) {
    const TensorRef& y = *out;
    const std::optional<DType> y_type = y.maybe_dtype();
    bool is_written = is_taken && y_type && x.is_on_device_of(y) && *y_type == (dtype ? dtype_of(*dtype) : *x_type);
    if (is_written) {
      const ReduceDims dims(dim, x.rank);
      const ResultShape shape(function, x, dims, keepdim);
      is_written = y.has_sizes(shape.sizes, shape.rank) && !find_overlap(function, y, x);
      if (is_written) {
        run_forward({function, Direction::forward, {&x, &y}, dims, keepdim}, *x_type, *y_type,
                    x.is_contiguous() && y.is_contiguous());
      }
    }
    stack[0] = stable::from(is_written);
  } else {
    AtenTensorHandle result;
    if (is_taken) {
      result = compute(function, x, ReduceDims(dim, x.rank), dtype, keepdim).release();
    } else {
      check_torch(aoti_torch_new_uninitialized_tensor(&result));
    }
    stack[0] = stable::from(result);
  }
}

Function function_of(int64_t number, bool takes_reductions) {
  std::string names;
  for (const FunctionTraits& function : kFunctions) {
    const int64_t at = &function - kFunctions;
    if (function.is_reduction && !takes_reductions) continue;
    if (at == number) return Function(number);
    names += (names.empty() ? "" : ", ") + std::to_string(at) + " (" + function.name + ")";
  }
  fail("function is " + names + ", got " + std::to_string(number));
}

// (grad, y, function, dims, [dtype], [out]), or for logsumexp (grad, x, lse, dims, keepdim, [out]).
template <bool kOfLogSumExp, bool kHasOut>
void run_backward_operator(StableIValue* stack, uint64_t, uint64_t) {
  Arguments given(stack);
  const TensorArgument grad = given.take_tensor(), saved = given.take_tensor();
  std::optional<TensorArgument> lse;
  given.take_tensor_if(kOfLogSumExp, lse);
  const int64_t number = kOfLogSumExp ? int64_t(Function::logsumexp) : given.take<int64_t>();
  const Dims dim = given.take<Dims>();
  const bool keepdim = kOfLogSumExp && given.take<bool>();
  MaybeType dtype;
  if constexpr (!kOfLogSumExp && !kHasOut) dtype = given.take<ScalarType>();
  std::optional<TensorArgument> out;
  given.take_tensor_if(kHasOut, out);
  const Function function = function_of(number, kOfLogSumExp);
  const ReduceDims dims(dim, saved.rank);
  const TensorArgs args = {
      function, Direction::backward, {nullptr, &saved, &grad, lse ? &*lse : nullptr}, dims, keepdim};
  if constexpr (kHasOut) {
    compute_gradient_into(args, *out);
  } else {
    const DType dx_type = dtype ? dtype_of(*dtype) : saved.dtype();
    stack[0] = stable::from(compute_gradient(args, dx_type, false).release());
  }
}

// Operators for tests: a forward or a gradient on a GPU, with a given plan, so that tests can force every tier.
void run_softmax_with_plan(StableIValue* stack, uint64_t, uint64_t) {
  Arguments given(stack);
  const TensorArgument x = given.take_tensor();
  const int64_t number = given.take<int64_t>();
  const Dims dim = given.take<Dims>();
  const bool keepdim = given.take<bool>();
  const Dims plan = given.take<Dims>();
  const TensorArgument out = given.take_tensor();
  const Function function = function_of(number, true);
  if (!x.is_cuda()) fail("only CUDA calls have a plan to force");
  const CudaPlan forced = parse_plan(plan);
  compute_into(function, x, ReduceDims(dim, x.rank), keepdim, out, &forced);
}
void run_backward_with_plan(StableIValue* stack, uint64_t, uint64_t) {
  Arguments given(stack);
  const TensorArgument grad = given.take_tensor(), saved = given.take_tensor();
  const std::optional<Tensor> owned_lse = given.take<std::optional<Tensor>>();
  const int64_t number = given.take<int64_t>();
  const Dims dim = given.take<Dims>(), plan = given.take<Dims>();
  const TensorArgument dx = given.take_tensor();
  const CudaPlan forced = parse_plan(plan);
  if (!dx.is_cuda()) fail("only CUDA calls have a plan to force");
  const std::optional<TensorRef> lse = owned_lse ? std::optional(TensorRef(owned_lse->get())) : std::nullopt;
  const Function function = lse ? Function::logsumexp : function_of(number, false);
  const ReduceDims dims(dim, saved.rank);
  const bool keepdim = lse && lse->rank == saved.rank;
  compute_gradient_into({function, Direction::backward, {nullptr, &saved, &grad, lse ? &*lse : nullptr}, dims, keepdim},
                        dx, &forced);
}

// Registration --------------------------------------------------------------------------------------------------------

void define(stable::StableLibrary& m, const std::string& schema) { m.def(schema.c_str()); }

// The operators of a function: its public ones and, with an underscore, the operators of the fast path, for calls over
// one dim without a gradient. The fast path has no autograd kernel in Python, and no list of dims.
void define_function(stable::StableLibrary& m, const FunctionTraits& function) {
  const std::string name = function.name, keepdim = function.is_reduction ? ", bool keepdim=False" : "";
  const std::string dtype = function.leading_planes ? "" : ", *, ScalarType? dtype=None";
  define(m, name + "(Tensor input, int[1] dim" + keepdim + dtype + ") -> Tensor");
  if (function.leading_planes) return;
  define(m, name + ".out(Tensor input, int[1] dim" + keepdim + dtype + ", Tensor(a!) out) -> ()");
  const std::string option = function.is_reduction ? ", bool keepdim" : ", ScalarType? dtype";
  const std::string fallback = function.is_reduction ? "=False" : "=None";
  define(m, "_" + name + ".int(Tensor input, int dim" + option + fallback + ") -> Tensor");
  define(m, "_" + name + ".int_out(Tensor input, int dim" + option + ", Tensor(a!) out) -> bool");
}

template <Function function>
void implement(stable::StableLibrary& m) {
  const std::string name = name_of(function);
  m.impl(name.c_str(), run_operator<function, false>);
  if constexpr (!traits_of(function).leading_planes) {
    m.impl((name + ".out").c_str(), run_operator<function, true>);
    m.impl(("_" + name + ".int").c_str(), run_fast_path<function, false>);
    m.impl(("_" + name + ".int_out").c_str(), run_fast_path<function, true>);
  }
}

void implement_all(stable::StableLibrary& m) {
#define ONEPASS_IMPLEMENT(name, is_reduction, leading_planes) implement<Function::name>(m);
  ONEPASS_FUNCTIONS(ONEPASS_IMPLEMENT)
#undef ONEPASS_IMPLEMENT
  m.impl("_softmax_backward", run_backward_operator<false, false>);
  m.impl("_softmax_backward.out", run_backward_operator<false, true>);
  m.impl("_logsumexp_backward", run_backward_operator<true, false>);
  m.impl("_logsumexp_backward.out", run_backward_operator<true, true>);
  m.impl("_softmax_with_plan", run_softmax_with_plan);
  m.impl("_softmax_backward_with_plan", run_backward_with_plan);
}

}  // namespace

STABLE_TORCH_LIBRARY(onepass, m) {
  for (const FunctionTraits& function : kFunctions) define_function(m, function);
  // For autograd. `grad` and `y` (or `lse`) have one dtype. The gradient of a softmax has any dtype, like the input of
  // a forward with dtype=. The gradient of logsumexp has the dtype of `x`.
  const std::string softmax = "(Tensor grad, Tensor y, int function, int[1] dim, ";
  define(m, "_softmax_backward" + softmax + "ScalarType dtype) -> Tensor");
  define(m, "_softmax_backward.out" + softmax + "Tensor(a!) out) -> ()");
  const std::string logsumexp = "(Tensor grad, Tensor x, Tensor lse, int[1] dim, bool keepdim";
  define(m, "_logsumexp_backward" + logsumexp + "=False) -> Tensor");
  define(m, "_logsumexp_backward.out" + logsumexp + ", Tensor(a!) out) -> ()");
  // The Triton engine, whose kernels are in Python.
  const std::string triton = "(Tensor input, str function, int[] dim, ScalarType? dtype, bool keepdim";
  define(m, "triton" + triton + ") -> Tensor");
  define(m, "triton.out" + triton + ", *, Tensor(a!) out) -> ()");
  define(m,
         "triton_backward(Tensor grad, Tensor saved, Tensor? lse, str function, int[] dim, ScalarType dtype, "
         "bool keepdim) -> Tensor");
  define(m,
         "_softmax_with_plan(Tensor input, int function, int[] dim, bool keepdim, int[] plan, Tensor(a!) out) -> ()");
  define(m,
         "_softmax_backward_with_plan(Tensor grad, Tensor saved, Tensor? lse, int function, int[] dim, int[] plan, "
         "Tensor(a!) out) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(onepass, CPU, m) { implement_all(m); }
STABLE_TORCH_LIBRARY_IMPL(onepass, CUDA, m) { implement_all(m); }

}  // namespace onepass
