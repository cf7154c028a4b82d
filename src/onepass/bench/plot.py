"""Pictures of results files. Nothing here times anything, or imports torch.

A suite that sweeps N is drawn as curves of GB/s over N, any other as bars: the fraction of a copy's speed, case by case.
One picture for each suite, function, direction and dtype, as PNG and as SVG; the same file gives the same SVG, byte for
byte.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.ticker import FuncFormatter, NullLocator

from onepass.bench.results import Results, Row
from onepass.bench.table import us_text

# Okabe and Ito's palette, told apart with any colour vision; the markers and hatches tell it without colour.
_STYLE: dict[str, tuple[str, str]] = {
    "onepass": ("#0072B2", "o"),
    "torch": ("#D55E00", "s"),
    "torch-compile": ("#E69F00", "^"),
    "naive": ("#999999", "v"),
    "liger": ("#009E73", "D"),
    "onepass-triton": ("#56B4E9", "P"),
    "onepass-cuda": ("#CC79A7", "X"),
    "onepass-cpu": ("#CC79A7", "X"),
}
_SPARE = (("#CC79A7", "<"), ("#F0E442", ">"), ("#009E73", "*"), ("#56B4E9", "p"), ("#E69F00", "h"), ("#999999", "d"))
_LABEL = {"naive": "naive PyTorch", "torch-compile": "torch.compile", "liger": "Liger", "onepass-triton": "onepass (Triton)",
          "onepass-cuda": "onepass (CUDA)", "onepass-cpu": "onepass (CPU)"}  # fmt: skip
_CLIP = 1.5  # a bar ends here, with its length written beside it
_INK, _FAINT = "#222222", "#DDDDDD"
_FONT = {
    "font.family": "DejaVu Sans",  # ships with matplotlib: the same picture on every machine
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
    """Draws every picture that the files hold rows for, and returns the paths written.

    Of rows that are in several files for one device, the newest file's is drawn. Several devices get pictures each.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    pictures: dict[tuple[str, ...], dict[tuple[str, str], Row]] = {}
    for file in sorted(files, key=lambda f: str(f.environment["date"])):
        for row in file.rows:
            name = (row.suite, row.function, row.direction, row.dtype, row.out_dtype, _where(file, row))
            pictures.setdefault(name, {})[(row.case, row.provider)] = row
    devices = {name[-1] for name in pictures}
    written = []
    with plt.rc_context(_FONT):
        for name, found in pictures.items():
            rows = [replace(r) for r in found.values() if r.ok]
            if not rows:
                continue
            figure = _curves(rows, name) if _sweeps(rows) else _bars(rows, name)
            suite, function, direction, dtype, out_dtype, device = name
            parts = [suite, function, direction, dtype]
            parts += [f"to-{out_dtype}"] if out_dtype != dtype else []
            parts += [device] if len(devices) > 1 else []
            written += _save(figure, folder / _slug("-".join(parts)))
    return written


def _where(file: Results, row: Row) -> str:
    name = str(file.environment["device"])
    return f"{name}, {row.threads} threads" if row.threads else name


def _sweeps(rows: Sequence[Row]) -> bool:
    """Whether all cases are matrices with as many rows, and at least three row lengths."""
    shapes = {tuple(r.shape) for r in rows}
    flat = all(len(r.shape) == 2 and r.dim in (-1, 1) for r in rows)
    return flat and len({s[0] for s in shapes}) == 1 and len({s[1] for s in shapes}) >= 3


def _providers(rows: Iterable[Row]) -> list[str]:
    """onepass first, the others as they come; the copy is no line of its own."""
    names = [n for n in dict.fromkeys(r.provider for r in rows) if n != "copy"]
    return sorted(names, key=lambda n: n != "onepass")


def _style(name: str, names: Sequence[str]) -> tuple[str, str]:
    if name in _STYLE:
        return _STYLE[name]
    others = [n for n in names if n not in _STYLE]
    return _SPARE[others.index(name) % len(_SPARE)]


def _title(axes: Any, text: str, device: str) -> None:
    axes.set_title(text, loc="left", fontsize=13, fontweight="bold", pad=26)
    axes.annotate(
        device, (0, 1), (0, 9), xycoords="axes fraction", textcoords="offset points", fontsize=9.5, color="#555555"
    )


def _what(row: Row) -> str:
    text = row.function + (" backward" if row.direction == "backward" else "")
    return f"{text}, {row.dtype}" + (f" to {row.out_dtype}" if row.out_dtype != row.dtype else "")


def _curves(rows: Sequence[Row], name: Sequence[str]) -> Any:
    figure, axes = plt.subplots(figsize=(8.6, 4.8), layout="constrained")
    names = _providers(rows)
    peak = max(r.gbps or 0 for r in rows)
    many = len({r.shape[1] for r in rows}) > 24
    copy = sorted((r.shape[1], r.gbps) for r in rows if r.provider == "copy" and r.gbps)
    if copy:
        axes.plot(*zip(*copy, strict=True), color="black", linestyle=(0, (4, 3)), linewidth=1.4, label="copy", zorder=3)
    for provider in reversed(names):
        points = sorted((r.shape[1], r.gbps) for r in rows if r.provider == provider and r.gbps)
        colour, marker = _style(provider, names)
        ours = provider == "onepass"
        axes.plot(
            *zip(*points, strict=True),
            color=colour,
            marker=marker,
            markersize=5.5 if ours else 5,
            markevery=max(1, len(points) // 16) if many else 1,
            linewidth=2.4 if ours else 1.5,
            label=_LABEL.get(provider, provider),
            zorder=5 if ours else 4,
        )
    axes.set_xscale("log", base=2)
    ns = sorted({r.shape[1] for r in rows})
    axes.set_xlim(ns[0] / 2**0.15, ns[-1] * 2**0.15)
    powers = [2**i for i in range(4, 40) if ns[0] <= 2**i <= ns[-1]]
    axes.set_xticks(powers if len(powers) > 2 else ns)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda n, _: f"{int(n)}" if n < 16384 else f"{int(n) // 1024}K"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_ylim(0, peak * 1.06)
    axes.set_xlabel("N, the length of a row (log scale)")
    axes.set_ylabel("GB/s, read + written")
    axes.grid(axis="y", color=_FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    _title(axes, f"{_what(rows[0])}, {rows[0].shape[0]} rows of N", name[-1])
    handles, labels = axes.get_legend_handles_labels()
    order = sorted(range(len(labels)), key=lambda i: (labels[i] == "copy", -_last(rows, names, labels[i])))
    figure.legend(
        [handles[i] for i in order], [labels[i] for i in order], loc="outside right upper", frameon=False, fontsize=10
    )
    return figure


def _last(rows: Sequence[Row], names: Sequence[str], label: str) -> float:
    """GB/s at the longest row: the legend is in the order of the curves' ends."""
    own = [(r.shape[1], r.gbps or 0.0) for r in rows if _LABEL.get(r.provider, r.provider) == label]
    return max(own)[1] if own else 0.0


def _bars(rows: Sequence[Row], name: Sequence[str]) -> Any:
    names = _providers(rows)
    cases = list(dict.fromkeys(r.case for r in rows))
    found = {(r.case, r.provider): r for r in rows}
    step = 1 / (len(names) + 0.8)  # a group is as high as 1, with the space of 0.8 bars between two
    figure, axes = plt.subplots(figsize=(8.6, 1.5 + max(0.125 / step, 0.4) * len(cases)), layout="constrained")
    top = max([r.copy_fraction or 0 for r in rows if r.provider != "copy"], default=1.0)
    right = min(max(1.0, top), _CLIP)
    for i, provider in enumerate(names):
        colour, _ = _style(provider, names)
        own = [(c, found[c, provider]) for c in cases if (c, provider) in found]
        at = [cases.index(c) + (i + 0.5 - len(names) / 2) * step for c, _ in own]
        ends = [min(r.copy_fraction or 0.0, right) for _, r in own]
        axes.barh(at, ends, height=step * 0.9, color=colour, label=_LABEL.get(provider, provider), zorder=3)
        for y, end, (_, row) in zip(at, ends, own, strict=True):
            clipped = f"  ({row.copy_fraction:.1f} of a copy)" if (row.copy_fraction or 0) > right else ""
            axes.annotate(
                f"{us_text(row.median_us or 0)} us{clipped}",
                (end, y),
                (3, -0.3),
                textcoords="offset points",
                va="center",
                fontsize=6.6,
                color=_INK if provider == "onepass" else "#666666",
                fontweight="bold" if provider == "onepass" else "normal",
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
                zorder=6,
            )
    axes.axvline(1.0, color="black", linestyle=(0, (4, 3)), linewidth=1.4, zorder=5, label="copy")
    axes.set_yticks(range(len(cases)), [_case(c, found, names) for c in cases], fontsize=8.5, linespacing=1.1)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(cases) - 0.5, -0.5)
    axes.set_xlim(0, right * 1.13)
    axes.set_xlabel("speed, as a fraction of a copy of the same bytes: longer is faster")
    axes.grid(axis="x", color=_FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    for i in range(1, len(cases)):
        axes.axhline(i - 0.5, color="#EEEEEE", linewidth=0.8, zorder=1)
    _title(axes, _what(rows[0]), name[-1])
    figure.legend(loc="outside upper right", ncols=len(names) + 1, frameon=False, fontsize=9.5)
    return figure


def _case(case: str, found: dict[tuple[str, str], Row], names: Sequence[str]) -> str:
    row = next(found[case, n] for n in [*names, "copy"] if (case, n) in found)
    return f"{case}\n{' x '.join(map(str, row.shape))}"


def _slug(text: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in text).strip("-").replace("--", "-")


def _save(figure: Any, path: Path) -> list[Path]:
    written = []
    for suffix, options in ((".png", {"dpi": 160}), (".svg", {"metadata": {"Date": None}})):
        written.append(path.with_name(path.name + suffix))
        figure.savefig(written[-1], **options)
    plt.close(figure)
    return written
