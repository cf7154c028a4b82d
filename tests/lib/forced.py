"""What serves forced plans, the CUDA engine or its emulator; columns by them, compared with their definitions."""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from lib.columns import (
    AHEAD,
    BF16,
    COLUMNS,
    F16,
    F32,
    F64,
    FAMILY,
    GRID,
    SLAB,
    STRIDED,
    WHOLE,
    WHOLE_SLAB,
    WINDOW,
    Place,
    Plan,
    amid,
    assert_gradient,
    assert_untouched,
    gradient,
    inners,
    operand,
    place_of,
    special,
)
from lib.support import assert_defined
from onepass import native, reference

Types = tuple[torch.dtype, torch.dtype]
PAIRS = [(F32, F32), (F64, F64), (F16, F16), (BF16, BF16), (F16, F32), (BF16, F32), (F32, BF16), (F64, F16)]
REDUCED = [(F32, F32), (F64, F64), (F16, F16), (BF16, BF16), (F16, F32), (BF16, F32)]
STATES = [(F32, F32), (F64, F64), (F16, F32), (BF16, F32)]
TYPES = {"logsumexp": REDUCED, "state": STATES}
OUTER = (1, 3)
ONE_EACH, ONE_A_COLUMN, ONE_A_BLOCK, ONE_FOR_ALL, WITH_STEPS = (
    "one each",
    "one a column",
    "one a block",
    "one for all",
    "with steps",
)
# A part of it on the shelf: a few threads have many vectors each, so that elements come in many turns
COMING = [
    (Plan(COLUMNS, 4, 4, 5, 1, 16), WHOLE),
    (Plan(COLUMNS, 2, 8, 4, 4, 8), WHOLE),
    (Plan(COLUMNS, 4, 4, 12, 2), WHOLE),
    (Plan(COLUMNS, 4, 4, 9, 2), WINDOW),
    (Plan(COLUMNS, 4, 8, 8, 2, AHEAD), WHOLE),
    (Plan(COLUMNS, 64, 1, 4, 2, 12), WHOLE_SLAB),
    (Plan(GRID, 2, 8, 5, 2, 8), WHOLE),
]


class Runner(Protocol):
    device: str
    most_cluster: int  # blocks
    forced: Callable[..., None]  # takes what the private operator `_softmax_with_plan` does
    forced_backward: Callable[..., None]  # takes what `_softmax_backward_with_plan` does


class Gpu:
    device = "cuda"

    def __init__(self) -> None:
        properties = torch.cuda.get_device_properties(0)
        compute = 10 * properties.major + properties.minor
        self.most_cluster = (
            1 if compute < 90 else 16 if compute == 90 and properties.multi_processor_count >= 132 else 8
        )
        self.forced = torch.ops.onepass._softmax_with_plan
        self.forced_backward = torch.ops.onepass._softmax_backward_with_plan


def vector_of(function: str, types: Types, edges: int) -> int:
    """Elements of 16 bytes of the wider type of what is as long as the columns."""
    widest = types[0].itemsize if function in TYPES else max(types[0].itemsize, types[1].itemsize)
    return 16 // widest if edges != STRIDED else 1


def shapes(plan: Plan, edges: int, vector: int) -> Iterator[tuple[int, int, Place, tuple[int, ...]]]:
    """Short and long columns, and how many side by side, where they lie, and the plan as the operators take it."""
    for inner in inners(plan, edges, vector):
        for n in plan.lengths(edges, vector, inner):
            yield n, inner, place_of(edges, n, inner, vector), plan.given(edges, vector, inner)


def forward(
    runner: Runner, function: str, x: Tensor, y_type: torch.dtype, place: Place, plan: Sequence[int] | None
) -> None:
    """One forced call into a poisoned result amid untouched memory, compared with the definition."""
    outer, _, inner = x.shape
    shape, there = (tuple(x.shape), place)
    if function == "logsumexp":
        shape, there = (outer, inner), Place((inner + 3, 1), 1)
    if function == "state":
        shape, there = (2, outer, inner), Place((outer * inner, inner, 1), 1)  # a state is contiguous
    memory, out = amid(7.0, shape, there, y_type, runner.device)
    out.fill_(torch.nan)
    runner.forced(x, native.FUNCTIONS.index(function), [1], False, plan, out)
    note = f", plan {plan}"
    if function == "state":
        m, total = reference.state(x, 1)
        torch.testing.assert_close(out[0].double(), m, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(out[1].double(), total, rtol=4e-6, atol=0, equal_nan=True)
    else:
        assert_defined(function, out, x if function == "logsumexp" else x.to(y_type), 1, note)
    assert_untouched(memory, out, 7.0)


def check_forward(runner: Runner, function: str, types: Types, plan: Plan, edges: int) -> None:
    """A plan over columns with everything that is special, short and long ones."""
    for n, inner, place, given in shapes(plan, edges, vector_of(function, types, edges)):
        for outer in OUTER:
            x = operand(special(outer, n, inner, types[0], runner.device), place, types[0])
            forward(runner, function, x, types[1], place, given)


def backward(
    runner: Runner,
    function: str,
    shape: tuple[int, int, int],
    types: Types,
    kind: str,
    place: Place,
    plan: Sequence[int] | None,
) -> None:
    """As `forward`, for a gradient. `kind`: what the result's gradient has one value for."""
    outer, _, inner = shape
    saved_type, other = types  # of logsumexp those of the input and of the result
    memory, dx = amid(7.0, shape, place, saved_type if function == "logsumexp" else other, runner.device)
    dx.fill_(torch.nan)
    x = 2 * torch.randn(shape, device=runner.device, dtype=F64)
    if function == "logsumexp":
        x = operand(x, place, saved_type)
        there = Place((inner + 2, 1), 1) if kind == ONE_EACH else Place((2 * inner, 2), 0)
        g = operand(torch.randn(outer, inner, device=runner.device), there, other)
        lse = operand(reference.logsumexp(x, 1), there, other)
        runner.forced_backward(g, x, lse, native.FUNCTIONS.index(function), [1], plan, dx)
        want, scale = gradient(function, g.unsqueeze(1), x, [1], lse.unsqueeze(1))
    else:
        y = operand(getattr(reference, function)(x, 1), place, saved_type)
        sizes = {ONE_A_COLUMN: (outer, 1, inner), ONE_A_BLOCK: (outer, 1, 1), ONE_FOR_ALL: (1, 1, 1)}
        g = torch.randn(sizes.get(kind, shape), device=runner.device)
        g = operand(g, place, saved_type).expand(shape)
        runner.forced_backward(g, y, None, FAMILY.index(function), [1], plan, dx)
        want, scale = gradient(function, g, y, [1])
    assert_gradient(dx, want, scale)
    assert_untouched(memory, dx, 7.0)


def kinds_of(function: str, edges: int) -> list[str]:
    """Of the result's gradient, of which those with one value have kernels of their own."""
    if function == "logsumexp":
        return [ONE_EACH, WITH_STEPS]
    kinds = [ONE_EACH, ONE_A_COLUMN, ONE_A_BLOCK, ONE_FOR_ALL]
    return [kind for kind in kinds if kind != ONE_A_COLUMN or edges not in (SLAB, WHOLE_SLAB)]  # of one line: no slab


def check_backward(runner: Runner, function: str, types: Types, plan: Plan, edges: int, kinds: Sequence[str]) -> None:
    for n, inner, place, given in shapes(plan, edges, vector_of(function, types, edges)):
        for kind in kinds:
            backward(runner, function, (3, n, inner), types, kind, place, given)


def growing(n: int, inner: int, device: str) -> Tensor:
    """One kind of column beside another: (9, n, inner), as close as `inner` to the next kind."""
    at = torch.arange(n, device=device, dtype=F32).unsqueeze(1)
    noise = torch.randn(n, inner, device=device)
    rising = (at / n - 0.5) * 800
    spike = torch.where(at == torch.randint(n, (inner,), device=device), 300.0, -300.0)
    kinds = [
        rising + noise,
        -rising + noise,
        spike + noise,
        59 * (at % 13 == 7) + 40 * (at % 5 == 3) + noise,  # just under what makes a thread begin anew
        torch.where(at < n // 2, -torch.inf, noise + 100),
        torch.where(at == n - 1, torch.inf, noise),
        torch.where(at == n // 2, torch.nan, rising + noise),
        torch.full_like(noise, -torch.inf),
        torch.where(at % 2 == 0, 3e38, -3e38) + noise,
    ]
    return torch.stack(kinds)


def check_coming(runner: Runner, function: str, plan: Plan, edges: int, dtype: torch.dtype = F32) -> None:
    """softmax or softmin of columns whose maximum comes late; small results are as exact as the others."""
    inner, vector = {WINDOW: 19, WHOLE: 24}.get(edges, 7), 16 // dtype.itemsize
    for n in plan.lengths(edges, vector, inner):
        x = growing(n, inner, runner.device)
        x = torch.cat([x, x.flip(0).roll(3, 2)])  # neighbours of all kinds
        x = torch.cat([x, torch.where(torch.arange(inner, device=x.device) % 2 == 0, x, x.flip(0))])
        x = (-x if function == "softmin" else x).to(dtype)
        pitch = -(-inner // vector) * vector if edges != WHOLE_SLAB else inner
        place, given = Place((n * pitch, pitch, 1), vector), plan.given(edges, vector, inner)
        there, out = (operand(values, place, dtype) for values in (x, torch.full_like(x, torch.nan)))
        runner.forced(there, native.FUNCTIONS.index(function), [1], False, given, out)
        assert_defined(function, out, x, 1, f", plan {given}")
        if dtype is not F32:
            continue
        want = torch.softmax(-x.double() if function == "softmin" else x.double(), 1)
        small = (want > 1e-37) & (want < 1e-20)
        if n > 40:
            assert bool(small.any())
        torch.testing.assert_close(out[small].double(), want[small], rtol=2e-5, atol=0)
