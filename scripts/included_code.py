"""Shows parts of source files in pages of the docs, so that no code is pasted (a part of the site's hook).

A page has a link to the file, a comment that names the lines, and a numbered list of what to notice in them:

    [cuda_warp.cu](../../src/onepass/tools/gallery/cuda_warp.cu) <!-- code: "__device__ float warp_max" -->

    1. `mask > 0`: five exchanges.

On GitHub that is a link and a list. The site shows the lines below the link, with the number of an item at the line
that has the item's first code.

`"START"` is a block: from the first line that has this text to the end of the block, a brace in C++, a dedent in
Python. `"START" to "END"` goes to the next line that has the text END. Several parts are separated by commas. Without a
part it is the whole file except its header. ValueError if a text is not in the file, so that no page shows code that
no longer exists.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable
from pathlib import Path

__all__ = ["part", "with_code"]

_INCLUDE = re.compile(r"^\[([^\]]+)\]\(([^)]+)\) <!-- code(?:: (.*?))? -->$")
_PART = re.compile(r'"([^"]+)"(?: to "([^"]+)")?')
_ITEM = re.compile(r"^\d+\. (?:`([^`]+)`)?")
_COMMENT = re.compile(r"  (#|//) .*$")
_LANGUAGES = {".py": "python", ".h": "cpp", ".cpp": "cpp", ".cu": "cuda", ".cuh": "cuda"}
_WIDTH = 84  # the columns that a page shows without scrolling
_NUMBERS = "①②③④⑤⑥⑦⑧⑨⑩⑪⑫"


def with_code(markdown: str, folder: Path) -> str:
    """The text of a page in `folder`, with the code that it includes."""
    lines = markdown.split("\n")
    shown: list[str] = []
    for at, line in enumerate(lines):
        shown.append(line)
        if found := _INCLUDE.match(line):
            name, link, parts = found.groups()
            path = folder / link
            source = path.read_text()
            pieces = [part(source, *ends) for ends in _PART.findall(parts)] if parts else [_without_header(source)]
            comment = "#" if path.suffix == ".py" else "//"
            code = _numbered("\n\n".join(pieces).split("\n"), _items(lines[at + 1 :]), comment, path.name)
            shown[-1:] = [f"[{name}]({link})", "", f"```{_LANGUAGES[path.suffix]}", *code, "```"]
    return "\n".join(shown)


def part(source: str, start: str, end: str = "") -> str:
    """The lines of a source from the first with `start` to the next with `end`, or to the end of the block."""
    lines = source.split("\n")
    first = _find(lines, 0, start)
    if end:
        last = _find(lines, first, end)
    else:
        indent = len(lines[first]) - len(lines[first].lstrip())
        ends = [_COMMENT.sub("", line).rstrip()[-1:] for line in lines]
        last = next(i for i in range(first, len(lines)) if ends[i] and ends[i] in ":{};")
        if ends[last] in ":{":
            while last + 1 < len(lines) and _is_inside(lines[last + 1], indent):
                last += 1
            if last + 1 < len(lines) and lines[last + 1].strip().startswith("}"):
                last += 1
    return textwrap.dedent("\n".join(lines[first : last + 1])).rstrip()


def _find(lines: list[str], begin: int, text: str) -> int:
    for i in range(begin, len(lines)):
        if text in lines[i]:
            return i
    raise ValueError(f"no line has {text!r}")


def _is_inside(line: str, indent: int) -> bool:
    """Whether a line is in a block whose first line has this indent. Labels and directives may have less."""
    left = line.startswith("#pragma") or line.strip() in ("private:", "public:")
    return left or not line.strip() or len(line) - len(line.lstrip()) > indent


def _without_header(source: str) -> str:
    if source.startswith('"""'):
        return source.split('"""', 2)[2].strip()
    return re.sub(r"^(//.*\n)*", "", source).strip()


def _items(lines: Iterable[str]) -> list[str | None]:
    """The first code of each item of the numbered list that follows; None for an item without code."""
    found: list[str | None] = []
    for line in lines:
        if item := _ITEM.match(line):
            found.append(item[1])
        elif line and not line.startswith("   "):
            break
    return found


def _numbered(code: list[str], items: list[str | None], comment: str, name: str) -> list[str]:
    """The code, with the number of each item at the first line that has the item's code."""
    at: dict[int, str] = {}
    for number, text in enumerate(items):
        if text is not None:
            found = next((i for i, line in enumerate(code) if text in line), None)
            if found is None:
                raise ValueError(f"an item of a list has `{text}`, which the shown lines of {name} do not have")
            at[found] = at.get(found, "") + _NUMBERS[number]
    shown = []
    for i, line in enumerate(code):
        if i not in at:
            shown.append(line)
        elif len(line) + 6 <= _WIDTH and "//" not in line and "#" not in line:
            shown.append(f"{line}  {comment} {at[i]}")
        else:
            shown += [f"{line[: len(line) - len(line.lstrip())]}{comment} {at[i]}", line]
    return shown
