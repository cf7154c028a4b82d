"""The Triton engine, with the state and the gradients: every tier forced on small shapes under Triton's interpreter and
on a GPU, and on a GPU its own plans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lib.modes import Operators
from lib.support import (
    DTYPES,
    FUNCTIONS,
    LAYOUTS,
    SOFTMAXES,
    maker,
    ours,
    peak,
    same,
    slow,
    some_tuples,
    thin_tuples,
    tuples,
)
from lib.triton import (
    BF16,
    F16,
    F32,
    F64,
    INF,
    NAN,
    SOME_DTYPES,
    TIERS,
    Case,
    assert_case,
    case,
    check,
    name_of,
    needs_triton,
    special,
)
from lib.triton import launch as launch_case
from onepass import reference
from onepass.triton import launch

pytestmark = needs_triton
TWO_TIERS = pytest.mark.parametrize("tier", ["rows of 4 a program, split launch", "online"])
TYPES = [(a, b) for a in DTYPES for b in DTYPES if a != b]
both_directions = pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
CALLS = [*((f, False) for f in (*FUNCTIONS, "state")), *((f, True) for f in FUNCTIONS)]
values_and_gradients = pytest.mark.parametrize(
    ("function", "backward"), [(f, backward) for backward in (False, True) for f in FUNCTIONS]
)


def special_case(function: str, dtype: torch.dtype, device: str, backward: bool, n: int = 26) -> Case:
    x = special(n, dtype, device)
    return case(function, -x if function == "softmin" else x, backward=backward)


def check_special(runs: Any, given: Case, tier: str | None) -> None:
    """NaN where the definition has NaN, and nowhere else."""
    got = check(runs, given, TIERS.get(tier))
    if given.backward:
        assert bool(got.isnan().any())
        assert bool(got[0].isfinite().all()), "rows do not spoil each other"


def is_quick(function: str, backward: bool, tier: str, dtype: torch.dtype) -> bool:
    """A launch in parts goes by the kernel of a whole one, so that special rows of one function are enough."""
    in_parts = (tier, dtype) == SOME_DTYPES[6]
    is_one = (tier, dtype) in [*SOME_DTYPES, ("row", BF16)] if backward else (tier, dtype) in SOME_DTYPES
    return is_one and (not in_parts or backward or function == "softmax")


CASES = [(*call, tier, dtype) for call in CALLS for tier in TIERS for dtype in DTYPES]
QUICK = [each for each in CASES if is_quick(*each)][::7]


@pytest.mark.parametrize(
    ("function", "backward", "tier", "dtype"), [each if each in QUICK else slow(*each) for each in CASES], ids=name_of
)
def test_values_and_special_rows(runs, function, backward, dtype, tier):
    on_gpu = runs.device == "cuda"
    if on_gpu or not backward or (tier, dtype) in SOME_DTYPES:
        check(runs, case(function, maker(dtype, runs.device)(6, 23), backward=backward), TIERS[tier])
    some = [("row", BF16), ("online", F32)] if backward else SOME_DTYPES[::2]
    if on_gpu or (tier, dtype) in some:
        check_special(runs, special_case(function, dtype, runs.device, backward), tier)


@pytest.mark.parametrize("n", [1, slow(2), slow(7), 8, 9, slow(15), slow(16), 17, slow(31), slow(32)])
@TWO_TIERS
@pytest.mark.parametrize(
    ("function", "backward"), [("softmax", False), ("logsumexp", False), ("state", False), ("softmax", True)]
)
def test_row_lengths_about_the_edges_of_a_tile(runs, function, backward, tier, n):
    make = maker(BF16 if backward else F32, runs.device)
    check(runs, case(function, make(5 if backward else 3, n), backward=backward), TIERS[tier])
    if function == "state":  # a tile without a padded lane has nothing but NaN
        check(runs, case(function, torch.full((2, n), torch.nan, device=runs.device)), TIERS[tier])


@pytest.mark.parametrize("function", ["log_softmax", "logsumexp"])
def test_gradients_of_rows_longer_than_the_row_tier(runs, function):
    check(runs, case(function, maker(BF16, runs.device)(1, 16400), backward=True))


TWO_TYPES = [
    (*call, *types)
    for call in (
        *((function, tier, False) for function in SOFTMAXES for tier in ("row", "online")),
        *(("log_softmax", "row", True), ("softmin", "online", True)),
    )
    for types in TYPES
]


@pytest.mark.parametrize(
    ("function", "tier", "backward", "dtype", "to"),
    [slow(*each) if (k + k // len(TYPES)) % 8 else each for k, each in enumerate(TWO_TYPES)],  # each pair of types
    ids=name_of,
)
def test_input_and_result_of_two_types(runs, function, tier, backward, dtype, to):
    """The input is rounded to the type of the result first; values are coarse enough for that to show."""
    x = maker(dtype, runs.device, scale=2.0 if backward else 30.0)(3, 23)
    assert check(runs, case(function, x, dtype=to, backward=backward), TIERS[tier]).dtype is to


@pytest.mark.parametrize(("dtype", "of_grad"), [(F32, F64), (BF16, F32), (F64, BF16)], ids=name_of)
def test_gradient_of_another_type_than_the_result(runs, dtype, of_grad):
    given = case("softmax", maker(dtype, runs.device)(3, 23), backward=True)
    grad, *saved = given.operands
    check(runs, given._replace(operands=(grad.to(of_grad), *saved)), TIERS["row"])


@TWO_TIERS
@pytest.mark.parametrize("dtype", [BF16, F16], ids=name_of)
def test_gradient_of_logsumexp_of_half_types_in_float32(runs, dtype, tier):
    given = case("logsumexp", maker(dtype, runs.device)(5, 23), backward=True)
    x = given.operands[1]
    lse = torch.logsumexp(x.double(), 1, keepdim=True).float()
    given = given._replace(operands=(maker(F32, runs.device)(5, 1), x, lse))
    assert check(runs, given, TIERS[tier]).dtype is dtype


def _reversed(t: Tensor) -> Tensor:
    turned = t.permute(tuple(range(t.dim()))[::-1])
    return turned.contiguous().permute(tuple(range(t.dim()))[::-1])


SOME_OF_LOGSUMEXP = ("0-d", "middle", "permuted and sliced", "expanded middle", "size 1 dims", "empty middle")
LAYOUT_CALLS = [(("log_softmax", ("logsumexp", "state")[k % 2]), False, name) for k, name in enumerate(LAYOUTS)]
LAYOUT_CALLS += [(("softmax", "logsumexp"), True, name) for name in LAYOUTS]


@pytest.mark.parametrize(
    ("function", "backward", "layout"),
    thin_tuples(((f, backward, name) for many, backward, name in LAYOUT_CALLS for f in many), 5),
)
def test_layouts_and_dims(runs, function, backward, layout):
    on_gpu, note = runs.device == "cuda", f", layout {layout}"
    x = LAYOUTS[layout](maker(BF16 if backward else F32, runs.device))
    if backward and function == "logsumexp" and layout not in SOME_OF_LOGSUMEXP and not on_gpu:
        return
    for dims in tuples(x) if on_gpu else some_tuples(x):
        given = case(function, x, dims, backward=backward)
        check(runs, given, note=note)
        if backward and (on_gpu or layout == "gaps"):
            grad, *saved = given.operands
            forms = [grad.new_tensor(0.7).expand(grad.shape), _reversed(grad), torch.stack([grad, grad], -1)[..., 0]]
            for d in (d for d, size in enumerate(grad.shape) if size):  # one number a row, or a column
                forms.append(grad.narrow(d, 0, 1).expand(grad.shape))
            for g in forms:
                check(runs, given._replace(operands=(g, *saved)), note=f"{note}, strides {g.stride()}")


@pytest.mark.parametrize("dim", [slow(0), 1, slow(2)])
@pytest.mark.parametrize(
    ("backward", "to", "tier"),
    [(False, to, tier) for to in (F32, BF16) for tier in (None, "row", "online")]
    + [(True, F32, tier) for tier in ("rows of 4 a program, split launch", "online")],
    ids=name_of,
)
def test_strided_result_is_written_where_it_lies_and_nowhere_else(runs, to, dim, tier, backward):
    given = case("softmax", maker(F32, runs.device)(4, 3, 5), (dim,), to, backward)
    base = torch.full((12, 5, 8), 777.0, dtype=to, device=runs.device)
    given = given._replace(out=base[1::2, ::1, ::2].permute(2, 1, 0)[:, 1:4, :5])
    got = check(runs, given, TIERS.get(tier))
    assert got.stride() == given.out.stride()
    whole = torch.as_strided(got, (base.numel(),), (1,), 0)
    assert int((whole != 777.0).sum()) == got.numel()


@TWO_TIERS
def test_strided_states(runs, tier):
    x = special(26, BF16, runs.device)
    whole = torch.full((2, len(x), 1, 3), 777.0, device=runs.device)
    got = check(runs, Case("state", (x,), whole[..., 0], (1,)), TIERS[tier])
    assert bool((got.as_strided(whole.shape, whole.stride(), 0)[..., 1:] == 777).all())


@TWO_TIERS
@pytest.mark.parametrize(("layout", "dim"), [("contiguous", 0), ("contiguous", 1), ("transposed", 1), ("stepped", 0)])
def test_in_place(runs, layout, dim, tier):
    x = LAYOUTS[layout](maker(F32, runs.device))
    given = Case("softmax", (x.clone(),), x, (dim,))
    assert_case(runs.run(launch_case, given._replace(operands=(x,)), TIERS[tier]), given)


@pytest.mark.parametrize("tier", ["row", "online"])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=name_of)
def test_no_probability_exceeds_one(runs, dtype, tier):
    steps = torch.arange(8.0)[:, None] * 17.37
    x = torch.where(torch.arange(31) == 5, steps, -steps).to(dtype).to(runs.device)
    assert float(check(runs, case("softmax", x), TIERS[tier]).max()) <= 1.0


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("function", ["softmax", "log_softmax", "logsumexp"])
def test_float32_is_as_accurate_as_torch(runs, function, tier):
    rows = [torch.randn(31) * 3, torch.randn(31) + 1000, torch.randint(-40, 40, (31,)), torch.rand(31) * 80]
    x = torch.stack([row.float() for row in rows]).to(runs.device)
    keepdim = [True] if function == "logsumexp" else []
    exact = getattr(reference, function)(x, 1, *keepdim)
    scale = exact.abs() if function == "softmax" else exact.abs().clamp(min=1)
    got = runs.run(launch_case, case(function, x), TIERS[tier])
    mine, theirs = (
        float(((y - exact).abs() / scale).max()) / torch.finfo(F32).eps
        for y in (got, getattr(torch, function)(x, 1, *keepdim))
    )
    assert mine <= max(1.25 * theirs, 2.0)


@pytest.mark.parametrize("dims", [(0,), (1,), (0, 2)], ids=str)
def test_gradients_copy_nothing(monkeypatch, function, dims):
    """The kernel is given the operands' own memory, and no operator that makes anything has been called before."""
    launched = []

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *given, **options: launched.append(given)

    monkeypatch.setattr(launch, "_kernel", lambda *call: (Kernel(), {}))
    given = case(function, maker(F32)(4, 3, 5).permute(2, 0, 1), dims, backward=True)
    grad, *saved = given.operands
    given = given._replace(operands=(torch.tensor(0.7).expand(grad.shape), *saved))
    with Operators() as mode:
        launch_case(given)
    lse = saved[1] if function == "logsumexp" else None
    (passed,) = launched
    for tensor, expected in zip(passed, (saved[0], given.out, given.operands[0], lse), strict=False):
        assert tensor is expected
    assert all(operator.is_view for operator in mode.seen)


@TWO_TIERS
def test_special_values_of_the_gradient(runs, function, tier):
    given = case(function, maker(F32, runs.device)(8, 31), backward=True)
    g, y = given.operands[:2]
    if function in ("softmax", "softmin"):
        y[1:3, :24] = 0.0  # masked: whatever is finite there gives 0
    g[1], g[2, -1:], g[3, -1:], g[4, 0] = 3e38, INF, -INF, NAN
    g[5, 0], g[5, -1] = INF, -INF
    got = runs.run(launch_case, given, TIERS[tier])
    # In float32, where a sum of 3e38 is infinite.
    if function == "logsumexp":
        want = g * (y - given.operands[2]).exp()
    elif function == "log_softmax":
        want = g - y.exp() * g.sum(1, keepdim=True)
    else:
        want = y * (g - (g * y).sum(1, keepdim=True)) * (1 if function == "softmax" else -1)
    assert same(got.isnan(), want.isnan())
    assert same(got.isinf(), want.isinf())
    assert bool(got[6:].isfinite().all()), "rows do not spoil each other"
    if function in ("softmax", "softmin"):
        assert not bool(got[1, :24].any())


ONE, ROW = torch.zeros(2, 37), torch.zeros(2, 1)


@pytest.mark.parametrize(
    ("function", "operands", "out", "plan", "message"),
    [
        ("softplus", (ONE, ONE), ONE, None, "gradients of softmax, log_softmax, softmin, logsumexp, got 'softplus'"),
        ("state", (ONE, ONE), ONE, None, "got 'state'"),
        ("logsumexp", (ONE, ONE), ONE, None, "its input and result, got 1 tensors"),
        ("softmax", (ONE,), ONE, None, "its result, got 0 tensors"),
        ("softmax", (ROW, ONE), ONE, None, r"its gradient has shape \[2, 37\] here, got \[2, 1\]"),
        ("softmax", (ONE, ONE), ONE.t(), None, r"the input's gradient has shape \[2, 37\] here, got \[37, 2\]"),
        ("logsumexp", (ROW, ONE, ONE), ONE, None, r"the result has shape \[2, 1\] here, got \[2, 37\]"),
        ("softmax", (ONE.to("meta"), ONE), ONE, None, "gradient is on meta, what .* saved on cpu"),
        ("softmax", (ONE, ONE), ONE, TIERS["row"], "needs block >= n = 37"),
    ],
)
def test_what_is_not_a_gradient_is_refused(function, operands, out, plan, message):
    with pytest.raises(ValueError, match=message):
        launch_case(Case(function, operands, out, (1,), True), plan)


# On a GPU, by the engine's own plans ----------------------------------------------------------------------------------

LENGTHS = [1, 3, 16, 200, 256, 512, 781, 1024, 2048, 4096, 8192, 16384, 16385, 32768, 32769, 50257, 131072, 300001]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [F32, BF16], ids=name_of)
@pytest.mark.parametrize("n", LENGTHS)
@values_and_gradients
def test_row_lengths(gpu, function, backward, dtype, n):
    check(gpu, case(function, maker(dtype, gpu.device)(max(3, min(3000, 1 << 18) // n + 1), n), backward=backward))


@pytest.mark.gpu
@both_directions
def test_bits_are_the_same_from_run_to_run_and_at_any_number_of_rows(gpu, backward):
    for n in (16, 200, 208, 4096, 50257, 65536):
        given = case("softmax", maker(F32, gpu.device)(300, n), backward=backward)
        whole = check(gpu, given).clone()
        assert torch.equal(whole, launch_case(given))
        for rows in (slice(0, 1), slice(3, 4), slice(5, 12)):
            part = given._replace(operands=tuple(t[rows] for t in given.operands), out=given.out[rows])
            assert torch.equal(whole[rows], launch_case(part))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(2**31 // 16 + 5, 16), (3, 2**30 + 7)])
def test_more_than_2_to_the_31_elements(gpu, room, shape):
    x = torch.zeros(shape, dtype=F16, device=gpu.device)
    x[-1] = torch.arange(shape[1], device=gpu.device) % 3
    out = launch_case(Case("log_softmax", (x,), torch.full_like(x, 777.0), (1,)))
    for row in (0, shape[0] // 2, shape[0] - 1):
        part = x[row, :: max(1, shape[1] // 16)].double()
        want = part - reference.logsumexp(x[row].float(), 0)
        assert torch.allclose(out[row, :: max(1, shape[1] // 16)].double(), want, rtol=2e-3, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(2**31 // 16 + 5, 16), (3, 2**30 + 7)])
def test_gradients_of_more_than_2_to_the_31_elements(gpu, room, shape):
    y = torch.full(shape, 0.25, dtype=F16, device=gpu.device)
    grad = torch.zeros((), dtype=F16, device=gpu.device).expand(shape)
    dx = torch.full(shape, 777.0, dtype=F16, device=gpu.device)
    launch_case(Case("softmax", (grad, y), dx, (1,), True))
    assert not bool(dx[0].any() or dx[-1].any() or dx[shape[0] // 2].any())
    y.zero_()
    y[-1, -2:] = 0.5
    grad = torch.zeros(shape, dtype=F16, device=gpu.device)
    grad[-1, -1] = 8.0
    launch_case(Case("softmax", (grad, y), dx, (1,), True))
    assert dx[-1, -2:].tolist() == [-2.0, 2.0]
    assert int(dx.count_nonzero()) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [0, 1, (0, 2)], ids=str)
def test_autograd_allocates_the_gradient_alone(gpu, function, dim):
    x = maker(F32, gpu.device)(64, 128, 96).requires_grad_()
    y = ours(function)(x, dim, engine="triton")
    grad = torch.ones((), device=gpu.device).expand(y.shape)
    assert peak(lambda: torch.autograd.grad(y, x, grad, retain_graph=True), gpu.device) == x.nbytes
    (got,) = torch.autograd.grad(y, x, grad)
    want = torch.autograd.grad(ours(function)(x, dim, engine="cuda"), x, grad)[0] if torch.version.cuda else got
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@both_directions
def test_graph_replay(gpu, backward):
    given = case("softmax", maker(F32, gpu.device)(64, 40000), backward=backward)
    launch_case(given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch_case(given)
    given.operands[0].copy_(maker(F32, gpu.device, seed=1)(64, 40000))
    given.out.fill_(777.0)
    graph.replay()
    assert_case(given.out, given)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_device_that_is_not_current(gpu):
    x = maker(F32, "cuda:1")(5, 1000)
    assert torch.cuda.current_device() == 0
    check(gpu, case("softmax", x))
    assert torch.cuda.current_device() == 0
