"""Every variant of the gallery: its values, its layouts, its errors, its launch parameters and its header."""

from __future__ import annotations

import math
import os
import re
from dataclasses import replace

import pytest
import torch

from lib.gallery import every_variant, needs_emulator, needs_triton, variants_here
from lib.scripts import run_python
from lib.support import assert_defined, maker, slow
from lib.warmup import needs_nvrtc
from onepass import native
from onepass.tools.gallery import VARIANTS, naive_jit
from onepass.tools.gallery.cuda_launches import H200 as AN_H200
from onepass.tools.gallery.cuda_launches import LAUNCHES, LIMITS
from onepass.tools.gallery.occupancy import Gpu, occupancy
from onepass.tools.gallery.variants import DTYPES, Count, Traffic, parse_header

INF, NAN = math.inf, math.nan
every_dtype = pytest.mark.parametrize("dtype", [getattr(torch, name) for name in DTYPES], ids=DTYPES)
# torch.compile takes seconds for each shape and dtype on a CPU
every_case = pytest.mark.parametrize(
    ("variant", "device", "dtype"),
    [
        pytest.param(*each.values, getattr(torch, name), id=f"{each.id}-{name}", marks=(*each.marks, *marks))
        for each in variants_here()
        for name in DTYPES
        for marks in [[pytest.mark.slow] * (each.id == "naive-compile-cpu" and name != "bfloat16")]
    ],
)
SHAPES = [(1, 1), (1, 2), (3, 7), (9, 32), (17, 33), (5, 781), (2, 1024), (3, 1025), (40, 64), (2, 5003)]


@every_case
def test_values(variant, device, dtype):
    make = maker(dtype, device, scale=3.0)
    some = SHAPES[4:5] if dtype is not torch.float32 else SHAPES[4:6]
    taken = [shape for shape in SHAPES if variant.refuses(*shape, dtype) is None]
    for shape in some if variant.name == "naive-compile" else taken:
        x = make(*shape)
        before, y = x.clone(), variant(x)
        assert (y.shape, y.dtype) == (x.shape, dtype)
        assert_defined("softmax", y, x, 1, f" by {variant.name}")
        assert torch.equal(variant(x), y)
        assert torch.equal(x, before)


@every_variant
def test_special_values_give_torch_s_results(variant, device):
    """-inf in a row, a row of -inf, a +inf, a NaN, the largest and the smallest floats, -inf for whole chunks."""
    x = maker(torch.float32, device)(10, 97)
    x[0, 5:60] = -INF
    x[1] = -INF
    x[2, 96] = INF
    x[3, 0] = NAN
    x[4] = torch.finfo(torch.float32).max
    x[5] = torch.finfo(torch.float32).min
    x[6, :96] = -INF
    x[7] = torch.tensor([1e-45, -1e-45], device=device).repeat(49)[:97]
    x[8, 3], x[8, 50] = INF, -INF
    for kwargs in ({}, {"block_size": 16}) if variant.name == "triton-online" else ({},):
        torch.testing.assert_close(variant(x, **kwargs), torch.softmax(x, 1), equal_nan=True)
    x = maker(torch.float32, device)(6, 300)
    for row, shift in enumerate((-1e4, 1e4, -200.0, 3e38, -3e38, 0.0)):  # a wrong initial maximum fails here
        x[row] += shift
    assert_defined("softmax", variant(x), x, 1)
    n = 1000 if variant.name == "cuda-rows" else 4000
    for dtype in (torch.float16, torch.bfloat16):  # are summed in float32: 1/4000 to the last place
        y = variant(torch.full((2, n), 1.5, dtype=dtype, device=device))
        want = torch.tensor(1 / n, dtype=dtype)
        assert (y.cpu().double() - want.double()).abs().max() <= want.item() * torch.finfo(dtype).eps
    for shape in ((0, 5), (5, 0), (0, 0)):
        assert variant(torch.zeros(shape, device=device)).shape == shape


@every_case
def test_row_strides_and_offsets(variant, device, dtype):
    make = maker(dtype, device)
    inputs = [make(7, 70)[:, 3:50], make(1, 33).expand(4, 33), make(12, 40)[1::3], make(5, 40)[:, 39:]]
    inputs.append(make(90)[1:].view(1, 89))
    for x in inputs[:1] if variant.name == "naive-compile" else inputs:  # it takes seconds per layout
        assert_defined("softmax", variant(x), x, 1, f" by {variant.name}")


@every_variant
def test_out_has_any_row_stride_and_nothing_beside_it_is_written(variant, device):
    if not variant.takes_out:
        x = torch.zeros(2, 3, device=device)
        with pytest.raises(TypeError, match="takes no out"):
            variant(x, out=x)
        return
    for shape in ((6, 45), (3, 1000 if variant.name == "cuda-rows" else 1030), (1, 1)):
        x = maker(torch.float32, device)(*shape)
        store = torch.full((shape[0] + 2, shape[1] + 11), NAN, device=device)
        out = store[1:-1, 5:-6]
        assert variant(x, out=out) is out
        assert_defined("softmax", out, x, 1)
        assert int(store.isnan().sum()) == store.numel() - out.numel()


@every_variant
def test_wrong_arguments(variant, device):
    x = torch.randn(4, 6, device=device)
    cases = [
        (ValueError, r"\(M, N\), got x of shape \(6,\)", x[0], {}),
        (ValueError, r"got x of shape \(2, 2, 6\)", x.view(2, 2, 6), {}),
        (TypeError, "float32, float16 and bfloat16, got x of torch.float64", x.double(), {}),
        (TypeError, "torch.int64", x.long(), {}),
        (TypeError, "must be a tensor, got list", [[1.0]], {}),
        (ValueError, r"unit stride, got x with strides \(1, 6\)", x.t(), {}),
        (TypeError, "got num_wraps; it takes ", x, {"num_wraps": 4}),
        (TypeError, "takes no grad", x, {"grad": x}),
    ]
    if variant.takes_out:
        shapes = r"shape of x, torch.Size\(\[4, 6\]\); got torch.Size\(\[4, 5\]\)"
        cases += [
            (ValueError, shapes, x, {"out": x[:, 1:].clone()}),
            (ValueError, "dtype of x", x, {"out": x.half()}),
            (ValueError, "must not overlap x", x, {"out": x}),
            (ValueError, "rows of out must not overlap", x, {"out": torch.empty(6, device=device).expand(4, 6)}),
        ]
    for error, message, given, kwargs in cases:
        with pytest.raises(error, match=f"^{variant.name}: .*{message}"):
            variant(given, **kwargs)


def test_a_variant_that_cannot_run_says_why(monkeypatch):
    def script(*args, **kwargs):
        raise RuntimeError("torch.jit.script is not supported on this Python\nand more lines")

    x = torch.zeros(2, 2, device="meta")
    for name in ("cuda-warp", "cpu-online", "triton-row"):
        with pytest.raises(RuntimeError, match=f"{name}: cannot run on meta: "):
            VARIANTS[name](x)
    monkeypatch.setattr(torch.jit, "script", script)
    for cached in ("_scripted", "missing"):
        monkeypatch.setattr(naive_jit, cached, getattr(naive_jit, cached).__wrapped__)
    with pytest.raises(RuntimeError, match="naive-jit: cannot run on cpu: torch"):
        VARIANTS["naive-jit"](torch.zeros(2, 2))


@every_variant
def test_limits_of_the_idea(variant, device):
    """A row that no tile covers is refused by name; the variants whose idea takes it compute it."""
    x = torch.zeros(1, 65537, device=device)
    if variant.name in ("triton-row", "triton-persistent", "cuda-registers", "cuda-rows", "cuda-async"):
        most = {"cuda-registers": 32768, "cuda-rows": 1024, "cuda-async": ""}.get(variant.name, 65536)
        with pytest.raises(ValueError, match=f"{variant.name}: .*{most}.* got N = 65537"):
            variant(x)
    elif variant.name != "naive-compile":
        assert_defined("softmax", variant(x), x, 1)
    if variant.name in ("triton-row", "triton-online"):
        assert "2147483647 of them; got M = 2147483648" in variant.refuses(2**31, 4, torch.float32)


VALUES = {  # name -> (right values, wrong ones)
    "num_warps": ((1, 2, 8, 32), (0, 3, 64, -1)),
    "num_stages": ((1, 2, 3), (0, 17)),
    "num_ctas": ((), (0, 3, 32)),
    "maxnreg": ((64, 128), (8, 256)),
    "block_size": ((512, 1024), (0, 500, 1 << 21)),
    "programs": ((1, 2, 7, 1000), (0,)),
    "threads": ((32, 64, 512, 1024), (0, 16, 33, 1056, 2048)),
    "blocks": ((1, 3, 100), (0, 2**31)),
}


@every_variant
def test_launch_parameters(variant, device):
    x = maker(torch.float32, device)(11, 300)
    for name in variant.launch_params:
        right, wrong = VALUES[name]
        for value in right:
            assert_defined("softmax", variant(x, **{name: value}), x, 1, f" by {variant.name} with {name}={value}")
        for value in wrong:
            with pytest.raises(ValueError, match=rf"^{variant.name}: {name} must be .*; got {value}$"):
                variant(x, **{name: value})
        for value in ("4", 4.0, True):
            with pytest.raises(TypeError, match=rf"^{variant.name}: {name} must be an int"):
                variant(x, **{name: value})
    if variant.name in ("triton-row", "triton-persistent"):
        with pytest.raises(ValueError, match="block_size must cover a row of 300, 512 to 65536; got 256"):
            variant(x, block_size=256)
    if variant.name == "triton-online":
        for block in (1, 2, 64):
            assert_defined("softmax", variant(x[:2, :65], block_size=block), x[:2, :65], 1)


@needs_triton
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="this is that process")
@pytest.mark.parametrize("which", ["triton and cpu and not float16", slow("triton and cpu")])
def test_triton_variants_in_the_interpreter(which):
    """The tests above, for the Triton variants on the CPU: Triton reads the variable when it is imported."""
    options = ("-k", which, "-p", "no:xdist", "-p", "no:cacheprovider")
    done = run_python("-m", "pytest", __file__, *options, TRITON_INTERPRET="1")
    if "needs NumPy" in done.stdout:
        pytest.skip("the interpreter of this Triton does not run with this NumPy")
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout


CUDA_TYPES = (torch.float32, torch.float16, torch.bfloat16)
SOURCES = [name for name in LAUNCHES if name != "cuda-auto"]
INCLUDED = ("cuda-warp", "cuda-block", "cuda-vector")  # by others
COMPILED = [(name, 90, CUDA_TYPES[i % 3 : i % 3 + 1]) for i, name in enumerate(SOURCES) if name not in INCLUDED]
COMPILED += [slow(name, arch, CUDA_TYPES) for arch in (80, 90, 120) for name in SOURCES]


@needs_nvrtc
@pytest.mark.parametrize(("name", "arch", "dtypes"), COMPILED)
def test_cuda_sources_compile_for_gpus_that_are_not_here(tmp_path, name, arch, dtypes):
    """With the constants of the longest rows that start within a vector."""
    if name == "cuda-cluster" and arch < 90:
        pytest.skip("clusters need compute capability 9.0")
    for dtype in dtypes:
        n = min(LIMITS[name](dtype, AN_H200) if name in LIMITS else 1 << 20, 1 << 20)
        x = torch.empty(n + 1, dtype=dtype)[1:].view(1, n)
        launch = LAUNCHES[name](*[x] * (3 if name == "cuda-backward" else 2), AN_H200)
        native.compile_source(launch.source, launch.options, arch, tmp_path / "cubin")
        assert (tmp_path / "cubin").stat().st_size > 1000


# CUDA variants in the emulator ------------------------------------------------------------------------------------

EMULATED = [name for name in LAUNCHES if name not in ("cuda-warp", "cuda-block", "cuda-online", "cuda-auto")]


def emulate(name: str, dtype: torch.dtype) -> None:
    """Rows of an odd length within a larger matrix, with a row of -inf and one of large negative numbers."""
    variant = VARIANTS[name]
    make = maker(dtype, "cpu")
    rows, n = (2, 1103) if name == "cuda-grid" else (5, 43)  # so that several blocks share a row
    x = make(rows, n + 2)[:, 1:-1]
    x[0] -= 200
    if variant.computes == "rows":
        x[-1] = -INF
    store = torch.full((rows + 2, n + 11), NAN, dtype=dtype)
    out = store[1:-1, 5:-6]
    grad = make(rows, n) if variant.computes == "gradient" else None
    x = torch.softmax(x, 1) if grad is not None else x
    assert variant.emulate(x, grad, out=out) is out
    if grad is not None:
        want = x.double() * (grad.double() - (x.double() * grad.double()).sum(1, keepdim=True))
        torch.testing.assert_close(out.double(), want, atol=1e-6 if dtype is torch.float32 else 4e-3, rtol=0)
    else:
        assert_defined("softmax", out, x, 0 if variant.computes == "columns" else 1, f" by {name}")
    assert int(store.isnan().sum()) == store.numel() - out.numel() + int(out.isnan().sum())


@needs_emulator
@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, CUDA_TYPES[i % 3]) for i, name in enumerate(EMULATED)]
    + [slow(name, dtype) for name in LAUNCHES for dtype in CUDA_TYPES],
)
def test_cuda_variants_in_the_emulator(name, dtype):
    emulate(name, dtype)


def test_what_is_not_emulated():
    x = torch.zeros(2, 3)
    with pytest.raises(RuntimeError, match="naive: cannot run on cpu: only CUDA variants are emulated, and this is Py"):
        VARIANTS["naive"].emulate(x)
    with pytest.raises(TypeError, match="cuda-backward: takes the result of the forward and its gradient"):
        VARIANTS["cuda-backward"].emulate(x)
    with pytest.raises(ValueError, match=r"cuda-backward: grad must have the shape of x, torch.Size\(\[2, 3\]\)"):
        VARIANTS["cuda-backward"].emulate(x, x[:1])
    for name, limit in (("cuda-rows", 1024), ("cuda-cluster", 262144)):
        with pytest.raises(ValueError, match=f"{name}: takes rows of at most {limit} elements.*; got N = {limit + 1}"):
            VARIANTS[name].emulate(torch.zeros(1, limit + 1))


@pytest.mark.gpu
@every_dtype
def test_columns_and_gradients_on_a_gpu(dtype):
    make = maker(dtype, "cuda")
    for shape in [*SHAPES, (700, 129)]:
        x = make(*shape)
        assert_defined("softmax", VARIANTS["cuda-columns"](x), x, 0)
        y, grad = torch.softmax(x, 1), make(*shape)
        want = y.double() * (grad.double() - (y.double() * grad.double()).sum(1, keepdim=True))
        got = VARIANTS["cuda-backward"](y, grad).double()
        torch.testing.assert_close(got, want, atol=1e-5 if dtype is torch.float32 else 2e-2, rtol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["cuda-registers", "cuda-async", "cuda-cluster", "cuda-grid"])
def test_long_rows_on_a_gpu(name):
    """Rows of several blocks and of several vectors a thread, also where they begin within a vector."""
    variant = VARIANTS[name]
    if variant.unavailable(torch.device("cuda", 0)):
        pytest.skip("clusters need compute capability 9.0")
    for dtype in CUDA_TYPES:
        most = LIMITS[name](dtype, AN_H200) if name in LIMITS else 1 << 20
        for rows, n in ((3, 5003), (200, 12672), (40, min(most, 131073)), (2, most)):
            if variant.refuses(rows, n, dtype) is None:
                x = maker(dtype, "cuda")(rows, n + 1)
                for view in (x[:, 1:], x[:, :-1], x[:, :-1].contiguous()):
                    assert_defined("softmax", variant(view), view, 1, f" by {name}")


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_every_file_is_short_and_has_its_header(variant):
    assert len(variant.source.splitlines()) <= (60 if variant.language == "CUDA" else 160)
    head = variant.source.removeprefix('"""').removeprefix("// ")
    assert head.startswith(f"{variant.name}: ")
    header = variant.header
    assert all(text[-1] == "." for text in (header.idea, header.traffic_text, header.limit))
    assert header.cached is None or header.cached.elements(100, 1000) < header.traffic.elements(100, 1000)
    assert header.traffic_text.startswith(f"reads {header.traffic.reads}, writes {header.traffic.writes}")


def test_the_header_has_the_traffic():
    naive, online = VARIANTS["naive"].header, VARIANTS["cuda-online"].header
    assert (naive.traffic, naive.cached) == (Traffic(Count(5, 2), Count(3, 2)), None)
    assert (online.traffic, online.cached) == (Traffic(Count(2), Count(1)), Traffic(Count(1), Count(1)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", "lacks Idea, Traffic, Limit"),
        ('"""a: b\n\nIdea: c.\n\nTraffic: reads MN, writes MN.\n"""', "lacks Limit"),
        ("// Idea: a\n//\n// Traffic: some.\n//\n// Limit: b", "no 'reads"),
        ("// Idea: a\n//\n// Traffic: reads M + N, writes MN.\n//\n// Limit: b", "no 'reads"),
    ],
)
def test_a_wrong_header_is_an_error(text, message):
    with pytest.raises(ValueError, match=message):
        parse_header(text)


# The Triton variants: occupancy, compiling for GPUs that are not here, launches -----------------------------------

H200 = Gpu(multiprocessors=132, registers=65536, shared_memory=232448, threads=2048, warp_size=32, arch="90")
ADA = Gpu(multiprocessors=76, registers=65536, shared_memory=101376, threads=1536, warp_size=32, arch="89")
MI300 = Gpu(multiprocessors=304, registers=32768, shared_memory=65536, threads=2048, warp_size=64, arch="gfx942")
CDNA = ("gfx908", "gfx90a", "gfx940", "gfx941", "gfx942:sramecc+:xnack-")
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
        *((replace(MI300, arch=arch), 128, 0, 8, 1) for arch in CDNA),
        *((replace(MI300, arch=arch), 64, 0, 8, 2) for arch in CDNA),
        (RDNA3, 96, 0, 4, 4),  # the registers as reported: 49152 / 32 / 96 = 16 waves
        (RDNA3, 96, 20_000, 4, 3),
    ],
)
def test_occupancy(gpu, registers, shared, warps, programs):
    assert occupancy(gpu, registers, shared, warps) == programs


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
dtypes = ("fp32", "fp16", "bf16")
gpus = ("cuda", 80, 32), ("cuda", 90, 32), ("cuda", 120, 32), ("hip", "gfx942", 64)
for at, (backend, arch, warp) in enumerate(gpus):
    for kernel, signature, constants, warps in kernels if every else [kernels[(at + 1) % 3]]:
        for dtype in dtypes if every else [("fp32", "bf16", "fp32", "fp16")[at]]:
            types = {name: text % dtype if "%" in text else text for name, text in strides.items()}
            source = ASTSource(kernel, {**types, **signature}, constants, {})
            made = triton.compile(source, target=GPUTarget(backend, arch, warp), options={"num_warps": warps})
            if backend == "cuda" and "STAGES" in constants and dtype == "fp32":  # asynchronous copies
                assert "cp.async" in made.asm["ptx"], (kernel, arch)
            print("compiled", kernel.__name__, arch, dtype)
"""


@needs_triton
@pytest.mark.parametrize(("every", "count"), [(False, 4), slow(True, 36)])  # or kernels and types in turn
def test_kernels_compile_for_gpus_that_are_not_here(tmp_path, every, count):
    code = f"every = {every}\n{COMPILE}"
    done = run_python("-c", code, TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0")
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("compiled") == count


@pytest.mark.gpu
def test_a_compiled_kernel_is_cached_and_not_used_for_another_length():
    """784 is a multiple of 16 and 781 is not: one tile, two kernels. The second call of each compiles nothing."""
    from onepass.tools.gallery import triton_persistent

    persistent = VARIANTS["triton-persistent"]
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
    persistent = VARIANTS["triton-persistent"]
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
            VARIANTS[name](x, num_ctas=2)
        return
    for count in (1, 2, 4):
        refused = ""
        try:
            assert_defined("softmax", VARIANTS[name](x, num_ctas=count), x, 1, f" by {name} with num_ctas={count}")
        except ValueError as error:  # Triton 3.6 does not compile a reduction over a cluster
            refused = str(error)
        message = rf"{name}: triton [\d.]+ does not compile this kernel for num_ctas = {count}"
        assert not refused or (count > 1 and re.fullmatch(message, refused))
