"""Results files as one HTML page with interactive charts (`onepass report`). Nothing here times or imports torch.

`page/` has the page's HTML, style and script; the charts are Plotly's, whose script the package `plotly` carries. The
page holds all of it and the data, and loads nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files as resources
from math import prod
from pathlib import Path
from typing import Any

from onepass.tools.bench.random_cases import moved_length
from onepass.tools.bench.report import Line, case_text, dtype_text, lines, problems, shape_text
from onepass.tools.bench.results import Results, Row
from onepass.tools.bench.segment_cases import SUITE as SEGMENTS
from onepass.tools.bench.segment_cases import SWEEP, mean_length
from onepass.tools.bench.styles import is_sweep, limit_name, providers, rows_text, style, why

__all__ = ["page", "unique_names"]

# matplotlib's markers -> Plotly's
_SYMBOLS = {
    **{"o": "circle", "s": "square", "D": "diamond", "d": "diamond-tall", "p": "pentagon", "*": "star"},
    **{"^": "triangle-up", "v": "triangle-down", "<": "triangle-left", ">": "triangle-right"},
    **{"P": "cross", "X": "x", "H": "hexagon", "h": "hexagon2", "8": "octagon"},
}
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")  # colour codes for terminals in messages of compilers


def page(files: Mapping[str, Results]) -> str:
    """The HTML page for these files. The keys are the names that the page shows.

    Raises ImportError without the package plotly.
    """
    from plotly.offline import get_plotlyjs

    names = providers(row for file in files.values() for row in file.rows)
    styles = {name: style(name, names) for name in names}
    data = {
        "files": [_file(name, file) for name, file in files.items()],
        "providers": {name: [label, colour, _SYMBOLS[marker]] for name, (label, colour, marker) in styles.items()},
    }
    parts = {
        "data": json.dumps(data, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c"),
        "plotly": get_plotlyjs(),
        "style": _part("page.css"),
        "script": "".join(_part(f"{name}.js") for name in ("lines", "controls", "charts", "tables", "page")),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _part("page.html"))


def unique_names(paths: Sequence[str]) -> list[str]:
    """The last parts of the paths, as many as make them unique.

    >>> unique_names(["a/r.json", "b/r.json"]), unique_names(["a/r.json", "b/s.json"])
    (['a/r.json', 'b/r.json'], ['r.json', 's.json'])
    """
    parts = [Path(path).parts for path in dict.fromkeys(paths)]
    for count in range(1, max(map(len, parts))):
        names = ["/".join(each[-count:]) for each in parts]
        if len(set(names)) == len(names):
            return names
    return [str(Path(*each)) for each in parts]


def _part(name: str) -> str:
    return (resources("onepass.tools.bench") / "page" / name).read_text(encoding="utf-8")


def _file(name: str, file: Results) -> dict[str, Any]:
    """The data of a file for the page's script: groups of lines that differ only in shape, and the lines."""
    found: dict[tuple[Any, ...], list[Line]] = {}
    for line in lines(file.rows):
        row = line.first()
        kind = (row.suite, row.function, row.direction, dtype_text(row), row.threads, row.world_size)
        found.setdefault(kind, []).append(line)
    groups: list[dict[str, Any]] = []
    shown: list[list[Any]] = []
    for (suite, function, direction, dtype, threads, world), members in found.items():
        axis, about = _axis([row for line in members for row in line.rows.values() if row.ok])
        group = {"suite": suite, "function": function, "direction": direction, "dtype": dtype}
        group |= {"threads": threads, "world": world, "axis": axis, "about": about}
        group |= {"limit": limit_name(members[0].first()), "drawn": "random" in suite}
        shown += [_line(len(groups), line, bool(axis)) for line in members]
        groups.append(group)
    environment = {key: value for key, value in file.environment.items() if value not in (None, "")}
    data = {
        "name": name,
        "environment": environment,
        "problems": [_COLOURS.sub("", text) for text in problems(file.rows)],
    }
    return data | {"groups": groups, "lines": shown}


def _axis(rows: Sequence[Row]) -> tuple[str, str]:
    """(name of the one length that changes, or "" if more than one changes; what the shapes have in common)."""
    if rows and rows[0].suite.startswith(SWEEP):
        return "mean length of a segment", f"{rows[0].shape[0]} items in segments"
    if rows and rows[0].suite.startswith("slide/"):
        return "the length that moves", rows[0].suite.removeprefix("slide/")
    return ("N, the length of a row", rows_text(rows)) if rows and is_sweep(rows) else ("", "")


def _line(group: int, line: Line, has_axis: bool) -> list[Any]:
    row = line.first()
    m, n = _rows_and_length(row)
    x = None if not has_axis else moved_length(row.suite, row.shape) if row.suite.startswith("slide/") else n
    cells = {name: _cell(line, name) for name in line.rows}
    return [group, case_text(row), shape_text(row), m, n, x, row.bytes, cells]


def _rows_and_length(row: Row) -> tuple[int, int]:
    """(number of rows, their length). For segments it is the mean length."""
    dims = row.dim if isinstance(row.dim, list) else [row.dim]
    n = prod(row.shape[d] for d in dims) if row.shape else 1
    n = mean_length(row.case, n) if row.suite.startswith(SEGMENTS) else n
    return prod(row.shape) // max(n, 1), n


def _cell(line: Line, name: str) -> list[Any]:
    """Times, the fraction of the limit, and a word that says why times are missing or unreliable."""
    row = line.rows[name]
    note = why(row) if not row.ok else "disturbed" if row.disturbed else ""
    fraction = line.fraction(name)
    if fraction is None and row.min_us is None and not note:  # a file of an older schema has only medians
        fraction = row.copy_fraction
    numbers = (row.median_us, row.p20_us, row.p80_us, fraction, row.graph_us, row.call_us)
    return [*(value and float(f"{value:.4g}") for value in numbers), note]
