"""Tables of columns: what the sweep tries is what the engine makes of an entry, and what it finds becomes entries."""

import os
import re
import zlib

import pytest
import torch

from lib.tune import A100, BASE, GPUS, H200, RTX, FakeTimer, made_up, tables_back
from lib.warmup import TYPES, needs_nvrtc, random_plans
from onepass import native
from onepass import tables as store
from onepass._kernel_compiler import compile_all
from onepass.tools.tune.candidates import Choice, Gpu, Plan, kernels
from onepass.tools.tune.columns import (
    COLUMNS,
    FUNCTIONS,
    LENGTHS,
    LONGEST,
    candidates,
    shape_of,
)
from onepass.tools.tune.run import Options, sweep
from onepass.tools.tune.table import build
from onepass.tools.tune.timing import (
    CudaTimer,
    Measurement,
    WrongResultError,
    check_result,
    measure_columns,
    to_compile,
)

__all__ = ["tables_back"]
DTYPES = {"float32": 4, "bfloat16": 2}
every_kind = pytest.mark.parametrize(("function", "dtype"), [(f, d) for f in FUNCTIONS for d in DTYPES])


def engine_plan(function: str, dtype: str, n: int, shape: tuple[int, int], gpu: Gpu = H200) -> Plan:
    sizes, type_ = [shape[0], n, shape[1]], getattr(torch, dtype)
    strides = [n * shape[1], shape[1], 1]
    of = {"arch": gpu.compute, "sm_count": gpu.multiprocessors, "gpu": gpu.name}
    if function == "columns":
        found = native.plan("softmax", True, sizes, strides, strides, [1], type_, type_, **of)
    else:
        found = native.backward_plan("softmax", sizes, [strides] * 3 + [[0, 0, 0]], [1], type_, type_, **of)
    return Plan(*found["plan"])


def of_length(n: int, dtype: str, function: str, gpu: Gpu = H200):
    size = DTYPES[dtype]
    return candidates(n, shape_of(n, size, 256), size, function, gpu)


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
@every_kind
def test_the_engine_serves_an_entry_by_the_plan_that_is_tried(function, dtype, gpu):
    size = DTYPES[dtype]
    try:
        for n in (*LENGTHS[::3], LONGEST):
            shape = shape_of(n, size, 64)
            for choice, plan in candidates(n, shape, size, function, gpu)[::3]:
                native.set_tables(gpu.name, "a test", {**BASE, f"{function}_f{8 * size}": [[store.ANY, *choice]]})
                assert engine_plan(function, dtype, n, shape, gpu) == plan, (n, choice)
    finally:
        native.set_tables(gpu.name, **native.tables())


@every_kind
def test_the_built_in_plans_are_tried_too(function, dtype):
    size = DTYPES[dtype]
    for n in LENGTHS:
        shape = shape_of(n, size, 256)
        plan = engine_plan(function, dtype, n, shape)
        assert plan in [c.plan for c in candidates(n, shape, size, function, H200)], n


def test_every_plan_is_what_it_was_before_there_were_tables():
    """Of contiguous tensors that begin anywhere, by the built-in tables of columns, measured 2026-11-23."""
    digests = {}
    for which in native.PASSES:
        digests[which] = 0
        for types in TYPES:
            for compute in (80, 90, 120):
                for plan in random_plans(200, None, "softmax", which, types, compute):
                    numbers = [*plan["plan"], plan["threads"], plan["grid"]]
                    digests[which] = zlib.crc32(repr(numbers).encode(), digests[which])
    assert digests == {"forward": 0xFA15772A, "backward": 0x081078D0, "backward_broadcast": 0x2165682C}


def test_the_tables_are_those_of_the_gpu_by_its_name(tables_back):
    entries = [[store.ANY, COLUMNS, 64, 4, 4, 0]]
    native.set_tables(H200.name, "a test", {**BASE, "columns_f32": entries, "columns_backward_f16": entries})
    shape = (64, 4096)
    for function, dtype in (("columns", "float32"), ("columns_backward", "bfloat16")):
        assert engine_plan(function, dtype, 64, shape).threads_per_row == 4
        assert engine_plan(function, dtype, 64, shape, RTX).threads_per_row == 16
    assert engine_plan("columns", "bfloat16", 64, shape).threads_per_row == 16
    assert engine_plan("columns_backward", "float32", 64, shape).threads_per_row == 16


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ([2, 128, 8, 8, 0], "the tiers columns and columns-grid alone"),
        ([6, 128, 8, 3, 0], "tile_vecs is a power of two"),
        ([6, 128, 8, 256, 0], "tile_vecs is a power of two"),
        ([6, 32, 8, 8, 0], "threads is a multiple of 32 from 64 to 512"),
        ([6, 1024, 8, 8, 0], "threads is a multiple of 32 from 64 to 512"),
        ([6, 128, 26, 8, 0], "vecs_per_thread is 1 to "),
        ([6, 128, 0, 8, 0], "vecs_per_thread is 1 to "),
        ([6, 128, 8, 8, 2], "smem_vecs is 1, or a multiple of 4"),
        ([6, 128, 8, 8, 52], "smem_vecs is 1, or a multiple of 4"),
        ([7, 128, 0, 8, 0], "columns-grid has tile_vecs alone"),
    ],
)
@pytest.mark.parametrize("name", ["columns_f32", "columns_backward_f16"])
def test_unsound_entries_are_refused(name, entry, words):
    with pytest.raises(RuntimeError, match=f"table {name}: limit {store.ANY}: .*{words}"):
        native.set_tables("a GPU", "a test", {**BASE, name: [[store.ANY, *entry]]})


def test_a_gradient_keeps_fewer_vectors():
    entries = [[store.ANY, 6, 128, 24, 8, 0]]
    native.set_tables("a GPU", "a test", {**BASE, "columns_f16": entries})
    with pytest.raises(RuntimeError, match="vecs_per_thread is 1 to 16"):
        native.set_tables("a GPU", "a test", {**BASE, "columns_backward_f16": entries})


@every_kind
@pytest.mark.parametrize("gpu", [H200, A100, RTX], ids=lambda gpu: gpu.name)
def test_every_length_has_candidates_and_not_too_many(function, dtype, gpu):
    for n in (*LENGTHS, LONGEST):
        tried = of_length(n, dtype, function, gpu)
        assert tried
        assert len({c.choice for c in tried}) == len(tried)
        assert len({c.plan for c in tried}) <= 64


def test_the_number_of_kernels_is_bounded():
    todo = [(f, d, c.plan) for f in FUNCTIONS for d in DTYPES for n in LENGTHS for c in of_length(n, d, f)]
    assert 100 < len(kernels(todo)) < 1000
    assert len(kernels(todo)) < len(set(todo)) / 2


@needs_nvrtc
def test_kernels_are_compiled_as_the_engine_asks_for_them(tmp_path, monkeypatch):
    monkeypatch.setenv("ONEPASS_CACHE_DIR", str(tmp_path))
    todo = [(function, "float32", of_length(64, "float32", function)[-1].plan) for function in FUNCTIONS]
    assert list(compile_all(to_compile(todo), 90)) == to_compile(todo)
    before = native.counts()
    for which, (_, dtype, plan) in zip(native.PASSES, todo, strict=False):
        type_ = getattr(torch, dtype)
        native.compile_kernel("softmax", type_, type_, plan, 90, os.devnull, which)
    after = native.counts()
    assert (after[0] - before[0], after[1] - before[1]) == (0, 2)


# From times to entries


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_every_measured_length_is_served_within_1_percent_of_its_best(gpu):
    points = []
    for function in FUNCTIONS:
        for dtype, size in DTYPES.items():
            for n in LENGTHS:
                tried = candidates(n, shape_of(n, size, 256), size, function, gpu)
                points.append(made_up(function, dtype, n, 4096, tried))
    tables = build(points, BASE, gpu)
    store.check_tables(tables)
    native.set_tables("a GPU", "a test", tables)
    assert [name for name in tables if tables[name] == BASE[name]] == [name for name in BASE if "column" not in name]
    for p in points:
        table = tables[f"{p.function}_f{8 * DTYPES[p.dtype]}"]
        choice = Choice(*next(entry for entry in table if p.n <= entry[0])[1:])
        assert p.times[choice] <= 1.01 * p.best
    assert all(tables[name][-1] == BASE[name][-1] for name in BASE), "longer ones go over the chip"


def test_a_sweep_measures_what_is_asked_for(tmp_path):
    meter = FakeTimer()
    options = Options(lengths=(21, 1000, 200000), functions=("columns",), dtypes=("float32",), size_mib=16)
    stored = sweep(H200, options, tmp_path / "tables.json", meter, BASE, lambda origin, tables: None)
    assert [(f, d, n) for f, d, n, _ in meter.done] == [("columns", "float32", 21), ("columns", "float32", 1000)]
    assert {function for function, *_ in meter.prepared} == {"columns"}
    assert [name for name in BASE if stored.tables[name] != BASE[name]] == ["columns_f32"]
    assert stored == store.read(stored.path)
    native.set_tables("a GPU", stored.origin, stored.tables)
    by_default = {(function, n) for function, _, n, _ in Options().points}
    assert {(f, n) for f in FUNCTIONS for n in LENGTHS} == {(f, n) for f, n in by_default if f in FUNCTIONS}
    with pytest.raises(ValueError, match=f"columns have up to {LONGEST} elements"):
        Options(lengths=(LONGEST + 1,), functions=FUNCTIONS)


# Measuring, with launches that are made up


def measured(spoil, function: str) -> Measurement:
    x = torch.randn(3, 16, 64, generator=torch.Generator().manual_seed(0))
    grad = torch.randn(x.shape) if function == "columns_backward" else None
    x = x if grad is None else x.softmax(1)

    def launch(plan, y):
        y.copy_(x.double().softmax(1) if grad is None else x * (grad - (x * grad).double().sum(1, keepdim=True)))
        if plan is not None:
            spoil(plan, y)

    tried = candidates(16, (3, 64), 4, function, H200)
    return measure_columns(x, grad, tried, launch, lambda call, repeats: (call(), 5.0)[1], lambda: None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_meter_launches_what_is_checked(function, dtype, monkeypatch):
    """By the plan in use, on the CPU, which takes no other."""
    meter = object.__new__(CudaTimer)
    meter.size_mib, meter.repeats = 1, 3
    monkeypatch.setattr(meter, "_input", lambda dtype, count: torch.randn(count).to(dtype), raising=False)
    plan = of_length(64, str(dtype)[6:], function)[0].plan

    def look(x, grad, tried, launch, *_):
        assert tuple(x.shape[1:]) == (64, 4096)
        y, forced = torch.full_like(x, torch.nan), torch.empty_like(x)
        launch(None, y)
        wide = x.double()
        want = wide.softmax(1) if grad is None else wide * (grad - (wide * grad).sum(1, keepdim=True))
        check_result(y, want, "it", 0.0 if grad is None else wide.max().item())
        with pytest.raises(RuntimeError, match="only CUDA calls have a plan to force"):
            launch(plan, forced)
        return "a point"

    monkeypatch.setattr("onepass.tools.tune.timing.measure_columns", look)
    assert meter._measure_columns(function, dtype, 64, lambda call, repeats: 1.0, []) == "a point"


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_point_has_a_time_for_each_choice(function):
    point = measured(lambda plan, y: None, function)
    assert (point.function, point.dtype, point.n, point.rows, point.copy_us) == (function, "float32", 16, 192, 5.0)
    assert point.times == {c.choice: 5.0 for c in candidates(16, (3, 64), 4, function, H200)}


@pytest.mark.parametrize(
    "spoil",
    [
        lambda y: y.mul_(1.001),
        lambda y: y[-1, :, -1].zero_(),
        lambda y: y[1, 3, 40].fill_(torch.nan),
        lambda y: y.copy_(y.roll(1, 1)),
    ],
)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_wrong_candidate_is_an_error(function, spoil):
    with pytest.raises(WrongResultError, match=re.escape(f"{function} of 3x16x64 float32 by plan (6, ")):
        measured(lambda plan, y: spoil(y), function)
