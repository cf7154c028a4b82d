"""torch's own samples (OpInfo) under the checks of torch's own suite: gradients of both modes and orders, batched
gradients, noncontiguous inputs, schema, fake tensors, torch.compile, vmap."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from test_opinfo import NAMES, OPS, _arguments, _theirs
from torch import Tensor
from torch._subclasses import CrossRefFakeMode
from torch._subclasses.schema_check_mode import SchemaCheckMode
from torch.autograd import gradcheck, gradgradcheck
from torch.utils._pytree import tree_map

from lib.support import every_engine, ours

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # torch's batched checks tell of operators without rules
every_op = pytest.mark.parametrize(
    "op", OPS, ids=lambda op: f"{NAMES[op.name]}{'-with_dtype' * bool(op.variant_test_name)}"
)
F64 = torch.float64


def calls(op: Any, engine: str, device: str, dtype: torch.dtype = F64) -> Iterator[tuple[Callable[..., Tensor], Any]]:
    """Each sample: our function with the sample's arguments, and the sample."""
    samples = list(op.sample_inputs(device, dtype, requires_grad=True))
    assert samples
    for sample in samples[: 3 if engine == "triton" and device == "cpu" else None]:  # an interpreter takes its time
        args, kwargs = _arguments(sample)
        yield (lambda x, a=args, k=kwargs: ours(NAMES[op.name])(x, *a, **k, engine=engine)), sample


CHECKS: dict[str, Callable[..., Any]] = {  # as torch's test_ops_gradients.py has them
    "fn_grad": functools.partial(gradcheck, check_batched_grad=True),
    "fn_gradgrad": functools.partial(gradgradcheck, check_batched_grad=True, gen_non_contig_grad_outputs=True),
    "forward_mode_AD": functools.partial(
        gradcheck, check_forward_ad=True, check_backward_ad=False, check_batched_forward_grad=True
    ),
    "fwgrad_bwgrad": functools.partial(
        gradgradcheck, check_fwd_over_rev=True, check_rev_over_rev=False, check_undefined_grad=False
    ),
}


@every_engine
@pytest.mark.parametrize("check", CHECKS)
@every_op
def test_gradients(op, check, engine, device):
    for f, sample in calls(op, engine, device):
        x = sample.input
        if x.numel() == 0 and check != "fn_grad":
            continue
        # torch's suite is slow or fast by its environment; all elements of the large samples take minutes.
        assert CHECKS[check](f, (x,), fast_mode=x.numel() > 30 or engine == "triton")


@every_engine
@every_op
def test_noncontiguous_samples(op, engine, device):
    for f, sample in calls(op, engine, device):
        x, other = sample.input, sample.noncontiguous().input
        y, z = f(x), f(other)
        torch.testing.assert_close(y, z)
        g = torch.randn_like(y)
        torch.testing.assert_close(torch.autograd.grad(y, x, g), torch.autograd.grad(z, other, g))


@every_engine
@every_op
def test_schema_and_fake_tensors(op, engine, device):
    """What the operators of forward and backward write, alias and shape is what they say."""
    for f, sample in calls(op, engine, device):
        for mode in (SchemaCheckMode(), CrossRefFakeMode(check_strides=True)):
            with mode:
                y = f(sample.input)
                torch.autograd.grad(y, sample.input, torch.ones_like(y))


@every_engine
@every_op
def test_compiled(op, engine, device):
    """One graph for each sample's arguments, forward and backward; static and dynamic shapes take turns."""
    for i, (f, sample) in enumerate(calls(op, engine, device)):
        torch.compiler.reset()
        compiled = torch.compile(f, fullgraph=True, backend="aot_eager", dynamic=i % 2 == 1)
        got, want = compiled(sample.input), _theirs(op, sample)
        torch.testing.assert_close(got, want)
        g = torch.randn_like(want)
        torch.testing.assert_close(
            torch.autograd.grad(got, sample.input, g), torch.autograd.grad(want, sample.input, g)
        )


TRANSFORMS: dict[str, Callable[[Callable[..., Tensor], Tensor, Tensor], Any]] = {  # as functorch's test_ops.py
    "vjp": lambda f, x, t: torch.func.vjp(f, x)[1](f(t)),
    "jvp": lambda f, x, t: torch.func.jvp(f, (x,), (t,)),
    "vjpvjp": lambda f, x, t: torch.func.vjp(lambda v: torch.func.vjp(f, x)[1](v)[0], f(t))[1](x),
    "vjpjvp": lambda f, x, t: torch.func.vjp(lambda v: torch.func.jvp(f, (v,), (t,))[1], x)[1](f(t)),
    "jvpvjp": lambda f, x, t: torch.func.jvp(lambda v: torch.func.vjp(f, v)[1](f(t))[0], (x,), (t,)),
    "jvpjvp": lambda f, x, t: torch.func.jvp(lambda v: torch.func.jvp(f, (v,), (t,))[1], (x,), (t,)),
    "jvpjvpvjp": lambda f, x, t: torch.func.jvp(
        lambda u: torch.func.jvp(lambda v: torch.func.vjp(f, v)[1](f(u))[0], (u,), (t,))[1], (x,), (t,)
    ),
}


@every_engine
@pytest.mark.parametrize("transform", TRANSFORMS)
@every_op
def test_transforms_and_vmap_of_them(op, transform, engine, device):
    for f, sample in calls(op, engine, device):
        x, t = sample.input.detach(), torch.randn_like(sample.input)
        mine = functools.partial(TRANSFORMS[transform], f)
        want = TRANSFORMS[transform](lambda v, s=sample: op(v, *s.args, **s.kwargs), x, t)
        torch.testing.assert_close(mine(x, t), want)
        twice = torch.func.vmap(mine, in_dims=(0, -1))(torch.stack((x, x)), torch.stack((t, t), -1))
        torch.testing.assert_close(twice, tree_map(lambda w: torch.stack((w, w)), want))
