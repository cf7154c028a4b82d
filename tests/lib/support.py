"""Shared by all tests: tables of functions, dtypes, layouts and engines, and the tolerances."""

import gc
import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import onepass
from onepass import reference

SOFTMAXES = ("softmax", "log_softmax", "softmin")
FUNCTIONS = (*SOFTMAXES, "logsumexp")
OPERATORS = (*FUNCTIONS, "state")
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
TORCH: dict[str, Callable[..., Any]] = {  # torch's function of the same name, as users call it
    "softmax": torch.softmax,
    "log_softmax": torch.log_softmax,
    "softmin": torch.nn.functional.softmin,
    "logsumexp": torch.logsumexp,
}

Make = Callable[..., Tensor]  # make(*shape) -> random values of the tested dtype and device


def ours(function: str) -> Callable[..., Tensor]:
    return getattr(onepass, function)


def definition(function: str, x: Tensor, dim: Any) -> Tensor:
    return getattr(reference, function)(x, dim)


def engines_at_hand() -> list[Any]:
    """(engine, device) of every engine that runs here, as pytest params; those on a GPU carry the mark `gpu`."""
    pairs = [pytest.param("cpu", "cpu", id="cpu")]
    if os.environ.get("TRITON_INTERPRET") == "1" and onepass.engines()["triton"] is None:
        pairs.append(pytest.param("triton", "cpu", id="triton-interpreter"))
    if torch.cuda.is_available():
        engines = ["cuda", "triton"] if torch.version.cuda else ["triton"]
        pairs += [pytest.param(engine, "cuda", id=engine, marks=pytest.mark.gpu) for engine in engines]
    return pairs


def both(function: str, engine: str = "auto", **named: Any) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """The function and its definition, as functions of a tensor. They return a state as two planes."""
    definition = getattr(reference, function)
    if function == "state":
        return lambda x: torch.stack(ours(function)(x, engine=engine, **named)), lambda x: torch.stack(
            definition(x, **named)
        )
    return lambda x: ours(function)(x, engine=engine, **named), lambda x: definition(x, **named)


def keepdims(function: str) -> list[dict[str, bool]]:
    """The keyword arguments with which a reduction is called."""
    return [{"keepdim": False}, {"keepdim": True}] if function in ("logsumexp", "state") else [{}]


every_softmax = pytest.mark.parametrize("function", SOFTMAXES)
every_operator = pytest.mark.parametrize("function", OPERATORS)
every_half = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)


def slow(*values: Any) -> Any:
    """Marks a case of a sweep as slow, so that `make test` skips it."""
    return pytest.param(*values, marks=pytest.mark.slow)


def thin(cases: Iterable[Any], nth: int) -> list[Any]:
    """Cases of a sweep. All but every nth are marked slow."""
    return thin_tuples(((case,) for case in cases), nth)


def thin_tuples(cases: Iterable[tuple[Any, ...]], nth: int) -> list[Any]:
    """Cases of several values. All but every nth are marked slow."""
    return [slow(*case) if k % nth else pytest.param(*case) for k, case in enumerate(cases)]


def thin_product(nth: int, **values: Iterable[Any]) -> Any:
    """All combinations of the arguments' values. All but every nth are marked slow."""
    combinations = thin_tuples(itertools.product(*values.values()), nth)
    return pytest.mark.parametrize(tuple(values), combinations, ids=lambda value: str(value).removeprefix("torch."))


def drawn_positions(
    pick: Random, happens: Callable[[], bool], slopes: Callable[[], Tensor], offset: int
) -> dict[str, Any]:
    """Random arguments of scores that depend on positions. An offset is at most `offset`."""
    options: dict[str, Any] = {}
    if happens():
        options["causal"] = True
    if happens():
        options["window"] = (pick.choice((None, 0, 2)), pick.choice((None, 0, 3)))
    if happens():
        options["alibi"] = slopes()
    if options and happens():
        options["offset"] = pick.randint(-3, offset)
    return options


def maker(dtype: torch.dtype, device: str = "cpu", seed: int = 0, scale: float = 2.0) -> Make:
    """Makes random normal values, the same for every device."""
    generator = torch.Generator().manual_seed(seed)

    def make(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype).to(device)

    return make


LAYOUTS: dict[str, Callable[[Make], Tensor]] = {
    "0-d": lambda r: r(),
    "0-d of a view": lambda r: r(5)[3],
    "one element": lambda r: r(1),
    "vector": lambda r: r(37),
    "strided vector": lambda r: r(90)[5::3],
    "contiguous": lambda r: r(5, 13),
    "odd rows": lambda r: r(3, 781),
    "long rows": lambda r: r(2, 5003),
    "short rows": lambda r: r(300, 3),
    "rows of one": lambda r: r(6, 1),
    "offset": lambda r: r(67)[3:63].view(4, 15),
    "sliced": lambda r: r(7, 40)[1:6, 3:36],
    "stepped": lambda r: r(8, 30)[::2, 1::3],
    "gaps": lambda r: r(3, 4, 24)[:, 1:3, ::2],
    "transposed": lambda r: r(17, 5).t(),
    "middle": lambda r: r(2, 33, 18),
    "permuted": lambda r: r(4, 2, 13).permute(2, 0, 1),
    "permuted and sliced": lambda r: r(6, 5, 9).permute(1, 2, 0)[1:, ::2, 1:5],
    "channels_last": lambda r: r(2, 5, 4, 3).contiguous(memory_format=torch.channels_last),
    "channels_last_3d": lambda r: r(2, 3, 2, 4, 3).contiguous(memory_format=torch.channels_last_3d),
    "rank 5": lambda r: r(2, 3, 2, 2, 3),
    "expanded rows": lambda r: r(1, 19).expand(4, 19),
    "expanded columns": lambda r: r(5, 1).expand(5, 11),
    "expanded middle": lambda r: r(3, 1, 7).expand(3, 4, 7),
    "as_strided, overlapping": lambda r: r(60).as_strided((5, 12), (3, 2), 7),
    "as_strided, interleaved": lambda r: r(60).as_strided((4, 3, 5), (1, 20, 4), 0),
    "size 1 dims": lambda r: r(1, 6, 1, 9),
    "size 1 dims, odd strides": lambda r: r(40).as_strided((1, 5, 1, 3), (7, 3, 100, 1), 2),
    "empty batch": lambda r: r(0, 5),
    "empty dim": lambda r: r(4, 0),
    "empty middle": lambda r: r(2, 0, 3),
    "empty and permuted": lambda r: r(2, 0, 3).permute(2, 0, 1),
    "all empty": lambda r: r(0, 0),
}


def ints(x: Tensor) -> list[int]:
    """Every dim of x, counted from either end."""
    rank = max(x.dim(), 1)
    return list(range(-rank, rank))


def tuples(x: Tensor) -> Iterator[tuple[int, ...]]:
    """Every set of dims once. The spelling (order, negative or not) varies."""
    rank = max(x.dim(), 1)
    for count in range(1, rank + 1):
        for k, dims in enumerate(itertools.combinations(range(rank), count)):
            spelled = tuple(d - rank if (k + d) % 2 else d for d in dims)
            yield spelled[::-1] if k % 2 else spelled


def some_tuples(x: Tensor) -> Iterator[tuple[int, ...]]:
    """Each dim alone, the first with the last, and all dims: enough if the kernel, which another test runs with every
    set, is interpreted."""
    rank = max(x.dim(), 1)
    yield from (dims for dims in tuples(x) if len(dims) in (1, rank) or {d % rank for d in dims} == {0, rank - 1})


def accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def bound(function: str, x: Tensor, want: Tensor, dim: Any, dtype: torch.dtype) -> Tensor:
    """The allowed error of each element of a result of dtype `dtype`. `want` is the definition on x.

    It is one rounding to `dtype`, and a few of the accumulator, as many as a sum in a vector of 4 lanes has at worst.
    The difference x - max is rounded too, so an exponential's relative error grows with it. Errors of logarithms are
    relative to max(1, |result|). Below the smallest normal number a GPU may flush to zero. test_accuracy.py compares
    the errors with torch's.
    """
    out, acc = torch.finfo(dtype), torch.finfo(accumulator(dtype))
    length = x.numel() // max(want.numel(), 1) if function == "logsumexp" else x.numel() // max(x.sum(dim).numel(), 1)
    roundings = 6 + length / 8
    if function in ("log_softmax", "logsumexp"):
        return (out.eps + roundings * acc.eps) * want.abs().clamp(min=1)
    v = x.to(torch.float64) * (-1 if function == "softmin" else 1)
    if v.numel():
        v = (v.amax(dim, keepdim=True) - v).nan_to_num(0, 0, 0)
    return (out.eps + (roundings + v) * acc.eps) * want.abs() + max(acc.tiny, out.smallest_normal * out.eps)


def assert_defined(function: str, got: Any, x: Tensor, dim: Any, note: str = "") -> None:
    """Asserts that `got` is the function of x by the definition. x is already rounded to the call's dtype."""
    if function == "state":
        assert_state(got, x, dim, got.m.dim() == x.dim(), note)
        return
    want = definition(function, x, dim) if function != "logsumexp" else reference.logsumexp(x, dim, True)
    limit = bound(function, x, want, dim, got.dtype)
    want, limit = want.reshape(got.shape), limit.reshape(got.shape)
    y = got.to(torch.float64)
    top = torch.finfo(got.dtype).max
    want = torch.where(want.abs() > top * (1 + torch.finfo(got.dtype).eps / 4), want.sign() * torch.inf, want)
    near = want.isfinite() & ((y - want).abs() <= limit)  # the limit of an infinite `want` is infinite
    good = (y == want) | (y.isnan() & want.isnan()) | near
    if not bool(good.all()):
        at = tuple((~good).nonzero()[0].tolist())
        raise AssertionError(
            f"{function} over dim {dim} of {tuple(x.shape)} strides {x.stride()} {x.dtype} -> {got.dtype}{note}: "
            f"{int((~good).sum())} of {good.numel()} wrong, first at {at}: got {y[at].item()!r}, "
            f"want {want[at].item()!r} within {limit[at].item():.3g}"
        )


def same(a: Tensor, b: Tensor) -> bool:
    """Whether all elements are equal, with NaN equal to NaN."""
    return a.shape == b.shape and a.dtype == b.dtype and bool(((a == b) | (a.isnan() & b.isnan())).all())


def assert_state(got: onepass.State, x: Tensor, dim: Any, keepdim: bool = False, note: str = "") -> None:
    """Asserts that `got` is the state of x: maxima exactly, sums within a few roundings, for rows of any length."""
    call = f"state over dim {dim} of {tuple(x.shape)} strides {x.stride()} {x.dtype}{note}"
    m, total = reference.state(x, dim, keepdim)
    dtype = accumulator(x.dtype)
    assert got.m.dtype == got.l.dtype == dtype, call
    assert got.m.device == got.l.device == x.device, call
    assert same(got.m.double(), m), f"{call}: got m = {got.m}, want {m}"
    assert got.l.shape == total.shape, call
    l = got.l.double()
    near = total.isfinite() & ((l - total).abs() <= 16 * torch.finfo(dtype).eps * total)
    good = (l == total) | (l.isnan() & total.isnan()) | near
    assert bool(good.all()), f"{call}: {int((~good).sum())} sums of {good.numel()} wrong: {l[~good]}, {total[~good]}"


def peak(run: Callable[[], Any], device: str) -> int:
    """The peak of the bytes that `run` allocates."""
    run()  # loads what is loaded only once
    if device == "cuda":
        gc.collect()  # otherwise earlier garbage might be freed during the measurement
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as made:
        run()
    events = [e for e in made.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


# Refusals ------------------------------------------------------------------------------------------------------


def randn(*shape: int) -> Tensor:
    return torch.randn(shape or (3, 4), generator=torch.Generator().manual_seed(0))


def outcome(call: Any, *args: Any, **kwargs: Any) -> Any:
    """What a call returns, or the exception that it raises."""
    try:
        return call(*args, **kwargs)
    except Exception as error:
        return error


def raised(call: Any, *args: Any, **kwargs: Any) -> type[BaseException] | None:
    result = outcome(call, *args, **kwargs)
    return type(result) if isinstance(result, Exception) else None


def refused(function: str, expected: Any, got: str, *args: Any, **kwargs: Any) -> None:
    """Asserts that the call raises the expected type, with a message that matches `got`, and changes no argument."""
    tensors = [t for t in (*args, *kwargs.values()) if type(t) is Tensor and _readable(t)]
    before = [(t.detach().clone(), t.shape, t._version) for t in tensors]
    with pytest.raises(expected) as info:
        ours(function)(*args, **kwargs)
    assert isinstance(info.value.__context__, TypeError | None)  # a TypeError for a dim that is no index
    message = str(info.value)
    assert re.search(got, message), f"{got!r} is not in {message!r}"
    assert function in message or "engine" in message, message
    for t, (value, shape, version) in zip(tensors, before, strict=True):
        assert t.shape == shape
        assert t._version == version
        now = t.detach()
        assert ((now == value) | ((now != now) & (value != value))).all()  # NaN counts as equal to NaN


def _readable(t: Tensor) -> bool:
    return t.layout is torch.strided and not (t.is_meta or t.is_quantized or t.is_nested)
