"""No engine calls torch's own softmax family, forward or backward: torch's is made to raise, and ours runs.

Two nets: torch's Python functions are replaced, and torch's kernels themselves are overridden in the dispatcher, which
also catches a call from C++ or from another operator's decomposition.
"""

import contextlib
import warnings

import pytest
import torch

import onepass
from lib.support import DTYPES, SOFTMAXES, TORCH, assert_defined, every_operator, maker, ours

WITH_OUT = ("_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data", "logsumexp")
FORBIDDEN = (
    *(f"{name}{out}" for name in WITH_OUT for out in ("", ".out")),
    *("softmax.int", "softmax.int_out", "log_softmax.int", "log_softmax.int_out"),
    *("special_softmax", "special_log_softmax", "special_logsumexp"),
    *("_safe_softmax", "_masked_softmax", "logcumsumexp", "logaddexp"),
)
FUNCTIONS = [
    *((owner, name) for owner in (torch, torch.Tensor) for name in ("softmax", "log_softmax", "logsumexp")),
    *((torch.nn.functional, name) for name in ("softmax", "log_softmax", "softmin", "gumbel_softmax", "cross_entropy")),
    *((torch.special, name) for name in ("softmax", "log_softmax", "logsumexp")),
    (torch, "_softmax"),
    (torch, "_log_softmax"),
]


class CalledTorch(Exception):
    pass


def _raise(*args: object, **kwargs: object) -> None:
    raise CalledTorch


@contextlib.contextmanager
def forbidden(device: str):
    """Within, torch's family raises: the kernels of this device, and the Python names."""
    with (
        warnings.catch_warnings(),
        torch.library._scoped_library("aten", "IMPL") as library,
        pytest.MonkeyPatch.context() as patch,
    ):
        warnings.simplefilter("ignore")
        for name in FORBIDDEN:
            for key in (device.upper(), f"Autograd{device.upper()}"):
                library.impl(name, _raise, key, allow_override=True)
        for owner, name in FUNCTIONS:
            patch.setattr(owner, name, _raise)
        yield


def test_the_net_holds(function, engine, device):
    """torch's function raises inside, by its name and by its operator, and works again after."""
    x = maker(torch.float32, device)(3, 4)
    before = TORCH[function](x, 0)
    kernel = {"softmin": "_softmax", "softmax": "_softmax", "log_softmax": "_log_softmax"}.get(function, "logsumexp")
    arguments = (x, [0]) if kernel == "logsumexp" else (x, 0, False)
    with forbidden(device):
        with pytest.raises(CalledTorch):
            getattr(torch.ops.aten, kernel)(*arguments)
        with pytest.raises(CalledTorch):
            getattr(torch.ops.aten, kernel)(arguments[0].clone().requires_grad_(), *arguments[1:])
        with pytest.raises(CalledTorch):
            getattr(torch, "softmax" if function == "softmin" else function)(x, 0)
    assert torch.equal(TORCH[function](x, 0), before)


@pytest.mark.parametrize("shape", [(5, 7), (3, 5003), (300, 3), (2, 40, 9), (), (0, 3), (3, 0), (1, 20_011)], ids=str)
@every_operator
def test_forward(function, shape, engine, device):
    with forbidden(device):
        for x in [maker(dtype, device)(*shape) for dtype in DTYPES]:
            for dim in range(max(x.dim(), 1)):
                y = ours(function)(x, dim, engine=engine)
                assert_defined(function, y, x, dim)
                if function != "state":
                    ours(function)(x, dim, out=y.fill_(torch.nan), engine=engine)
                    assert_defined(function, y, x, dim)
            if function in SOFTMAXES:
                assert_defined(function, ours(function)(x, -1, dtype=DTYPES[0], engine=engine), x.float(), -1)
            if function == "state":
                y = onepass.state(x, -1, engine=engine)
                twice = onepass.merge(y, y)
                assert_defined(function, onepass.State(twice.m, twice.l / 2), x, -1)
                assert twice.logsumexp().shape == y.m.shape


def test_scores(function, engine, device):
    x = maker(torch.float32, device)(2, 3, 7).requires_grad_()
    named = {"scale": 0.5, "mask": x.detach() > -1, "causal": True, "softcap": 3.0, "sink": 0.0, "empty": "zero"}
    with forbidden(device):
        for dtype in DTYPES:
            ours(function)(x.detach().to(dtype), -1, engine=engine, **named)
        y = ours(function)(x, -1, engine=engine, **named)
        y.masked_fill(y.isinf(), 0).square().sum().backward()
    assert x.grad.isfinite().all()


def test_segments(device):
    x = maker(torch.float64, device)(9, 2).requires_grad_()
    offsets = torch.tensor([0, 3, 3, 9], device=device)
    nested = torch.nested.nested_tensor_from_jagged(x, offsets)
    with forbidden(device):
        for name in ("softmax", "log_softmax", "logsumexp"):
            y = getattr(onepass, f"segment_{name}")(x, offsets)
            (g,) = torch.autograd.grad(y.masked_fill(y.isinf(), 0).square().sum(), x, create_graph=True)
            assert torch.autograd.grad(g.square().sum(), x)[0].isfinite().all()
            getattr(onepass, name)(nested, 1)
            getattr(onepass, f"segment_{name}")(x.detach(), lengths=torch.full((9,), 1, device=device))
        onepass.segment_state(x, offsets)
        torch.func.jvp(lambda t: onepass.segment_softmax(t, offsets), (x.detach(),), (x.detach(),))


def test_gradients_of_first_and_second_order(function, engine, device):
    x = maker(torch.float64, device)(3, 6, 2).requires_grad_()
    v = maker(torch.float64, device, 4)(3, 6, 2)
    with forbidden(device):
        for dim in (0, 1, (0, 2)):
            y = ours(function)(x, dim, engine=engine)
            (g,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
            (h,) = torch.autograd.grad((g * v).sum(), x)
            assert h.isfinite().all()
            assert h.any()
        torch.func.jvp(lambda t: ours(function)(t, 1, engine=engine), (x.detach(),), (v,))
        torch.func.vmap(lambda t: ours(function)(t, 0, engine=engine))(x.detach())
