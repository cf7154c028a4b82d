"""What the sweep tries: all of it is a table entry, and the plan tried is the one that the engine makes of it."""

import os
import zlib
from itertools import pairwise

import pytest
import torch

import onepass
from lib.support import slow
from lib.tune import A100, BASE, GPUS, H200, RTX, tables_back
from lib.warmup import TYPES as PAIRS
from lib.warmup import needs_nvrtc, random_plans
from onepass import native
from onepass._kernel_compiler import Kernel, compile_all
from onepass.native import TIERS
from onepass.tables import ANY
from onepass.tools.tune.candidates import COLUMNS, Candidate, Choice, Gpu, Plan, candidates, holds, kernels, plan_of
from onepass.tools.tune.sizes import ALIGNED, COLUMN_LENGTHS, FUNCTIONS, LENGTHS, LONGEST, UNALIGNED, is_odd, shapes

__all__ = ["tables_back"]
MANY = 2_000_000  # rows: so many that none is spread, or goes by narrower vectors, for want of others
F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
SIZES = {"float32": 4, "bfloat16": 2}
ROWS, BESIDE = FUNCTIONS[:2], FUNCTIONS[2:]
KINDS = {"softmax": "write", "logsumexp": "reduce"}  # of tables
every_type = pytest.mark.parametrize(("dtype", "size"), [(F32, 4), (BF16, 2)], ids=SIZES)
every_gpu = pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
every_function = pytest.mark.parametrize("function", FUNCTIONS)


def lengths_of(function: str) -> tuple[int, ...]:
    return LENGTHS if function in ROWS else (*COLUMN_LENGTHS, LONGEST)


def shape_of(function: str, n: int, size: int, mib: int = 256) -> tuple[int, int]:
    """The first that is measured, of rows so many that the entry alone decides."""
    return (MANY, 1) if function in ROWS else shapes(function, n, size, mib)[0]


def every_candidate(function: str, n: int, size: int, gpu: Gpu = H200) -> list[Candidate]:
    return [c for shape in shapes(function, n, size, 256) for c in candidates(function, n, shape, size, gpu)]


def engine_plan(function: str, dtype: torch.dtype, n: int, shape: tuple[int, int] = (MANY, 1), gpu: Gpu = H200) -> Plan:
    of = {"arch": gpu.compute, "sm_count": gpu.multiprocessors, "gpu": gpu.name}
    sizes, strides = [shape[0], n, shape[1]], [n * shape[1], shape[1], 1]
    if function == "columns_backward":
        found = native.backward_plan("softmax", sizes, [strides] * 3 + [[0, 0, 0]], [1], dtype, dtype, **of)
    else:
        y_strides = [1, 0, 0] if function == "logsumexp" else strides
        name, y_type = "softmax" if function == "columns" else function, F32 if function == "state" else dtype
        found = native.plan(name, True, sizes, strides, y_strides, [1], dtype, y_type, **of)
    return Plan(*found["plan"])


def tier_of(function: str, dtype: torch.dtype, n: int, rows: int = MANY) -> str:
    return TIERS[engine_plan(function, dtype, n, (rows, 1)).tier]


@every_gpu
@every_function
@every_type
def test_the_engine_serves_an_entry_by_the_plan_that_is_tried(dtype, size, function, gpu):
    bits = 8 * size
    try:
        for n in lengths_of(function)[:: 9 if function in ROWS else 3]:
            shape = shape_of(function, n, size, 64)
            for choice, plan in candidates(function, n, shape, size, gpu)[::5]:
                kind = "unaligned" if TIERS[choice.tier] == "staged" else KINDS.get(function, function)
                tables = {**BASE, f"unaligned_f{bits}": [[ANY, -1, 0, 0, 1, 0]]}
                rest = [entry for entry in BASE[f"{kind}_f{bits}"] if entry[0] > n]
                tables[f"{kind}_f{bits}"] = [[n, *choice], *rest]
                native.set_tables(gpu.name, "a test", tables)
                assert engine_plan(function, dtype, n, shape, gpu) == plan, (n, choice)
    finally:
        native.set_tables(gpu.name, **native.tables())


@every_function
@every_type
def test_the_built_in_plans_are_tried_too(dtype, size, function):
    for n in lengths_of(function):
        shape = shape_of(function, n, size)
        plans = {c.plan for c in candidates(function, n, shape, size, H200)}
        plan = engine_plan(function, dtype, n, shape)
        if TIERS[plan.tier] == "staged" and (not is_odd(n, size) or function == "logsumexp"):
            continue  # of the odd tables, or the one entry of the others that no sweep of even lengths tries
        assert plan in plans, n
        if function in ROWS:
            entry = next(e for e in BASE[f"{KINDS[function]}_f{8 * size}"] if n <= e[0])
            by_entry = plan_of(Choice(*entry[1:]), (MANY, n, 1), size, H200, reduces=function == "logsumexp")
            assert by_entry in plans, (n, entry)


def test_no_plan_of_columns_changes_by_accident():
    """Of contiguous tensors that begin anywhere, by the built-in tables and `ColumnPlanner::expected`."""
    digests = {}
    for which in native.PASSES:
        digests[which] = 0
        for types in PAIRS:
            for compute in (80, 90, 120):
                for plan in random_plans(200, None, "softmax", which, types, compute):
                    numbers = [*plan["plan"], plan["threads"], plan["grid"]]
                    digests[which] = zlib.crc32(repr(numbers).encode(), digests[which])
    assert digests == {"forward": 455063726, "backward": 4271263171, "backward_broadcast": 2869823172}


@every_type
def test_reductions_have_tables_of_their_own(dtype, size, tables_back):
    streams = [[ANY, TIERS.index("twopass"), 256, 16, 1, 0]]
    native.set_tables(H200.name, "a test", {**BASE, f"reduce_f{8 * size}": streams})
    for n in (64, 1024, 4096, 9216):  # longer ones may be spread, where they are few
        entry = next(entry for entry in BASE[f"write_f{8 * size}"] if n <= entry[0])
        assert engine_plan("softmax", dtype, n) == plan_of(Choice(*entry[1:]), (MANY, n, 1), size, H200)
        assert tier_of("logsumexp", dtype, n) == "twopass"
    assert tier_of("state", dtype, 64) == "twopass"
    n, enough = 9216, 132 * 1024 // 256  # so many rows stream at once
    assert tier_of("logsumexp", dtype, n, enough) == "twopass"
    assert engine_plan("logsumexp", dtype, n, (enough - 1, 1)) == engine_plan("softmax", dtype, n, (enough - 1, 1))
    with onepass.batch_invariant():
        assert tier_of("logsumexp", dtype, n, 1) == "twopass"
    tried = [{c.choice for c in candidates("logsumexp", n, (rows, 1), size, H200)} for rows in (enough, enough - 1)]
    assert [Choice(*streams[0][1:]) in choices for choices in tried] == [True, False]


def test_a_reduction_waits_in_the_type_that_it_reads(tables_back):
    """Doubles take the entry of a row of twice the length."""
    limits = [[1000, TIERS.index("block"), 0, 16, 1, 0], [ANY, TIERS.index("twopass"), 256, 16, 1, 0]]
    native.set_tables(H200.name, "a test", {**BASE, "reduce_f32": limits})
    cases = [(f, dtype, length) for f in ("logsumexp", "state") for dtype, length in ((F32, 1000), (F64, 500))]
    for function, dtype, longest in cases:
        tiers = [
            native.plan(function, True, [MANY, n], [n, 1], [1, 0], [1], dtype, y_type, gpu=H200.name)["tier"]
            for n in (longest, longest + 8)
            for y_type in [F64 if dtype is F64 else F32]
        ]
        assert tiers == ["block", "twopass"]


def test_the_tables_of_columns_are_those_of_the_gpu_by_its_name(tables_back):
    entries = [[ANY, COLUMNS, 64, 4, 4, 0]]
    native.set_tables(H200.name, "a test", {**BASE, "columns_f32": entries, "columns_backward_f16": entries})
    for function, dtype, gpu, threads in (
        ("columns", F32, H200, 4),
        ("columns", F32, RTX, 16),
        ("columns", BF16, H200, 16),
        ("columns_backward", BF16, H200, 4),
        ("columns_backward", BF16, RTX, 16),
        ("columns_backward", F32, H200, 16),
    ):
        assert engine_plan(function, dtype, 64, (64, 4096), gpu).threads_per_row == threads


@every_function
@pytest.mark.parametrize("gpu", [gpu if gpu is H200 else slow(gpu) for gpu in GPUS], ids=lambda gpu: gpu.name)
@every_type
@pytest.mark.parametrize("step", [8, slow(1)])
def test_every_length_has_candidates_that_fit(dtype, size, gpu, function, step):
    for n in lengths_of(function)[::step]:
        tried = candidates(function, n, shapes(function, n, size, 256)[0], size, gpu)
        assert any(c.choice.tier != TIERS.index("staged") for c in tried)
        assert len(tried) == len({c.choice for c in tried})
        assert len({c.plan for c in tried}) < (150 if function in ROWS else 65)
        for choice, plan in tried if function in ROWS else []:
            tier, vecs = TIERS[plan.tier], plan.items_per_thread // plan.vec_size + plan.smem_vecs
            assert holds(function, size, gpu, choice, n) > n - 16 // size
            assert tier != "staged" or is_odd(n, size)
            if tier in ("block", "cluster"):
                held = plan.threads_per_row * plan.blocks_per_row * vecs * plan.vec_size
                assert held >= (n if n % plan.vec_size == 0 else n + plan.vec_size - 1)
                assert plan.threads_per_row % 32 == 0
                assert plan.threads_per_row <= 1024
                assert plan.blocks_per_row <= (1 if gpu.compute < 90 else 16)
                assert plan.smem_vecs * plan.threads_per_row * 16 <= gpu.shared


@pytest.mark.parametrize("function", ROWS)
@every_type
def test_one_row_that_nothing_holds_has_candidates_and_what_a_gpu_lacks_is_not_tried(dtype, size, function):
    assert candidates(function, 2**20, (1, 1), size, H200)
    tried = candidates(function, 2**24, (1, 1), size, H200)
    assert {TIERS[c.plan.tier] for c in tried} == {"twopass"}
    alone = Gpu(H200.name, 90, 132, H200.shared, cooperative=False)
    tried = {gpu: candidates("softmax", 65536, (1024, 1), 4, gpu) for gpu in (A100, H200)}
    assert not [c for c in tried[A100] if c.plan.blocks_per_row > 1 and TIERS[c.plan.tier] == "cluster"]
    assert [c for c in tried[H200] if c.plan.blocks_per_row == 16]
    tiers = [{TIERS[c.plan.tier] for c in candidates("softmax", 2**20, (64, 1), 4, gpu)} for gpu in (H200, alone)]
    assert tiers[0] - tiers[1] == {"pipelined"}


def test_lengths_are_close_to_each_other():
    for lengths in (ALIGNED, LENGTHS):
        longer = [n for n in lengths if 64 <= n <= 2**19]
        assert max(b / a for a, b in pairwise(longer)) <= 1.3334
    short = [n for n in UNALIGNED if 25 <= n <= 1500]
    assert max(b / a for a, b in pairwise(short)) <= 1.55
    assert all(n % 8 == 0 for n in ALIGNED[1:])
    assert all(is_odd(n, 2) for n in UNALIGNED)


@pytest.mark.parametrize("functions", [ROWS, BESIDE])
@pytest.mark.parametrize("gpu", [H200, slow(RTX)], ids=lambda gpu: gpu.name)
def test_the_number_of_kernels_is_bounded(gpu, functions):
    todo = [
        (function, dtype, c.plan)
        for function in functions
        for dtype, size in SIZES.items()
        for n in lengths_of(function)
        for c in every_candidate(function, n, size, gpu)
    ]
    assert (200 if functions == ROWS else 100) < len(kernels(todo)) < 1000
    assert len(kernels(todo)) < len(set(todo)) / 2


@pytest.mark.slow
@needs_nvrtc
def test_kernels_are_compiled_into_the_cache_as_the_engine_asks_for_them(tmp_path, monkeypatch):
    monkeypatch.setenv("ONEPASS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("onepass._kernel_compiler._KERNELS_PER_PROCESS", 2)  # two processes
    todo = kernels([(function, "float32", every_candidate(function, 64, 4)[-1].plan) for function in FUNCTIONS])
    before = native.counts()
    assert sorted(compile_all(todo, 90), key=todo.index) == todo
    if len(os.sched_getaffinity(0)) > 1:
        assert native.counts() == before  # this process compiled none
    before = native.counts()
    for kernel in todo:
        native.compile_kernel(kernel.function, kernel.x_type, kernel.y_type, kernel.plan, 90, os.devnull, kernel.which)
    after = native.counts()
    assert (after[0] - before[0], after[1] - before[1]) == (0, len(FUNCTIONS))


@pytest.mark.parametrize("processes", [1, slow(2)])
def test_a_kernel_that_does_not_compile(tmp_path, monkeypatch, processes):
    """A sweep leaves it to the measurement; a warm-up raises its error."""
    monkeypatch.setenv("ONEPASS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("onepass._kernel_compiler._KERNELS_PER_PROCESS", 2 // processes)
    for plan, message in (((0,) * 8, "vec_size is"), ((12, 32, 4, 4, 4, 1, 0, 0), "tier is 0 to 11, got 12")):
        todo = [Kernel("logsumexp", torch.float32, torch.float32, "forward", plan)] * 2
        assert list(compile_all(todo, 90, ignore_errors=True)) == todo
        with pytest.raises(RuntimeError, match=message):
            list(compile_all(todo, 90))
