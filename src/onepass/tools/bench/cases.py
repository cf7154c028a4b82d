"""What is timed, as data: no tensor is made here, and nothing of torch is imported.

A `Case` is one shape under the name of what it is; a `Suite` is a named list of them, and `suites.py` has those that
there are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

FUNCTIONS = ("softmax", "log_softmax", "softmin", "logsumexp")
DIRECTIONS = ("forward", "backward")

# Bytes of an element, by torch's name of the dtype, and the short names that the command line takes.
ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
ALIASES = {
    "f64": "float64",
    "double": "float64",
    "f32": "float32",
    "float": "float32",
    "bf16": "bfloat16",
    "f16": "float16",
    "fp16": "float16",
    "fp32": "float32",
    "fp64": "float64",
    "half": "float16",
}
SHORT = {"float64": "f64", "float32": "f32", "bfloat16": "bf16", "float16": "f16"}


@dataclass(frozen=True)
class Case:
    """One shape to time, at each of `dtypes`, in the suite's order.

    `layout` is "" for contiguous tensors, "channels_last" as torch has it, "transposed" where the last two dims lie the
    other way round: of all that have the input's shape. `out_dtype` is the result's dtype where it differs from the
    input's. `quick` names the device types ("cpu", "cuda") whose quick form takes this case.

    `fill`, where it is not 0, is the bytes of input that the case fills with rows: how many that are depends on the
    dtype, and `at` says it.
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

    def at(self, dtype: str, most: int | None = None) -> Case:
        """The case as it is run at `dtype`: with as many rows as `fill` bytes hold, at least one; `most` takes the
        place of a `fill` that is larger. A case without `fill` is what it was.

        >>> case = Case("rows", "N 1000", (1, 1000), fill=1 << 30)
        >>> case.at("float32").shape, case.at("bfloat16").shape, case.at("float32", most=8 << 20).shape
        ((268435, 1000), (536870, 1000), (2097, 1000))
        """
        if not self.fill:
            return self
        fill = self.fill if most is None else min(self.fill, most)
        rows = max(1, fill // (self.shape[1] * ITEMSIZE[dtype]))
        return replace(self, shape=(rows, self.shape[1]), fill=0)

    def dims(self) -> tuple[int, ...]:
        """`dim` as a tuple of non-negative ints."""
        dims = self.dim if isinstance(self.dim, tuple) else (self.dim,)
        return tuple(d % len(self.shape) for d in dims)

    def row(self) -> int:
        """N, the elements that one softmax goes over."""
        return prod(self.shape[d] for d in self.dims())

    def rows(self) -> int:
        """M, the number of softmaxes."""
        return prod(size for d, size in enumerate(self.shape) if d not in self.dims())

    def out_shape(self) -> tuple[int, ...]:
        """Shape of the forward's result: without `dim` for logsumexp."""
        if self.function != "logsumexp":
            return self.shape
        return tuple(size for d, size in enumerate(self.shape) if d not in self.dims())

    def result_dtype(self, dtype: str) -> str:
        """Dtype of what the timed call returns: of the output, or for the backward of the input's gradient."""
        return dtype if self.direction == "backward" else self.out_dtype or dtype

    def bytes(self, dtype: str) -> int:
        """Bytes read once plus bytes written once, the least that any kernel moves.

        Forward: the input, the output. Backward: the saved output and its gradient, the input's gradient; for
        logsumexp the input, two values a row, the input's gradient.
        """
        n, size, out_size = prod(self.shape), ITEMSIZE[dtype], ITEMSIZE[self.out_dtype or dtype]
        if self.direction == "forward":
            return n * size + prod(self.out_shape()) * out_size
        if self.function == "logsumexp":
            return 2 * n * size + 2 * self.rows() * out_size
        return 2 * n * out_size + n * size


@dataclass(frozen=True)
class Suite:
    """Cases that are run together. `sweep` suites vary N alone and are drawn as curves."""

    name: str
    about: str
    cases: tuple[Case, ...]


def dtype_name(text: str) -> str:
    """torch's name of a dtype ("float32") from any name the command line takes ("f32", "torch.float32").

    Raises ValueError for any other text.

    >>> dtype_name("bf16"), dtype_name("torch.float32")
    ('bfloat16', 'float32')
    """
    name = text.strip().lower().removeprefix("torch.")
    name = ALIASES.get(name, name)
    if name not in ITEMSIZE:
        raise ValueError(f"unknown dtype {text!r}: take one of {', '.join([*ITEMSIZE, *SHORT.values()])}")
    return name
