"""The Triton engine on a GPU, for real."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import onepass.triton as engine
from lib.support import DTYPES, LAYOUTS, assert_defined, maker, tuples
from lib.triton import BF16, F16, F32, TIERS, assert_special, name_of, needs_triton, poisoned, special
from onepass import reference

pytestmark = needs_triton


def _real(function: str, x: Tensor, dims: Any, dtype: torch.dtype | None = None, tier: str | None = None) -> Tensor:
    out = poisoned(function, x, dims, dtype)
    engine.forward(function, x, out, tuple(dims), plan=TIERS.get(tier))
    return out


@pytest.fixture
def gpu() -> str:
    reason = engine.unavailable(torch.device("cuda"))
    assert reason is None, reason
    return "cuda"


@pytest.mark.gpu
@pytest.mark.parametrize("tier", [None, *TIERS])
def test_gpu_definition_and_special_values(gpu, function, dtype, tier):
    for x in (maker(dtype, gpu)(6, 37), special(dtype, gpu)):
        x = -x if function == "softmin" else x
        assert_special(function, _real(function, x, (1,), tier=tier), x)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [F32, BF16], ids=name_of)
@pytest.mark.parametrize(
    "n", [1, 3, 16, 200, 256, 512, 781, 1024, 2048, 4096, 8192, 32768, 32769, 50257, 131072, 300001]
)
def test_gpu_row_lengths(gpu, function, dtype, n):
    x = maker(dtype, gpu)(max(3, min(3000, 1 << 18) // n + 1), n)
    assert_defined(function, _real(function, x, (1,)), x, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [F32, BF16], ids=name_of)
def test_gpu_special_values_of_long_rows(gpu, function, dtype):
    x = special(dtype, gpu, n=70001)
    x = -x if function == "softmin" else x
    assert_special(function, _real(function, x, (1,)), x)


@pytest.mark.gpu
@pytest.mark.parametrize("n", [37, 50257])
@pytest.mark.parametrize(("dtype", "out_dtype"), [(a, b) for a in DTYPES for b in DTYPES], ids=name_of)
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
