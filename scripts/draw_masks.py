"""Draw which elements take part in a softmax of scores, for the docs: docs/plots/masks.png (`make figures`)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import torch
from matplotlib import pyplot as plt
from matplotlib.colors import LinearSegmentedColormap

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

from onepass.reference import score  # noqa: E402

KEYS = 10
DOCUMENT = torch.tensor([0, 0, 0, 0, 1, 1, 1, 2, 2, 2])  # the document of each position
# The title of a panel, its number of queries, and the options of the call.
PANELS: tuple[tuple[str, int, dict[str, Any]], ...] = (
    ("causal=True", 10, {"causal": True}),
    ("causal=True: 4 queries, the last keys", 4, {"causal": True}),
    ("causal=True, offset=3", 4, {"causal": True, "offset": 3}),
    ("causal=True, window=(3, 0)", 10, {"causal": True, "window": (3, 0)}),
    ("window=(2, 2)", 10, {"window": (2, 2)}),
    ("mask=is_token[:, None, None, :]", 10, {"mask": (torch.arange(KEYS) < 7).expand(10, KEYS)}),
    ("causal=True,\nmask=document[:, None] == document", 10, {"mask": DOCUMENT[:, None] == DOCUMENT, "causal": True}),
    ("alibi=slopes, causal=True", 10, {"alibi": torch.tensor(0.5), "causal": True}),
    ("alibi=slopes", 10, {"alibi": torch.tensor(0.5)}),
)
BLUES = LinearSegmentedColormap.from_list("blues", ["#D6E9F5", "#0072B2"])


def draw(folder: Path) -> None:
    figure, axes = plt.subplot_mosaic("abde;acde;fghi;fghi", figsize=(11, 6.2), layout="constrained")
    for axis, (title, queries, options) in zip((axes[name] for name in "abcdefghi"), PANELS, strict=True):
        scores = score("softmax", torch.zeros(queries, KEYS), **options)
        shown = scores.masked_fill(scores.isinf(), torch.nan).numpy()
        axis.set_facecolor("#EEEEEE")
        axis.pcolormesh(shown, cmap=BLUES, vmin=-4.5, vmax=0, edgecolors="white", linewidth=1)
        axis.set_aspect("equal")
        axis.invert_yaxis()
        axis.set_xticks([at + 0.5 for at in range(KEYS)], [str(at) for at in range(KEYS)])
        axis.set_yticks([at + 0.5 for at in range(queries)], [str(at) for at in range(queries)])
        axis.tick_params(length=0, labelsize=8)
        axis.spines[:].set_visible(False)
        axis.set_title(title, fontsize=9)
        axis.set_xlabel("key", fontsize=9)
        axis.set_ylabel("query", fontsize=9)
    figure.savefig(folder / "masks.png", dpi=160)
    plt.close(figure)


if __name__ == "__main__":
    draw(ROOT / "docs" / "plots")
