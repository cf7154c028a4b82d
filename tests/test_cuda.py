"""The CUDA engine on a GPU: every tier runs, and is right."""

import subprocess
import threading

import pytest
import torch

import onepass
from onepass import native, reference
from onepass.checks import reduces_to

WARP, FLAT, BLOCK, CLUSTER, GRID, STREAM = range(6)
WHOLE = 2  # of `edges`
F32, F64, F16, BF16 = torch.float32, torch.float64, torch.float16, torch.bfloat16

# With a GPU ----------------------------------------------------------------------------------------------------------

# Plans that serve rows of n elements, and the lengths to run them on: one element, odd, one short, full, one over.
FORCED = [
    ((WARP, 1, 128, 4, 1, 1, 0, 0), [1, 3, 4]),
    ((WARP, 2, 64, 12, 4, 1, 0, 0), [1, 8, 12, 21, 24]),
    ((WARP, 32, 4, 8, 1, 1, 0, 0), [1, 31, 33, 255, 256]),
    ((WARP, 32, 4, 20, 4, 1, 0, 0), [4, 500, 512, 513, 637, 640]),
    ((WARP, 4, 32, 24, 8, 1, 0, 1), [1, 3, 65, 95, 96]),
    ((WARP, 4, 32, 48, 8, 1, 0, 0), [8, 152, 184, 187, 192]),
    ((FLAT, 1, 128, 34, 1, 1, 1, 0), [1, 3, 33, 34]),
    ((FLAT, 4, 32, 10, 1, 1, 3, 0), [7, 37, 40]),
    ((FLAT, 32, 8, 26, 1, 1, 2, 0), [1, 781, 832]),
    ((BLOCK, 64, 1, 4, 1, 1, 0, 0), [1, 63, 65, 255, 256]),
    ((BLOCK, 32, 1, 8, 4, 1, 0, 0), [5, 250, 253, 256]),
    ((BLOCK, 160, 1, 24, 8, 1, 0, 0), [2, 130, 1022, 1024, 3833, 3840]),
    ((BLOCK, 512, 1, 8, 1, 1, 0, 0), [1, 1023, 4095, 4096]),
    ((BLOCK, 32, 1, 56, 8, 1, 0, 0), [1016, 1528, 1537, 1544, 1784, 1792]),
    ((BLOCK, 96, 1, 16, 8, 1, 0, 1), [1, 130, 1535, 1536]),
    ((BLOCK, 64, 1, 8, 4, 1, 6, 0), [1, 300, 2045, 2048]),
    ((CLUSTER, 32, 1, 8, 4, 2, 0, 0), [1, 3, 250, 509, 512]),
    ((CLUSTER, 96, 1, 16, 4, 8, 0, 0), [1, 100, 1000, 9001, 12285, 12288]),
    ((CLUSTER, 64, 1, 8, 2, 16, 0, 0), [1, 65, 8191, 8192]),
    ((CLUSTER, 64, 1, 16, 8, 4, 4, 0), [1, 777, 12281, 12288]),
    ((CLUSTER, 32, 1, 8, 4, 2, 2, 1), [1, 3, 1023, 1024]),
    ((GRID, 64, 1, 16, 4, 3, 12, 0), [1, 250, 4098, 12288, 12289, 50001]),
    ((GRID, 32, 1, 32, 8, 132, 12, 0), [1, 9, 100_000, 1_000_001]),
    ((GRID, 128, 1, 16, 2, 1, 12, 1), [1, 3, 2047, 5119, 9001]),
    ((GRID, 96, 1, 16, 4, 5, 0, 0), [1, 2, 31, 7679]),
    ((GRID, 64, 1, 0, 4, 3, 8, 0), [1, 250, 12289, 50001]),
    ((GRID, 32, 1, 0, 8, 132, 0, 0), [9, 1_000_001]),
    ((GRID, 96, 1, 0, 2, 5, 16, 1), [1, 3, 4801, 30011]),
    ((STREAM, 64, 1, 4, 1, 1, 0, 0), [1, 63, 257, 5000]),
    ((STREAM, 512, 1, 16, 4, 1, 0, 0), [4, 8188, 8192, 8193, 20001]),
]
TYPES = [(F32, F32), (F64, F64), (F16, F16), (BF16, BF16), (F16, F32), (BF16, F32), (F32, BF16), (F64, F16)]
STATES = [(F32, F32), (F64, F64), (F16, F32), (BF16, F32)]
# Of float32: half a unit of x - m, which is up to 64 here, and the exponential's own.
TOLERANCE = {F64: 1e-13, F32: 2.2e-6, F16: 2e-3, BF16: 1.6e-2}


def expect(function: str, x: torch.Tensor, y_type: torch.dtype) -> torch.Tensor:
    return getattr(reference, function)(x.to(y_type), 1)


def close(actual: torch.Tensor, expected: torch.Tensor, y_type: torch.dtype, function: str = "softmax") -> None:
    # Probabilities: relative, down to where the numbers are no longer normal. Logarithms: relative to max(1, |result|).
    least = TOLERANCE[y_type] if function.startswith("log") else torch.finfo(y_type).smallest_normal
    torch.testing.assert_close(actual.double(), expected, rtol=TOLERANCE[y_type], atol=least, equal_nan=True)


def special(rows: int, n: int, dtype: torch.dtype) -> torch.Tensor:
    x = torch.randn(rows, n, device="cuda", dtype=F64) * 3
    if rows > 6:
        x[1, : n - 1] = -torch.inf  # a long run, to the last element
        x[2, 1:] = -torch.inf
        x[3] = -torch.inf
        x[4] = x[4].abs() + 100.0  # of which exp is infinite itself
        x[4, n // 2] = torch.inf
        x[5, n // 2] = torch.nan
        x[6] = 7.0
    return x.to(dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("function", native.FUNCTIONS)
@pytest.mark.parametrize(("x_type", "y_type"), TYPES, ids=lambda t: str(t)[6:])
def test_every_tier(function, x_type, y_type):
    lse, state = function == "logsumexp", function == "state"
    if lse and not reduces_to(function, x_type, y_type):
        pytest.skip("logsumexp does not give that")
    if state and (x_type, y_type) not in STATES:
        pytest.skip("a state is of the type it is added up in")
    clusters = torch.cuda.get_device_capability() >= (9, 0)
    for plan, lengths in FORCED:
        tier, lanes, group, values, vector, split, shelf, edges = plan
        # A reduction writes no rows: its vectors are those of the input.
        vector = min(vector, 16 // (x_type.itemsize if lse or state else max(x_type.itemsize, y_type.itemsize)))
        if (tier == CLUSTER and not clusters) or (values // vector > 16 and tier == GRID):
            continue
        kept = values + (0 if tier == FLAT else shelf * vector)
        for n in lengths:
            room = lanes * kept * (split if tier == CLUSTER else 1)
            window = n if n % vector == 0 or edges or tier == FLAT else n + vector - 1
            if (n < vector and not edges) or (tier not in (GRID, STREAM) and window > room):
                continue
            if shelf and tier != FLAT and vector * x_type.itemsize < 4:
                continue
            x = special(37, n, x_type)
            shape = (2, 37) if state else (37,) if lse else (37, n)
            whole = tier in (WARP, BLOCK, CLUSTER) and not edges and n % vector == 0
            for edge in (edges, WHOLE) if whole else (edges,):
                forced = [tier, lanes, group, values, vector, split, shelf, edge]
                out = torch.full(shape, torch.nan, device="cuda", dtype=y_type)
                torch.ops.onepass._forced(x, native.FUNCTIONS.index(function), [1], False, forced, out)
                if state:
                    m, total = reference.state(x, 1)
                    torch.testing.assert_close(out[0].double(), m, rtol=0, atol=0, equal_nan=True)
                    torch.testing.assert_close(out[1].double(), total, rtol=4e-6, atol=0, equal_nan=True)
                else:
                    close(out, expect(function, x, y_type), y_type, function)


@pytest.mark.gpu
def test_forced_plan_that_cannot_serve_is_refused():
    x = torch.randn(4, 100, device="cuda")
    out = torch.full_like(x, 5.0)
    for plan, words in [
        ([WARP, 32, 4, 2, 1, 1, 0, 0], "rows of up to 64 elements, got 100"),
        ([WARP, 64, 2, 4, 1, 1, 0, 0], "warp and flat tiers have a power of two of lanes up to 32"),
        ([FLAT, 32, 4, 4, 4, 1, 1, 0], "vectors of one element"),
        ([FLAT, 32, 4, 4, 1, 1, 0, 0], "1 to 1024 rows a thread"),
        ([BLOCK, 48, 1, 4, 1, 1, 0, 0], "a multiple of 32"),
        ([BLOCK, 64, 2, 4, 1, 1, 0, 0], "one row a block"),
        ([BLOCK, 64, 1, 4, 1, 2, 0, 0], "1 in the others"),
        ([CLUSTER, 64, 1, 4, 1, 3, 0, 0], "split is a power of two"),
        ([CLUSTER, 64, 1, 4, 1, 1, 0, 0], "2 to 16 in the cluster tier"),
        ([GRID, 64, 1, 16, 4, 1000, 0, 0], "blocks a row here"),
        ([GRID, 64, 1, 8, 4, 1, 0, 0], "0, 4, 8, 12 or 16 vectors"),
        ([GRID, 480, 1, 16, 4, 1, 60, 0], "bytes of shared memory"),
        ([BLOCK, 64, 1, 4, 4, 1, 3, 0], "of 2 in the block"),
        ([STREAM, 64, 1, 4, 4, 1, 2, 0], "no shelf"),
        ([BLOCK, 64, 1, 4, 4, 1, 0, 3], "edges is 0"),
        ([STREAM, 64, 1, 4, 4, 1, 0, 2], "the tiers warp, block and cluster"),
        ([BLOCK, 64, 1, 6, 4, 1, 0, 0], "values a multiple of it"),
        ([BLOCK, 64, 1, 68, 4, 1, 0, 0], "up to 64"),
        ([9, 32, 4, 4, 1, 1, 0, 0], "tier is 0"),
        ([WARP, 32, 4, 4, 1], "a plan is"),
    ]:
        with pytest.raises(RuntimeError, match=words):
            torch.ops.onepass._forced(x, 0, [1], False, plan, out)
    odd = torch.randn(4, 126, device="cuda")
    with pytest.raises(RuntimeError, match="rows of up to 128 elements, got 129"):
        torch.ops.onepass._forced(odd, 0, [1], False, [BLOCK, 32, 1, 4, 4, 1, 0, 0], torch.empty_like(odd))
    with pytest.raises(RuntimeError, match="rows of whole vectors of 4 elements"):
        torch.ops.onepass._forced(odd, 0, [1], False, [BLOCK, 64, 1, 4, 4, 1, 0, 2], torch.empty_like(odd))
    shifted = torch.empty(4 * 126 + 1, device="cuda")[1:].view(4, 126)
    with pytest.raises(RuntimeError, match="of this call allow 1"):
        torch.ops.onepass._forced(odd, 0, [1], False, [BLOCK, 64, 1, 4, 4, 1, 0, 0], shifted)
    assert (out == 5).all()


@pytest.mark.gpu
@pytest.mark.parametrize("offset", range(9))
@pytest.mark.parametrize("dtype", [F32, BF16], ids=["float32", "bfloat16"])
def test_any_alignment(dtype, offset):
    for n in (7, 96, 1000, 1001, 33000, 40001):
        whole = torch.randn(offset + 5 * (n + 3), device="cuda").to(dtype)
        x = whole[offset:].view(5, n + 3)[:, :n]
        guard = torch.full((offset + 5 * (n + 1) + 8,), 9.0, device="cuda", dtype=dtype)
        out = guard[offset : offset + 5 * (n + 1)].view(5, n + 1)[:, :n]
        onepass.softmax(x, -1, out=out, engine="cuda")
        close(out, expect("softmax", x, dtype), dtype)
        out.fill_(9.0)
        assert (guard == 9).all(), "written beside the output"


@pytest.mark.gpu
def test_many_rows_and_long_rows():
    x = torch.randn(3_000_000, 3, device="cuda")
    torch.testing.assert_close(onepass.softmax(x, -1).double(), reference.softmax(x, -1), rtol=2e-6, atol=0)
    x = torch.randn(2, 10_000_001, device="cuda")
    torch.testing.assert_close(onepass.logsumexp(x, -1).double(), reference.logsumexp(x, -1), rtol=1e-6, atol=0)


@pytest.mark.gpu
def test_explain_names_the_kernel_that_ran():
    x = torch.randn(64, 1000, device="cuda")
    plan = onepass.explain(x)
    assert (plan.engine, plan.tier, plan.launch["source"]) == ("cuda", "block", "rows.cu")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        onepass.softmax(x)
        torch.cuda.synchronize()
    names = [event.key for event in profile.key_averages()]
    assert "onepass_kernel" in names, names
    assert onepass.explain(torch.randn(8, 1_000_000, device="cuda")).tier == "grid"


@pytest.mark.gpu
def test_compiles_once_and_loads_from_disk(tmp_path):
    code = (
        "import time, torch, onepass; from onepass import native; x = torch.randn(3, 77, device='cuda');"
        "torch.cuda.synchronize(); s = time.perf_counter(); onepass.softmax(x); torch.cuda.synchronize();"
        "first = time.perf_counter() - s; onepass.softmax(x); print(*native.counts(), first)"
    )
    import os
    import sys

    environment = {**os.environ, "ONEPASS_CACHE_DIR": str(tmp_path / "cache")}
    counts = []
    for _ in range(2):
        run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        counts.append(run.stdout.split()[:2])
        print("first call, s:", run.stdout.split()[2])
    assert counts == [["1", "0"], ["0", "1"]]


@pytest.mark.gpu
def test_streams_graphs_and_threads():
    x = torch.randn(512, 3000, device="cuda")
    expected = onepass.softmax(x)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        late = x.clone()
        on_side = onepass.softmax(late)
    side.synchronize()
    assert torch.equal(on_side, expected)

    graph, y = torch.cuda.CUDAGraph(), torch.zeros_like(x)
    with torch.cuda.graph(graph):
        onepass.softmax(x, out=y)
    x.mul_(-1)
    graph.replay()
    assert torch.equal(y, onepass.softmax(x))

    results = {}

    def work(name: int) -> None:
        results[name] = onepass.softmax(x[name:], engine="cuda")

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert all(torch.equal(results[i], y[i:]) for i in range(8))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_device_that_is_not_current():
    x = torch.randn(64, 500, device="cuda:1")
    with torch.cuda.device(0):
        y = onepass.softmax(x, engine="cuda")
    assert y.device == x.device
    close(y, expect("softmax", x, F32), F32)


@pytest.mark.gpu
def test_auto_is_cuda_and_wrong_engines_are_refused():
    x = torch.randn(4, 4, device="cuda")
    assert onepass.engines()["cuda"] is None
    with pytest.raises(RuntimeError, match="serves CPU tensors"):
        onepass.softmax(x, engine="cpu")
    with pytest.raises(RuntimeError, match="serves CUDA tensors"):
        onepass.softmax(x.cpu(), engine="cuda")


@pytest.mark.gpu
def test_bits_are_the_same_from_run_to_run():
    for n in (50, 3000, 70_000):
        x = torch.randn(300, n, device="cuda", dtype=BF16)
        first = onepass.softmax(x, dtype=F32)
        assert all(torch.equal(first, onepass.softmax(x, dtype=F32)) for _ in range(5))
