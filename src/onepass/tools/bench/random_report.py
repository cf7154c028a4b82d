"""The text below the table of `bench random`, `scores`, `segments`, `sharded` and `slide`: classes, ratios, exchanges,
and drops of speed between neighbouring lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, quantiles
from statistics import geometric_mean as geomean

from rich.table import Table

from onepass.tools.bench.random_cases import largest_drop, moved_length
from onepass.tools.bench.report import OURS, SMALL, Line, case_text, lines, providers, us_text
from onepass.tools.bench.results import Row
from onepass.tools.bench.sharded_cases import wire_bytes
from onepass.tools.terminal import table

DRAWN = ("random/", "scores/")
CLEARLY = 0.97  # below this fraction of another's speed, onepass is slower by more than the noise


def show_classes(rows: Sequence[Row]) -> list[Table | str]:
    """A table of the classes of `bench random` and `scores`, the worst shapes of each, and where others are faster.

    Empty for other suites.
    """
    groups = class_groups(rows)
    if not groups:
        return []
    others, drawn = others_of(rows), groups["all"]
    about = (
        "fractions of the limit: a copy, for a gradient an addition, for logsumexp half a copy"
        + ", of scores with their tensors read once" * any(row.suite.startswith("scores/") for row in rows)
        + "; of the smallest times" * (drawn[0].first().threads is not None)
    )
    texts = [f"worst of {name}: {_worst(group)}" for name, group in groups.items() if name != "all"]
    for line in drawn:
        groups.setdefault(line.first().dtype, []).append(line)
    head, body = class_table(groups, others)
    return [about, table(head, body, left={0}), *texts, *(text for name in others for text in _slower(drawn, name))]


def others_of(rows: Sequence[Row]) -> list[str]:
    return [name for name in providers(rows) if name not in (OURS, "copy")]


def class_table(groups: dict[str, list[Line]], others: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Head and body of the table of `bench random`, with one line per group.

    On a GPU a shape that moves less than SMALL is judged by the microseconds over the limit instead of the fraction.
    """
    gpu = groups["all"][0].first().threads is None
    head = ["class", "points", "mean", "p10", "worst"]
    head += ["small\npoints", "us over\np90", "us over\nmost"] if gpu else []
    head += [f"times {name}\n{what}" for name in others for what in ("mean", "worst")]
    return head, [[name, *_class_cells(group, others, gpu)] for name, group in groups.items()]


def class_groups(rows: Sequence[Row]) -> dict[str, list[Line]]:
    """The lines of each class of `bench random` and `scores`, and of all classes. Empty if there are no lines."""
    groups: dict[str, list[Line]] = {}
    drawn = [line for line in lines([r for r in rows if r.suite.startswith(DRAWN)]) if line.fraction() is not None]
    for line in drawn:
        groups.setdefault(line.first().suite.partition("/")[2], []).append(line)
    return {**groups, "all": drawn} if drawn else {}


def _class_cells(group: Sequence[Line], others: Sequence[str], gpu: bool) -> list[str]:
    large, small = _large(group), [us for us, _ in _small(group)]
    fractions = [fraction for fraction, _ in large]
    cells = [str(len(large)), *[""] * 3]
    if large:
        cells[1:] = [f"{value:.2f}" for value in (fmean(fractions), _tenths(fractions, 1), min(fractions))]
    if gpu:
        cells += [str(len(small)), *([f"{_tenths(small, 9):.1f}", f"{max(small):.1f}"] if small else ["", ""])]
    for other in others:
        times = [speedup for line in group if (speedup := _speedup(line, other)) is not None]
        cells += [f"{geomean(times):.2f}", f"{min(times):.2f}"] if times else ["", ""]
    return cells


def _large(group: Sequence[Line]) -> list[tuple[float, str]]:
    """The fraction of the limit for each shape that is judged by that fraction, the worst first."""
    return sorted((line.fraction() or 0.0, _where(line)) for line in group if not is_small(line))


def _small(group: Sequence[Line]) -> list[tuple[float, str]]:
    """The microseconds over the limit for each shape that is judged by these, the worst first."""
    found = [line for line in group if is_small(line)]
    us = [(line.rows[OURS].median_us or 0.0) - (line.rows["copy"].median_us or 0.0) for line in found]
    return sorted(zip(us, map(_where, found), strict=True), reverse=True)


def is_small(line: Line) -> bool:
    row = line.first()
    return row.threads is None and row.bytes < SMALL


def _worst(group: Sequence[Line]) -> str:
    """The five worst shapes, of the large and of the small ones."""
    texts = [f"{fraction:.2f} {where}" for fraction, where in _large(group)[:5]]
    return "; ".join([*texts, *(f"{us:.1f} us over {where}" for us, where in _small(group)[:5])])


def _slower(drawn: Sequence[Line], than: str) -> list[str]:
    """A sentence about the points at which onepass is slower than another provider, with the five worst."""
    times = sorted((speedup, _where(line)) for line in drawn if (speedup := _speedup(line, than)) is not None)
    slower = [f"{speedup:.2f} {where}" for speedup, where in times if speedup < 1]
    clearly = sum(speedup < CLEARLY for speedup, _ in times)
    count = f"at {len(slower)} of {len(times)} points, by more than 3% at {clearly}"
    return [f"slower than {than} {count}: {'; '.join(slower[:5])}"] if slower else []


def _speedup(line: Line, over: str) -> float | None:
    """How many times as fast as another provider onepass is; None if a time is missing or disturbed."""
    own, other = line.fraction(), line.fraction(over)
    return own / other if own and other else None


def _where(line: Line) -> str:
    return f"{line.case} {line.dtype}"


def _tenths(values: Sequence[float], count: int) -> float:
    """The quantile `count` / 10 of the values."""
    return quantiles(values if len(values) > 1 else [*values, *values], n=10, method="inclusive")[count - 1]


# Groups of providers of segments, of which the fastest is shown
_FASTEST = {
    "PyG's fastest": ("pyg-index", "pyg-ptr"),
    "PyG's fastest compiled": ("pyg-index-compile", "pyg-ptr-compile"),
}


def show_ratios(rows: Sequence[Row]) -> list[Table]:
    """A table of each class of `bench segments`: the speed of onepass over that of the limit and of others."""
    body = []
    for name, group in segment_groups(rows).items():
        for other, ratios in ratios_of(group).items():
            cells = geomean(ratios), min(ratios), *(_tenths(ratios, count) for count in (1, 5, 9))
            body.append([name, other, str(len(ratios)), *(f"{value:.2f}" for value in cells)])
    head = ["class", "speed over", "points", "mean", "least", "p10", "median", "p90"]
    return [table(head, body, left={0, 1})] if body else []


def segment_groups(rows: Sequence[Row]) -> dict[str, list[Line]]:
    """The lines of each class of `bench segments`."""
    groups: dict[str, list[Line]] = {}
    for line in lines([r for r in rows if r.suite.startswith("segments/")]):
        groups.setdefault(line.first().suite.partition("/")[2], []).append(line)
    return groups


def ratios_of(group: Sequence[Line]) -> dict[str, list[float]]:
    """The speed of onepass over the speed of the limit, of each other provider, and of the fastest of each group."""
    found: dict[str, list[float]] = {}
    for line in group:
        ratios = {"the limit": line.fraction()}
        ratios |= {name: _speedup(line, name) for name in line.rows if name not in (OURS, "copy")}
        for label, names in _FASTEST.items():
            ratios[label] = min((ratio for name in names if (ratio := ratios.get(name))), default=None)
        for name, ratio in ratios.items():
            if ratio:
                found.setdefault(name, []).append(ratio)
    return found


def show_exchanges(rows: Sequence[Row]) -> list[Table]:
    """A table of `bench sharded`: the bytes that each rank receives, and how much longer than the limit each provider
    takes.

    The bytes are those of onepass, computed from the numbers per row. Phases without an exchange are left out.
    """
    found = lines([r for r in rows if r.suite.startswith("sharded/") and r.suite != "sharded/phases"])
    names = list(dict.fromkeys(name for line in found for name in line.rows if name != "copy"))
    body = []
    for line in found:
        row, copy = line.first(), line.rows["copy"].median_us
        received = wire_bytes(row.function, row.direction, row.shape[0], row.world_size, row.dtype)
        times = [line.rows[name].median_us if name in line.rows else None for name in names]
        more = [us_text(us - copy) if us and copy else "" for us in times]
        body.append([line.case, line.dtype, str(row.world_size), str(received), *more])
    head = ["case", "dtype", "ranks", "bytes\nreceived", *(f"{name}\nus over copy" for name in names)]
    return [table(head, body, left={0, 1})] if body else []


def show_drops(rows: Sequence[Row]) -> list[str]:
    """The largest drop between neighbouring lengths of each series of `bench slide`."""
    series: dict[str, dict[int, float]] = {}
    for line in lines([r for r in rows if r.suite.startswith("slide/")]):
        row, fraction = line.first(), line.fraction()
        if fraction is not None:
            name = case_text(replace(row, case=row.suite))
            series.setdefault(f"{name} {line.dtype}", {})[moved_length(row.suite, row.shape)] = fraction
    texts = []
    for name, fractions in series.items():
        if drop := largest_drop(fractions):
            share, at, to = drop
            ends = f"from {at} ({fractions[at]:.2f} of the limit) to {to} ({fractions[to]:.2f})"
            texts.append(f"{name}, {len(fractions)} lengths: largest drop between neighbours {share:.0%}, {ends}")
    return texts
