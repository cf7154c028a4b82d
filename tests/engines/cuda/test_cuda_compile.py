"""The CUDA engine without a GPU: its sources compile for every architecture, without spills and with wide loads and
stores."""

import math
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from emulator.build import ptx_of
from lib.paths import CORE
from lib.plans import BF16, F16, F32, F64, PREFETCH, Access, Plan, Tier, names
from lib.warmup import needs_nvrtc
from onepass import native

SOURCES = CORE / "cuda" / "kernels"
# Passes and tiers; of each the function, the input, the output (of a gradient: of the result, of the gradient) and the
# numbers of a plan, for every source, function and type. Columns have shared memory for the next tile, and for vectors.
KERNELS_OF = """
forward warp: softmax f32 f32 32 4 32 4 1 0, softmax f32 f32 32 4 36 4 1 0, softmax bf16 bf16 2 64 8 8 1 0,
    softmax f16 f32 8 16 8 1 1 0, softmax bf16 bf16 32 4 32 8 1 0 aligned, logsumexp bf16 f32 8 16 16 8 1 0;
forward block: softmax f32 f32 256 1 32 4 1 0, softmax bf16 bf16 256 1 40 8 1 0, softmin f16 f16 256 1 40 8 1 0,
    softmax f64 f16 64 1 16 2 1 0, log_softmax bf16 bf16 256 1 32 8 1 0, softmin f64 f64 512 1 12 2 1 0,
    logsumexp f32 f32 512 1 32 4 1 0, softmax bf16 bf16 128 1 64 8 1 0 aligned,
    log_softmax f32 f32 256 1 32 4 1 0 aligned, softmax bf16 bf16 256 1 16 8 1 0 scalar,
    logsumexp bf16 f32 256 1 32 8 1 0 aligned;
forward cluster: softmax f32 f32 512 1 32 4 8 0, softmax f16 f16 256 1 64 8 8 0 aligned,
    softmax bf16 bf16 256 1 32 8 16 4, softmax f32 f32 192 1 28 4 16 4, softmax f32 f32 256 1 32 4 16 8,
    softmax bf16 bf16 160 1 40 8 16 8, softmax bf16 bf16 128 1 48 8 16 4, log_softmax f32 f32 128 1 24 4 8 8,
    softmax bf16 f32 256 1 16 4 16 8, logsumexp f16 f32 256 1 32 8 8 0;
forward staged: softmax f32 f32 1 128 34 1 1 1, log_softmax bf16 bf16 32 4 26 1 1 2, state bf16 f32 4 32 26 1 1 2,
    logsumexp f16 f32 4 32 26 1 1 2;
forward grid: softmax f32 f32 480 1 16 4 132 8, softmax bf16 bf16 480 1 32 8 33 8, softmax f32 f32 256 1 48 4 132 0,
    softmax f32 f32 480 1 64 4 132 28, softmax f32 f32 480 1 0 4 132 28, log_softmax bf16 bf16 480 1 0 8 132 28,
    softmax f64 f64 480 1 16 2 132 28, softmax bf16 bf16 480 1 96 8 132 24, softmax bf16 bf16 480 1 128 8 132 20,
    log_softmax f16 f32 352 1 32 4 132 16, logsumexp f32 f32 480 1 64 4 2 24, logsumexp bf16 f32 480 1 32 8 33 8;
forward twopass: softmax f32 f32 512 1 16 4 1 0, softmax bf16 bf16 512 1 16 8 1 0, logsumexp bf16 bf16 512 1 16 8 1 0,
    logsumexp f16 f32 512 1 16 8 1 0;
backward warp: softmax f32 f32 32 4 16 4 1 0 aligned, softmax bf16 bf16 8 16 16 8 1 0,
    logsumexp f32 f32 8 16 16 4 1 0 aligned, logsumexp f32 f16 8 16 16 8 1 0;
backward_broadcast warp: log_softmax f32 f16 4 32 8 4 1 0;
backward block: softmax f32 f32 256 1 16 4 1 0 aligned, log_softmax bf16 bf16 128 1 24 8 1 0,
    softmin f16 f16 256 1 24 8 1 0 aligned, softmax f64 f64 256 1 4 2 1 0;
backward cluster: softmax f32 f32 512 1 20 4 16 0, softmax bf16 bf16 256 1 32 8 8 0,
    log_softmax bf16 bf16 256 1 32 8 16 0 aligned;
backward grid: softmax f32 f32 480 1 32 4 132 12, log_softmax bf16 bf16 480 1 64 8 132 8,
    softmax f16 f16 480 1 32 8 132 8, softmax f64 f64 480 1 8 2 132 8;
backward_broadcast grid: log_softmax bf16 bf16 256 1 16 8 33 0;
backward twopass: softmax f32 f32 512 1 16 4 1 0, log_softmax bf16 bf16 512 1 16 8 1 0,
    logsumexp bf16 bf16 256 1 16 8 1 0, logsumexp f32 bf16 256 1 16 8 1 0 aligned;
forward columns: softmax f32 f32 64 1 88 4 1 0 aligned, softmax bf16 bf16 64 1 176 8 1 0 aligned,
    softmax f32 f32 7 18 56 4 4 0 aligned, softmax bf16 bf16 16 8 64 4 8 1 aligned,
    softmax f32 f32 245 1 52 4 4 1 slab-aligned, softmax bf16 bf16 245 1 104 8 2 1 slab-aligned,
    log_softmax f32 f32 333 1 36 4 1 0 slab, softmax f16 f16 333 1 40 8 1 0 slab,
    log_softmax bf16 bf16 64 1 160 8 1 0 aligned, softmin f16 f16 4 32 128 8 8 0 aligned,
    softmax f32 f32 8 32 64 4 16 16 aligned, softmax bf16 bf16 8 32 128 8 16 16 aligned,
    softmax f32 f32 8 32 64 4 1 8 aligned, softmax bf16 bf16 4 128 96 8 1 20 aligned,
    log_softmax f16 f16 245 1 32 8 1 24 slab-aligned, softmax bf16 bf16 8 16 104 8 1 0, logsumexp f32 f32 8 16 64 4 1 0,
    logsumexp bf16 f32 64 1 160 8 1 0 aligned, state bf16 f32 8 16 64 8 8 0 aligned,
    softmax f16 f32 16 8 48 4 1 0 aligned, log_softmax f64 f64 64 1 44 2 1 0 aligned,
    softmax f32 f32 1 256 4 1 1 0 strided, softmax bf16 bf16 32 8 8 1 8 0 strided;
forward columns-grid: softmax f32 f32 4 128 32 4 66 8 aligned, softmax bf16 bf16 1 512 64 8 132 8 aligned,
    softmax f32 f32 490 1 32 4 2 8 slab-aligned, softmax f16 f16 8 64 64 8 12 0,
    softmax f64 f64 8 64 16 2 66 24 aligned, log_softmax f32 f32 1 256 8 1 4 0 strided;
forward columns-twopass: softmax f32 f32 2 256 32 4 108 0 aligned, softmax bf16 bf16 1 512 64 8 132 0 aligned,
    logsumexp bf16 bf16 8 64 64 8 1 0 aligned, softmax f32 f32 333 1 32 4 8 0 slab;
backward columns: softmax f32 f32 32 4 24 4 1 0 aligned, softmax bf16 bf16 32 4 48 8 1 0 aligned,
    log_softmax f32 f32 8 32 32 4 8 0 aligned, log_softmax bf16 bf16 8 16 64 8 8 0 aligned,
    softmax f32 f32 8 32 32 4 16 8 aligned, softmax bf16 bf16 8 32 64 8 1 8 aligned,
    softmax f32 f32 245 1 28 4 8 1 slab-aligned, softmax bf16 bf16 245 1 56 8 4 1 slab-aligned,
    softmin f16 f16 333 1 40 8 1 0 slab, softmax f32 bf16 32 4 24 4 1 0, softmax f64 f64 32 4 12 2 1 0 aligned,
    softmax f32 f32 1 256 4 1 1 0 strided;
backward_broadcast columns: log_softmax bf16 bf16 32 4 48 8 1 0 aligned;
backward columns-grid: softmax f32 f32 4 128 16 4 66 12 aligned, softmax bf16 bf16 2 256 64 8 66 0 aligned;
backward columns-twopass: log_softmax f32 f32 2 256 16 4 108 0 aligned, softmax bf16 bf16 333 1 32 8 1 0 slab,
    logsumexp f32 f32 16 16 32 4 4 0 aligned, logsumexp f32 bf16 16 16 64 8 1 0 aligned,
    logsumexp f32 f32 245 1 32 4 4 0 slab-aligned
"""


def parse(which: str, tier: str, words: str) -> tuple[Any, ...]:
    """A kernel as `native.compile_kernel` takes it."""
    function, x, y, *numbers = words.split()
    access = 0 if numbers[-1].isdigit() else Access[numbers.pop().upper().replace("-", "_")]
    dtypes = {"f32": F32, "f64": F64, "f16": F16, "bf16": BF16}
    plan = Plan(Tier(native.TIERS.index(tier)), *map(int, numbers), access)
    return function, dtypes[x], dtypes[y], plan, which


KERNELS = [
    parse(*key.split(), words)
    for key, text in (group.split(":") for group in KERNELS_OF.split(";"))
    for words in text.split(",")
]


def tool(name: str, *arguments: object) -> str:
    """What a tool for cubins says; Triton brings them."""
    triton = pytest.importorskip("triton")
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return subprocess.run([path, *map(str, arguments)], capture_output=True, text=True, check=True).stdout


def is_offered(dtype: Any, plan: Plan, which: str, arch: int) -> bool:
    """Clusters from 9.0 on, and in the tier grid many vectors in registers on 9.0 alone (the plan's headers)."""
    if arch < 90 and (plan.tier == Tier.CLUSTER or (plan.tier == Tier.COLUMNS and plan.blocks_per_row > 1)):
        return False
    vectors = plan.items_per_thread // plan.vec_size
    many = vectors > 12 if which == "forward" else plan.items_per_thread * dtype.itemsize > 64
    return plan.tier != Tier.GRID or arch == 90 or not many


def for_gpus() -> list[Any]:
    """Each kernel for 9.0, the first of each tier and pass for the others too, and the first of half types for 10.0.
    Those that are not slow: the first of each tier, pass and access for 9.0, of each tier and pass for one other."""
    made, seen = [], set()
    for kernel in KERNELS:
        _, dtype, _, plan, which = kernel
        kind, half = (plan.tier, which), dtype.itemsize == 2
        others = (80, 100, 120) if kind not in seen else (100,) if half and (*kind, half) not in seen else ()
        quick = {90} if (*kind, plan.access, "access") not in seen else set()
        quick |= {(100, 120)[len(seen) % 2]} if kind not in seen else set()
        for arch in (90, *others):
            if is_offered(dtype, plan, which, arch):
                made.append(pytest.param(*kernel, arch, marks=[] if arch in quick else pytest.mark.slow))
        seen |= {kind, (*kind, half), (*kind, plan.access, "access")}
    return made


def stack_limit(dtype: Any, plan: Plan, which: str) -> int:
    """Bytes of a thread on the stack, where 64 registers are all there are: the addresses of shared memory, of strided
    elements, of messages and of what the blocks of clusters send; in the tier grid up to twelve words, which are read
    once a row, or once a chunk of eight vectors."""
    if plan.tier >= Tier.COLUMNS:
        sends = plan.tier == Tier.COLUMNS and plan.blocks_per_row > 1
        if plan.access == Access.STRIDED or plan.tier == Tier.COLUMNS_GRID:
            return 32
        return 16 if plan.smem_vecs > PREFETCH or sends or dtype is F64 else 0
    if which != "forward":
        return 16
    return 48 if plan.tier == Tier.GRID else 16 if plan.tier in (Tier.BLOCK, Tier.CLUSTER) and plan.smem_vecs > 0 else 0


@needs_nvrtc
@pytest.mark.parametrize(("function", "x_type", "y_type", "plan", "which", "arch"), for_gpus(), ids=names)
def test_compiles_without_spills(tmp_path, monkeypatch, function, x_type, y_type, plan, which, arch):
    monkeypatch.setenv("ONEPASS_CACHE_DIR", "off")
    cubin = tmp_path / "kernel.cubin"
    native.compile_kernel(function, x_type, y_type, plan, arch, cubin, which)
    usage = tool("cuobjdump", "--dump-resource-usage", cubin)
    report = dict(re.findall(r"(STACK|LOCAL|REG):(\d+)", usage))
    assert int(report["STACK"]) <= stack_limit(x_type, plan, which), usage
    assert report["LOCAL"] == "0", usage
    sass = tool("nvdisasm", "--print-code", "--no-dataflow", cubin)
    forward, columns = which == "forward", plan.tier >= Tier.COLUMNS
    writes = not forward or function not in ("logsumexp", "state")
    if plan.tier == Tier.STAGED:
        assert re.search(r"LDGSTS\.E\.BYPASS\.128", sass), "no wide load"
        assert not writes or re.search(r"STG\.E\.128", sass), "no wide store"
        return
    wider = max(x_type.itemsize, y_type.itemsize) if writes else x_type.itemsize
    if forward and not columns and (plan.access == Access.SCALAR or plan.vec_size * wider != 16):
        return
    wide = {16: r"\.128", 8: r"\.64", 4: "", 2: r"\.U16"}
    read = y_type if function == "logsumexp" and not forward else x_type
    load = r"LDG(STS)?\.E[.A-Z]*" if columns else r"LDG\.E(\.EF)?"
    assert re.search(load + wide[plan.vec_size * read.itemsize], sass), "no wide load"
    if columns and plan.smem_vecs:
        copies = re.search(r"LDGSTS\.E\.BYPASS\.128", sass)
        assert copies or plan.vec_size * read.itemsize < 16, "no asynchronous copy"
    if writes:
        assert re.search(r"STG\.E[.A-Z]*" + wide[plan.vec_size * y_type.itemsize], sass), "no wide store"


MACROS = {
    "IS_BACKWARD": 0, "IN_TYPE": "half_t", "OUT_TYPE": "float", "FUNCTION": "Function::softmax", "THREADS_PER_ROW": 0,
    "ROWS_PER_BLOCK": 1, "VECS_PER_THREAD": 4, "VEC_SIZE": 4, "VEC_ACCESS": 0, "CLUSTER_SIZE": 1, "USES_SMEM_VECS": 0,
    "BROADCAST_GRAD": 0, "BLOCK_THREADS": 256, "PREFETCHES_TILE": 0, "USES_GRID": 0, "TWO_PASS": 0,
}  # fmt: skip


@needs_nvrtc
@pytest.mark.parametrize("header", [path.name for path in sorted(SOURCES.glob("*.cuh"))])
def test_headers_compile_by_themselves(header):
    macros = MACROS if header == "config.cuh" else {}
    ptx_of(SOURCES / header, "90", [f"-D{name}={value}" for name, value in macros.items()])


def test_only_the_configuration_reads_macros_of_the_command_line():
    readers = {
        name: [path.name for path in SOURCES.iterdir() if re.search(rf"\b{name}\b", path.read_text())]
        for name in MACROS
    }
    assert all(files == ["config.cuh"] for files in readers.values()), readers


@needs_nvrtc
def test_a_compile_error_is_reported(tmp_path):
    with pytest.raises(RuntimeError, match=r"does not compile here(.|\n)*gpu-architecture"):
        native.compile_kernel("softmax", F32, F32, Plan(Tier.WARP, 32, 4, 4, 4, 1, 0), 1, tmp_path / "kernel.cubin")


@pytest.mark.parametrize(("dtype", "which"), [(F16, 0), (BF16, 1)], ids=names)
def test_products_with_the_factors_of_exponentials_of_halves_are_exact(dtype, which):
    """And the factors make up log2(e)."""
    numbers = re.findall(r"kFactor = ([\d.]+)f, kRest = ([\d.]+)f", (SOURCES / "exp_half.cuh").read_text())
    factor, rest = (float(torch.tensor(float(number))) for number in numbers[which])
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(dtype).float()
    every = every[every.isfinite() & ((every == 0) | (every.abs() >= 2.0**-126))]
    assert (every * factor).isfinite().all()
    assert ((every * factor).double() == every.double() * factor).all()
    assert factor * rest == pytest.approx(math.log2(math.e), rel=3e-8)
    if dtype is BF16:  # sums leave out what the factor lacks
        assert 0 < rest - 2 < 1e-5
