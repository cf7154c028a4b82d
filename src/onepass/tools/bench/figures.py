"""The three figures: curves over N, and for named cases bars, or one bar and markers where bars would be too many."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.ticker import FuncFormatter, NullLocator

from onepass.tools.bench.cases import ITEMSIZE
from onepass.tools.bench.results import Row
from onepass.tools.bench.table import us_text

# Okabe and Ito's palette, told apart with any colour vision; the markers and hatches tell it without colour.
_STYLE: dict[str, tuple[str, str]] = {
    "onepass": ("#0072B2", "o"),
    "torch": ("#D55E00", "s"),
    "torch-compile": ("#E69F00", "^"),
    "naive": ("#999999", "v"),
    "liger": ("#009E73", "D"),
    "quack": ("#882255", "p"),
    "onepass-triton": ("#56B4E9", "P"),
    "onepass-cuda": ("#CC79A7", "X"),
    "onepass-cpu": ("#CC79A7", "X"),
}
# The rungs of the gallery, a family of colours each: too many for one palette, so that the marker has to tell as well.
_RUNGS: dict[str, tuple[str, str]] = {
    "naive-jit": ("#8C6D46", "<"),
    "naive-compile": ("#5B3A1E", ">"),
    "triton-row": ("#7CB342", "^"),
    "triton-persistent": ("#1B7837", "d"),
    "triton-online": ("#B8C400", "p"),
    "cpu-threepass": ("#00A3AD", "8"),
    "cpu-online": ("#00626B", "H"),
    "cuda-warp": ("#E7298A", "*"),
    "cuda-block": ("#7B3294", "h"),
    "cuda-online": ("#A50F15", "X"),
    "cuda-auto": ("#2D0A4E", "P"),
}
_ABOVE = ("cuda-auto",)  # is another rung at every N: dotted over that one's curve, both are seen
_SPARE = (("#CC79A7", "<"), ("#F0E442", ">"), ("#009E73", "*"), ("#56B4E9", "p"), ("#E69F00", "h"), ("#999999", "d"))
_LABEL = {
    "naive": "naive PyTorch",
    "torch-compile": "torch.compile",
    "liger": "Liger",
    "quack": "QuACK",
    "onepass-triton": "onepass (Triton)",
    "onepass-cuda": "onepass (CUDA)",
    "onepass-cpu": "onepass (CPU)",
    "naive-jit": "naive, TorchScript",
    "naive-compile": "naive, torch.compile",
    "triton-row": "Triton, row",
    "triton-persistent": "Triton, persistent",
    "triton-online": "Triton, online",
    "cpu-threepass": "C++, three passes",
    "cpu-online": "C++, online",
    "cuda-warp": "CUDA, warp",
    "cuda-block": "CUDA, block",
    "cuda-online": "CUDA, online",
    "cuda-auto": "CUDA, auto",
}
_CLIP = 1.5  # a bar ends here, with its length written beside it
INK, _FAINT = "#222222", "#DDDDDD"
_DASHES = (0, (4, 3))
_MANY = 8  # providers: from here on a picture is larger, and its legend narrower
_MOST_BARS = 70  # more of them, and no page holds the picture


def _providers(rows: Iterable[Row]) -> list[str]:
    """onepass first, the others as they come; the copy is no line of its own."""
    names = [n for n in dict.fromkeys(r.provider for r in rows) if n != "copy"]
    return sorted(names, key=lambda n: n != "onepass")


def _style(name: str, names: Sequence[str]) -> tuple[str, str]:
    for styles in (_STYLE, _RUNGS):
        if name in styles:
            return styles[name]
    others = [n for n in names if n not in _STYLE and n not in _RUNGS]
    return _SPARE[others.index(name) % len(_SPARE)]


def _title(axes: Any, text: str, device: str, raised: int = 0) -> None:
    """The title, and the device under it, `raised` points above the axes and what else stands there."""
    axes.set_title(text, loc="left", fontsize=13, fontweight="bold", pad=26 + raised)
    place = {"xycoords": "axes fraction", "textcoords": "offset points"}
    axes.annotate(device, (0, 1), (0, 9 + raised), fontsize=9.5, color="#555555", **place)


def _foot(figure: Any, failed: Sequence[Row], note: str) -> None:
    """Below the axes: who has no time (markers: an x) at how many points, and the files' suite, date and versions."""
    counts: dict[str, Counter[str]] = {}
    for row in failed:
        counts.setdefault(why(row), Counter())[_label(row.provider)] += 1
    said = [f"{word}: " + ", ".join(f"{name} at {n}" for name, n in of.items()) for word, of in counts.items()]
    lines = ["; ".join(said), note] if said else [note]
    figure.supxlabel("\n".join(lines), x=0.01, ha="left", fontsize=7.5, color="#555555")


def why(row: Row) -> str:
    """Why a row has no time, in a word or two.

    >>> from onepass.tools.bench.results import Row
    >>> row = Row("few", "1x8", "softmax", [1, 8], [8, 1], -1, "float32", "float32", "forward", "torch")
    >>> row.error = "wrong: 3 elements are off by more than 1e-5"
    >>> why(row)
    'wrong'
    """
    word = (row.error or "").partition(":")[0]
    return {"wrong": "wrong", "unsupported": "not supported", "skipped": "no memory", "disturbed": "disturbed"}.get(
        word, "error"
    )


def _limit(rows: Sequence[Row]) -> str:
    """What the speed is a fraction of: a copy or, of gradients, an addition of the same bytes."""
    return "copy" if rows[0].direction == "forward" else "add"


def _what(row: Row) -> str:
    text = row.function + (" backward" if row.direction == "backward" else "")
    return f"{text}, {row.dtype}" + (f" to {row.out_dtype}" if row.out_dtype != row.dtype else "")


def _rows(rows: Sequence[Row]) -> str:
    """What a sweep's matrices have in common: the number of rows, or the bytes that they fill."""
    if len({r.shape[0] for r in rows}) == 1:
        return f"{rows[0].shape[0]} rows"
    size = max(r.shape[0] * r.shape[1] * ITEMSIZE.get(r.dtype, 0) for r in rows)
    return f"{size / 2**30:.0f} GiB of rows" if size >= 2**30 else f"{size / 2**20:.0f} MiB of rows"


def curves(rows: Sequence[Row], failed: Sequence[Row], device: str, note: str) -> Any:
    """GB/s over the length of a row."""
    names = _providers(rows)
    size = (8.6, 4.8) if len(names) < _MANY else (9.8, 6.2)
    figure, axes = plt.subplots(figsize=size, layout="constrained")
    peak = max(r.gbps or 0 for r in rows)
    many = len({r.shape[1] for r in rows}) > 24
    copy = sorted((r.shape[1], r.gbps) for r in rows if r.provider == "copy" and r.gbps)
    if copy:
        style: dict[str, Any] = {"color": "black", "linestyle": _DASHES, "linewidth": 1.4}
        axes.plot(*zip(*copy, strict=True), **style, label=_limit(rows), zorder=3)
    for provider in reversed(names):
        points = sorted((r.shape[1], r.gbps) for r in rows if r.provider == provider and r.gbps)
        colour, marker = _style(provider, names)
        ours, rung = provider == "onepass", provider in _RUNGS
        axes.plot(
            *zip(*points, strict=True),
            color=colour,
            marker=marker,
            markersize=5.5 if ours else 4.5 if rung else 5,
            markevery=max(1, len(points) // 16) if many else 1,
            linewidth=2.4 if ours else 1.0 if rung else 1.5,
            linestyle=":" if provider in _ABOVE else "-",
            label=_label(provider),
            zorder=6 if ours else 5 if provider in _ABOVE or not rung else 4,
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
    _title(axes, f"{_what(rows[0])}, {_rows(rows)} of N", device)
    handles, labels = axes.get_legend_handles_labels()
    order = sorted(range(len(labels)), key=lambda i: (labels[i] == _limit(rows), -_last(rows, names, labels[i])))
    figure.legend(
        [handles[i] for i in order], [labels[i] for i in order], loc="outside right upper", frameon=False, fontsize=10
    )
    _foot(figure, failed, note)
    return figure


def _last(rows: Sequence[Row], names: Sequence[str], label: str) -> float:
    """GB/s at the longest row: the legend is in the order of the curves' ends."""
    own = [(r.shape[1], r.gbps or 0.0) for r in rows if _label(r.provider) == label]
    return max(own)[1] if own else 0.0


def cases(rows: Sequence[Row], failed: Sequence[Row], device: str, note: str) -> Any:
    """The fraction of a copy's speed, case by case. A provider without a time says why in the place of its bar."""
    names, limit = _providers(rows), _limit(rows)
    failed = [r for r in failed if r.provider in names]
    bars = len(names) * len({r.case for r in rows}) <= _MOST_BARS
    found: dict[str, dict[str, Row]] = {}
    for row in (*rows, *failed):
        found.setdefault(row.case, {})[row.provider] = row
    top = max((r.copy_fraction or 0 for r in rows if r.provider != "copy"), default=1.0)
    right = min(max(1.0, top), _CLIP)
    height = max(0.125 * (len(names) + 0.8), 0.4) if bars else 0.29
    columns = _columns(len(names) + 1)
    lines = -(-(len(names) + 1) // columns)
    legend = 24 * lines - 2 if lines <= 2 else 15 * lines + 12  # points
    above = 1.6 if lines <= 2 else 1.0 + legend / 72
    figure, axes = plt.subplots(figsize=(8.6, above + height * len(found)), layout="constrained")
    (_bars if bars else _markers)(axes, list(found.values()), names, right)
    axes.axvline(1.0, color="black", linestyle=_DASHES, linewidth=1.4, zorder=5, label=limit)
    axes.set_yticks(range(len(found)), [_named(case, own, "\n" if bars else "  ") for case, own in found.items()])
    axes.tick_params(axis="y", length=0, labelsize=8.5)
    axes.set_ylim(len(found) - 0.5, -0.5)
    axes.set_xlim(0, right * (1.13 if bars else 1.02))
    what = "a copy" if limit == "copy" else "an addition (two reads, one write)"
    axes.set_xlabel(f"speed, as a fraction of {what} of the same bytes: longer is faster")
    axes.grid(axis="x", color=_FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    for i in range(1, len(found)):
        axes.axhline(i - 0.5, color="#EEEEEE", linewidth=0.8, zorder=1)
    handles, labels = axes.get_legend_handles_labels()
    ranks = [*(_label(n) for n in names), limit]
    order = sorted(range(len(labels)), key=lambda i: ranks.index(labels[i]))
    axes.legend(
        [handles[i] for i in order],
        [labels[i] for i in order],
        loc="lower left",
        bbox_to_anchor=(-0.015, 1.0),
        ncols=columns,
        frameon=False,
        fontsize=9,
        columnspacing=1.4,
        handletextpad=0.5,
    )
    _title(axes, _what(rows[0]), device, raised=legend)
    _foot(figure, failed, note)
    return figure


def _columns(labels: int) -> int:
    """Of the legend: one line of it, or two, or as many as three columns make."""
    return labels if labels <= 4 else (labels + 1) // 2 if labels <= _MANY else 3


def _bars(axes: Any, found: Sequence[dict[str, Row]], names: Sequence[str], right: float) -> None:
    """A bar for each provider, its time beside it."""
    step = 1 / (len(names) + 0.8)  # a group is as high as 1, with the space of 0.8 bars between two
    for i, provider in enumerate(names):
        own = [(at, rows[provider]) for at, rows in enumerate(found) if provider in rows]
        ys = [at + (i + 0.5 - len(names) / 2) * step for at, _ in own]
        ends = [min(r.copy_fraction or 0.0, right) if r.ok else 0.0 for _, r in own]
        axes.barh(ys, ends, height=step * 0.9, color=_style(provider, names)[0], label=_label(provider), zorder=3)
        for y, end, (_, row) in zip(ys, ends, own, strict=True):
            clipped = f"  ({row.copy_fraction:.1f} of a copy)" if (row.copy_fraction or 0) > right else ""
            text = f"{time_text(row.median_us or 0)}{clipped}" if row.ok else f"{_label(provider)}: {why(row)}"
            axes.annotate(
                text,
                (end, y),
                (3, -0.3),
                textcoords="offset points",
                va="center",
                fontsize=6.6,
                color=INK if provider == "onepass" else "#666666",
                fontweight="bold" if provider == "onepass" else "normal",
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
                zorder=6,
            )


def _markers(axes: Any, found: Sequence[dict[str, Row]], names: Sequence[str], right: float) -> None:
    """A bar for the first provider, markers on its line for the others; its time, and torch's over it, at the right."""
    lead, others = names[0], names[1:]
    firsts = [(at, rows[lead]) for at, rows in enumerate(found) if lead in rows and rows[lead].ok]
    ends = [min(r.copy_fraction or 0.0, right) for _, r in firsts]
    colour = _style(lead, names)[0]
    axes.barh([at for at, _ in firsts], ends, height=0.56, color=colour, alpha=0.85, label=_label(lead), zorder=3)
    for provider in reversed(others):
        colour, marker = _style(provider, names)
        own = [(at, rows[provider]) for at, rows in enumerate(found) if provider in rows]
        absent = [at for at, row in own if not row.ok]
        if absent:
            side = 0.012 * right * (1 + 2 * others.index(provider))
            axes.plot([side] * len(absent), absent, "X", color=colour, mec="white", markersize=7, zorder=6)
        points = [(min(row.copy_fraction or 0.0, right), at) for at, row in own if row.ok]
        axes.plot(
            *zip(*points, strict=True),
            linestyle="none",
            marker=marker,
            markersize=7,
            markerfacecolor=colour,
            markeredgecolor="white",
            markeredgewidth=0.8,
            label=_label(provider),
            zorder=6,
            clip_on=False,
        )
    beside = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "va": "center", "fontsize": 8}
    for at, row in firsts:
        axes.annotate(time_text(row.median_us or 0), (1, at), (50, 0), ha="right", fontweight="bold", **beside)
        torch = found[at].get("torch")
        if torch and torch.ok and lead != "torch" and torch.median_us and row.median_us:
            axes.annotate(f"{torch.median_us / row.median_us:.1f}x", (1, at), (88, 0), ha="right", **beside)
    if lead != "torch" and "torch" in names:
        axes.annotate("vs torch", (1, -0.5), (88, 8), ha="right", color="#555555", **beside)


def _named(case: str, own: dict[str, Row], between: str) -> str:
    """The case without what the title says, and with its shape."""
    row = next(iter(own.values()))
    case = case.removeprefix(f"{row.function} backward, ").removeprefix(f"{row.function}, ")
    shape = "x".join(map(str, row.shape))
    return case if shape in case else f"{case}{between}{shape}"


def time_text(us: float) -> str:
    """Microseconds, and from 10000 of them on milliseconds.

    >>> time_text(12.34), time_text(216453.0)
    ('12.3 us', '216 ms')
    """
    return f"{us_text(us)} us" if us < 10000 else f"{us_text(us / 1000)} ms"


def _label(provider: str) -> str:
    return _LABEL.get(provider, provider)
