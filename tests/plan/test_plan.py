"""The pure layout and plan headers, asked through the native core: no GPU is needed."""

import itertools
import random
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import onepass
from lib.tune import tables_back
from onepass import native

__all__ = ["tables_back"]
F32, F64, F16, BF16 = torch.float32, torch.float64, torch.float16, torch.bfloat16


def plan_of(
    x: torch.Tensor, dims: list[int], cuda: bool = True, y_type: torch.dtype | None = None, **more: int
) -> dict:
    y_strides = torch.empty_like(x).stride()
    return native.plan("softmax", cuda, x.shape, x.stride(), y_strides, dims, x.dtype, y_type or x.dtype, **more)


LAYOUTS = [
    ("contiguous, last", torch.empty(4, 5, 6), [2], ("rows", 20, 6)),
    ("contiguous, last two", torch.empty(4, 5, 6), [1, 2], ("rows", 4, 30)),
    ("contiguous, all", torch.empty(4, 5, 6), [0, 1, 2], ("rows", 1, 120)),
    ("contiguous, first", torch.empty(4, 5, 6), [0], ("columns", 30, 4)),
    ("contiguous, middle", torch.empty(4, 5, 6), [1], ("columns", 24, 5)),
    ("contiguous, outer two", torch.empty(4, 5, 6), [0, 1], ("columns", 6, 20)),
    ("contiguous, first and last", torch.empty(4, 5, 6), [0, 2], ("strided", 5, 24)),
    ("transposed, its unit stride", torch.empty(4, 5).t(), [0], ("rows", 4, 5)),
    ("permuted, rows in another order", torch.empty(2, 3, 4, 5).permute(1, 2, 0, 3), [3], ("rows", 24, 5)),
    ("channels last, channels", torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last), [1], ("rows", 40, 3)),
    ("channels last, width", torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last), [3], ("columns", 24, 5)),
    ("sizes of one are no dims", torch.empty(1, 7, 1, 6, 1), [3], ("rows", 7, 6)),
    ("a row of one element", torch.empty(7, 1), [1], ("rows", 7, 1)),
    ("no element", torch.empty(0, 5), [1], (None, 0, 5)),
    ("an empty row", torch.empty(5, 0), [1], (None, 5, 0)),
]


@pytest.mark.parametrize(("x", "dims", "expected"), [case[1:] for case in LAYOUTS], ids=[case[0] for case in LAYOUTS])
def test_canonical_view(x, dims, expected):
    plan = plan_of(x, dims)
    view, rows, n = expected
    assert (plan["rows"], plan["n"]) == (rows, n)
    assert view is None or plan["view"] == view
    assert plan["bytes"] == 2 * x.nbytes


def test_sliced_rows_are_served_in_place():
    x = torch.empty(8, 100)[:, 3:50]
    assert native.plan("softmax", True, x.shape, x.stride(), (47, 1), [1], F32, F32)["view"] == "rows"


LENGTHS = [*range(1, 70), 100, 127, 128, 129, 255, 257, 512, 781, 1000, 1024, 1025, 4096, 4097, 8192, 16384, 16385]
LENGTHS += [32001, 32767, 32768, 32769, 50257, 128256, 10**6, 2**31 + 5, 2**40]


# (compute, multiprocessors) -> the most blocks of a cluster
GPUS = {(80, 108): 1, (89, 58): 1, (90, 132): 16, (90, 60): 8, (100, 148): 8}


@pytest.mark.parametrize(("x_type", "y_type"), list(itertools.product([F32, F64, F16, BF16], repeat=2)))
def test_every_length_has_a_sound_plan(x_type, y_type):
    kernels = set()
    widest = max(x_type.itemsize, y_type.itemsize)
    for n, rows, (compute, multiprocessors) in itertools.product(LENGTHS, (1, 3, 10**6, 2**33), GPUS):
        of = {"arch": compute, "sm_count": multiprocessors}
        plan = native.plan("softmax", True, (rows, n), (n, 1), (n, 1), [1], x_type, y_type, **of)
        tier, (_, lanes, group, values, vector, split, smem_vecs, _) = plan["tier"], plan["plan"]
        # Beside those that share the row there is a warp that sends messages, or there are two.
        assert plan["threads"] == lanes * group + {"grid": 32, "pipelined": 64}.get(tier, 0)
        assert 32 <= plan["threads"] <= 1024
        assert plan["grid"] % split == 0 or tier == "pipelined"
        turns = smem_vecs if tier == "staged" else 1
        if tier not in ("grid", "pipelined"):
            assert plan["grid"] // split * group * turns >= min(rows, (2**31 - 1) // split)
        assert 1 <= plan["grid"] <= 2**31 - 1
        assert vector * widest <= 16
        whole = next(v for v in (8, 4, 2, 1) if v * widest <= 16 and v <= n)
        narrow = next(v for v in (8, 4, 2, 1) if v <= whole and (rows == 1 or n % v == 0))
        if tier == "staged":
            assert vector == 1
        elif tier == "warp" and n % (16 // x_type.itemsize) and 16 <= n <= 512 and widest < 8:
            assert (n % vector == 0 and plan["access"] == "aligned") or vector == whole  # or in whole narrow ones
        else:
            assert vector == (narrow if widest == 2 and n < 128 else whole)  # rows of any length go in vectors
        assert values % vector == 0
        assert split in {
            "cluster": (2, 4, 8, 16),
            **dict.fromkeys(("grid", "pipelined"), range(1, multiprocessors + 1)),
        }.get(tier, (1,))
        assert tier != "cluster" or split <= GPUS[compute, multiprocessors]
        kept = values + (0 if tier == "staged" else smem_vecs * vector)
        if tier in ("twopass", "grid", "pipelined"):
            assert group == 1
            assert n * widest > 2**15  # shorter rows need no more than a cluster
        else:
            assert lanes * kept * split >= (n if n % vector == 0 or rows == 1 or tier == "staged" else n + vector - 1)
            assert values * min(widest, 8) <= 160
        if tier in ("block", "cluster", "grid", "pipelined"):
            most = {80: 163, 89: 99, 90: 227, 100: 227}[compute] * 1024
            assert smem_vecs * vector * x_type.itemsize * lanes <= most - 8192
        owns = tier in ("warp", "staged")
        kernels.add(
            (tier, lanes if owns else 0, group, values, vector, split if tier == "cluster" else 1, smem_vecs > 0)
        )
    assert len(kernels) < 100, "no compile for every row length"


@pytest.mark.parametrize(("x_type", "y_type"), [(F32, F32), (BF16, BF16), (BF16, F32), (F64, F64)])
def test_an_invariant_plan_follows_from_the_length_alone(x_type, y_type):
    """What decides which elements a thread adds up is the same for any number of rows, any stride and any address."""
    with onepass.batch_invariant():
        for n in LENGTHS[:-2]:
            seen = set()
            for rows, pad, offset in itertools.product((1, 2, 7, 1000, 10**6), (0, 1, 8), (0, 1, 3)):
                addresses = {"x_address": 4096 + offset * x_type.itemsize, "y_address": 4096}
                plan = native.plan("softmax", True, (rows, n), (n + pad, 1), (n, 1), [1], x_type, y_type, **addresses)
                tier = {"staged": "warp"}.get(plan["tier"], plan["tier"])
                lanes, smem_vecs = plan["threads_per_row"], plan.get("smem_vecs", 0)
                seen.add((tier, lanes, plan["items_per_thread"], plan["vec_size"], plan["blocks_per_row"], smem_vecs))
            assert len(seen) == 1, (n, seen)


def test_few_rows_are_spread_over_as_many_multiprocessors_as_there_are():
    for multiprocessors in (40, 66, 132):
        layout = (1, 2**23), (2**23, 1), (2**23, 1), [1], F32, F32
        plan = native.plan("softmax", True, *layout, sm_count=multiprocessors)
        assert (plan["tier"], plan["blocks_per_row"], plan["grid"]) == ("grid", multiprocessors, multiprocessors)


@pytest.mark.parametrize("dtype", [F32, BF16, F64])
def test_rows_that_take_turns_are_pipelined_in_whole_vectors(dtype):
    """Wherever input and result lie: rows whose vectors are narrower than 16 bytes have another tier."""
    rows, served = 37, set()
    for n, first in itertools.product((262_144, 524_287, 524_288, 900_001), range(9)):
        strides, address = (n, 1), 4096 + first * dtype.itemsize
        plan = native.plan("softmax", True, (rows, n), strides, strides, [1], dtype, dtype, y_address=address)
        whole = plan["vec_size"] * dtype.itemsize == 16 and plan["access"] == "predicated"
        assert whole or plan["tier"] != "pipelined"
        served.add((plan["tier"] == "pipelined", first * dtype.itemsize % 16 == 0))
    assert ((True, True) in served) == (dtype is not F64)


@pytest.mark.parametrize("dtype", [F32, F16, F64])
def test_a_streamed_row_has_its_elements_in_place_in_the_batch_invariant_mode(dtype, tables_back):
    """Even where it begins within a vector: as many of them, in the same order, in the same threads."""
    streams = [[2**63 - 1, 5, 256, 16, 1, 0]]
    of_ours = dict.fromkeys(("write_f32", "write_f16", "reduce_f32", "reduce_f16"), streams)
    native.set_tables("NVIDIA H200", "a test", {**native.tables()["tables"], **of_ours})
    for function, last in (("logsumexp", [1, 0]), ("state", [1, 0]), ("softmax", [5000, 1])):
        plans = []
        for offset in range(3):
            layout = (7, 5000), (5000, 1), last, [1], dtype, F32 if function == "state" and dtype == F16 else dtype
            where = {"x_address": offset * dtype.itemsize, "gpu": "NVIDIA H200"}
            with onepass.batch_invariant():
                plans.append(native.plan(function, True, *layout, **where))
        last = "scalar" if dtype != F64 else "predicated"
        assert [plan.pop("access") for plan in plans] == ["predicated", "scalar", last]
        assert [plan.pop("plan")[-1] for plan in plans] == [0, 1, int(last == "scalar")]
        assert plans[0] == plans[1] == plans[2]
        assert plans[0]["tier"] == "twopass"
        assert plans[0]["threads"] % 32 == 0


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["float32", "bfloat16"])
def test_rows_of_whole_vectors_have_kernels_of_their_own(dtype):
    """Not where a row begins or ends within a vector, in the input or in the output, nor where smem holds a part."""
    size, n = dtype.itemsize, 4096
    whole = {"n": n, "x_stride": n, "y_stride": n, "x": 0, "y": 0}
    for change, edges in [
        ({}, "aligned"),
        ({"x_stride": n + 16 // size}, "aligned"),
        ({"n": n - 1}, "predicated"),
        ({"x_stride": n + 1, "y_stride": n + 1}, "predicated"),
        ({"x": size, "y": size}, "predicated"),
        ({"y": size}, "predicated"),
    ]:
        of = {**whole, **change}
        layout = (9000, of["n"]), (of["x_stride"], 1), (of["y_stride"], 1), [1], dtype, dtype
        plan = native.plan("softmax", True, *layout, x_address=of["x"], y_address=of["y"])
        assert plan["access"] == edges, change
    in_smem = native.plan("softmax", True, (9000, 131072), (131072, 1), (131072, 1), [1], dtype, dtype)
    assert in_smem["access"] == ("predicated" if in_smem["smem_vecs"] else "aligned")
    with onepass.batch_invariant():
        assert native.plan("softmax", True, (9, n), (n, 1), (n, 1), [1], dtype, dtype)["access"] == "aligned"


def test_few_rows_have_tables_of_their_own(tables_back):
    """Where they are whole vectors and are written; in the batch invariant mode the number of rows decides nothing."""
    few = {"few_rows_f32": [[1000, -1, 0, 0, 1, 0], [2**63 - 1, 5, 256, 16, 1, 0]]}
    native.set_tables("NVIDIA H200", "a test", {**native.tables()["tables"], **few})

    def tier(rows, n, function="softmax"):
        last = [n, 1] if function == "softmax" else [1, 0]
        return native.plan(function, True, (rows, n), (n, 1), last, [1], F32, F32, gpu="NVIDIA H200")["tier"]

    assert [tier(rows, 2048) for rows in (1, 4096, 8192)] == ["twopass"] * 3
    others = [tier(8193, 2048), tier(4096, 1000), tier(4096, 2047), tier(4096, 2048, "logsumexp")]
    with onepass.batch_invariant():
        others.append(tier(4096, 2048))
    assert "twopass" not in others


def words_of_a_bank(plan, n, size):
    """How many words of the most wanted bank of shared memory the lanes of a warp read at once."""
    threads = plan["threads_per_row"]
    words = {(lane // threads * n + lane % threads) * size // 4 for lane in range(32)}
    return max(Counter(word % 32 for word in words).values())


@pytest.mark.parametrize("function", ["softmax", "log_softmax", "logsumexp"])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_tiles_of_odd_rows_meet_in_few_banks_and_fill_the_chip(dtype, function):
    size, staged = dtype.itemsize, 0
    for n in range(1, 1400):
        for rows in (300, 20_000_000 // n):
            y_strides = [1, 0] if function == "logsumexp" else [n, 1]
            plan = native.plan(function, True, (rows, n), (n, 1), y_strides, [1], dtype, dtype, gpu="NVIDIA H200")
            if plan["tier"] == "staged":
                staged += 1
                tile = plan["rows_per_block"] * plan["rows_per_thread"]
                assert words_of_a_bank(plan, n, size) <= 3, n
                assert tile * n * size <= 14336 + 16 * plan["rows_per_block"] * n * size, n
                least = plan["rows_per_block"] * (16 // size)  # tiles are whole vectors
                assert tile <= least or rows / tile >= 4 * 132, (n, rows)
    assert staged >= 60


@pytest.mark.parametrize("function", ["softmax", "log_softmax"])
def test_odd_half_rows_keep_few_vectors_in_registers(function):
    rng = random.Random(0)
    for n in [rng.randrange(1601, 380_000) | 1 for _ in range(500)]:
        plan = native.plan(function, True, (8192, n), (n, 1), (n, 1), [1], BF16, BF16, gpu="NVIDIA H200")
        assert plan["tier"] in ("block", "cluster")
        assert plan["items_per_thread"] <= 8 * (7 if function == "softmax" else 6)
        assert plan["threads_per_row"] <= 320
        assert plan["blocks_per_row"] == 1 or n > 8 * 64 * 12


@given(st.integers(1, 3000), st.integers(0, 15), st.integers(0, 15), st.integers(0, 9), st.sampled_from([F32, BF16]))
def test_a_vector_begins_at_the_same_element_of_both_rows(n, x_offset, y_offset, pad, dtype):
    size, x_stride, y_stride = dtype.itemsize, n + pad, n
    first = {"x_address": 4096 + x_offset * size, "y_address": 4096 + y_offset * size}
    plan = native.plan("softmax", True, (4, n), (x_stride, 1), (y_stride, 1), [1], dtype, dtype, **first)
    if plan["tier"] == "staged":
        return
    for vector in (plan["vec_size"], 2 * plan["vec_size"]):
        agree = all((x_offset + row * x_stride - y_offset - row * y_stride) % vector == 0 for row in range(4))
        if vector == plan["vec_size"]:
            assert agree
        else:
            narrow = (size == 2 and n < 128) or (plan["tier"] == "warp" and plan["access"] == "aligned")
            assert not agree or vector * size > 16 or vector > n or narrow
    phased = any((x_offset + row * x_stride) % plan["vec_size"] for row in range(4))
    kept = plan["items_per_thread"] + plan["smem_vecs"] * plan["vec_size"]
    room = plan["threads_per_row"] * kept * plan["blocks_per_row"]
    assert plan["tier"] == "twopass" or room >= (n + plan["vec_size"] - 1 if phased else n)


@pytest.mark.parametrize(("compute", "multiprocessors"), [(86, 82), (89, 128), (90, 132), (120, 170)])
def test_the_grid_tier_reads_nothing_again_that_the_chip_holds(compute, multiprocessors):
    """Also where a block has less shared memory; and no kernel that the plan takes elsewhere is one of 9.0 alone."""
    slots, smem_vecs = (16, 28) if compute == 90 else (12, 8)
    grids = 0
    for each in range(500, 480 * (slots + smem_vecs), 488):
        n = each * multiprocessors * 4
        plan = native.plan(
            "softmax", True, (1, n), (n, 1), (n, 1), [1], F32, F32, arch=compute, sm_count=multiprocessors
        )
        if plan["tier"] == "grid":
            grids += 1
            assert plan["read_again"] == 0, n
            assert plan["items_per_thread"] // plan["vec_size"] <= slots
    assert grids > 10
