"""What the tests of columns share: plans of the CUDA tiers of columns, tensors amid poison, definitions."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

COLUMNS, GRID, TWOPASS = 6, 7, 8
WINDOW, WHOLE, SLAB, WHOLE_SLAB, STRIDED = 0, 2, 3, 4, 5
AHEAD = 1  # of a shelf: for the next tile
F32, F64, F16, BF16 = torch.float32, torch.float64, torch.float16, torch.bfloat16
FAMILY = ("softmax", "log_softmax", "softmin")
TOLERANCE = {F64: 1e-12, F32: 3e-6, F16: 2e-3, BF16: 1.6e-2}


def names(value: object) -> str | None:
    """The ids of parameters that are dtypes or pairs of them."""
    if isinstance(value, tuple) and all(isinstance(v, torch.dtype) for v in value):
        return "-".join(str(v)[6:] for v in value)
    return None


class Place(NamedTuple):
    """Where a tensor lies in memory."""

    strides: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class Plan:
    """Threads side by side (of slabs: about as many) and down a column, vectors that a thread keeps, blocks that share
    columns, vectors on the shelf."""

    tier: int
    across: int
    down: int
    slots: int
    split: int = 1
    shelf: int = 0

    def given(self, edges: int, vector: int, inner: int) -> tuple[int, ...]:
        """As the private operators take it."""
        across = self.lines(vector, inner) if edges in (SLAB, WHOLE_SLAB) else self.across
        return (self.tier, across, self.down, self.slots * vector, vector, self.split, self.shelf, edges)

    def lines(self, vector: int, inner: int) -> int:
        """Threads that take a whole number of lines of a slab."""
        turn = inner // math.gcd(inner, vector)
        return turn * max(1, self.across // turn)

    def lengths(self, edges: int, vector: int, inner: int) -> list[int]:
        """Short columns, and the longest that the plan serves; of the tier that keeps nothing, long ones."""
        kept = (self.slots + (self.shelf if self.shelf != AHEAD else 0)) * self.split
        if edges in (SLAB, WHOLE_SLAB):
            begins_within = vector - 1 if edges == SLAB else 0
            most = (kept * self.lines(vector, inner) * vector - begins_within) // inner
        else:
            most = kept * self.down
        most = 3 * most + 1 if self.tier == TWOPASS else most
        unit = vector // math.gcd(inner, vector) if edges == WHOLE_SLAB else 1
        return sorted({n // unit * unit for n in (max(2, unit), most // 2 + unit, most) if n // unit * unit >= 2})


# By tier and edges. A shelf takes whole vectors.
_OF_TILES = {
    COLUMNS: [(8, 1, 9), (4, 16, 4), (4, 8, 3, 4), (4, 16, 2, 16), (8, 8, 4, 1, AHEAD), (4, 8, 2, 2, AHEAD)],
    GRID: [(4, 16, 2, 3), (1, 250, 2, 2)],
    TWOPASS: [(4, 16, 4), (8, 8, 3, 3)],
}
_OF_SLABS = {
    COLUMNS: [(64, 1, 4), (64, 1, 3, 4), (200, 1, 4, 1, AHEAD)],
    GRID: [(64, 1, 4, 3)],
    TWOPASS: [(64, 1, 4), (64, 1, 3, 5)],
}
_ON_SHELVES = {
    (COLUMNS, WHOLE): [(4, 8, 2, 2, 4), (4, 16, 5, 1, 20), (4, 8, 12, 1, 24)],
    (GRID, WHOLE): [(8, 4, 4, 5, 8)],
    (COLUMNS, WHOLE_SLAB): [(64, 1, 2, 2, 4), (64, 1, 4, 2, 12)],
    (GRID, WHOLE_SLAB): [(64, 1, 2, 3, 4)],
}
_OF_STRIDES = {COLUMNS: [(32, 4, 4), (1, 64, 3, 2)], GRID: [(32, 4, 4, 3)], TWOPASS: [(8, 16, 4), (1, 40, 4, 2)]}
_BY_EDGES = {WINDOW: _OF_TILES, WHOLE: _OF_TILES, SLAB: _OF_SLABS, WHOLE_SLAB: _OF_SLABS, STRIDED: _OF_STRIDES}
PLANS = {
    (tier, edges): [Plan(tier, *numbers) for numbers in [*of[tier], *_ON_SHELVES.get((tier, edges), [])]]
    for edges, of in _BY_EDGES.items()
    for tier in (COLUMNS, GRID, TWOPASS)
}


def some(plans: Sequence[Plan], every: bool, turn: int, most_cluster: int) -> list[Plan]:
    """Of a tier's plans all, or the one whose turn it is: each kernel takes a third of a second to compile."""
    able = [plan for plan in plans if plan.tier != COLUMNS or plan.split <= most_cluster]
    return able if every else [able[turn % len(able)]]


def inners(plan: Plan, edges: int, vector: int) -> tuple[int, ...]:
    """Columns side by side: less than a tile, and more, with a part of a vector at the end where that may be."""
    if edges == WINDOW:
        return (vector + 1, plan.across * vector + 3)
    if edges == WHOLE:
        return (2 * vector, (plan.across + 1) * vector)
    return (7, 12) if edges in (SLAB, WHOLE_SLAB) else (5, 37)


def place_of(edges: int, n: int, inner: int, vector: int) -> Place:
    """Of (outer, n, inner), with gaps wherever these edges allow them."""
    if edges in (WINDOW, WHOLE):
        pitch = -(-inner // vector) * vector + vector
        return Place((n * pitch, pitch, 1), vector)
    if edges == SLAB:
        return Place((n * inner + 3, inner, 1), 1)
    if edges == WHOLE_SLAB:
        return Place((n * inner + vector, inner, 1), vector)
    return Place((n * (2 * inner + 1) + 2, 2 * inner + 1, 2), 1)


def amid(fill: float, shape: Sequence[int], place: Place, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """Memory full of `fill`, and a tensor in it."""
    reach = sum((size - 1) * stride for size, stride in zip(shape, place.strides, strict=True) if size)
    memory = torch.full((place.offset + reach + 9,), fill, device=device, dtype=dtype)
    return memory, memory.as_strided(tuple(shape), place.strides, place.offset)


def operand(values: Tensor, place: Place, dtype: torch.dtype) -> Tensor:
    """The values in memory that is NaN everywhere else."""
    return amid(math.nan, values.shape, place, dtype, values.device.type)[1].copy_(values)


def assert_untouched(memory: Tensor, result: Tensor, fill: float) -> None:
    """Beside the result, which is overwritten."""
    result.fill_(fill)
    assert (memory == fill).all(), "memory beside the result was written"


def special(outer: int, n: int, inner: int, dtype: torch.dtype, device: str) -> Tensor:
    """(outer, n, inner) with columns of what is not finite, of one value and far from 0."""
    columns = torch.randn(outer * inner, n, device=device, dtype=F64) * 3
    if outer * inner > 8:
        columns[1, : n - 1] = -torch.inf  # a long run, to the last element
        columns[2, 1:] = -torch.inf
        columns[3] = -torch.inf
        columns[4, n // 2] = torch.inf
        columns[5, n // 2] = torch.nan
        columns[6] = 7.0
        columns[7] += 1e4
        columns[8] -= 1e4
    if outer * inner > 12:
        columns[9] = columns[9].abs() + 100.0  # of which exp is infinite itself
        columns[9, n // 3] = torch.inf
        columns[10:12] *= torch.tensor([[1e7], [1e13]], device=device)
        columns[12] = columns[12] * 1e5 + 1e9
    if outer * inner > 15:
        lowest = torch.finfo(dtype).min
        columns[13] = torch.linspace(-70, 70, n, device=device)  # its maximum grows all the way
        columns[14, : n // 2], columns[14, n // 2 :] = -torch.inf, lowest
        columns[15, ::2], columns[15, 1::2] = -lowest, lowest
    return columns.view(outer, inner, n).movedim(-1, 1).to(dtype)


def gradient(function: str, g: Tensor, saved: Tensor, dims: Sequence[int], lse: Tensor | None = None) -> list[Tensor]:
    """The gradient's definition in float64, and the sum of the magnitudes of its terms. Of logsumexp `saved` is its
    input, and g and lse have all dims."""
    g, y, dims = g.double(), saved.double(), tuple(dims)
    if lse is not None:
        dx = g * (y - lse.double()).exp()
        return [dx, dx.abs()]
    if function == "log_softmax":
        return [g - y.exp() * g.sum(dims, keepdim=True), g.abs() + y.exp() * g.abs().sum(dims, keepdim=True)]
    dx = y * (g - (g * y).sum(dims, keepdim=True))
    return [dx if function == "softmax" else -dx, y * (g.abs() + (g * y).abs().sum(dims, keepdim=True))]


def assert_gradient(dx: Tensor, want: Tensor, scale: Tensor) -> None:
    least = 1e-7 if dx.dtype in (F16, BF16) else 0.0  # below the smallest number of float16
    error = ((dx.double() - want).abs() - least).clamp(min=0) / (scale + 1e-30)
    assert error.isfinite().all()
    assert error.max() <= TOLERANCE[dx.dtype]
