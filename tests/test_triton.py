"""The Triton engine: every tier forced on small shapes under Triton's interpreter, compiled for GPUs that are not here,
and run for real where there is one.

Triton reads TRITON_INTERPRET when it is imported, and one process cannot both interpret and compile. So the kernels run
in two processes of their own, whatever the variable is in this one and whatever other tests have imported.
"""

from __future__ import annotations

import importlib.util
import io
import math
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

import onepass
import onepass.triton as engine
from onepass import reference
from onepass.triton import Plan, plan
from support import DTYPES, FUNCTIONS, LAYOUTS, SOFTMAXES, assert_defined, maker, same, tuples

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def _name(value: Any) -> str:
    return str(value).removeprefix("torch.")


every_function = pytest.mark.parametrize("function", FUNCTIONS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=_name)
F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
INF, NAN = math.inf, math.nan

# Plans that force a tier on rows of up to 64: tiles that no row count divides, chunks of 16 that no row length divides,
# and grids that need several launches.
TIERS = {
    "row": Plan("row", block=64, rows=1, depth=1, num_warps=1, num_stages=1, grid=1000),
    "rows of 4 a program": Plan("row", block=64, rows=4, depth=1, num_warps=1, num_stages=1, grid=1),
    "online": Plan("online", block=8, rows=1, depth=2, num_warps=1, num_stages=1, grid=1000),
    "online, split launch": Plan("online", block=32, rows=1, depth=1, num_warps=1, num_stages=1, grid=2),
}
every_tier = pytest.mark.parametrize("tier", TIERS)


# ------------------------------------------------------------------------------------- processes of their own


def _process(interpret: str) -> Iterator[Callable[..., Any]]:
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = interpret  # inherited by the child, which starts at the first call
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        try:
            pool.submit(os.getpid).result()
        finally:
            if before is None:
                del os.environ["TRITON_INTERPRET"]
            else:
                os.environ["TRITON_INTERPRET"] = before
        yield lambda function, *arguments: pool.submit(function, *arguments).result()


@pytest.fixture(scope="module")
def compiling() -> Iterator[Callable[..., Any]]:
    """Calls a function in a process where Triton compiles."""
    yield from _process("0")


@pytest.fixture(scope="module")
def interpreting() -> Iterator[Callable[..., Any]]:
    """Calls a function in a process where Triton interprets."""
    for call in _process("1"):
        reason = call(_unavailable, "cpu")
        if reason is not None and "NumPy" in reason:
            pytest.skip(reason)
        assert reason is None
        yield call


@pytest.fixture
def forward(interpreting: Callable[..., Any]) -> Callable[..., Tensor]:
    """engine.forward in that process: forward(function, x, out, dims, plan=None) -> out, with all of its storage."""

    def call(function: str, x: Tensor, out: Tensor, dims: Any, plan: Plan | None = None) -> Tensor:
        box = io.BytesIO()
        torch.save((x, out), box)  # keeps strides, offsets, and that two tensors share a storage
        return torch.load(io.BytesIO(interpreting(_forward, box.getvalue(), function, tuple(dims), plan)))

    return call


def _forward(data: bytes, function: str, dims: tuple[int, ...], plan: Plan | None) -> bytes:
    x, out = torch.load(io.BytesIO(data))
    engine.forward(function, x, out, dims, plan=plan)
    box = io.BytesIO()
    torch.save(out, box)
    return box.getvalue()


def _unavailable(device: str) -> str | None:
    return engine.unavailable(torch.device(device))


def _poisoned(function: str, x: Tensor, dims: Any, dtype: torch.dtype | None = None) -> Tensor:
    """A result that no answer looks like."""
    shape = [1 if function == "logsumexp" and d in dims else size for d, size in enumerate(x.shape)]
    return torch.full(shape, 777.0, dtype=dtype or x.dtype, device=x.device)


# ----------------------------------------------------------------------------------------- values, interpreted


@every_tier
@every_function
@every_dtype
def test_definition(forward, function, dtype, tier):
    x = maker(dtype)(6, 37)
    out = forward(function, x, _poisoned(function, x, (1,)), (1,), TIERS[tier])
    assert_defined(function, out, x, 1)


@pytest.mark.parametrize("n", [1, 2, 15, 16, 17, 32, 33, 64])
@pytest.mark.parametrize("tier", ["rows of 4 a program", "online"])
@pytest.mark.parametrize("function", ["softmax", "logsumexp"])
def test_row_lengths_about_the_edges_of_a_tile(forward, function, tier, n):
    x = maker(F32)(3, n)
    assert_defined(function, forward(function, x, _poisoned(function, x, (1,)), (1,), TIERS[tier]), x, 1)


@pytest.mark.parametrize("tier", ["row", "online"])
@pytest.mark.parametrize("function", SOFTMAXES)
@pytest.mark.parametrize(("dtype", "out_dtype"), [(a, b) for a in DTYPES for b in DTYPES if a is not b], ids=_name)
def test_input_is_rounded_to_the_type_of_the_result_first(forward, function, tier, dtype, out_dtype):
    x = maker(dtype, scale=30.0)(3, 37)  # coarse enough for the rounding of the input to show in every half type
    out = forward(function, x, _poisoned(function, x, (1,), out_dtype), (1,), TIERS[tier])
    assert out.dtype == out_dtype
    assert_defined(function, out, x.to(out_dtype), 1)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("function", ["log_softmax", "logsumexp"])
def test_layouts_and_dims(forward, function, layout):
    x = LAYOUTS[layout](maker(F32))
    for spelled in tuples(x):
        dims = tuple(sorted(d % max(x.ndim, 1) for d in spelled)) if x.ndim else ()
        out = forward(function, x, _poisoned(function, x, dims), dims)
        assert_defined(function, out, x, dims or 0, f", layout {layout}")


@pytest.mark.parametrize("tier", [None, "row", "online"])
@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=_name)
def test_strided_result_is_written_where_it_lies_and_nowhere_else(forward, dtype, dim, tier):
    x = maker(F32)(4, 3, 5)
    base = torch.full((12, 5, 8), 777.0, dtype=dtype)
    out = base[1::2, ::1, ::2].permute(2, 1, 0)[:, 1:4, :5]
    assert out.shape == x.shape
    got = forward("softmax", x, out, (dim,), TIERS.get(tier))
    assert got.stride() == out.stride()
    assert_defined("softmax", got, x.to(dtype), dim)
    whole = torch.as_strided(got, (base.numel(),), (1,), 0)
    assert int((whole != 777.0).sum()) == x.numel()


@pytest.mark.parametrize("tier", ["rows of 4 a program", "online"])
@pytest.mark.parametrize(("layout", "dim"), [("contiguous", 0), ("contiguous", 1), ("transposed", 1), ("stepped", 0)])
def test_in_place(forward, layout, dim, tier):
    x = LAYOUTS[layout](maker(F32))
    assert_defined("softmax", forward("softmax", x, x, (dim,), TIERS[tier]), x, dim)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_empty_results_and_rows(forward, function):
    for shape, dims in [((0, 5), (1,)), ((0, 5), (0,)), ((5, 0, 2), (1,)), ((0,), (0,))]:
        x = torch.empty(shape)
        want = reference.logsumexp(x, dims, True) if function == "logsumexp" else x
        assert same(forward(function, x, _poisoned(function, x, dims), dims), want.to(F32))


# -------------------------------------------------------------------------------------------- special values


def _special(dtype: torch.dtype, device: str = "cpu", n: int = 53) -> Tensor:
    """Rows whose special values fill whole chunks (of 16 or 32) at every place, with ordinary rows beside them."""
    chunk = 32 * n // 53
    rows: list[Callable[[Tensor], Any]] = [
        lambda r: r.fill_(-INF),
        lambda r: r[chunk:].fill_(-INF),
        lambda r: r[:chunk].fill_(-INF),
        lambda r: r[chunk // 2 : chunk].fill_(-INF),
        lambda r: r[1:].fill_(-INF),
        lambda r: r[:-1].fill_(-INF),
        lambda r: r[0].fill_(INF),
        lambda r: r[-1].fill_(INF),
        lambda r: r.fill_(INF),
        lambda r: (r.fill_(-INF), r[chunk + 1].fill_(INF)),
        lambda r: r[3].fill_(NAN),
        lambda r: (r.fill_(-INF), r[-1].fill_(NAN)),
        lambda r: (r[0].fill_(NAN), r[-1].fill_(INF)),
        lambda r: r.fill_(NAN),
        lambda r: r.fill_(-5000.0),
        lambda r: r.fill_(torch.finfo(dtype).max),
        lambda r: r.fill_(torch.finfo(dtype).min),
        lambda r: (r.fill_(-INF), r[chunk // 3].fill_(torch.finfo(dtype).min)),
        lambda r: (r.fill_(0.0), r[chunk + 2].fill_(1000.0)),
        lambda r: r.copy_(torch.arange(n, device=r.device) * 3.0),
        lambda r: r.copy_(torch.arange(n, device=r.device) * -3.0),
    ]
    x = maker(dtype, device)(len(rows) + 3, n)  # the ordinary rows: the first, the last but one and the last
    for k, spoil in enumerate(rows):
        spoil(x[k + 1])
    return x


def _assert_special(function: str, got: Tensor, x: Tensor) -> None:
    want = reference.logsumexp(x, 1, True) if function == "logsumexp" else getattr(reference, function)(x, 1)
    assert same(got.isnan(), want.isnan())
    assert_defined(function, got, x, 1)


@pytest.mark.parametrize("tier", ["rows of 4 a program", "online"])
@every_function
@pytest.mark.parametrize("dtype", [F32, BF16], ids=_name)
def test_special_values(forward, function, dtype, tier):
    x = _special(dtype)
    x = -x if function == "softmin" else x
    _assert_special(function, forward(function, x, _poisoned(function, x, (1,)), (1,), TIERS[tier]), x)


@pytest.mark.parametrize("tier", ["row", "online"])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=_name)
def test_no_probability_exceeds_one(forward, dtype, tier):
    steps = torch.arange(8.0)[:, None] * 17.37
    x = torch.where(torch.arange(37) == 5, steps, -steps).to(dtype)
    y = forward("softmax", x, _poisoned("softmax", x, (1,)), (1,), TIERS[tier])
    assert float(y.max()) <= 1.0
    assert_defined("softmax", y, x, 1)


@every_tier
@pytest.mark.parametrize("function", ["softmax", "log_softmax", "logsumexp"])
def test_float32_is_as_accurate_as_torch(forward, function, tier):
    rows = [torch.randn(53) * 3, torch.randn(53) + 1000, torch.randint(-60, 60, (53,)), torch.rand(53) * 80]
    x = torch.stack([row.float() for row in rows])
    exact = getattr(reference, function)(x, 1, *([True] if function == "logsumexp" else []))
    scale = exact.abs() if function == "softmax" else exact.abs().clamp(min=1)

    def error(y: Tensor) -> float:
        return float(((y - exact).abs() / scale).max()) / torch.finfo(F32).eps

    theirs = getattr(torch, function)(x, 1, *([True] if function == "logsumexp" else []))
    ours = forward(function, x, _poisoned(function, x, (1,)), (1,), TIERS[tier])
    assert error(ours) <= max(1.25 * error(theirs), 2.0)


# ------------------------------------------------------------------------------------- plans and availability


@pytest.mark.parametrize(
    ("rows", "n", "dtype", "tier", "tile"),
    [
        (1 << 20, 16, F32, "row", (128, 16)),
        (5, 16, F32, "row", (128, 16)),
        (4096, 781, F32, "row", (1, 1024)),
        (4096, 32768, BF16, "row", (1, 32768)),
        (4096, 32769, BF16, "online", (1, 8192)),
        (64, 8193, F64, "online", (1, 512)),
        (1, 1, F64, "row", (1024, 1)),
    ],
)
def test_plan(rows, n, dtype, tier, tile):
    got = plan("softmax", rows, n, dtype, dtype, None)
    assert (got.tier, (got.rows, got.block)) == (tier, tile)
    assert got.grid == -(-rows // tile[0])
    got.check(n)
    assert set(got.as_dict()) == {"tier", "block", "rows", "depth", "num_warps", "num_stages", "grid"}


def test_plan_keeps_a_launch_below_two_to_the_32_threads():
    got = plan("logsumexp", 2**33, 4096, F32, F32)
    assert got.grid < 2**32 / (got.num_warps * 32) <= got.grid + 1


def test_plan_counts_threads_in_the_warps_of_the_device():
    class Wide:
        warp_size = 64

    for n in (16, 1000, 30000, 100000):
        narrow, wide = plan("softmax", 64, n, F32, F32), plan("softmax", 64, n, F32, F32, Wide)
        assert wide.num_warps == max(1, narrow.num_warps // 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block": 32}, "needs block >= n = 37"),
        ({"block": 48}, "power of two, got 48"),
        ({"depth": 2}, "depth 1"),
        ({"tier": "column"}, "'row' or 'online', got 'column'"),
        ({"tier": "online", "rows": 2}, "one row a program"),
        ({"grid": 0}, "at least 1, got 0"),
    ],
)
def test_plan_that_cannot_serve_is_refused(change, message):
    import dataclasses

    forced = dataclasses.replace(TIERS["row"], **change)
    x = torch.zeros(2, 37)
    with pytest.raises(ValueError, match=message):
        engine.forward("softmax", x, torch.empty_like(x), (1,), plan=forced)


def test_unknown_function_is_refused():
    with pytest.raises(ValueError, match="unknown function 'softplus'"):
        plan("softplus", 1, 1, F32, F32)


def test_unavailable_gives_the_reason(compiling):
    assert "TRITON_INTERPRET=1" in compiling(_unavailable, "cpu")
    assert "got device type 'meta'" in engine.unavailable(torch.device("meta"))
    if not torch.cuda.is_available():
        assert re.search("sees no cuda device|no backend", compiling(_unavailable, "cuda"))


def test_importing_and_asking_about_a_cpu_imports_no_triton():
    code = (
        "import sys, types, torch\n"
        "sys.modules['onepass'] = package = types.ModuleType('onepass')\n"  # the engine alone
        f"package.__path__ = {list(onepass.__path__)!r}\n"
        "import onepass.triton as engine\n"
        "assert engine.unavailable(torch.device('cpu'))\n"
        "engine.plan('softmax', 1, 10, torch.float32, torch.float32)\n"
        "assert 'triton' not in sys.modules"
    )
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


# -------------------------------------------------------------------------- compiled for GPUs that are not here

_TYPES = {F64: "*fp64", F32: "*fp32", F16: "*fp16", BF16: "*bf16"}


def _compile(
    function: str, n: int, dtype: torch.dtype, out_dtype: torch.dtype, backend: str, arch: Any, aligned: bool
) -> dict[str, Any]:
    """The kernel that ``forward`` would launch for many rows of n: its assembly and its resources, per thread."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from onepass.triton.launch import kernels

    class Properties:
        warp_size = 64 if backend == "hip" else 32

    chosen = plan(function, 1 << 20, n, dtype, out_dtype, Properties)
    kernel = kernels()[chosen.tier]
    first = "ROWS" if chosen.tier == "row" else "DEPTH"
    second = "BLOCK" if chosen.tier == "row" else "LANES"
    constants: dict[str, Any] = {
        "FUNCTION": function,
        first: max(chosen.rows, chosen.depth),
        second: chosen.block,
        "x_stride": 1,
        "out_stride": 1,
    }
    pointers = {"x_ptr": _TYPES[dtype], "out_ptr": _TYPES[out_dtype]}
    signature = {a: "constexpr" if a in constants else pointers.get(a, "i32") for a in kernel.arg_names}
    multiples = {"x_ptr", "out_ptr", *(["n", "x_row_stride", "out_row_stride"] if aligned else [])}
    attributes = {(k,): [["tt.divisibility", 16]] for k, a in enumerate(kernel.arg_names) if a in multiples}
    target = GPUTarget(backend, arch, Properties.warp_size)
    options = {"num_warps": chosen.num_warps, "num_stages": chosen.num_stages, "enable_fp_fusion": True}
    built = triton.compile(ASTSource(kernel, signature, constants, attributes), target=target, options=options)

    found = {"tier": chosen.tier}
    if backend == "hip":
        text = built.asm["amdgcn"]
        for name in ("private_segment_fixed_size", "vgpr_spill_count"):
            found[name] = int(re.search(rf"\.{name}:\s+(\d+)", text)[1])
        found["wide"] = len(re.findall(r"global_load_dwordx4|buffer_load_dwordx4", text))
        return found
    tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        report = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    for name in ("REG", "STACK", "LOCAL"):
        found[name] = int(re.search(rf"{name}:(\d+)", report.stdout)[1])
    found["wide"] = len(re.findall(r"ld\.global[.\w:]*\.(v4\.b32|v2\.b64)", built.asm["ptx"]))
    found["exponentials"] = built.asm["ptx"].count("ex2.approx")
    return found


TARGETS = [("cuda", 80), ("cuda", 90), ("cuda", 100), ("cuda", 120), ("hip", "gfx942")]
CASES = [
    ("softmax", 16, F32, F32, True),
    ("softmax", 781, F32, F32, False),
    ("log_softmax", 4096, BF16, F32, True),
    ("softmax", 32768, BF16, BF16, True),
    ("softmax", 50257, BF16, BF16, False),
    ("softmin", 65536, F32, F32, True),
    ("logsumexp", 131072, F16, F16, True),
    ("log_softmax", 1000, F64, F64, True),
]


@pytest.mark.parametrize(("function", "n", "dtype", "out_dtype", "aligned"), CASES, ids=_name)
@pytest.mark.parametrize(("backend", "arch"), TARGETS, ids=_name)
def test_compiles_without_spills(compiling, backend, arch, function, n, dtype, out_dtype, aligned):
    found = compiling(_compile, function, n, dtype, out_dtype, backend, arch, aligned)
    assert found["tier"] == ("row" if n <= 32768 else "online")
    assert found["wide"] > 0 or not aligned, "aligned rows are read 16 bytes at a time"
    if backend == "hip":
        assert found["private_segment_fixed_size"] == found["vgpr_spill_count"] == 0
    else:
        # ptxas parks up to 6 registers of a thread to run more warps at once; a tile that is too large spills 64 bytes
        # and more.
        assert found["STACK"] <= 24
        assert found["LOCAL"] == 0


def test_row_tier_takes_one_exponential_an_element(compiling):
    elements = 4096 // 128  # a thread's share of the row
    found = compiling(_compile, "softmax", 4096, BF16, BF16, "cuda", 90, True)
    assert found["exponentials"] == elements


def test_online_tier_takes_one_exponential_an_element_in_each_pass(compiling):
    found = compiling(_compile, "softmax", 65536, F32, F32, "cuda", 90, True)
    elements, lanes = 16, 4  # a thread's share of a chunk, and its pairs: one rescale each, and one in the fold
    assert found["exponentials"] == 2 * elements + 2 * lanes


# ----------------------------------------------------------------------------------------------- on a GPU, for real


def _real(function: str, x: Tensor, dims: Any, dtype: torch.dtype | None = None, tier: str | None = None) -> Tensor:
    out = _poisoned(function, x, dims, dtype)
    engine.forward(function, x, out, tuple(dims), plan=TIERS.get(tier))
    return out


@pytest.fixture
def gpu() -> str:
    reason = engine.unavailable(torch.device("cuda"))
    assert reason is None, reason
    return "cuda"


@pytest.mark.gpu
@pytest.mark.parametrize("tier", [None, *TIERS])
@every_function
@every_dtype
def test_gpu_definition_and_special_values(gpu, function, dtype, tier):
    for x in (maker(dtype, gpu)(6, 37), _special(dtype, gpu)):
        x = -x if function == "softmin" else x
        _assert_special(function, _real(function, x, (1,), tier=tier), x)


@pytest.mark.gpu
@every_function
@pytest.mark.parametrize("dtype", [F32, BF16], ids=_name)
@pytest.mark.parametrize(
    "n", [1, 3, 16, 200, 256, 512, 781, 1024, 2048, 4096, 8192, 32768, 32769, 50257, 131072, 300001]
)
def test_gpu_row_lengths(gpu, function, dtype, n):
    x = maker(dtype, gpu)(max(3, min(3000, 1 << 18) // n + 1), n)
    assert_defined(function, _real(function, x, (1,)), x, 1)


@pytest.mark.gpu
@every_function
@pytest.mark.parametrize("dtype", [F32, BF16], ids=_name)
def test_gpu_special_values_of_long_rows(gpu, function, dtype):
    x = _special(dtype, gpu, n=70001)
    x = -x if function == "softmin" else x
    _assert_special(function, _real(function, x, (1,)), x)


@pytest.mark.gpu
@pytest.mark.parametrize("n", [37, 50257])
@pytest.mark.parametrize(("dtype", "out_dtype"), [(a, b) for a in DTYPES for b in DTYPES], ids=_name)
def test_gpu_types(gpu, dtype, out_dtype, n):
    x = maker(dtype, gpu, scale=3.0)(4, n)
    assert_defined("softmax", _real("softmax", x, (1,), out_dtype), x.to(out_dtype), 1)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gpu_layouts_and_dims(gpu, layout):
    x = LAYOUTS[layout](maker(F32, gpu))
    for spelled in tuples(x):
        dims = tuple(sorted(d % max(x.ndim, 1) for d in spelled)) if x.ndim else ()
        for function in ("softmax", "logsumexp"):
            assert_defined(function, _real(function, x, dims), x, dims or 0, f", layout {layout}")


@pytest.mark.gpu
@pytest.mark.parametrize("n", [781, 50257])
@pytest.mark.parametrize("dim", [0, 1])
def test_gpu_in_place(gpu, n, dim):
    x = maker(F32, gpu)(64, n)
    want = x.clone()
    engine.forward("softmax", x, x, (dim,))
    assert_defined("softmax", x, want, dim)


@pytest.mark.gpu
def test_gpu_bits_are_the_same_from_run_to_run_and_at_any_number_of_rows(gpu):
    for n in (16, 200, 208, 4096, 50257, 65536):
        x = maker(F32, gpu)(300, n)
        whole = _real("softmax", x, (1,))
        assert torch.equal(whole, _real("softmax", x, (1,)))
        for rows in (slice(0, 1), slice(3, 4), slice(5, 12)):
            assert torch.equal(whole[rows], _real("softmax", x[rows], (1,)))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(2**31 // 16 + 5, 16), (3, 2**30 + 7)])
def test_gpu_more_than_two_to_the_31_elements(gpu, shape):
    if torch.cuda.mem_get_info()[0] < 12 * 2**30:
        pytest.skip("needs 12 GiB of free GPU memory")
    x = torch.zeros(shape, dtype=F16, device=gpu)
    x[-1] = torch.arange(shape[1], device=gpu) % 3
    out = torch.full_like(x, 777.0)
    engine.forward("log_softmax", x, out, (1,))
    for row in (0, shape[0] // 2, shape[0] - 1):
        part = x[row, :: max(1, shape[1] // 16)].double()
        want = part - reference.logsumexp(x[row].float(), 0)
        assert torch.allclose(out[row, :: max(1, shape[1] // 16)].double(), want, rtol=2e-3, atol=1e-3)


@pytest.mark.gpu
def test_gpu_graph_replay(gpu):
    x, y = maker(F32, gpu)(64, 40000), torch.empty(64, 40000, device=gpu)
    engine.forward("softmax", x, y, (1,))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        engine.forward("softmax", x, y, (1,))
    x.copy_(maker(F32, gpu, seed=1)(64, 40000))
    y.fill_(777.0)
    graph.replay()
    assert_defined("softmax", y, x, 1)


@pytest.mark.gpu
def test_gpu_that_is_not_current(gpu):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    x = maker(F32, "cuda:1")(5, 1000)
    assert torch.cuda.current_device() == 0
    assert_defined("softmax", _real("softmax", x, (1,)), x, 1)
    assert torch.cuda.current_device() == 0
