"""Gradients of the Triton engine: every tier forced on small shapes under Triton's interpreter and on a GPU, and on a
GPU its own plans."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import onepass.triton as engine
from lib.modes import Operators
from lib.support import DTYPES, LAYOUTS, maker, ours, same, some_tuples, tuples
from lib.triton import (
    BF16,
    F16,
    F32,
    F64,
    INF,
    NAN,
    SOME_DTYPES,
    TIERS,
    Case,
    assert_gradient,
    backward,
    case,
    check_gradient,
    name_of,
    needs_triton,
    special,
)
from onepass.triton import Plan, launch

pytestmark = needs_triton
TWO_TIERS = pytest.mark.parametrize("tier", ["rows of 4 a program, split launch", "online"])


@pytest.mark.parametrize(("tier", "dtype"), SOME_DTYPES, ids=name_of)
def test_values(runs, function, dtype, tier):
    check_gradient(runs, case(function, maker(dtype, runs.device)(5, 23)), TIERS[tier])


@pytest.mark.parametrize("n", [1, 2, 7, 8, 9, 16, 17, 31, 32])
@TWO_TIERS
def test_row_lengths_about_the_edges_of_a_tile(runs, tier, n):
    check_gradient(runs, case("softmax", maker(BF16, runs.device)(5, n)), TIERS[tier])


@pytest.mark.parametrize("function", ["log_softmax", "logsumexp"])
def test_rows_longer_than_the_row_tier(runs, function):
    check_gradient(runs, case(function, maker(BF16, runs.device)(1, 16400)))


@pytest.mark.parametrize(("function", "tier"), [("log_softmax", "row"), ("softmin", "online")])
@pytest.mark.parametrize(("dtype", "to"), [(a, b) for a in DTYPES for b in DTYPES if a is not b], ids=name_of)
def test_input_of_another_type_than_the_result(runs, function, tier, dtype, to):
    given = case(function, maker(dtype, runs.device)(3, 23), dtype=to)
    assert check_gradient(runs, given, TIERS[tier]).dtype is to


@pytest.mark.parametrize(("dtype", "of_grad"), [(F32, F64), (BF16, F32), (F64, BF16)], ids=name_of)
def test_gradient_of_another_type_than_the_result(runs, dtype, of_grad):
    given = case("softmax", maker(dtype, runs.device)(3, 23))
    check_gradient(runs, given._replace(grad=given.grad.to(of_grad)), TIERS["row"])


@TWO_TIERS
@pytest.mark.parametrize("dtype", [BF16, F16], ids=name_of)
def test_logsumexp_of_half_types_in_float32(runs, dtype, tier):
    given = case("logsumexp", maker(dtype, runs.device)(5, 23))
    lse = torch.logsumexp(given.saved[0].double(), 1, keepdim=True).float()
    given = given._replace(grad=maker(F32, runs.device)(5, 1), saved=(given.saved[0], lse))
    assert check_gradient(runs, given, TIERS[tier]).dtype is dtype


def _reversed(t: Tensor) -> Tensor:
    turned = t.permute(tuple(range(t.dim()))[::-1])
    return turned.contiguous().permute(tuple(range(t.dim()))[::-1])


SOME_OF_LOGSUMEXP = ("0-d", "middle", "permuted and sliced", "expanded middle", "size 1 dims")


@pytest.mark.parametrize("function", ["softmax", "logsumexp"])
def test_layouts_and_dims(runs, function, layout):
    x = LAYOUTS[layout](maker(BF16, runs.device))
    on_gpu = runs.device == "cuda"
    if function == "logsumexp" and layout not in SOME_OF_LOGSUMEXP and not on_gpu:
        return
    for dims in tuples(x) if on_gpu else some_tuples(x):
        given = case(function, x, dims)
        check_gradient(runs, given, note=f", layout {layout}")
        if on_gpu:
            for grad in (given.grad.new_tensor(0.7).expand(given.grad.shape), _reversed(given.grad)):
                check_gradient(runs, given._replace(grad=grad), note=f", layout {layout}, strides {grad.stride()}")


FORMS: dict[str, Callable[[Case], Tensor]] = {  # how the result's gradient lies
    "one number": lambda c: torch.tensor(0.7).expand(c.grad.shape),
    "one number a row": lambda c: maker(F32)(4, 1, 5).expand(4, 3, 5),
    "one number a column": lambda c: maker(F32)(3, 5).expand(4, 3, 5),
    "reversed": lambda c: maker(F32)(5, 3, 4).permute(2, 1, 0),
    "with gaps": lambda c: maker(F32)(4, 6, 10)[:, ::2, 1::2],
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dims", [(0,), (1,), (2,), (0, 2), (0, 1, 2)], ids=str)
def test_gradients_of_any_strides(runs, dims, form):
    given = case("log_softmax", maker(BF16, runs.device)(4, 3, 5), dims)
    check_gradient(runs, given._replace(grad=FORMS[form](given).to(runs.device)), note=f", {form}")


@TWO_TIERS
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_strided_result_is_written_where_it_lies_and_nowhere_else(runs, dim, tier):
    given = case("softmax", maker(F32, runs.device)(4, 3, 5), (dim,))
    base = torch.full((12, 5, 8), 777.0, device=runs.device)
    given = given._replace(dx=base[1::2, ::1, ::2].permute(2, 1, 0)[:, 1:4, :5])
    got = check_gradient(runs, given, TIERS[tier])
    assert got.stride() == given.dx.stride()
    whole = torch.as_strided(got, (base.numel(),), (1,), 0)
    assert int((whole != 777.0).sum()) == got.numel()


@pytest.mark.parametrize("dims", [(0,), (1,), (0, 2)], ids=str)
def test_nothing_is_copied(monkeypatch, function, dims):
    """The kernel is given the operands' own memory, and no operator that makes anything has been called before."""
    launched = []

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *given, **options: launched.append(given)

    monkeypatch.setattr(launch, "_kernel", lambda *call: (Kernel(), {}))
    given = case(function, maker(F32)(4, 3, 5).permute(2, 0, 1), dims)
    given = given._replace(grad=torch.tensor(0.7).expand(given.grad.shape))
    with Operators() as mode:
        backward(*given)
    lse = given.saved[1] if function == "logsumexp" else None
    (passed,) = launched
    for tensor, expected in zip(passed, (given.saved[0], given.dx, given.grad, lse), strict=False):
        assert tensor is expected
    assert all(operator.is_view for operator in mode.seen)


@pytest.mark.parametrize(("tier", "dtype"), [("row", BF16), ("online", F32)], ids=name_of)
def test_special_values(runs, function, dtype, tier):
    x = special(dtype, runs.device)
    got = check_gradient(runs, case(function, -x if function == "softmin" else x), TIERS[tier])
    assert bool(got.isnan().any())
    assert bool(got[0].isfinite().all()), "rows do not spoil each other"


@TWO_TIERS
def test_special_values_of_the_gradient(runs, function, tier):
    given = case(function, maker(F32, runs.device)(8, 31))
    y, g = given.saved[0], given.grad
    if function in ("softmax", "softmin"):
        y[1:3, :24] = 0.0  # masked: whatever is finite there gives 0
    g[1], g[2, -1:], g[3, -1:], g[4, 0] = 3e38, INF, -INF, NAN
    g[5, 0], g[5, -1] = INF, -INF
    got = runs.run(backward, *given, TIERS[tier])
    # In float32, where a sum of 3e38 is infinite.
    if function == "logsumexp":
        want = g * (y - given.saved[1]).exp()
    elif function == "log_softmax":
        want = g - y.exp() * g.sum(1, keepdim=True)
    else:
        want = y * (g - (g * y).sum(1, keepdim=True)) * (1 if function == "softmax" else -1)
    assert same(got.isnan(), want.isnan())
    assert same(got.isinf(), want.isinf())
    assert bool(got[6:].isfinite().all()), "rows do not spoil each other"
    if function in ("softmax", "softmin"):
        assert not bool(got[1, :24].any())


@pytest.mark.parametrize("shape", [(0, 5), (5, 0, 2), (0,)], ids=str)
def test_empty(runs, function, shape):
    given = case(function, torch.empty(shape, device=runs.device), (len(shape) - 1,))
    assert same(runs.run(backward, *given), torch.empty(shape, device=runs.device))


@pytest.mark.parametrize(
    ("function", "change", "plan", "message"),
    [
        ("softplus", {}, None, "gradients of softmax, log_softmax, softmin, logsumexp, got 'softplus'"),
        ("state", {}, None, "got 'state'"),
        ("logsumexp", {}, None, "its input and result, got 1 tensors"),
        ("softmax", {"saved": ()}, None, "its result, got 0 tensors"),
        ("softmax", {"grad": torch.zeros(2, 1)}, None, r"its gradient has shape \[2, 37\] here, got \[2, 1\]"),
        ("softmax", {"dx": torch.zeros(37, 2)}, None, r"the input's gradient has shape \[2, 37\] here, got \[37, 2\]"),
        ("logsumexp", {"saved": (torch.zeros(2, 37),) * 2}, None, r"the result has shape \[2, 1\] here, got \[2, 37\]"),
        ("softmax", {"grad": torch.zeros(2, 37, device="meta")}, None, "gradient is on meta, what .* saved on cpu"),
        ("softmax", {}, TIERS["row"], "needs block >= n = 37"),
    ],
)
def test_what_is_not_a_gradient_is_refused(function, change, plan, message):
    given = case("softmax", torch.zeros(2, 37))._replace(function=function, **change)
    with pytest.raises(ValueError, match=message):
        backward(*given, plan)


def _of_scaled(function: str, x: Tensor, grad: Tensor, plan: Plan, temperature: float) -> Tensor:
    """`function` of x / temperature, by a score that the engine does not have, and the gradient of x beside it."""
    from lib.triton_score import SCALED
    from onepass.triton import score

    out, dx, params = torch.empty_like(grad), torch.empty_like(x), (temperature,)
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(score.SCORES, function, SCALED)
        launch._kernel.cache_clear()
        engine.launch_forward(function, x, out, (1,), params=params, plan=plan)
        saved = (x, out) if function == "logsumexp" else (out,)
        engine.launch_backward(function, grad, saved, dx, (1,), params=params, plan=plan)
        launch._kernel.cache_clear()
    return torch.cat([out, dx], 1)


@pytest.mark.parametrize("function", ["softmax", "log_softmax", "logsumexp"])
@TWO_TIERS
def test_a_score_may_have_parameters(runs, function, tier):
    x = maker(F32, runs.device)(5, 23)
    grad = maker(F32, runs.device, seed=5)(5, 1 if function == "logsumexp" else 23)
    got = runs.run(_of_scaled, function, x, grad, TIERS[tier], 0.75)
    exact = x.double().requires_grad_()
    want = getattr(torch, function)(exact / 0.75, 1, **({"keepdim": True} if function == "logsumexp" else {}))
    want.backward(grad.double())
    torch.testing.assert_close(got.double(), torch.cat([want.detach(), exact.grad], 1), rtol=1e-5, atol=1e-6)


# On a GPU -------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("tier", [None, *TIERS])
def test_values_and_special_values_of_every_dtype(gpu, function, dtype, tier):
    for x in (maker(dtype, gpu.device)(6, 23), special(dtype, gpu.device)):
        check_gradient(gpu, case(function, -x if function == "softmin" else x), TIERS.get(tier))


@pytest.mark.gpu
@pytest.mark.parametrize("n", [1, 3, 16, 200, 256, 512, 781, 1024, 4096, 8192, 16384, 16385, 50257, 300001])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=name_of)
def test_row_lengths(gpu, function, dtype, n):
    check_gradient(gpu, case(function, maker(dtype, gpu.device)(max(3, min(3000, 1 << 18) // n + 1), n)))


@pytest.mark.gpu
@pytest.mark.parametrize("to", DTYPES, ids=name_of)
@pytest.mark.parametrize("n", [37, 50257])
def test_types(gpu, dtype, to, n):
    check_gradient(gpu, case("log_softmax", maker(dtype, gpu.device)(4, n), dtype=to))


@pytest.mark.gpu
def test_bits_are_the_same_from_run_to_run_and_at_any_number_of_rows(gpu):
    for n in (16, 200, 208, 4096, 50257, 65536):
        given = case("softmax", maker(F32, gpu.device)(300, n))
        whole = backward(*given).clone()
        assert torch.equal(whole, backward(*given))
        for rows in (slice(0, 1), slice(3, 4), slice(5, 12)):
            part = Case("softmax", given.grad[rows], (given.saved[0][rows],), given.dx[rows], given.dims)
            assert torch.equal(whole[rows], backward(*part))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(2**31 // 16 + 5, 16), (3, 2**30 + 7)])
def test_more_than_2_to_the_31_elements(gpu, shape):
    if torch.cuda.mem_get_info()[0] < 20 * 2**30:
        pytest.skip("needs 20 GiB of free GPU memory")
    y = torch.full(shape, 0.25, dtype=F16, device=gpu.device)
    grad = torch.zeros((), dtype=F16, device=gpu.device).expand(shape)
    dx = torch.full(shape, 777.0, dtype=F16, device=gpu.device)
    backward("softmax", grad, (y,), dx, (1,))
    assert not bool(dx[0].any() or dx[-1].any() or dx[shape[0] // 2].any())
    y.zero_()
    y[-1, -2:] = 0.5
    grad = torch.zeros(shape, dtype=F16, device=gpu.device)
    grad[-1, -1] = 8.0
    backward("softmax", grad, (y,), dx, (1,))
    assert dx[-1, -2:].tolist() == [-2.0, 2.0]
    assert int(dx.count_nonzero()) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [0, 1, (0, 2)], ids=str)
def test_autograd_allocates_the_gradient_alone(gpu, function, dim):
    x = maker(F32, gpu.device)(64, 128, 96).requires_grad_()
    y = ours(function)(x, dim, engine="triton")
    grad = torch.ones((), device=gpu.device).expand(y.shape)
    torch.autograd.grad(y, x, grad, retain_graph=True)  # the kernel is compiled
    gc.collect()  # else what others have left is given back meanwhile
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    (got,) = torch.autograd.grad(y, x, grad)
    assert torch.cuda.max_memory_allocated() - before == got.numel() * got.element_size()
    want = torch.autograd.grad(ours(function)(x, dim, engine="cuda"), x, grad)[0] if torch.version.cuda else got
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
def test_graph_replay(gpu):
    given = case("softmax", maker(F32, gpu.device)(64, 40000))
    backward(*given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        backward(*given)
    given.grad.copy_(maker(F32, gpu.device, seed=1)(64, 40000))
    given.dx.fill_(777.0)
    graph.replay()
    assert_gradient(given.dx, given)
