"""The gradients of softcaps by CUDA kernels, in the emulator and on a GPU."""

import math

import pytest
import torch

import onepass
from emulator import missing
from lib.drawn_scores import TOLERANCE, assert_close, drawn, inner, window_of
from lib.plan_tables import BF16, F16, F32, F64
from lib.support import maker, thin_product
from onepass import native, scored
from onepass._warmup import _calls
from onepass.scored import LEAST_FROM_RESULT
from onepass.scores import Scores, SideTensors
from onepass.validation import Spec

emulated = pytest.mark.skipif(bool(missing()), reason=missing())


@emulated
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("way", ["rows", "columns", "bias"])
def test_a_softcap_asks_no_input_that_is_masked_out(emulator, way, dtype):
    """A NaN or an infinity there has the gradient 0, and so has a key after the query."""
    sizes, dims = {"rows": ((3, 5, 40), [2]), "columns": ((3, 9, 40), [1]), "bias": ((3, 5, 264), [2])}[way]
    x, mask = maker(dtype, seed=3)(*sizes), torch.rand(sizes[1:]) > 0.3
    mask[0] = True
    scores = Scores(0.5, 2.0, -math.inf, None, 0, 2)
    side, spec = SideTensors(mask=mask), Spec("softmax", dims, F64)
    y = scored.forward_arithmetic(x.double(), side, spec, scores)[0].to(dtype)
    hidden = y == 0
    x = torch.where(hidden, torch.tensor([math.nan, math.inf]).to(dtype)[torch.arange(x.numel()).view(sizes) % 2], x)
    g, dx = maker(dtype, seed=9)(*sizes), torch.empty_like(x)
    want = scored.backward_arithmetic(g.double(), y.double(), x.double().nan_to_num(0, 0, 0), side, spec, scores)
    tensors = {"input": y, "grad": g, "result": dx, "mask": mask, "of_cap": x}
    if way == "bias":
        tensors["bias"] = torch.empty(1, *sizes[1:], dtype=dtype)
    emulator.scored("softmax", tensors, dims, (0.5, 2.0, -math.inf), window_of(scores, x), bias_parts=way == "bias")
    assert hidden.any()
    assert not dx[hidden].any()
    assert_close(dx, want, dtype)


@emulated
@thin_product(3, dtype=[F16, BF16], cap=[LEAST_FROM_RESULT, 50.0], way=["rows", "columns"])
def test_the_slope_of_a_softcap_from_results(emulator, way, cap, dtype):
    """Its error is at most 1 / (128 softcap), up to where the cap is reached; nothing is NaN where a result is 0."""
    x = (torch.rand(3, 40, 40, generator=torch.Generator().manual_seed(3)) * 4 - 2).to(dtype) * cap
    g, y, dx, lse = maker(dtype, seed=9)(*x.shape), torch.empty_like(x), torch.empty_like(x), torch.empty(3, 40, 1)
    dims, lse = ([2], lse) if way == "rows" else ([1], lse.view(3, 1, 40))
    numbers = (1.0, cap, -math.inf)
    emulator.scored("softmax", {"input": x, "result": y, "lse": lse}, dims, numbers)
    emulator.scored("softmax", {"input": y, "grad": g, "result": dx, "lse": lse, "of_cap": x}, dims, numbers)
    spec, scores = Spec("softmax", dims, F64), Scores(1.0, cap, -math.inf, None, None, None)
    given = g.double(), y.double(), x.double(), SideTensors(), spec
    want, of_score = (scored.backward_arithmetic(*given, scores._replace(softcap=c)) for c in (cap, 0.0))
    assert (y == 0).any() or cap < 50
    rounding = torch.finfo(dtype).eps / 2 * want.abs() + (1e-7 if dtype is F16 else 1e-37)
    assert ((dx - want).abs() <= 1.01 * rounding + 1.01 * of_score.abs() / (128 * cap)).all()


@emulated
@thin_product(2, of=[((3, 5, 264), 2), ((3, 50, 21), 2), ((3, 40, 33), 1)], dtype=[BF16, F16])
def test_rows_of_a_large_bias_read_x(emulator, of, dtype):
    """As that of a row of padding, to which a bias added the least number: its logsumexp has no digit of a score."""
    sizes, dim = of
    x, side, scores = drawn(dtype, sizes, {"high softcap", "bias", "mask"}, 3)
    of_rows = side.bias.transpose(dim, 2)[0]
    of_rows[0], of_rows[1], of_rows[2] = torch.finfo(dtype).min, -3000, 800
    double = SideTensors(*(None if t is None else t.double() for t in side[:-1]), side.mask)
    spec, y, g, dx = Spec("softmax", [dim], F64), torch.empty_like(x), maker(dtype, seed=9)(*sizes), torch.empty_like(x)
    lse = torch.empty([1 if d == dim else n for d, n in enumerate(sizes)])
    call = [dim], (1.0, scores.softcap, -math.inf)
    tensors = {"bias": side.bias, "mask": side.mask, "lse": lse}
    emulator.scored("softmax", {"input": x, "result": y, **tensors}, *call)
    emulator.scored("softmax", {"input": y, "grad": g, "result": dx, "of_cap": x, **tensors}, *call)
    want = scored.backward_arithmetic(g.double(), y.double(), x.double(), double, spec, scores)
    assert_close(dx, want, dtype)
    exact = lse.transpose(dim, 2).squeeze(2)[:, :3].abs() > 1024
    assert exact.tolist() == [[True, True, False]] * 3


@emulated
@pytest.mark.parametrize("side", ["", "mask", "bias"])
def test_a_warm_up_has_the_kernels_of_softcaps(emulator, side):
    """Its list has the forward that autograd records, and its gradient from the result."""
    x, lse = maker(BF16, seed=3)(4, 6, 264), torch.empty(4, 6, 1)
    beside = {"mask": torch.rand(6, 264) > 0.3, "bias": maker(BF16, seed=4)(6, 264)}
    tensors = {"lse": lse, **({side: beside[side]} if side else {})}
    numbers, y, dx = (1.0, 50.0, -math.inf), torch.empty_like(x), torch.empty_like(x)
    emulator.scored("softmax", {"input": x, "result": y, **tensors}, [2], numbers)
    emulator.scored("softmax", {"input": y, "grad": x, "result": dx, "of_cap": x, **tensors}, [2], numbers)
    wanted = [call for call in _calls("softmax", BF16, BF16, True, ["softcap", side]) if "lse" in call[0]]
    listed = [native.call_kernels(*call, -1, 90, (264,), False) for call in wanted]
    for (source, defines), names in zip(emulator.kernels_run[-2:], listed, strict=True):
        assert " ".join((source, *defines)) in names


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["mask", "bias"])
@pytest.mark.parametrize(
    ("shape", "dim"),
    [
        *(((3, 5, n), -1) for n in (26, 37, 64, 300, 5001)),
        *((shape, 1) for shape in ((3, 9, 33), (2, 70, 40), (3, 300, 7), (2, 5001, 3))),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_a_softcap_with_autograd_on_a_gpu(dtype, shape, dim, way):
    """The slope is computed from the result, but in rows of a large bias."""
    x = inner(maker(dtype, seed=3)(*shape)).cuda().requires_grad_()
    mask, bias = torch.rand(shape) > 0.3, torch.randn(1, *shape[1:])
    mask[..., 0] = mask[:, 0] = True
    (bias[0, 0] if dim == -1 else bias[0, :, 0])[...] = -5000.0
    side = {"mask": mask.cuda()} if way == "mask" else {"bias": bias.to(dtype).cuda()}
    y = onepass.softmax(x, dim, scale=0.5, softcap=20.0, **side)
    g = torch.randn_like(y)
    (dx,) = torch.autograd.grad(y, x, g)
    wide = x.detach().double().requires_grad_()
    s = 20 * torch.tanh(wide * 0.5 / 20)
    s = s.masked_fill(~side["mask"], -math.inf) if way == "mask" else s + side["bias"].double()
    (want,) = torch.autograd.grad(torch.softmax(s, dim), wide, g.double())
    torch.testing.assert_close(dx.double(), want, rtol=2 * TOLERANCE[dtype], atol=4e-3)
