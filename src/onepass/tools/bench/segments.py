"""The suite `segments`: softmax over rows of unequal length and its gradient, beside PyTorch Geometric.

The limit is a copy, for a gradient an addition, of as many bytes as the tensors and the offsets have. Every call is
compared with the float64 definition before it is timed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

import onepass
from onepass.native import FUNCTIONS
from onepass.tools.bench.cases import Case
from onepass.tools.bench.correctness import TOLERANCE
from onepass.tools.bench.provider import Call, Provider, move_bytes
from onepass.tools.bench.providers import compile_for_case, compiler_missing
from onepass.tools.bench.segment_cases import SegmentCase
from onepass.tools.bench.suite_runner import SuiteRunner

Softmax = Callable[..., Tensor]


@dataclass
class Ragged:
    """Items, the segment of each item, the offsets, and for a backward the upstream gradient."""

    x: Tensor
    index: Tensor
    offsets: Tensor
    grad: Tensor | None
    place: Tensor | None = None  # the position of each item among the sorted items

    @property
    def segments(self) -> int:
        return self.offsets.shape[0] - 1

    @cached_property
    def shuffled(self) -> Ragged:
        """The same items, shuffled."""
        device = self.x.device
        place = torch.randperm(len(self.x), device=device, generator=torch.Generator(device).manual_seed(0))
        grad = None if self.grad is None else self.grad[place]
        return replace(self, x=self.x[place], index=self.index[place], grad=grad, place=place)


# Providers


class SegmentProvider(Provider):
    """A softmax over segments, which `make` makes from the indices. `only` says why it runs only if it is named."""

    rounds_sums = True  # whether it rounds its sums to the dtype of the items after each item

    def __init__(
        self, name: str, label: str, make: Callable[[Ragged], Softmax], shuffled: bool = False, only: str | None = None
    ):
        self.name, self.label, self.make, self.shuffled, self.only = name, label, make, shuffled, only

    def redundant(self, device: torch.device) -> str | None:
        return self.only

    def given(self, ragged: Ragged) -> Ragged:
        """The items as the provider takes them."""
        return ragged.shuffled if self.shuffled else ragged

    def calls(self, ragged: Ragged) -> list[Call]:
        """The call to time, and one that allocates its result. A gradient goes through autograd."""
        f, x, grad = self.make(ragged), ragged.x, ragged.grad
        if grad is None:
            return [lambda: f(x)]
        leaf = x.detach().requires_grad_()
        y = f(leaf)
        return [lambda: torch.autograd.grad(y, leaf, grad, retain_graph=True)[0]]


class Ours(SegmentProvider):
    """onepass, whose kernels write into a given tensor."""

    rounds_sums = False

    def version(self) -> str | None:
        return onepass.__version__

    def unsupported(self, case: Case, dtype: str) -> str | None:
        by_index = self.name == "onepass-index" and case.direction == "backward"
        return "its gradient is that of onepass, by the offsets" if by_index else None

    def calls(self, ragged: Ragged) -> list[Call]:
        f, x, grad, out = self.make(ragged), ragged.x, ragged.grad, torch.full_like(ragged.x, torch.nan)
        if grad is None:
            return [lambda: f(x, out=out), *super().calls(ragged)]
        assert isinstance(f, partial)
        given: Any = f.keywords["offsets"]
        if isinstance(given, onepass.Segments):  # its items may be permuted
            return super().calls(ragged)
        arguments = grad, f(x), None, given, None, None, out, FUNCTIONS.index("softmax"), 0, 1.0

        def call() -> Tensor:
            torch.ops.onepass._segment_backward_kernel(*arguments)
            return out

        return [call, *super().calls(ragged)]


class Pyg(SegmentProvider):
    """PyTorch Geometric's."""

    def unavailable(self, device: torch.device) -> str | None:
        return None if find_spec("torch_geometric") else "torch_geometric is not installed"

    def version(self) -> str | None:
        return str(import_module("torch_geometric").__version__)


class Compiled(SegmentProvider):
    """Another provider's softmax, compiled by torch.compile for each case."""

    def __init__(self, of: SegmentProvider, only: str | None):
        def make(ragged: Ragged) -> Softmax:
            return compile_for_case(of.make(ragged), fullgraph=True)

        super().__init__(f"{of.name}-compile", f"torch.compile of {of.label}", make, only=of.only or only)
        self.of = of

    def unavailable(self, device: torch.device) -> str | None:
        return self.of.unavailable(device) or compiler_missing(device)

    def version(self) -> str | None:
        return self.of.version()


def providers(compiled: bool = False) -> dict[str, Provider]:
    """All providers by name. Without `compiled` those that use torch.compile run only if they are named."""

    def ours(**given: Any) -> Softmax:
        return partial(onepass.segment_softmax, **given)

    def pyg(**given: Any) -> Softmax:
        return partial(import_module("torch_geometric.utils").softmax, **given)

    by_index = Pyg("pyg-index", "PyTorch Geometric, by index", lambda r: pyg(index=r.index, num_nodes=r.segments))
    by_ptr = Pyg("pyg-ptr", "PyTorch Geometric, by ptr", lambda r: pyg(ptr=r.offsets))
    steps = SegmentProvider(
        "torch",
        "torch, as PyTorch Geometric by index",
        lambda r: partial(_torch_softmax, index=r.index, segments=r.segments),
        only=None if by_index.unavailable(torch.device("cpu")) else "pyg-index takes the same steps",
    )
    only = None if compiled else "compiles for each case: --compile N times N of them"
    known: tuple[SegmentProvider, ...] = (
        Ours("onepass", "onepass, by offsets", lambda r: ours(offsets=r.offsets)),
        Ours("onepass-index", "onepass, by a sorted index", lambda r: ours(index=r.index, num_segments=r.segments)),
        Ours(
            "onepass-plan",
            "onepass, by Segments of an unsorted index",
            lambda r: ours(offsets=onepass.Segments(r.index, r.segments)),
            shuffled=True,
        ),
        by_index,
        by_ptr,
        Pyg("pyg-unsorted", "PyTorch Geometric, by an unsorted index", by_index.make, shuffled=True),
        steps,
        *(Compiled(of, only) for of in (by_index, by_ptr, steps)),
    )
    return {provider.name: provider for provider in known}


def compiled_names() -> tuple[str, ...]:
    return tuple(name for name, provider in providers().items() if isinstance(provider, Compiled))


def _torch_softmax(x: Tensor, index: Tensor, segments: int) -> Tensor:
    shape = segments, *x.shape[1:]
    places = index.view(-1, *[1] * (x.dim() - 1)).expand_as(x)
    top = x.new_full(shape, -torch.inf).scatter_reduce(0, places, x.detach(), "amax")
    e = (x - top.index_select(0, index)).exp()
    return e / _sums(e, index, segments)


def _sums(t: Tensor, index: Tensor, segments: int) -> Tensor:
    """For each item, the sum of its segment."""
    return t.new_zeros(segments, *t.shape[1:]).index_add(0, index, t).index_select(0, index)


# The run


@dataclass
class Expected:
    """The expected result in float64, the magnitudes of its terms, and for each item the length of its segment."""

    result: Tensor
    magnitude: Tensor
    lengths: Tensor


class SegmentRunner(SuiteRunner):
    """A run of segments."""

    def make(self, case: Case, dtype: str, generator: torch.Generator) -> Ragged:
        assert isinstance(case, SegmentCase)

        def normal() -> Tensor:
            return torch.empty(case.shape, dtype=getattr(torch, dtype), device=self.device).normal_(generator=generator)

        offsets, items = _offsets(case, generator), case.shape[0]
        index = torch.arange(case.segments, device=self.device).repeat_interleave(offsets.diff(), output_size=items)
        return Ragged(normal(), index, offsets, normal() if case.direction == "backward" else None)

    def limit(self, data: Ragged) -> Call:
        tensors = 2 if data.grad is None else 3
        return move_bytes(data.x, tensors * data.x.nbytes + data.offsets.nbytes, tensors - 1)

    def expect(self, data: Ragged) -> Expected:
        y, lengths = _torch_softmax(data.x.double(), data.index, data.segments), data.offsets.diff()[data.index]
        lengths = lengths.view(-1, *[1] * (y.dim() - 1))
        if data.grad is None:
            return Expected(y, y, lengths)
        grad = data.grad.double()
        of = data.index, data.segments
        return Expected(y * (grad - _sums(y * grad, *of)), y * (grad.abs() + _sums(y * grad.abs(), *of)), lengths)

    def calls(self, provider: SegmentProvider, data: Ragged) -> list[Call]:
        return provider.calls(provider.given(data))

    def compare(self, provider: SegmentProvider, data: Ragged, got: Tensor, expected: Expected) -> str | None:
        """A sum that is rounded after each item may be off by that many roundings; a gradient has two such sums."""
        if (got.shape, got.dtype) != (data.x.shape, data.x.dtype):
            return f"the result is {got.dtype} of shape {list(got.shape)}"
        place = provider.given(data).place
        right, magnitude, lengths = (
            t if place is None else t[place] for t in (expected.result, expected.magnitude, expected.lengths)
        )
        roundings = 1 + lengths * provider.rounds_sums
        share = (1 + TOLERANCE[str(got.dtype).removeprefix("torch.")] * roundings) ** (1 + (data.grad is not None)) - 1
        least = torch.finfo(got.dtype).tiny * torch.finfo(got.dtype).eps  # the smallest number above 0
        worst = float(((got.double() - right).abs() / (share * magnitude + least)).max())
        return None if worst <= 1 else f"an error of {worst:.1e} times what is allowed"


def _offsets(case: SegmentCase, generator: torch.Generator) -> Tensor:
    device, items, segments = generator.device, case.shape[0], case.segments
    if case.lengths == "equal":
        return torch.arange(segments + 1, device=device) * items // segments
    if case.lengths == "Zipf":
        weights = 1 / (1 + torch.randperm(segments, device=device, generator=generator).double())
        cuts = (weights.cumsum(0) / weights.sum() * items).long()[:-1].clamp(max=items)
    else:
        cuts = torch.randint(0, items + 1, (segments - 1,), device=device, generator=generator).sort().values
    ends = torch.tensor([0, items], device=device)
    return torch.cat((ends[:1], cuts, ends[1:]))
