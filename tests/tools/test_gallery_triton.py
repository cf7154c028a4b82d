"""The Triton variants compiled for GPUs that are not here, and the occupancy of the persistent one."""

from __future__ import annotations

import re

import pytest
import torch

from lib.gallery import needs_triton
from lib.scripts import run_python
from lib.support import assert_defined, maker
from onepass.tools.gallery import variant
from onepass.tools.gallery.occupancy import Gpu, occupancy

H200 = Gpu(multiprocessors=132, registers=65536, shared_memory=232448, threads=2048, warp_size=32, arch="90")
ADA = Gpu(multiprocessors=76, registers=65536, shared_memory=101376, threads=1536, warp_size=32, arch="89")
MI300 = Gpu(multiprocessors=304, registers=32768, shared_memory=65536, threads=2048, warp_size=64, arch="gfx942")
RDNA3 = Gpu(multiprocessors=96, registers=49152, shared_memory=65536, threads=1024, warp_size=32, arch="gfx1100")


@pytest.mark.parametrize(
    ("gpu", "registers", "shared", "warps", "programs"),
    [
        (H200, 64, 0, 8, 4),  # registers: 65536 / (64 * 32 * 8)
        (H200, 16, 0, 8, 8),  # threads: 2048 / 256
        (H200, 32, 50_000, 8, 4),  # shared memory: 232448 / 50000
        (H200, 32, 232_448, 8, 1),
        (H200, 255, 0, 16, 1),  # never none
        (ADA, 32, 0, 8, 6),  # 48 warps of threads
        (ADA, 32, 30_000, 4, 3),
        (MI300, 64, 0, 8, 2),  # twice the registers reported: 65536 / 64 / 64 = 16 waves
        (MI300, 32, 0, 8, 4),  # 32 waves
        (MI300, 16, 0, 4, 8),  # the most waves: 2048 / 64
        (MI300, 16, 40_000, 4, 1),
        (RDNA3, 96, 0, 4, 4),  # the registers as reported: 49152 / 32 / 96 = 16 waves
        (RDNA3, 96, 20_000, 4, 3),
    ],
)
def test_occupancy(gpu, registers, shared, warps, programs):
    assert occupancy(gpu, registers, shared, warps) == programs


def test_every_cdna_has_two_pools_of_registers():
    for arch in ("gfx908", "gfx90a", "gfx940", "gfx941", "gfx942", "gfx942:sramecc+:xnack-"):
        gpu = Gpu(304, 32768, 65536, 2048, 64, arch)
        assert occupancy(gpu, 128, 0, 8) == 1
        assert occupancy(gpu, 64, 0, 8) == 2


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from onepass.tools.gallery import triton_online, triton_persistent, triton_row

strides = {"x_ptr": "*%s", "out_ptr": "*%s", "x_row_stride": "i64", "out_row_stride": "i32"}
kernels = [
    (triton_row.softmax_row, {"n": "i32", "BLOCK": "constexpr"}, {"BLOCK": 4096}, 16),
    (triton_persistent.softmax_persistent, {"rows": "i64", "n": "i32", "BLOCK": "constexpr", "STAGES": "constexpr"},
     {"BLOCK": 1024, "STAGES": 4}, 8),
    (triton_online.softmax_online, {"n": "i64", "chunks": "i32", "BLOCK": "constexpr", "STAGES": "constexpr"},
     {"BLOCK": 4096, "STAGES": 2}, 8),
]
for backend, arch, warp in (("cuda", 80, 32), ("cuda", 90, 32), ("cuda", 120, 32), ("hip", "gfx942", 64)):
    for kernel, signature, constants, warps in kernels:
        for dtype in ("fp32", "fp16", "bf16"):
            types = {name: text % dtype if "%" in text else text for name, text in strides.items()}
            source = ASTSource(kernel, {**types, **signature}, constants, {})
            made = triton.compile(source, target=GPUTarget(backend, arch, warp), options={"num_warps": warps})
            if backend == "cuda" and "STAGES" in constants and dtype == "fp32":  # asynchronous copies
                assert "cp.async" in made.asm["ptx"], (kernel, arch)
            print("compiled", kernel.__name__, arch, dtype)
"""


@needs_triton
def test_kernels_compile_for_gpus_that_are_not_here(tmp_path):
    done = run_python("-c", COMPILE, TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0")
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("compiled") == 36


# On a GPU ------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_a_compiled_kernel_is_cached_and_not_used_for_another_length():
    """784 is a multiple of 16 and 781 is not: one tile, two kernels. The second call of each compiles nothing."""
    from onepass.tools.gallery import triton_persistent

    persistent = variant("triton-persistent")
    make = maker(torch.float32, "cuda")
    for n in (784, 781, 784, 1, 16, 781):
        x = make(500, n)
        assert_defined("softmax", persistent(x), x, 1)
    before = dict(triton_persistent._cache)
    for n in (784, 781):
        persistent(make(300, n))
    assert triton_persistent._cache.keys() == before.keys()
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    for _, stages, resident in before.values():  # the programs fill the GPU, and no more
        assert resident % multiprocessors == 0
        assert 1 <= resident // multiprocessors <= 64
        assert stages >= 1


@pytest.mark.gpu
def test_a_pipeline_that_does_not_fit_is_an_error():
    persistent = variant("triton-persistent")
    x = torch.randn(4, 40000, device="cuda")
    assert_defined("softmax", persistent(x), x, 1)  # its own choice has as many stages as fit
    with pytest.raises(ValueError, match="triton-persistent: a tile of 65536 in 8 stages does not fit this GPU"):
        persistent(x, num_stages=8)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["triton-row", "triton-persistent", "triton-online"])
def test_clusters(name):
    x = maker(torch.float32, "cuda")(20, 4000)
    if torch.cuda.get_device_capability() < (9, 0):
        with pytest.raises(ValueError, match="num_ctas needs thread block clusters"):
            variant(name)(x, num_ctas=2)
        return
    for count in (1, 2, 4):
        refused = ""
        try:
            assert_defined("softmax", variant(name)(x, num_ctas=count), x, 1, f" by {name} with num_ctas={count}")
        except ValueError as error:  # Triton 3.6 does not compile a reduction over a cluster
            refused = str(error)
        message = rf"{name}: triton [\d.]+ does not compile this kernel for num_ctas = {count}"
        assert not refused or (count > 1 and re.fullmatch(message, refused))
