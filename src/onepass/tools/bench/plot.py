"""Pictures of results files. Nothing here times anything, or imports torch.

A suite that sweeps N is drawn as curves of GB/s over N, any other as bars: the fraction of a copy's speed, case by
case. One picture for each suite, function, direction and dtype, as PNG and as SVG; the same file gives the same SVG,
byte for byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from onepass.tools.bench.figures import INK, cases, curves
from onepass.tools.bench.results import Results, Row

_FONT: Any = {
    "font.family": "DejaVu Sans",  # ships with matplotlib: the same picture on every machine
    "font.size": 10,
    "svg.hashsalt": "onepass",
    "svg.fonttype": "path",
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": "#888888",
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def draw(files: Sequence[Results], folder: str | Path) -> list[Path]:
    """Draws every picture that the files hold rows for, and returns the paths written.

    Of rows that are in several files for one device, the newest file's is drawn. Several devices get pictures each.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    pictures: dict[tuple[str, ...], dict[tuple[str, str], tuple[Row, str]]] = {}
    for file in sorted(files, key=lambda f: str(f.environment["date"])):
        for row in file.rows:
            key = (row.suite, row.function, row.direction, row.dtype, row.out_dtype, _where(file, row))
            pictures.setdefault(key, {})[(row.case, row.provider)] = row, _note(file)
    devices = {name[-1] for name in pictures}
    written = []
    with plt.rc_context(_FONT):
        for name, found in pictures.items():
            timed = [replace(r, ok=False, error="disturbed") if r.disturbed else replace(r) for r, _ in found.values()]
            rows = [r for r in timed if r.ok]
            if not rows:
                continue
            suite, function, direction, dtype, out_dtype, device = name
            failed = [r for r in timed if not r.ok and r.provider != "copy"]
            files_of = dict.fromkeys(note for _, note in found.values())
            note = f"onepass bench {suite}: {len({r.case for r in rows})} points; {'; '.join(files_of)}"
            figure = (curves if _sweeps(rows) else cases)(rows, failed, device, note)
            parts = [suite, function, direction, dtype]
            parts += [f"to-{out_dtype}"] if out_dtype != dtype else []
            parts += [device] if len(devices) > 1 else []
            written += _save(figure, folder / _slug("-".join(parts)))
    return written


def _where(file: Results, row: Row) -> str:
    name = str(file.environment["device"])
    return f"{name}, {row.threads} thread{'s' * (row.threads > 1)}" if row.threads else name


def _note(file: Results) -> str:
    e = file.environment
    commit = f", commit {e['commit'][:7]}" if e["commit"] else ""
    return f"{str(e['date'])[:10]}, torch {e['torch']}{commit}"


def _sweeps(rows: Sequence[Row]) -> bool:
    """Whether all cases are matrices of at least three row lengths, with as many rows or with as many elements but for
    what one more row would make too many."""
    shapes = {tuple(r.shape) for r in rows}
    if not all(len(r.shape) == 2 and r.dim in (-1, 1) for r in rows) or len({s[1] for s in shapes}) < 3:
        return False
    most = max(m * n for m, n in shapes)
    return len({s[0] for s in shapes}) == 1 or all((m + 1) * n > most for m, n in shapes)


def _slug(text: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in text).strip("-").replace("--", "-")


def _save(figure: Any, path: Path) -> list[Path]:
    written = []
    for suffix, options in ((".png", {"dpi": 160}), (".svg", {"metadata": {"Date": None}})):
        written.append(path.with_name(path.name + suffix))
        figure.savefig(written[-1], **options)
    plt.close(figure)
    return written
