"""The CUDA kernel of rows over GPUs in the emulator: a process for each rank, all of which share their memory."""

import multiprocessing
import sys
import traceback
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from emulator import Emulator, missing
from lib.support import slow
from onepass import native

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())
# Elements of each rank. Of the five blocks of the emulated GPU a row of a gradient takes two, and one is left over.
SIZES = (9001, 1, 0)
ROWS = (1, 3)  # of calls one after another: the last turn of the second has fewer rows


class Ranks:
    """Ranks that share memory, where each call and each result is."""

    def __init__(self, count: int) -> None:
        size = native.rank_memory(count)
        self.memory = [torch.zeros(size + 16, dtype=torch.uint8).share_memory_() for _ in range(count)]
        self.memory = [t[-t.data_ptr() % 16 :][:size] for t in self.memory]
        self.faults = [torch.zeros(2, dtype=torch.int32).share_memory_() for _ in range(count)]

    def run(self, work: Callable[[int], None], ranks: Sequence[int] | None = None) -> None:
        """`work` of each rank, in a process of its own."""

        def entry(rank: int) -> None:
            try:
                work(rank)
            except BaseException:
                sys.exit(f"rank {rank}: {traceback.format_exc()}")

        context = multiprocessing.get_context("fork")
        started = [context.Process(target=entry, args=(rank,)) for rank in ranks or range(len(self.memory))]
        for process in started:
            process.start()
        for process in started:
            process.join()
        assert all(process.exitcode == 0 for process in started)


def shared(*tensors: Tensor) -> list[Tensor]:
    return [t.clone().share_memory_() for t in tensors]


@pytest.mark.parametrize("dtype", [slow(torch.float32), torch.bfloat16])
def test_forward_and_gradient(emulator: Emulator, dtype: torch.dtype) -> None:
    ranks, calls = Ranks(len(SIZES)), []
    for rows in ROWS:
        x = (torch.randn(rows, sum(SIZES)) * 4).to(dtype)
        g = torch.randn(x.shape).to(dtype)
        x[0, : SIZES[0]] = -torch.inf
        parts = [
            shared(*(t.contiguous() for t in each)) for each in zip(x.split(SIZES, 1), g.split(SIZES, 1), strict=True)
        ]
        results = [shared(torch.empty_like(part), torch.empty_like(part)) for part, _ in parts]
        calls.append((x, g, parts, results))

    def work(rank: int) -> None:
        emulator.draw.seed(rank)
        for _, _, parts, results in calls:
            (x, g), (y, dx) = parts[rank], results[rank]
            emulator.over_ranks("softmax", [x, y], ranks.memory, ranks.faults[rank], rank)
            emulator.over_ranks("softmax", [dx, y, g], ranks.memory, ranks.faults[rank], rank)

    ranks.run(work)
    error = 1e-6 if dtype is torch.float32 else 1e-2
    for x, g, _, results in calls:
        y, dx = (torch.cat(each, 1) for each in zip(*results, strict=True))
        want = x.double().softmax(1)
        torch.testing.assert_close(y.double(), want, rtol=error, atol=error / 100)
        y, g = y.double(), g.double()
        torch.testing.assert_close(dx.double(), y * (g - (g * y).sum(1, keepdim=True)), rtol=error, atol=error / 100)
    assert not any(fault.any() for fault in ranks.faults)


def test_ranks_that_do_not_come_or_differ(emulator: Emulator) -> None:
    x, y = shared(*(torch.randn(2, 3, 1000).bfloat16()))
    ranks = Ranks(2)
    ranks.run(lambda rank: emulator.over_ranks("softmax", [x, y], ranks.memory, ranks.faults[rank], rank, 0.1), [1])
    assert y.isnan().all()
    assert ranks.faults[1].tolist() == [1, 0]  # the first rank did not answer

    ranks = Ranks(2)
    results = shared(y, y)

    def work(rank: int) -> None:
        tensors = [x[: 3 - rank], results[rank][: 3 - rank]]
        emulator.over_ranks("softmax", tensors, ranks.memory, ranks.faults[rank], rank)
        emulator.over_ranks("softmax", tensors, ranks.memory, ranks.faults[rank], rank)  # which waits for none

    ranks.run(work)
    assert results[0].isnan().all()
    assert results[1][:2].isnan().all()
    assert [fault.tolist() for fault in ranks.faults] == [[2, 1], [2, 0]]
