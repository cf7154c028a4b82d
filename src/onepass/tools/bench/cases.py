"""What is timed, as data: cases, and suites of cases that run together. Nothing here makes a tensor or imports torch.

To add a suite, add it to `SUITES`. To run a case with `--quick`, name the device types that run it there
(`quick=("cpu", "cuda")`).
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod
from typing import Any

FUNCTIONS = ("softmax", "log_softmax", "softmin", "logsumexp")
DIRECTIONS = ("forward", "backward")

# Bytes of an element by torch's name of the dtype, and the other names that the command line takes.
ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
SHORT = {"float64": "f64", "float32": "f32", "bfloat16": "bf16", "float16": "f16"}
_ALIASES = {short: name for name, short in SHORT.items()}
_ALIASES |= {"fp64": "float64", "double": "float64", "fp32": "float32", "float": "float32"}
_ALIASES |= {"fp16": "float16", "half": "float16"}


@dataclass(frozen=True)
class Case:
    """One shape, timed at each of `dtypes`.

    `layout` is "" for contiguous tensors, "channels_last", "transposed", where the last two dims swap their strides,
    "permuted 1,2,0", which names the dims from the outermost in memory to the innermost, or "sliced", the beginning of
    each row of a tensor whose rows have an odd length. It applies to every tensor of the input's shape.

    `out_dtype` is the dtype of the result if it differs from the input's. An `in_place` result is written over
    the input. `quick` names the device types ("cpu", "cuda") that run this case with `--quick`, `without` the providers
    that do not run it.

    `scores` are the arguments of scores by name, where a tuple is the shape of a tensor (except for the window, which
    is a pair of numbers). `grads` names the arguments whose gradient a backward computes in addition to the input's.

    If `fill` is not 0, the case has as many rows as fit into `fill` bytes. The number depends on the dtype; `at`
    computes it.
    """

    suite: str
    name: str
    shape: tuple[int, ...]
    dim: int | tuple[int, ...] = -1
    function: str = "softmax"
    direction: str = "forward"
    dtypes: tuple[str, ...] = ("float32",)
    out_dtype: str | None = None
    quick: tuple[str, ...] = ()
    fill: int = 0
    layout: str = ""
    in_place: bool = False
    without: tuple[str, ...] = ()
    scores: tuple[tuple[str, Any], ...] = ()
    grads: tuple[str, ...] = ()

    def at(self, dtype: str, max_fill: int | None = None) -> Case:
        """The case as it runs at `dtype`: with the rows that fit in `fill` bytes, or at most `max_fill` (at least 1
        row).

        >>> case = Case("row-lengths", "N 1000", (1, 1000), fill=1 << 30)
        >>> case.at("float32").shape, case.at("bfloat16").shape, case.at("float32", max_fill=8 << 20).shape
        ((268435, 1000), (536870, 1000), (2097, 1000))
        """
        if not self.fill:
            return self
        fill = self.fill if max_fill is None else min(self.fill, max_fill)
        rows = max(1, fill // (self.shape[1] * ITEMSIZE[dtype]))
        return replace(self, shape=(rows, self.shape[1]), fill=0)

    def dims(self) -> tuple[int, ...]:
        """`dim` as a tuple of non-negative ints."""
        dims = self.dim if isinstance(self.dim, tuple) else (self.dim,)
        return tuple(d % len(self.shape) for d in dims)

    def row(self) -> int:
        """N, the number of elements that one softmax reduces."""
        return prod(self.shape[d] for d in self.dims())

    def rows(self) -> int:
        """M, the number of softmaxes."""
        return prod(size for d, size in enumerate(self.shape) if d not in self.dims())

    def out_shape(self) -> tuple[int, ...]:
        """The shape of the forward's result, which lacks `dim` for logsumexp."""
        if self.function != "logsumexp":
            return self.shape
        return tuple(size for d, size in enumerate(self.shape) if d not in self.dims())

    def result_dtype(self, dtype: str) -> str:
        """The dtype that the timed call returns: that of the output or, backward, that of the input's gradient."""
        return dtype if self.direction == "backward" else self.out_dtype or dtype

    def side_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the side tensors."""
        return {name: value for name, value in self.scores if isinstance(value, tuple) and name != "window"}

    def bytes(self, dtype: str) -> int:
        """Bytes read once plus bytes written once, the minimum that any kernel moves.

        The forward reads the input and the side tensors of scores, and writes the output. The backward reads the saved
        output and its gradient and writes the input's gradient. For logsumexp it reads the input and two values per
        row.
        """
        n, size, out_size = prod(self.shape), ITEMSIZE[dtype], ITEMSIZE[self.out_dtype or dtype]
        if self.direction == "forward":
            side = sum(prod(shape) * (1 if name == "mask" else size) for name, shape in self.side_shapes().items())
            return n * size + side + prod(self.out_shape()) * out_size
        if self.function == "logsumexp":
            return 2 * n * size + 2 * self.rows() * out_size
        return 2 * n * out_size + n * size


@dataclass(frozen=True)
class Suite:
    """Cases that run together."""

    name: str
    about: str
    cases: tuple[Case, ...]


def dtype_name(text: str) -> str:
    """torch's name of a dtype ("float32") from any name that the command line takes ("f32", "torch.float32").

    Raises ValueError for any other text.

    >>> dtype_name("bf16"), dtype_name("torch.float32")
    ('bfloat16', 'float32')
    """
    name = text.strip().lower().removeprefix("torch.")
    name = _ALIASES.get(name, name)
    if name not in ITEMSIZE:
        raise ValueError(f"unknown dtype {text!r}: take one of {', '.join([*ITEMSIZE, *SHORT.values()])}")
    return name


# The suites

_BOTH, _GPU = ("cpu", "cuda"), ("cuda",)
_F32, _BF16, _F32_BF16 = ("float32",), ("bfloat16",), ("float32", "bfloat16")
CPU_DTYPES = (*_F32_BF16, "float16")
Shape = tuple[int, ...]


def name_case(suite: str, shape: Shape, dim: int | Shape = -1, function: str = "softmax", **options: Any) -> Case:
    """A case that is named after its function, shape, layout, dims and scores, and whether it is in place."""
    name = "x".join(map(str, shape)) + f" {options.get('layout') or ''}".rstrip()
    name += "" if dim == -1 else f", dim {dim}" if isinstance(dim, int) else f", dims {','.join(map(str, dim))}"
    name = name if function == "softmax" else f"{function}, {name}"
    name += " in place" if options.get("in_place") else ""
    for argument, value in options.get("scores", ()):
        separator = "," if argument == "window" else "x"
        text = separator.join(map(str, value)) if isinstance(value, tuple) else str(value)
        name += f", {argument}" if value is True else f", {argument} {text}"
    name += "".join(f", {argument}'s gradient" for argument in options.get("grads", ()))
    return Case(suite, name, shape, dim, function, **options)


def _tutorial() -> Iterable[Case]:
    quick = {2, 4, 8, 16, 24, 32, 48, 64, 80, 99}
    for i in range(2, 100):
        yield name_case("tutorial", (4096, 128 * i), quick=_BOTH if i in quick else ())


def _powers_of_two() -> Iterable[Case]:
    for n in (256, 1024, 4096, 16384, 65536, 262144):
        # 4096 x 65536 float32 elements are 1 GiB in and 1 GiB out: naive PyTorch takes 5 s per call on two cores
        yield name_case("powers-of-two", (4096, n), quick=_BOTH if n <= 16384 else _GPU)


def _models() -> Iterable[Case]:
    def case(name: str, shape: Shape, quick: bool = False, dim: int = -1) -> Case:
        # The models run in bfloat16, their losses in float32.
        return Case("models", name, shape, dim, dtypes=(*_BF16, *_F32), quick=_BOTH if quick else _GPU)

    # Next-token logits of 1, 8 and 64 sequences, and of a training step's 1024 tokens
    on_cpu = {("GPT-2", 1), ("GPT-2", 64), ("Llama-3", 8), ("Qwen", 8), ("Gemma", 1), ("Gemma", 8)}
    for model, vocabulary in (("GPT-2", 50257), ("Llama-3", 128256), ("Qwen", 151936), ("Gemma", 262144)):
        for m in (1, 8, 64, 1024):
            name = f"{model} vocabulary, {m} row{'s' if m > 1 else ''}"
            yield case(name, (m, vocabulary), (model, m) in on_cpu)

    yield case("ViT-B/16 attention, batch 8", (8, 12, 197, 197), True)
    for context, n in (("1K", 1024), ("4K", 4096), ("32K", 32768)):
        for queries in (1, 128):
            name = f"{context} attention, {'1 query' if queries == 1 else f'{queries} queries'}"
            yield case(name, (32, queries, n), (context, queries) in {("1K", 128), ("4K", 1), ("4K", 128), ("32K", 1)})

    for experts in (8, 128, 256):
        yield case(f"MoE router, {experts} experts", (8192, experts), True)

    # Segmentation maps: the softmax reduces the classes, dim 1, whose elements are 512 * 512 apart
    for label, classes in (("VOC", 21), ("Cityscapes", 19)):
        for batch in (1, 16):
            name = f"{label}, {classes} classes, {'1 map' if batch == 1 else f'{batch} maps'}"
            yield case(name, (batch, classes, 512, 512), batch == 1, dim=1)


# The bytes that `row-lengths` fills with rows: far more than the L2 of any GPU. With --quick a CPU fills less.
FILL, CPU_FILL = 1 << 30, 8 << 20
# Powers of two and their neighbours, odd lengths, and the lengths of attention and of vocabularies
ROW_LENGTHS = (
    *(8, 16, 33, 64, 100, 128, 200, 256, 512, 781, 1000, 1024, 1025, 2048, 2176, 4096, 4224, 8192, 8320, 9216),
    *(12288, 12672, 16384, 32000, 32001, 32768, 50257, 50304, 65536, 128256, 131072, 151936, 256000, 262144),
)
LOGSUMEXP_LENGTHS = (33, 256, 1024, 4096, 32768, 50257, 131072)


def _row_lengths() -> Iterable[Case]:
    both, gpu = (33, 1000, 4096, 50257), (256, 1024, 12288, 32768, 131072, 151936)
    for n in ROW_LENGTHS:
        quick = _BOTH if n in both else _GPU if n in gpu else ()
        yield Case("row-lengths", f"N {n}", (1, n), dtypes=_F32_BF16, quick=quick, fill=FILL)
    for n in LOGSUMEXP_LENGTHS:
        quick = _BOTH if n == 4096 else _GPU if n in (33, 50257) else ()
        name = f"logsumexp, N {n}"
        yield Case("row-lengths", name, (1, n), -1, "logsumexp", dtypes=_F32_BF16, quick=quick, fill=FILL)


def _lengths() -> Iterable[Case]:
    """Lengths that libraries are tuned for, and the same number of random lengths in each octave."""
    draw = random.Random(0)
    drawn = sorted({round(2 ** (octave + draw.random())) for octave in range(4, 18) for _ in range(2)})
    for kind, lengths in (("power of two", [1 << i for i in range(4, 19)]), ("drawn", drawn)):
        for n in lengths:
            quick = _BOTH if n in (64, 4096, drawn[9]) else ()
            yield Case("lengths", f"{kind}, N {n}", (1, n), dtypes=_F32_BF16, quick=quick, fill=FILL)


_LONG = ((1, 1 << 17), (1, 1 << 20), (1, 1 << 22), (4, 1 << 20), (8, 128256), (32, 128256))


def _few_long_rows() -> Iterable[Case]:
    for m, n in (*_LONG, (64, 151936), (1, 1 << 24), (4, 1 << 22)):
        yield name_case("few-long-rows", (m, n), dtypes=_F32_BF16, quick=_BOTH if m * n <= 1 << 20 else _GPU)
    yield name_case("few-long-rows", (1, 1 << 28))  # 1 GiB, by far the longest row


def _backward() -> Iterable[Case]:
    """Gradients of softmax and log_softmax: powers of two, vocabularies, many short rows, few long rows."""
    shapes: list[tuple[int, int, tuple[str, ...]]] = [(4096, 1 << i, _F32) for i in range(10, 18)]
    shapes += [(32768, 1 << i, _BF16) for i in range(8, 14)]
    shapes += [(8192, n, _BF16) for n in (32001, 50257, 50304, 128256, 151936)]
    shapes += [(m, n, _F32_BF16) for m, n in ((2097152, 64), (8388608, 16), *_LONG)]
    quick = {(4096, 1024): _BOTH, (4096, 8192): _GPU, (32768, 1024): _GPU, (8192, 50257): _GPU, (1, 1 << 20): _BOTH}
    for function in ("softmax", "log_softmax"):
        for m, n, dtypes in shapes:
            case = name_case("backward", (m, n), function=function, quick=quick.get((m, n), ()), dtypes=dtypes)
            yield replace(case, direction="backward")


# Rows that are not contiguous: maps of classes, tables, batches of matrices, heads in the last dim, and other layouts.
# The last two are a column of 131072 and one of 1048576 elements.
COLUMNS: tuple[tuple[Shape, int | Shape, str], ...] = (  # (shape, dim, layout)
    ((16, 21, 512, 512), 1, ""),
    ((3, 19, 1024, 2048), 1, ""),
    ((64, 1000, 14, 14), 1, ""),
    ((256, 1000, 7, 7), 1, ""),
    ((8, 4096, 4096), 1, ""),
    ((4096, 4096), 0, ""),
    ((16384, 16384), 0, ""),
    ((64, 32, 64, 64, 4), 1, ""),
    ((256, 256, 256), 0, ""),
    ((32, 12, 512, 512), 2, ""),
    ((128, 197, 768), 1, ""),
    ((32, 256, 56, 56), 1, "channels_last"),
    ((32, 256, 56, 56), 3, "channels_last"),
    ((8192, 8192), -1, "transposed"),
    ((64, 80, 14, 14), (2, 3), ""),
    ((2, 131072, 16), 1, ""),
    ((1048576, 8), 0, ""),
)


def _columns() -> Iterable[Case]:
    quick = {(64, 80, 14, 14): _BOTH, (2, 131072, 16): _BOTH, (64, 1000, 14, 14): _GPU, (4096, 4096): _GPU}
    cases = []
    for shape, dim, layout in COLUMNS:
        on = quick.get(shape, _GPU if layout else ())
        cases.append(name_case("columns", shape, dim, dtypes=_F32_BF16, quick=on, layout=layout))
    yield from cases
    yield from (replace(case, name=f"softmax backward, {case.name}", direction="backward") for case in cases)


def _course() -> Iterable[Case]:
    """Short rows, rows of a block, of a cluster and of the whole GPU, columns, and gradients."""
    rows = (1 << 22, 64), (1 << 18, 781), (4096, 4096), (4096, 16384), (2048, 65536)
    for shape in (*rows, (8, 128256), (1, 1 << 22)):
        yield name_case("course", shape, quick=_BOTH if shape == (4096, 4096) else _GPU, dtypes=_F32_BF16)
    for shape in ((4096, 4096), (16384, 16384)):
        yield name_case("course", shape, 0, quick=_GPU, dtypes=_F32_BF16)
    for shape in ((4096, 4096), (4096, 16384)):
        case = name_case("course", shape, quick=_GPU, dtypes=_F32_BF16, direction="backward")
        yield replace(case, name=f"softmax backward, {case.name}")


# The cases of a CPU: rows of one tile and of many blocks, rows shorter than a vector, one row for all cores, columns
CPU_ROWS = (
    *((4096, 64), (4096, 781), (4096, 1024), (4096, 4096), (512, 8192), (64, 50257), (8, 151936)),
    *((1, 1 << 20), (1, 1 << 24), (1 << 20, 16), (65536, 33)),
)
CPU_COLUMNS = (((16, 21, 256, 256), 1), ((64, 4096, 256), 1), ((1024, 4096), 0))  # (shape, dim)
CPU_LOGSUMEXP = ((4096, 781), (4096, 4096), (64, 50257), (1, 1 << 24), (1 << 20, 16))


def _cpu() -> Iterable[Case]:
    quick = {(4096, 64), (4096, 781), (4096, 1024), (64, 50257), (1, 1 << 20), (65536, 33), (1024, 4096)}
    for shape, dim in (*((shape, -1) for shape in CPU_ROWS), *CPU_COLUMNS):
        yield name_case("cpu", shape, dim, quick=_BOTH if shape in quick else (), dtypes=CPU_DTYPES)
    for shape, dim in (*((shape, -1) for shape in CPU_LOGSUMEXP), ((1024, 4096), 0)):
        yield name_case("cpu", shape, dim, "logsumexp", quick=_BOTH if shape == (4096, 781) else (), dtypes=CPU_DTYPES)


def _cpu_backward() -> Iterable[Case]:
    """The cases of `cpu`, and log_softmax with the same shapes as softmax."""
    for case in _cpu():
        yield replace(case, suite="cpu-backward", direction="backward")
        if case.function == "softmax":
            made = replace(case, suite="cpu-backward", name=f"log_softmax, {case.name}", function="log_softmax")
            yield replace(made, direction="backward")


SUITES = {
    name: Suite(name, about, tuple(cases))
    for name, about, cases in (
        ("tutorial", "4096 rows, N = 256 to 12672 in steps of 128, as in the fused-softmax tutorial", _tutorial()),
        ("powers-of-two", "4096 rows, N = 256 to 262144 in steps of 4x", _powers_of_two()),
        ("models", "the shapes of language models, attention, routers and segmentation", _models()),
        ("row-lengths", "as many rows as 1 GiB holds, N = 8 to 262144, including odd lengths", _row_lengths()),
        (
            "lengths",
            "as many rows as 1 GiB holds, N = 16 to 262144: powers of two, and lengths that were drawn",
            _lengths(),
        ),
        ("few-long-rows", "1 to 64 rows, N = 128256 to 268435456", _few_long_rows()),
        ("backward", "gradients of many rows, of few long rows and of vocabularies", _backward()),
        ("columns", "softmax over other dims and in other layouts, and its gradient", _columns()),
        ("course", "the sizes that the CUDA variants of the gallery are made for", _course()),
        ("cpu", "the CPU engine: rows of 16 to 16777216 elements, other dims, logsumexp", _cpu()),
        ("cpu-backward", "gradients at the points of cpu, and of log_softmax", _cpu_backward()),
    )
}
