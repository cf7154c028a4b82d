"""Scores: derivatives, and transforms of them."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from lib import support
from lib.modes import Operators
from lib.scored import CASES, F32, F64, SHAPE, defined, half_true, options_of, positive, tensors_of, unbatched
from lib.support import DTYPES, accumulator, every_softmax, maker, ours, thin_tuples
from onepass import score_gradients, scored

DERIVED = {  # small ones, each with all of its tensors
    "scale": ((2, 3, 4), -1, lambda r: {"scale": positive(r(3, 1))}),
    "factor": ((2, 3), 0, lambda r: {"scale": -0.7}),
    "bias": ((2, 3, 4), 1, lambda r: {"bias": r(3, 1)}),
    "mask": ((2, 4), -1, lambda r: {"mask": half_true(r, 2, 4).index_fill(1, r(1).long() * 0 + 1, True)}),
    "causal": ((2, 3, 4), -1, lambda r: {"causal": True}),
    "alibi": ((2, 3, 4), -1, lambda r: {"alibi": positive(r(2)), "window": (1, 1)}),
    "softcap": ((3, 4), -1, lambda r: {"softcap": 1.2}),
    "sink": ((2, 3, 4), -1, lambda r: {"sink": r(3, 1)}),
    "two dims": ((2, 3, 2), (0, 2), lambda r: {"bias": r(2, 1, 2), "sink": r(3, 1)}),
    "0-d": ((), 0, lambda r: {"scale": positive(r()), "bias": r(), "sink": r()}),
    "empty": (
        (2, 3, 3),
        -1,
        lambda r: {"bias": r(3), "causal": True, "offset": -1, "sink": r(2, 1, 1), "empty": "zero"},
    ),
    "all": (
        (2, 2, 3),
        -1,
        lambda r: {
            "scale": positive(r(2, 1, 1)),
            "bias": r(2, 3),
            "mask": torch.tensor([True, True, False]),
            "window": (2, 1),
            "alibi": positive(r(2)),
            "softcap": 3.0,
            "sink": r(2, 1),
        },
    ),
}
# Each case with one function or two; with the others it is slow.
DERIVED_IN_TURN = thin_tuples(itertools.product(DERIVED, ("softmax", "log_softmax", "logsumexp", "softmin")), 3)


def derived(case: str, function: str, device: str, engine: str = "auto") -> tuple[Any, Any, list[Tensor]]:
    """The call and its definition as functions of x and the other tensors, and those."""
    shape, dim, make = DERIVED[case]
    r = maker(F64, device, seed=5, scale=1.0)
    x, options = r(*shape), make(r)
    options = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in options.items()}
    names = list(tensors_of(options))

    def call(x: Tensor, *given: Tensor) -> Tensor:
        return ours(function)(x, dim, engine=engine, **options | dict(zip(names, given, strict=True)))

    def definition(x: Tensor, *given: Tensor) -> Tensor:
        return defined(function, x, dim, options | dict(zip(names, given, strict=True)))

    return call, definition, [x, *(options[name] for name in names)]


def finite(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Without the infinities, which have no differences."""
    return lambda *given: (lambda y: y.masked_fill(y.isinf(), 0))(f(*given))


def gradient(f: Callable[..., Tensor], tensors: int) -> Callable[..., Any]:
    """Of a number, in all of the tensors."""
    return torch.func.grad(lambda *given: finite(f)(*given).square().sum(), tuple(range(tensors)))


@unbatched
@pytest.mark.parametrize(("case", "function"), DERIVED_IN_TURN)
def test_derivatives(function, case, engine, device):
    """Backward and forward, twice, and batches of each; of each tensor alone too."""
    call, _, given = derived(case, function, device, engine)
    call = finite(call)
    every = [t.clone().requires_grad_() for t in given]
    assert gradcheck(call, every, check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True)
    assert gradgradcheck(call, every, check_batched_grad=True, gen_non_contig_grad_outputs=True)
    assert gradgradcheck(call, every, check_fwd_over_rev=True, check_rev_over_rev=False, check_undefined_grad=False)
    for wanted in range(len(given)) if case == "all" else ():
        one = [t.clone().requires_grad_(i == wanted) for i, t in enumerate(given)]
        assert gradcheck(call, one, check_forward_ad=True, fast_mode=True)
        assert gradgradcheck(call, one, fast_mode=True)


@pytest.mark.parametrize(("case", "function"), DERIVED_IN_TURN)
def test_transforms(function, case, engine, device):
    """The transforms of torch.func, nested, give the definition's."""
    call, definition, given = (finite(f) if callable(f) else f for f in derived(case, function, device, engine))
    tangents = tuple(maker(F64, device, seed=9)(*t.shape) for t in given)
    every, count = tuple(range(len(given))), len(given)
    transforms: dict[str, Callable[[Any], Any]] = {
        "grad": lambda f: gradient(f, count)(*given),
        "jvp": lambda f: torch.func.jvp(f, tuple(given), tangents),
        "jacrev": lambda f: torch.func.jacrev(f, every)(*given),
        "jacfwd": lambda f: torch.func.jacfwd(f, every)(*given),
        "jvp of grad": lambda f: torch.func.jvp(gradient(f, count), tuple(given), tangents),
        "hessian": lambda f: torch.func.hessian(lambda *ts: f(*ts).square().sum(), every)(*given),
        "jvp of jvp": lambda f: torch.func.jvp(lambda *ts: torch.func.jvp(f, ts, tangents)[1], tuple(given), tangents),
    }
    for name, transform in transforms.items():
        got, want = transform(call), transform(definition)
        torch.testing.assert_close(got, want, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(("case", "function"), [each for each in DERIVED_IN_TURN if "two dims" not in str(each)])
def test_batches_of_any_of_the_tensors(function, case, engine, device):
    """At any dim: one operator, and what a loop gives."""
    call, definition, given = derived(case, function, device, engine)
    for batched in list(itertools.product((False, True), repeat=len(given)))[1:]:
        for at in (0, -1):
            make = maker(F64, device, seed=3)
            full = [positive(make(5, *t.shape)) if b else t for t, b in zip(given, batched, strict=True)]
            each = [[t[i] if b else t for t, b in zip(full, batched, strict=True)] for i in range(5)]
            moved = [t.movedim(0, at) if b else t for t, b in zip(full, batched, strict=True)]
            in_dims = tuple(at if b else None for b in batched)
            with Operators() as mode:
                got = torch.func.vmap(call, in_dims)(*moved)
            assert len(mode.ours()) - mode.ours().count("scored_kernel") <= 2, mode.ours()
            torch.testing.assert_close(got, torch.stack([definition(*ts) for ts in each]))
        got = torch.func.vmap(gradient(call, len(given)), in_dims)(*moved)
        want = [torch.stack(ts) for ts in zip(*(gradient(definition, len(given))(*ts) for ts in each), strict=True)]
        torch.testing.assert_close(list(got), want)


def test_a_batch_of_masks(function, device):
    x, masks = maker(F64, device)(3, 4), half_true(maker(F64, device, 2), 5, 3, 4)

    def call(mask: Tensor) -> Tensor:
        return ours(function)(x, -1, mask=mask, empty="zero")

    want = torch.stack([defined(function, x, -1, {"mask": mask, "empty": "zero"}) for mask in masks])
    torch.testing.assert_close(torch.func.vmap(call)(masks), want)
    torch.testing.assert_close(torch.func.vmap(torch.func.vmap(call))(masks[None]), want[None])


@support.thin_product(3, case=CASES, function=support.FUNCTIONS, dtype=DTYPES)
def test_gradients_of_each_dtype(function, case, dtype, engine, device):
    """Of the tensors' own dtypes; half types compute in float32. Scores around 100 lose nothing by a rounded result."""
    options = options_of(case, dtype, device)
    x = maker(dtype, device)(*SHAPE)
    if function == "logsumexp" and "softcap" not in options:
        x = x + 100  # scores are large then, but for the case without a scale
    x.requires_grad_()
    side = {name: t.requires_grad_() for name, t in tensors_of(options).items()}
    y = ours(function)(x, -1, engine=engine, **options)
    g = maker(dtype, device, 5)(*y.shape)
    y = y.masked_fill(y.isinf(), 0)
    got = torch.autograd.grad(y, [x, *side.values()], g)
    wide = {name: t.detach().double().requires_grad_() for name, t in {"x": x, **side}.items()}
    want_y = defined(function, wide["x"], -1, options | {name: wide[name] for name in side})
    want_y = want_y.masked_fill(want_y.isinf(), 0)
    want = torch.autograd.grad(want_y, list(wide.values()), g.double())
    eps = torch.finfo(dtype).eps + 100 * torch.finfo(accumulator(dtype)).eps
    for name, t, one, other in zip(wide, (x, *side.values()), got, want, strict=True):
        assert one.dtype is t.dtype
        assert one.shape == t.shape
        good = other.isfinite()
        terms = (x.numel() / t.numel()) ** 0.5 * (float(x.detach().abs().amax()) if name == "scale" else 1)
        limit = 4 * eps * float(g.abs().amax()) * terms
        torch.testing.assert_close(
            one.double()[good], other[good], rtol=4 * eps, atol=limit, msg=lambda m, n=name: f"{n}: {m}"
        )


@unbatched
@pytest.mark.parametrize("case", ["softcap", "all"])
def test_a_logsumexp_that_is_kept_for_a_softcap(monkeypatch, case):
    """Where the slope is computed from the result, as on a GPU in half types, all derivatives and transforms are as
    elsewhere. (The CPU's kernel reads x all the same.)"""
    kept = []

    def caps(x: Tensor, side: Any, spec: Any, scores: Any) -> bool:
        kept.append(scores.softcap > 0 and spec.function == "softmax")
        return kept[-1]

    for module in (scored, score_gradients):
        monkeypatch.setattr(module, "caps_from_result", caps)
    for check in (test_derivatives, test_transforms, test_batches_of_any_of_the_tensors):
        check("softmax", case, "auto", "cpu")
    assert any(kept)


@every_softmax
def test_a_backward_keeps_the_result_and_not_the_input(function, device):
    """As torch's softmax has it; nor a bias; a mask is kept as it is given, not expanded."""
    x, bias = maker(F32, device)(4, 64).requires_grad_(), maker(F32, device)(4, 64).requires_grad_()
    mask = half_true(maker(F32, device), 64)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = ours(function)(x, -1, scale=0.5, bias=bias, mask=mask, causal=True)
    assert sorted(t.numel() for t in kept) == [64, 4 * 64]
    assert all(t.data_ptr() in (y.data_ptr(), mask.data_ptr()) for t in kept)
    y = ours(function)(x, -1, scale=0.5, mask=mask, causal=True)
    with torch.no_grad():
        y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
