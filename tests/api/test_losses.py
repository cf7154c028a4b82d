"""Losses of classes and log-probabilities, against torch's in float64: values, gradients, errors and the ways of a
call."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.nn import functional as F

import onepass
from lib.losses import REDUCTIONS, SHAPES, assert_close, classes
from lib.modes import Graphs
from lib.support import DTYPES, maker, slow, thin

F32, F64, F16, BF16 = DTYPES
INF, NAN = torch.inf, torch.nan


def expected(x: Tensor, target: Tensor, weight: Tensor | None, reduction: str, **named: Any) -> Tensor:
    """torch's loss in float64, with the arguments that it has not."""
    s = x.double()
    if cap := named.pop("softcap", None):
        s = cap * (s / cap).tanh()
    weight = None if weight is None else weight.double()
    z_loss, ignored = named.pop("z_loss", 0.0), named.get("ignore_index", -100)
    if not z_loss:
        return F.cross_entropy(s, target, weight, reduction=reduction, **named)
    each = F.cross_entropy(s, target, weight, reduction="none", **named)
    counts = target != ignored
    each = each + z_loss * s.logsumexp(0 if s.dim() == 1 else 1).square() * counts
    own = torch.ones_like(each) if weight is None else weight[target.masked_fill(~counts, 0)]
    return each if reduction == "none" else each.sum() if reduction == "sum" else each.sum() / (own * counts).sum()


def assert_as_torch(
    x: Tensor, target: Tensor, engine: str, weight: Any = None, reduction: str = "mean", **named: Any
) -> None:
    """The loss and its gradient."""
    note = f"{tuple(x.shape)} {x.stride()} {x.dtype} {reduction} {sorted(named)} weight: {weight is not None}"
    a, b = x.detach().requires_grad_(), x.detach().double().requires_grad_()
    got = onepass.cross_entropy(a, target, weight, reduction=reduction, engine=engine, **named)
    want = expected(b, target, weight, reduction, **named)
    assert got.dtype is x.dtype
    assert got.shape == want.shape
    assert_close(got.detach(), want.detach(), x.dtype, note)
    g = torch.randn(want.shape, dtype=F64, generator=torch.Generator().manual_seed(2)).to(x.dtype).to(x.device)
    (da,), (db,) = torch.autograd.grad(got, a, g), torch.autograd.grad(want, b, g.double())
    assert_close(da, db, x.dtype, f"gradient of {note}")


@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients_of_classes(shape, dtype, engine, device):
    x = SHAPES[shape](maker(dtype, device))
    assert_as_torch(x, classes(x, 0 if x.dim() == 1 else 1), engine)


ARGUMENTS = [
    dict(zip(("weight", "ignored", "smoothing", "z_loss", "softcap"), values, strict=True))
    for values in itertools.product((False, True), (None, -100, 2), (0.0, 0.1), (0.0, 1e-2), (None, 3.0))
]


@pytest.mark.parametrize("given", thin(ARGUMENTS, 5), ids=str)
@pytest.mark.parametrize("shape", ["rows", slow("whole vectors"), "columns", slow("many short rows")])
def test_all_arguments(given, shape, engine, device):
    make = maker(F32, device)
    x = SHAPES[shape](make)
    weight = make(x.shape[1]).abs() + 0.1 if given["weight"] else None
    named = {name: given[name] for name in ("z_loss", "softcap") if given[name]}
    if given["ignored"] is not None:
        named["ignore_index"] = given["ignored"]
    if given["smoothing"]:
        named["label_smoothing"] = given["smoothing"]
    for reduction in REDUCTIONS:
        assert_as_torch(x, classes(x, ignored=given["ignored"]), engine, weight, reduction, **named)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_probabilities_of_classes(reduction, smoothing, engine, device):
    make = maker(F32, device)
    for shape in ((5, 13), (2, 7, 3, 4), (6,)):
        x, weight = make(*shape), make(shape[min(1, len(shape) - 1)]).abs()
        dim = 0 if x.dim() == 1 else 1
        target = make(*shape).softmax(dim)
        for w in (None, weight):
            leaves = [(x.clone().requires_grad_(), target.clone().requires_grad_()) for _ in range(2)]
            got = onepass.cross_entropy(*leaves[0], w, reduction=reduction, label_smoothing=smoothing, engine=engine)
            want = F.cross_entropy(*leaves[1], w, reduction=reduction, label_smoothing=smoothing)
            torch.testing.assert_close(got, want)
            g = torch.ones_like(got)
            for ours, theirs in zip(
                torch.autograd.grad(got, leaves[0], g), torch.autograd.grad(want, leaves[1], g), strict=True
            ):
                torch.testing.assert_close(ours, theirs)


def test_huge_logits(dtype, engine, device):
    """A row's maximum costs no precision."""
    make = maker(F64, device)
    for offset in (1e4, -1e4):
        x = (make(6, 40) + (0 if dtype is F16 else offset)).to(dtype)
        x[0, 3], x[1] = (6e4 if dtype is F16 else 1e30), 0
        for named in ({}, {"label_smoothing": 0.1}):
            assert_as_torch(x[1:] if named else x, classes(x)[1:] if named else classes(x), engine, **named)


def test_infinite_logits(engine, device):
    x = maker(F32, device)(7, 5)
    x[0, 2] = x[1, 0] = x[2, 4] = -INF
    x[3], x[4, 1], x[5, 2] = -INF, INF, NAN
    target = torch.tensor([2, 1, 0, 3, 1, 0, 4], device=device)
    got = onepass.cross_entropy(x, target, reduction="none", engine=engine)
    want = F.cross_entropy(x.double(), target, reduction="none")
    torch.testing.assert_close(got.double(), want, equal_nan=True, rtol=1e-5, atol=1e-6)
    a = x[:3].clone().requires_grad_()
    onepass.cross_entropy(a, target[:3], reduction="none", engine=engine)[1:].sum().backward()
    assert a.grad is not None
    assert a.grad.isfinite().all()


@pytest.mark.parametrize("low", [-INF, -1e9, torch.finfo(F32).min])
def test_a_class_without_weight_that_is_masked_out(low, engine, device):
    """The loss of other classes is what it is without that one, but for the share of smoothing."""
    make = maker(F32, device)
    for shape in ((4, 1000), (70, 13), (5, 64), (3, 50, 8)):
        x = make(*shape)
        x[:, 0] = low
        weight = make(shape[1]).abs()
        weight[0] = 0
        target = classes(x[:, 1:]) + 1
        got = onepass.cross_entropy(x, target, weight, label_smoothing=0.1, engine=engine)
        want = F.cross_entropy(x.double(), target, weight.double(), label_smoothing=0.1)
        assert_close(got, want, F32)


def test_rows_that_do_not_count(engine, device):
    x = maker(F32, device)(4, 6).requires_grad_()
    target = torch.full((4,), -100, device=device)
    loss = onepass.cross_entropy(x, target, engine=engine)
    assert loss.isnan()
    zero = onepass.cross_entropy(x, target, empty="zero", engine=engine)
    assert zero == 0
    (dx,) = torch.autograd.grad(zero, x)
    assert not dx.any()
    with torch.no_grad():
        x[0] = -INF  # nothing of such a row is looked at
    some = target.clone()
    some[1] = 3
    (dx,) = torch.autograd.grad(onepass.cross_entropy(x, some, engine=engine), x)
    assert not dx[[0, 2, 3]].any()
    assert dx[1].isfinite().all()


def test_no_rows(engine, device):
    for shape in ((0, 5), (2, 5, 0)):
        x = torch.zeros(shape, device=device, requires_grad=True)
        target = torch.zeros([size for d, size in enumerate(shape) if d != 1], device=device, dtype=torch.int64)
        for reduction in REDUCTIONS:
            got = onepass.cross_entropy(x, target, reduction=reduction, engine=engine)
            torch.testing.assert_close(got, F.cross_entropy(x, target, reduction=reduction), equal_nan=True)
        got.sum().backward()


def test_logsumexp_too(engine, device):
    """It has a gradient of its own."""
    x = maker(F64, device)(5, 11).requires_grad_()
    target = classes(x, ignored=-100)
    loss, lse = onepass.cross_entropy(x, target, return_lse=True, engine=engine)
    torch.testing.assert_close(lse, x.logsumexp(1))
    (got,) = torch.autograd.grad(loss + (lse * lse)[target != -100].sum(), x)
    want = F.cross_entropy(x, target) + x.logsumexp(1).square()[target != -100].sum()
    torch.testing.assert_close(got, torch.autograd.grad(want, x)[0])


def test_backward_in_place(dtype, engine, device):
    x = maker(dtype, device)(12, 33)
    target = classes(x, ignored=-100)
    a, b = (x.clone().requires_grad_() for _ in range(2))
    logits = a * 1
    address = logits.data_ptr()
    loss = onepass.cross_entropy(logits, target, inplace_backward=True, label_smoothing=0.1, engine=engine)
    seen: list[int] = []
    logits.register_hook(lambda g: seen.append(g.data_ptr()))
    loss.backward()
    assert seen == [address]
    onepass.cross_entropy(b, target, label_smoothing=0.1, engine=engine).backward()
    torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=0)
    with pytest.raises(ValueError, match="would overwrite a leaf"):
        onepass.cross_entropy(a, target, inplace_backward=True)
    other = b * 1
    squares = other.square().sum()  # its gradient comes last, and needs the logits
    loss = squares + onepass.cross_entropy(other, target, inplace_backward=True, engine=engine)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("picks", [None, 1, 4])
def test_log_probabilities_and_entropy(shape, picks, engine, device):
    x = SHAPES[shape](maker(F32, device))
    for dim in {0, x.dim() - 1}:
        index = torch.stack([classes(x, dim, seed) for seed in range(picks or 1)], dim)
        given = index if picks else index.squeeze(dim)
        shapes = [1 if d == dim else size for d, size in enumerate(x.shape)]
        per_row = maker(F32, device, 5)(*shapes).abs() + 0.5
        for temperature in (None, 0.7, per_row):
            a, b = x.detach().requires_grad_(), x.detach().double().requires_grad_()
            got, entropy = onepass.log_prob(a, given, dim, temperature=temperature, return_entropy=True, engine=engine)
            log_p = (b if temperature is None else b / temperature).log_softmax(dim)
            want = log_p.gather(dim, index)
            want = want if picks else want.squeeze(dim)
            of_all = -(log_p.exp() * log_p).sum(dim)
            assert_close(got.detach(), want.detach(), F32)
            assert_close(entropy.detach(), of_all.detach(), F32)
            torch.testing.assert_close(onepass.entropy(x, dim, temperature=temperature, engine=engine), entropy)
            g, h = torch.randn_like(got), torch.randn_like(entropy)
            (da,) = torch.autograd.grad((got, entropy), a, (g, h))
            (db,) = torch.autograd.grad((want, of_all), b, (g.double(), h.double()))
            torch.testing.assert_close(
                da.double(),
                db,
                rtol=2e-5,
                atol=5e-6 * (picks or 1),
                msg=f"{shape} over {dim}, {picks} picks, temperature {temperature is not None}",
            )


@pytest.mark.parametrize("n", [40, 600, 9001])
def test_entropy_of_classes_that_are_masked_out(n, dtype, engine, device):
    """By the least finite number, as models do."""
    x = maker(dtype, device)(3, n)
    x[0, : n - 3], x[1, ::2], x[2, 2 * n // 3 :] = (torch.finfo(dtype).min,) * 3
    log_p = x.double().log_softmax(1)
    assert_close(onepass.entropy(x, engine=engine), -(log_p.exp() * log_p).sum(1), dtype)
    columns = x.t().contiguous()
    assert_close(onepass.entropy(columns, 0, engine=engine), -(log_p.exp() * log_p).sum(1), dtype)


def test_entropy_of_impossible_classes(engine, device):
    x = torch.tensor([[0.0, -INF, 0.0], [-INF, 5.0, -INF]], device=device, requires_grad=True)
    got = onepass.entropy(x, engine=engine)
    torch.testing.assert_close(got, torch.tensor([2.0, 1.0], device=device).log())
    got.sum().backward()
    assert x.grad is not None
    assert not x.grad.any()


def test_tensors_without_dims(device):
    x = torch.tensor(3.0, device=device, requires_grad=True)
    got = onepass.log_prob(x, torch.tensor(0, device=device), return_entropy=True)
    assert [t.shape for t in got] == [(), ()]
    assert [float(t.detach()) for t in got] == [0, 0]
    assert float(onepass.entropy(x).detach()) == 0
    assert onepass.cross_entropy(x[None], torch.tensor(0, device=device)) == 0


def test_batched_gradients(engine, device):
    x = maker(F64, device)(5, 6).requires_grad_()
    y, each = torch.arange(5, device=device), torch.eye(5, dtype=F64, device=device)
    for ours, theirs in (
        (onepass.cross_entropy(x, y, reduction="none", engine=engine), F.cross_entropy(x, y, reduction="none")),
        (onepass.log_prob(x, y, engine=engine), -F.cross_entropy(x, y, reduction="none")),
        (
            onepass.kl_div(x, x.detach().flip(0), engine=engine),
            (x.softmax(1) * (x.log_softmax(1) - x.detach().flip(0).log_softmax(1))).sum(1),
        ),
    ):
        got, want = (torch.autograd.grad(t, x, each, is_grads_batched=True, retain_graph=True) for t in (ours, theirs))
        torch.testing.assert_close(got, want)


def test_dtype_of_results(device):
    x = maker(BF16, device)(3, 50)
    index = classes(x)
    wide, entropy = onepass.log_prob(x, index, dtype=F32, return_entropy=True)
    assert wide.dtype is entropy.dtype is F32
    torch.testing.assert_close(wide, x.float().log_softmax(1).gather(1, index[:, None])[:, 0])
    assert onepass.log_prob(x, index).dtype is BF16


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"target": torch.tensor([0, 5, 1])}, IndexError, "class 5 is out of range for 5 classes"),
        ({"target": torch.tensor([0, -1, 1])}, IndexError, "class -1 is out of range"),
        ({"target": torch.zeros(4, dtype=torch.int64)}, ValueError, r"target has the shape \[3\]"),
        ({"target": torch.zeros(3, 5, dtype=torch.int64)}, ValueError, "probabilities of classes are of a floating"),
        ({"target": torch.zeros(3)}, ValueError, "probabilities of the input's shape"),
        ({"target": torch.zeros(3, dtype=torch.bool)}, RuntimeError, "target takes integers or floats"),
        ({"target": [0, 1, 2]}, TypeError, "target must be a Tensor"),
        ({"input": torch.zeros(3, 5, dtype=torch.int64)}, NotImplementedError, "takes float32"),
        ({"input": torch.zeros(())}, ValueError, "a tensor without dims"),
        ({"reduction": "median"}, ValueError, "reduction must be"),
        ({"weight": torch.ones(4)}, RuntimeError, r"weight has the shape \[5\]"),
        ({"weight": torch.ones(5, dtype=torch.int64)}, RuntimeError, "weight takes float32"),
        ({"weight": torch.ones(5, requires_grad=True)}, NotImplementedError, "weight gets no gradient"),
        ({"label_smoothing": 1.5}, RuntimeError, "between 0.0 and 1.0"),
        ({"softcap": -1.0}, ValueError, "positive finite"),
        ({"softcap": "5"}, TypeError, "softcap must be a number"),
        ({"empty": "one"}, ValueError, "'nan' or 'zero'"),
        ({"target": torch.rand(3, 5), "ignore_index": 2}, RuntimeError, "ignore_index goes with classes"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_errors_of_cross_entropy(change, error, words):
    given: dict[str, Any] = {"input": torch.zeros(3, 5), "target": torch.tensor([0, 1, 2]), **change}
    with pytest.raises(error, match=words):
        onepass.cross_entropy(**given)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"index": torch.tensor([0, 5, 1])}, IndexError, "class 5 is out of range"),
        ({"index": torch.zeros(2, dtype=torch.int64)}, ValueError, "index has the input's shape"),
        ({"index": torch.zeros(2, 2, dtype=torch.int64)}, ValueError, "index has the input's shape"),
        ({"index": torch.zeros(3)}, TypeError, "index takes integers"),
        ({"index": 3}, TypeError, "index must be a Tensor"),
        ({"dim": 2}, IndexError, "dim must be in"),
        ({"temperature": 0}, ValueError, "temperature must be positive"),
        ({"temperature": "1"}, TypeError, "temperature must be a number"),
        ({"temperature": torch.ones(4, 1)}, ValueError, r"temperature broadcasts to \[3, 1\]"),
        ({"temperature": torch.ones(3, 1, requires_grad=True)}, NotImplementedError, "temperature gets no gradient"),
        ({"dtype": torch.int64}, NotImplementedError, "dtype must be one of"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_errors_of_log_prob(change, error, words):
    given: dict[str, Any] = {"input": torch.zeros(3, 5), "index": torch.tensor([0, 1, 2]), **change}
    with pytest.raises(error, match=words):
        onepass.log_prob(**given)


@pytest.mark.gpu
def test_classes_are_looked_for_on_a_gpu():
    with pytest.raises(IndexError, match="class 5 is out of range for 5 classes"):
        onepass.cross_entropy(torch.zeros(3, 5, device="cuda"), torch.tensor([0, 5, 1], device="cuda"), check=True)


def test_spellings_and_integers():
    x, target = torch.randn(4, 6), torch.tensor([0, 5, 2, 1])
    want = onepass.cross_entropy(x, target)
    for dtype in (torch.int32, torch.int16, torch.uint8):
        torch.testing.assert_close(onepass.cross_entropy(x, target.to(dtype)), want)
    with pytest.warns(UserWarning, match="size_average and reduce args will be deprecated"):
        assert onepass.cross_entropy(x, target, size_average=False).allclose(want * 4)


def test_derivatives_of_any_order():
    x, target = torch.randn(3, 5, dtype=F64, requires_grad=True), torch.tensor([0, -100, 4])
    weight = torch.rand(5, dtype=F64)
    for named in ({}, {"label_smoothing": 0.2, "z_loss": 0.1, "softcap": 2.0}):
        for reduction in REDUCTIONS:

            def loss(t: Tensor, reduction: str = reduction, named: Any = named) -> Tensor:
                return onepass.cross_entropy(t, target, weight, reduction=reduction, **named)

            assert gradcheck(loss, x)
            assert gradgradcheck(loss, x)
    index = torch.tensor([[0, 0], [1, 2], [4, 3]])
    scale = torch.rand(3, 1, dtype=F64) + 0.5

    def terms(t: Tensor) -> Any:
        return onepass.log_prob(t, index, temperature=scale, return_entropy=True)

    assert gradcheck(terms, x)
    assert gradgradcheck(terms, x)


def test_function_transforms():
    x, target = torch.randn(4, 3, 5, dtype=F64), torch.randint(0, 5, (4, 3))
    got = torch.func.vmap(onepass.cross_entropy)(x, target)
    want = torch.stack([F.cross_entropy(a, b) for a, b in zip(x, target, strict=True)])
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(
        torch.func.vmap(torch.func.grad(onepass.cross_entropy))(x, target),
        torch.func.vmap(torch.func.grad(F.cross_entropy))(x, target),
    )
    t = torch.randn_like(x[0])
    for ours, theirs in zip(
        torch.func.jvp(lambda a: onepass.cross_entropy(a, target[0], label_smoothing=0.1), (x[0],), (t,)),
        torch.func.jvp(lambda a: F.cross_entropy(a, target[0], label_smoothing=0.1), (x[0],), (t,)),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)
    entropies = torch.func.vmap(onepass.entropy)(x)
    torch.testing.assert_close(entropies, onepass.entropy(x))


def test_compiled(fresh_compiler, device):
    """A graph holds one operator for the loss and one for its gradient."""
    graphs = Graphs()

    def step(x: Tensor, target: Tensor) -> Tensor:
        return onepass.cross_entropy(x * 2, target, label_smoothing=0.1)

    x = maker(F32, device)(6, 10).requires_grad_()
    target = classes(x)
    loss = torch.compile(step, backend=graphs, fullgraph=True)(x, target)
    (got,) = torch.autograd.grad(loss, x)
    want = step(x, target)
    torch.testing.assert_close(loss, want)
    torch.testing.assert_close(got, torch.autograd.grad(want, x)[0])
    forward, backward = graphs.operators()
    assert forward.count("cross_entropy") == 1
    assert backward.count("cross_entropy_backward") == 1
    compiled = torch.compile(lambda a: onepass.log_prob(a, target, return_entropy=True), backend=graphs, fullgraph=True)
    for ours, theirs in zip(compiled(x), onepass.log_prob(x, target, return_entropy=True), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_operators_are_described():
    from onepass.loss_arithmetic import LossSpec

    x, index = torch.randn(4, 6, requires_grad=True), torch.tensor([[0, 1], [2, 3], [4, 5], [1, 1]])
    for spec in (LossSpec(1), LossSpec(1, spread=True, entropy=True, softcap=3.0)):
        torch.library.opcheck(torch.ops.onepass.loss_terms.default, (x, index, None, None, *spec))
    spec = LossSpec(1, is_cross=True, spread=True, smoothing=0.1)
    for reduction in REDUCTIONS:
        torch.library.opcheck(
            torch.ops.onepass.cross_entropy.default, (x, index[:, 0].contiguous(), torch.rand(6), reduction, *spec)
        )


def test_threads_and_other_rows_change_no_bit(dtype):
    x = maker(dtype)(70, 2000)
    target = classes(x)
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2):
            torch.set_num_threads(count)
            a = x.clone().requires_grad_()
            loss = onepass.cross_entropy(a, target, reduction="none")
            loss.sum().backward()
            results.append((loss.detach(), a.grad))
    finally:
        torch.set_num_threads(threads)
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)
    alone = onepass.cross_entropy(x[5:6].clone(), target[5:6], reduction="none")
    assert alone[0] == results[0][0][5]


@pytest.mark.gpu
def test_batch_invariance_on_a_gpu():
    for shape in ((70, 2001), (70, 16, 9)):
        x = maker(BF16, "cuda")(*shape)
        target = classes(x)
        with onepass.batch_invariant():
            whole = onepass.cross_entropy(x, target, reduction="none")
            for first in (0, 5):
                part = onepass.cross_entropy(x[first : first + 3].clone(), target[first : first + 3], reduction="none")
                torch.testing.assert_close(part, whole[first : first + 3], rtol=0, atol=0)


@pytest.mark.gpu
def test_autocast_gives_float32():
    x = maker(BF16, "cuda")(5, 40).requires_grad_()
    target = classes(x)
    with torch.autocast("cuda"):
        loss = onepass.cross_entropy(x, target)
    assert loss.dtype is F32
    loss.backward()
    assert x.grad is not None
    assert x.grad.dtype is BF16
    want = F.cross_entropy(x.detach().float(), target)
    torch.testing.assert_close(loss.detach(), want)


@pytest.mark.gpu
@pytest.mark.slow
def test_many_elements(room):
    x = torch.randn(17000, 128257, device="cuda", dtype=BF16)  # more than 2^31
    target = torch.randint(0, 128257, (17000,), device="cuda")
    got = onepass.cross_entropy(x, target, reduction="none")
    rows = torch.tensor([0, 1, 16741, 16744, 16999], device="cuda")
    torch.testing.assert_close(got[rows], F.cross_entropy(x[rows].float(), target[rows], reduction="none").to(BF16))
