"""A long run of changing calls: functions, shapes, dtypes, strides and offsets, on three streams and in CUDA graphs.

    python scripts/soak.py [--calls 1000000] [--seconds S] [--seed 0] [--every 200] [--json FILE] [--device cuda]

Inputs come from a pool that is made beforehand, with the float64 result of each. Every 200th result is checked against
that, memory 20 times in a run. The seed says which calls are made, in which order. Ends with status 1 at the first
wrong result or growth of memory. On a CPU there are no streams and no graphs.
"""

import argparse
import contextlib
import json
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

import torch
from torch import Tensor

import onepass
from onepass import reference

FUNCTIONS = ("softmax", "log_softmax", "softmin", "logsumexp")
F32, F64, F16, BF16 = torch.float32, torch.float64, torch.float16, torch.bfloat16
TYPES = [(F32, F32), (BF16, BF16), (F16, F16), (BF16, F32), (F16, F32), (F64, F64)]
TOLERANCE = {F64: 1e-13, F32: 2e-6, F16: 2e-3, BF16: 1.6e-2}
LENGTHS = [1, 3, 8, 21, 33, 64, 100, 128, 197, 256, 781, 1000, 1024, 1025, 2176, 4097, 8192, 16384, 32000, 50257]
LONG = [(1, 300_001), (1, 2**20), (3, 131_072), (8, 128_256), (2, 400_000)]  # rare: they take the GPU 5 us and more
ELEMENTS = 2**16  # elements of an input, except for the long ones
STREAMS, BATCH, GRAPHS, MEMBERS = 3, 16, 6, 8
GROWTH = 64 * 2**20  # bytes by which memory may grow: 64 per call in a million calls


class Trouble(Exception):
    """An error that ends a run."""


@dataclass(frozen=True)
class Layout:
    """The sizes, strides and offset of an input in its buffer."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dim: int | tuple[int, ...]

    def view(self, buffer: Tensor) -> Tensor:
        return buffer.as_strided(self.sizes, self.strides, self.offset)

    def room(self) -> int:
        return self.offset + 1 + sum((n - 1) * stride for n, stride in zip(self.sizes, self.strides, strict=True))


def layout(rng: random.Random, rows: int, n: int) -> Layout:
    kind = rng.choice(["plain", "plain", "offset", "offset", "sliced", "apart", "columns", "middle", "all"])
    shift = rng.randrange(1, 9)
    if kind == "sliced":  # a slice of a wider tensor
        return Layout((rows, n), (n + rng.randrange(1, 9), 1), shift, 1)
    if kind == "apart" and n < 4096:  # elements with gaps between them
        return Layout((rows, n), (2 * n, 2), shift, -1)
    if kind == "columns" and n > 1:
        return Layout((n, rows), (rows, 1), 0, 0)
    if kind == "middle" and rows % 2 == 0:
        return Layout((2, n, rows // 2), (n * rows // 2, rows // 2, 1), 0, 1)
    if kind == "all" and rows < 16:
        return Layout((rows, n), (n, 1), 0, (0, 1))
    return Layout((rows, n), (n, 1), shift if kind == "offset" else 0, -1)


class Case:
    """A call of the pool: two inputs of one layout, and the expected result of each in float64."""

    def __init__(self, rng: random.Random, device: str, rows: int, n: int):
        self.function = rng.choice(FUNCTIONS)
        self.lse = self.function == "logsumexp"
        x_type, y_type = rng.choice(TYPES)
        self.x_type, self.y_type = x_type, x_type if self.lse else y_type
        self.layout, self.device = layout(rng, rows, n), device
        generator = torch.Generator().manual_seed(rng.randrange(2**31))
        self.inputs = []
        for _ in range(2):
            values = torch.randn(self.layout.room(), generator=generator) * 3
            if rng.random() < 0.2:  # rows with special values
                values[torch.randint(len(values), (3,), generator=generator)] = torch.tensor(
                    [-torch.inf, torch.inf, torch.nan]
                )
            self.inputs.append(self.layout.view(values.to(x_type).to(device)))
        self.expected = [getattr(reference, self.function)(x.to(self.y_type), self.layout.dim) for x in self.inputs]

    def __str__(self) -> str:
        at = self.layout
        types = f"{str(self.x_type)[6:]} -> {str(self.y_type)[6:]}"
        return f"{self.function} of {at.sizes}, strides {at.strides}, offset {at.offset}, dim {at.dim}, {types}"

    def scratch(self) -> Tensor:
        return self.layout.view(torch.zeros(self.layout.room(), dtype=self.x_type, device=self.device))

    def result(self) -> Tensor:
        return torch.empty_like(self.expected[0], dtype=self.y_type)

    def call(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        if self.lse:
            return onepass.logsumexp(x, self.layout.dim, out=out)
        dtype = self.y_type if self.y_type != self.x_type else None
        return getattr(onepass, self.function)(x, self.layout.dim, dtype=dtype, out=out)

    def wrong(self, got: Tensor, which: int) -> str | None:
        """What is wrong with the result of input number `which`, or None."""
        want, y = self.expected[which], got.double()
        bound = TOLERANCE[self.y_type]
        if self.function in ("log_softmax", "logsumexp"):
            limit = bound * want.abs().clamp(min=1)
        else:
            limit = bound * want.abs() + torch.finfo(self.y_type).smallest_normal
        good = (y == want) | (y.isnan() & want.isnan()) | ((y - want).abs() <= limit)
        if bool(good.all()):
            return None
        at = tuple((~good).nonzero()[0].tolist())
        return f"{int((~good).sum())} of {good.numel()} wrong, first at {at}: {y[at].item()!r}, not {want[at].item()!r}"


class Graph:
    """A CUDA graph of several cases, whose inputs change between its replays."""

    def __init__(self, cases: list[Case]):
        self.cases, self.now = cases, [0] * len(cases)
        self.inputs = [case.scratch() for case in cases]
        for x, case in zip(self.inputs, cases, strict=True):
            x.copy_(case.inputs[0])
            case.call(x)  # loads the kernels before the capture
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.results = [case.call(x) for x, case in zip(self.inputs, cases, strict=True)]

    def replay(self, member: int) -> None:
        """Replays the graph with the other input for one of its cases."""
        self.now[member] ^= 1
        self.inputs[member].copy_(self.cases[member].inputs[self.now[member]])
        self.graph.replay()


class Soak:
    """The pool, and a run over it."""

    def __init__(self, seed: int, device: str):
        self.rng, self.device, self.cuda = random.Random(seed), device, device.startswith("cuda")
        shapes = [(max(1, ELEMENTS // max(n, 32) // self.rng.choice([1, 2, 16])), n) for n in LENGTHS * 6]
        self.cases = [Case(self.rng, device, rows, n) for rows, n in shapes]
        often = len(self.cases)
        self.cases += [Case(self.rng, device, rows, n) for rows, n in LONG]
        self.pool = list(range(often)) * 8 + list(range(often, len(self.cases)))
        self.outs = [[case.result() for case in self.cases] for _ in range(STREAMS)]
        self.places = [[case.scratch() for case in self.cases] for _ in range(STREAMS)]
        self.streams = [torch.cuda.Stream(device) for _ in range(STREAMS)] if self.cuda else [None] * STREAMS
        self.graphs: list[list[Graph]] = [[] for _ in range(STREAMS)]  # each graph is replayed on one stream only
        for number in range(GRAPHS if self.cuda else 0):
            self.graphs[number % STREAMS].append(Graph([self.rng.choice(self.cases) for _ in range(MEMBERS)]))
        self.calls = self.graph_calls = self.checks = self.sequence = 0
        if self.cuda:
            torch.cuda.synchronize(device)  # all streams may use the pool now
        for at in range(STREAMS):  # so that later calls compile nothing and allocate no memory for the first time
            with self.on(at):
                for case in range(len(self.cases)):
                    for mode in (0.0, 0.5, 0.95):
                        self.check(self.cases[case], at, *self.call(case, at, 0, mode))
        self.calls = self.checks = self.looks = 0

    def on(self, at: int) -> Any:
        return torch.cuda.stream(self.streams[at]) if self.cuda else contextlib.nullcontext()

    def call(self, number: int, at: int, which: int, mode: float) -> tuple[Tensor, int]:
        """A call of case `number` on stream `at`, with a new result, with `out=`, or in place."""
        case = self.cases[number]
        self.calls += 1
        if mode < 0.5:
            return case.call(case.inputs[which]), which
        if mode < 0.9 or case.lse or case.x_type != case.y_type:
            return case.call(case.inputs[which], self.outs[at][number]), which
        place = self.places[at][number]
        place.copy_(case.inputs[which])
        return case.call(place, place), which

    def check(self, case: Case, at: int, got: Tensor, which: int) -> None:
        self.checks += 1
        words = case.wrong(got, which)
        if words:
            raise Trouble(f"call {self.calls}, stream {at}: {case}: {words}")

    def memory(self) -> dict[str, int]:
        """Bytes of this process on the host, of live tensors, and of memory that torch holds on the GPU."""
        with open("/proc/self/statm") as file:
            used = {"process": int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")}
        if self.cuda:
            torch.cuda.synchronize(self.device)
            used["tensors"] = torch.cuda.memory_allocated(self.device)
            used["reserved"] = torch.cuda.memory_reserved(self.device)
        return used

    def run(self, calls: int, seconds: float | None, every: int, note: Callable[[str], None]) -> dict[str, Any]:
        """Makes the calls. Returns the memory after a twentieth of them and at the end."""
        begin, due, step = time.perf_counter(), every, max(calls // 20, 1)
        first: dict[str, int] = {}
        while True:
            done = self.calls >= calls or bool(seconds and time.perf_counter() - begin > seconds)
            if done or self.calls >= step * (self.looks + 1):
                now = self.memory()
                first = first or now  # growth in the first twentieth is not counted
                for what, size in now.items():
                    if size - first[what] > (0 if what == "tensors" else GROWTH):
                        grown = f"{what} grew from {first[what]:,} to {size:,} bytes"
                        raise Trouble(f"call {self.calls}: memory: {grown}")
                self.looks += 1
                took = time.perf_counter() - begin
                note(f"{self.calls:>10,} calls  {self.checks:>7,} checks  {took:8.1f} s  {now}")
            if done:
                return {"memory_at_first": first, "memory_at_last": now}
            due = self.batch(due, every, calls)

    def batch(self, due: int, every: int, calls: int) -> int:
        """Makes some calls, or replays a graph, on one stream. Returns when the next check is due."""
        rng, at = self.rng, self.rng.randrange(STREAMS)
        with self.on(at):
            if self.graphs[at] and rng.random() < 0.3:
                graph, member = rng.choice(self.graphs[at]), rng.randrange(MEMBERS)
                graph.replay(member)
                self.calls += MEMBERS
                self.graph_calls += MEMBERS
                self.sequence = (self.sequence * 31 + member) % 2**61
                if self.calls >= due:
                    for k, case in enumerate(graph.cases):
                        self.check(case, at, graph.results[k], graph.now[k])
                    due += every
                return due
            for _ in range(min(BATCH, calls - self.calls)):
                number = self.pool[int(rng.random() * len(self.pool))]
                got, which = self.call(number, at, rng.randrange(2), rng.random())
                self.sequence = (self.sequence * 31 + number * STREAMS + at) % 2**61
                if self.calls >= due:
                    self.check(self.cases[number], at, got, which)
                    due += every
        return due


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=1_000_000, help="default a million")
    parser.add_argument("--seconds", type=float, help="stop after so long, if not done before")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=int, default=200, help="a check every so many calls (default 200)")
    parser.add_argument("--json", metavar="FILE", help="also write the summary into FILE")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args(arguments)
    if given.calls < 1 or given.every < 1:
        parser.error("--calls and --every are at least 1")
    record: dict[str, Any] = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "onepass": onepass.__version__,
        "torch": torch.__version__,
        "machine": torch.cuda.get_device_name(given.device) if given.device.startswith("cuda") else "CPU",
        "seed": given.seed,
        "every": given.every,
    }
    trouble, soak, begin = None, None, time.perf_counter()
    try:
        soak = Soak(given.seed, given.device)
        print(f"{len(soak.cases)} cases, {sum(map(len, soak.graphs))} graphs, made and checked", flush=True)
        begin = time.perf_counter()
        record |= soak.run(given.calls, given.seconds, given.every, lambda text: print(text, flush=True))
    except Trouble as error:
        trouble = str(error)
    except RuntimeError as error:
        trouble = f"call {soak.calls if soak else 0}: raised {error}"
    took = time.perf_counter() - begin
    if soak:
        made = {"calls": soak.calls, "graph_calls": soak.graph_calls, "checks": soak.checks, "sequence": soak.sequence}
        record |= {"cases": len(soak.cases), **made, "us_per_call": took / max(soak.calls, 1) * 1e6}
    record |= {"seconds": took, "trouble": trouble}
    if given.json:
        with open(given.json, "w") as file:
            json.dump(record, file, indent=1)
    if trouble:
        print(f"soak: {trouble}", file=sys.stderr)
        return 1
    print(
        f"{record['calls']:,} calls ({record['graph_calls']:,} in graphs), {record['checks']:,} checked, all right; "
        f"{took:.1f} s, {record['us_per_call']:.1f} us a call; no memory grew"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
