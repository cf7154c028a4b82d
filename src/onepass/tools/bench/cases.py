"""What is timed, as data. Nothing here makes a tensor or imports torch. `suites.py` has all cases."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

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

    `layout` is "" for contiguous tensors, "channels_last", or "transposed", where the last two dims swap their strides.
    It applies to every tensor of the input's shape. `out_dtype` is the dtype of the result where it differs from that
    of the input. `quick` names the device types ("cpu", "cuda") that run this case with `--quick`.

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

    def at(self, dtype: str, max_fill: int | None = None) -> Case:
        """The case as it runs at `dtype`: with as many rows as `fill` bytes, or at most `max_fill`, hold (at least 1).

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

    def bytes(self, dtype: str) -> int:
        """Bytes read once plus bytes written once, the minimum that any kernel moves.

        The forward reads the input and writes the output. The backward reads the saved output and its gradient and
        writes the input's gradient; for logsumexp it reads the input and two values per row.
        """
        n, size, out_size = prod(self.shape), ITEMSIZE[dtype], ITEMSIZE[self.out_dtype or dtype]
        if self.direction == "forward":
            return n * size + prod(self.out_shape()) * out_size
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
