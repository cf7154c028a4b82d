"""Runs calls and gradients with forced plans (on the CUDA engine, or its emulator), on tensors surrounded by poisoned
memory, and compares them with their definitions."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

import onepass
from emulator import Emulator
from lib.gradients import gradient
from lib.plan_tables import (
    BF16,
    F16,
    F32,
    F64,
    SLABS,
    TYPES,
    Access,
    Place,
    Plan,
    Tier,
    Types,
    column_lengths,
    shapes,
    widen,
)
from lib.support import assert_defined
from onepass import native, reference
from onepass.validation import reduces_to

TOLERANCE = {F64: 1e-12, F32: 3e-6, F16: 2e-3, BF16: 1.6e-2}


# Engines that run plans -----------------------------------------------------------------------------------------------


class Engine:
    """The native engine of a device. Only the CUDA engine takes plans."""

    def __init__(self, device: str) -> None:
        self.device, self.most_cluster = device, 1
        if device == "cuda":
            about = torch.cuda.get_device_properties(0)
            arch = 10 * about.major + about.minor
            self.most_cluster = 1 if arch < 90 else 16 if arch == 90 and about.multi_processor_count >= 132 else 8

    def call(self, function: str, x: Tensor, dims: Sequence[int], y: Tensor, plan: Plan | None = None) -> None:
        ops = torch.ops.onepass
        if plan is not None:
            ops._softmax_with_plan(x, native.FUNCTIONS.index(function), dims, False, plan, y)
        elif function == "logsumexp":
            ops.logsumexp.out(x, dims, dtype=y.dtype, out=y)
        else:
            getattr(onepass, function)(x, tuple(dims), out=y, engine=self.device, dtype=y.dtype)

    def gradient(
        self,
        function: str,
        g: Tensor,
        saved: Tensor,
        lse: Tensor | None,
        dims: Sequence[int],
        dx: Tensor,
        plan: Plan | None = None,
    ) -> None:
        ops, number = torch.ops.onepass, native.FUNCTIONS.index(function)
        if plan is not None:
            ops._softmax_backward_with_plan(g, saved, lse, number, dims, plan, dx)
        elif lse is not None:
            ops._logsumexp_backward.out(g, saved, lse, dims, False, dx)
        else:
            ops._softmax_backward.out(g, saved, number, dims, dx)


Runner = Engine | Emulator  # writes calls and gradients to given results, with a given plan or its own


# Tensors --------------------------------------------------------------------------------------------------------------


def amid(fill: float, shape: Sequence[int], place: Place, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """(memory filled with `fill`, a tensor in it)."""
    reach = sum((size - 1) * stride for size, stride in zip(shape, place.strides, strict=True) if size)
    memory = torch.full((place.offset + reach + 9,), fill, device=device, dtype=dtype)
    return memory, memory.as_strided(tuple(shape), place.strides, place.offset)


def operand(values: Tensor, place: Place, dtype: torch.dtype) -> Tensor:
    """A tensor with these values, in memory that is NaN everywhere else."""
    return amid(math.nan, values.shape, place, dtype, values.device.type)[1].copy_(values)


def assert_untouched(memory: Tensor, result: Tensor, fill: float) -> None:
    """Asserts that only the result was written. It overwrites the result."""
    result.fill_(fill)
    assert (memory == fill).all(), "memory beside the result was written"


def special(outer: int, n: int, inner: int, dtype: torch.dtype, device: str, few: bool = False) -> Tensor:
    """A tensor (outer, n, inner) with columns that have infinities or NaN, or one value, and unless `few` large
    values."""
    x = torch.randn(outer * inner, n, device=device, dtype=F64) * 3
    count = len(x)
    if count > 8 or (few and count > 6):
        x[1, : n - 1] = -torch.inf  # a long run, to the last element
        x[2, 1:] = -torch.inf
        x[3] = -torch.inf
        x[4] = x[4].abs() + 100.0 if few else x[4]  # exp() of these is infinite
        x[4, n // 2] = torch.inf
        x[5, n // 2] = torch.nan
        x[6] = 7.0
    if count > 8 and not few:
        x[7] += 1e4
        x[8] -= 1e4
    if count > 12 and not few:
        x[9] = x[9].abs() + 100.0
        x[9, n // 3] = torch.inf
        x[10:12] *= torch.tensor([[1e7], [1e13]], device=device)
        x[12] = x[12] * 1e5 + 1e9
    if count > 15 and not few:
        lowest = torch.finfo(dtype).min
        x[13] = torch.linspace(-70, 70, n, device=device)  # its maximum grows all the way
        x[14, : n // 2], x[14, n // 2 :] = -torch.inf, lowest
        x[15, ::2], x[15, 1::2] = -lowest, lowest
    return x.view(outer, inner, n).movedim(-1, 1).to(dtype)


# Calls and gradients --------------------------------------------------------------------------------------------------


def assert_gradient(dx: Tensor, want: Tensor, scale: Tensor) -> None:
    least = 1e-7 if dx.dtype in (F16, BF16) else 0.0  # below the smallest number of float16
    error = ((dx.double() - want).abs() - least).clamp(min=0) / (scale + 1e-30)
    assert error.isfinite().all()
    assert error.max() <= TOLERANCE[dx.dtype]


def assert_close(function: str, got: Tensor, want: Tensor, few_ulp: float = 2.2e-6) -> None:
    """The tolerance of probabilities is relative, down to the smallest normal number. For logarithms it is relative to
    max(1, |result|). For float32 it is `few_ulp`: half a unit of x - m, up to 64 in these tests, plus the error of the
    exponential."""
    rtol = {F64: 1e-13, F32: few_ulp}.get(got.dtype, TOLERANCE[got.dtype])
    least = rtol if function.startswith("log") else torch.finfo(got.dtype).smallest_normal
    torch.testing.assert_close(got.double(), want, rtol=rtol, atol=least, equal_nan=True)


def forward(
    runner: Runner,
    function: str,
    x: Tensor,
    y_type: torch.dtype,
    place: Place,
    plan: Plan | None,
    closely: bool = False,
) -> None:
    """One call of (outer, n, inner) over n, which writes to a poisoned result. Compares the result by `assert_close` or
    `assert_defined`, and checks that the memory around it is untouched."""
    outer, _, inner = x.shape
    shape, there = (tuple(x.shape), place)
    if function == "logsumexp":
        shape, there = (outer, inner), Place((inner + 3, 1), 1) if inner > 1 else Place((1, 1), 0)
        if plan is not None and plan.tier == Tier.COLUMNS_STAGED:
            there = Place((inner, 1), 1)
    if function == "state":
        shape, there = (2, outer, inner), Place((outer * inner, inner, 1), 1)  # a state is contiguous
    memory, out = amid(7.0, shape, there, y_type, runner.device)
    out.fill_(torch.nan)
    runner.call(function, x, [1], out, plan)
    if function == "state":
        m, total = reference.state(x, 1)
        torch.testing.assert_close(out[0].double(), m, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(out[1].double(), total, rtol=4e-6, atol=0, equal_nan=True)
    else:
        given = x if function == "logsumexp" else x.to(y_type)
        if closely:
            assert_close(function, out, getattr(reference, function)(given, 1))
        else:
            assert_defined(function, out, given, 1, f", plan {plan}")
    assert_untouched(memory, out, 7.0)


# What the upstream gradient has one value for.
ONE_EACH, ONE_A_COLUMN, ONE_A_BLOCK, ONE_FOR_ALL, WITH_STEPS = range(5)


def backward(
    runner: Runner,
    function: str,
    shape: tuple[int, int, int],
    types: Types,
    kind: int,
    places: Place | tuple[Place, Place, Place],
    plan: Plan | None,
) -> None:
    """As `forward`, for a gradient. `places`: of the saved tensor, of the upstream gradient, of the result."""
    outer, _, inner = shape
    saved_place, grad_place, place = (places,) * 3 if isinstance(places, Place) else places
    saved_type, other = types  # for logsumexp, of the input and of the result
    memory, dx = amid(7.0, shape, place, saved_type if function == "logsumexp" else other, runner.device)
    dx.fill_(torch.nan)
    x = 2 * torch.randn(shape, device=runner.device, dtype=F64)
    if function == "logsumexp":
        x = operand(x, saved_place, saved_type)
        there = Place((inner + 2, 1), 1) if kind == ONE_EACH else Place((2 * inner, 2), 0)
        g = operand(torch.randn(outer, inner, device=runner.device), there, other)
        lse = operand(reference.logsumexp(x, 1), there, other)
        runner.gradient(function, g, x, lse, [1], dx, plan)
        want, scale = gradient(function, g.unsqueeze(1), x, [1], lse.unsqueeze(1))
    else:
        y = operand(getattr(reference, function)(x, 1), saved_place, saved_type)
        sizes = {ONE_A_COLUMN: (outer, 1, inner), ONE_A_BLOCK: (outer, 1, 1), ONE_FOR_ALL: (1, 1, 1)}
        g = torch.randn(sizes.get(kind, shape), device=runner.device)
        g = operand(g, grad_place, saved_type).expand(shape)
        runner.gradient(function, g, y, None, [1], dx, plan)
        want, scale = gradient(function, g, y, [1])
    assert_gradient(dx, want, scale)
    assert_untouched(memory, dx, 7.0)


def check_rows(runner: Runner, function: str, types: Types, plan: Plan, lengths: Sequence[int]) -> None:
    """Runs a plan on each length that it serves, with vectors as wide as the dtypes allow."""
    x_type, y_type = types
    reduces = function in ("logsumexp", "state")  # they write no rows, so only the input's dtype limits the vectors
    plan = plan._replace(
        vec_size=min(plan.vec_size, 16 // (x_type.itemsize if reduces else max(x_type.itemsize, y_type.itemsize)))
    )
    tier, threads, _, items, vector, blocks, smem_vecs, access = plan
    if tier == Tier.PIPELINED:
        if reduces:
            return
        items = min(items, 4 * vector)
        places = smem_vecs // (items // vector)
        plan = plan._replace(items_per_thread=items, smem_vecs=places * (items // vector))
        lengths = [n for n in lengths if -(-n // (threads * items * blocks)) < places]
    if (tier == Tier.CLUSTER and runner.most_cluster == 1) or (items // vector > 16 and tier == Tier.GRID):
        return
    if smem_vecs and tier != Tier.STAGED and vector * x_type.itemsize < 4:
        return
    on_gpu = runner.device == "cuda"
    streams = tier in (Tier.GRID, Tier.TWOPASS, Tier.PIPELINED)
    room = (
        threads * (items + (0 if tier == Tier.STAGED else smem_vecs * vector)) * (blocks if tier == Tier.CLUSTER else 1)
    )
    for n in lengths if on_gpu else [n for n in lengths if n < 60_000]:
        span = n if n % vector == 0 or access or tier == Tier.STAGED else n + vector - 1
        if (n < vector and not access) or (not streams and span > room):
            continue
        rows = (37 if on_gpu else 9) + (plan.rows_per_block * smem_vecs if tier == Tier.STAGED else 0)  # a whole tile
        x = special(rows, n, 1, x_type, runner.device, few=True).contiguous()
        aligned = tier in (Tier.WARP, Tier.BLOCK, Tier.CLUSTER) and not access and n % vector == 0
        for one in (access, Access.ALIGNED) if aligned else (access,):
            # Short tiles through shared memory also begin within vectors, in the input and the result or in the result
            # alone, and have gaps between rows.
            few = min(3, n // 2)
            short = ((0, 0, 0, 0), (1, 1, 0, 0), (0, 1, 0, 0), (1, 0, few, 0), (1, 1, few, few), (0, 1, few, n // 4))
            for x_at, y_at, x_gap, y_gap in short if tier == Tier.STAGED and n < 100 else short[:1]:
                there, given = operand(x, Place((n + x_gap, 1, 1), x_at), x_type), plan._replace(access=one)
                forward(runner, function, there, y_type, Place((n + y_gap, 1, 1), y_at), given, closely=True)


def is_served(function: str, x_type: torch.dtype, y_type: torch.dtype) -> bool:
    if function == "logsumexp":
        return reduces_to(function, x_type, y_type)
    return function != "state" or (x_type, y_type) in TYPES["state"]  # a state has the accumulator's dtype


def vector_of(function: str, types: Types, access: int) -> int:
    """The elements of 16 bytes of the widest dtype among the tensors that are as long as the columns."""
    widest = types[0].itemsize if function in TYPES else max(types[0].itemsize, types[1].itemsize)
    return 16 // widest if access != Access.STRIDED else 1


def check_columns(runner: Runner, function: str, types: Types, plan: Plan) -> None:
    """Runs a plan over short and long columns with special values."""
    for n, inner, place, given in shapes(plan, vector_of(function, types, plan.access)):
        for outer in (1, 3):
            values = special(outer, n, inner, types[0], runner.device)
            gaps = Place((n * (inner + 1) + 2, inner + 1, 1), 1)  # gaps between lines and between slices
            more = [(gaps, place), (gaps, gaps)] if plan.tier == Tier.COLUMNS_STAGED else []
            if (plan.tier, plan.access) == (Tier.COLUMNS_SMEM, Access.SHIFTED):  # results have another alignment
                more = [(place, Place((n * (inner + 2), inner + 2, 1), 3))]
            for of_x, of_y in [(place, place), *more]:
                forward(runner, function, operand(values, of_x, types[0]), types[1], of_y, given)


def kinds_of(function: str, access: int, tier: int = Tier.COLUMNS) -> list[int]:
    """The kinds of upstream gradients to test. Those with one value for several elements have kernels of their own."""
    if tier == Tier.COLUMNS_STAGED:
        return [] if function == "logsumexp" else [ONE_EACH]
    if tier == Tier.COLUMNS_SMEM and function == "logsumexp":
        return []
    if function == "logsumexp":
        return [ONE_EACH, WITH_STEPS]
    kinds = [ONE_EACH, ONE_A_COLUMN, ONE_A_BLOCK, ONE_FOR_ALL]
    return [kind for kind in kinds if kind != ONE_A_COLUMN or access not in (*SLABS, Access.SHIFTED)]  # of one line


def check_column_gradients(runner: Runner, function: str, types: Types, plan: Plan, kinds: Sequence[int]) -> None:
    for n, inner, place, given in shapes(plan, vector_of(function, types, plan.access)):
        gaps = Place((n * (inner + 3), inner + 3, 1), 2)
        some = [place, (gaps, place, place), (place, gaps, gaps)] if plan.tier == Tier.COLUMNS_STAGED else [place]
        for kind in kinds:
            for where in some:
                backward(runner, function, (3, n, inner), types, kind, where, given)


def growing(n: int, inner: int, device: str) -> Tensor:
    """Columns of nine kinds: (9, n, inner), with `inner` adjacent columns of each kind."""
    at = torch.arange(n, device=device, dtype=F32).unsqueeze(1)
    noise = torch.randn(n, inner, device=device)
    rising = (at / n - 0.5) * 800
    spike = torch.where(at == torch.randint(n, (inner,), device=device), 300.0, -300.0)
    kinds = [
        rising + noise,
        -rising + noise,
        spike + noise,
        59 * (at % 13 == 7) + 40 * (at % 5 == 3) + noise,  # just below the rise at which a thread rescales its sum
        torch.where(at < n // 2, -torch.inf, noise + 100),
        torch.where(at == n - 1, torch.inf, noise),
        torch.where(at == n // 2, torch.nan, rising + noise),
        torch.full_like(noise, -torch.inf),
        torch.where(at % 2 == 0, 3e38, -3e38) + noise,
    ]
    return torch.stack(kinds)


def check_late_maxima(runner: Runner, function: str, plan: Plan, dtype: torch.dtype = F32) -> None:
    """softmax or softmin of columns whose maximum comes late. Small results must be as exact as large ones."""
    inner, vector = {Access.PREDICATED: 19, Access.ALIGNED: 24}.get(plan.access, 7), 16 // dtype.itemsize
    for n in column_lengths(plan, vector, inner):
        x = growing(n, inner, runner.device)
        x = torch.cat([x, x.flip(0).roll(3, 2)])  # each kind of column also beside other kinds
        x = torch.cat([x, torch.where(torch.arange(inner, device=x.device) % 2 == 0, x, x.flip(0))])
        x = (-x if function == "softmin" else x).to(dtype)
        pitch = -(-inner // vector) * vector if plan.access != Access.SLAB_ALIGNED else inner
        place, given = Place((n * pitch, pitch, 1), vector), widen(plan, vector, inner)
        there, out = (operand(values, place, dtype) for values in (x, torch.full_like(x, torch.nan)))
        runner.call(function, there, [1], out, given)
        assert_defined(function, out, x, 1, f", plan {given}")
        if dtype is not F32:
            continue
        want = torch.softmax(-x.double() if function == "softmin" else x.double(), 1)
        small = (want > 1e-37) & (want < 1e-20)
        if n > 40:
            assert bool(small.any())
        torch.testing.assert_close(out[small].double(), want[small], rtol=2e-5, atol=0)
