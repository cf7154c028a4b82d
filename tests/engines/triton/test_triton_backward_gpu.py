"""Gradients of the Triton engine on a GPU, for real."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import onepass.triton as engine
from lib.support import DTYPES, LAYOUTS, maker, ours, tuples
from lib.triton import BF16, F16, F32, name_of, needs_triton, special
from lib.triton_backward import TIERS, Case, assert_gradient, case, run

pytestmark = [needs_triton, pytest.mark.gpu]


@pytest.fixture
def gpu() -> str:
    reason = engine.unavailable(torch.device("cuda"))
    assert reason is None, reason
    return "cuda"


@pytest.mark.parametrize("tier", [None, *TIERS])
def test_definition_and_special_values(gpu, function, dtype, tier):
    for x in (maker(dtype, gpu)(6, 23), special(dtype, gpu, n=26)):
        given = case(function, -x if function == "softmin" else x, (1,))
        assert_gradient(run(given, TIERS.get(tier)), given)


@pytest.mark.parametrize("n", [1, 3, 16, 200, 256, 512, 781, 1024, 4096, 8192, 16384, 16385, 50257, 300001])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=name_of)
def test_row_lengths(gpu, function, dtype, n):
    given = case(function, maker(dtype, gpu)(max(3, min(3000, 1 << 18) // n + 1), n), (1,))
    assert_gradient(run(given), given)


@pytest.mark.parametrize(("dtype", "to"), [(a, b) for a in DTYPES for b in DTYPES], ids=name_of)
@pytest.mark.parametrize("n", [37, 50257])
def test_types(gpu, dtype, to, n):
    given = case("log_softmax", maker(dtype, gpu)(4, n), (1,), to)
    assert_gradient(run(given), given)


def turned(x: Tensor) -> Tensor:
    return x.permute(tuple(range(x.dim()))[::-1])


FORMS: dict[str, Callable[[Case], Tensor]] = {  # how the result's gradient lies
    "as it is": lambda c: c.grad,
    "expanded": lambda c: c.grad.new_tensor(0.7).expand(c.grad.shape),
    "reversed": lambda c: (
        c.grad.permute(tuple(range(c.grad.dim()))[::-1]).contiguous().permute(tuple(range(c.grad.dim()))[::-1])
    ),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_and_dims(gpu, layout, form):
    x = LAYOUTS[layout](maker(F32, gpu))
    for dims in tuples(x):
        for function in ("softmax", "logsumexp"):
            given = case(function, x, dims)
            given = given._replace(grad=FORMS[form](given))
            assert_gradient(run(given), given, f", layout {layout}, gradient {form}")


def test_bits_are_the_same_from_run_to_run_and_at_any_number_of_rows(gpu):
    for n in (16, 200, 208, 4096, 50257, 65536):
        given = case("softmax", maker(F32, gpu)(300, n), (1,))
        whole = run(given).clone()
        assert torch.equal(whole, run(given))
        for rows in (slice(0, 1), slice(3, 4), slice(5, 12)):
            part = Case("softmax", given.grad[rows], (given.saved[0][rows],), given.dx[rows], given.dims)
            assert torch.equal(whole[rows], run(part))


@pytest.mark.parametrize("shape", [(2**31 // 16 + 5, 16), (3, 2**30 + 7)])
def test_more_than_two_to_the_31_elements(gpu, shape):
    if torch.cuda.mem_get_info()[0] < 20 * 2**30:
        pytest.skip("needs 20 GiB of free GPU memory")
    y = torch.full(shape, 0.25, dtype=F16, device=gpu)
    grad = torch.zeros((), dtype=F16, device=gpu).expand(shape)
    dx = torch.full(shape, 777.0, dtype=F16, device=gpu)
    engine.backward("softmax", grad, (y,), dx, (1,))
    assert not bool(dx[0].any() or dx[-1].any() or dx[shape[0] // 2].any())
    y.zero_()
    y[-1, -2:] = 0.5
    grad = torch.zeros(shape, dtype=F16, device=gpu)
    grad[-1, -1] = 8.0
    engine.backward("softmax", grad, (y,), dx, (1,))
    assert dx[-1, -2:].tolist() == [-2.0, 2.0]
    assert int(dx.count_nonzero()) == 2


@pytest.mark.parametrize("dim", [0, 1, (0, 2)], ids=str)
def test_autograd_allocates_the_gradient_alone(gpu, function, dim):
    x = maker(F32, gpu)(64, 128, 96).requires_grad_()
    y = ours(function)(x, dim, engine="triton")
    grad = torch.ones((), device=gpu).expand(y.shape)
    torch.autograd.grad(y, x, grad, retain_graph=True)  # the kernel is compiled
    gc.collect()  # else what others have left is given back meanwhile
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    (got,) = torch.autograd.grad(y, x, grad)
    assert torch.cuda.max_memory_allocated() - before == got.numel() * got.element_size()
    want = torch.autograd.grad(ours(function)(x, dim, engine="cuda"), x, grad)[0] if torch.version.cuda else got
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_graph_replay(gpu):
    given = case("softmax", maker(F32, gpu)(64, 40000), (1,))
    run(given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(given)
    given.grad.copy_(maker(F32, gpu, seed=1)(64, 40000))
    given.dx.fill_(777.0)
    graph.replay()
    assert_gradient(given.dx, given)
