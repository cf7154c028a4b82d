"""The CUDA engine without a GPU: its sources compile for every architecture, without spills, with wide loads and
stores, and to no more instructions than before."""

import functools
import itertools
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lib.kernels import disassemble, name_of, read_usage, select_kernels
from lib.paths import CORE
from lib.plan_tables import BF16, F16, F32, F64, OF_COLUMNS, Access, Plan, Tier, names
from lib.support import slow, thin_product, thin_tuples
from lib.warmup import needs_nvrtc
from onepass import native
from onepass._kernel_compiler import Kernel
from onepass.tools.emulator.build import ptx_of

SOURCES = CORE / "cuda" / "kernels"
# The version of NVRTC; then a line for each pass, tier and access, with its kernels for 9.0: of each the rest of its
# name, registers, bytes on the stack and instructions.
COUNTS = Path(__file__).with_name("kernel_counts.txt")
REWRITES = os.environ.get("EXPECTTEST_ACCEPT") == "1"
REWRITE = "EXPECTTEST_ACCEPT=1 python -m pytest -m '' tests/engines/cuda/test_cuda_compile.py"
MORE_INSTRUCTIONS = 1.02
MORE_REGISTERS = 16  # with another NVRTC


def read_counts() -> tuple[str, dict[str, list[int]]]:
    version, *lines = COUNTS.read_text().splitlines()
    kernels = (
        f"{group} {kernel}"
        for group, _, rest in (line.partition(": ") for line in lines)
        for kernel in rest.split("; ")
    )
    split = (kernel.rsplit(maxsplit=3) for kernel in kernels)
    return version, {name: [int(number) for number in numbers] for name, *numbers in split}


def write_counts(version: str, counts: dict[str, list[int]]) -> None:
    lines: dict[str, list[str]] = {}
    for name, numbers in sorted(counts.items()):
        *group, rest = name.split(" ", 3)
        lines.setdefault(" ".join(group), []).append(f"{rest} {' '.join(map(str, numbers))}")
    COUNTS.write_text("".join([f"{version}\n", *(f"{group}: {'; '.join(rest)}\n" for group, rest in lines.items())]))


@pytest.fixture(scope="module")
def counted() -> Iterator[dict[str, list[int]]]:
    """What tests have counted, which goes into the file if it is to be rewritten."""
    counted: dict[str, list[int]] = {}
    yield counted
    if REWRITES and counted:
        version, before = read_counts()
        now = f"NVRTC {native.status('nvrtc')}"
        every = {**(before if version == now else {}), **counted}
        write_counts(now, {name: every[name] for name in selected_names() if name in every})


@functools.cache
def select(arch: int) -> list[tuple[Kernel, bool]]:
    return select_kernels(arch)


def selected_names() -> list[str]:
    return sorted(name_of(kernel) for kernel, _ in select(90))


def stack_limit(kernel: Kernel) -> int:
    """Bytes of a thread on the stack, where 64 registers are all there are: the addresses of shared memory, of strided
    elements, of messages and of what the blocks of clusters send; in the tier grid up to twelve words, which are read
    once a row, or once a chunk of eight vectors."""
    plan, doubles = Plan(*kernel.plan), kernel.x_type is F64
    if plan.tier in OF_COLUMNS:
        if plan.tier == Tier.COLUMNS_TWOPASS and doubles:
            return 40
        if plan.access == Access.STRIDED or plan.tier == Tier.COLUMNS_GRID:
            return 32
        sends = plan.tier == Tier.COLUMNS and plan.blocks_per_row > 1
        return 16 if plan.smem_vecs > 0 or sends or doubles or kernel.which == "backward_broadcast" else 0
    if kernel.which != "forward":
        return 16
    if plan.tier == Tier.GRID or (plan.tier == Tier.TWOPASS and doubles):
        return 48
    return 16 if plan.tier in (Tier.BLOCK, Tier.CLUSTER) and plan.smem_vecs > 0 else 0


def expected_instructions(kernel: Kernel) -> dict[str, str]:
    """Regular expressions of wide loads and stores, and of asynchronous copies."""
    function, x_type, y_type, which, numbers = kernel
    plan = Plan(*numbers)
    forward, columns = which == "forward", plan.tier in OF_COLUMNS
    writes = not forward or function not in ("logsumexp", "state")
    copy = r"LDGSTS\.E\.BYPASS\.128"
    if plan.tier in (Tier.STAGED, Tier.COLUMNS_STAGED):
        return {"wide load": copy, **({"wide store": r"STG\.E\.128"} if writes else {})}
    if plan.tier == Tier.COLUMNS_SMEM:  # or in bulk
        return {"wide load": copy + "|UBLKCP", **({"wide store": r"STG\.E\.128|UBLKCP"} if writes else {})}
    wider = max(x_type.itemsize, y_type.itemsize) if writes else x_type.itemsize
    if forward and not columns and (plan.access == Access.SCALAR or plan.vec_size * wider != 16):
        return {}
    wide = {16: r"\.128", 8: r"\.64", 4: "", 2: r"\.U16"}
    read = plan.vec_size * (y_type if function == "logsumexp" and not forward else x_type).itemsize
    through_smem = columns or plan.tier == Tier.PIPELINED
    expected = {"wide load": (r"LDG(STS)?\.E[.A-Z]*" if through_smem else r"LDG\.E(\.EF)?") + wide[read]}
    if columns and plan.smem_vecs and read == 16:
        expected["asynchronous copy"] = copy
    if writes:
        expected["wide store"] = r"STG\.E[.A-Z]*" + wide[plan.vec_size * y_type.itemsize]
    return expected


def growth(name: str, registers: int, stack: int, instructions: int) -> Iterator[str]:
    """What there is more of than the file says. Another NVRTC may take other instructions, and some more registers."""
    version, counts = read_counts()
    if name not in counts:
        yield f"not in {COUNTS.name}"
        return
    same = version == f"NVRTC {native.status('nvrtc')}"
    registers_before, stack_before, instructions_before = counts[name]
    step = 8  # registers are given to threads by eights
    if registers > -(-registers_before // step) * step + (0 if same else MORE_REGISTERS):
        yield f"{registers_before} -> {registers} registers"
    if same and stack > stack_before:
        yield f"{stack_before} -> {stack} bytes on the stack"
    if same and instructions > MORE_INSTRUCTIONS * instructions_before:
        yield f"{instructions_before} -> {instructions} instructions"


def check(kernels: list[Kernel], arch: int, folder: Path, counted: dict[str, list[int]]) -> None:
    cubins = [folder / f"{number}.cubin" for number in range(len(kernels))]
    for cubin, (function, x_type, y_type, which, plan) in zip(cubins, kernels, strict=True):
        native.compile_kernel(function, x_type, y_type, plan, arch, cubin, which)
    wrong = []
    for kernel, cubin, lines in zip(kernels, cubins, disassemble(cubins, arch), strict=True):
        name, usage, sass = name_of(kernel), read_usage(cubin), "\n".join(lines)
        complaints = [
            f"no {what}" for what, regex in expected_instructions(kernel).items() if not re.search(regex, sass)
        ]
        if usage["LOCAL"] or usage["STACK"] > stack_limit(kernel):
            complaints.append(f"spills: {usage}")
        if arch == 90:
            counted[name] = [usage["REG"], usage["STACK"], len(lines)]
            complaints += growth(name, *counted[name]) if not REWRITES else []
        wrong += [f"{name}: {complaint}" for complaint in complaints]
    assert not wrong, "\n".join([*wrong, f"if that is meant: {REWRITE}"])
    if arch == 90 and not REWRITES:
        version, now = read_counts()[0], f"NVRTC {native.status('nvrtc')}"
        if version != now:
            pytest.skip(f"instructions are those of {version}, here is {now}: only spills and registers were checked")


@needs_nvrtc
@pytest.mark.parametrize("which", ["forward", "backward"])
@pytest.mark.parametrize(("vecs", "blocks"), [(8, 1), (20, 1), (28, 16), (32, 1)])
def test_lone_elements_of_half_types_do_not_spill(which, vecs, blocks, tmp_path):
    """An element that is a vector by itself takes a whole register, though it has two bytes."""
    plan = Plan(Tier.COLUMNS, 61, 2, vecs, 1, blocks, 0, Access.ALIGNED)
    native.compile_kernel("softmax", F16, F16, plan, 90, tmp_path / "kernel.cubin", which)
    usage = read_usage(tmp_path / "kernel.cubin")
    assert usage["STACK"] == usage["LOCAL"] == 0, usage


@needs_nvrtc
@pytest.mark.parametrize("quick", [True, slow(False)], ids=["quick", "more"])
@pytest.mark.parametrize(
    ("which", "tier"),
    # Of one tier the forward kernels, of the next one the gradients.
    thin_tuples(((which, t) for k, t in enumerate(Tier) for which in native.PASSES[:2][:: (-1) ** k]), 24),
    ids=names,
)
def test_compiles_to_no_more_than_before(tmp_path, monkeypatch, counted, tier, which, quick):
    pytest.importorskip("triton")
    monkeypatch.setenv("ONEPASS_CACHE_DIR", "off")
    kernels = [k for k, is_quick in select(90) if (k.plan[0], is_quick) == (tier, quick) and k.which.startswith(which)]
    assert kernels
    check(kernels, 90, tmp_path, counted)


@needs_nvrtc
@pytest.mark.parametrize(
    ("arch", "which"),
    [
        (arch, which) if (arch, which) == (120, "backward") else slow(arch, which)
        for arch in (80, 100, 120)
        for which in native.PASSES
    ],
)
def test_compiles_for_other_architectures(tmp_path, monkeypatch, counted, arch, which):
    """The first kernel of each tier, and the first of half types."""
    pytest.importorskip("triton")
    monkeypatch.setenv("ONEPASS_CACHE_DIR", "off")
    kernels: dict[Any, Kernel] = {}
    for kernel, _ in select(arch):
        if kernel.which == which:
            kernels.setdefault((kernel.plan[0], arch == 100 and kernel.x_type.itemsize == 2), kernel)
    check(list(kernels.values()), arch, tmp_path, counted)


@pytest.mark.skipif(REWRITES, reason="the file is written after the tests")
def test_the_file_lists_what_is_selected():
    assert sorted(read_counts()[1]) == selected_names(), REWRITE


MACROS = {
    "IS_BACKWARD": 0, "IN_TYPE": "half_t", "OUT_TYPE": "float", "FUNCTION": "Function::softmax", "THREADS_PER_ROW": 0,
    "ROWS_PER_BLOCK": 1, "VECS_PER_THREAD": 4, "VEC_SIZE": 4, "VEC_ACCESS": 0, "CLUSTER_SIZE": 1, "USES_SMEM_VECS": 0,
    "BROADCAST_GRAD": 0, "BLOCK_THREADS": 256, "PREFETCHES_TILE": 0, "USES_GRID": 0, "TWO_PASS": 0,
    "STAGES_GROUPS": 0,
    "KEEPS_TILE_IN_SMEM": 0,
}  # fmt: skip


@needs_nvrtc
@pytest.mark.parametrize("header", [path.name for path in sorted(SOURCES.glob("*.cuh"))])
def test_headers_compile_by_themselves(header):
    has_macros = header in ("config.cuh", "segment_types.cuh", "segment_pieces.cuh")
    macros = MACROS | {"ROWS_PER_BLOCK": 256} if has_macros else {}
    ptx_of(SOURCES / header, "90", [f"-D{name}={value}" for name, value in macros.items()])


@needs_nvrtc
@pytest.mark.parametrize("arch", ["90", *map(slow, ("80", "100", "120"))])
@pytest.mark.parametrize("source", [slow("rows"), slow("staged"), slow("columns"), "merge", "total"])
def test_losses_compile(source, arch):
    """A plain cross-entropy, one with all that it takes, and all terms."""
    each = (("bfloat16_t", 131), ("float", 495), ("double", 63))
    for (dtype, parts), backward in itertools.product(each, (0, 1)):
        if backward and source in ("merge", "total"):
            continue
        named = {"IN_TYPE": dtype, "OUT_TYPE": dtype, "FUNCTION": "Function::logsumexp", "IS_BACKWARD": backward}
        macros = MACROS | named | {"LOSS_PARTS": parts, "VEC_ACCESS": 2 if source == "columns" else 0}
        if dtype == "double":
            macros["VEC_SIZE"] = 2
        ptx_of(SOURCES / f"loss_{source}.cu", arch, [f"-D{name}={value}" for name, value in macros.items()])


SEGMENT_TYPES = {"bfloat16_t": 4, "float": 4, "double": 2}  # and the size of a vector


@needs_nvrtc
@thin_product(
    17, arch=("80", "90", "100", "120"), dtype=SEGMENT_TYPES, function=("softmax", "log_softmax", "logsumexp")
)
def test_segments_compile(arch, dtype, function):
    """Rows alone, heads in an order with a bias, and the batch-invariant mode."""
    vec_size = SEGMENT_TYPES[dtype]
    tiled, long = (("tiled", 9, 1), ("tiled", 7, vec_size)), (("long", 41, vec_size), ("long", 39, 1))
    for backward, (source, parts, size) in itertools.product((0, 1), (*tiled, *long, ("invariant", 17, 1))):
        named = {"IN_TYPE": dtype, "OUT_TYPE": dtype, "FUNCTION": f"Function::{function}", "VEC_SIZE": size}
        named |= {"IS_BACKWARD": backward, "SEGMENT_PARTS": parts, "BIAS_TYPE": dtype, "ROWS_PER_BLOCK": 256}
        ptx_of(SOURCES / f"segments_{source}.cu", arch, [f"-D{name}={v}" for name, v in (MACROS | named).items()])


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
