"""Write the notebook of the course, docs/course/softmax.ipynb, from examples/softmax_course.py, with the output of its
cells (`make figures`). A cell begins with `# %%`, or with `# %% [markdown]` for text in comments."""

from __future__ import annotations

import contextlib
import io
import json
import linecache
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "examples" / "softmax_course.py"
NOTEBOOK = ROOT / "docs" / "course" / "softmax.ipynb"


def cells(text: str) -> list[tuple[str, str]]:
    """The kind of each cell, "markdown" or "code", and its source."""
    found = []
    for kind, source in re.findall(r"^# %%( \[markdown\])?\n(.*?)(?=^# %%|\Z)", text, re.M | re.S):
        lines = source.strip().split("\n")
        text = "\n".join(line.removeprefix("#").removeprefix(" ") for line in lines) if kind else "\n".join(lines)
        found.append(("markdown" if kind else "code", text))
    return found


def run(sources: list[str]) -> list[str]:
    """The output of each code cell. The cells share their global names."""
    printed, names = [], {"__name__": "__main__"}
    for number, source in enumerate(sources):
        file = f"<cell {number}>"
        linecache.cache[file] = (len(source), None, source.splitlines(True), file)  # Triton reads a kernel's source
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(source, file, "exec"), names)
        printed.append(out.getvalue())
    return printed


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def notebook(found: list[tuple[str, str]], printed: list[str]) -> dict[str, Any]:
    made: list[dict[str, Any]] = []
    outputs = iter(printed)
    for number, (kind, source) in enumerate(found):
        cell: dict[str, Any] = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}, "source": _lines(source)}
        if kind == "code":
            text = next(outputs)
            stream = [{"name": "stdout", "output_type": "stream", "text": _lines(text)}] if text else []
            cell |= {"execution_count": None, "outputs": stream}
        made.append(cell)
    python = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {
        "cells": made,
        "metadata": {"kernelspec": python, "language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def main() -> None:
    found = cells(SOURCE.read_text())
    made = notebook(found, run([source for kind, source in found if kind == "code"]))
    NOTEBOOK.write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
