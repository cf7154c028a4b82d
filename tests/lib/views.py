"""Random views by seed: operands with any strides and offsets, in memory that must not change around the results."""

import math
import random
from collections.abc import Sequence

import torch
from torch import Tensor

from lib.gradients import gradient
from lib.plan_tables import BF16, F16, F32, F64, Place
from lib.plans import Runner, amid, assert_gradient, assert_untouched, operand
from lib.support import FUNCTIONS, assert_defined

PAIRS = [(F32, F32), (BF16, BF16), (F16, F16), (F64, F64), (BF16, F32), (F16, F32), (F32, BF16)]


def placed(rng: random.Random, sizes: list[int]) -> Place:
    """A place with any order of dims, any gaps and any offset."""
    strides, step = [0] * len(sizes), rng.choice((1, 1, 1, 2, 3))
    for d in rng.sample(range(len(sizes)), len(sizes)):
        strides[d] = step
        step = step * sizes[d] + rng.choice((0, 0, 0, 1, 4, 8))
    return Place(tuple(strides), rng.choice((0, 0, 1, 3, 4, 8)))


def drawn(rng: random.Random) -> list[int]:
    sizes = [rng.choice((1, 2, 3, 4, 5, 7, 8, 16, 33)) for _ in range(rng.randint(2, 5))]
    if rng.random() < 0.3:
        sizes[rng.randrange(len(sizes))] = rng.randint(40, 700)
    while math.prod(sizes) > 40_000:
        sizes[sizes.index(max(sizes))] //= 2
    return sizes


def check_gradient(
    runner: Runner, function: str, g: Tensor, saved: Tensor, lse: Tensor | None, dims: Sequence[int], dx: Tensor
) -> None:
    runner.gradient(function, g, saved, lse, dims, dx)
    if lse is not None:
        for dim in sorted(d % saved.dim() for d in dims):
            g, lse = g.unsqueeze(dim), lse.unsqueeze(dim)
    assert_gradient(dx, *gradient(function, g, saved, dims, lse))


def check_views(runner: Runner, seed: int) -> None:
    """Checks a random call and its gradient."""
    rng = random.Random(seed)
    torch.manual_seed(seed)

    def randn(sizes: list[int], place: Place, dtype: torch.dtype) -> Tensor:
        return operand(torch.randn(sizes, device=runner.device, dtype=F64).mul_(2), place, dtype)

    sizes = drawn(rng)
    dims = rng.sample(range(len(sizes)), rng.choice((1, 1, 2, len(sizes))))
    x_type, y_type = PAIRS[seed % len(PAIRS)]
    function = FUNCTIONS[seed // len(PAIRS) % 4]
    reduces = function == "logsumexp"
    if reduces and x_type is F32:
        y_type = F32
    results = [size for d, size in enumerate(sizes) if d not in dims] if reduces else sizes
    alike = placed(rng, sizes)  # in half of the cases all tensors have this place
    place = [
        alike if rng.random() < 0.5 and not reduces else placed(rng, size) for size in (sizes, results, results, sizes)
    ]
    x = randn(sizes, place[0], x_type)
    if rng.random() < 0.2:
        one = rng.randrange(len(sizes))
        x = x.narrow(one, 0, 1).expand(sizes)
    memory, y = amid(7.0, results, place[1], y_type, runner.device)
    y.fill_(torch.nan)
    runner.call(function, x, dims, y)
    assert_defined(function, y, x if reduces else x.to(y_type), tuple(dims))
    g = randn(results, place[2], y_type)
    if rng.random() < 0.4:  # the upstream gradient of a sum over some dims
        for d in rng.sample(range(len(results)), rng.randint(0, len(results))):
            g = g.narrow(d, 0, 1)
        g = g.expand(results)
    memory_of_dx, dx = amid(7.0, sizes, place[3], x_type, runner.device)
    dx.fill_(torch.nan)
    check_gradient(runner, function, g, x if reduces else y, y if reduces else None, dims, dx)
    assert_untouched(memory, y, 7.0)
    assert_untouched(memory_of_dx, dx, 7.0)
