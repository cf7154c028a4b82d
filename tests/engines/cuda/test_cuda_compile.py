"""The CUDA engine without a GPU: its sources compile for every architecture."""

import re
import subprocess
from pathlib import Path

import pytest
import torch

import onepass
from emulator.build import ptx_of
from onepass import native

WARP, STAGED, BLOCK, CLUSTER, GRID, TWOPASS, COLUMNS, COLUMNS_GRID, COLUMNS_TWOPASS = range(9)
APART, WHOLE, SLAB, WHOLE_SLAB, STRIDED = range(1, 6)  # of edges, beside 0, a window
F32, F64, F16, BF16 = torch.float32, torch.float64, torch.float16, torch.bfloat16

# (function, input, output, (tier, lanes, rows a block, values, vector, split, shelf, edges)): every source, function,
# type.
KERNELS = [
    ("softmax", F32, F32, (WARP, 32, 4, 32, 4, 1, 0, 0)),
    ("softmax", F32, F32, (WARP, 32, 4, 36, 4, 1, 0, 0)),
    ("softmax", BF16, BF16, (WARP, 2, 64, 8, 8, 1, 0, 0)),
    ("softmax", F16, F32, (WARP, 8, 16, 8, 1, 1, 0, 0)),
    ("softmax", F32, F32, (BLOCK, 256, 1, 32, 4, 1, 0, 0)),
    ("softmax", BF16, BF16, (BLOCK, 256, 1, 40, 8, 1, 0, 0)),
    ("softmin", F16, F16, (BLOCK, 256, 1, 40, 8, 1, 0, 0)),
    ("softmax", F64, F16, (BLOCK, 64, 1, 16, 2, 1, 0, 0)),
    ("log_softmax", BF16, BF16, (BLOCK, 256, 1, 32, 8, 1, 0, 0)),
    ("softmin", F64, F64, (BLOCK, 512, 1, 12, 2, 1, 0, 0)),
    ("logsumexp", F32, F32, (BLOCK, 512, 1, 32, 4, 1, 0, 0)),
    ("softmax", F32, F32, (CLUSTER, 512, 1, 32, 4, 8, 0, 0)),
    ("softmax", BF16, BF16, (WARP, 32, 4, 32, 8, 1, 0, 2)),
    ("softmax", BF16, BF16, (BLOCK, 128, 1, 64, 8, 1, 0, 2)),
    ("log_softmax", F32, F32, (BLOCK, 256, 1, 32, 4, 1, 0, 2)),
    ("softmax", F16, F16, (CLUSTER, 256, 1, 64, 8, 8, 0, 2)),
    ("softmax", BF16, BF16, (CLUSTER, 256, 1, 32, 8, 16, 4, 0)),
    ("softmax", F32, F32, (CLUSTER, 192, 1, 28, 4, 16, 4, 0)),
    ("softmax", F32, F32, (CLUSTER, 256, 1, 32, 4, 16, 8, 0)),
    ("softmax", BF16, BF16, (CLUSTER, 160, 1, 40, 8, 16, 8, 0)),
    ("softmax", BF16, BF16, (CLUSTER, 128, 1, 48, 8, 16, 4, 0)),
    ("log_softmax", F32, F32, (CLUSTER, 128, 1, 24, 4, 8, 8, 0)),
    ("softmax", BF16, F32, (CLUSTER, 256, 1, 16, 4, 16, 8, 0)),
    ("softmax", F32, F32, (STAGED, 1, 128, 34, 1, 1, 1, 0)),
    ("log_softmax", BF16, BF16, (STAGED, 32, 4, 26, 1, 1, 2, 0)),
    ("state", BF16, F32, (STAGED, 4, 32, 26, 1, 1, 2, 0)),
    ("softmax", F32, F32, (GRID, 480, 1, 16, 4, 132, 8, 0)),
    ("softmax", BF16, BF16, (GRID, 480, 1, 32, 8, 33, 8, 0)),
    ("softmax", F32, F32, (GRID, 256, 1, 48, 4, 132, 0, 0)),
    ("softmax", F32, F32, (GRID, 480, 1, 64, 4, 132, 28, 0)),  # of 9.0 alone
    ("softmax", F32, F32, (GRID, 480, 1, 0, 4, 132, 28, 0)),
    ("log_softmax", BF16, BF16, (GRID, 480, 1, 0, 8, 132, 28, 0)),
    ("softmax", F64, F64, (GRID, 480, 1, 16, 2, 132, 28, 0)),
    ("softmax", BF16, BF16, (GRID, 480, 1, 96, 8, 132, 24, 0)),
    ("softmax", BF16, BF16, (GRID, 480, 1, 128, 8, 132, 20, 0)),  # of 9.0 alone
    ("log_softmax", F16, F32, (GRID, 352, 1, 32, 4, 132, 16, 0)),
    ("logsumexp", F32, F32, (GRID, 480, 1, 64, 4, 2, 24, 0)),
    ("softmax", BF16, BF16, (BLOCK, 256, 1, 16, 8, 1, 0, 1)),
    ("softmax", F32, F32, (TWOPASS, 512, 1, 16, 4, 1, 0, 0)),
    ("softmax", BF16, BF16, (TWOPASS, 512, 1, 16, 8, 1, 0, 0)),
    ("logsumexp", BF16, BF16, (TWOPASS, 512, 1, 16, 8, 1, 0, 0)),
    ("logsumexp", BF16, F32, (WARP, 8, 16, 16, 8, 1, 0, 0)),
    ("logsumexp", F16, F32, (STAGED, 4, 32, 26, 1, 1, 2, 0)),
    ("logsumexp", BF16, F32, (BLOCK, 256, 1, 32, 8, 1, 0, 2)),
    ("logsumexp", F16, F32, (CLUSTER, 256, 1, 32, 8, 8, 0, 0)),
    ("logsumexp", BF16, F32, (GRID, 480, 1, 32, 8, 33, 8, 0)),
    ("logsumexp", F16, F32, (TWOPASS, 512, 1, 16, 8, 1, 0, 0)),
]

# (function, of the result, of the gradient, plan, which): every source of gradients.
GRADIENTS = [
    ("softmax", F32, F32, (WARP, 32, 4, 16, 4, 1, 0, 2), "backward"),
    ("softmax", BF16, BF16, (WARP, 8, 16, 16, 8, 1, 0, 0), "backward"),
    ("log_softmax", F32, F16, (WARP, 4, 32, 8, 4, 1, 0, 0), "backward_broadcast"),
    ("softmax", F32, F32, (BLOCK, 256, 1, 16, 4, 1, 0, 2), "backward"),
    ("log_softmax", BF16, BF16, (BLOCK, 128, 1, 24, 8, 1, 0, 0), "backward"),
    ("softmin", F16, F16, (BLOCK, 256, 1, 24, 8, 1, 0, 2), "backward"),
    ("softmax", F64, F64, (BLOCK, 256, 1, 4, 2, 1, 0, 0), "backward"),
    ("softmax", F32, F32, (CLUSTER, 512, 1, 20, 4, 16, 0, 0), "backward"),
    ("softmax", BF16, BF16, (CLUSTER, 256, 1, 32, 8, 8, 0, 0), "backward"),
    ("log_softmax", BF16, BF16, (CLUSTER, 256, 1, 32, 8, 16, 0, 2), "backward"),
    ("softmax", F32, F32, (GRID, 480, 1, 32, 4, 132, 12, 0), "backward"),  # of 9.0 alone
    ("log_softmax", BF16, BF16, (GRID, 480, 1, 64, 8, 132, 8, 0), "backward"),  # of 9.0 alone
    ("softmax", F16, F16, (GRID, 480, 1, 32, 8, 132, 8, 0), "backward"),
    ("softmax", F64, F64, (GRID, 480, 1, 8, 2, 132, 8, 0), "backward"),
    ("log_softmax", BF16, BF16, (GRID, 256, 1, 16, 8, 33, 0, 0), "backward_broadcast"),
    ("softmax", F32, F32, (TWOPASS, 512, 1, 16, 4, 1, 0, 0), "backward"),
    ("log_softmax", BF16, BF16, (TWOPASS, 512, 1, 16, 8, 1, 0, 0), "backward"),
    ("logsumexp", F32, F32, (WARP, 8, 16, 16, 4, 1, 0, 2), "backward"),
    ("logsumexp", BF16, BF16, (TWOPASS, 256, 1, 16, 8, 1, 0, 0), "backward"),
    ("logsumexp", F32, BF16, (TWOPASS, 256, 1, 16, 8, 1, 0, 2), "backward"),
    ("logsumexp", F32, F16, (WARP, 8, 16, 16, 8, 1, 0, 0), "backward"),
]

# The same of columns, with shelves of 1 (the next tile), and of more vectors.
COLUMN_KERNELS = [
    ("softmax", F32, F32, (COLUMNS, 64, 1, 88, 4, 1, 0, WHOLE)),
    ("softmax", BF16, BF16, (COLUMNS, 64, 1, 176, 8, 1, 0, WHOLE)),
    ("softmax", F32, F32, (COLUMNS, 7, 18, 56, 4, 4, 0, WHOLE)),
    ("softmax", BF16, BF16, (COLUMNS, 16, 8, 64, 4, 8, 1, WHOLE)),
    ("softmax", F32, F32, (COLUMNS, 245, 1, 52, 4, 4, 1, WHOLE_SLAB)),
    ("softmax", BF16, BF16, (COLUMNS, 245, 1, 104, 8, 2, 1, WHOLE_SLAB)),
    ("log_softmax", F32, F32, (COLUMNS, 333, 1, 36, 4, 1, 0, SLAB)),
    ("softmax", F16, F16, (COLUMNS, 333, 1, 40, 8, 1, 0, SLAB)),
    ("log_softmax", BF16, BF16, (COLUMNS, 64, 1, 160, 8, 1, 0, WHOLE)),
    ("softmin", F16, F16, (COLUMNS, 4, 32, 128, 8, 8, 0, WHOLE)),
    ("softmax", F32, F32, (COLUMNS, 8, 32, 64, 4, 16, 16, WHOLE)),
    ("softmax", BF16, BF16, (COLUMNS, 8, 32, 128, 8, 16, 16, WHOLE)),
    ("softmax", F32, F32, (COLUMNS, 8, 32, 64, 4, 1, 8, WHOLE)),
    ("softmax", BF16, BF16, (COLUMNS, 4, 128, 96, 8, 1, 20, WHOLE)),
    ("log_softmax", F16, F16, (COLUMNS, 245, 1, 32, 8, 1, 24, WHOLE_SLAB)),
    ("softmax", BF16, BF16, (COLUMNS, 8, 16, 104, 8, 1, 0, 0)),
    ("logsumexp", F32, F32, (COLUMNS, 8, 16, 64, 4, 1, 0, 0)),
    ("logsumexp", BF16, F32, (COLUMNS, 64, 1, 160, 8, 1, 0, WHOLE)),
    ("state", BF16, F32, (COLUMNS, 8, 16, 64, 8, 8, 0, WHOLE)),
    ("softmax", F16, F32, (COLUMNS, 16, 8, 48, 4, 1, 0, WHOLE)),
    ("log_softmax", F64, F64, (COLUMNS, 64, 1, 44, 2, 1, 0, WHOLE)),
    ("softmax", F32, F32, (COLUMNS, 1, 256, 4, 1, 1, 0, STRIDED)),
    ("softmax", BF16, BF16, (COLUMNS, 32, 8, 8, 1, 8, 0, STRIDED)),
    ("softmax", F32, F32, (COLUMNS_GRID, 4, 128, 32, 4, 66, 8, WHOLE)),
    ("softmax", BF16, BF16, (COLUMNS_GRID, 1, 512, 64, 8, 132, 8, WHOLE)),
    ("softmax", F32, F32, (COLUMNS_GRID, 490, 1, 32, 4, 2, 8, WHOLE_SLAB)),
    ("softmax", F16, F16, (COLUMNS_GRID, 8, 64, 64, 8, 12, 0, 0)),
    ("softmax", F64, F64, (COLUMNS_GRID, 8, 64, 16, 2, 66, 24, WHOLE)),
    ("log_softmax", F32, F32, (COLUMNS_GRID, 1, 256, 8, 1, 4, 0, STRIDED)),
    ("softmax", F32, F32, (COLUMNS_TWOPASS, 2, 256, 32, 4, 108, 0, WHOLE)),
    ("softmax", BF16, BF16, (COLUMNS_TWOPASS, 1, 512, 64, 8, 132, 0, WHOLE)),
    ("logsumexp", BF16, BF16, (COLUMNS_TWOPASS, 8, 64, 64, 8, 1, 0, WHOLE)),
    ("softmax", F32, F32, (COLUMNS_TWOPASS, 333, 1, 32, 4, 8, 0, SLAB)),
]

COLUMN_GRADIENTS = [
    ("softmax", F32, F32, (COLUMNS, 32, 4, 24, 4, 1, 0, WHOLE), "backward"),
    ("softmax", BF16, BF16, (COLUMNS, 32, 4, 48, 8, 1, 0, WHOLE), "backward"),
    ("log_softmax", F32, F32, (COLUMNS, 8, 32, 32, 4, 8, 0, WHOLE), "backward"),
    ("log_softmax", BF16, BF16, (COLUMNS, 8, 16, 64, 8, 8, 0, WHOLE), "backward"),
    ("softmax", F32, F32, (COLUMNS, 8, 32, 32, 4, 16, 8, WHOLE), "backward"),
    ("softmax", BF16, BF16, (COLUMNS, 8, 32, 64, 8, 1, 8, WHOLE), "backward"),
    ("softmax", F32, F32, (COLUMNS, 245, 1, 28, 4, 8, 1, WHOLE_SLAB), "backward"),
    ("softmax", BF16, BF16, (COLUMNS, 245, 1, 56, 8, 4, 1, WHOLE_SLAB), "backward"),
    ("softmin", F16, F16, (COLUMNS, 333, 1, 40, 8, 1, 0, SLAB), "backward"),
    ("softmax", F32, BF16, (COLUMNS, 32, 4, 24, 4, 1, 0, 0), "backward"),
    ("log_softmax", BF16, BF16, (COLUMNS, 32, 4, 48, 8, 1, 0, WHOLE), "backward_broadcast"),
    ("softmax", F64, F64, (COLUMNS, 32, 4, 12, 2, 1, 0, WHOLE), "backward"),
    ("softmax", F32, F32, (COLUMNS, 1, 256, 4, 1, 1, 0, STRIDED), "backward"),
    ("softmax", F32, F32, (COLUMNS_GRID, 4, 128, 16, 4, 66, 12, WHOLE), "backward"),
    ("softmax", BF16, BF16, (COLUMNS_GRID, 2, 256, 64, 8, 66, 0, WHOLE), "backward"),
    ("log_softmax", F32, F32, (COLUMNS_TWOPASS, 2, 256, 16, 4, 108, 0, WHOLE), "backward"),
    ("softmax", BF16, BF16, (COLUMNS_TWOPASS, 333, 1, 32, 8, 1, 0, SLAB), "backward"),
    ("logsumexp", F32, F32, (COLUMNS_TWOPASS, 16, 16, 32, 4, 4, 0, WHOLE), "backward"),
    ("logsumexp", F32, BF16, (COLUMNS_TWOPASS, 16, 16, 64, 8, 1, 0, WHOLE), "backward"),
    ("logsumexp", F32, F32, (COLUMNS_TWOPASS, 245, 1, 32, 4, 4, 0, WHOLE_SLAB), "backward"),
]


def told_by(tool: str, *arguments: object) -> str:
    """What a tool for cubins says; Triton brings them."""
    triton = pytest.importorskip("triton")
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool
    return subprocess.run([path, *map(str, arguments)], capture_output=True, text=True, check=True).stdout


def resources(cubin: Path) -> str:
    return told_by("cuobjdump", "--dump-resource-usage", cubin)


def instructions(cubin: Path) -> str:
    return told_by("nvdisasm", "--print-code", "--no-dataflow", cubin)


@pytest.fixture(scope="session")
def nvrtc() -> str:
    try:
        return native.status("nvrtc")
    except RuntimeError as error:
        pytest.skip(str(error))


def is_offered(plan: tuple[int, ...], compute: int) -> bool:
    """Clusters from 9.0 on, and more than twelve vectors in registers in the tier grid on 9.0 alone (plan.h)."""
    return not (plan[0] == CLUSTER and compute < 90) and not (
        plan[0] == GRID and plan[3] // plan[4] > 12 and compute != 90
    )


def for_gpus(kernels: list[tuple]) -> list[tuple]:
    """Each kernel for 9.0, the first of each tier and pass for the others too, and the first of halves for 10.0."""
    made, seen = [], set()
    for kernel in kernels:
        kind, half = (kernel[3][0], *kernel[4:]), kernel[1].itemsize == 2
        others = (80, 100, 120) if kind not in seen else (100,) if half and (*kind, half) not in seen else ()
        made += [(*kernel, compute) for compute in (90, *others)]
        seen |= {kind, (*kind, half)}
    return made


OFFERED = [kernel for kernel in for_gpus(KERNELS) if is_offered(kernel[3], kernel[-1])]
GRADIENTS_OFFERED = [
    kernel
    for kernel in for_gpus(GRADIENTS)
    if not (kernel[3][0] == CLUSTER and kernel[-1] < 90)
    and not (kernel[3][0] == GRID and kernel[3][3] * kernel[1].itemsize > 64 and kernel[-1] != 90)
]
COLUMNS_OFFERED = [
    kernel
    for kernel in for_gpus([(*kernel, "forward") for kernel in COLUMN_KERNELS] + COLUMN_GRADIENTS)
    if not (kernel[3][0] == COLUMNS and kernel[3][5] > 1 and kernel[-1] < 90)
]


@pytest.mark.parametrize(("function", "x_type", "y_type", "plan", "compute"), OFFERED)
def test_compiles_without_spills(nvrtc, tmp_path, monkeypatch, function, x_type, y_type, plan, compute):
    monkeypatch.setenv("ONEPASS_CACHE_DIR", "off")
    cubin = tmp_path / "kernel.cubin"
    native.compile_kernel(function, x_type, y_type, plan, compute, cubin)
    usage = resources(cubin)
    report = dict(re.findall(r"(STACK|LOCAL|REG):(\d+)", usage))
    # The two or four words that a shelf's addresses cost go to the stack where 64 registers are all there are; in the
    # tier grid up to twelve, which are read once a row, or once a chunk of eight vectors.
    shelved = plan[0] in (BLOCK, CLUSTER) and plan[6] > 0
    assert int(report["STACK"]) <= (48 if plan[0] == GRID else 16 if shelved else 0), usage
    assert report["LOCAL"] == "0", usage
    wider = x_type.itemsize if function in ("logsumexp", "state") else max(x_type.itemsize, y_type.itemsize)
    if plan[0] == STAGED:
        sass = instructions(cubin)
        assert re.search(r"LDGSTS\.E\.BYPASS\.128", sass), "no wide load"
        assert function in ("logsumexp", "state") or re.search(r"STG\.E\.128", sass), "no wide store"
    elif plan[7] != APART and plan[4] * wider == 16:
        sass = instructions(cubin)
        wide = {16: r"\.128", 8: r"\.64", 4: ""}
        assert re.search(r"LDG\.E" + wide[plan[4] * x_type.itemsize], sass), "no wide load"
        if function not in ("logsumexp", "state"):
            assert re.search(r"STG\.E" + wide[plan[4] * y_type.itemsize], sass), "no wide store"


@pytest.mark.parametrize(("function", "x_type", "dx_type", "plan", "which", "compute"), GRADIENTS_OFFERED)
def test_gradients_compile_without_spills(
    nvrtc, tmp_path, monkeypatch, function, x_type, dx_type, plan, which, compute
):
    monkeypatch.setenv("ONEPASS_CACHE_DIR", "off")
    cubin = tmp_path / "kernel.cubin"
    native.compile_kernel(function, x_type, dx_type, plan, compute, cubin, which)
    usage = resources(cubin)
    report = dict(re.findall(r"(STACK|LOCAL):(\d+)", usage))
    assert (int(report["STACK"]) <= 16, report["LOCAL"]) == (True, "0"), usage
    sass = instructions(cubin)
    wide = {16: r"\.128", 8: r"\.64", 4: "", 2: r"\.U16"}
    read = dx_type if function == "logsumexp" else x_type
    assert re.search(r"LDG\.E(\.EF)?" + wide[plan[4] * read.itemsize], sass), "no wide load"
    assert re.search(r"STG\.E" + wide[plan[4] * dx_type.itemsize], sass), "no wide store"


@pytest.mark.parametrize(("function", "x_type", "y_type", "plan", "which", "compute"), COLUMNS_OFFERED)
def test_columns_compile_without_spills(nvrtc, tmp_path, monkeypatch, function, x_type, y_type, plan, which, compute):
    monkeypatch.setenv("ONEPASS_CACHE_DIR", "off")
    cubin = tmp_path / "kernel.cubin"
    native.compile_kernel(function, x_type, y_type, plan, compute, cubin, which)
    usage = resources(cubin)
    report = dict(re.findall(r"(STACK|LOCAL|REG):(\d+)", usage))
    # Addresses go to the stack: of strided elements, of shelves, of messages, of what the blocks of clusters send.
    grid, sends = plan[0] == COLUMNS_GRID, plan[0] == COLUMNS and plan[5] > 1
    most = 32 if plan[7] == STRIDED or grid else 16 if plan[6] > 1 or sends or x_type is F64 else 0
    vector = plan[4]
    assert int(report["STACK"]) <= most, usage
    assert report["LOCAL"] == "0", usage
    sass = instructions(cubin)
    wide = {16: r"\.128", 8: r"\.64", 4: "", 2: r"\.U16"}
    read = y_type if function == "logsumexp" and which != "forward" else x_type
    assert re.search(r"LDG(STS)?\.E[.A-Z]*" + wide[vector * read.itemsize], sass), "no wide load"
    if plan[6]:
        assert re.search(r"LDGSTS\.E\.BYPASS\.128", sass) or vector * read.itemsize < 16, "no shelf"
    if which != "forward" or function not in ("logsumexp", "state"):
        assert re.search(r"STG\.E[.A-Z]*" + wide[vector * y_type.itemsize], sass), "no wide store"


SOURCES = Path(onepass.__file__).with_name("csrc") / "cuda" / "kernels"
MACROS = {
    "IN_TYPE": "half_t", "OUT_TYPE": "float", "FUNCTION": "Function::softmax", "THREADS_PER_ROW": 0,
    "ROWS_PER_BLOCK": 1, "VECS_PER_THREAD": 4, "VEC_SIZE": 4, "VEC_ACCESS": 0, "CLUSTER_SIZE": 1, "USES_SMEM_VECS": 0,
    "BROADCAST_GRAD": 0, "BLOCK_THREADS": 256, "PREFETCHES_TILE": 0, "USES_GRID": 0, "TWO_PASS": 0,
}  # fmt: skip


@pytest.mark.parametrize("header", [path.name for path in sorted(SOURCES.glob("*.cuh"))])
def test_headers_compile_by_themselves(nvrtc, header):
    macros = MACROS if header == "config.cuh" else {}
    ptx_of(SOURCES / header, "90", [f"-D{name}={value}" for name, value in macros.items()])


def test_only_the_configuration_reads_macros_of_the_command_line():
    readers = {
        name: [path.name for path in SOURCES.iterdir() if re.search(rf"\b{name}\b", path.read_text())]
        for name in MACROS
    }
    assert all(files == ["config.cuh"] for files in readers.values()), readers


def test_compile_error_is_told(nvrtc, tmp_path):
    with pytest.raises(RuntimeError, match=r"does not compile here(.|\n)*gpu-architecture"):
        native.compile_kernel("softmax", F32, F32, (WARP, 32, 4, 4, 4, 1, 0, 0), 1, tmp_path / "kernel.cubin")
