"""Draw the pictures of the course: docs/course/pictures (`make figures`). Each function draws one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

from onepass.tools.cli.gallery import butterfly  # noqa: E402
from onepass.tools.gallery.variants import VARIANTS  # noqa: E402

BLUE, MID, LIGHT, ORANGE, GREEN, GREY = "#0072B2", "#8FC3E3", "#D6E9F5", "#D55E00", "#009E73", "#E4E4E4"
WIDTH = 6.4  # inches: a page shows 600 pixels or more, a phone 360
BACK = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
LANES_DARK = ("#56A0D3", "#0072B2", "#D55E00", "#009E73")
LANES = ("#D6E9F5", "#8FC3E3", "#F5C9A8", "#B7DFD1")  # colours for the owners of elements, in turn


def canvas(width: float, height: float) -> tuple[Any, Axes]:
    """A figure whose axes have this width and height in units, with equal scales."""
    figure = plt.figure(figsize=(WIDTH, WIDTH * height / width))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, width)
    axes.set_ylim(0, height)
    axes.axis("off")
    return figure, axes


def box(
    axes: Axes, x: float, y: float, width: float, height: float, text: str = "", colour: str = LIGHT, **font: Any
) -> None:
    axes.add_patch(plt.Rectangle((x, y), width, height, facecolor=colour, edgecolor="white", linewidth=1.2))
    ink = "white" if colour in (BLUE, ORANGE, GREEN) else "black"
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", **{"fontsize": 10, "color": ink, **font})


def say(axes: Axes, x: float, y: float, text: str, **font: Any) -> None:
    axes.text(x, y, text, **{"fontsize": 10, "ha": "left", "va": "center", **font})


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], colour: str = BLUE, **style: Any) -> None:
    style = {"arrowstyle": "-|>", "linewidth": 1.4, "color": colour, "shrinkA": 1, "shrinkB": 1, **style}
    axes.annotate("", end, start, arrowprops=style)


# The primer -------------------------------------------------------------------------------------------------------


def machine() -> Any:
    """The levels of memory, and which threads share each level."""
    figure, axes = canvas(64, 44)
    for i, left in enumerate((1, 17, 33)):
        box(axes, left, 19, 15, 24, colour=GREY)
        say(axes, left + 7.5, 41.4, f"multiprocessor {i}" if i < 2 else "… and so on", ha="center", fontsize=9)
        for warp in range(3):
            box(axes, left + 1, 36 - 3 * warp, 13, 2.6, "a warp: 32 lanes", fontsize=8.5)
        box(axes, left + 1, 25, 13, 4, "registers", MID)
        box(axes, left + 1, 20, 13, 4, "shared memory, L1", MID, fontsize=9)
    box(axes, 1, 11, 47, 5, "L2 cache", BLUE)
    box(axes, 1, 2, 47, 6, "memory", BLUE)
    for left in (8.5, 24.5, 40.5):
        arrow(axes, (left, 16), (left, 19), arrowstyle="<|-|>")
    arrow(axes, (24.5, 8), (24.5, 11), ORANGE, arrowstyle="<|-|>", linewidth=2.5)
    for y, head, text in (
        (27, "one lane's own", "256 KB in each"),
        (22, "one block's", "up to 227 KB in each"),
        (13.5, "everybody's", "tens of MB"),
        (5, "everybody's", "tens of GB"),
    ):
        say(axes, 49.5, y + 1, head, fontsize=9.5, weight="bold")
        say(axes, 49.5, y - 1, text, fontsize=9)
    say(axes, 49.5, 9.6, "the slow step", fontsize=9.5, color=ORANGE, weight="bold")
    return figure


def threads() -> Any:
    """A grid of blocks, a block of warps, a warp of lanes."""
    figure, axes = canvas(64, 27)
    say(axes, 1, 25.6, "a grid", weight="bold")
    for i in range(6):
        colour = MID if i == 5 else GREY
        box(axes, 1 + 7 * (i % 2), 17.6 - 6.6 * (i // 2), 6.4, 6, f"block\n{i}", colour, fontsize=9)
    say(axes, 22, 25.6, "block 5: warps", weight="bold")
    for warp in range(4):
        colour = MID if warp == 2 else GREY
        box(axes, 22, 19 - 4.4 * warp, 13, 4, f"warp {warp}", colour, fontsize=9)
    say(axes, 42, 25.6, "warp 2: lanes", weight="bold")
    for lane in range(32):
        box(axes, 42 + 2.6 * (lane % 8), 20.4 - 3 * (lane // 8), 2.6, 3, str(lane), LIGHT, fontsize=7.5)
    arrow(axes, (14.6, 7), (22, 12), ORANGE)
    arrow(axes, (35, 12.2), (42, 15), ORANGE)
    say(axes, 1, 1.6, "of lane 5 of warp 2 of block 5: threadIdx.x is 2 x 32 + 5 = 69, blockIdx.x is 5", fontsize=9.5)
    return figure


def coalescing() -> Any:
    """The lines of memory that a warp's load touches: neighbours, and a column."""
    figure, axes = canvas(64, 30)
    for top, step, title, cost in (
        (29, 1, "lane i reads element i: all bytes of the line are used", "1 line"),
        (14, 8, "lane i reads element 8i: an eighth of each line is used", "8 lines"),
    ):
        say(axes, 1, top - 1, title, weight="bold")
        for lane in range(8):
            box(axes, 1 + 2.6 * lane, top - 5, 2.4, 2.4, str(lane), MID, fontsize=9)
        say(axes, 23, top - 3.8, "… lanes of a warp", fontsize=9)
        lines = 8 if step > 1 else 1
        for line in range(lines):
            left, size = 1 + 7.8 * line, (7.4 if lines > 1 else 21)
            box(axes, left, top - 11, size, 2.6, colour=GREY)
            for element in range(8):
                used = step == 1 or element == 0
                if used:
                    box(axes, left + size / 8 * element, top - 11, size / 8, 2.6, colour=ORANGE)
        for lane in range(8):
            x = 1 + 7.8 * lane + 0.5 if step > 1 else 1 + 21 / 8 * (lane + 0.5)
            arrow(axes, (x, top - 8.3), (2.2 + 2.6 * lane, top - 5), linewidth=0.9)
        say(axes, 24 if step == 1 else 1, top - (9.7 if step == 1 else 12.6), f"{cost} of memory", fontsize=9)
    return figure


# Traffic ----------------------------------------------------------------------------------------------------------

# The steps of `naive`: matrices read and matrices written by each.
STEPS = (("maximum", 1, 0), ("subtract", 1, 1), ("exp", 1, 1), ("sum", 1, 0), ("divide", 1, 1))


def trips() -> Any:
    """The trips of a matrix to memory and back, for five kernels and for one."""
    traffic = VARIANTS["naive"].header.traffic
    assert (traffic.reads.mn, traffic.writes.mn) == (sum(s[1] for s in STEPS), sum(s[2] for s in STEPS))
    figure, axes = canvas(64, 32)
    box(axes, 1, 2, 62, 5, "memory", BLUE)
    say(axes, 1, 30.5, "naive: five kernels, eight trips", weight="bold")
    for i, (name, reads, writes) in enumerate(STEPS):
        left = 1 + 9.4 * i
        box(axes, left, 18, 8.6, 6, name, LIGHT, fontsize=9.5)
        arrow(axes, (left + (2.5 if writes else 4.3), 7), (left + (2.5 if writes else 4.3), 18), linewidth=2.4 * reads)
        if writes:
            arrow(axes, (left + 6.2, 18), (left + 6.2, 7), ORANGE, linewidth=2.4)
    say(axes, 51, 30.5, "fused: two", weight="bold")
    box(axes, 51, 18, 12, 6, "all five", MID, fontsize=9.5)
    arrow(axes, (54, 7), (54, 18), linewidth=2.4)
    arrow(axes, (60, 18), (60, 7), ORANGE, linewidth=2.4)
    say(axes, 1, 27, "read", color=BLUE)
    say(axes, 6, 27, "written", color=ORANGE)
    say(axes, 14, 27, "each arrow: the whole matrix", fontsize=9)
    return figure


# The merge --------------------------------------------------------------------------------------------------------


def levels() -> Any:
    """The levels of the machine that merge pairs, and what carries them."""
    figure, axes = canvas(64, 43)
    rungs = (
        ("lane", "a loop over its elements", "in its own registers"),
        ("warp", "32 lanes", "from register to register"),
        ("block", "up to 32 warps", "through shared memory"),
        ("cluster", "up to 16 blocks", "through each other's shared memory"),
        ("grid", "all blocks", "through the L2 cache"),
        ("node", "several GPUs", "as messages"),
    )
    for i, (name, of, carrier) in enumerate(rungs):
        y, size = 1 + 6.8 * i, 11 + 3.6 * i
        box(axes, 16 - size / 2 + 1, y, size, 4.8, name, (LIGHT, LIGHT, MID, MID, BLUE, BLUE)[i], weight="bold")
        say(axes, 34, y + 3.4, of, weight="bold")
        say(axes, 34, y + 1.2, carrier, fontsize=9.5)
        if i:
            arrow(axes, (17, y - 2), (17, y), ORANGE, linewidth=2)
    return figure


def pairs() -> Any:
    """A tree of merges of a row of numbers, with the pair at each node."""
    import torch

    import onepass

    row = (2.0, 0.0, 1.0, 3.0, 1.0, 5.0, 4.0, 0.0)
    figure, axes = canvas(65, 34)
    states = [onepass.state(torch.tensor([v], dtype=torch.float64)) for v in row]
    places = [4.5 + 8 * i for i in range(8)]
    level, height = 0, 30.0
    for x, v in zip(places, row, strict=True):
        box(axes, x - 2, 30, 4, 3, f"{v:g}", GREY)
    while True:
        width = 7.4 if level < 2 else 10.5
        y = height - 6.6
        for x, s in zip(places, states, strict=True):
            colour = (LIGHT, MID, MID, BLUE)[level]
            box(axes, x - width / 2, y, width, 3.6, f"({s.m:.0f}, {s.l:.{3 if level else 0}f})", colour, fontsize=9.5)
        if level == 0:
            for x in places:
                arrow(axes, (x, 30), (x, y + 3.6), linewidth=1)
        if len(states) == 1:
            break
        states = [onepass.merge(*states[i : i + 2]) for i in range(0, len(states), 2)]
        above, places = places, [(places[i] + places[i + 1]) / 2 for i in range(0, len(places), 2)]
        for i, x in enumerate(above):
            arrow(axes, (x, y), (places[i // 2], y - 3), ORANGE, linewidth=1.2)
        level, height = level + 1, y
    return figure


def shuffles() -> Any:
    """The butterfly sum of eight lanes, as `onepass gallery shuffle --op sum --lanes 8` prints it."""
    lanes = 8
    steps = [(0, list(range(lanes))), *butterfly(list(range(lanes)), "sum")]
    figure, axes = canvas(64, 34)

    def place(lane: int) -> float:
        return 14 + 6.6 * lane

    for level, (mask, values) in enumerate(steps):
        y = 29 - 9 * level
        say(axes, 0.5, y + 1.5, f"mask {mask}" if mask else "start", weight="bold")
        for lane, value in enumerate(values):
            colour = (LIGHT, LIGHT, MID, BLUE)[level]
            box(axes, place(lane) - 2.2, y, 4.4, 3, str(value), colour)
            if mask:
                arrow(axes, (place(lane ^ mask), y + 9), (place(lane), y + 3), ORANGE, linewidth=1.1)
                arrow(axes, (place(lane), y + 9), (place(lane), y + 3), linewidth=1.1)
    say(axes, 0.5, 33, "lane", fontsize=9)
    for lane in range(lanes):
        say(axes, place(lane), 33, str(lane), ha="center", fontsize=9)
    return figure


def block() -> Any:
    """A reduction over a block: lanes, then warps through shared memory."""
    figure, axes = canvas(64, 38)
    maxima = (7, 3, 9, 4)
    for warp, value in enumerate(maxima):
        left = 11 + 13.3 * warp
        say(axes, left + 6, 36.6, f"warp {warp}", ha="center", weight="bold")
        box(axes, left, 30, 12, 4.4, "32 values", LIGHT, fontsize=9.5)
        arrow(axes, (left + 6, 30), (left + 6, 26))
        box(axes, left + 3.6, 22.4, 4.8, 3.6, str(value), MID)
        arrow(axes, (left + 6, 22.4), (left + 6, 18.2), ORANGE)
        box(axes, left, 14.6, 12, 3.6, str(value), ORANGE)
        arrow(axes, (left + 6, 11), (left + 6, 6.6))
        box(axes, left + 3.6, 3, 4.8, 3.6, str(max(maxima)), BLUE)
    axes.plot([11, 63], [12.6, 12.6], color="black", linewidth=2)
    for y, text in (
        (28, "shuffles"),
        (20.2, "lane 0\nwrites"),
        (16.4, "shared\nmemory"),
        (12.6, "barrier"),
        (8.6, "all read,\nshuffles"),
    ):
        say(axes, 0.5, y, text, fontsize=9)
    return figure


# The rungs --------------------------------------------------------------------------------------------------------


def vectors() -> Any:
    """A row that begins within a vector: head, whole vectors, tail."""
    figure, axes = canvas(64, 19)
    size, begin, n = 3.0, 3, 15
    say(axes, 2, 17.6, "a row of 15 floats that begins 3 floats into a vector", weight="bold")
    for i in range(20):
        inside = begin <= i < begin + n
        colour = GREY if not inside else MID if 4 <= i < 16 else ORANGE
        text = str(i - begin) if inside else ""
        box(axes, 2 + size * i, 9, size, 3.6, text, colour, fontsize=9)
    for v in range(5):
        left = 2 + size * 4 * v
        axes.plot([left + 0.3, left + 4 * size - 0.3], [7.7, 7.7], color="black", linewidth=1.5)
        text = "one load" if 0 < v < 4 else "one by one"
        say(axes, left + 2 * size, 6, text, ha="center", color=ORANGE if v in (0, 4) else BLUE, weight="bold")
    say(axes, 2, 14, "16 bytes begin at each black line", fontsize=9)
    say(axes, 2, 2.4, "grey: not the row's. It is never read: it may be outside of the tensor.", fontsize=9)
    return figure


def flight() -> Any:
    """Loads one at a time, beside loads that are all issued before the first use."""
    figure, axes = canvas(64, 26)
    for top, title, starts in (
        (25, "load, use, load, use: one load on its way", (0, 15, 30, 45)),
        (12, "all loads first: four on their way", (0, 0.8, 1.6, 2.4)),
    ):
        say(axes, 1, top - 1, title, weight="bold")
        for i, start in enumerate(starts):
            y = top - 4.2 - 1.9 * i
            box(axes, 1 + start, y, 12, 1.6, "waiting for memory" if not i else "", LIGHT, fontsize=7.5)
            box(axes, 13 + (start if top == 25 else 2.8 * i), y, 2.6, 1.6, "", ORANGE)
    box(axes, 36, 1.5, 2.6, 1.6, "", ORANGE)
    say(axes, 39.4, 2.3, "used", fontsize=9)
    arrow(axes, (48, 2.3), (62, 2.3), "black")
    say(axes, 52, 3.9, "time", fontsize=9)
    return figure


def groups() -> Any:
    """A warp that holds four rows."""
    figure, axes = canvas(64, 19)
    say(axes, 1, 17.6, "one warp, LANES = 8: four rows at a time", weight="bold")
    size, begin = 1.68, 9.6
    for lane in range(32):
        box(axes, begin + size * lane, 10.6, size, 3, str(lane), LANES[lane // 8], fontsize=6.5)
    for row in range(4):
        say(axes, begin + 8 * size * (row + 0.5), 14.8, f"row {row}", ha="center", fontsize=9)
    for step, mask in enumerate((4, 2, 1)):
        top = 9.4 - 3.2 * step
        say(axes, 1, top - 0.8, f"mask {mask}", weight="bold")
        for lane in (lane for lane in range(32) if not lane & mask):
            left, right = (begin + size * (k + 0.5) for k in (lane, lane | mask))
            bottom = top - 0.8 - 0.4 * (lane % mask)
            axes.plot([left, left, right, right], [top, bottom, bottom, top], color=ORANGE, linewidth=0.9)
    return figure


def pipeline() -> Any:
    """The next row is copied while one is computed."""
    figure, axes = canvas(64, 25)
    say(axes, 1, 23.6, "one after the other: memory idles while a block computes", weight="bold")
    say(axes, 1, 12.2, "cp.async: the next row is on its way", weight="bold")
    for i in range(3):
        box(axes, 8 + 18 * i, 18.6, 10, 2.8, f"copy {i}", MID, fontsize=9)
        box(axes, 18 + 18 * i, 15.2, 8, 2.8, f"row {i}", ORANGE, fontsize=9)
    for i in range(5):
        box(axes, 8 + 10 * i, 7.2, 9.8, 2.8, f"copy {i}", MID, fontsize=9)
        if i < 4:
            box(axes, 18 + 10 * i, 3.8, 8, 2.8, f"row {i}", ORANGE, fontsize=9)
    for y in (20, 8.6):
        say(axes, 1, y, "memory", fontsize=9)
        say(axes, 1, y - 3.4, "threads", fontsize=9)
    arrow(axes, (8, 2), (62, 2), "black")
    say(axes, 1, 2, "time", fontsize=9)
    return figure


def cluster() -> Any:
    """Blocks of a cluster that write their pairs into each other's shared memory."""
    figure, axes = canvas(64, 29)
    for b in range(4):
        left = 1 + 15.8 * b
        box(axes, left, 1, 14.6, 27, "", GREY)
        say(axes, left + 7.3, 26.4, f"block {b}", ha="center", weight="bold")
        box(axes, left + 1, 20.4, 12.6, 4, "a quarter of the row", LIGHT, fontsize=8.5)
        arrow(axes, (left + 7.3, 20.4), (left + 7.3, 18.4))
        box(axes, left + 3.8, 15, 7, 3.4, f"pair {b}", LANES[b], fontsize=9)
        for peer in range(4):
            x = 1 + 15.8 * peer + 2.2 + 3.4 * b
            arrow(axes, (left + 7.3, 15), (x, 7.4), LANES_DARK[b], linewidth=0.9)
        for r in range(4):
            box(axes, left + 0.6 + 3.4 * r, 4, 3.3, 3.4, str(r), LANES[r], fontsize=9)
        say(axes, left + 7.3, 2.4, "shared memory", ha="center", fontsize=8.5)
    return figure


def grid() -> Any:
    """Blocks that leave pairs in memory, wait for all, and read those of their row."""
    figure, axes = canvas(64, 31)
    for b in range(6):
        left = 1 + 10.6 * b
        box(axes, left, 23.4, 9.6, 4, f"block {b}", LANES[b // 3])
        arrow(axes, (left + 4.8, 23.4), (left + 4.8, 19.2), ORANGE)
        box(axes, left + 0.4, 15.8, 8.8, 3.4, f"pair {b} in L2", LANES[b // 3], fontsize=8.5)
        arrow(axes, (left + 4.8, 10.2), (left + 4.8, 6.6))
        box(axes, left, 2.6, 9.6, 4, "writes", LANES[b // 3])
    for row in range(2):
        say(axes, 16.4 + 31.8 * row, 29.4, f"row {row}: three blocks", ha="center", weight="bold")
        left = 1 + 31.8 * row
        axes.plot([left, left + 30.8], [10.2, 10.2], color=BLUE, linewidth=1.4)
        say(axes, left + 15.4, 8.4, "each reads the three pairs of its row", ha="center", fontsize=9, bbox=BACK)
    axes.plot([1, 63], [13, 13], color="black", linewidth=2.5)
    say(axes, 32, 13, "barrier of the whole grid", ha="center", fontsize=9.5, weight="bold", bbox=BACK)
    return figure


def columns() -> Any:
    """How the lanes of a warp lie on a matrix whose columns are reduced."""
    figure, axes = canvas(64, 27)
    for row in range(7):
        for vector in range(8):
            colour = LANES[row] if row < 4 else GREY
            text = str(8 * row + vector) if row < 4 else ""
            box(axes, 9 + 5 * vector, 20 - 2.8 * row, 5, 2.8, text, colour, fontsize=9)
        say(axes, 8.2, 21.4 - 2.8 * row, f"row {row}", ha="right", fontsize=9)
    say(axes, 9, 25.6, "8 lanes side by side read 128 bytes of a row together", weight="bold")
    say(axes, 50.5, 17, "one warp:\nlanes 0 to 31,\nfour rows", fontsize=9.5)
    say(axes, 50.5, 7.2, "other warps,\nfurther down", fontsize=9.5)
    arrow(axes, (4, 9), (4, 1.4), ORANGE, linewidth=2)
    say(axes, 5.2, 1.6, "down a column: the reduction", fontsize=9, color=ORANGE, weight="bold")
    return figure


def ladder() -> Any:
    """The fraction of the limit's speed of each rung: the mean over the rows of a results file, and the best."""
    from course_tables import NOT_MEASURED
    from make_figures import gallery_results

    results, names = gallery_results(), list(VARIANTS)
    figure, axes = plt.subplots(figsize=(WIDTH, 0.8 + 0.27 * len(names)), layout="constrained")
    colours = {"naive": GREY, "triton": MID, "cpu": GREY, "cuda": BLUE}
    for i, name in enumerate(names):
        mean, best = results.mean(name) or 0, results.best(name) or 0
        colour = colours[name.partition("-")[0]]
        axes.barh(i, best, color=colour, alpha=0.45, height=0.75)
        axes.barh(i, mean, color=colour, height=0.75)
        axes.text(max(best, 1.02 if best > 0.9 else 0) + 0.01, i, f"{best:.2f}" if best else NOT_MEASURED, va="center")
    axes.axvline(1, color=ORANGE, linewidth=2)
    axes.text(1, -0.75, "a copy", ha="center", color=ORANGE, weight="bold", fontsize=10)
    axes.set_yticks(range(len(names)), names, fontsize=10)
    axes.set_ylim(len(names) - 0.5, -0.6)
    axes.set_xlim(0, 1.17)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_xlabel("of the limit's speed: mean over rows (dark) and best (light)", fontsize=10)
    return figure


PICTURES: dict[str, Callable[[], Any]] = {
    "threads": threads,
    "machine": machine,
    "coalescing": coalescing,
    "trips": trips,
    "levels": levels,
    "pairs": pairs,
    "shuffles": shuffles,
    "block": block,
    "vectors": vectors,
    "flight": flight,
    "groups": groups,
    "pipeline": pipeline,
    "cluster": cluster,
    "grid": grid,
    "columns": columns,
    "ladder": ladder,
}


def draw(folder: Path, names: Sequence[str] = ()) -> None:
    for name in names or PICTURES:
        figure = PICTURES[name]()
        figure.savefig(folder / f"{name}.png", dpi=160)
        plt.close(figure)


if __name__ == "__main__":
    draw(ROOT / "docs" / "course" / "pictures", sys.argv[1:])
