// ops.cpp: the operators' schemas, and the checks of their arguments. With this library loaded, a graph that holds them
// runs from C++ alone. There is no Python here; fake kernels and autograd are in Python.
#include "../core/memory_overlap.h"
#include "../plan/validate.h"
#include "operators.h"

namespace onepass {

namespace {

using MaybeType = std::optional<ScalarType>;

// Forward -------------------------------------------------------------------------------------------------------------

// The type of a result for which no dtype was given.
DType result_type(Function function, DType x_type) {
  return function != Function::state || x_type == DType::float64 ? x_type : DType::float32;
}

void check_type(Function function, DType x_type, DType y_type, const char* got) {
  if (!is_reduction(function) || reduces_to(function, x_type, y_type)) return;
  const DType own = result_type(function, x_type);
  const bool widens = own != DType::float32 && reduces_to(function, x_type, DType::float32);
  fail(std::string(traits_of(function).name) + " of " + name_of(x_type) + " gives " + name_of(own) +
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

static MemoryRange range_of(const TensorRef& tensor) {
  return {uint64_t(tensor.data()), size_of(tensor.dtype()), tensor.rank, tensor.sizes, tensor.strides};
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

namespace {

// Computes into an `out` of which nothing is known: graphs and C++ call this as well as Python.
void check_and_compute_into(Function function, const TensorRef& x, const ReduceDims& dims, const MaybeType& dtype,
                            bool keepdim, const TensorRef& y) {
  const DType y_type = y.dtype();
  if (y_type != (dtype ? dtype_of(*dtype) : x.dtype())) {
    fail(std::string("the result has another dtype than out, which is ") + name_of(y_type));
  }
  if (const char* reason = find_overlap(function, y, x)) {
    throw std::runtime_error(std::string("onepass.") + traits_of(function).name + "(): " + reason);
  }
  compute_into(function, x, dims, keepdim, y);
}

// A kernel as the dispatcher calls it: it owns what it finds on the stack, and leaves the result there. (TORCH_BOX
// would count the owners of both tensors, and make one more reference to the result.) The arguments are
//   (input, dims, [keepdim], [dtype], [out]), where only a reduction has keepdim and a state has no dtype.
template <Function function, bool kHasOut>
void run_operator(StableIValue* stack, uint64_t, uint64_t) {
  constexpr bool kHasKeepdim = is_reduction(function), kHasDtype = !traits_of(function).leading_planes;
  constexpr int kOutAt = 2 + kHasKeepdim + kHasDtype;
  const OwnedTensor input(stable::to<AtenTensorHandle>(stack[0]));
  const OwnedTensor out(kHasOut ? stable::to<AtenTensorHandle>(stack[kOutAt]) : nullptr);
  const Dims dim = stable::to<Dims>(stack[1]);
  bool keepdim = false;
  MaybeType dtype;
  if constexpr (kHasKeepdim) keepdim = stable::to<bool>(stack[2]);
  if constexpr (kHasDtype) dtype = stable::to<MaybeType>(stack[2 + kHasKeepdim]);
  const TensorRef x(input.get());
  const ReduceDims dims(dim, x.rank);
  if constexpr (kHasOut) {
    check_and_compute_into(function, x, dims, dtype, keepdim, TensorRef(out.get()));
  } else {
    stack[0] = stable::from(compute(function, x, dims, dtype, keepdim).release());
  }
}

// The fast path: (input, dim, keepdim or dtype, [out]). It says nothing about a call that it does not take: it returns
// an undefined tensor, which is None to Python, or false for an out. The caller then takes the slow path, which says
// what is wrong with the call.
bool is_supported(const MaybeType& dtype) {
  if (!dtype) return true;
  for (DType type : {DType::float32, DType::float64, DType::float16, DType::bfloat16}) {
    if (*dtype == scalar_type_of(type)) return true;
  }
  return false;
}

template <Function function, bool kHasOut>
void run_fast_path(StableIValue* stack, uint64_t, uint64_t) {
  const OwnedTensor input(stable::to<AtenTensorHandle>(stack[0]));
  const OwnedTensor out(kHasOut ? stable::to<AtenTensorHandle>(stack[3]) : nullptr);
  const int64_t dim = stable::to<int64_t>(stack[1]);
  bool keepdim = false;
  MaybeType dtype;
  if constexpr (is_reduction(function)) {
    keepdim = stable::to<bool>(stack[2]);
  } else {
    dtype = stable::to<MaybeType>(stack[2]);
  }
  const TensorRef x(input.get());
  const std::optional<DType> x_type = x.maybe_dtype();
  const int64_t rank = x.rank ? x.rank : 1;
  const bool is_taken = x_type && is_supported(dtype) && x.rank <= kMaxDims && -rank <= dim && dim < rank;
  if constexpr (kHasOut) {
    const TensorRef y(out.get());
    const std::optional<DType> y_type = y.maybe_dtype();
    bool is_written = is_taken && y_type && x.is_on_device_of(y) && *y_type == (dtype ? dtype_of(*dtype) : *x_type);
    if (is_written) {
      const ReduceDims dims(&dim, 1, x.rank);
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
      result = compute(function, x, ReduceDims(&dim, 1, x.rank), dtype, keepdim).release();
    } else {
      check_torch(aoti_torch_new_uninitialized_tensor(&result));
    }
    stack[0] = stable::from(result);
  }
}

// Backward ------------------------------------------------------------------------------------------------------------

// The gradient of one result: the tensors that it is made from, checked. `lse` is the result of logsumexp, null for
// other functions.
class Gradient {
 public:
  Gradient(Function function, AtenTensorHandle grad, AtenTensorHandle saved, AtenTensorHandle lse, const Dims& dims,
           std::optional<bool> keepdim = std::nullopt)
      : Gradient(function, TensorRef(grad), TensorRef(saved), lse ? std::optional(TensorRef(lse)) : std::nullopt,
                 dims.data(), int(dims.size()), keepdim) {}
  Gradient(Function function, const TensorRef& grad, const TensorRef& saved, const std::optional<TensorRef>& lse,
           const int64_t* dims, int count, std::optional<bool> keepdim = std::nullopt)
      : function_(function),
        grad_(grad),
        saved_(saved),
        lse_(lse),
        dims_(dims, count, saved.rank),
        keepdim_(keepdim ? *keepdim : lse && lse->rank == saved.rank),
        result_type_((lse ? *lse : saved).dtype()) {
    const TensorRef& result = lse ? *lse : saved;
    check_type_and_device("grad", grad);
    if (!grad.has_sizes(result.sizes, result.rank)) {
      fail("grad has the shape of the result, " + to_text(result.sizes, result.rank) + ", got " +
           to_text(grad.sizes, grad.rank));
    }
    if (!lse) return;
    check_type_and_device("lse", *lse);
    if (!reduces_to(function, saved.dtype(), result_type_)) {
      fail(std::string("logsumexp of ") + name_of(saved.dtype()) + " does not give " + name_of(result_type_) +
           ", which is the dtype of lse");
    }
    const ResultShape shape(function, saved, dims_, keepdim_);
    if (!lse->has_sizes(shape.sizes, shape.rank)) {
      fail("logsumexp gives shape " + to_text(shape.sizes, shape.rank) +
           " of this input and these dims, got an lse of shape " + to_text(lse->sizes, lse->rank));
    }
  }

  OwnedTensor compute(DType dx_type, bool contiguous) const {
    OwnedTensor out = contiguous ? empty_contiguous(saved_.rank, saved_.sizes, dx_type, saved_)
                                 : empty_like(saved_, dx_type, saved_.is_contiguous());
    const TensorRef dx(out.get());
    advise_huge_pages(dx, dx_type);
    return run(dx, dx_type, nullptr), std::move(out);
  }

  void compute_into(AtenTensorHandle out, const CudaPlan* plan = nullptr) const {
    const TensorRef dx(out);
    if (!dx.has_sizes(saved_.sizes, saved_.rank)) {
      fail("the gradient has shape " + to_text(saved_.sizes, saved_.rank) + ", got an out of shape " +
           to_text(dx.sizes, dx.rank));
    }
    if (!dx.is_on_device_of(saved_)) fail("out is on another device than what the forward saved");
    const DType type = dx.dtype();
    if (lse_ && type != saved_.dtype()) {
      fail(std::string("the gradient of logsumexp has its input's dtype ") + name_of(saved_.dtype()) +
           ", got an out of " + name_of(type));
    }
    if (dx.numel()) {
      const MemoryRange to = range_of(dx);
      bool is_safe = surely_distinct(to);
      for (const TensorRef* operand : {&saved_, &grad_, lse_ ? &*lse_ : nullptr}) {
        if (!operand) continue;
        const MemoryRange from = range_of(*operand);
        is_safe &= surely_apart(to, from) || (from.rank == to.rank && same_elements(to, from));
      }
      if (!is_safe) fail("out may share memory with itself, or with elements of an operand that are not its own");
    }
    run(dx, type, plan);
  }

  DType saved_type() const { return saved_.dtype(); }

 private:
  void check_type_and_device(const char* name, const TensorRef& tensor) const {
    if (tensor.dtype() != result_type_) {
      fail(std::string(name) + " has dtype " + name_of(tensor.dtype()) + ", but it goes with a tensor of " +
           name_of(result_type_));
    }
    if (!tensor.is_on_device_of(saved_)) fail(std::string(name) + " is on another device than what the forward saved");
  }
  void run(const TensorRef& dx, DType dx_type, const CudaPlan* plan) const {
    const TensorRef* const lse = lse_ ? &*lse_ : nullptr;
    run_backward({function_, Direction::backward, {&dx, &saved_, &grad_, lse}, dims_, keepdim_}, result_type_, dx_type,
                 plan);
  }

  const Function function_;
  const TensorRef grad_, saved_;
  const std::optional<TensorRef> lse_;
  const ReduceDims dims_;
  const bool keepdim_;
  const DType result_type_;  // of the forward's result and of its gradient
};

}  // namespace

OwnedTensor compute_softmax_backward(Function function, const TensorRef& grad, const TensorRef& y, int64_t dim,
                                     DType dx_type) {
  return Gradient(function, grad, y, std::nullopt, &dim, 1).compute(dx_type, true);
}

namespace {

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

Tensor softmax_backward(const Tensor& grad, const Tensor& y, int64_t function, Dims dim, ScalarType dtype) {
  const Gradient gradient(function_of(function, false), grad.get(), y.get(), nullptr, dim);
  return Tensor(gradient.compute(dtype_of(dtype), false).release());
}
void softmax_backward_out(const Tensor& grad, const Tensor& y, int64_t function, Dims dim, Tensor out) {
  Gradient(function_of(function, false), grad.get(), y.get(), nullptr, dim).compute_into(out.get());
}
Tensor logsumexp_backward(const Tensor& grad, const Tensor& x, const Tensor& lse, Dims dim, bool keepdim) {
  const Gradient gradient(Function::logsumexp, grad.get(), x.get(), lse.get(), dim, keepdim);
  return Tensor(gradient.compute(gradient.saved_type(), false).release());
}
void logsumexp_backward_out(const Tensor& grad, const Tensor& x, const Tensor& lse, Dims dim, bool keepdim,
                            Tensor out) {
  Gradient(Function::logsumexp, grad.get(), x.get(), lse.get(), dim, keepdim).compute_into(out.get());
}

// Operators for tests: a forward, or a gradient, on a GPU with its plan given, so that tests force every tier.
void softmax_with_plan(const Tensor& input, int64_t function, Dims dims, bool keepdim, Dims plan, Tensor out) {
  const Function which = function_of(function, true);
  if (!input.is_cuda()) fail("only CUDA calls have a plan to force");
  const CudaPlan forced = parse_plan(plan);
  const TensorRef x(input.get());
  compute_into(which, x, ReduceDims(dims, x.rank), keepdim, TensorRef(out.get()), &forced);
}
void softmax_backward_with_plan(const Tensor& grad, const Tensor& saved, std::optional<Tensor> lse, int64_t function,
                                Dims dims, Dims plan, Tensor out) {
  const CudaPlan forced = parse_plan(plan);
  if (!out.is_cuda()) fail("only CUDA calls have a plan to force");
  const Function which = lse ? Function::logsumexp : function_of(function, false);
  Gradient(which, grad.get(), saved.get(), lse ? lse->get() : nullptr, dims).compute_into(out.get(), &forced);
}

// Registration --------------------------------------------------------------------------------------------------------

// The operators of a function: its own and, with an underscore, those of the fast path, which is for calls of one dim
// without a gradient. These are spared an autograd kernel in Python, and a list.
void define(stable::StableLibrary& m, const FunctionTraits& function) {
  const std::string name = function.name, keepdim = function.is_reduction ? ", bool keepdim" : "";
  const std::string default_keepdim = function.is_reduction ? ", bool keepdim=False" : "";
  const std::string dtype = function.leading_planes ? "" : ", *, ScalarType? dtype=None";
  const std::string arguments = "(Tensor input, int[1] dim" + default_keepdim + dtype;
  m.def((name + arguments + ") -> Tensor").c_str());
  if (function.leading_planes) return;
  m.def((name + ".out" + arguments + ", Tensor(a!) out) -> ()").c_str());
  m.def(("_" + name + ".int(Tensor input, int dim" +
         (function.is_reduction ? default_keepdim : ", ScalarType? dtype=None") + ") -> Tensor")
            .c_str());
  m.def(("_" + name + ".int_out(Tensor input, int dim" + (function.is_reduction ? keepdim : ", ScalarType? dtype") +
         ", Tensor(a!) out) -> bool")
            .c_str());
}

template <Function function>
void implement(stable::StableLibrary& m) {
  const std::string name = traits_of(function).name;
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
  m.impl("_softmax_backward", TORCH_BOX(&softmax_backward));
  m.impl("_softmax_backward.out", TORCH_BOX(&softmax_backward_out));
  m.impl("_logsumexp_backward", TORCH_BOX(&logsumexp_backward));
  m.impl("_logsumexp_backward.out", TORCH_BOX(&logsumexp_backward_out));
  m.impl("_softmax_with_plan", TORCH_BOX(&softmax_with_plan));
  m.impl("_softmax_backward_with_plan", TORCH_BOX(&softmax_backward_with_plan));
}

}  // namespace

STABLE_TORCH_LIBRARY(onepass, m) {
  for (const FunctionTraits& function : kFunctions) define(m, function);
  // For autograd. `grad` and `y` (or `lse`) have one dtype. The gradient of a softmax has any, as the input of a
  // forward with dtype= has; the gradient of logsumexp has that of `x`.
  const std::string softmax = "(Tensor grad, Tensor y, int function, int[1] dim, ";
  m.def(("_softmax_backward" + softmax + "ScalarType dtype) -> Tensor").c_str());
  m.def(("_softmax_backward.out" + softmax + "Tensor(a!) out) -> ()").c_str());
  const std::string logsumexp = "(Tensor grad, Tensor x, Tensor lse, int[1] dim, bool keepdim";
  m.def(("_logsumexp_backward" + logsumexp + "=False) -> Tensor").c_str());
  m.def(("_logsumexp_backward.out" + logsumexp + ", Tensor(a!) out) -> ()").c_str());
  m.def("_softmax_with_plan(Tensor input, int function, int[] dim, bool keepdim, int[] plan, Tensor(a!) out) -> ()");
  m.def(
      "_softmax_backward_with_plan(Tensor grad, Tensor saved, Tensor? lse, int function, int[] dim, int[] plan, "
      "Tensor(a!) out) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(onepass, CPU, m) { implement_all(m); }
STABLE_TORCH_LIBRARY_IMPL(onepass, CUDA, m) { implement_all(m); }

}  // namespace onepass
