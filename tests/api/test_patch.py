"""onepass.patch: which calls of torch it serves, what they give, and what it leaves to torch; autograd, transforms,
autocast, modes, subclasses and compilers stay torch's own."""

import functools
import itertools
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import onepass
from lib.modes import Functions, Operators
from lib.patch import FACES, with_and_without
from lib.support import DTYPES, LAYOUTS, SOFTMAXES, TORCH, assert_defined, every_half, ints, maker, outcome

F32 = torch.float32


# What is served -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("face", FACES)
def test_every_name_is_served_and_given_back(face, device):
    function, call = FACES[face]
    x = maker(torch.float32, device)(5, 7)
    plain, ours, patched = with_and_without(lambda: call(x, 1))
    assert patched.report.served == {function: 1}
    assert not patched.report.fallbacks
    torch.testing.assert_close(ours, plain)
    call(x, 1)
    assert patched.report.served == {function: 1}  # not after it


@pytest.mark.parametrize("layout", LAYOUTS)
def test_results_have_torchs_dtype_shape_and_strides(function, layout, device):
    for dtype, dim in itertools.product(DTYPES, ints(LAYOUTS[layout](maker(F32)))):
        x = LAYOUTS[layout](maker(dtype, device))
        plain, ours, patched = with_and_without(functools.partial(TORCH[function], x, dim))
        assert (ours.dtype, ours.shape, ours.stride()) == (plain.dtype, plain.shape, plain.stride())
        assert_defined(function, ours, x, dim)
        assert sum(patched.report.served.values()) == 1


def _checkpointed(x):
    x = x.detach().requires_grad_()
    checkpoint(lambda t: t.softmax(1).square(), x, use_reentrant=False).sum().backward()
    return x.grad


def _attention(x):
    torch.manual_seed(0)
    attention = torch.nn.MultiheadAttention(4, 2, batch_first=True, device=x.device)
    layer = torch.nn.TransformerEncoderLayer(4, 2, 16, batch_first=True, device=x.device)
    target = torch.arange(3, device=x.device)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return attention(x, x, x), layer(x), F.cross_entropy(x[0], target), F.gumbel_softmax(x, dim=-1)


CALLS = {  # of a tensor of (2, 3, 4): the call, and what is served of it on a CPU
    **{
        f"logsumexp over {dims}, {keepdim}": (lambda x, d=dims, k=keepdim: torch.logsumexp(x, d, k), {"logsumexp": 1})
        for dims in ((1, 2), (-1, -2), (0, 1, 2))
        for keepdim in (False, True)
    },
    **{
        f"{f} of integers": (lambda x, f=f: TORCH[f](x.int(), 1, dtype=torch.float64), {f.replace("min", "max"): 1})
        for f in SOFTMAXES
    },
    "logsumexp of integers": (lambda x: torch.logsumexp(x.int(), 1), {}),
    "logsumexp with out": (lambda x: torch.logsumexp(x, 1, out=x.new_empty(0)), {}),
    "checkpoint": (_checkpointed, {"softmax": 2, "softmax backward": 1}),
    "models of torch": (_attention, {"softmax": 3, "cross_entropy": 1}),
    "sparse": (lambda x: torch.sparse.softmax(x.to_sparse(), 1).to_dense(), {}),  # has kernels of its own
    "inference": (torch.inference_mode()(lambda x: [x.softmax(0), x.softmax(0).is_inference()]), {"softmax": 2}),
}


ON_A_GPU = [
    pytest.param(name, "cuda", marks=pytest.mark.gpu) for name in CALLS if " of integers" in name or "over" in name
]


@pytest.mark.parametrize(("case", "device"), [*((name, "cpu") for name in CALLS), *ON_A_GPU])
def test_a_call_gives_what_torch_gives(case, device):
    call, served = CALLS[case]
    x = maker(torch.float32, device)(2, 3, 4)
    plain, ours, patched = with_and_without(lambda: call(x))
    torch.testing.assert_close(ours, plain, check_stride=device == "cpu")
    assert patched.report.served == served


@pytest.mark.parametrize("function", ["softmax", "log_softmax"])
def test_out(function, dtype, device):
    """Served where it has the result's shape and dtype, which is that of the input, or float32 for a half type."""
    call, x = functools.partial(TORCH[function], maker(dtype, device)(4, 6), 1), maker(dtype, device)(0)
    kinds = [torch.float32, torch.float64, *[None] * (dtype.itemsize > 2)]  # of half types torch's are less accurate
    for to, shape in itertools.product(kinds, ((4, 6), (0,))):
        make = functools.partial(x.new_empty, shape, dtype=to)
        plain, ours, patched = with_and_without(lambda to=to, make=make: call(dtype=to, out=make()))
        torch.testing.assert_close(ours, plain)
        widens = dtype.itemsize == 2 and to is torch.float32
        assert bool(patched.report.served) == (shape != (0,) and (to in (None, dtype) or widens))
    out, wide = x.new_empty(4, 6), x.new_empty(4, 6, dtype=torch.complex64)
    with onepass.patch(report=True) as patched:
        assert call(out=out) is out
        error = outcome(call, out=wide)
    assert type(error) is type(outcome(call, out=wide)) is RuntimeError
    assert patched.report.served == {function: 1}
    assert all(reason.startswith("out= of another") for _, reason in patched.report.fallbacks)


def test_out_that_shares_memory():
    x = maker(torch.float32)(6, 6)
    want = torch.softmax(x, 1)
    with onepass.patch(report=True) as patched:
        same = x.clone()
        torch.softmax(same, 1, out=same)
        torch.testing.assert_close(same, want)
        assert patched.report.served == {"softmax": 1}
        memory = torch.zeros(40)
        memory[:36] = x.flatten()
        outcome(torch.softmax, memory[:36].view(6, 6), 1, out=memory[4:].view(6, 6))  # torch says what becomes of it
    assert patched.report.fallbacks == {("softmax", "out= that shares memory with the input or with itself"): 1}


ATEN = torch.ops.aten
REFUSED = {
    "dim out of range": lambda x: torch.softmax(x, 2),
    "logsumexp's dim out of range": lambda x: torch.logsumexp(x, 2),
    "a dim twice": lambda x: torch.logsumexp(x, (0, -2)),
    "integers": lambda x: torch.softmax(x.long(), 1),
    "half to float on a CPU": lambda x: ATEN._softmax(x.half(), 1, True),
    "half to float of float32": lambda x: ATEN._log_softmax(x, 1, True),
    "gradient of another shape": lambda x: ATEN._softmax_backward_data(x, x[:1], 1, x.dtype),
    "gradient for an input of half": lambda x: ATEN._softmax_backward_data(x, x, 1, torch.float16),
    "log's gradient for an input of half": lambda x: ATEN._log_softmax_backward_data(x, x, 1, torch.float16),
    "gradient for an input of float of a result of half": lambda x: ATEN._softmax_backward_data(
        x.half(), x.half(), 5, torch.float32
    ),
    "no memory": lambda x: torch.softmax(x[:, :1].expand(3, 1 << 46), 1),
    "gradient without memory": lambda x: ATEN._softmax_backward_data(*(x[:, :1].expand(3, 1 << 46),) * 2, 1, x.dtype),
    "no dim": lambda x: torch.softmax(x, None),
}


@pytest.mark.parametrize("case", REFUSED)
def test_errors_are_torchs(case):
    plain, ours, patched = with_and_without(lambda: outcome(REFUSED[case], torch.ones(3, 4)))
    assert isinstance(plain, Exception)
    assert (type(ours), str(ours)) == (type(plain), str(plain))
    assert not patched.report.served


@pytest.mark.parametrize("to", [*DTYPES, torch.int64, torch.complex64, torch.bool])
@pytest.mark.parametrize("name", ["_softmax", "_softmax_backward_data", "_log_softmax_backward_data"])
def test_another_dtype_of_the_input_is_taken_where_torch_takes_it(name, dtype, to, device):
    if device == "cuda" and dtype is not torch.float32:
        pytest.skip("one dtype is enough")
    x = maker(dtype, device)(3, 4)
    given = (x.to(to), 1, True) if name == "_softmax" else (x, x.softmax(1), 1, to)
    plain, ours, patched = with_and_without(lambda: outcome(getattr(ATEN, name), *given))
    assert type(ours) is type(plain)
    if isinstance(plain, torch.Tensor):
        torch.testing.assert_close(ours, plain)
    else:
        assert str(ours).splitlines()[0] == str(plain).splitlines()[0]
    if device == "cpu" and name != "_softmax":
        assert bool(patched.report.fallbacks) == (to is not dtype)


@pytest.mark.gpu
@every_half
def test_on_cuda_half_types_are_widened_in_the_kernel(dtype):
    x = maker(dtype, "cuda")(64, 1000).requires_grad_()
    plain, ours, patched = with_and_without(lambda: torch.softmax(x, -1, dtype=torch.float32))
    torch.testing.assert_close(ours, plain)
    assert ours.dtype is torch.float32
    assert patched.report.served == {"softmax": 1}
    gradients = [torch.autograd.grad(y, x, torch.ones_like(y).cumsum(-1))[0] for y in (plain, ours)]
    torch.testing.assert_close(gradients[1], gradients[0])


@pytest.mark.parametrize("function", ["softmax", "log_softmax"])
def test_more_than_64_dims_are_torchs(function):
    """An error of onepass leaves the call to torch, which takes any number; also of a patch that was restored, whose
    kernels stay."""
    x = torch.randn([2, *[1] * 127, 3, 4], requires_grad=True)

    def call():
        y = TORCH[function](x, -1)
        return y, torch.autograd.grad(y, x, torch.ones_like(y).cumsum(-1))[0]

    plain, _, patched = with_and_without(call)
    for got in (call(), plain):
        torch.testing.assert_close([t.flatten() for t in got], [t.flatten() for t in plain])
    assert not patched.report.served
    fallbacks = {(name, "an error of onepass") for name in (function, f"{function} backward")}
    assert set(patched.report.fallbacks) == fallbacks


# Gradients ----------------------------------------------------------------------------------------------------------
def test_gradients(function, dtype, device):
    """torch's node, dtype and strides, the fused operator's values; of logsumexp of half types onepass's own node."""

    def step():
        x = maker(dtype, device)(6, 5, 40).transpose(0, 1).requires_grad_()
        y = TORCH[function](x, -1)
        (g,) = torch.autograd.grad(y, x, maker(dtype, device, 3)(*y.shape))
        return y, g

    (y, want), (y_ours, got), patched = with_and_without(step)
    half = dtype in (torch.float16, torch.bfloat16)
    assert y_ours.requires_grad
    assert got.dtype is want.dtype
    if half and function == "logsumexp":
        assert y_ours.grad_fn.name() != y.grad_fn.name()
    else:
        assert (y_ours.grad_fn.name(), got.stride()) == (y.grad_fn.name(), want.stride())
    close = {"rtol": 0.05, "atol": 0.05} if half else {}
    torch.testing.assert_close(got, want, **close)
    if device == "cpu" and function != "logsumexp":  # whose gradient is torch's arithmetic, no operator
        counted = "log_softmax" if function == "log_softmax" else "softmax"
        assert patched.report.served == {counted: 1, f"{counted} backward": 1}


@every_half
def test_the_gradient_of_logsumexp_of_half_types_comes_from_the_unrounded_value(dtype, device):
    x = (100 + 5 * maker(torch.float32, device)(20, 300)).to(dtype).requires_grad_()
    low = torch.full((3,), -1000.0, dtype=dtype, device=device, requires_grad=True)
    with onepass.patch(report=True) as patched:
        y = torch.logsumexp(x, (-1,), keepdim=True)
        assert (y.dtype, y.shape) == (dtype, (20, 1))
        (g,) = torch.autograd.grad(y.sum(), x)
        torch.special.logsumexp(low, 0).backward()
    assert patched.report.served == {"logsumexp": 2}
    torch.testing.assert_close(g.double(), x.detach().double().softmax(1), rtol=torch.finfo(dtype).eps, atol=1e-7)
    torch.testing.assert_close(low.grad, torch.full_like(low, 1 / 3), rtol=0, atol=0)


def test_other_calls_of_logsumexp_of_half_types_reach_torchs_autograd():
    x = maker(torch.bfloat16)(3, 4).requires_grad_()
    names = []
    with onepass.patch():
        with Operators() as mode:
            names.append(torch.logsumexp(x, 0).grad_fn.name())
        assert torch.ops.aten.logsumexp.default in mode.seen
        names.append(torch.func.grad(lambda t: torch.logsumexp(t, (0, 1)))(x).shape)
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
            y = torch.logsumexp(dual, 0)
            assert torch.autograd.forward_ad.unpack_dual(y).tangent is not None
            names.append(y.grad_fn.name())
        with pytest.raises(IndexError, match="Dimension out of range"):
            torch.logsumexp(x, 2)
        with torch.no_grad():
            assert torch.logsumexp(x, 0).grad_fn is None
    names.append(torch.logsumexp(x, 0).grad_fn.name())
    assert names == ["LogsumexpBackward0", x.shape, "LogsumexpBackward0", "LogsumexpBackward0"]


def test_what_is_saved_is_torchs_and_is_watched():
    def saved():
        saved_ones = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved_ones.append(t) or t, lambda t: t):
            torch.softmax(torch.ones(3, 4, requires_grad=True), 1)
        return [tuple(t.shape) for t in saved_ones]

    plain, ours, _ = with_and_without(saved)
    assert ours == plain
    with onepass.patch():
        y = torch.softmax(torch.ones(3, 4, requires_grad=True), 1)
        with torch.no_grad():
            y.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
        out, leaf = torch.ones(3), torch.ones(3, requires_grad=True)
        product = leaf * out
        torch.softmax(torch.ones(3), 0, out=out)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.sum().backward()


def test_func_transforms(function, device):
    x = maker(torch.float64, device)(3, 4)
    call = functools.partial(TORCH[function], dim=0)
    total = lambda t: call(t).square().sum()  # noqa: E731

    def transformed():
        return (
            torch.func.vmap(call, in_dims=1)(x),
            *(transform(call)(x[0]) for transform in (torch.func.jacrev, torch.func.jacfwd)),
            torch.func.hessian(total)(x[0]),
            torch.func.vmap(torch.func.grad(total))(x),
            torch.func.jvp(call, (x,), (x.cos(),)),
        )

    plain, ours, patched = with_and_without(transformed)
    torch.testing.assert_close(ours, plain)
    assert patched.report.served
    assert not patched.report.fallbacks


# Cross-entropy ------------------------------------------------------------------------------------------------------
def _targets(x):
    """Classes, some of them ignored, and probabilities."""
    classes = torch.arange(x[:, 0].numel(), device=x.device).view_as(x[:, 0]) % x.shape[1]
    return classes.masked_fill(classes == 1, -100), x.detach().cos().softmax(1).requires_grad_()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_cross_entropy(reduction, smoothing, dtype, device):
    make = maker(dtype, device)
    for x, has_weight in itertools.product(
        (make(6, 9), make(2, 5, 3, 4), make(4, 7, 8).transpose(1, 2)), (False, True)
    ):
        x = x.requires_grad_()
        weight = make(x.shape[1]).abs() if has_weight else None
        for target in _targets(x):
            call = functools.partial(F.cross_entropy, x, target, weight, reduction=reduction, label_smoothing=smoothing)
            plain, ours, patched = with_and_without(call)
            assert patched.report.served == {"cross_entropy": 1}
            close = {"rtol": 0.03, "atol": 0.03} if dtype.itemsize == 2 else {}
            torch.testing.assert_close(ours, plain, **close)
            leaves = [t for t in (x, target) if t.requires_grad]
            plain, ours = (torch.autograd.grad(y, leaves, torch.ones_like(y)) for y in (plain, ours))
            torch.testing.assert_close(ours, plain, check_stride=False, **close)


LEFT = {  # what torch computes, of (3, 4), its classes and weights
    "class out of range": lambda x, y, w: F.cross_entropy(x, y + 2),
    "targets of another shape": lambda x, y, w: F.cross_entropy(x, y[:2]),
    "classes of bytes": lambda x, y, w: F.cross_entropy(x, y.byte()),
    "classes of int32": lambda x, y, w: F.cross_entropy(x, y.int()),
    "integers": lambda x, y, w: F.cross_entropy(x.long(), y),
    "probabilities of another dtype": lambda x, y, w: F.cross_entropy(x, x.double()),
    "probabilities of integers": lambda x, y, w: F.cross_entropy(x, x.long()),
    "ignored probabilities": lambda x, y, w: F.cross_entropy(x, x, ignore_index=1),
    "smoothing": lambda x, y, w: F.cross_entropy(x, y, label_smoothing=1.5),
    "weights of another shape": lambda x, y, w: F.cross_entropy(x, y, w[1:]),
    "weights of another dtype": lambda x, y, w: F.cross_entropy(x, y, w.double()),
    "weights with a gradient": lambda x, y, w: F.cross_entropy(x, y, w.clone().requires_grad_()),
    "reduction": lambda x, y, w: ATEN.cross_entropy_loss(x, y, None, 7),
    "sparse": lambda x, y, w: F.cross_entropy(x.to_sparse(), y),
    "no rows": lambda x, y, w: F.cross_entropy(x[:0], y[:0]),
    "grad": lambda x, y, w: torch.func.grad(F.cross_entropy)(x, y),
    "vmap of grad": lambda x, y, w: torch.func.vmap(torch.func.grad(F.cross_entropy))(x, y),
    "jvp": lambda x, y, w: torch.func.jvp(lambda t: F.cross_entropy(t, y), (x,), (x.cos(),)),
    "jacfwd": lambda x, y, w: torch.func.jacfwd(lambda t: F.cross_entropy(t, y, w, label_smoothing=0.1))(x),
    "subclass": lambda x, y, w: F.cross_entropy(x.as_subclass(Loud), y),
}


@pytest.mark.parametrize("case", LEFT)
def test_cross_entropies_and_errors_that_are_torchs(case):
    given = maker(torch.float32)(3, 4), torch.arange(3), torch.rand(4)
    plain, ours, patched = with_and_without(lambda: outcome(LEFT[case], *given))
    if isinstance(plain, Exception):
        assert (type(ours), str(ours)) == (type(plain), str(plain))
    else:
        assert type(ours) is type(plain)
        torch.testing.assert_close(ours, plain, equal_nan=True)
    assert "cross_entropy" not in patched.report.served
    assert {function for function, _ in patched.report.fallbacks} >= {"cross_entropy"}


def _second_order(x, y):
    (g,) = torch.autograd.grad(F.cross_entropy(x, y, label_smoothing=0.1), x, create_graph=True)
    return torch.autograd.grad(g.square().sum(), x)


def _checkpointed_loss(x, y, reentrant):
    return torch.autograd.grad(checkpoint(F.cross_entropy, x * 2, y, use_reentrant=reentrant), x)


SERVED = {
    "second order": _second_order,
    "autocast": torch.autocast("cpu", torch.bfloat16)(lambda x, y: F.cross_entropy(x.bfloat16(), y)),
    "negated view": lambda x, y: F.cross_entropy(torch.complex(x, x).conj().imag, y),
    "checkpoint": lambda x, y: _checkpointed_loss(x, y, False),
    "no gradient": torch.no_grad()(lambda x, y: F.cross_entropy(x, y).requires_grad),
    "batched gradients": lambda x, y: torch.autograd.grad(
        F.cross_entropy(x, y, reduction="none"), x, torch.eye(5, dtype=x.dtype), is_grads_batched=True
    ),
}


@pytest.mark.parametrize("case", SERVED)
def test_cross_entropies_that_are_served(case):
    x, y = maker(torch.float64)(5, 6).requires_grad_(), torch.arange(5)
    plain, ours, patched = with_and_without(lambda: SERVED[case](x, y))
    torch.testing.assert_close(ours, plain)
    assert patched.report.served["cross_entropy"]
    assert not patched.report.fallbacks


@pytest.mark.gpu
@every_half
def test_autocast_of_a_cross_entropy_on_a_gpu(dtype):
    x = maker(dtype, "cuda")(5, 6).requires_grad_()
    y, weight = torch.arange(5, device="cuda"), torch.rand(6, device="cuda")

    def call():
        with torch.autocast("cuda"):
            loss = F.cross_entropy(x, y, weight)
        return loss, torch.autograd.grad(loss, x)[0]

    plain, ours, patched = with_and_without(call)
    torch.testing.assert_close(ours, plain, rtol=0.02, atol=0.02)
    assert patched.report.served == {"cross_entropy": 1}
    with onepass.autocast_keeps_half():
        assert with_and_without(call)[1][0].dtype is F32


def test_modes_and_fake_tensors_see_torchs_operators_of_a_cross_entropy():
    x, y = maker(torch.float32)(5, 6).requires_grad_(), torch.arange(5)

    def seen():
        with Operators() as mode:
            torch.autograd.grad(F.cross_entropy(x, y, label_smoothing=0.1), x)
        with FakeTensorMode() as fake:
            return mode.seen, repr(F.cross_entropy(fake.from_tensor(x), fake.from_tensor(y)))

    plain, ours, patched = with_and_without(seen)
    assert ours == plain
    assert "cross_entropy" not in patched.report.served


# Autocast -----------------------------------------------------------------------------------------------------------
def test_autocast(function, dtype, device):
    x = maker(dtype, device)(3, 4)

    def call():
        with torch.autocast(device, dtype=torch.bfloat16):
            return TORCH[function](x, 1)

    plain, ours, patched = with_and_without(call)
    assert ours.dtype is plain.dtype
    torch.testing.assert_close(ours, plain, rtol=0.02, atol=0.02)
    assert sum(patched.report.served.values()) == 1


def test_autocast_leaves_a_direct_call_of_the_operator(device):
    x = maker(torch.float16, device)(3, 4)
    with onepass.patch(), torch.autocast(device):
        assert torch.ops.aten._softmax(x, 1, False).dtype is torch.float16
        assert torch.ops.aten._log_softmax(x.t(), 0, False).dtype is torch.float16


# Subclasses, modes, other layouts -----------------------------------------------------------------------------------


class Loud(torch.Tensor):
    seen: list[object] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        cls.seen.append(function)
        return super().__torch_function__(function, types, args, kwargs or {})


def test_a_subclass_and_modes_see_what_they_saw():
    def step():
        Loud.seen.clear()
        x = torch.ones(3, 4).as_subclass(Loud).requires_grad_()
        y = x.t().softmax(1)
        y.sum().backward()
        seen = [type(y), type(x.grad), list(Loud.seen)]
        for kind in (Functions, Operators):
            x = torch.ones(3, 4, requires_grad=True)
            with kind() as mode:
                F.softmax(x.t(), 1).sum().backward()
                torch.logsumexp(x, 0)
            seen.append(mode.seen)
        return seen

    plain, ours, patched = with_and_without(step)
    assert ours == plain
    assert patched.report.served == {"softmax": 3, "softmax backward": 3, "logsumexp": 2}


@pytest.mark.gpu
def test_in_a_cuda_graph():
    x = maker(torch.float32, "cuda")(64, 1000)
    with onepass.patch(report=True) as patched:
        x.softmax(-1)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = x.softmax(-1)
    x.mul_(2)
    graph.replay()
    torch.testing.assert_close(y, x.softmax(-1))
    assert patched.report.served == {"softmax": 2}


# Compilers ----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_graphs_that_keep_atens_operators_are_served(backend):
    """Inductor makes a softmax of arithmetic of its own, which is fused."""
    served = {} if backend == "inductor" else {"softmax": 1, "softmax backward": 1}
    x = maker(torch.float32)(3, 4).requires_grad_()
    compiled = torch.compile(lambda t: torch.softmax(t * 2, 1).square().sum(), backend=backend, fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        (want,) = torch.autograd.grad(compiled(x), x)
        with onepass.patch(report=True) as patched:  # compiled before it
            (got,) = torch.autograd.grad(compiled(x), x)
        torch.testing.assert_close(got, want)
        compiled(x)
    assert patched.report.served == served
    assert not patched.report.fallbacks


@pytest.mark.usefixtures("fresh_compiler")
def test_within_a_compiled_function():
    @torch.compile(backend="eager")
    def call(x):
        with onepass.patch(report=True) as patched:
            return x.softmax(0), patched.report

    y, report = call(torch.zeros(4))
    assert y.sum() == 1
    assert report.served == {"softmax": 1}


def test_exported_and_traced_graphs_hold_torchs_operator():
    class Model(torch.nn.Module):
        def forward(self, x):
            return x.softmax(1)

    x = maker(torch.float32)(3, 4)
    with onepass.patch(report=True) as patched:
        program = torch.export.export(Model(), (x,))
        assert not patched.report.served
        assert "aten.softmax.int" in str(program.graph)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            traced = torch.jit.trace(Model(), x, check_trace=False)
        assert "aten::softmax" in str(traced.graph)
    with onepass.patch(report=True) as patched:
        torch.testing.assert_close(program.module()(x), traced(x))
    assert patched.report.served == {"softmax": 2}


def test_fake_and_meta_tensors_are_torchs(function):
    x = maker(torch.float32)(2, 5, 4, 3).contiguous(memory_format=torch.channels_last)

    def shapes():
        with FakeTensorMode() as mode:
            fake = TORCH[function](mode.from_tensor(x).requires_grad_(), 1)
            fake.sum().backward()
        meta = TORCH[function](x.to("meta"), 1)
        return [(t.shape, t.dtype, t.stride()) for t in (fake, meta)]

    plain, ours, patched = with_and_without(shapes)
    assert ours == plain
    assert not patched.report.served
    real = with_and_without(lambda: TORCH[function](x, 1))[1]
    assert ours[0] == (real.shape, real.dtype, real.stride())
