"""The CUDA engine on a GPU: every tier runs, and is right."""

import subprocess
import threading

import pytest
import torch

import onepass
from lib.rows import (
    BF16,
    BLOCK,
    CLUSTER,
    F32,
    FORCED,
    GRID,
    STAGED,
    TWOPASS,
    TYPES,
    WARP,
    check_forced,
    close,
    expect,
    is_served,
)
from onepass import native, reference

# With a GPU ----------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("function", native.FUNCTIONS)
@pytest.mark.parametrize(("x_type", "y_type"), TYPES, ids=lambda t: str(t)[6:])
def test_every_tier(runner, function, x_type, y_type):
    if not is_served(function, x_type, y_type):
        pytest.skip("the function does not give that")
    for plan, lengths in FORCED:
        check_forced(runner, function, x_type, y_type, plan, lengths)


@pytest.mark.gpu
def test_forced_plan_that_cannot_serve_is_refused():
    x = torch.randn(4, 100, device="cuda")
    out = torch.full_like(x, 5.0)
    for plan, words in [
        ([WARP, 32, 4, 2, 1, 1, 0, 0], "rows of up to 64 elements, got 100"),
        ([WARP, 64, 2, 4, 1, 1, 0, 0], "threads_per_row is a power of two up to 32 in the tiers warp and staged"),
        ([STAGED, 32, 4, 4, 4, 1, 1, 0], "vectors of one element"),
        ([STAGED, 32, 4, 4, 1, 1, 0, 0], "rows_per_thread from 1 to 1024"),
        ([BLOCK, 48, 1, 4, 1, 1, 0, 0], "a multiple of 32"),
        ([BLOCK, 64, 2, 4, 1, 1, 0, 0], "one row per block"),
        ([BLOCK, 64, 1, 4, 1, 2, 0, 0], "1 in the others"),
        ([CLUSTER, 64, 1, 4, 1, 3, 0, 0], "blocks_per_row is a power of two"),
        ([CLUSTER, 64, 1, 4, 1, 1, 0, 0], "2 to 16 in the tier cluster"),
        ([GRID, 64, 1, 16, 4, 1000, 0, 0], "blocks per row here"),
        ([GRID, 64, 1, 8, 4, 1, 0, 0], "0, 4, 8, 12 or 16 vectors"),
        ([GRID, 480, 1, 16, 4, 1, 60, 0], "bytes of shared memory"),
        ([BLOCK, 64, 1, 4, 4, 1, 3, 0], "of 2 in the tiers block"),
        ([TWOPASS, 64, 1, 4, 4, 1, 2, 0], "keep no vectors in shared memory"),
        ([BLOCK, 64, 1, 4, 4, 1, 0, 3], "access is 0"),
        ([TWOPASS, 64, 1, 4, 4, 1, 0, 2], "the tiers warp, block and cluster"),
        ([BLOCK, 64, 1, 6, 4, 1, 0, 0], "items_per_thread a multiple of it"),
        ([BLOCK, 64, 1, 68, 4, 1, 0, 0], "up to 64"),
        ([9, 32, 4, 4, 1, 1, 0, 0], "tier is 0"),
        ([WARP, 32, 4, 4, 1], "a plan is"),
    ]:
        with pytest.raises(RuntimeError, match=words):
            torch.ops.onepass._softmax_with_plan(x, 0, [1], False, plan, out)
    odd = torch.randn(4, 126, device="cuda")
    with pytest.raises(RuntimeError, match="rows of up to 128 elements, got 129"):
        torch.ops.onepass._softmax_with_plan(odd, 0, [1], False, [BLOCK, 32, 1, 4, 4, 1, 0, 0], torch.empty_like(odd))
    with pytest.raises(RuntimeError, match="rows of whole vectors of 4 elements"):
        torch.ops.onepass._softmax_with_plan(odd, 0, [1], False, [BLOCK, 64, 1, 4, 4, 1, 0, 2], torch.empty_like(odd))
    shifted = torch.empty(4 * 126 + 1, device="cuda")[1:].view(4, 126)
    with pytest.raises(RuntimeError, match="of this call allow 1"):
        torch.ops.onepass._softmax_with_plan(odd, 0, [1], False, [BLOCK, 64, 1, 4, 4, 1, 0, 0], shifted)
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
    assert (plan.engine, plan.tier, plan.launch["source"]) == ("cuda", "block", "rows_onchip.cu")
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
