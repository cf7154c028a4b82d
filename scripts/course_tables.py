"""Makes the tables of the course (docs/course) for scripts/make_figures.py: from the gallery's headers, from results
files, and from arithmetic done here."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import geometric_mean as geomean

import torch

import onepass
from onepass.tools.bench.cases import SUITES, Case
from onepass.tools.bench.results import Row
from onepass.tools.gallery.occupancy import Gpu, occupancy
from onepass.tools.gallery.traffic import MINIMUM, predict_all
from onepass.tools.gallery.variants import VARIANTS, Count, Traffic

ROOT = Path(__file__).resolve().parent.parent
COURSE = ROOT / "docs" / "course"
NOT_MEASURED = "not measured"
Table = Callable[[Sequence[str], Sequence[Sequence[str]]], str]  # (head, body) -> Markdown


def sections() -> dict[str, str]:
    """The page and the anchor of each rung's section, whose heading is just the rung's name."""
    found = {}
    for page in sorted(COURSE.glob("*.md")):
        for name in re.findall(r"^## ([\w-]+)$", page.read_text(), re.M):
            if name in VARIANTS:
                found[name] = f"{page.name}#{name}"
    return found


class Measured:
    """Fractions of the limit's speed in a results file. The limit is a copy, or for a gradient an addition."""

    def __init__(self, rows: Sequence[Row]) -> None:
        usable = [r for r in rows if r.ok and r.copy_fraction and not r.disturbed]
        self.fractions = {(r.provider, r.case, r.dtype): r.copy_fraction or 0 for r in usable}
        self.providers = {r.provider for r in usable}

    def cell(self, name: str, case: str, dtype: str) -> str:
        of = self.fractions.get((name, case, dtype))
        return f"{of:.2f}" if of else "-"

    def cells(self, name: str, cases: Sequence[tuple[str, str]]) -> list[str]:
        """A cell for each case and dtype. If none was measured, the first cell says so."""
        found = [self.cell(name, *case) for case in cases]
        return found if set(found) != {"-"} else [NOT_MEASURED, *[""] * (len(cases) - 1)]

    def mean(self, name: str, cases: Sequence[tuple[str, str]]) -> float | None:
        """The geometric mean over the cases that were measured."""
        found = [of for case in cases if (of := self.fractions.get((name, *case)))]
        return geomean(found) if found else None


class Results:
    """The measurements of the gallery: of the suite powers-of-two, and of the suite course, which has the sizes that
    the CUDA rungs are made for."""

    def __init__(self, powers: Sequence[Row], course: Sequence[Row]) -> None:
        self.powers, self.course = Measured(powers), Measured(course)
        self.lengths = list(dict.fromkeys(r.case for r in powers))

    def of(self, name: str) -> tuple[Measured, list[tuple[str, str]]]:
        """(measurements that have a rung, its cases and dtypes): rows of float32, or the cases of the rung's kind."""
        if VARIANTS[name].computes == "rows":
            return self.powers, [(case, "float32") for case in self.lengths]
        return self.course, [(case.name, "float32") for case in course_cases(VARIANTS[name].computes)]

    def mean(self, name: str) -> float | None:
        measured, cases = self.of(name)
        return measured.mean(name, cases)

    def best(self, name: str) -> float | None:
        """The largest fraction of all cases in float32."""
        every = {**self.powers.fractions, **self.course.fractions}
        return max((of for (whose, _, dtype), of in every.items() if (whose, dtype) == (name, "float32")), default=None)


def course_cases(computes: str) -> list[Case]:
    """The cases of the suite course of one kind."""
    kinds = {("forward", 1): "rows", ("forward", 0): "columns", ("backward", 1): "gradient"}
    return [case for case in SUITES["course"].cases if kinds[case.direction, case.dims()[0]] == computes]


def tables(results: Results, table: Table) -> Iterator[tuple[str, Callable[[], str]]]:
    """The name of each table and what makes it."""
    yield "course-rungs", partial(_rungs, results, table)
    yield "course-sizes", partial(_sizes, results, table)
    yield "course-traffic", partial(_traffic, table)
    yield "course-overflow", partial(_overflow, table)
    yield "course-online", partial(_online, table)
    yield "course-occupancy", partial(_occupancy, table)
    yield "course-orders", partial(_orders, table)
    for name in VARIANTS:
        yield f"rung-{name}", partial(_rung, name, results, table)


def _rungs(results: Results, table: Table) -> str:
    at, body = sections(), []
    for name, variant in VARIANTS.items():
        header, mean = variant.header, results.mean(name)
        idea = re.findall(rf"{name}: (.*)\.\n", variant.source)[0]  # the first line of the header
        file = f"[{variant.file}](../../src/onepass/tools/gallery/{variant.file})"
        of = f"{mean:.2f}" if mean else NOT_MEASURED
        title = f"[{name}]({at[name]})" if name in at else name
        body.append([title, idea, str(header.traffic.reads), str(header.traffic.writes), of, file])
    return table(["rung", "idea", "reads", "writes", "of the limit", "file"], body)


def _sizes(results: Results, table: Table) -> str:
    """For each case and dtype of the suite course: the fractions of every rung in CUDA, and of onepass."""
    names = [name for name in VARIANTS if name.startswith("cuda")]
    names = [name for name in (*names, "onepass") if name in results.course.providers]
    if not names:
        return table(["matrix", "of the limit"], [["all of them", NOT_MEASURED]])
    body = [
        [case.name, dtype, *(results.course.cell(name, case.name, dtype) for name in names)]
        for case in SUITES["course"].cases
        for dtype in case.dtypes
    ]
    return table(["matrix", "dtype", *names], body)


def _rung(name: str, results: Results, table: Table) -> str:
    """Fractions of the limit's speed over the length of a row: what the traffic allows, and what was measured."""
    header, (measured, cases) = VARIANTS[name].header, results.of(name)
    minimum = Traffic(Count(2), Count(1)) if VARIANTS[name].computes == "gradient" else MINIMUM
    shapes = [tuple(map(int, re.findall(r"\d+", case)[:2])) for case, _ in cases]

    def allowed(traffic: Traffic) -> list[str]:
        return [f"{minimum.elements(*shape) / traffic.elements(*shape):.2f}" for shape in shapes]

    body = [[f"reads {header.traffic.reads}, writes {header.traffic.writes}: allowed", *allowed(header.traffic)]]
    if header.cached:
        body.append(["the same while a cache serves the rereads", *allowed(header.cached)])
    body.append(["measured", *measured.cells(name, cases)])
    limit = "an addition's" if minimum is not MINIMUM else "a copy's"
    made = table([f"of {limit} speed", *(" x ".join(map(str, shape)) for shape in shapes)], body)
    if measured is results.powers and name in results.course.providers:
        others = course_cases("rows")
        at = {dtype: [(case.name, dtype) for case in others] for dtype in ("float32", "bfloat16")}
        body = [[dtype, *results.course.cells(name, cases)] for dtype, cases in at.items()]
        head = [case.name.replace("x", " x ") for case in others]
        made += "\n\n" + table(["measured at other sizes", *head], body)
    return made


def _occupancy(table: Table) -> str:
    """What fits a multiprocessor of an H200, over the registers of a thread; and the bytes of one load per thread."""
    gpu, body = Gpu(132, 65536, 232448, 2048, 32, "90"), []
    for registers in (32, 64, 128, 255):
        threads = occupancy(gpu, registers, shared_memory=0, num_warps=8) * 8 * 32
        flight = [f"{threads * size / 1024:.0f} KB" for size in (4, 16)]
        body.append([str(registers), str(threads // 256), str(threads), *flight])
    head = ["registers a thread", "blocks", "threads", "in flight, one load of 4 bytes each", "of 16 bytes each"]
    return table(head, body)


def _traffic(table: Table) -> str:
    """Bytes for a matrix of 4096 x 4096 float32 and what they allow, in rising order of speed."""
    found = predict_all(onepass.explain((4096, 4096), device="h200"))
    names = ("naive", "naive-jit", "cuda-block", "cuda-online", "triton-row")
    body = [
        [name, p.reads_formula, p.writes_formula, f"{p.bytes / 1e6:.0f}", f"{p.ratio:.2f}", f"{p.copy_fraction:.2f}"]
        for name, p in sorted(found.items(), key=lambda item: -item[1].ratio)
        if name in names
    ]
    return table(["", "reads", "writes", "MB", "times a copy's bytes", "of a copy's speed"], body)


def _overflow(table: Table) -> str:
    """exp, sum and quotient in float32 of rows of three elements, without and with the maximum subtracted."""
    body = []
    for row in ([1.0, 2.0, 3.0], [87.0, 88.0, 89.0], [-201.0, -200.0, -199.0]):
        x = torch.tensor(row)
        for label, shifted in (("x", x), ("x - max", x - x.max())):
            e = shifted.exp()
            parts = e.tolist(), [e.sum()], (e / e.sum()).tolist()
            numbers = [", ".join(f"{v:.3g}" for v in part) for part in parts]
            body.append([", ".join(f"{v:g}" for v in row), label, *numbers])
    return table(["row", "exp of", "exponentials", "sum", "softmax"], body)


def _online(table: Table) -> str:
    """The pair (m, l) of an online loop after each element of a row."""
    m, l, body = float("-inf"), 0.0, []
    for x in (2.0, 0.0, 3.0, 1.0, 5.0, 4.0):
        larger = max(m, x)
        factor = torch.tensor(m - larger).exp().item()
        added = torch.tensor(x - larger).exp().item()
        l = l * factor + added
        m = larger
        body.append([f"{x:g}", f"{m:g}", f"{factor:.4f}", f"{added:.4f}", f"{l:.4f}"])
    return table(["x", "new m", "l is rescaled by exp(old m - new m)", "exp(x - m) is added", "new l"], body)


def _orders(table: Table) -> str:
    """The merges of three parts of a row in two orders, and the row as a whole."""
    parts = ([2.0, 0.0], [3.0, 1.0], [5.0, 4.0])
    a, b, c = (onepass.state(torch.tensor(p, dtype=torch.float64)) for p in parts)
    left, right = onepass.merge(a, b), onepass.merge(b, c)
    whole = onepass.state(torch.tensor([v for p in parts for v in p], dtype=torch.float64))
    rows = (
        ("a = state of 2, 0", a),
        ("b = state of 3, 1", b),
        ("c = state of 5, 4", c),
        ("merge(a, b)", left),
        ("merge(merge(a, b), c)", onepass.merge(left, c)),
        ("merge(b, c)", right),
        ("merge(a, merge(b, c))", onepass.merge(a, right)),
        ("state of 2, 0, 3, 1, 5, 4", whole),
    )
    return table(["", "m", "l"], [[label, f"{s.m:.0f}", f"{s.l:.6f}"] for label, s in rows])
