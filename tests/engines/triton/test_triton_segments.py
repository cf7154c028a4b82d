"""Segments by the Triton engine: forced tiles on few items under Triton's interpreter and on a GPU, on a GPU also the
tiles of the engine, and kernels compiled for GPUs that are not here."""

from __future__ import annotations

from random import Random
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import onepass
import onepass.triton as engine
from lib.losses import assert_close
from lib.support import DTYPES, accumulator, maker, same, slow, thin, thin_product
from lib.triton import BF16, F32, F64, INF, NAN, all_resources, assert_no_spills, every_target, needs_triton
from onepass.segment_arithmetic import SegmentSpec, backward_arithmetic, forward_arithmetic
from onepass.triton.segments import SegmentTile

pytestmark = needs_triton
FUNCTIONS = ("softmax", "log_softmax", "logsumexp", "state")
# Tiles that cut rows of more than 16 items into at most three parts; and that have a row of more than 8, each part in a
# program, in several launches.
SHARED = SegmentTile(2, 4, 8, 4, 16, 16, 3, 2, 4, 4, 1, 1000)
ALONE = SegmentTile(2, 8, 1, 1, 8, 16, 100, 1, 16, 1, 1, 9)
TILES = {"shared": SHARED, "own": None, "alone": ALONE}
LENGTHS = [3, 0, 17, 1, 60, 0, 8]


class Call(NamedTuple):
    x: Tensor
    offsets: Tensor
    order: Tensor | None
    bias: Tensor | None
    spec: SegmentSpec


def forward(call: Call, y: Tensor, tile: SegmentTile | None = None) -> Tensor:
    assert engine.launch_segment_forward(*call[:4], y, call.spec, tile=tile)
    return y


def backward(call: Call, grad: Tensor, y: Tensor, dx: Tensor, tile: SegmentTile | None = None) -> Tensor:
    x, offsets, order, bias, spec = call
    of_logsumexp = (x, offsets, order, bias) if spec.function == "logsumexp" else (None, offsets, order, None)
    assert engine.launch_segment_backward(grad, y, *of_logsumexp, dx, spec, tile=tile)
    return dx


def offsets_of(lengths: list[int], like: Tensor | str, dtype: torch.dtype = torch.int64) -> Tensor:
    device = like if isinstance(like, str) else like.device
    return torch.tensor([0, *lengths]).cumsum(0).to(dtype).to(device)


def drawn_order(items: int, offsets: Tensor) -> Tensor:
    return torch.randperm(items, generator=torch.Generator().manual_seed(5)).to(offsets)


def result_of(call: Call) -> Tensor:
    """Where a result goes, full of what no result is."""
    x, spec = call.x, call.spec
    shape = list(x.shape)
    if spec.reduces:
        shape[spec.dim] = call.offsets.shape[0] - 1
    wide = accumulator(x.dtype) if spec.function == "state" else x.dtype
    return x.new_full([2, *shape] if spec.function == "state" else shape, 777.0, dtype=wide)


def check(runs: Any, call: Call, tile: SegmentTile | None = None) -> Tensor:
    """Runs a call and its gradient, compares them with the arithmetic in float64, and gives the result."""
    x, offsets, order, bias, spec = call
    note = f"{list(x.shape)} {x.stride()} {spec}"
    order = None if order is None else order.long()
    wide = x.double(), offsets, order, None if bias is None else bias.double()
    got, want = runs.run(forward, call, result_of(call), tile), forward_arithmetic(*wide, spec)
    assert_close(got, want, x.dtype if got.dtype is x.dtype else F32, note)
    if spec.function == "state":
        return got
    y = want.to(accumulator(x.dtype) if spec.reduces else x.dtype)
    grad = maker(y.dtype, x.device.type, 3)(*y.shape)
    dx = runs.run(backward, call, grad, y, torch.full_like(x, 777.0), tile)
    given = (wide[0], offsets, order, wide[3]) if spec.reduces else (None, offsets, order, None)
    exact = backward_arithmetic(grad.double(), y.double(), *given, spec._replace(dtype=F64))
    assert_close(dx, exact, x.dtype, note)
    return got


# By forced tiles ------------------------------------------------------------------------------------------------------


@thin_product(19, function=FUNCTIONS, dtype=DTYPES, tile=TILES)
def test_functions_and_dtypes(runs, function, dtype, tile):
    x = maker(dtype, runs.device)(sum(LENGTHS), 2)
    check(runs, Call(x, offsets_of(LENGTHS, x), None, None, SegmentSpec(0, function)), TILES[tile])


@pytest.mark.parametrize("seed", thin(range(60), 20))
def test_random_calls(runs, seed):
    """Any lengths, dims, strides, dtypes, operands and tiles."""
    random = Random(seed)
    dtype, function = random.choice(DTYPES), FUNCTIONS[seed % 4]
    lengths = [random.choice((0, 1, 5, 9, random.randrange(90))) for _ in range(random.randrange(1, 9))] + [1]
    offsets = offsets_of(lengths, runs.device, random.choice((torch.int32, torch.int64)))
    shape = [random.randrange(1, 5) for _ in range(random.randrange(3))]
    dim = random.randrange(len(shape) + 1)
    shape.insert(dim, sum(lengths))

    def made(dtype: torch.dtype = dtype) -> Tensor:
        turned = random.sample(range(len(shape)), len(shape))
        x = maker(dtype, runs.device, random.randrange(100))(*(shape[d] + 1 for d in turned))
        return x.permute([turned.index(d) for d in range(len(shape))])[tuple(slice(1, None) for _ in shape)]

    x, bias = made(), random.choice((None, made(), made(accumulator(dtype))))
    order = random.choice((None, drawn_order(sum(lengths), offsets)))
    spec = SegmentSpec(dim, function, random.choice((1.0, -0.7)))
    check(runs, Call(x, offsets, order, bias, spec), random.choice((SHARED, ALONE)))


@pytest.mark.parametrize("function", ["logsumexp", *(slow(name) for name in FUNCTIONS if name != "logsumexp")])
def test_special_values(runs, function):
    """Rows that are cut have them where short ones have."""
    x = maker(F32, runs.device)(9 * 40)
    for k, values in enumerate(([INF], [NAN], [-INF], [INF, -INF], [NAN, INF])):
        for at, value in enumerate(values):
            x[40 * k + 23 * at + 3] = value
    x[5 * 40 : 6 * 40], x[6 * 40 : 6 * 40 + 20], x[7 * 40 : 8 * 40] = -INF, -INF, NAN
    for lengths in ([40] * 9, [8] * 45) if function != "logsumexp" else ([40] * 9,):
        call = Call(x, offsets_of(lengths, x), None, None, SegmentSpec(0, function))
        got = runs.run(forward, call, result_of(call), SHARED)
        want = forward_arithmetic(x.double(), call.offsets, None, None, call.spec)
        if function == "state":  # a sum beside an infinite or no maximum means nothing
            got, want = got[0], want[0]
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("function", ["logsumexp", *(slow(name) for name in ("softmax", "state"))])
@pytest.mark.parametrize(
    "offsets", [[30, 95, -1, 95, 0, 90], *(slow(t) for t in ([0, -5, 10**12, 20, 90], [90, 40, 0], [70, 8]))]
)
def test_wrong_offsets_write_nothing_else(runs, function, offsets):
    for order in (None, torch.arange(90, device=runs.device) * 7 - 100):
        x = maker(F32, runs.device)(90)
        spec = SegmentSpec(0, function)
        call = Call(x, torch.tensor(offsets, device=runs.device), order, None, spec)
        y = result_of(call)
        beside = torch.cat((y.flatten(), y.new_full((200,), 777.0))).roll(100)
        inside = beside[100 : 100 + y.numel()].view(y.shape)
        made = runs.run(forward, call, inside, SHARED)
        whole = made.new_empty(0).set_(made.untyped_storage(), 0, beside.shape)
        assert (whole[:100] == 777).all()
        assert (whole[100 + y.numel() :] == 777).all()


def _wide(call: Call, y: Tensor) -> Tensor:
    """By indices of 64 bits."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(engine.segments, "_MOST_NARROW", 0)
        return forward(call, y, SHARED)


@pytest.mark.parametrize("function", ["softmax", slow("state")])
def test_indices_of_64_bits(runs, function):
    x, offsets = maker(F32, runs.device)(45), offsets_of([3, 0, 40, 2], runs.device)
    call = Call(x, offsets, drawn_order(45, offsets), None, SegmentSpec(0, function))
    assert same(runs.run(_wide, call, result_of(call)), runs.run(forward, call, result_of(call), SHARED))


def _invariant(call: Call, y: Tensor) -> Tensor:
    with onepass.batch_invariant():
        return forward(call, y)


@pytest.mark.parametrize("function", [slow("softmax"), slow("logsumexp")])
def test_a_segment_has_the_bits_that_it_has_alone(runs, function):
    lengths = [5, 0, 2900, 33, 400]
    x, spec = maker(F32, runs.device)(sum(lengths), 2), SegmentSpec(0, function)
    call = Call(x, offsets_of(lengths, x), None, None, spec)
    whole = runs.run(_invariant, call, result_of(call))
    for s, (length, begin) in enumerate(zip(lengths, call.offsets.tolist(), strict=False)):
        if length:
            alone = Call(x[begin : begin + length, 1].contiguous(), offsets_of([length], x), None, None, spec)
            beside = whole[s : s + 1] if spec.reduces else whole[begin : begin + length]
            assert same(runs.run(_invariant, alone, result_of(alone)), beside[:, 1])


# Through the operators ------------------------------------------------------------------------------------------------


def _call(x: Tensor, offsets: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    x = x.detach().requires_grad_()
    y = onepass.segment_softmax(x, offsets, engine="triton")
    return y.detach(), torch.autograd.grad(y, x, grad)[0]


def test_a_call_with_a_gradient(interpreting):
    x, grad, offsets = maker(BF16)(20, 3), maker(BF16, seed=3)(20, 3), torch.tensor([0, 4, 4, 20])
    leaf = x.detach().requires_grad_()
    want = onepass.segment_softmax(leaf, offsets)
    got, dx = interpreting(_call, x, offsets, grad)
    assert_close(got, want.detach(), BF16)
    assert_close(dx, torch.autograd.grad(want, leaf, grad)[0], BF16)


# By the tiles of the engine -------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("heads", [(), (3,), (8,), (70,)], ids=str)
@pytest.mark.parametrize("lengths", ["short", "mixed", "one huge", "long"])
def test_lengths(gpu, lengths, heads, function):
    of = {
        "short": [k % 9 for k in range(30000)],
        "mixed": [k * k % 1777 for k in range(300)],
        "one huge": [k % 40 for k in range(2000)] + [2_000_003] + [k % 40 for k in range(2000)],
        "long": [30001, 70000, 1, 0, 50000],
    }[lengths]
    of = of if not heads else [k // 8 for k in of]
    for dtype in (F32, BF16):
        x = maker(dtype, gpu.device)(sum(of), *heads)
        check(gpu, Call(x, offsets_of(of, x), None, None, SegmentSpec(0, function)))


def _compile(
    function: str, asked: bool, mean: int, heads: tuple[int, ...], dtype: torch.dtype, backend: str, arch: Any
) -> Any:
    """The resources, per thread, of the kernels that a call or, if asked for, its gradient would launch."""
    x = torch.empty(100_000, *heads, dtype=dtype)
    offsets = torch.zeros(100_000 // mean + 1, dtype=torch.int64)
    call = Call(x, offsets, None, None, SegmentSpec(0, function))
    y = result_of(call)
    if asked and function == "logsumexp":
        y = y.to(accumulator(dtype))
    launch = (lambda: backward(call, y, y, x)) if asked else (lambda: forward(call, y))
    return all_resources(launch, backend, arch, engine.segments)


SIZES = [(20, (), F32), (4, (8,), BF16), (5000, (), F64), (200, (), BF16), (30, (64,), F32)]
COMPILED = [(function, asked, *size) for size in SIZES for function in FUNCTIONS[::2] for asked in (True, False)]


@every_target("function asked mean heads dtype", COMPILED, 20)
def test_compiles_without_spills(compiling, backend, arch, function, asked, mean, heads, dtype):
    found = compiling(_compile, function, asked, mean, heads, dtype, backend, arch)
    assert len(found) == (2 if asked and function == "logsumexp" else 3)
    for kernel in found:
        assert_no_spills(kernel, backend)
