"""The Triton engine, with the state: every tier forced on small shapes under Triton's interpreter and on a GPU, and on
a GPU its own plans."""

from __future__ import annotations

import pytest
import torch

from lib.support import DTYPES, FUNCTIONS, LAYOUTS, SOFTMAXES, assert_defined, maker, same, some_tuples, tuples
from lib.triton import (
    BF16,
    F16,
    F32,
    SOME_DTYPES,
    TIERS,
    assert_result,
    check,
    forward,
    name_of,
    needs_triton,
    poisoned,
    sorted_dims,
    special,
)
from onepass import reference

pytestmark = needs_triton
EVERY = (*FUNCTIONS, "state")
TWO_TIERS = pytest.mark.parametrize("tier", ["rows of 4 a program, split launch", "online"])
every_type = pytest.mark.parametrize(("dtype", "to"), [(a, b) for a in DTYPES for b in DTYPES if a != b], ids=name_of)


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("function", EVERY)
def test_values_and_special_rows(runs, function, dtype, tier):
    check(runs, function, maker(dtype, runs.device)(6, 23), plan=TIERS[tier])
    if runs.device == "cuda" or (tier, dtype) in SOME_DTYPES[::2]:
        x = special(dtype, runs.device)
        x = -x if function == "softmin" else x
        check(runs, function, x, plan=TIERS[tier])  # NaN where the definition has NaN, and nowhere else


@pytest.mark.parametrize("n", [1, 2, 7, 8, 9, 15, 16, 17, 31, 32])
@TWO_TIERS
@pytest.mark.parametrize("function", ["softmax", "logsumexp", "state"])
def test_row_lengths_about_the_edges_of_a_tile(runs, function, tier, n):
    check(runs, function, maker(F32, runs.device)(3, n), plan=TIERS[tier])
    if function == "state":  # a tile without a padded lane has nothing but NaN
        check(runs, function, torch.full((2, n), torch.nan, device=runs.device), plan=TIERS[tier])


@pytest.mark.parametrize("tier", ["row", "online"])
@pytest.mark.parametrize("function", SOFTMAXES)
@every_type
def test_input_is_rounded_to_the_type_of_the_result_first(runs, function, tier, dtype, to):
    x = maker(dtype, runs.device, scale=30.0)(3, 23)  # coarse enough for the rounding to show in every half type
    assert check(runs, function, x, plan=TIERS[tier], dtype=to).dtype is to


@pytest.mark.parametrize(
    ("function", "layout"),
    [("log_softmax", layout) for layout in LAYOUTS]
    + [(("logsumexp", "state")[k % 2], layout) for k, layout in enumerate(LAYOUTS)],
)
def test_layouts_and_dims(runs, function, layout):
    x = LAYOUTS[layout](maker(F32, runs.device))
    for spelled in tuples(x) if runs.device == "cuda" else some_tuples(x):
        check(runs, function, x, sorted_dims(x, spelled), note=f", layout {layout}")


@pytest.mark.parametrize("tier", [None, "row", "online"])
@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("to", [F32, BF16], ids=name_of)
def test_strided_result_is_written_where_it_lies_and_nowhere_else(runs, to, dim, tier):
    x = maker(F32, runs.device)(4, 3, 5)
    base = torch.full((12, 5, 8), 777.0, dtype=to, device=runs.device)
    out = base[1::2, ::1, ::2].permute(2, 1, 0)[:, 1:4, :5]
    assert out.shape == x.shape
    got = runs.run(forward, "softmax", x, out, (dim,), TIERS.get(tier))
    assert got.stride() == out.stride()
    assert_result("softmax", got, x, (dim,))
    whole = torch.as_strided(got, (base.numel(),), (1,), 0)
    assert int((whole != 777.0).sum()) == x.numel()


@TWO_TIERS
def test_strided_states(runs, tier):
    x = special(BF16, runs.device)
    whole = torch.full((2, len(x), 1, 3), 777.0, device=runs.device)
    got = runs.run(forward, "state", x, whole[..., 0], (1,), TIERS[tier])
    assert_result("state", got, x)
    assert bool((got.as_strided(whole.shape, whole.stride(), 0)[..., 1:] == 777).all())


@TWO_TIERS
@pytest.mark.parametrize(("layout", "dim"), [("contiguous", 0), ("contiguous", 1), ("transposed", 1), ("stepped", 0)])
def test_in_place(runs, layout, dim, tier):
    x = LAYOUTS[layout](maker(F32, runs.device))
    given = x.clone()
    assert_result("softmax", runs.run(forward, "softmax", x, x, (dim,), TIERS[tier]), given, (dim,))


def test_empty_results_and_rows(runs, function):
    for shape, dims in [((0, 5), (1,)), ((0, 5), (0,)), ((5, 0, 2), (1,)), ((0,), (0,))]:
        x = torch.empty(shape, device=runs.device)
        want = reference.logsumexp(x, dims, True) if function == "logsumexp" else x
        assert same(runs.run(forward, function, x, poisoned(function, x, dims), dims), want.to(F32))


@pytest.mark.parametrize("tier", ["row", "online"])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=name_of)
def test_no_probability_exceeds_one(runs, dtype, tier):
    steps = torch.arange(8.0)[:, None] * 17.37
    x = torch.where(torch.arange(31) == 5, steps, -steps).to(dtype).to(runs.device)
    assert float(check(runs, "softmax", x, plan=TIERS[tier]).max()) <= 1.0


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("function", ["softmax", "log_softmax", "logsumexp"])
def test_float32_is_as_accurate_as_torch(runs, function, tier):
    rows = [torch.randn(31) * 3, torch.randn(31) + 1000, torch.randint(-40, 40, (31,)), torch.rand(31) * 80]
    x = torch.stack([row.float() for row in rows]).to(runs.device)
    keepdim = [True] if function == "logsumexp" else []
    exact = getattr(reference, function)(x, 1, *keepdim)
    scale = exact.abs() if function == "softmax" else exact.abs().clamp(min=1)
    ours = runs.run(forward, function, x, poisoned(function, x, (1,)), (1,), TIERS[tier])
    mine, theirs = (
        float(((y - exact).abs() / scale).max()) / torch.finfo(F32).eps
        for y in (ours, getattr(torch, function)(x, 1, *keepdim))
    )
    assert mine <= max(1.25 * theirs, 2.0)


# On a GPU, by the engine's own plans ----------------------------------------------------------------------------------

LENGTHS = [1, 3, 16, 200, 256, 512, 781, 1024, 2048, 4096, 8192, 32768, 32769, 50257, 131072, 300001]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [F32, BF16], ids=name_of)
@pytest.mark.parametrize("n", LENGTHS)
def test_row_lengths(gpu, function, dtype, n):
    check(gpu, function, maker(dtype, gpu.device)(max(3, min(3000, 1 << 18) // n + 1), n))


@pytest.mark.gpu
@pytest.mark.parametrize("n", [26, 70001])
def test_special_values_by_the_engines_own_plan(gpu, function, dtype, n):
    x = special(dtype, gpu.device, n)
    x = -x if function == "softmin" else x
    check(gpu, function, x)  # NaN where the definition has NaN, and nowhere else


@pytest.mark.gpu
@pytest.mark.parametrize("n", [37, 50257])
@every_type
def test_types_by_the_engines_own_plan(gpu, dtype, to, n):
    check(gpu, "softmax", maker(dtype, gpu.device, scale=3.0)(4, n), dtype=to)


@pytest.mark.gpu
@pytest.mark.parametrize("n", [781, 50257])
@pytest.mark.parametrize("dim", [0, 1])
def test_large_in_place(gpu, n, dim):
    x = maker(F32, gpu.device)(64, n)
    given = x.clone()
    assert_result("softmax", forward("softmax", x, x, (dim,)), given, (dim,))


@pytest.mark.gpu
def test_bits_are_the_same_from_run_to_run_and_at_any_number_of_rows(gpu):
    for n in (16, 200, 208, 4096, 50257, 65536):
        x = maker(F32, gpu.device)(300, n)
        whole = check(gpu, "softmax", x)
        assert torch.equal(whole, check(gpu, "softmax", x))
        for rows in (slice(0, 1), slice(3, 4), slice(5, 12)):
            assert torch.equal(whole[rows], check(gpu, "softmax", x[rows]))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(2**31 // 16 + 5, 16), (3, 2**30 + 7)])
def test_more_than_2_to_the_31_elements(gpu, shape):
    if torch.cuda.mem_get_info()[0] < 12 * 2**30:
        pytest.skip("needs 12 GiB of free GPU memory")
    x = torch.zeros(shape, dtype=F16, device=gpu.device)
    x[-1] = torch.arange(shape[1], device=gpu.device) % 3
    out = forward("log_softmax", x, torch.full_like(x, 777.0), (1,))
    for row in (0, shape[0] // 2, shape[0] - 1):
        part = x[row, :: max(1, shape[1] // 16)].double()
        want = part - reference.logsumexp(x[row].float(), 0)
        assert torch.allclose(out[row, :: max(1, shape[1] // 16)].double(), want, rtol=2e-3, atol=1e-3)


@pytest.mark.gpu
def test_graph_replay(gpu):
    x, y = maker(F32, gpu.device)(64, 40000), torch.empty(64, 40000, device=gpu.device)
    forward("softmax", x, y, (1,))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        forward("softmax", x, y, (1,))
    x.copy_(maker(F32, gpu.device, seed=1)(64, 40000))
    y.fill_(777.0)
    graph.replay()
    assert_defined("softmax", y, x, 1)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_device_that_is_not_current(gpu):
    x = maker(F32, "cuda:1")(5, 1000)
    assert torch.cuda.current_device() == 0
    check(gpu, "softmax", x)
    assert torch.cuda.current_device() == 0
