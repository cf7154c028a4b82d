"""The emulator of CUDA kernels: what a mistake in a kernel does there, and what instructions give."""

import shutil
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from emulator import Emulator, missing
from lib.plan_tables import F32, Access, Plan, Tier
from lib.plans import check_columns
from lib.support import thin, thin_product
from onepass.tools.emulator.build import CORE

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

FORWARDS, BACKWARDS, DRAWN = 0, 1, 2
AT_ONCE, LATE = 0, 1
N = 64


def run(folder: Path, body: str, x: Tensor, y: Tensor, order: int = FORWARDS, lateness: int = AT_ONCE) -> Tensor:
    """What a block of 64 threads makes of x: with `t`, a thread's number, and `room`, 256 bytes of shared memory."""
    kind = {torch.float32: "float", torch.float64: "double", torch.int32: "int", torch.int16: "short"}
    parameters = f"const {kind[x.dtype]}* x, {kind[y.dtype]}* y"
    code = f'extern __shared__ float room[];\nextern "C" __global__ void onepass_kernel({parameters})'
    kernels = folder / "cuda" / "kernels"
    kernels.mkdir(parents=True)
    (kernels / "kernel.cu").write_text(f"{code} {{\nconst int t = threadIdx.x;\n{body}\n}}\n")
    Emulator(folder, order, lateness).run("kernel.cu", (1, N, 0, 4 * N, False), [x], y)
    return y


# Mistakes -------------------------------------------------------------------------------------------------------------

BESIDE = "room[t] = x[t]; {} y[t] = room[{}];"


@thin_product(3, way=[(FORWARDS, "N-1-t"), (BACKWARDS, "N-1-t"), (DRAWN, "t^1")], barrier=["__syncthreads();", ""])
def test_what_another_thread_has_written_takes_a_barrier(tmp_path, way, barrier):
    x, order, other = torch.randn(N), way[0], way[1].replace("N", str(N))
    y = run(tmp_path, BESIDE.format(barrier, other), x, torch.zeros(N), order)
    assert torch.equal(y, x[[eval(other) for t in range(N)]]) == bool(barrier)


@thin_product(3, order=[FORWARDS, BACKWARDS, DRAWN], barrier=["__syncthreads();", ""])
def test_what_another_thread_has_yet_to_read_takes_a_barrier(tmp_path, order, barrier):
    x = torch.randn(N)
    body = f"room[t] = x[t]; __syncthreads(); const float read = room[{N - 1} - t]; {barrier} room[t] = 0; y[t] = read;"
    assert torch.equal(run(tmp_path, body, x, torch.zeros(N), order), x.flip(0)) == bool(barrier)


@pytest.mark.parametrize("lateness", [AT_ONCE, LATE])
@pytest.mark.parametrize("groups", [0, 1])
def test_copies_are_there_when_they_were_waited_for(tmp_path, lateness, groups):
    x = torch.randn(N)
    body = f"""
    const unsigned to = (unsigned)__cvta_generic_to_shared(room + t);
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(x + t) : "memory");
    asm volatile("cp.async.commit_group;" ::: "memory");
    asm volatile("cp.async.wait_group {groups};" ::: "memory");
    y[t] = room[t];"""
    y = run(tmp_path, body, x, torch.zeros(N), lateness=lateness)
    assert torch.equal(y, x) == (groups == 0 or lateness == AT_ONCE)


REFUSED = {
    "a read outside of all tensors: thread 63 of block 0, 0": "y[t] = x[t + 1];",
    "a write outside of all tensors: thread 0": "y[t - 1] = x[t];",
    "a write to what is only read": "const_cast<float*>(x)[t] = 0;",
    "misaligned access to global memory: thread 1": "float2 v = *(const float2*)(x + t % 32); y[t] = v.x + v.y;",
    "an access beyond shared memory: thread 63": "room[t + 1] = x[t]; y[t] = 0;",
    "misaligned access to shared memory": "*(volatile double*)(room + t) = x[t]; y[t] = 0;",
    "waits for ever: thread 1": "room[t] = 0; if (t) { while (*(volatile float*)room == 0); } y[t] = 0;",
    "waits for ever: thread 0": "if (t < 32) asm volatile(\"bar.sync 1, 64;\"); y[t] = 0;",
    "a lane outside of its own mask: thread 1": "__syncwarp(1); y[t] = x[t];",
    "a shuffle from a lane that is not there": "if (t < 16) y[t] = __shfl_xor_sync(0xffff, x[t], 16);",
    r"no such instruction here: popc\.b64": "y[t] = __popcll((long long)x[t]);",
    "a division by 0": "y[t] = t / (int)(x[t] * 0);",
}  # fmt: skip


@pytest.mark.parametrize("error", thin(REFUSED, 2))
def test_refuses(tmp_path, error):
    with pytest.raises(RuntimeError, match=error):
        run(tmp_path, REFUSED[error], torch.randn(N), torch.zeros(N))


class Mistake(NamedTuple):
    file: str
    right: str
    mistaken: str
    plan: Plan
    error: str
    order: int = FORWARDS
    lateness: int = AT_ONCE


WRONG, BEYOND, STUCK = "wrong, first at", "outside of all tensors", "waits for ever"
OVER = "a message to a block that is over"
TILE = Plan(Tier.COLUMNS, 4, 16, 4, 1, 1, 0, Access.ALIGNED)
CLUSTER = Plan(Tier.COLUMNS, 4, 8, 3, 1, 4, 0, Access.ALIGNED)
CHIP = Plan(Tier.COLUMNS_GRID, 4, 16, 2, 1, 3, 0, Access.ALIGNED)
IN_SMEM = Plan(Tier.COLUMNS, 4, 16, 5, 1, 1, 20, Access.ALIGNED)
ODD, PIECE = (
    Plan(Tier.COLUMNS, 4, 16, 4, 1, 1, 0, Access.PREDICATED),
    Plan(Tier.COLUMNS, 64, 1, 4, 1, 1, 0, Access.SLAB),
)
SHIFTED = Plan(Tier.COLUMNS, 4, 16, 4, 1, 1, 0, Access.SHIFTED)
STAGED = Plan(Tier.COLUMNS_STAGED, 33, 3, 12, 1, 2, 4, Access.ALIGNED)
IN_BULK = STAGED._replace(blocks_per_row=1, smem_vecs=1)
LINES = Plan(Tier.COLUMNS_SMEM, 9, 8, 4, 1, 1, 0, Access.SHIFTED)
SLABS = Plan(Tier.COLUMNS_SMEM, 64, 1, 4, 1, 1, 0, Access.SLAB)
BARRIER = "    __syncthreads();\n"
FIRST, LAST = "    smem.put(smem.sums, max, tile);\n", "    smem.get(smem.epilogues, out, tile);\n"
EXPECT = "expect_tx(C::kClusterSize * tile_cols * sizeof(Partial));"
LESS = EXPECT.replace("C::kClusterSize", "(C::kClusterSize - 1)")
COPIES = "case 0: return wait<0>();", "case 0: return wait<1>();"
ARRIVE = "(blocks - 1) : 1;", "(blocks - 1) : 0;"
VECTORS = "(begin < end.rest);", "(begin <= end.rest);"
GROUPS = "AsyncCopy::wait<0>();", "AsyncCopy::wait<1>();"
NEIGHBOURS = "v >= -col && v < rest)", "v < rest)"
RESULTS = "BulkCopy::fence();\n    __syncthreads();", "BulkCopy::fence();"
ARRIVED = "if (is_bulk()) arrivals[stage].wait(", "if (0) arrivals[stage].wait("
PLACE_IS_FREE = "threadIdx.x < 32) BulkCopy::wait_until_read();", "0) {}"
CLIPPED = "at >= tensor_begin && at + kVec <= tensor_end", "true"
NEUTRAL = "if (!tile.has_element(q + i, v))", "if (false)"
CHUNK = "stream.arrivals[chunk].wait(stream.turn & 1);", ";"
EDGES = "if (!results.are_whole())", "if (false)"
MISTAKES = {
    "maxima before the barrier": Mistake("column_reduce.cuh", FIRST + BARRIER, FIRST, TILE, WRONG),
    "sums before the barrier": Mistake("column_reduce.cuh", BARRIER + LAST, LAST, TILE, WRONG, BACKWARDS),
    "copies that are on their way": Mistake("async_copy.cuh", *COPIES, IN_SMEM, WRONG, FORWARDS, LATE),
    "to a block that has not begun": Mistake("column_reduce.cuh", "cluster_wait();  //", "//", CLUSTER, STUCK),
    "a message not awaited": Mistake("column_reduce.cuh", EXPECT, LESS, CLUSTER, WRONG),
    "a block that does not arrive": Mistake("grid_sync.cuh", *ARRIVE, CHIP, STUCK),
    "one vector too many": Mistake("column_tile.cuh", *VECTORS, CHIP, f"{BEYOND}|{WRONG}"),
    "a column too many": Mistake("column_tile.cuh", ": v < rest;", ": v <= rest;", ODD, BEYOND),
    "a vector before the tensor": Mistake("column_tile.cuh", "if (at[t] < 0) first = 1;", "", SHIFTED, BEYOND),
    "a column of the neighbours": Mistake("column_tile.cuh", *NEIGHBOURS, SHIFTED, f"{BEYOND}|{WRONG}"),
    "a group that is on its way": Mistake("column_staged.cuh", *GROUPS, STAGED, WRONG, FORWARDS, LATE),
    "a group that is on its way in bulk": Mistake("column_staged.cuh", *ARRIVED, IN_BULK, OVER, FORWARDS, LATE),
    "a group in the place of results": Mistake("column_staged.cuh", *PLACE_IS_FREE, IN_BULK, WRONG, FORWARDS, LATE),
    "results before the barrier": Mistake("column_staged.cuh", *RESULTS, STAGED, WRONG, BACKWARDS),
    "vectors beyond the tensor": Mistake("column_smem.cuh", *CLIPPED, LINES, BEYOND),
    "elements of the slab before": Mistake("column_smem.cuh", *NEUTRAL, SLABS, WRONG),
    "a chunk that is on its way": Mistake("column_smem.cuh", *CHUNK, SLABS, OVER, FORWARDS, LATE),
    "the ends of lines": Mistake("column_smem.cuh", *EDGES, LINES, WRONG),
    "before the slab": Mistake("column_tile.cuh", "return p >= 0 && p <", "return p >= -1 && p <", PIECE, BEYOND),
}


@pytest.mark.parametrize("name", thin(MISTAKES, 6))
def test_mistakes_in_the_kernels_are_found(tmp_path, name):
    mistake = MISTAKES[name]
    shutil.copytree(CORE / "cuda", tmp_path / "cuda")
    file = tmp_path / "cuda" / "kernels" / mistake.file
    text = file.read_text()
    assert mistake.right in text
    file.write_text(text.replace(mistake.right, mistake.mistaken))
    engine = Emulator(tmp_path, mistake.order, mistake.lateness)
    with pytest.raises((AssertionError, RuntimeError), match=mistake.error):
        check_columns(engine, "softmax", (F32, F32), mistake.plan)


# Instructions ---------------------------------------------------------------------------------------------------------


def test_exchanges_of_a_warp(tmp_path):
    body = "y[t] = __shfl_xor_sync(~0u, x[t], 5), y[t + 64] = __reduce_max_sync(~0u, x[t]);"
    x = torch.randint(-(2**30), 2**30, (N,), dtype=torch.int32)
    most = x.view(2, 32).amax(1).repeat_interleave(32)
    got = run(tmp_path, body, x, torch.zeros(2 * N, dtype=torch.int32), DRAWN)
    assert torch.equal(got, torch.cat([x[torch.arange(N) ^ 5], most]))


def test_exchanges_within_groups_and_updates(tmp_path):
    body = """
    y[t] = __shfl_down_sync(~0u, x[t], 3), y[t + 64] = __shfl_up_sync(~0u, x[t], 5, 16);
    y[t + 128] = __shfl_sync(~0u, x[t], 9, 16), y[t + 192] = __any_sync(~0u, t == 3) + 2 * __all_sync(~0u, t < 32);
    atomicMax(y + 256, x[t]), atomicAdd((float*)y + 257, 0.5f);
    int own[9];
    for (int i = 0; i < 9; ++i) own[x[i] & 7] = i + t;
    y[t + 258] = own[x[0] & 7];"""
    x = torch.arange(N, dtype=torch.int32)
    got = run(tmp_path, body, x, torch.zeros(258 + N, dtype=torch.int32), DRAWN).tolist()
    assert got[:64] == [t + 3 if t % 32 < 29 else t for t in range(N)]
    assert got[64:128] == [t - 5 if t % 16 >= 5 else t for t in range(N)]
    assert got[128:192] == [t // 16 * 16 + 9 for t in range(N)]
    assert got[192:256] == [3 if t < 32 else 0 for t in range(N)]
    assert (got[256], torch.tensor(got[257], dtype=torch.int32).view(torch.float32)) == (63, 32)
    assert got[258:] == [t + 8 for t in range(N)]


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_conversions_of_half_types(tmp_path, kind):
    half, every = {"f16": torch.float16, "bf16": torch.bfloat16}[kind], torch.arange(-(2**15), 2**15).to(torch.int16)
    convert = 'for (int i = t; i < {}; i += 64) asm("cvt.{}.{} %0, %1;" : "={}"(y[i]) : "{}"(x[i]));'
    got = run(tmp_path / "of", convert.format(2**16, "f32", kind, "f", "h"), every, torch.zeros(2**16))
    assert torch.equal(got.nan_to_num(7), every.view(half).float().nan_to_num(7))
    values = every.view(half).float().nan_to_num(0, 1e38, -1e38)
    between = values + values.roll(1).sub(values).nan_to_num(0) * torch.tensor([0.5, 0.25]).repeat(2**15)
    x = torch.cat([values, between, torch.randn(2**14), torch.tensor([torch.inf, -torch.inf, 65519, 65520])])
    y = torch.zeros(x.numel(), dtype=torch.int16)
    got = run(tmp_path / "to", convert.format(x.numel(), f"rn.{kind}", "f32", "h", "f"), x, y)
    assert torch.equal(got.view(half), x.to(half))


def test_rounding_downwards(tmp_path):
    values = torch.randn(30 * N) * 2.0 ** torch.randint(-30, 30, (30 * N,))
    a, b, c = values.view(3, 10 * N)
    c[::3] = -(a * b)[::3]  # what is left is below their last bits
    body = f"for (int i = t; i < {10 * N}; i += {N}) y[i] = __fmaf_rd(x[i], x[i + {10 * N}], x[i + {20 * N}]);"
    got = run(tmp_path, body, torch.cat([a, b, c]), torch.zeros(10 * N))
    for (one, other, added), y in zip(values.view(3, -1).t().tolist(), got, strict=True):
        exact = Fraction(one) * Fraction(other) + Fraction(added)
        above = torch.nextafter(y, torch.tensor(torch.inf)).item()
        assert Fraction(y.item()) <= exact < Fraction(above)


def test_exponentials_and_logarithms(tmp_path):
    x = torch.cat([torch.randn(N) * 20, torch.tensor([0.0, 1.0, -126.0, -127.0, torch.inf, -torch.inf]).repeat(N)])
    body = f"""
    for (int i = t; i < {x.numel()}; i += {N}) {{
      asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y[i]) : "f"(x[i]));
      asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y[i + {x.numel()}]) : "f"(x[i]));
    }}"""
    got = run(tmp_path, body, x, torch.zeros(2 * x.numel())).view(2, -1)
    powers = torch.exp2(x.double()).float()
    torch.testing.assert_close(got[0], torch.where(powers < 2.0**-126, 0, powers), rtol=1e-7, atol=0)
    torch.testing.assert_close(got[1], torch.log2(x.double()).float(), rtol=1e-7, atol=0, equal_nan=True)


def test_maxima_with_and_without_nan(tmp_path):
    x = torch.randn(2 * N)
    x[::3] = torch.nan
    body = """
    asm("max.f32 %0, %1, %2;" : "=f"(y[t]) : "f"(x[t]), "f"(x[t + 64]));
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(y[t + 64]) : "f"(x[t]), "f"(x[t + 64]));"""
    got = run(tmp_path, body, x, torch.zeros(2 * N))
    want = torch.cat([torch.fmax(x[:N], x[N:]), torch.maximum(x[:N], x[N:])])
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def test_logarithms_of_float64(tmp_path):
    x = torch.rand(N, dtype=torch.float64) * 10
    got = run(tmp_path, "y[t] = log(x[t]);", x, torch.zeros_like(x))
    torch.testing.assert_close(got, x.log(), rtol=1e-15, atol=1e-16)
