"""What the sweep tries: all of it is a table entry, and the plan tried is the one that the engine makes of it."""

from itertools import pairwise

import pytest
import torch

import onepass
from lib.tune import A100, BASE, GPUS, H200, RTX, tables_back
from onepass import native
from onepass.native import TIERS
from onepass.tools.tune.candidates import (
    Choice,
    Gpu,
    Plan,
    candidates,
    holds,
    kernels,
    plan_of,
)
from onepass.tools.tune.sizes import ALIGNED, LENGTHS, UNALIGNED, is_odd, rows_of
from onepass.tools.tune.timing import FUNCTIONS

__all__ = ["tables_back"]
MANY = 2_000_000  # rows: so many that none is spread, or goes by narrower vectors, for want of others
F32, F64 = torch.float32, torch.float64
TYPES = [(torch.float32, 4), (torch.bfloat16, 2)]
every_type = pytest.mark.parametrize(("dtype", "size"), TYPES, ids=["float32", "bfloat16"])
every_gpu = pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
every_function = pytest.mark.parametrize("function", FUNCTIONS)
ANY = 2**63 - 1
KINDS = {"softmax": "write", "logsumexp": "reduce"}  # of tables


def engine_plan(dtype: torch.dtype, n: int, rows: int = MANY, function: str = "softmax", gpu: Gpu = H200) -> Plan:
    y_strides = [n, 1] if function == "softmax" else [1, 0]
    of = {"arch": gpu.compute, "sm_count": gpu.multiprocessors, "gpu": gpu.name}
    found = native.plan(function, True, [rows, n], [n, 1], y_strides, [1], dtype, dtype, **of)
    return Plan(*found["plan"])


@pytest.mark.parametrize("gpu", [H200, RTX, GPUS[3]], ids=lambda gpu: gpu.name)
@every_function
@every_type
def test_the_engine_serves_an_entry_by_the_plan_that_is_tried(dtype, size, function, gpu):
    try:
        for n in LENGTHS[::9]:
            for choice, plan in candidates(n, size, MANY, gpu, function == "logsumexp")[::5]:
                name = f"{'unaligned' if choice.tier == TIERS.index('staged') else KINDS[function]}_f{8 * size}"
                tables = dict(BASE, **{f"unaligned_f{8 * size}": [[ANY, -1, 0, 0, 1, 0]]})
                tables[name] = [[n, *choice], *(entry for entry in BASE[name] if entry[0] > n)]
                native.set_tables(gpu.name, "a test", tables)
                assert engine_plan(dtype, n, function=function, gpu=gpu) == plan, (n, choice)
    finally:
        native.set_tables(gpu.name, **native.tables())


@every_function
@every_type
def test_the_built_in_plans_are_tried_too(dtype, size, function):
    for n in LENGTHS:
        plans = {c.plan for c in candidates(n, size, MANY, H200, function == "logsumexp")}
        plan = engine_plan(dtype, n, function=function)
        if TIERS[plan.tier] == "staged" and (not is_odd(n, size) or function == "logsumexp"):
            continue  # of the odd tables, or the one entry of the others that no sweep of even lengths tries
        assert plan in plans, n
        entry = next(e for e in BASE[f"{KINDS[function]}_f{8 * size}"] if n <= e[0])
        assert plan_of(Choice(*entry[1:]), (MANY, n, 1), size, H200) in plans, (n, entry)


@every_type
def test_reductions_have_tables_of_their_own(dtype, size, tables_back):
    tables = dict(BASE, **{f"reduce_f{8 * size}": [[ANY, TIERS.index("twopass"), 256, 16, 1, 0]]})
    native.set_tables(H200.name, "a test", tables)
    for n in (64, 1024, 4096, 9216):  # longer ones may be spread, where they are few
        choice = Choice(*look_up(f"write_f{8 * size}", n))
        assert engine_plan(dtype, n) == plan_of(choice, (MANY, n, 1), size, H200)
        assert TIERS[engine_plan(dtype, n, function="logsumexp").tier] == "twopass"
    state = native.plan("state", True, [MANY, 64], [64, 1], [1, 0], [1], dtype, F32, gpu=H200.name)
    assert state["tier"] == ("twopass" if size == 4 else "warp")  # a state of half elements is float32


@every_type
def test_a_row_of_a_reduction_streams_only_where_there_are_enough_of_them(dtype, size, tables_back):
    n, lanes = 9216, 256
    reduce_table = [[ANY, TIERS.index("twopass"), lanes, 16, 1, 0]]
    native.set_tables(H200.name, "a test", {**BASE, f"reduce_f{8 * size}": reduce_table})
    enough = 132 * 1024 // lanes
    assert TIERS[engine_plan(dtype, n, enough, "logsumexp").tier] == "twopass"
    assert engine_plan(dtype, n, enough - 1, "logsumexp") == engine_plan(dtype, n, enough - 1)
    with onepass.batch_invariant():
        assert TIERS[engine_plan(dtype, n, 1, "logsumexp").tier] == "twopass"
    tried = [{c.choice for c in candidates(n, size, rows, H200, True)} for rows in (enough, enough - 1)]
    assert [Choice(*reduce_table[0][1:]) in choices for choices in tried] == [True, False]


def look_up(name: str, n: int) -> list[int]:
    return next(entry[1:] for entry in BASE[name] if n <= entry[0])


def test_a_reduction_waits_in_the_type_that_it_is_computed_in(tables_back):
    """Doubles take the entry of a row of twice the length, a state of half elements that of float32."""
    limits = [[1000, TIERS.index("block"), 0, 16, 1, 0], [ANY, TIERS.index("twopass"), 256, 16, 1, 0]]
    native.set_tables(H200.name, "a test", {**BASE, "reduce_f32": limits})

    def tier(function: str, n: int, x_type: torch.dtype, y_type: torch.dtype) -> str:
        layout = [MANY, n], [n, 1], [1, 0], [1]
        return native.plan(function, True, *layout, x_type, y_type, gpu=H200.name)["tier"]

    for function in ("logsumexp", "state"):
        assert [tier(function, n, F32, F32) for n in (1000, 1004)] == ["block", "twopass"]
        assert [tier(function, n, F64, F64) for n in (500, 502)] == ["block", "twopass"]
    assert [tier("state", n, torch.bfloat16, F32) for n in (1000, 1008)] == ["block", "twopass"]


@every_function
@every_gpu
@every_type
def test_every_length_has_candidates_that_fit(dtype, size, gpu, function):
    for n in LENGTHS:
        tried = candidates(n, size, rows_of(n, size, 256), gpu, function == "logsumexp")
        assert any(c.choice.tier != TIERS.index("staged") for c in tried)
        assert len(tried) == len({c.choice for c in tried})
        assert len({c.plan for c in tried}) < 150
        for choice, plan in tried:
            tier = TIERS[plan.tier]
            assert holds(choice, n, size, gpu) > n - 16 // size
            assert tier != "staged" or is_odd(n, size)
            if tier in ("block", "cluster"):
                vectors = (
                    plan.threads_per_row
                    * plan.blocks_per_row
                    * (plan.items_per_thread // plan.vec_size + plan.smem_vecs)
                )
                assert vectors * plan.vec_size >= (n if n % plan.vec_size == 0 else n + plan.vec_size - 1)
                assert plan.threads_per_row % 32 == 0
                assert plan.threads_per_row <= 1024
                assert plan.blocks_per_row <= (1 if gpu.compute < 90 else 16)
                assert plan.smem_vecs * plan.threads_per_row * 16 <= gpu.shared


@every_function
@every_type
def test_one_row_that_nothing_holds_has_candidates(dtype, size, function):
    assert candidates(2**20, size, 1, H200, function == "logsumexp")
    tried = candidates(2**24, size, 1, H200, function == "logsumexp")
    assert {TIERS[c.plan.tier] for c in tried} == {"twopass"}


def test_no_clusters_before_compute_9():
    assert not [
        c for c in candidates(65536, 4, 1024, A100) if c.plan.blocks_per_row > 1 and TIERS[c.plan.tier] == "cluster"
    ]
    assert [c for c in candidates(65536, 4, 1024, H200) if c.plan.blocks_per_row == 16]


def test_a_gpu_without_cooperative_launches_has_no_grid():
    alone = Gpu(H200.name, 90, 132, H200.shared, cooperative=False)
    tiers = [{TIERS[c.plan.tier] for c in candidates(2**20, 4, 64, gpu)} for gpu in (H200, alone)]
    assert tiers[0] - tiers[1] == {"grid"}


def test_lengths_are_close_to_each_other():
    for lengths in (ALIGNED, LENGTHS):
        longer = [n for n in lengths if 64 <= n <= 2**19]
        assert max(b / a for a, b in pairwise(longer)) <= 1.3334
    short = [n for n in UNALIGNED if 25 <= n <= 1500]
    assert max(b / a for a, b in pairwise(short)) <= 1.55
    assert list(LENGTHS) == sorted(set(LENGTHS))
    assert all(n % 8 == 0 for n in ALIGNED[1:])
    assert all(is_odd(n, 2) for n in UNALIGNED)


@pytest.mark.parametrize("gpu", [H200, RTX], ids=lambda gpu: gpu.name)
def test_the_number_of_kernels_is_bounded(gpu):
    todo = [
        (function, str(dtype), c.plan)
        for function in FUNCTIONS
        for dtype, size in TYPES
        for n in LENGTHS
        for c in candidates(n, size, rows_of(n, size, 256), gpu, function == "logsumexp")
    ]
    assert 200 < len(kernels(todo)) < 1000
    assert len(kernels(todo)) < len(set(todo)) / 2
