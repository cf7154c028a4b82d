"""The suite `sharded`: softmax over rows that are split over ranks, beside DTensor and loss_parallel.

The run starts a process for each rank. The process of the run itself is not a rank: it shows what rank 0 reports, and
ends all ranks when one fails. The ranks run the cases together. They agree on every error and on every time (the
longest among the ranks), so that all of them make the same calls.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from time import perf_counter_ns
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from onepass.tools.bench import timing
from onepass.tools.bench.cases import Case
from onepass.tools.bench.correctness import TOLERANCE
from onepass.tools.bench.progress import Progress
from onepass.tools.bench.provider import Call, Provider, move_bytes
from onepass.tools.bench.results import Results, Row
from onepass.tools.bench.runner import DeviceLost, Runner, _Entry
from onepass.tools.bench.sharded_cases import ShardedCase
from onepass.tools.bench.sharded_providers import Part, ShardProvider, gather, providers, slowest
from onepass.tools.bench.suite_runner import SuiteRunner

SILENCE = 150.0  # seconds without a word from any rank, after which all are ended
COLLECTIVE = timedelta(seconds=120)  # how long a rank waits for the others
GRACE = 20.0  # seconds for the ranks to end by themselves
CHECKED = 1 << 22  # elements of a shard that are compared with the definition
_OUT_OF_MEMORY = "skipped: out of memory"

Known = Callable[[], dict[str, Provider]]


# A rank


class Lockstep(timing.Cuda):
    """The clocks of one GPU among several. Each call begins when all GPUs have reached it."""

    def __init__(self, device: torch.device):
        self.one = torch.ones(1, device=device)
        dist.all_reduce(self.one)  # the first one sets up the connections
        super().__init__(device)

    def meet(self) -> None:
        dist.all_reduce(self.one, dist.ReduceOp.MAX)

    def slowest(self, times: list[float]) -> list[float]:
        return slowest(times)


def alternate(calls: Mapping[str, Call], budget: timing.Budget) -> dict[str, timing.Stats]:
    """timing.alternate of all ranks together."""

    def clock(call: Call) -> float:
        dist.barrier()
        start = perf_counter_ns()
        call()
        return (perf_counter_ns() - start) * 1e-3

    counts = {}
    for name, call in calls.items():
        each = min(slowest([clock(call) for _ in range(3)]))
        for _ in range(int(budget.warmup * 1e6 / each)):
            call()
        counts[name] = budget.samples(each * 1e-6)
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for name in timing.schedule(counts):
        samples[name].append(clock(calls[name]))
    return {name: timing.summarise(slowest(times)) for name, times in samples.items()}


class RankRunner(SuiteRunner):
    """The run of one rank."""

    def make_clocks(self) -> timing.Cuda | None:
        clocks = Lockstep(self.device)
        clocks.spin_up()
        return clocks

    def _time_cpu(self, entries: Sequence[_Entry], copy: Call | None) -> float | None:
        self.progress.status(f"timing {len(entries)} in turns")
        stats = alternate({entry.row.provider: entry.call for entry in entries}, self.budget)
        for entry in entries:
            entry.set_times(stats[entry.row.provider], None, self.judge)
        return None

    @contextmanager
    def _report_errors(self, entry: _Entry) -> Iterator[None]:
        """If a provider fails on one rank, it fails on all."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            self._recover(entry, error)
            own: str | None = _OUT_OF_MEMORY
        except Exception as error:
            own = f"raised: {self._recover(entry, error)}"
        else:
            own = entry.row.error
        errors = gather(own)
        first = next((f"{text} (rank {rank})" for rank, text in enumerate(errors) if text), None)
        if first:
            super()._fail(entry, errors[0] if len(set(errors)) == 1 else first)

    def _fail(self, entry: _Entry, error: str) -> None:
        entry.row.error = error  # _report_errors reports it when all ranks know of it

    def _new_row(self, provider: Provider, case: Case, dtype: str) -> Row:
        assert isinstance(case, ShardedCase)
        row = super()._new_row(provider, case, dtype)
        row.world_size = case.ranks
        return row

    def make(self, case: Case, dtype: str, generator: torch.Generator) -> Part:
        assert isinstance(case, ShardedCase)
        rank, (rows, columns), device = dist.get_rank(), case.shape, self.device
        own = case.columns(rank)

        def normal(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=getattr(torch, dtype), device=device).normal_(generator=generator)

        part = None
        try:
            target = grad = None  # targets, and gradients of whole rows, are the same on all ranks
            if case.function == "cross_entropy":
                target = torch.randint(0, columns, (rows,), device=device, generator=generator)
            elif case.function == "logsumexp" and case.direction == "backward":
                grad = normal(rows)
            generator.manual_seed(self.seed * case.ranks + rank + 1)
            x = normal(rows, len(own))
            if case.direction == "backward" and target is None and grad is None:
                grad = normal(rows, len(own))
            checked = max(1, min(rows, CHECKED // max(1, len(case.columns(0)))))
            chosen = torch.linspace(0, rows - 1, checked, device=device).long()
            part = Part(case, x, grad, target, own.start, chosen)
        except torch.OutOfMemoryError:
            pass
        if not all(gather(part is not None)):
            raise torch.OutOfMemoryError
        assert part is not None
        return part

    def limit(self, data: Part) -> Call:
        moves = data.case.moves
        return move_bytes(data.x, moves * data.x.nbytes, 2 if moves == 3 else 1)

    def expect(self, data: Part) -> tuple[Tensor, Tensor]:
        return expected(data)

    def calls(self, provider: ShardProvider, data: Part) -> list[Call]:
        return provider.calls(data)

    def compare(self, provider: ShardProvider, data: Part, got: Any, expected: tuple[Tensor, Tensor]) -> str | None:
        """The tolerance of a gradient includes the roundings of the result from which it is computed."""
        dtype, phase = data.x.dtype, data.case.phase
        (right, magnitude), ours = expected, provider.local(got, data).detach()
        has_rows = ours.dim() > 0
        shape = [len(data.x) if has_rows else 0, *right.shape[1:]][: right.dim()]
        made = torch.float32 if phase in ("state", "gradient_sum") and dtype.itemsize < 4 else dtype
        if list(ours.shape) != shape or ours.dtype != made:
            return f"the result is {ours.dtype} of shape {list(ours.shape)}"
        tolerance = TOLERANCE[str(dtype).removeprefix("torch.")] * (8 if provider.rounds_steps else 1)
        share = (1 + tolerance) ** (1 + (data.case.direction == "backward")) - 1
        least = torch.finfo(made).tiny * torch.finfo(made).eps  # the smallest number above 0
        error = ((ours[data.rows] if has_rows else ours).double() - right).abs()
        worst = float((error / (share * magnitude + least)).max())
        return None if worst <= 1 else f"an error of {worst:.1e} times what is allowed"


def expected(part: Part) -> tuple[Tensor, Tensor]:
    """(expected result of the rows that are checked, in float64; the magnitudes of its terms).

    A loss is computed from all rows.
    """
    case, rows = part.case, part.rows
    function, phase, backward = case.function, case.phase, case.direction == "backward"

    def over_ranks(t: Tensor, how: Any = dist.ReduceOp.SUM) -> Tensor:
        if not phase:
            dist.all_reduce(t, how)
        return t

    def whole(x: Tensor) -> tuple[Tensor, Tensor]:
        m = over_ranks(x.amax(1, keepdim=True), dist.ReduceOp.MAX)
        return m, over_ranks((x - m).exp().sum(1, keepdim=True))

    def targets(x: Tensor, target: Tensor) -> Tensor:
        """1 at the targets among the columns of this rank."""
        return ((target - part.start).unsqueeze(1) == torch.arange(x.shape[1], device=x.device)).double()

    if part.target is not None and not backward:
        total = part.x.new_zeros((), dtype=torch.float64)
        for some in torch.arange(len(part.x), device=part.x.device).split(len(rows)):
            x = part.x[some].double()
            m, l = whole(x)
            picked = over_ranks((x * targets(x, part.target[some])).sum(1))
            total += (m + l.log()).sum() - picked.sum()
        loss = total / len(part.x)
        return loss, loss.abs()
    x = part.x[rows].double()
    m, l = whole(x)
    y, lse = (x - m).exp() / l, (m + l.log()).squeeze(1)
    if not backward:
        if phase == "state" or function == "logsumexp":
            return lse, lse.abs().clamp(min=1)
        right = y if function == "softmax" else x - lse.unsqueeze(1)
        return right, right.abs() if function == "softmax" else right.abs().clamp(min=1)
    if part.target is not None:
        of = targets(x, part.target[rows])
        return (y - of) / len(part.x), (y + of) / len(part.x)
    assert part.grad is not None
    g = part.grad[rows].double()
    if function == "logsumexp":
        g = g.unsqueeze(1)
        return g * y, g.abs() * y
    terms = g * y if function == "softmax" else g
    total, size = (over_ranks(t.sum(1, keepdim=True)) for t in (terms, terms.abs()))
    if phase == "gradient_sum":
        return total, size
    if function == "softmax":
        return y * (g - total), y * (g.abs() + size)
    return g - y * total, g.abs() + y * size


class _Report(Progress):
    """A Progress that sends everything to the process of the run, which shows it."""

    def __init__(self, send: Callable[[Any], None]):
        super().__init__()
        for name in ("start_case", "retry", "status", "finish_case", "say"):
            setattr(self, name, partial(self._send, send, name))

    @staticmethod
    def _send(send: Callable[[Any], None], name: str, *given: Any) -> None:
        send((name, *given))


@dataclass(frozen=True)
class _Plan:
    """The arguments of every rank."""

    kind: str
    ranks: int
    port: int
    threads: int
    known: Known
    names: tuple[str, ...]
    cases: tuple[tuple[Case, str], ...]
    options: dict[str, Any]


def _work(rank: int, plan: _Plan, pipe: Connection) -> None:
    """A rank, in a process of its own."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the run ends its ranks
    try:
        _run_rank(rank, plan, pipe)
        pipe.send(("done",))
    except BaseException as error:
        text = (str(error).strip() or repr(error)).splitlines()[0]
        pipe.send(("failed", f"{type(error).__name__}: {text}"))
    os._exit(0)  # without waiting for other ranks


def _run_rank(rank: int, plan: _Plan, pipe: Connection) -> None:
    on_gpu = plan.kind == "cuda"
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(plan.threads)
    store = dist.TCPStore("127.0.0.1", plan.port, is_master=False, timeout=COLLECTIVE)
    group: dict[str, Any] = {"store": store, "rank": rank, "world_size": plan.ranks, "timeout": COLLECTIVE}
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None, **group)
    known = plan.known()
    progress = _Report(pipe.send) if rank == 0 else Progress()
    RankRunner(device, [known[name] for name in plan.names], progress=progress, **plan.options).run(plan.cases)
    dist.destroy_process_group()


# The run


class ShardedRunner(Runner):
    """A run whose cases run on several ranks. This process collects the results and shows them."""

    def __init__(
        self, device: torch.device, providers: Sequence[Provider], ranks: int, known: Known = providers, **options: Any
    ):
        self.ranks, self.known = ranks, known
        self.options = {name: value for name, value in options.items() if name != "progress"}  # of each rank
        super().__init__(device, providers, **options)
        on_gpu = device.type == "cuda"
        about: dict[str, Any] = {"world_size": ranks, "backend": "nccl" if on_gpu else "gloo"}
        if on_gpu:
            about["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
            about["devices"] = [torch.cuda.get_device_name(rank) for rank in range(ranks)]
        self.results.environment.update(about)

    def make_clocks(self) -> timing.Cuda | None:
        return None  # the ranks have the clocks

    def run(self, cases: Sequence[tuple[Case, str]]) -> Results:
        """Raises DeviceLost if a rank fails or none answers."""
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        threads, names = max(1, torch.get_num_threads() // self.ranks), tuple(p.name for p in self.providers)
        about = self.device.type, self.ranks, server.port, threads, self.known, names, tuple(cases)
        plan = _Plan(*about, self.options)
        try:
            for name, *given in _start(plan):
                if name == "finish_case":
                    self._keep(*given)
                getattr(self.progress, name)(*given)
        finally:
            if self.judge:
                timing.mark_disturbed(self.results.rows)
        return self.results

    def _keep(self, rows: list[Row]) -> None:
        """Keeps the rows of a case. They replace its earlier rows if it was timed again."""
        every, key = self.results.rows, rows[0].key()
        at = next((i for i, row in enumerate(every) if row.key() == key), len(every))
        every[at:] = [*rows, *(row for row in every[at:] if row.key() != key)]


def _start(plan: _Plan) -> Iterator[tuple[Any, ...]]:
    """Starts the ranks and yields their messages. All ranks have ended afterwards."""
    # A fork server loads torch once for all ranks. A process that has looked for a GPU, as an import may do, cannot
    # fork.
    context: Any = get_context("spawn" if plan.kind == "cuda" else "forkserver")
    if plan.kind == "cpu":
        context.set_forkserver_preload([__name__])
    waiting: dict[Any, int] = {}  # the rank at the other end of each pipe
    processes: list[Any] = []
    try:
        for rank in range(plan.ranks):
            pipe, end = context.Pipe(duplex=False)
            process = context.Process(target=_work, args=(rank, plan, end), daemon=True)
            process.start()
            end.close()
            waiting[pipe] = rank
            processes.append(process)
        while waiting:
            ready = wait(list(waiting), SILENCE)
            if not ready:
                raise DeviceLost(f"no rank has answered for {SILENCE:.0f} seconds")
            for sender in ready:
                assert isinstance(sender, Connection)
                rank = waiting[sender]
                try:
                    what = sender.recv()
                except EOFError:
                    processes[rank].join()
                    raise DeviceLost(f"rank {rank} ended with exit status {processes[rank].exitcode}") from None
                if what[0] == "failed":
                    raise DeviceLost(f"rank {rank}: {what[1]}")
                if what[0] == "done":
                    del waiting[sender]
                else:
                    yield what
        for process in processes:
            process.join(GRACE)
    finally:
        for process in processes:
            process.kill()
            process.join()
