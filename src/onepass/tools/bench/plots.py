"""Plots of results files. Nothing here times anything or imports torch.

A suite that sweeps N is drawn as curves of GB/s over N (`lengths` as curves of the fraction of a copy's speed), any
other suite as bars of the fraction of a copy's speed per case. Drawn shapes are one plot of all classes; a length that
moves by one, and the mean length of segments, is a curve of the fraction. There is one plot per suite, function,
direction and dtype, as PNG and as SVG. The same file gives the same SVG, byte for byte.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.ticker import FuncFormatter, NullLocator

from onepass.tools.bench.random_cases import moved_length
from onepass.tools.bench.random_report import is_small
from onepass.tools.bench.report import lines, us_text
from onepass.tools.bench.results import Results, Row
from onepass.tools.bench.segment_cases import SWEEP, mean_length
from onepass.tools.bench.styles import GALLERY_STYLES, is_sweep, limit_name, providers, rows_text, style, why

__all__ = ["draw"]

_DOTTED = ("cuda-auto",)  # equals another variant at every N: dotted and on top, both curves can be seen
_MAX_BAR = 1.5  # a longer bar is cut, with its length written beside it
_INK, _GREY, _FAINT = "#222222", "#555555", "#DDDDDD"
_DASHES = (0, (4, 3))
_MANY = 8  # with this many providers a plot is larger and its legend narrower
_MAX_BARS = 70  # more bars do not fit on a page
_THEME: Any = {
    "font.family": "DejaVu Sans",  # ships with matplotlib, so that the plot is the same on every machine
    "font.size": 10,
    "svg.hashsalt": "onepass",
    "svg.fonttype": "path",
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": "#888888",
    "xtick.color": _INK,
    "ytick.color": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def draw(files: Sequence[Results], folder: str | Path) -> list[Path]:
    """Draws every plot for which the files have rows, and returns the paths.

    If several files have the same row of a device, the newest file's is drawn. Each device gets plots of its own.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    plots: dict[tuple[str, ...], dict[tuple[str, ...], tuple[Row, str]]] = {}
    for file in sorted(files, key=lambda f: str(f.environment["date"])):
        e = file.environment
        note = f"{str(e['date'])[:10]}, torch {e['torch']}" + (f", commit {e['commit'][:7]}" if e["commit"] else "")
        for row in file.rows:
            device = f"{e['device']}, {row.threads} thread{'s' * (row.threads > 1)}" if row.threads else e["device"]
            kind = (row.suite, row.function, row.direction, row.dtype, row.out_dtype)
            kind = ("random", "", "", "", "") if row.suite.startswith("random/") else kind
            each = (*row.key(), row.provider)
            plots.setdefault((*kind, str(device)), {})[each] = row, note
    devices = {key[-1] for key in plots}
    written = []
    with plt.rc_context(_THEME):
        for (*names, dtype, out_dtype, device), found in plots.items():
            valid = [replace(r, ok=False, error="disturbed") if r.disturbed else replace(r) for r, _ in found.values()]
            rows = [r for r in valid if r.ok]
            if not rows:
                continue
            failed = [r for r in valid if not r.ok and r.provider != "copy"]
            notes = "; ".join(dict.fromkeys(note for _, note in found.values()))
            suite = names[0].partition("/")[0]
            note = f"onepass bench {suite}: {len({r.key() for r in rows})} points; {notes}"
            drawers = {"random": _draw_classes, "slide": _draw_slide, "lengths": _draw_lengths}
            other = _draw_slide if names[0].startswith(SWEEP) else _draw_curves if is_sweep(rows) else _draw_cases
            figure = drawers.get(suite, other)(rows, failed, device, note)
            parts = [
                *filter(None, (*names, dtype)),
                *[f"to-{out_dtype}"] * (out_dtype != dtype),
                *[device] * (len(devices) > 1),
            ]
            name = "".join(c if c.isalnum() else "-" for c in "-".join(parts)).strip("-").replace("--", "-")
            for suffix, options in (("png", {"dpi": 160}), ("svg", {"metadata": {"Date": None}})):
                written.append(folder / f"{name}.{suffix}")
                figure.savefig(written[-1], **options)
            plt.close(figure)
    return written


# Text


def _time_text(us: float) -> str:
    return f"{us_text(us)} us" if us < 10000 else f"{us_text(us / 1000)} ms"


def _case_label(case: str, row: Row, separator: str) -> str:
    """The case and its shape, without words that are in the title."""
    case = case.removeprefix(f"{row.function} backward, ").removeprefix(f"{row.function}, ")
    shape = "x".join(map(str, row.shape))
    return case if shape in case else f"{case}{separator}{shape}"


def _add_text(axes: Any, row: Row, of: str, device: str, failed: Sequence[Row], note: str, above: float = 0) -> None:
    """The title and the device, `above` points over the axes.

    Below them at how many points each provider has no time, and the suite, date and versions of the files.
    """
    title = row.function + (" backward" if row.direction == "backward" else "") + f", {row.dtype}"
    title += (f" to {row.out_dtype}" if row.out_dtype != row.dtype else "") + of
    title = "random shapes" if row.suite.startswith("random/") else title
    axes.set_title(title, loc="left", fontsize=13, fontweight="bold", pad=26 + above)
    place = {"xycoords": "axes fraction", "textcoords": "offset points"}
    axes.annotate(device, (0, 1), (0, 9 + above), fontsize=9.5, color=_GREY, **place)
    counts: dict[str, Counter[str]] = {}
    for row in failed:
        counts.setdefault(why(row), Counter())[style(row.provider)[0]] += 1
    text = [f"{word}: " + ", ".join(f"{name} at {n}" for name, n in of.items()) for word, of in counts.items()]
    foot = "\n".join(["; ".join(text), note] if text else [note])
    axes.figure.supxlabel(foot, x=0.01, ha="left", fontsize=7.5, color=_GREY)


# Fractions of the limit, of drawn shapes and over a length that moves by one


def _draw_classes(rows: Sequence[Row], failed: Sequence[Row], device: str, note: str) -> Any:
    """A marker per shape of each class, hollow where it moves little, and a tick at the mean."""
    names, found = providers(rows), lines(rows)
    classes = list(dict.fromkeys(line.first().suite.removeprefix("random/") for line in found))
    figure, axes = plt.subplots(figsize=(8.6, 1.8 + 0.62 * len(classes)), layout="constrained")
    for i, name in enumerate(names):
        label, colour, marker = style(name, names)
        shift = (i + 0.5) / len(names) * 0.76 - 0.38
        points = [
            (fraction, classes.index(line.first().suite.removeprefix("random/")) + shift, is_small(line))
            for line in found
            if (fraction := line.fraction(name)) is not None
        ]
        for small in (False, True):
            own = [(min(x, _MAX_BAR), y) for x, y, hollow in points if hollow is small]
            look: dict[str, Any] = {"mfc": "none" if small else colour, "mec": colour, "markersize": 4.5, "alpha": 0.7}
            axes.plot(*(zip(*own, strict=True) if own else ((), ())), marker, **look, label=None if small else label)
        for y in dict.fromkeys(y for _, y, _ in points):
            mean = fmean(x for x, at, _ in points if at == y)
            axes.plot([mean] * 2, [y - 0.14, y + 0.14], color=_INK, linewidth=1.6, zorder=6)
    axes.axvline(1.0, color="black", linestyle=_DASHES, linewidth=1.4, label="limit")
    axes.set_yticks(range(len(classes)), classes)
    axes.set_ylim(len(classes) - 0.5, -0.5)
    axes.set_xlim(0, max(1.03, min(_MAX_BAR, max((line.fraction() or 0.0) for line in found) * 1.03)))
    axes.set_xlabel("speed, as a fraction of a copy (gradients: of an addition) of the same bytes")
    axes.grid(axis="x", color=_FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    figure.legend(loc="outside right upper", frameon=False, fontsize=10)
    _add_text(axes, rows[0], "", device, failed, note)
    return figure


def _draw_slide(rows: Sequence[Row], failed: Sequence[Row], device: str, note: str) -> Any:
    """The fraction of the limit over the length that moves, or over the mean length of segments."""
    names, found, of_segments = providers(rows), lines(rows), rows[0].suite.startswith(SWEEP)

    def length(row: Row) -> int:
        return mean_length(row.case, row.shape[0]) if of_segments else moved_length(row.suite, row.shape)

    figure, axes = plt.subplots(figsize=(8.6, 4.8), layout="constrained")
    for name in reversed(names):
        label, colour, _ = style(name, names)
        points = sorted(
            (length(line.first()), fraction) for line in found if (fraction := line.fraction(name)) is not None
        )
        xs, ys = zip(*points, strict=True) if points else ((), ())
        axes.plot(xs, ys, ".-", color=colour, linewidth=1.2, markersize=4, label=label)
    axes.axhline(1.0, color="black", linestyle=_DASHES, linewidth=1.4, label=limit_name(rows[0]))
    axes.set_xscale("log", base=10 if of_segments else 2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel(f"{'mean length of a segment' if of_segments else 'the length that moves'} (log scale)")
    axes.set_ylabel("fraction of the limit")
    axes.grid(color=_FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    figure.legend(loc="outside right upper", frameon=False, fontsize=10)
    of = f", {rows[0].shape[0]} items in segments" if of_segments else f", {rows[0].suite.removeprefix('slide/')}"
    _add_text(axes, rows[0], of, device, failed, note)
    return figure


# Curves


def _draw_lengths(rows: Sequence[Row], failed: Sequence[Row], device: str, note: str) -> Any:
    """The fraction of the limit over powers of two, and beside them over lengths that were drawn.

    Each curve has its name at its end, and a gap at the lengths that its provider does not take.
    """
    names, found = providers(rows), sorted(lines([*rows, *failed]), key=lambda line: line.first().shape[1])
    kinds = list(dict.fromkeys(row.case.partition(",")[0] for row in rows))
    figure, panels = plt.subplots(
        1, len(kinds), figsize=(8.6, 4.8), sharex=True, sharey=True, layout="constrained", squeeze=False
    )
    ends: dict[str, float] = {}
    for axes, kind in zip(panels[0], kinds, strict=True):
        here = [line for line in found if line.first().case.startswith(kind)]
        ns = [line.first().shape[1] for line in here]
        axes.axhline(1.0, color="black", linestyle=_DASHES, linewidth=1.4, zorder=3)
        for name in reversed(names):
            _, colour, marker = style(name, names)
            ours = name == "onepass"
            ys = [line.fraction(name) for line in here]
            look: dict[str, Any] = {"markersize": 4.5 if ours else 3.5, "linewidth": 2.4 if ours else 1.3}
            # None makes a gap.
            axes.plot(
                ns, [float("nan") if y is None else y for y in ys], color=colour, marker=marker, **look, zorder=5 + ours
            )
            if own := [y for y in ys if y is not None]:
                ends[name] = own[-1]
        axes.set_xscale("log", base=2)
        axes.set_xticks([4**i for i in range(2, 10)])
        axes.xaxis.set_major_formatter(FuncFormatter(lambda n, _: f"{int(n)}" if n < 16384 else f"{int(n) // 1024}K"))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel({"power of two": "N: powers of two", "drawn": "N: random lengths"}.get(kind, f"N: {kind}"))
        axes.grid(axis="y", color=_FAINT, linewidth=0.8)
        axes.set_axisbelow(True)
    panels[0][0].set_ylim(0, max(1.05, *(line.fraction(n) or 0.0 for line in found for n in names)) * 1.02)
    panels[0][0].set_ylabel(f"fraction of the speed of {'a copy' if limit_name(rows[0]) == 'copy' else 'an addition'}")
    _name_ends(panels[0][-1], ends | {limit_name(rows[0]): 1.0}, names)
    _add_text(panels[0][0], rows[0], f", {rows_text(rows)} of N", device, failed, note)
    return figure


def _name_ends(axes: Any, ends: dict[str, float], names: Sequence[str]) -> None:
    """The names of curves at the right of the axes, moved apart where the curves end close together."""
    apart = 0.052 * axes.get_ylim()[1]
    order = sorted(ends, key=lambda name: ends[name])
    places = [ends[name] for name in order]
    for _ in range(200):
        for i in range(1, len(places)):
            if (lack := apart - (places[i] - places[i - 1])) > 0:
                places[i - 1], places[i] = max(0.0, places[i - 1] - lack / 2), places[i] + lack / 2
    for name, place in zip(order, places, strict=True):
        label, colour, _ = style(name, names) if name in names else (name, "black", "")
        text: dict[str, Any] = {
            "color": colour,
            "va": "center",
            "fontweight": "bold" if name == "onepass" else "normal",
        }
        axes.annotate(label, (1.02, place), xycoords=("axes fraction", "data"), annotation_clip=False, **text)


def _draw_curves(rows: Sequence[Row], failed: Sequence[Row], device: str, note: str) -> Any:
    """GB/s over the length of a row."""
    names, roofline = providers(rows), limit_name(rows[0])
    figure, axes = plt.subplots(figsize=(8.6, 4.8) if len(names) < _MANY else (9.8, 6.2), layout="constrained")
    ns = sorted({r.shape[1] for r in rows})
    points = {
        name: sorted((r.shape[1], r.gbps) for r in rows if r.provider == name and r.gbps) for name in ["copy", *names]
    }
    if points["copy"]:
        line: dict[str, Any] = {"color": "black", "linestyle": _DASHES, "linewidth": 1.4}
        axes.plot(*zip(*points["copy"], strict=True), **line, label=roofline, zorder=3)
    for name in reversed(names):
        label, colour, marker = style(name, names)
        ours, gallery, dotted = name == "onepass", name in GALLERY_STYLES, name in _DOTTED
        axes.plot(
            *zip(*points[name], strict=True),
            color=colour,
            marker=marker,
            markersize=5.5 if ours else 4.5 if gallery else 5,
            markevery=max(1, len(points[name]) // 16) if len(ns) > 24 else 1,
            linewidth=2.4 if ours else 1.0 if gallery else 1.5,
            linestyle=":" if dotted else "-",
            label=label,
            zorder=6 if ours else 5 if dotted or not gallery else 4,
        )
    axes.set_xscale("log", base=2)
    axes.set_xlim(ns[0] / 2**0.15, ns[-1] * 2**0.15)
    powers = [2**i for i in range(4, 40) if ns[0] <= 2**i <= ns[-1]]
    axes.set_xticks(powers if len(powers) > 2 else ns)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda n, _: f"{int(n)}" if n < 16384 else f"{int(n) // 1024}K"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_ylim(0, max(r.gbps or 0 for r in rows) * 1.06)
    axes.set_xlabel("N, the length of a row (log scale)")
    axes.set_ylabel("GB/s, read + written")
    axes.grid(axis="y", color=_FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    _add_text(axes, rows[0], f", {rows_text(rows)} of N", device, failed, note)
    # The legend has the order of the curves at the longest row, and the copy last.
    ends = {style(name, names)[0]: points[name][-1][1] for name in names if points[name]}
    order = sorted(
        zip(*axes.get_legend_handles_labels(), strict=True), key=lambda e: (e[1] == roofline, -ends.get(e[1], 0))
    )
    handles, labels = zip(*order, strict=True)
    figure.legend(handles, labels, loc="outside right upper", frameon=False, fontsize=10)
    return figure


# Bars


def _draw_cases(rows: Sequence[Row], failed: Sequence[Row], device: str, note: str) -> Any:
    """The fraction of a copy's speed per case. A provider without a time has the reason in place of its bar."""
    names, roofline = providers(rows), limit_name(rows[0])
    failed = [r for r in failed if r.provider in names]
    bars = len(names) * len({r.case for r in rows}) <= _MAX_BARS
    found: dict[str, dict[str, Row]] = {}
    for row in (*rows, *failed):
        found.setdefault(row.case, {})[row.provider] = row
    top = max((r.copy_fraction or 0 for r in rows if r.provider != "copy"), default=1.0)
    right = min(max(1.0, top), _MAX_BAR)
    height = max(0.125 * (len(names) + 0.8), 0.4) if bars else 0.29
    entries = len(names) + 1
    columns = entries if entries <= 4 else (entries + 1) // 2 if entries <= _MANY else 3
    lines = -(-entries // columns)
    legend = 24 * lines - 2 if lines <= 2 else 15 * lines + 12  # points
    above = 1.6 if lines <= 2 else 1.0 + legend / 72
    figure, axes = plt.subplots(figsize=(8.6, above + height * len(found)), layout="constrained")
    (_draw_bars if bars else _draw_markers)(axes, list(found.values()), names, right)
    axes.axvline(1.0, color="black", linestyle=_DASHES, linewidth=1.4, zorder=5, label=roofline)
    ticks = [_case_label(case, next(iter(own.values())), "\n" if bars else "  ") for case, own in found.items()]
    axes.set_yticks(range(len(found)), ticks)
    axes.tick_params(axis="y", length=0, labelsize=8.5)
    axes.set_ylim(len(found) - 0.5, -0.5)
    axes.set_xlim(0, right * (1.13 if bars else 1.02))
    what = "a copy" if roofline == "copy" else "an addition (two reads, one write)"
    axes.set_xlabel(f"speed, as a fraction of {what} of the same bytes: longer is faster")
    axes.grid(axis="x", color=_FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    for i in range(1, len(found)):
        axes.axhline(i - 0.5, color="#EEEEEE", linewidth=0.8, zorder=1)
    ranks = [*(style(n, names)[0] for n in names), roofline]
    order = sorted(zip(*axes.get_legend_handles_labels(), strict=True), key=lambda e: ranks.index(e[1]))
    axes.legend(
        *zip(*order, strict=True),
        loc="lower left",
        bbox_to_anchor=(-0.015, 1.0),
        ncols=columns,
        frameon=False,
        fontsize=9,
        columnspacing=1.4,
        handletextpad=0.5,
    )
    _add_text(axes, rows[0], "", device, failed, note, legend)
    return figure


def _draw_bars(axes: Any, found: Sequence[dict[str, Row]], names: Sequence[str], right: float) -> None:
    """A bar per provider, its time beside it."""
    step = 1 / (len(names) + 0.8)  # a group has height 1, with the space of 0.8 bars between two groups
    for i, name in enumerate(names):
        label, colour, _ = style(name, names)
        own = [(at, rows[name]) for at, rows in enumerate(found) if name in rows]
        ys = [at + (i + 0.5 - len(names) / 2) * step for at, _ in own]
        ends = [min(r.copy_fraction or 0.0, right) if r.ok else 0.0 for _, r in own]
        axes.barh(ys, ends, height=step * 0.9, color=colour, label=label, zorder=3)
        for y, end, (_, row) in zip(ys, ends, own, strict=True):
            cut = f"  ({row.copy_fraction:.1f} of a copy)" if (row.copy_fraction or 0) > right else ""
            text = f"{_time_text(row.median_us or 0)}{cut}" if row.ok else f"{label}: {why(row)}"
            axes.annotate(
                text,
                (end, y),
                (3, -0.3),
                textcoords="offset points",
                va="center",
                fontsize=6.6,
                color=_INK if name == "onepass" else "#666666",
                fontweight="bold" if name == "onepass" else "normal",
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
                zorder=6,
            )


def _draw_markers(axes: Any, found: Sequence[dict[str, Row]], names: Sequence[str], right: float) -> None:
    """A bar for the first provider and markers for the others; at the right its time, and how many times as fast."""
    lead, others = names[0], names[1:]
    firsts = [(at, rows[lead]) for at, rows in enumerate(found) if lead in rows and rows[lead].ok]
    ends = [min(r.copy_fraction or 0.0, right) for _, r in firsts]
    label, colour, _ = style(lead, names)
    axes.barh([at for at, _ in firsts], ends, height=0.56, color=colour, alpha=0.85, label=label, zorder=3)
    for name in reversed(others):
        label, colour, marker = style(name, names)
        own = [(at, rows[name]) for at, rows in enumerate(found) if name in rows]
        absent = [at for at, row in own if not row.ok]
        if absent:
            side = 0.012 * right * (1 + 2 * others.index(name))
            axes.plot([side] * len(absent), absent, "X", color=colour, mec="white", markersize=7, zorder=6)
        points = [(min(row.copy_fraction or 0.0, right), at) for at, row in own if row.ok]
        look: dict[str, Any] = {"marker": marker, "markersize": 7, "mfc": colour, "mec": "white", "mew": 0.8}
        axes.plot(*zip(*points, strict=True), linestyle="none", label=label, zorder=6, clip_on=False, **look)
    beside: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "va": "center"}
    beside |= {"fontsize": 8, "ha": "right"}
    for at, row in firsts:
        axes.annotate(_time_text(row.median_us or 0), (1, at), (50, 0), fontweight="bold", **beside)
        torch = found[at].get("torch")
        if torch and torch.ok and lead != "torch" and torch.median_us and row.median_us:
            axes.annotate(f"{torch.median_us / row.median_us:.1f}x", (1, at), (88, 0), **beside)
    if lead != "torch" and "torch" in names:
        axes.annotate("vs torch", (1, -0.5), (88, 8), color=_GREY, **beside)
