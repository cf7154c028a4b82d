"""torch.autocast: what torch's functions give under it, and the way to keep half tensors half; and logsumexp of half
tensors in float32, which it asks for on a GPU: in the kernels, without a copy of the input.

What it does on a GPU is seen without one, by tensors that have no data.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

import onepass
from lib.modes import Graphs, Operators
from lib.support import DTYPES, LAYOUTS, TORCH, assert_defined, every_half, maker, ours, some_tuples
from onepass import functional, reference, settings

HALF_TYPES = (torch.float16, torch.bfloat16)
Call = Callable[..., Tensor]


def test_dtypes_are_torchs_and_gradients_those_of_float32(function, dtype, engine, device):
    x = maker(dtype, device)(3, 40).requires_grad_()
    with torch.autocast(device, dtype=torch.bfloat16):
        mine, theirs = ours(function)(x, 1, engine=engine), TORCH[function](x, 1)
    assert mine.dtype is theirs.dtype
    assert_defined(function, mine.detach(), x.detach().to(mine.dtype), 1)
    g = maker(theirs.dtype, device, 3)(*theirs.shape)
    (got,), (want,) = (torch.autograd.grad(y, x, g) for y in (mine, theirs))
    assert got.dtype is dtype
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(got, want, rtol=16 * eps, atol=16 * eps)


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tensors without data on a GPU, under its autocast."""
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    monkeypatch.setattr(functional, "resolve", lambda engine, device: "cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    try:
        with FakeTensorMode():
            yield
    finally:
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])


def gpu_tensor(dtype: torch.dtype) -> Tensor:
    return torch.empty(3, 4, dtype=dtype, device="cuda")


def test_on_a_gpu_the_dtype_is_torchs(function, dtype, fake_gpu):
    x = gpu_tensor(dtype)
    assert ours(function)(x, 1).dtype is TORCH[function](x, 1).dtype
    assert ours(function)(x, (0, 1)).dtype is (torch.float32 if dtype in HALF_TYPES else dtype)
    for to in DTYPES if function != "logsumexp" else ():  # goes before it
        assert ours(function)(x, 1, dtype=to).dtype is TORCH[function](x, 1, dtype=to).dtype is to
    with Operators() as mode:  # no cast goes before the kernel
        ours(function)(x, 1)
    assert mode.ours() == [function]
    assert not [name for name in mode.names() if "copy" in name]


@pytest.mark.parametrize("dim", [1, (0, 1)], ids=str)
@every_half
def test_half_stays_half(function, dtype, dim, fake_gpu):
    x = gpu_tensor(dtype)
    with onepass.autocast_keeps_half():
        assert ours(function)(x, dim).dtype is dtype
        with onepass.autocast_keeps_half(False):
            assert ours(function)(x, dim).dtype is torch.float32
        assert ours(function)(x, dim).dtype is dtype
    assert ours(function)(x, dim).dtype is torch.float32


def test_it_ends_with_an_error_and_is_of_one_thread(fake_gpu):
    x = gpu_tensor(torch.float16)
    keeps: list[bool] = []
    with onepass.autocast_keeps_half():
        other = threading.Thread(target=lambda: keeps.append(settings._thread.keeps_half))
        other.start()
        other.join()
        with pytest.raises(IndexError), onepass.autocast_keeps_half(False):
            onepass.softmax(x, 2)
        assert onepass.softmax(x, 1).dtype is torch.float16
    assert keeps == [False]
    with pytest.raises(TypeError, match="enabled must be a bool, got 1"):
        onepass.autocast_keeps_half(1)


@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiled_graph_knows_of_it():
    compiled = torch.compile(lambda x: x + 1 if settings._thread.keeps_half else x, fullgraph=True, backend="eager")
    x = torch.zeros(2)
    for _ in range(2):
        assert not compiled(x).any()
        with onepass.autocast_keeps_half():
            assert compiled(x).all()


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@every_half
def test_compiled_on_a_gpu(function, dtype, backend):
    x = maker(dtype, "cuda")(3, 40)
    compiled = torch.compile(lambda x: ours(function)(x, 1), fullgraph=True, backend=backend)
    for _ in range(2):
        with torch.autocast("cuda", torch.bfloat16):
            wide = compiled(x)
            with onepass.autocast_keeps_half():
                half = compiled(x)
        assert (wide.dtype, half.dtype) == (torch.float32, dtype)
        assert_defined(function, wide, x.float(), 1)
        assert_defined(function, half, x, 1)


# logsumexp in float32 -------------------------------------------------------------------------------------------------


@pytest.fixture
def logsumexp(engine: str, device: str, monkeypatch: pytest.MonkeyPatch) -> Call:
    """The function under autocast; elsewhere than on a GPU autocast is made to widen as it does there."""
    if device == "cpu":
        monkeypatch.setattr(functional, "autocast_to_float32", lambda x: x.dtype in HALF_TYPES)

    def call(x: Tensor, dim: Any, keepdim: bool = False) -> Tensor:
        with torch.autocast(device, torch.bfloat16) if device == "cuda" else contextlib.nullcontext():
            return onepass.logsumexp(x, dim, keepdim, engine=engine)

    return call


def wide(x: Tensor) -> Tensor:
    return x.detach().double().requires_grad_()


def close(got: Tensor, want: Tensor, dtype: torch.dtype, scale: float = 1) -> None:
    """One rounding to `dtype`, and a few of float32."""
    assert got.dtype is dtype
    eps = torch.finfo(dtype).eps
    rtol = eps if dtype in HALF_TYPES else 16 * eps
    torch.testing.assert_close(got.double(), want, rtol=rtol, atol=max(rtol * 1e-2, 1e-6) * scale)


SOME = ("0-d", "odd rows", "long rows", "short rows", "middle", "permuted and sliced", "expanded middle", "empty batch")


@every_half
@pytest.mark.parametrize("layout", [*SOME, "empty dim", "longest rows"])
def test_logsumexp_in_float32(layout, dtype, engine, device, logsumexp):
    if layout == "longest rows" and engine == "triton" and device == "cpu":
        pytest.skip("an interpreter takes its time")
    make = LAYOUTS.get(layout, lambda r: r(2, 70_001))
    x = make(maker(dtype, device)).detach().requires_grad_()
    for k, dim in enumerate(some_tuples(x)):
        y = logsumexp(x, dim, bool(k % 2))
        assert y.dtype is torch.float32
        assert_defined("logsumexp", y.detach(), x.detach().float(), dim, f", layout {layout}")
        w = wide(x)
        want = reference.logsumexp(w, dim, bool(k % 2))
        for g in (maker(torch.float32, device, k)(*y.shape) * 1e3, torch.tensor(0.7, device=device).expand(y.shape)):
            (got,) = torch.autograd.grad(y, x, g, retain_graph=True)
            (expected,) = torch.autograd.grad(want, w, g.double(), retain_graph=True)
            close(got, expected, dtype, float(g.abs().max()) if g.numel() else 1)


@every_half
def test_logsumexp_of_special_rows(dtype, engine, device, logsumexp):
    inf, nan = torch.inf, torch.nan
    rows = [[0.0, -inf, 1.0], [-inf] * 3, [inf, 0.0, 1.0], [nan, 0.0, 1.0], [inf, -inf, nan]]
    x = torch.tensor(rows, device=device).to(dtype).requires_grad_()
    y, w = logsumexp(x, 1), wide(x)
    want = torch.logsumexp(w, 1)
    torch.testing.assert_close(y.double(), want, rtol=1e-6, atol=1e-6, equal_nan=True)
    (got,), (expected,) = (torch.autograd.grad(f.sum(), t) for f, t in ((y, x), (want, w)))
    torch.testing.assert_close(got.double(), expected, rtol=1e-2, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("keepdim", [False, True])
@every_half
def test_one_kernel_forward_and_one_backward_from_the_half_input(keepdim, dtype, engine, device, logsumexp):
    saved: list[Tensor] = []
    x = maker(dtype, device)(6, 40).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t), Operators() as forward:
        y = logsumexp(x, 1, keepdim)
    assert [(t.dtype, t.numel()) for t in saved] == [(dtype, 240), (torch.float32, 6)]
    assert saved[0].data_ptr() == x.data_ptr()
    with Operators() as backward:
        y.sum().backward()
    assert (len(forward.ours()), len(backward.ours())) == (1, 1)
    assert not [name for name in (*forward.names(), *backward.names()) if "copy" in name]


@every_half
@pytest.mark.parametrize("dim", [1, (0, 1)], ids=str)
def test_logsumexps_second_order(dim, dtype, engine, device, logsumexp):
    x = maker(dtype, device, scale=1.0)(3, 5).requires_grad_()
    y, w = logsumexp(x, dim), wide(x)
    want = reference.logsumexp(w, dim)
    g = maker(torch.float32, device, 5)(*y.shape).requires_grad_()
    v = maker(dtype, device, 6)(3, 5)
    wide_g = wide(g)
    (dx,) = torch.autograd.grad(y, x, g, create_graph=True)
    (wide_dx,) = torch.autograd.grad(want, w, wide_g, create_graph=True)
    second = torch.autograd.grad(dx, (x, g), v)
    expected = torch.autograd.grad(wide_dx, (w, wide_g), v.double())
    for got, of, t in zip(second, expected, (x, g), strict=True):
        assert got.dtype is t.dtype
        torch.testing.assert_close(got.double(), of, rtol=4 * torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps)


@every_half
def test_logsumexps_tangents_and_transforms(dtype, engine, device, logsumexp):
    x, t = maker(dtype, device, scale=1.0)(3, 5), maker(dtype, device, 7)(3, 5)
    w, coarse = x.double(), functools.partial(torch.testing.assert_close, rtol=0.02, atol=0.02)
    f, of = functools.partial(logsumexp, dim=1), functools.partial(reference.logsumexp, dim=1)
    with forward_ad.dual_level():
        dual = forward_ad.unpack_dual(f(forward_ad.make_dual(x, t)))
    want = torch.func.jvp(of, (w,), (t.double(),))
    for got in ((dual.primal, dual.tangent), torch.func.jvp(f, (x,), (t,))):
        assert [part.dtype for part in got] == [torch.float32] * 2
        torch.testing.assert_close(tuple(part.double() for part in got), want, rtol=1e-5, atol=1e-5)
    row, of_row = functools.partial(logsumexp, dim=0), functools.partial(reference.logsumexp, dim=0)
    with Operators() as log:
        batch = torch.func.vmap(torch.func.grad(row))(x)
    assert len(log.ours()) == 2
    assert batch.dtype is dtype
    coarse(batch.double(), torch.func.vmap(torch.func.grad(of_row))(w))
    coarse(torch.func.hessian(row)(x[0]).double(), torch.func.hessian(of_row)(w[0]))


@pytest.mark.usefixtures("fresh_compiler")
@every_half
def test_logsumexp_compiled(dtype, engine, device, logsumexp):
    backend = Graphs()
    x = maker(dtype, device)(4, 30).requires_grad_()
    y = torch.compile(lambda x: logsumexp(x, 1), fullgraph=True, backend=backend)(x)
    g = maker(torch.float32, device, 2)(4)
    (got,) = torch.autograd.grad(y, x, g)
    w = wide(x)
    want = reference.logsumexp(w, 1)
    close(y.detach(), want.detach(), torch.float32)
    close(got, torch.autograd.grad(want, w, g.double())[0], dtype)
    names = ("triton", "triton_backward") if engine == "triton" else ("logsumexp", "_logsumexp_backward")
    assert backend.calls() == [[f"onepass.{name}.default"] for name in names]


WAYS: dict[str, Callable[[Call, Tensor], Tensor]] = {
    "eager": lambda f, x: torch.autograd.grad(f(x).sum(), x)[0],
    "create_graph": lambda f, x: torch.autograd.grad(f(x).sum(), x, create_graph=True)[0].detach(),
    "func.grad": lambda f, x: torch.func.grad(lambda t: f(t).sum())(x.detach()),
    "jacrev": lambda f, x: torch.func.jacrev(lambda t: f(t).flatten())(x.detach()).sum(0),
    **{
        f"compiled, {b}": lambda f, x, b=b: WAYS["eager"](torch.compile(f, backend=b, fullgraph=True), x)
        for b in ("eager", "aot_eager")
    },
}


@pytest.mark.usefixtures("fresh_compiler")
@every_half
@pytest.mark.parametrize(
    ("way", "offset"), [(way, offset) for way in WAYS for offset in (100.0, -1000.0) if offset < 0 or "," not in way]
)
def test_the_gradient_of_a_half_result(way, offset, dtype, engine, device):
    x = (maker(torch.float32, device)(6, 4, 12) + offset).to(dtype).requires_grad_()
    eps = torch.finfo(dtype).eps
    calls: list[tuple[Call, Any]] = []
    if engine != "triton":
        calls.append((lambda t: torch.ops.onepass.logsumexp(t, [0, 1], False), (0, 1)))
    for dim, keepdim in ((2, False), ((0, 1), False), ((0, 2), True)):
        calls.append((lambda t, d=dim, k=keepdim: onepass.logsumexp(t, d, k, engine=engine), dim))
    for f, dim in calls:
        torch._dynamo.reset()
        g = WAYS[way](f, x)
        assert g.dtype is dtype
        torch.testing.assert_close(g.double(), reference.softmax(x.detach(), dim), rtol=eps, atol=1e-7)
        total = g.double().sum(dim)
        torch.testing.assert_close(total, torch.ones_like(total), rtol=eps, atol=0)
        if way == "eager":
            t = torch.func.jvp(f, (x.detach(),), (torch.ones_like(x),))[1]
            assert torch.equal(t, torch.ones_like(t))


@every_half
def test_a_result_that_is_differentiated_is_rounded_as_one_that_is_not(dtype, engine, device):
    x = maker(dtype, device)(200, 33)
    assert_defined("logsumexp", onepass.logsumexp(x.clone().requires_grad_(), 1, engine=engine).detach(), x, 1)
