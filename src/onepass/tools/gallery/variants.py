"""The variants of the gallery: what one is, and the list of them, from the plainest to the fastest.

A variant is a file with a function and a header, which says its idea, its traffic and its limit. The header is the
first comment or docstring of the file, in paragraphs that begin with these words:

    Idea: what it does.
    Traffic: reads 5MN + 2M, writes 3MN + 2M; remarks.
    Limit: what it is limited by, and what it does not take.

The traffic is parsed from there, so that the page and the numbers cannot differ. It counts the elements that an M x N
matrix costs. If a row is read repeatedly, `; from memory reads MN, writes MN` gives the part of the traffic that
remains while the caches hold the rows in flight.

This module does not import torch, so that `onepass gallery` lists and shows the variants at once.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import shutil
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onepass.tools.gallery.launch_params import check_value

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["DTYPES", "VARIANTS", "Header", "Traffic", "Variant", "format_count", "parse_header", "variant"]

DTYPES = ("float32", "float16", "bfloat16")
FOLDER = Path(__file__).parent
_LANGUAGES = {".cpp": "C++", ".cu": "CUDA"}


# Headers ---------------------------------------------------------------------------------------------------------


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
        """The traffic in units of the minimum, which reads and writes each element once."""
        return sum(self.elements(rows, n)) / (2 * rows * n)


@dataclass(frozen=True)
class Header:
    """The header of a variant. `cached` is the traffic while a cache serves the repeated reads; None if it is equal."""

    idea: str
    traffic_text: str
    limit: str
    traffic: Traffic
    cached: Traffic | None


_COUNT = re.compile(r"^(?:(\d*)MN)?(?:(?:^| \+ )(\d*)M)?$")
_PAIR = re.compile(r"reads ([\dMN+ ]+), writes ([\dMN+ ]+)")


def _parse_count(text: str) -> tuple[int, int]:
    """
    >>> _parse_count("5MN + 2M"), _parse_count("MN"), _parse_count("M")
    ((5, 2), (1, 0), (0, 1))
    """
    found = _COUNT.match(text.strip())
    if not text.strip() or found is None:
        raise ValueError(f"not a count of elements like '5MN + 2M': {text!r}")
    of_mn, of_m = (0 if part is None else int(part or 1) for part in found.groups())
    return of_mn, of_m


def format_count(count: tuple[int, int]) -> str:
    """A count of elements as the headers write it.

    >>> format_count((5, 2)), format_count((1, 0)), format_count((0, 1)), format_count((0, 0))
    ('5MN + 2M', 'MN', 'M', '0')
    """
    parts = zip(count, ("MN", "M"), strict=True)
    return " + ".join(f"{'' if factor == 1 else factor}{unit}" for factor, unit in parts if factor) or "0"


def parse_header(source: str) -> Header:
    """The header of a variant's source, Python or C++. Raises ValueError if a paragraph is missing."""
    if source.startswith('"""'):
        text = source[3 : source.index('"""', 3)]
    else:
        comment = re.match(r"(//.*\n?)*", source)
        text = re.sub(r"^// ?", "", comment[0] if comment else "", flags=re.MULTILINE)
    found = {}
    for paragraph in re.split(r"\n\s*\n|\n(?=Idea:|Traffic:|Limit:)", textwrap.dedent(text)):
        word, colon, rest = paragraph.strip().partition(":")
        if colon and word in ("Idea", "Traffic", "Limit"):
            found[word] = " ".join(rest.split())
    missing = [word for word in ("Idea", "Traffic", "Limit") if not found.get(word)]
    if missing:
        raise ValueError(f"the header of a variant lacks {', '.join(missing)}")
    pairs = [Traffic(_parse_count(reads), _parse_count(writes)) for reads, writes in _PAIR.findall(found["Traffic"])]
    if not 1 <= len(pairs) <= 2:
        raise ValueError(f"the header of a variant has no 'reads ..., writes ...': {found['Traffic']!r}")
    return Header(found["Idea"], found["Traffic"], found["Limit"], pairs[0], pairs[1] if len(pairs) > 1 else None)


# Variants --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Variant:
    """One way to compute the softmax of the rows of a matrix.

    `function` is "module:name" of the function that computes it from checked arguments, (x, out, **launch_params). The
    module is imported at the first call, because it may need Triton. If it has `refuses(rows, n, dtype)`, that returns
    why the idea does not take a shape, or None. `runs_on` is the short text of the list; `unavailable` needs torch.
    """

    name: str
    file: str
    function: str
    unavailable: Callable[[torch.device], str | None]
    launch_params: tuple[str, ...] = ()
    takes_out: bool = True
    runs_on: str = "CPU, GPU"

    def __call__(self, x: Tensor, *, out: Tensor | None = None, **launch_params: int | None) -> Tensor:
        """The softmax of each row of `x`.

        Args:
            x: (M, N), float32, float16 or bfloat16; any row stride, unit stride within a row.
            out: a tensor like `x` that receives the result and does not overlap `x`; by default a new contiguous one.
            launch_params: they override the variant's own choice; None keeps it.

        Raises:
            ValueError, TypeError: the variant does not take an argument; the message says what it takes.
            RuntimeError: it cannot run on the device of `x`.
        """
        import torch

        _check_matrix(self.name, "x", x)
        given = {key: value for key, value in launch_params.items() if value is not None}
        self.check_launch_params(given)
        reason = self.unavailable(x.device)
        if reason is not None:
            raise RuntimeError(f"{self.name}: cannot run on {x.device}: {reason}")
        reason = self.refuses(x.shape[0], x.shape[1], x.dtype)
        if reason is not None:
            raise ValueError(f"{self.name}: {reason}")
        if out is not None:
            if not self.takes_out:
                raise TypeError(f"{self.name}: takes no out")
            _check_out(self.name, x, out)
        if out is None and (self.takes_out or x.numel() == 0):
            out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if x.numel() == 0:
            assert out is not None
            return out
        return getattr(self._module, self.function.partition(":")[2])(x, out, **given)

    def check_launch_params(self, given: Mapping[str, Any], spell: Callable[[str], str] = str) -> None:
        """Raises TypeError or ValueError if the variant does not take one; `spell` gives its name in the message."""
        for key, value in given.items():
            if key not in self.launch_params:
                taken = ", ".join(map(spell, self.launch_params)) or "no launch parameters"
                raise TypeError(f"{self.name}: got {spell(key)}; it takes {taken}")
            check_value(f"{self.name}: {spell(key)}", key, value)

    def refuses(self, rows: int, n: int, dtype: torch.dtype) -> str | None:
        """Why the idea of this variant does not take a matrix of that shape, or None. Call it only if available."""
        ask = getattr(self._module, "refuses", None)
        return None if ask is None else ask(rows, n, dtype)

    @property
    def _module(self) -> Any:
        return importlib.import_module("onepass.tools.gallery." + self.function.partition(":")[0])

    @property
    def language(self) -> str:
        """Python, Triton, C++ or CUDA."""
        return _LANGUAGES.get(self.path.suffix) or ("Triton" if self.file.startswith("triton") else "Python")

    @property
    def path(self) -> Path:
        return FOLDER / self.file

    @property
    def source(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def header(self) -> Header:
        return parse_header(self.source)


def _check_matrix(variant: str, what: str, x: Tensor) -> None:
    """Raises TypeError or ValueError, in the name of the variant, if no variant takes the tensor."""
    import torch

    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{variant}: {what} must be a tensor, got {type(x).__name__}")
    if x.dim() != 2:
        raise ValueError(f"{variant}: takes a matrix (M, N), got {what} of shape {tuple(x.shape)}")
    if str(x.dtype).removeprefix("torch.") not in DTYPES:
        raise TypeError(f"{variant}: takes float32, float16 and bfloat16, got {what} of {x.dtype}")
    if x.shape[1] > 1 and x.stride(1) != 1:
        raise ValueError(f"{variant}: takes rows of unit stride, got {what} with strides {x.stride()}")


def _check_out(variant: str, x: Tensor, out: Tensor) -> None:
    """Raises TypeError or ValueError if `out` cannot receive the result of `x`."""
    from onepass.validation import overlap

    _check_matrix(variant, "out", out)
    for name in ("shape", "dtype", "device"):
        if getattr(out, name) != getattr(x, name):
            raise ValueError(f"{variant}: out must have the {name} of x, {getattr(x, name)}; got {getattr(out, name)}")
    if out.shape[0] > 1 and out.stride(0) < out.shape[1]:
        raise ValueError(f"{variant}: the rows of out must not overlap, got strides {out.stride()}")
    if overlap(x, out) != "none":
        raise ValueError(f"{variant}: out must not overlap x")


# The list --------------------------------------------------------------------------------------------------------


def _needs_nothing(device: torch.device) -> str | None:
    return None


def _needs_torchscript(device: torch.device) -> str | None:
    from onepass.tools.gallery.naive_jit import missing

    return missing()


def _needs_inductor(device: torch.device) -> str | None:
    if device.type != "cpu":
        return None if importlib.util.find_spec("triton") else "needs triton"
    return None if shutil.which("g++") or shutil.which("clang++") else "needs a C++ compiler"


def _needs_triton(device: torch.device) -> str | None:
    from onepass.triton import unavailable

    return unavailable(device)


def _needs_cpu(device: torch.device) -> str | None:
    return None if device.type == "cpu" else "runs only on the CPU"


def _needs_cuda(device: torch.device) -> str | None:
    from onepass._engines import unavailable

    return unavailable("cuda", device) if device.type == "cuda" else "runs only on NVIDIA GPUs"


_cpp = partial(Variant, unavailable=_needs_cpu, runs_on="CPU")
_cuda = partial(Variant, unavailable=_needs_cuda, launch_params=("threads", "blocks", "maxnreg"), runs_on="NVIDIA GPU")
_triton = partial(Variant, unavailable=_needs_triton, runs_on="GPU")
_TRITON = ("num_warps", "num_stages", "num_ctas", "maxnreg", "block_size")
_PERSISTENT = (*_TRITON, "programs")

VARIANTS: dict[str, Variant] = {
    variant.name: variant
    for variant in (
        Variant("naive", "naive.py", "naive:softmax", _needs_nothing),
        Variant("naive-jit", "naive_jit.py", "naive_jit:softmax", _needs_torchscript, takes_out=False),
        Variant("naive-compile", "naive_compile.py", "naive_compile:softmax", _needs_inductor, takes_out=False),
        _triton("triton-row", "triton_row.py", "triton_row:softmax", launch_params=_TRITON),
        _triton("triton-persistent", "triton_persistent.py", "triton_persistent:softmax", launch_params=_PERSISTENT),
        _triton("triton-online", "triton_online.py", "triton_online:softmax", launch_params=_TRITON),
        _cpp("cpu-threepass", "cpu_threepass.cpp", "cpu:threepass"),
        _cpp("cpu-online", "cpu_online.cpp", "cpu:online"),
        _cuda("cuda-warp", "cuda_warp.cu", "cuda:warp"),
        _cuda("cuda-block", "cuda_block.cu", "cuda:block"),
        _cuda("cuda-online", "cuda_online.cu", "cuda:online"),
        _cuda("cuda-auto", "cuda_auto.py", "cuda_auto:softmax"),
    )
}


def variant(name: str) -> Variant:
    """The variant of that name. Raises ValueError with the known names.

    >>> import torch
    >>> variant("naive")(torch.zeros(1, 2))
    tensor([[0.5000, 0.5000]])
    """
    if name not in VARIANTS:
        raise ValueError(f"unknown variant {name!r}: there are {', '.join(VARIANTS)}")
    return VARIANTS[name]
