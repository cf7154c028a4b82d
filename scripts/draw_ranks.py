"""Draw what ranks exchange for a softmax of rows that are split over ranks: docs/plots/ranks.png (`make figures`)."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

RANKS, ROWS, WIDTH, STEP = 3, 4, 6, 10  # WIDTH: of a shard; STEP: from one rank to the next
SHARDS = ("#D6E9F5", "#8FC3E3", "#0072B2")
STATES = "#D55E00"


def draw(folder: Path) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(11, 3.4), layout="constrained")
    for axis, gathers in zip(axes, (True, False), strict=True):
        for rank in range(RANKS):
            left, middle = rank * STEP, rank * STEP + WIDTH / 2
            axis.text(middle, 12.5, f"rank {rank}", ha="center", fontsize=10)
            axis.add_patch(plt.Rectangle((left, 8), WIDTH, ROWS, facecolor=SHARDS[rank]))
            held = range(RANKS) if gathers else [rank]  # the shards that the rank has in the end
            for k, shard in enumerate(held):
                size = WIDTH * 1.4 / RANKS if gathers else WIDTH
                place = left + k * size - (WIDTH * 0.2 if gathers else 0), 0
                axis.add_patch(plt.Rectangle(place, size, ROWS, facecolor=SHARDS[shard], edgecolor="white"))
            if not gathers:
                axis.plot([left - 0.6] * ROWS, [8.5 + row for row in range(ROWS)], "o", color=STATES, markersize=5)
            for other in set(range(RANKS)) - {rank}:
                arrow = {"arrowstyle": "->", "linewidth": 3 if gathers else 0.8}
                arrow["color"] = SHARDS[-1] if gathers else STATES
                axis.annotate("", (other * STEP + WIDTH / 2, 4.2), (middle, 7.9), arrowprops=arrow)
        text = "2 bytes per element" if gathers else "8 bytes per row: m and l"
        box = {"facecolor": "white", "edgecolor": "none", "pad": 2}
        axis.text(STEP + WIDTH / 2, 6, text, ha="center", va="center", fontsize=11, bbox=box)
        axis.set_title("gathered: every rank gets whole rows" if gathers else "onepass: every rank gets the states")
        axis.set_xlim(-2, RANKS * STEP - 2)
        axis.set_ylim(-0.3, 13.5)
        axis.axis("off")
    figure.savefig(folder / "ranks.png", dpi=140)
    plt.close(figure)


if __name__ == "__main__":
    draw(Path(__file__).resolve().parent.parent / "docs" / "plots")
