"""onepass.patch below autograd, transforms, autocast, modes and subclasses: all of these stay torch's own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import onepass
from lib.modes import Functions, Operators
from lib.patch import with_and_without
from lib.support import TORCH, maker


# Gradients ----------------------------------------------------------------------------------------------------------
def test_gradients(function, dtype, device):
    """torch's node, torch's dtype and strides, the fused operator's values; of logsumexp of halves onepass's own."""

    def step():
        x = maker(dtype, device)(6, 5, 40).transpose(0, 1).requires_grad_()
        y = TORCH[function](x, -1)
        (g,) = torch.autograd.grad(y, x, maker(dtype, device, 3)(*y.shape))
        return y, g

    (y, want), (y_ours, got), patched = with_and_without(step)
    halves = dtype in (torch.float16, torch.bfloat16)
    assert y_ours.requires_grad
    assert got.dtype is want.dtype
    if halves and function == "logsumexp":
        assert y_ours.grad_fn.name() != y.grad_fn.name()
    else:
        assert (y_ours.grad_fn.name(), got.stride()) == (y.grad_fn.name(), want.stride())
    close = {"rtol": 0.05, "atol": 0.05} if halves else {}
    torch.testing.assert_close(got, want, **close)
    if device == "cpu" and function != "logsumexp":  # whose gradient is torch's arithmetic, no operator
        counted = "log_softmax" if function == "log_softmax" else "softmax"
        assert patched.report.served == {counted: 1, f"{counted} backward": 1}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_gradient_of_logsumexp_of_halves_comes_from_the_unrounded_value(dtype, device):
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


def test_other_calls_of_logsumexp_of_halves_reach_torchs_autograd():
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


def test_orders_and_modes_of_differentiation(function, device):
    x = maker(torch.float64, device)(3, 4).requires_grad_()
    with onepass.patch():
        call = lambda t: TORCH[function](t, 1)  # noqa: E731
        assert torch.autograd.gradcheck(call, x, check_forward_ad=True, check_batched_grad=True)
        assert torch.autograd.gradgradcheck(call, x)


def test_what_is_saved_is_torchs_and_is_watched():
    def saved():
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            torch.softmax(torch.ones(3, 4, requires_grad=True), 1)
        return [tuple(t.shape) for t in kept]

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


def test_func_transforms(function):
    x = maker(torch.float64)(3, 4)
    call = lambda t: TORCH[function](t, 0)  # noqa: E731
    total = lambda t: call(t).square().sum()  # noqa: E731

    def transformed():
        return (
            torch.func.vmap(call, in_dims=1)(x),
            torch.func.jacrev(call)(x[0]),
            torch.func.jacfwd(call)(x[0]),
            torch.func.hessian(total)(x[0]),
            torch.func.vmap(torch.func.grad(total))(x),
            torch.func.jvp(call, (x,), (x.cos(),)),
        )

    plain, ours, patched = with_and_without(transformed)
    torch.testing.assert_close(ours, plain)
    assert patched.report.served
    assert not patched.report.left


def test_checkpoint():
    def step():
        x = maker(torch.float64)(3, 4).requires_grad_()
        checkpoint(lambda t: t.softmax(1).square(), x, use_reentrant=False).sum().backward()
        return x.grad

    plain, ours, patched = with_and_without(step)
    torch.testing.assert_close(ours, plain)
    assert patched.report.served == {"softmax": 2, "softmax backward": 1}


def test_inference_mode():
    with onepass.patch(report=True) as patched, torch.inference_mode():
        assert torch.ones(3).softmax(0).is_inference()
    assert patched.report.served == {"softmax": 1}


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


def test_a_subclass_sees_what_it_saw():
    def step():
        Loud.seen.clear()
        x = torch.ones(3, 4).as_subclass(Loud).requires_grad_()
        y = x.t().softmax(1)
        y.sum().backward()
        return type(y), type(x.grad), list(Loud.seen)

    plain, ours, patched = with_and_without(step)
    assert ours == plain
    assert patched.report.served == {"softmax": 1, "softmax backward": 1}


@pytest.mark.parametrize("kind", [Functions, Operators])
def test_a_mode_sees_what_it_saw(kind):
    def step():
        x = torch.ones(3, 4, requires_grad=True)
        with kind() as mode:
            F.softmax(x.t(), 1).sum().backward()
            torch.logsumexp(x, 0)
        return mode.seen

    plain, ours, patched = with_and_without(step)
    assert ours == plain
    assert patched.report.served == {"softmax": 1, "softmax backward": 1, "logsumexp": 1}


def test_models_of_torch():
    attention = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    x, target = maker(torch.float32)(2, 5, 8), torch.arange(5)

    def calls():
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            torch.manual_seed(0)
            return attention(x, x, x), layer(x), F.cross_entropy(x[0], target), F.gumbel_softmax(x, dim=-1)

    plain, ours, patched = with_and_without(calls)
    torch.testing.assert_close(ours, plain)
    assert patched.report.served == {"softmax": 3, "log_softmax": 1}
    assert not patched.report.left


def test_other_layouts_have_kernels_of_their_own():
    dense = maker(torch.float32)(3, 4)
    with onepass.patch(report=True) as patched:
        sparse = torch.sparse.softmax(dense.to_sparse(), 1)
    torch.testing.assert_close(sparse.to_dense(), dense.softmax(1))
    assert not patched.report.served
    assert not patched.report.left


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
