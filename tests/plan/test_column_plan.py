"""The plans of rows that are not one piece of memory each, on a GPU; none is needed here."""

from __future__ import annotations

import pytest
import torch

import onepass
from lib.cpp import build, output
from lib.support import slow
from onepass import native

F32, F64, F16, BF16 = torch.float32, torch.float64, torch.float16, torch.bfloat16


def launch(x: torch.Tensor | tuple[int, ...], dim: int | tuple[int, ...], **more) -> dict:
    plan = onepass.explain(x, dim, device="h200", **more)
    return {"tier": plan.tier, **plan.launch}


# sizes, dim, dtype -> tier, edges, vector, whether blocks share columns (None: as the tables have it)
CHOICES = [
    ((16, 21, 512, 512), 1, F32, "columns", "aligned", 4, False),
    ((16, 21, 512, 512), 1, BF16, "columns", "aligned", 8, False),
    ((3, 19, 1024, 2048), 1, F32, "columns", "aligned", 4, False),
    ((3, 19, 1024, 2048), 1, F64, "columns", "aligned", 2, False),
    ((64, 32, 64, 64, 4), 1, F32, "columns", "aligned", 4, False),
    ((256, 256, 256), 0, BF16, "columns", "aligned", 8, None),
    ((32, 12, 512, 512), 2, F32, "columns", "aligned", 4, None),
    ((128, 197, 768), 1, F16, "columns", "aligned", 8, None),
    ((64, 1000, 14, 14), 1, F32, "columns", "aligned", 4, True),
    ((8, 4096, 4096), 1, BF16, "columns", "aligned", 8, True),
    ((4096, 4096), 0, F32, "columns", "aligned", 4, True),
    ((16384, 16384), 0, BF16, "columns", "aligned", 8, True),
    ((64, 1000, 14, 14), 1, BF16, "columns", "slab-aligned", 8, True),  # 196 columns: no whole number of vectors of 8
    ((256, 1000, 7, 7), 1, F32, "columns", "slab-aligned", 4, True),
    ((256, 1000, 7, 7), 1, BF16, "columns", "slab-aligned", 8, False),
    ((300, 200, 333), 1, F32, "columns", "aligned", 1, True),  # lines begin at any element
    ((300, 700, 333), 1, F32, "columns", "shifted", 4, True),
    ((40, 300, 777), 1, F32, "columns", "shifted", 2, True),
    ((40, 500, 1001), 1, BF16, "columns", "shifted", 4, True),
    ((3000, 300, 37), 1, BF16, "columns-smem", "slab", 4, False),
    ((20000, 5, 9), 1, F32, "columns-staged", "aligned", 2, True),  # two groups of slices at a time
    ((2, 131072, 16), 1, F32, "columns-twopass", "aligned", 2, True),
    ((1 << 27, 8), 0, F32, "columns-twopass", "aligned", 4, True),
    ((64, 80, 14, 14), (0, 3), F32, "columns", "strided", 1, False),
    ((64, 80, 14, 14), (2, 3), F32, "warp", "aligned", 4, False),  # rows
]


@pytest.mark.parametrize("function", ["softmax", "logsumexp"])
@pytest.mark.parametrize(("sizes", "dim", "dtype", "tier", "edges", "vector", "shared"), CHOICES)
def test_choices(sizes, dim, dtype, tier, edges, vector, shared, function):
    made = launch(sizes, dim, dtype=dtype, function=function)
    assert (made["tier"], made["access"], made["vec_size"]) == (tier, edges, vector)
    blocks = {"warp": "blocks_per_row", "columns-staged": "stages"}.get(tier, "blocks_per_tile")
    assert shared in (None, made[blocks] > 1)
    assert (made["source"] == "columns.cu") == tier.startswith("columns")


def meta(*sizes: int) -> torch.Tensor:
    return torch.empty(sizes, device="meta")


# tensor, dim -> tier, edges, vector
STRIDES = {
    "transposed": (meta(8192, 8192).t(), 1, "columns", "aligned", 4),
    "channels last, channels": (meta(32, 256, 56, 56).to(memory_format=torch.channels_last), 1, "warp", "aligned", 4),
    "channels last, width": (meta(32, 256, 56, 56).to(memory_format=torch.channels_last), 3, "columns", "aligned", 4),
    "lines of an even result": (meta(64, 100, 1024)[..., :1022], 1, "columns", "aligned", 2),
    "lines of an odd result": (meta(64, 100, 1024)[..., :1021], 1, "columns", "aligned", 1),
    "sliced, all vectors whole": (meta(64, 100, 1024)[..., 4:1004], 1, "columns", "aligned", 4),
    "short columns, sliced": (meta(5000, 6, 10)[..., :9], 1, "columns-staged", "aligned", 2),
    "tiny slices far apart": (meta(5000, 60, 9)[:, :6], 1, "columns", "strided", 1),
    "every other column": (meta(64, 100, 1024)[..., ::2], 1, "columns", "strided", 1),
    "every other line": (meta(64, 100, 1024)[:, ::2], 1, "columns", "aligned", 4),
    "no stride of one": (meta(6, 5, 9).permute(1, 2, 0)[1:, ::2, 1:5], 1, "columns", "strided", 1),
}


@pytest.mark.parametrize(("x", "dim", "tier", "edges", "vector"), STRIDES.values(), ids=STRIDES)
def test_strides(x, dim, tier, edges, vector):
    made = launch(x, dim)
    assert (made["tier"], made["access"], made["vec_size"]) == (tier, edges, vector)


def test_columns_that_are_no_whole_vectors_have_a_window():
    """Where nothing but the end of a line is in the way: of a reduction, whose result goes element by element."""
    made = launch(meta(64, 100, 1024)[..., :1021], 1, function="logsumexp")
    assert (made["access"], made["vec_size"]) == ("predicated", 4)


@pytest.mark.parametrize(("offset", "vector"), [(0, 4), (1, 1), (2, 2), (4, 4)])
def test_addresses_count(offset, vector):
    """Vectors are as wide as the address of the tensor allows, where the result is a fresh one."""
    x = torch.empty(4 * 100 * 64 + 8)
    shift = -(x.data_ptr() // 4) % 4 + offset
    x = x[shift : shift + 4 * 100 * 64].view(4, 100, 64)
    assert onepass.explain(x, 1, engine="cuda", device="h200").launch["vec_size"] == vector


@pytest.mark.parametrize(("compute", "multiprocessors"), [(80, 108), (90, 132), (90, 60), (100, 148), (120, 170)])
@pytest.mark.parametrize("sizes", [(8, 700, 4096), (256, 1000, 7, 7), (2, 4096, 64), (16, 131072, 16)])
def test_blocks_share_columns_as_the_gpu_can(sizes, compute, multiprocessors):
    """By clusters where there are any; without, one block holds what it can, and the chip the rest."""
    made = launch(sizes, 1, arch=compute, sm_count=multiprocessors)
    clusters = {80: 1, 90: 16 if multiprocessors == 132 else 8}.get(compute, 8)
    assert made["blocks_per_tile"] <= (clusters if made["tier"] == "columns" else multiprocessors)
    assert made["tier"] == "columns" or made["blocks_per_tile"] > 1
    assert made["grid"] % made["blocks_per_tile"] == 0


def test_lanes_go_along_what_lies_closest_in_the_input():
    """Also of a reduction, whose results lie side by side."""
    x = meta(64, 80, 14, 28)[..., ::2]
    assert {launch(x, (0, 3), function=function)["threads_x"] for function in ("softmax", "logsumexp")} == {1}
    assert launch(meta(64, 80, 14, 14), (0, 2), function="logsumexp")["threads_x"] == 32


def test_what_is_gathered_or_streams_is_told():
    with onepass.batch_invariant():
        invariant = onepass.explain((64, 100, 64), 1, device="h200")
    for plan in (invariant, onepass.explain((64, 100, 64), 1, device="h200", engine="triton")):
        assert any(note.startswith("gathered") for note in plan.notes)
        assert not plan.tier.startswith("columns")
    assert not any("gathered" in note for note in onepass.explain((64, 100, 64), 1, device="h200").notes)
    for rank, gathered in ((12, False), (14, True)):  # more than six dims of rows, or of elements, that do not merge
        x = meta(*[4] * rank)[(slice(None, None, 2),) * rank]
        plan = onepass.explain(x, tuple(range(0, rank, 2)), device="h200")
        assert any("gathered" in note for note in plan.notes) == gathered
        assert (plan.tier == "columns") != gathered
    streamed = onepass.explain((1 << 27, 8), 0, device="h200")
    assert "columns stream through their blocks: they are read twice" in streamed.notes


@pytest.mark.parametrize("count", [15_000, slow(200_000)])
def test_layouts_of_contiguous_rows_and_random_plans_of_columns_hold_what_they_promise(tmp_path, count):
    layouts, plans, followed = map(int, output(build(tmp_path, "plans", "plan/tables.cpp"), count).split())
    assert layouts == 4 * sum(4**rank for rank in range(1, 6))
    assert plans > count / 2
    assert followed > count / 5


def test_a_pipeline_has_each_vector_when_it_is_read(tmp_path):
    assert output(build(tmp_path, "pipeline", options=("-Wno-unknown-pragmas",))) == "5712"


@pytest.mark.parametrize(("n", "values", "smem_vecs"), [(524288, 8, 0), (557056, 4, 8)])
def test_the_grid_keeps_many_vectors_in_shared_memory_or_none(n, values, smem_vecs):
    made = launch((n, 8), 0, dtype=BF16)
    assert (made["tier"], made["items_per_thread"] // made["vec_size"], made["smem_vecs"]) == (
        "columns-grid",
        values,
        smem_vecs,
    )


@pytest.mark.parametrize(
    ("dtype", "sizes", "lanes", "slots", "blocks"),
    [
        (BF16, (256, 1000, 49), 196, 4, 8),  # few vectors a thread
        (F16, (64, 1200, 100), 125, 8, 16),
        (BF16, (64, 1000, 196), 98, 16, 16),  # as many as registers hold
        (F32, (256, 1000, 49), 98, 8, 16),  # floats by the rule of other slabs
    ],
)
def test_gradients_of_long_slabs_of_halves_keep_few_vectors(dtype, sizes, lanes, slots, blocks):
    _, n, inner = sizes
    strides = [(n * inner, inner, 1)] * 3 + [(0, 0, 0)]
    made = native.backward_plan("softmax", sizes, strides, (1,), dtype, dtype)
    assert (made["tier"], made["access"], made["threads_x"]) == ("columns", "slab-aligned", lanes)
    assert (made["items_per_thread"] // made["vec_size"], made["blocks_per_tile"]) == (slots, blocks)
