"""The CUDA kernels of scored rows and columns: on a GPU by calls that have different plans, without one by forced plans
in the emulator."""

import itertools
import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from emulator import missing
from lib.drawn_scores import TOLERANCE, assert_close, drawn, inner, window_of
from lib.kernels import read_usage
from lib.plan_tables import BF16, F16, F32, F64, Access, Plan, Tier
from lib.support import maker, slow, thin_product
from onepass import native, scored
from onepass.scores import Scores, SideTensors
from onepass.validation import Spec

emulated = pytest.mark.skipif(bool(missing()), reason=missing())
ROWS = (2, 3)  # heads and queries
FORCED = {  # of rows of 37 elements, and of 36, which are whole vectors
    "warp": (BF16, 37, Plan(Tier.WARP, 4, 32, 16, 8, 1, 0, Access.PREDICATED)),
    "warp float32": (F32, 37, Plan(Tier.WARP, 8, 16, 8, 4, 1, 0, Access.PREDICATED)),
    "warp, elements": (F16, 37, Plan(Tier.WARP, 16, 8, 4, 1, 1, 0, Access.PREDICATED)),
    "warp, aligned": (BF16, 36, Plan(Tier.WARP, 4, 32, 12, 4, 1, 0, Access.ALIGNED)),
    "staged": (BF16, 37, Plan(Tier.STAGED, 4, 32, 12, 4, 1, 1, Access.PREDICATED)),
    "staged, a lane": (BF16, 26, Plan(Tier.STAGED, 1, 128, 28, 4, 1, 2, Access.PREDICATED)),
    "block": (BF16, 37, Plan(Tier.BLOCK, 32, 1, 16, 8, 1, 0, Access.PREDICATED)),
    "block of two warps": (F16, 519, Plan(Tier.BLOCK, 64, 1, 16, 8, 1, 0, Access.PREDICATED)),
    "block of two warps, aligned": (F32, 520, Plan(Tier.BLOCK, 64, 1, 12, 4, 1, 0, Access.ALIGNED)),
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
    "softcap": {"high softcap", "scale", "mask", "window"},  # in half types its slope is computed from the result
    "softcap, bias": {"high softcap", "bias", "sink"},
}
FROM_RESULT = ("softcap", "softcap, bias")


def of_each(ways: dict[str, Any], *quick: str) -> list[Any]:
    """Each of the ways with each of the PARTS. All but one case of each of the `quick` ways are slow."""
    cases = [(name, parts, k % len(PARTS) == m) for k, name in enumerate(ways) for m, parts in enumerate(PARTS)]
    return [(name, parts) if name in quick and is_one else slow(name, parts) for name, parts, is_one in cases]


COLUMNS = {  # n elements of columns of which `inner` lie side by side
    "aligned": (BF16, 37, 32, Plan(Tier.COLUMNS, 4, 8, 40, 8, 1, 0, Access.ALIGNED)),
    "predicated": (F16, 37, 33, Plan(Tier.COLUMNS, 33, 3, 14, 1, 1, 0, Access.PREDICATED)),
    "shifted": (BF16, 37, 33, Plan(Tier.COLUMNS, 10, 4, 40, 4, 1, 0, Access.SHIFTED)),
    "strided": (F32, 37, 33, Plan(Tier.COLUMNS, 32, 4, 10, 1, 1, 0, Access.STRIDED)),
    "shared memory": (BF16, 37, 32, Plan(Tier.COLUMNS, 8, 4, 16, 4, 1, 8, Access.ALIGNED)),
    "shared memory, shifted": (F32, 37, 33, Plan(Tier.COLUMNS, 10, 4, 16, 4, 1, 8, Access.SHIFTED)),
    "shared memory, shifted, half types": (BF16, 45, 33, Plan(Tier.COLUMNS, 10, 4, 16, 4, 1, 8, Access.SHIFTED)),
    "cluster": (F16, 37, 32, Plan(Tier.COLUMNS, 4, 8, 24, 8, 2, 0, Access.ALIGNED)),
    "grid": (BF16, 37, 32, Plan(Tier.COLUMNS_GRID, 4, 8, 24, 8, 2, 0, Access.ALIGNED)),
    "twopass": (F32, 37, 32, Plan(Tier.COLUMNS_TWOPASS, 8, 4, 16, 4, 1, 0, Access.ALIGNED)),
    "twopass, grid": (F16, 37, 33, Plan(Tier.COLUMNS_TWOPASS, 33, 3, 4, 1, 2, 0, Access.PREDICATED)),
    "staged": (BF16, 7, 33, Plan(Tier.COLUMNS_STAGED, 34, 1, 14, 2, 1, 2, Access.ALIGNED)),
    "staged, elements": (F32, 37, 32, Plan(Tier.COLUMNS_STAGED, 32, 3, 14, 1, 1, 1, Access.ALIGNED)),
    "staged, float64": (F64, 9, 7, Plan(Tier.COLUMNS_STAGED, 14, 3, 3, 1, 1, 2, Access.ALIGNED)),
    "staged, vectors": (F16, 5, 32, Plan(Tier.COLUMNS_STAGED, 16, 1, 20, 4, 2, 1, Access.ALIGNED)),
}


@emulated
@pytest.mark.parametrize(
    ("name", "parts"),
    of_each(
        FORCED, "warp", "staged", "block of two warps, aligned", "block, shared memory, float32", "cluster", "twopass"
    ),
)
def test_each_tier_of_rows_in_the_emulator(emulator, name, parts, tmp_path):
    """No kernel reads or writes beside its tensors, and each gives what the definition does, forward and backward."""
    dtype, n, plan = FORCED[name]
    of_gradient = plan
    if plan.tier in (Tier.BLOCK, Tier.CLUSTER):  # a gradient has no vectors in shared memory
        each = -(-(n + plan.vec_size) // (plan.vec_size * plan.threads_per_row * plan.blocks_per_row))
        of_gradient = plan._replace(items_per_thread=each * plan.vec_size, smem_vecs=0)
    call = drawn(dtype, (*ROWS, n), PARTS[parts], len(name))
    solve_in_emulator(emulator, call, 2, parts, plan, of_gradient)
    # Other architectures take the same sources, and no kernel spills by much.
    kernels = [kernel for kernel in emulator.kernels_run if any("SCORE_PARTS" in word for word in kernel[1])]
    for (source, defines), arch in itertools.product(kernels[-2:], (80, 120) if parts == "bias" else (90,)):
        if plan.tier != Tier.CLUSTER or arch >= 90:
            native.compile_source(source, defines, arch, tmp_path / "kernel.cubin")
            assert read_usage(tmp_path / "kernel.cubin")["STACK"] <= 80


@emulated
@pytest.mark.parametrize(("name", "parts"), of_each(COLUMNS, "shifted", "grid", "twopass, grid", "staged"))
def test_each_way_to_take_columns_in_the_emulator(emulator, name, parts):
    dtype, n, inner, plan = COLUMNS[name]
    call = drawn(dtype, (2, n, inner), PARTS[parts], len(name))
    solve_in_emulator(emulator, call, 1, parts, plan, plan)


@emulated
@pytest.mark.parametrize(("x_at", "y_at"), [(0, 1), (2, 1), (1, 2)])
def test_results_that_begin_within_vectors(emulator, x_at, y_at):
    """A half result is planned as a float32 one would be, but its elements have their own places in vectors."""
    x, y = (torch.zeros(2 * 301 + at, dtype=BF16)[at:].view(2, 301) for at in (x_at, y_at))
    x.copy_(maker(BF16, seed=4)(2, 301))
    emulator.scored("softmax", {"input": x, "result": y}, [1], (0.5, 0.0, -math.inf))
    assert_close(y, torch.softmax(x.double() * 0.5, -1), BF16)


@emulated
def test_columns_keep_their_plan(emulator):
    """A thread remembers the plans of its latest calls. Calls that alternate get their own plans, which other sizes and
    tensors would not fit, and need no other kernel the second time."""
    for round_of_calls in range(2):
        before = len(emulator.kernels_run)
        for parts, size in (("number", 33), ("bias", 33), ("number", 64)):
            solve_in_emulator(emulator, drawn(BF16, (2, 9, size), PARTS[parts], 3), 1, parts)
        assert bool(emulator.kernels_run[before:]) == (round_of_calls == 0)


WINDOWS = ((2**62, 0, -90), (9, 4, -50), (2, 2, 60))
SKIPPING = {  # longer columns
    "aligned": {"items_per_thread": 136},
    "shared memory": {"smem_vecs": 32},
    "cluster": {"items_per_thread": 72},
    "twopass": {},
}


@emulated
@thin_product(12, name=SKIPPING, window=WINDOWS)
def test_columns_outside_the_window_are_not_read_for_a_gradient(emulator, name, window):
    """What is there may be anything, where no column of a vector has an element inside. (left, right, offset)"""
    dtype, n, inner, plan = COLUMNS[name]
    n, plan = 136, plan._replace(**SKIPPING[name])
    left, right, offset = window
    distances = torch.arange(inner) - torch.arange(n)[:, None] - offset
    inside = (distances >= -left) & (distances <= right)
    y, g = (maker(dtype, seed=seed)(2, n, inner) for seed in (1, 2))
    y, dx = torch.where(inside, y, 0), torch.empty_like(y)
    spec, scores = Spec("softmax", [1], F64), Scores(1.0, 0.0, -math.inf, left, right, offset)
    want = scored.backward_arithmetic(g.double(), y.double(), None, SideTensors(), spec, scores)
    vectors = inside.view(n, -1, plan.vec_size)
    seen = vectors.any(-1, keepdim=True).expand(vectors.shape).reshape(n, inner)
    y, g = y.masked_fill(~seen, math.nan), g.masked_fill(~seen, math.nan)
    places = {"input": y, "grad": g, "result": dx}
    emulator.scored("softmax", places, [1], window=(-left, right, offset), plan=plan)
    assert_close(dx, want, dtype)


def solve_in_emulator(
    emulator: Any,
    call: tuple[Tensor, SideTensors, Scores],
    dim: int,
    parts: str,
    plan: Plan | None = None,
    of_gradient: Plan | None = None,
) -> None:
    x, side, scores = call
    dtype = x.dtype
    spec = Spec("log_softmax" if parts == "bias" else "softmax", [dim], None, False, "cpu")
    double = SideTensors(*(None if t is None else t.double() for t in side[:-1]), side.mask)
    want, want_lse = scored.forward_arithmetic(x.double(), double, spec, scores)
    place = (lambda t: t.clone()) if plan and plan.access == Access.ALIGNED else inner
    x, y = place(x), place(x)
    names, own = ("scale", "bias", "alibi", "sink", "mask"), F64 if dtype is F64 else F32
    tensors = {key: t for key, t in zip(names, scored._kernel_tensors(x, side, own), strict=True) if t is not None}
    if side.sink is not None or parts in FROM_RESULT:
        tensors["lse"] = torch.empty(want_lse.shape, dtype=own)
    numbers = scores.factor, scores.softcap, scores.sink
    rest = spec.dims, numbers, window_of(scores, x), scores.empty_is_zero
    emulator.scored(spec.function, {"input": x, "result": y, **tensors}, *rest, plan)
    assert_close(y, want, dtype)
    if "lse" in tensors:
        assert_close(tensors["lse"], want_lse, own)
    g, dx = place(maker(dtype, seed=9)(*x.shape)), place(x)
    given = {key: t for key, t in tensors.items() if key in ("scale", "mask")} | {"input": y, "grad": g, "result": dx}
    if scores.softcap:
        given["of_cap"] = x
    if parts in FROM_RESULT and dtype in (F16, BF16):
        given |= {key: t for key, t in tensors.items() if key in ("lse", "bias")}
    wide = x.double() if scores.softcap else None
    want = scored.backward_arithmetic(g.double(), y.double(), wide, double, spec._replace(dtype=F64), scores)
    emulator.scored(spec.function, given, *rest, of_gradient)
    assert_close(dx, want, dtype)


# (dtype, sizes of the input, of the bias, parts of its gradient): lanes of a warp and blocks, rows in whole vectors and
# in others, of which the last and the first vectors are two rows'. The last part of four rows in three has none.
SHARED = {
    "warp": (BF16, (4, 3, 256), (1, 3, 256), 1),
    "warp, parts": (F32, (4, 3, 256), (1, 3, 256), 3),
    "warp, unaligned": (F32, (3, 4, 261), (1, 4, 261), 1),
    "warp, unaligned, parts": (F16, (3, 8, 269), (1, 8, 269), 3),
    "one row": (BF16, (5, 8, 264), (1, 1, 264), 7),
    "all rows": (F64, (2, 3, 260), (2, 3, 260), 1),
    "block": (F16, (3, 1, 1104), (1, 1, 1104), 2),
    "block, unaligned": (BF16, (2, 8, 1101), (1, 8, 1101), 1),
}


@emulated
@thin_product(10, name=SHARED, parts=["plain", *PARTS], function=["softmax", "log_softmax"])
def test_the_gradient_of_a_shared_bias_in_the_emulator(emulator, name, parts, function):
    """With the gradient of the input, in one launch; parts are sums in the type of the computation."""
    dtype, sizes, of_bias, count = SHARED[name]
    given = PARTS.get(parts, set()) - {"bias", "bias transposed", "alibi", "sink", "empty"}
    x, side, scores = drawn(dtype, sizes, given, len(name))
    place = inner if "unaligned" in name else torch.clone
    wide = F64 if dtype is F64 else F32
    double = SideTensors(*(None if t is None else t.double() for t in side[:-1]), side.mask)
    spec = Spec(function, [2], F64)
    x, y = place(x), place(scored.forward_arithmetic(x.double(), double, spec, scores)[0].to(dtype))
    g, dx = place(maker(dtype, seed=9)(*sizes)), place(x)
    sums = torch.full((count, *of_bias), math.nan, dtype=wide if count > 1 else dtype)
    names = ("scale", "bias", "alibi", "sink", "mask")
    tensors = {key: t for key, t in zip(names, scored._kernel_tensors(y, side, wide), strict=True) if t is not None}
    tensors |= {"input": y, "grad": g, "result": dx, "bias": sums[0]} | ({"of_cap": x} if scores.softcap else {})
    numbers = scores.factor, scores.softcap, scores.sink
    emulator.scored(function, tensors, [2], numbers, window_of(scores, x), bias_parts=count)
    wide_x = x.double() if scores.softcap else None
    want = scored.backward_arithmetic(g.double(), y.double(), wide_x, double, spec, scores)
    assert_close(dx, want, dtype)
    plain = scores._replace(factor=1.0, softcap=0.0)
    of_scores = scored.backward_arithmetic(g.double(), y.double(), None, SideTensors(mask=side.mask), spec, plain)
    want = of_scores.sum_to_size(of_bias)
    assert_close(sums.double().sum(0).to(dtype), want, dtype)
    source, defines = emulator.kernels_run[-1]
    assert source == "rows_bias_grad.cu"
    if parts == "plain":  # a warm-up has it
        listed = native.call_kernels(f"{function} bias", native.PASSES[1], (dtype, dtype), -1, 90, (sizes[2],), False)
        assert " ".join((source, *defines)) in listed


# (dims, dtype, n, of_scores): one, two and four vectors of a thread.
PLACES = [
    ([2], F16, 33, False),
    ([1], F32, 37, False),
    ([0, 2], BF16, 64, False),
    ([1], BF16, 64, False),
    ([1, 2], F64, 3, True),
    ([2], BF16, 64, True),
]


@emulated
@thin_product(8, parts=PARTS, place=PLACES)
def test_the_gradient_of_logsumexp_in_the_emulator(emulator, parts, place):
    """Of rows that begin anywhere, of columns, and where all or nothing is masked out."""
    dims, dtype, n, of_scores = place
    x, side, scores = drawn(dtype, (2, 5, n), PARTS[parts], len(parts))
    wide = F64 if dtype is F64 else F32
    double = SideTensors(*(None if t is None else t.double() for t in side[:-1]), side.mask)
    spec = Spec("logsumexp", dims, F64, True)
    lse = scored.forward_arithmetic(x.double(), double, spec, scores)[1].to(wide)
    x, g = (x if n == 64 else inner(x)), maker(wide, seed=9)(*lse.shape)
    dx = (torch.empty_like(x) if n == 64 else inner(x)).to(wide if of_scores else dtype)
    tensors = dict(zip(("scale", "bias", "alibi", "sink", "mask"), scored._kernel_tensors(x, side, wide), strict=True))
    tensors |= {"input": x, "grad": g.expand(x.shape), "lse": lse.expand(x.shape), "result": dx, "sink": None}
    tensors = {name: t for name, t in tensors.items() if t is not None}
    numbers = scores.factor, scores.softcap, scores.sink
    call = "logsumexp", tensors, dims, numbers, window_of(scores, x), scores.empty_is_zero
    emulator.scored(*call, of_scores=of_scores)
    want = scored.logsumexp_backward_arithmetic(g.double(), lse.double(), of_scores, x.double(), double, spec, scores)
    assert_close(dx, want, dtype)


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


@emulated
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("sizes", [(3, 9, 40), (60, 2, 171), (4, 300, 17)], ids=str)
def test_one_sink_for_all_columns(emulator, sizes, dtype):
    """A tensor with a single number, and one with a number for each slice, all alike."""
    x, results = maker(dtype, seed=3)(*sizes), []
    for shape in ((1, 1, 1), (sizes[0], 1, 1)):
        sink, y = torch.full(shape, 0.7), torch.empty_like(x)
        emulator.scored("softmax", {"input": x, "result": y, "sink": sink}, [1], (0.5, 0.0, -math.inf))
        results.append(y)
    scores = Scores(0.5, 0.0, -math.inf, None, None, None)
    want, _ = scored.forward_arithmetic(x.double(), SideTensors(sink=sink.double()), Spec("softmax", [1], F64), scores)
    assert_close(results[0], want, dtype)
    assert torch.equal(*results)


# On a GPU -------------------------------------------------------------------------------------------------------------

LENGTHS = (1, 3, 8, 33, 100, 127, 256, 600, 1000, 1023, 2047, 2048, 3000, 4097, 8192, 20001, 50257, 131073, 600000)


SIZES = (  # of columns
    *((n, inner) for n in (1, 5, 33, 128, 700, 5001) for inner in (1, 7, 32, 33, 130)),
    *((2, 40_000), (3, 4099), (1000, 1024), (1023, 999), (40_000, 16), (300_000, 3), (70_001, 72)),
)


def check_on_a_gpu(call: tuple[Tensor, SideTensors, Scores], dim: int, place: Any, keepdim: bool) -> None:
    x, side, scores = call
    dtype = x.dtype
    x, side = place(x).cuda(), SideTensors(*(None if t is None else t.cuda() for t in side))
    double = SideTensors(*(None if t is None else t.double() for t in side[:-1]), side.mask)
    for function in ("softmax", "log_softmax", "logsumexp"):
        spec = Spec(function, [dim], None, keepdim, "cuda")
        want, want_lse = scored.forward_arithmetic(x.double(), double, spec, scores)
        launched: Any = scored._launch_forward(x, side, spec, scores)
        assert launched is not None
        y, lse = launched
        assert_close(y, want, dtype)
        if side.sink is not None:
            assert_close(lse, want_lse, F32 if dtype is not F64 else F64)
        if function == "logsumexp" or (function == "log_softmax" and scores.empty_is_zero):
            continue
        g, of_cap = maker(dtype, seed=9)(*x.shape).cuda(), x if scores.softcap else None
        dx = torch.empty_like(y)
        scale, bias, _, _, mask = scored._kernel_tensors(y, side, F64 if dtype is F64 else F32)
        number = scored._NUMBERS_OF[function]
        cap_lse = lse if scored.caps_from_result(x, side, spec, scores) else None
        assert scored._KERNELS[1](g, y, of_cap, cap_lse, scale, bias, mask, dx, number, spec.dims, *scores)
        wide = None if of_cap is None else x.double()
        want = scored.backward_arithmetic(g.double(), y.double(), wide, double, spec._replace(dtype=F64), scores)
        torch.testing.assert_close(dx.double(), want, equal_nan=True, rtol=TOLERANCE[dtype], atol=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("dtype", [F32, BF16, F16, F64], ids=str)
def test_rows_of_any_length_on_a_gpu(dtype, n):
    draw = random.Random(n)
    for parts in PARTS.values():
        place = inner if n % 3 else torch.clone
        check_on_a_gpu(drawn(dtype, (*ROWS, n), parts, n), 2, place, draw.random() < 0.5)


@pytest.mark.gpu
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", [F32, BF16, F16, F64], ids=str)
def test_columns_of_any_size_on_a_gpu(dtype, size):
    """Also of dims that lie in another order in memory."""
    places = torch.clone, inner, inner, transposed, torch.clone, inner
    for parts, place in zip(PARTS.values(), places, strict=True):
        check_on_a_gpu(drawn(dtype, (2, *size), parts, sum(size)), 1, place, True)


# (sizes of the input, of the bias): lanes of a warp and blocks, whole vectors and others, and sums in parts.
BIASES = (
    *(((4, 6, n), (1, 6, n)) for n in (256, 264, 1000, 2048, 8200)),
    *(((3, 8, n), (1, 8, n)) for n in (257, 333, 1023, 4097)),
    ((40, 64, 1008), (1, 1, 1008)),
    ((64, 8, 1024), (64, 1, 1024)),
    ((2, 3, 512), (2, 3, 512)),
)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", BIASES, ids=str)
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("parts", [(), ("mask", "window"), ("softcap", "scale")], ids=str)
def test_the_gradient_of_a_bias_on_a_gpu(dtype, sizes, parts):
    """In the launch of the input's, twice with the same bits."""
    of_x, of_bias = sizes
    x, side, scores = drawn(dtype, of_x, parts, of_x[2])
    double = SideTensors(*(None if t is None else t.double() for t in side[:-1]), side.mask)
    spec = Spec("softmax", [2], dtype, False, "cuda")
    y = scored.forward_arithmetic(x.double(), double, spec._replace(dtype=F64), scores)[0].to(dtype)
    g, of_cap = maker(dtype, seed=9)(*of_x), x if scores.softcap else None
    on_gpu = SideTensors(*(None if t is None else t.cuda() for t in side))
    given = g.cuda(), y.cuda(), None if of_cap is None else of_cap.cuda(), on_gpu, spec, scores, dtype, (of_bias, dtype)
    made, again = scored._launch_bias_grad(*given), scored._launch_bias_grad(*given)
    assert made is not None
    assert again is not None
    wide = None if of_cap is None else x.double()
    want = scored.backward_arithmetic(g.double(), y.double(), wide, double, spec._replace(dtype=F64), scores)
    assert_close(made[0].cpu(), want, dtype)
    plain = scores._replace(factor=1.0, softcap=0.0)
    of_scores = scored.backward_arithmetic(
        g.double(), y.double(), None, SideTensors(mask=side.mask), spec._replace(dtype=F64), plain
    )
    assert_close(made[1].cpu(), of_scores.sum_to_size(of_bias), dtype)
    assert all(a.equal(b) for a, b in zip(made, again, strict=True))


def transposed(t: Tensor) -> Tensor:
    return t.transpose(0, 2).contiguous().transpose(0, 2)
