"""What every rung of the gallery is: a file whose header says its idea, its traffic and its limit, and a function.

The header is the first comment or docstring of the file, in paragraphs that begin with these words:

    Idea: what it does.
    Traffic: reads 5MN + 2M, writes 3MN + 2M; what else there is to say.
    Limit: what it is limited by, and what it does not take.

The traffic is read from there, so that page and numbers cannot differ: elements that an M x N matrix costs. Where a
row is read repeatedly, `; from memory reads MN, writes MN` says what is left of it while the rows in flight stay in
the caches.
"""

from __future__ import annotations

import importlib
import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onepass.tools.gallery.options import check

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["Header", "Rung", "Traffic", "header_of"]

FOLDER = Path(__file__).parent
_LANGUAGES = {".cpp": "C++", ".cu": "CUDA"}


@dataclass(frozen=True)
class Traffic:
    """Elements read and written for an M x N matrix, each `a * M * N + b * M`."""

    reads: tuple[int, int]
    writes: tuple[int, int]

    def elements(self, rows: int, n: int) -> tuple[int, int]:
        """(elements read, elements written).

        >>> Traffic(reads=(5, 2), writes=(3, 2)).elements(10, 100)
        (5020, 3020)
        """
        (a, b), (c, d) = self.reads, self.writes
        return a * rows * n + b * rows, c * rows * n + d * rows

    def ratio(self, rows: int, n: int) -> float:
        """What it moves, in units of the least: each element read once and written once."""
        return sum(self.elements(rows, n)) / (2 * rows * n)


@dataclass(frozen=True)
class Header:
    """What the header of a rung says. `cached` is the traffic while a cache serves the re-reads, where that is less."""

    idea: str
    traffic_text: str
    limit: str
    traffic: Traffic
    cached: Traffic | None


@dataclass(frozen=True)
class Rung:
    """One way to compute the softmax of the rows of a matrix.

    `function` is "module:name" of what computes it from checked arguments, (x, out, **options); it is imported when
    first called, as it may need Triton. Where its module has `refuses(rows, n, dtype)`, that says why the idea does not
    take a shape, or None. `options` are the launch parameters that it takes. `runs_on` is told where nobody asks
    `unavailable`, which needs torch.
    """

    name: str
    file: str
    function: str
    unavailable: Callable[[torch.device], str | None]
    options: tuple[str, ...] = ()
    takes_out: bool = True
    runs_on: str = "CPU, GPU"

    def __call__(self, x: Tensor, *, out: Tensor | None = None, **options: Any) -> Tensor:
        """The softmax of each row of `x`.

        Args:
            x: (M, N), float32, float16 or bfloat16; any row stride, unit stride within a row.
            out: (M, N) of the dtype of `x`, likewise, not overlapping `x`; a contiguous one is made where it is None.
            options: launch parameters in place of the rung's own choice; None is the rung's choice.

        Raises:
            ValueError, TypeError: for what the rung does not take, with what it takes.
            RuntimeError: where it cannot run on the device of `x`.
        """
        import torch

        from onepass.tools.gallery.checks import check_matrix, check_out

        check_matrix(self.name, "x", x)
        given = {key: value for key, value in options.items() if value is not None}
        for key, value in given.items():
            if key not in self.options:
                taken = ", ".join(self.options) or "no launch parameters"
                raise TypeError(f"{self.name}: got {key}; it takes {taken}")
            check(f"{self.name}: {key}", key, value)
        reason = self.unavailable(x.device)
        if reason is not None:
            raise RuntimeError(f"{self.name}: cannot run on {x.device}: {reason}")
        reason = self.refuses(x.shape[0], x.shape[1], x.dtype)
        if reason is not None:
            raise ValueError(f"{self.name}: {reason}")
        if out is not None and not self.takes_out:
            raise TypeError(f"{self.name}: takes no out")
        if out is not None:
            check_out(self.name, x, out)
        elif self.takes_out:
            out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if x.numel() == 0:
            return torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
        return getattr(self._module, self.function.partition(":")[2])(x, out, **given)

    def refuses(self, rows: int, n: int, dtype: torch.dtype) -> str | None:
        """Why the idea of this rung does not take a matrix of that shape, or None. Only where the rung is available."""
        ask = getattr(self._module, "refuses", None)
        return None if ask is None else ask(rows, n, dtype)

    @property
    def _module(self) -> Any:
        return importlib.import_module("onepass.tools.gallery." + self.function.partition(":")[0])

    @property
    def language(self) -> str:
        """What the file is written in: Python, Triton, C++ or CUDA."""
        return _LANGUAGES.get(self.path.suffix) or ("Triton" if self.file.startswith("triton") else "Python")

    @property
    def path(self) -> Path:
        return FOLDER / self.file

    @property
    def source(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def header(self) -> Header:
        return header_of(self.source)


_COUNT = re.compile(r"^(?:(\d*)MN)?(?:(?:^| \+ )(\d*)M)?$")
_PAIR = re.compile(r"reads ([\dMN+ ]+), writes ([\dMN+ ]+)")


def _count(text: str) -> tuple[int, int]:
    """
    >>> _count("5MN + 2M"), _count("MN"), _count("M")
    ((5, 2), (1, 0), (0, 1))
    """
    found = _COUNT.match(text.strip())
    if not text.strip() or found is None:
        raise ValueError(f"not a count of elements like '5MN + 2M': {text!r}")
    of_mn, of_m = (0 if part is None else int(part or 1) for part in found.groups())
    return of_mn, of_m


def header_of(source: str) -> Header:
    """The header of a rung's source, Python or C++. Raises ValueError where a paragraph is missing."""
    if source.startswith('"""'):
        text = source[3 : source.index('"""', 3)]
    else:
        lines = []
        for line in source.splitlines():
            if not line.startswith("//"):
                break
            lines.append(line.removeprefix("//").removeprefix(" "))
        text = "\n".join(lines)
    said = {}
    for paragraph in re.split(r"\n\s*\n|\n(?=Idea:|Traffic:|Limit:)", textwrap.dedent(text)):
        word, colon, rest = paragraph.strip().partition(":")
        if colon and word in ("Idea", "Traffic", "Limit"):
            said[word] = " ".join(rest.split())
    missing = [word for word in ("Idea", "Traffic", "Limit") if not said.get(word)]
    if missing:
        raise ValueError(f"the header of a rung lacks {', '.join(missing)}")
    pairs = [Traffic(_count(reads), _count(writes)) for reads, writes in _PAIR.findall(said["Traffic"])]
    if not 1 <= len(pairs) <= 2:
        raise ValueError(f"the header of a rung has no 'reads ..., writes ...': {said['Traffic']!r}")
    return Header(said["Idea"], said["Traffic"], said["Limit"], pairs[0], pairs[1] if len(pairs) > 1 else None)
