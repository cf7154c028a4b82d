"""Divergences of two tensors, against torch's in float64: the KL divergence of logits, and the cross-entropy with
probabilities of classes."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.nn import functional as F

import onepass
from lib.losses import REDUCTIONS, SHAPES, assert_close
from lib.modes import Graphs
from lib.support import DTYPES, maker, thin
from onepass.divergence_ops import divergence_terms
from onepass.loss_arithmetic import DivergenceSpec

F32, F64, F16, BF16 = DTYPES
INF = torch.inf


def expected_kl(p: Tensor, q: Tensor, dim: int = -1) -> Tensor:
    """A class of probability 0 adds 0, where torch has NaN."""
    log_p, log_q = p.double().log_softmax(dim), q.double().log_softmax(dim)
    return (log_p.exp() * (log_p - log_q).masked_fill(log_p == -INF, 0)).sum(dim)


def logits_of(shape: str, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """Two tensors of one shape, that lie differently for a shape without gaps."""
    make = maker(dtype, device)
    x, y = SHAPES[shape](make), SHAPES[shape](make)
    return x, y.mT.contiguous().mT if shape == "rows" else y


def assert_gradients(got: Tensor, want: Tensor, leaves: Any, others: Any, dtype: torch.dtype, note: Any) -> None:
    """Values and gradients: of both tensors, and of either alone."""
    assert_close(got.detach(), want.detach(), dtype, note)
    g = torch.randn(want.shape, dtype=F64, generator=torch.Generator().manual_seed(2)).to(got)
    theirs = torch.autograd.grad(want, others, g.double())
    for which in ((0, 1), (0,), (1,)):
        ours = torch.autograd.grad(got, [leaves[k] for k in which], g, retain_graph=True)
        for k, mine in zip(which, ours, strict=True):
            assert mine.dtype is dtype
            assert_close(mine, theirs[k], dtype, f"gradient {k} of {note}")


@pytest.mark.parametrize("shape", SHAPES)
def test_kl_divergence(shape, dtype, engine, device):
    x, y = logits_of(shape, dtype, device)
    for dim in {0, x.dim() - 1}:
        for temperature in (None, 0.7):
            leaves, others = ([t.detach().to(as_).requires_grad_() for t in (x, y)] for as_ in (dtype, F64))
            got = onepass.kl_div(*leaves, dim, temperature=temperature, engine=engine)
            want = expected_kl(*(t / (temperature or 1) for t in others), dim)
            assert got.dtype is dtype
            assert_gradients(got, want, leaves, others, dtype, f"{shape} over {dim}, {temperature}")


@pytest.mark.parametrize("shape", SHAPES)
def test_probabilities_of_classes(shape, dtype, engine, device):
    x, y = logits_of(shape, dtype, device)
    dim = 0 if x.dim() == 1 else 1
    y = y.softmax(dim)
    weight = maker(F32, device, 3)(x.shape[dim]).abs()
    for smoothing, own in ((0.0, None), (0.2, weight)):
        leaves, others = ([t.detach().to(as_).requires_grad_() for t in (x, y)] for as_ in (dtype, F64))
        given = {"reduction": "none", "label_smoothing": smoothing}
        got = onepass.cross_entropy(*leaves, own, **given, engine=engine)
        want = F.cross_entropy(*others, None if own is None else own.double(), **given)
        assert_gradients(got, want, leaves, others, dtype, f"{shape}, {smoothing}")


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_reductions(reduction, engine, device):
    make = maker(F32, device)
    x, y = make(4, 7, 3), make(4, 7, 3)
    each = expected_kl(x, y, 1)
    want = {"none": each, "sum": each.sum(), "mean": each.mean()}[reduction]
    assert_close(onepass.kl_div(x, y, 1, reduction=reduction, engine=engine), want, F32)
    assert_close(
        onepass.cross_entropy(x, y.softmax(1), reduction=reduction, engine=engine),
        F.cross_entropy(x.double(), y.softmax(1).double(), reduction=reduction),
        F32,
    )


@pytest.mark.parametrize("softcap", [None, 2.5])
def test_probabilities_with_what_torch_has_not(softcap, engine, device):
    make = maker(F64, device)
    x, y = make(5, 9).requires_grad_(), make(5, 9).softmax(1)
    given = {"z_loss": 0.1, "softcap": softcap, "return_lse": True, "engine": engine}
    loss, lse = onepass.cross_entropy(x, y, **given)
    s = x if softcap is None else softcap * (x / softcap).tanh()
    want = (F.cross_entropy(s, y, reduction="none") + 0.1 * s.logsumexp(1).square()).mean()
    torch.testing.assert_close(loss, want)
    torch.testing.assert_close(lse, s.logsumexp(1))
    (got,) = torch.autograd.grad(loss + lse.sin().sum(), x)
    torch.testing.assert_close(got, torch.autograd.grad(want + s.logsumexp(1).sin().sum(), x)[0])


def test_equal_logits_are_0_apart(dtype, engine, device):
    x = maker(dtype, device, scale=8)(9, 301)
    assert not onepass.kl_div(x, x.clone(), engine=engine).any()


def test_extreme_logits(engine, device):
    p = torch.tensor([[0, -INF, 1], [0, -INF, 1], [0, 1, 2], [1e4, -1e4, 0], [-INF] * 3], device=device)
    q = torch.tensor([[0, 0, 0], [2, -INF, 0], [0, -INF, 0], [-1e4, 1e4, 0], [0.0] * 3], device=device)
    got = onepass.kl_div(p, q, engine=engine)
    torch.testing.assert_close(got.double(), expected_kl(p, q), equal_nan=True, rtol=1e-5, atol=1e-6)
    assert got[2] == INF
    assert got[3] == 2e4
    assert got[4].isnan()
    a, b = p.clone().requires_grad_(), q.clone().requires_grad_()
    onepass.kl_div(a, b, engine=engine)[[0, 1, 3]].sum().backward()
    assert a.grad is not None
    assert b.grad is not None
    assert a.grad[[0, 1, 3]].isfinite().all()
    assert b.grad[[0, 1, 3]].isfinite().all()
    x, shares = p[:2], torch.tensor([[0.5, 0, 0.5], [0.0, 0.5, 0.5]], device=device)
    got, want = (f(x, shares, reduction="none") for f in (onepass.cross_entropy, F.cross_entropy))
    torch.testing.assert_close(got, want, equal_nan=True)


@pytest.mark.parametrize("mask", [None, -1e9])
@pytest.mark.parametrize("n", [40, 9001])
def test_classes_that_are_masked_out(mask, n, engine, device):
    """In one tensor alone, by a large finite number or the least: they take no digits from the others."""
    make = maker(F32, device)
    x, y = make(3, n), make(3, n)
    x[0, : n - 3], x[1, ::2], x[2, 2 * n // 3 :] = (torch.finfo(F32).min if mask is None else mask,) * 3
    shares = y.softmax(1).masked_fill(x < -1e8, 0)
    for a, b in ((x, y), (y, x))[: 2 if mask else 1]:  # the other one is beyond the largest number
        assert_close(onepass.kl_div(a, b, engine=engine), expected_kl(a, b), F32)
        assert_close(onepass.kl_div(a.t().contiguous(), b.t(), 0, engine=engine), expected_kl(a, b), F32)
    got = onepass.cross_entropy(x, shares, reduction="none", engine=engine)
    assert_close(got, F.cross_entropy(x.double(), shares.double(), reduction="none"), F32)


def test_two_dtypes(device):
    make = maker(BF16, device)
    p, q = make(3, 50), make(3, 50)
    got = onepass.kl_div(p, q.float())
    assert got.dtype is F32
    torch.testing.assert_close(got, onepass.kl_div(p, q, dtype=F32))
    assert onepass.kl_div(p, q).dtype is BF16
    assert onepass.cross_entropy(p, q.float().softmax(1)).dtype is BF16


def test_nothing(engine, device):
    for shape, rows in (((0, 5), 0), ((5, 0), 5)):
        x, y = (torch.zeros(shape, device=device, requires_grad=True) for _ in range(2))
        got = onepass.kl_div(x, y, engine=engine)
        torch.testing.assert_close(got, torch.zeros(rows, device=device))
        loss = onepass.cross_entropy(x, y, engine=engine)
        torch.testing.assert_close(loss, F.cross_entropy(x, y), equal_nan=True)
        (got.sum() + loss).backward()
    assert float(onepass.kl_div(torch.tensor(2.0), torch.tensor(1.0))) == 0


@pytest.mark.parametrize("is_kl", [True, False])
def test_derivatives_of_any_order(is_kl, engine, device):
    make = maker(F64, device)
    x, y = make(3, 5).requires_grad_(), make(3, 5).requires_grad_()
    weight = None if is_kl else make(5).abs()
    spec = DivergenceSpec(1, is_kl, 0.8, 0.0 if is_kl else 2.0, 0.0 if is_kl else 0.1, engine)

    def terms(x: Tensor, y: Tensor) -> Tensor:
        planes = divergence_terms(x, y if is_kl else y.softmax(1), weight, spec)
        return planes[2] if is_kl else planes[2] + (planes[0] + planes[1]).square()

    assert gradcheck(terms, (x, y))
    assert gradgradcheck(terms, (x, y))


def test_transforms(device):
    make = maker(F64, device)
    x, y = make(4, 6), make(4, 6)
    got = torch.func.vmap(torch.func.grad(onepass.kl_div))(x, y)
    want = torch.func.vmap(torch.func.grad(expected_kl))(x, y)
    torch.testing.assert_close(got, want)
    got = torch.func.jvp(onepass.kl_div, (x, y), (y, x))
    torch.testing.assert_close(got, torch.func.jvp(expected_kl, (x, y), (y, x)))


def test_a_compiled_call_is_one_operator_each_way(device):
    make, graphs = maker(F32, device), Graphs()
    x, y = make(6, 33).requires_grad_(), make(6, 33).requires_grad_()

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return onepass.kl_div(x, y, reduction="mean") + onepass.cross_entropy(x, y.softmax(1))

    got = torch.autograd.grad(torch.compile(loss, backend=graphs, fullgraph=True)(x, y), (x, y))
    for mine, want in zip(got, torch.autograd.grad(loss(x, y), (x, y)), strict=True):
        torch.testing.assert_close(mine, want)
    names = sorted(name for graph in graphs.operators() for name in graph)
    assert names == ["divergence_terms"] * 2 + ["divergence_terms_backward"] * 2


@pytest.mark.parametrize("threads", [1, 2])
def test_rows_do_not_depend_on_the_rows_beside_them(threads, engine, device):
    make = maker(F32, device)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with onepass.batch_invariant(device == "cuda"):
            for n in (3, 20, 300, 5000):
                x, y = make(40, n), make(40, n)
                whole = onepass.kl_div(x, y, engine=engine)
                for row in (0, 17, 39):
                    assert onepass.kl_div(x[row], y[row], engine=engine) == whole[row]
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("seed", thin(range(60), 6))
def test_random_calls(seed, engine, device):
    """Any dim, strides, offset, type and argument."""
    generator = torch.Generator().manual_seed(seed)

    def draw(most: int) -> int:
        return int(torch.randint(1, most + 1, (), generator=generator))

    dtype = DTYPES[seed % 4]
    shape = [draw(12) for _ in range(draw(3))]
    dim = draw(len(shape)) - 1
    shape[dim] = draw(300)

    def made() -> Tensor:
        whole = torch.randn([size + draw(3) for size in shape], dtype=F64, generator=generator) * 3
        order = torch.randperm(len(shape), generator=generator).tolist()
        whole = whole.permute(order).contiguous().permute([order.index(d) for d in range(len(shape))])
        return whole.to(dtype).to(device)[
            tuple(slice(n - size, None) for n, size in zip(whole.shape, shape, strict=True))
        ]

    x, y, is_kl = made(), made(), seed % 3 > 0
    weight = None if is_kl or seed % 2 else torch.rand(shape[dim], generator=generator).to(device)
    spec = DivergenceSpec(
        dim, is_kl, 1.3, 0.0 if is_kl else 4.0, 0.0 if is_kl else 0.3, onepass._engines.resolve(engine, x.device)
    )
    y = y if is_kl else y.abs()
    leaves, others = ([t.detach().to(as_).requires_grad_() for t in (x, y)] for as_ in (dtype, F64))
    got = divergence_terms(*leaves, weight, spec)[2]
    want = divergence_terms(*others, weight, spec._replace(engine="native") if device == "cpu" else spec)[2]
    assert_gradients(got, want, leaves, others, dtype, f"{shape} over {dim}, {x.stride()}, {y.stride()}")


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"q_logits": torch.zeros(3, 4)}, ValueError, "have one shape"),
        ({"p_logits": [1.0]}, TypeError, "must be a Tensor"),
        ({"q_logits": torch.zeros(3, 5, dtype=torch.int64)}, NotImplementedError, "takes float32"),
        ({"q_logits": torch.zeros(3, 5, device="meta")}, RuntimeError, "on one device"),
        ({"reduction": "batchmean"}, ValueError, "reduction must be"),
        ({"temperature": 0}, ValueError, "temperature must be positive"),
        ({"temperature": "1"}, TypeError, "temperature must be a number"),
        ({"dim": 2}, IndexError, "dim must be in"),
        ({"dtype": torch.int64}, NotImplementedError, "dtype must be one of"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_errors(change, error, words):
    given: dict[str, Any] = {"p_logits": torch.zeros(3, 5), "q_logits": torch.zeros(3, 5), **change}
    with pytest.raises(error, match=words):
        onepass.kl_div(**given)
