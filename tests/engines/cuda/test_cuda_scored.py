"""The CUDA kernels of scored rows: on a GPU by calls that have different plans, without one by forced plans in the
emulator."""

import itertools
import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from emulator import missing
from lib.kernels import read_usage
from lib.plan_tables import BF16, F16, F32, F64, Access, Plan, Tier
from lib.support import maker, thin
from onepass import native, scored
from onepass.scores import Scores, SideTensors
from onepass.validation import Spec

emulated = pytest.mark.skipif(bool(missing()), reason=missing())
TOLERANCE = {F32: 2e-5, BF16: 1e-2, F16: 2e-3, F64: 1e-12}
ROWS = (2, 3)  # heads and queries
FORCED = {  # of rows of 37 elements, and of 36, which are whole vectors
    "warp": (BF16, 37, Plan(Tier.WARP, 4, 32, 16, 8, 1, 0, Access.PREDICATED)),
    "warp float32": (F32, 37, Plan(Tier.WARP, 8, 16, 8, 4, 1, 0, Access.PREDICATED)),
    "warp, elements": (F16, 37, Plan(Tier.WARP, 16, 8, 4, 1, 1, 0, Access.PREDICATED)),
    "warp, aligned": (BF16, 36, Plan(Tier.WARP, 4, 32, 12, 4, 1, 0, Access.ALIGNED)),
    "staged": (BF16, 37, Plan(Tier.STAGED, 4, 32, 10, 1, 1, 1, Access.PREDICATED)),
    "block": (BF16, 37, Plan(Tier.BLOCK, 32, 1, 16, 8, 1, 0, Access.PREDICATED)),
    "block, shared memory": (BF16, 901, Plan(Tier.BLOCK, 32, 1, 16, 8, 1, 2, Access.PREDICATED)),
    "block, shared memory, float32": (F32, 501, Plan(Tier.BLOCK, 32, 1, 8, 4, 1, 2, Access.PREDICATED)),
    "cluster": (BF16, 501, Plan(Tier.CLUSTER, 32, 1, 8, 8, 2, 0, Access.PREDICATED)),
    "twopass": (BF16, 301, Plan(Tier.TWOPASS, 32, 1, 8, 8, 1, 0, Access.PREDICATED)),
}
PARTS = {
    "mask": {"scale", "mask", "window"},
    "number": {"factor"},
    "bias": {"bias", "alibi", "softcap", "sink"},
    "strides": {"mask of rows", "bias transposed", "empty", "sink"},
}


def inner(t: Tensor) -> Tensor:
    """The same amid other elements, from an odd one on."""
    whole = torch.zeros(t.numel() + 3, dtype=t.dtype)
    whole[1:-2] = t.flatten()
    return whole[1:-2].view(t.shape)


def drawn(dtype: torch.dtype, n: int, parts: set[str], seed: int) -> tuple[Tensor, SideTensors, Scores]:
    """A call; the tensors beside the input begin at odd elements."""
    make = maker(dtype, seed=seed)
    wide = F64 if dtype is F64 else F32
    x = make(*ROWS, n) * 2
    side = SideTensors(
        inner(make(2, 1, 1).to(wide).abs() + 0.5) if "scale" in parts else None,
        inner(make(1, 3, n)) if "bias" in parts else make(n, 3).t() if "bias transposed" in parts else None,
        make(2).to(wide).abs() / 10 if "alibi" in parts else None,
        inner(make(2, 1, 1).to(wide)) if "sink" in parts else None,
        inner(make(3, n) > -0.5) if "mask" in parts else make(2, 3, 1) > 0 if "mask of rows" in parts else None,
    )
    window = (5, 4, 6) if "window" in parts else (None, None, None)
    factor, softcap = -0.7 if "factor" in parts else 1.0, 2.0 if "softcap" in parts else 0.0
    return x, side, Scores(factor, softcap, -math.inf, *window, "empty" in parts)


def assert_close(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(got.double(), want.to(dtype).double(), equal_nan=True, rtol=TOLERANCE[dtype], atol=1e-3)


@emulated
@pytest.mark.parametrize("place", thin(itertools.product(FORCED, PARTS), 2), ids="-".join)
def test_each_tier_in_the_emulator(emulator, place, tmp_path):
    """No kernel reads or writes beside its tensors, and each gives what the definition does, forward and backward."""
    name, parts = place
    dtype, n, plan = FORCED[name]
    x, side, scores = drawn(dtype, n, PARTS[parts], len(name))
    function = "log_softmax" if parts == "bias" else "softmax"
    spec = Spec(function, [2], None, False, "cpu")
    double = SideTensors(*(None if t is None else t.double() for t in side[:-1]), side.mask)
    want, want_lse = scored.forward_arithmetic(x.double(), double, spec, scores)
    place = (lambda t: t.clone()) if plan.access == Access.ALIGNED else inner
    x, y = place(x), place(x)
    names = ("scale", "bias", "alibi", "sink", "mask")
    tensors = {key: t for key, t in zip(names, scored._expanded(x, side, F32), strict=True) if t is not None}
    if side.sink is not None:
        tensors["lse"] = torch.empty(*ROWS, 1)
    numbers = scores.factor, scores.softcap, scores.sink
    window = _window(scores, x)
    emulator.scored(function, {"input": x, "result": y, **tensors}, [2], numbers, window, scores.empty_is_zero, plan)
    assert_close(y, want, dtype)
    if side.sink is not None:
        assert_close(tensors["lse"], want_lse, F32)
    g, dx = place(maker(dtype, seed=9)(*x.shape)), place(x)
    of_cap = x if scores.softcap else None
    wide = None if of_cap is None else x.double()
    want = scored.backward_arithmetic(g.double(), y.double(), wide, double, spec._replace(dtype=F64), scores)
    of_gradient = {key: t for key, t in tensors.items() if key in ("scale", "mask")}
    if of_cap is not None:
        of_gradient["of_cap"] = of_cap
    of_gradient |= {"input": y, "grad": g, "result": dx}
    if plan.tier in (Tier.BLOCK, Tier.CLUSTER):  # a gradient has no vectors in shared memory
        each = -(-(n + plan.vec_size) // (plan.vec_size * plan.threads_per_row * plan.blocks_per_row))
        plan = plan._replace(items_per_thread=each * plan.vec_size, smem_vecs=0)
    emulator.scored(function, of_gradient, [2], (*numbers[:2], -math.inf), window, scores.empty_is_zero, plan)
    assert_close(dx, want, dtype)
    # Other architectures take the same sources, and no kernel spills by much.
    kernels = [kernel for kernel in emulator.kernels_run if any("SCORE_PARTS" in word for word in kernel[1])]
    for (source, defines), arch in itertools.product(kernels[-2:], (80, 90, 100, 120) if parts == "bias" else (90,)):
        if plan.tier != Tier.CLUSTER or arch >= 90:
            native.compile_source(source, defines, arch, tmp_path / "kernel.cubin")
            assert read_usage(tmp_path / "kernel.cubin")["STACK"] <= 80


@emulated
@pytest.mark.parametrize("special", [math.inf, -math.inf, math.nan])
def test_what_is_masked_out_has_no_gradient(emulator, special):
    """Whatever the gradients of the row's other results are, and its own."""
    plan = FORCED["warp"][2]
    y, g = torch.full((3, 8), 0.25, dtype=BF16), torch.ones(3, 8, dtype=BF16)
    mask = torch.arange(8).remainder(2).bool().repeat(3, 1)
    y[~mask], g[0, 1], g[1, 2] = 0.0, special, special
    dx = torch.empty_like(y)
    emulator.scored("softmax", {"input": y, "grad": g, "result": dx, "mask": mask}, [1], plan=plan)
    want = scored.backward_arithmetic(
        g.double(), y.double(), None, SideTensors(mask=mask), Spec("softmax", [1], F64), Scores()
    )
    torch.testing.assert_close(dx.double(), want, equal_nan=True)
    assert not dx[~mask].any()
    assert not dx[0, 1].isfinite()


def _window(scores: Scores, x: Tensor) -> tuple[int, int, int]:
    offset = x.size(-1) - x.size(-2) if scores.offset is None else scores.offset
    least = -(2**63) if scores.left is None else -scores.left
    return least, 2**63 - 1 if scores.right is None else scores.right, offset


# On a GPU -------------------------------------------------------------------------------------------------------------

LENGTHS = (1, 3, 8, 33, 100, 127, 256, 600, 1000, 1023, 2047, 2048, 3000, 4097, 8192, 20001, 50257, 131073, 600000)


@pytest.mark.gpu
@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("dtype", [F32, BF16, F16, F64], ids=str)
def test_any_length_on_a_gpu(dtype, n):
    draw = random.Random(n)
    for function, parts in itertools.product(("softmax", "log_softmax", "logsumexp"), PARTS):
        x, side, scores = drawn(dtype, n, PARTS[parts], n)
        x, side = inner(x).cuda() if n % 3 else x.cuda(), SideTensors(*(None if t is None else t.cuda() for t in side))
        spec = Spec(function, [2], None, draw.random() < 0.5, "cuda")
        double = SideTensors(*(None if t is None else t.double() for t in side[:-1]), side.mask)
        want, want_lse = scored.forward_arithmetic(x.double(), double, spec, scores)
        launched: Any = scored._launch_forward(x, side, spec, scores)
        assert launched is not None
        assert_close(launched[0], want, dtype)
        if side.sink is not None:
            assert_close(launched[1], want_lse, F32 if dtype is not F64 else F64)
