"""The variants of the gallery: the class, and the list of them, from the plainest to the fastest of each language.

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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from onepass.tools.gallery.launch_params import LAUNCH_PARAMS

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["COMPUTES", "DTYPES", "VARIANTS", "Count", "Header", "Traffic", "Variant", "parse_header", "variant"]

DTYPES = ("float32", "float16", "bfloat16")
# What a variant computes of a matrix: the softmax of its rows, of its columns, or the gradient of the softmax of rows.
COMPUTES = ("rows", "columns", "gradient")
_LANGUAGES = {".cpp": "C++", ".cu": "CUDA"}


# Headers ---------------------------------------------------------------------------------------------------------


class Count(NamedTuple):
    """The elements `mn * M * N + m * M` of an M x N matrix.

    >>> str(Count(5, 2)), str(Count(1)), Count(5, 2).of(10, 100)
    ('5MN + 2M', 'MN', 5020)
    """

    mn: int
    m: int = 0

    def of(self, rows: int, n: int) -> int:
        return (self.mn * n + self.m) * rows

    def __str__(self) -> str:
        return f"{'' if self.mn == 1 else self.mn}MN" + (f" + {self.m}M" if self.m else "")


@dataclass(frozen=True)
class Traffic:
    """Elements read and written."""

    reads: Count
    writes: Count

    def elements(self, rows: int, n: int) -> int:
        return self.reads.of(rows, n) + self.writes.of(rows, n)


@dataclass(frozen=True)
class Header:
    """The header of a variant. `cached` is the traffic while a cache serves the repeated reads; None if it is equal."""

    idea: str
    traffic_text: str
    limit: str
    traffic: Traffic
    cached: Traffic | None


_COUNT = r"(\d*)MN(?: \+ (\d+)M)?"
_TRAFFIC = re.compile(rf"reads {_COUNT}, writes {_COUNT}\b")


def parse_header(source: str) -> Header:
    """The header of a variant's source, Python or C++. Raises ValueError if a paragraph is missing."""
    if source.startswith('"""'):
        text = source.split('"""')[1]
    else:
        text = re.sub("^// ?", "", re.match(r"(//.*\n?)*", source)[0], flags=re.MULTILINE)  # type: ignore[index]
    found = {}
    for paragraph in text.split("\n\n"):
        word, _, rest = paragraph.partition(":")
        found[word] = " ".join(rest.split())
    if missing := [word for word in ("Idea", "Traffic", "Limit") if not found.get(word)]:
        raise ValueError(f"the header of a variant lacks {', '.join(missing)}")
    pairs = [
        Traffic(Count(int(reads or 1), int(rows_read or 0)), Count(int(writes or 1), int(rows_written or 0)))
        for reads, rows_read, writes, rows_written in _TRAFFIC.findall(found["Traffic"])
    ]
    if not 1 <= len(pairs) <= 2:
        raise ValueError(f"the header of a variant has no 'reads 5MN + 2M, writes MN': {found['Traffic']!r}")
    return Header(found["Idea"], found["Traffic"], found["Limit"], pairs[0], pairs[1] if len(pairs) > 1 else None)


# Variants --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Variant:
    """One way to compute the softmax of a matrix.

    `function` is "module:name" of the function that computes it from checked arguments, (x, out, **launch_params). The
    module is imported at the first call, because it may need Triton. If it, or the function, has
    `refuses(rows, n, dtype)`, that returns why the idea does not take a shape, or None. `runs_on` is the short text of
    the list; `unavailable` needs torch. `computes` is one of `COMPUTES`.
    """

    name: str
    file: str
    function: str
    unavailable: Callable[[torch.device], str | None]
    launch_params: tuple[str, ...] = ()
    takes_out: bool = True
    runs_on: str = "CPU, GPU"
    computes: str = "rows"

    def __call__(
        self, x: Tensor, grad: Tensor | None = None, *, out: Tensor | None = None, **launch_params: int | None
    ) -> Tensor:
        """The softmax of each row of `x`, or what else the variant computes.

        Args:
            x: (M, N), float32, float16 or bfloat16; any row stride, unit stride within a row. For a variant that
                computes "gradient", the result of the forward.
            grad: only for a variant that computes "gradient": the gradient of the result, of the shape and dtype of x.
            out: a tensor like `x` that receives the result and does not overlap `x`; by default a new contiguous one.
            launch_params: they override the variant's own choice; None keeps it.

        Raises:
            ValueError, TypeError: the variant does not take an argument; the message says what it takes.
            RuntimeError: it cannot run on the device of `x`.
        """
        return self._call(self._function, self.unavailable, x, grad, out, launch_params)

    def emulate(
        self, x: Tensor, grad: Tensor | None = None, *, out: Tensor | None = None, **launch_params: int | None
    ) -> Tensor:
        """Runs a CUDA variant on CPU tensors, without a GPU. NVRTC compiles its kernel to PTX, which is translated to
        C++ and run thread by thread. That takes seconds and says nothing about the speed.

        >>> import torch
        >>> variant("cuda-warp").emulate(torch.zeros(1, 2))  # doctest: +SKIP
        tensor([[0.5000, 0.5000]])

        Raises:
            RuntimeError: the variant is not written in CUDA C++, a GPU's tensor was given, or g++ or NVRTC is missing.
        """
        function = getattr(self._function, "emulate", None)
        return self._call(function, self.cannot_be_emulated, x, grad, out, launch_params)

    def _call(
        self,
        function: Any,
        unavailable: Callable[[torch.device], str | None],
        x: Tensor,
        grad: Tensor | None,
        out: Tensor | None,
        launch_params: Mapping[str, int | None],
    ) -> Tensor:
        import torch

        given = {key: value for key, value in launch_params.items() if value is not None}
        try:
            _check_matrix("x", x)
            self.check_launch_params(given)
            if (reason := unavailable(x.device)) is not None:
                raise RuntimeError(f"cannot run on {x.device}: {reason}")
            if (reason := self.refuses(x.shape[0], x.shape[1], x.dtype)) is not None:
                raise ValueError(reason)
            if (grad is None) == (self.computes == "gradient"):
                raise TypeError("takes the result of the forward and its gradient" if grad is None else "takes no grad")
            if grad is not None:
                _check_like("grad", x, grad)
            if out is not None:
                if not self.takes_out:
                    raise TypeError("takes no out")
                _check_out(x, out)
        except (TypeError, ValueError, RuntimeError) as error:
            raise type(error)(f"{self.name}: {error}") from None
        if out is None and (self.takes_out or x.numel() == 0):
            out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if out is not None and x.numel() == 0:
            return out
        try:
            return function(x, *([] if grad is None else [grad]), out, **given)
        except ValueError as error:
            raise ValueError(f"{self.name}: {str(error).removeprefix(self.name + ': ')}") from error

    def cannot_be_emulated(self, device: torch.device) -> str | None:
        """Why `emulate` does not run this variant on tensors of the device, or None."""
        if not hasattr(self._function, "emulate"):
            return f"only CUDA variants are emulated, and this is {self.language}"
        from onepass.tools.emulator import missing

        if device.type != "cpu":
            return "the emulator takes tensors of the CPU"
        return f"the emulator finds {missing()}" if missing() else None

    def check_launch_params(self, given: Mapping[str, Any]) -> None:
        """Raises TypeError or ValueError if the variant does not take one."""
        for key, value in given.items():
            if key not in self.launch_params:
                raise TypeError(f"got {key}; it takes {', '.join(self.launch_params) or 'no launch parameters'}")
            LAUNCH_PARAMS[key].check(key, value)

    def refuses(self, rows: int, n: int, dtype: torch.dtype) -> str | None:
        """Why the idea of this variant does not take a matrix of that shape, or None. Call it only if available."""
        ask = getattr(self._module, "refuses", None) or getattr(self._function, "refuses", None)
        return None if ask is None else ask(rows, n, dtype)

    @property
    def _module(self) -> Any:
        return importlib.import_module("onepass.tools.gallery." + self.function.partition(":")[0])

    @property
    def _function(self) -> Any:
        return getattr(self._module, self.function.partition(":")[2])

    @property
    def language(self) -> str:
        """Python, Triton, C++ or CUDA."""
        return _LANGUAGES.get(self.path.suffix) or ("Triton" if self.file.startswith("triton") else "Python")

    @property
    def path(self) -> Path:
        return Path(__file__).with_name(self.file)

    @property
    def source(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def header(self) -> Header:
        return parse_header(self.source)


def _check_matrix(what: str, x: Tensor) -> None:
    """Raises TypeError or ValueError if no variant takes the tensor."""
    import torch

    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{what} must be a tensor, got {type(x).__name__}")
    if x.dim() != 2:
        raise ValueError(f"takes a matrix (M, N), got {what} of shape {tuple(x.shape)}")
    if str(x.dtype).removeprefix("torch.") not in DTYPES:
        raise TypeError(f"takes float32, float16 and bfloat16, got {what} of {x.dtype}")
    if x.shape[1] > 1 and x.stride(1) != 1:
        raise ValueError(f"takes rows of unit stride, got {what} with strides {x.stride()}")


def _check_like(what: str, x: Tensor, like: Tensor) -> None:
    """Raises TypeError or ValueError if `like` is no matrix of the shape, dtype and device of `x`."""
    _check_matrix(what, like)
    for name in ("shape", "dtype", "device"):
        if getattr(like, name) != getattr(x, name):
            raise ValueError(f"{what} must have the {name} of x, {getattr(x, name)}; got {getattr(like, name)}")


def _check_out(x: Tensor, out: Tensor) -> None:
    """Raises TypeError or ValueError if `out` cannot receive the result of `x`."""
    from onepass.validation import overlap

    _check_like("out", x, out)
    if out.shape[0] > 1 and out.stride(0) < out.shape[1]:
        raise ValueError(f"the rows of out must not overlap, got strides {out.stride()}")
    if overlap(x, out) != "none":
        raise ValueError("out must not overlap x")


# The list --------------------------------------------------------------------------------------------------------


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


def _needs_cuda(device: torch.device) -> str | None:
    from onepass._engines import unavailable

    return unavailable("cuda", device) if device.type == "cuda" else "runs only on NVIDIA GPUs"


def _needs_cpu(device: torch.device) -> str | None:
    return None if device.type == "cpu" else "runs only on the CPU"


def _needs_clusters(device: torch.device) -> str | None:
    if (reason := _needs_cuda(device)) is not None:
        return reason
    import torch

    major, minor = torch.cuda.get_device_capability(device)
    return None if major >= 9 else f"needs compute capability 9.0, and this is {major}.{minor}"


_cpp = partial(Variant, unavailable=_needs_cpu, runs_on="CPU")
_cuda = partial(Variant, unavailable=_needs_cuda, launch_params=("threads", "blocks", "maxnreg"), runs_on="NVIDIA GPU")
# Kernels that are compiled for a number of threads and of registers.
_fixed = partial(Variant, unavailable=_needs_cuda, launch_params=("threads", "blocks"), runs_on="NVIDIA GPU")
_triton = partial(Variant, unavailable=_needs_triton, runs_on="GPU")
_TRITON = ("num_warps", "num_stages", "num_ctas", "maxnreg", "block_size")
_PERSISTENT = (*_TRITON, "programs")

VARIANTS: dict[str, Variant] = {
    variant.name: variant
    for variant in (
        Variant("naive", "naive.py", "naive:softmax", lambda device: None),
        Variant("naive-jit", "naive_jit.py", "naive_jit:softmax", _needs_torchscript, takes_out=False),
        Variant("naive-compile", "naive_compile.py", "naive_compile:softmax", _needs_inductor, takes_out=False),
        _triton("triton-row", "triton_row.py", "triton_row:softmax", launch_params=_TRITON),
        _triton("triton-persistent", "triton_persistent.py", "triton_persistent:softmax", launch_params=_PERSISTENT),
        _triton("triton-online", "triton_online.py", "triton_online:softmax", launch_params=_TRITON),
        _cpp("cpu-threepass", "cpu_threepass.cpp", "native_calls:cpu_threepass"),
        _cpp("cpu-online", "cpu_online.cpp", "native_calls:cpu_online"),
        _cuda("cuda-warp", "cuda_warp.cu", "native_calls:cuda_warp"),
        _cuda("cuda-block", "cuda_block.cu", "native_calls:cuda_block"),
        _cuda("cuda-online", "cuda_online.cu", "native_calls:cuda_online"),
        _cuda("cuda-auto", "cuda_auto.py", "cuda_auto:softmax"),
        _cuda("cuda-vector", "cuda_vector.cu", "native_calls:cuda_vector"),
        _fixed("cuda-registers", "cuda_registers.cu", "native_calls:cuda_registers"),
        _fixed("cuda-rows", "cuda_rows.cu", "native_calls:cuda_rows"),
        _fixed("cuda-async", "cuda_async.cu", "native_calls:cuda_async"),
        Variant("cuda-cluster", "cuda_cluster.cu", "native_calls:cuda_cluster", _needs_clusters, runs_on="NVIDIA GPU"),
        Variant("cuda-grid", "cuda_grid.cu", "native_calls:cuda_grid", _needs_cuda, runs_on="NVIDIA GPU"),
        _fixed("cuda-columns", "cuda_columns.cu", "native_calls:cuda_columns", computes="columns"),
        _fixed(
            "cuda-backward", "cuda_backward.cu", "native_calls:cuda_backward", launch_params=(), computes="gradient"
        ),
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
