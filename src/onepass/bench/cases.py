"""What is timed, as data: no tensor is made here, and nothing of torch is imported.

A `Case` is one shape under the name of what it is; a `Suite` is a named list of them. To add a suite, add it to
`SUITES`; to add a case to the quick form, name the device types that take it there (`quick=("cpu", "cuda")`).
"""

from __future__ import annotations

from collections.abc import Iterable
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
    """One shape to time: contiguous, at each of `dtypes`, in the suite's order.

    `out_dtype` is the result's dtype where it differs from the input's. `quick` names the device types ("cpu",
    "cuda") whose quick form takes this case.

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


_M = 4096  # rows of both published sweeps
_BOTH = ("cpu", "cuda")
_GPU = ("cuda",)
DTYPES = ("float32", "bfloat16", "float16")  # those of the suite `cpu`
_MODEL_DTYPES = ("bfloat16", "float32")  # what these models run in, and what their losses run in


def _seeds() -> Iterable[Case]:
    quick = {2, 4, 8, 16, 24, 32, 48, 64, 80, 99}
    for i in range(2, 100):
        yield Case("seeds", f"{_M}x{128 * i}", (_M, 128 * i), quick=_BOTH if i in quick else ())


def _powers() -> Iterable[Case]:
    for n in (256, 1024, 4096, 16384, 65536, 262144):
        # 4096 x 65536 floats are 1 GiB in and 1 GiB out: naive PyTorch takes 5 s a call on two cores
        yield Case("powers", f"{_M}x{n}", (_M, n), quick=_BOTH if n <= 16384 else _GPU)


def _models() -> Iterable[Case]:
    def case(name: str, shape: tuple[int, ...], quick: tuple[str, ...] = (), dim: int = -1) -> Case:
        return Case("models", name, shape, dim, dtypes=_MODEL_DTYPES, quick=quick)

    # (model, size of its vocabulary): next-token logits of 1, 8 and 64 sequences, and of a training step's 1024 tokens
    cpu_quick = {("GPT-2", 1), ("GPT-2", 64), ("Llama-3", 8), ("Qwen", 8), ("Gemma", 1), ("Gemma", 8)}
    for model, n in (("GPT-2", 50257), ("Llama-3", 128256), ("Qwen", 151936), ("Gemma", 262144)):
        for m in (1, 8, 64, 1024):
            name = f"{model} vocabulary, {m} row{'s' if m > 1 else ''}"
            yield case(name, (m, n), _BOTH if (model, m) in cpu_quick else _GPU)

    yield case("ViT-B/16 attention, batch 8", (8, 12, 197, 197), _BOTH)
    for context, n in (("1K", 1024), ("4K", 4096), ("32K", 32768)):
        for queries in (1, 128):
            name = f"{context} attention, {'1 query' if queries == 1 else f'{queries} queries'}"
            on_cpu = (context, queries) in {("1K", 128), ("4K", 1), ("4K", 128), ("32K", 1)}
            yield case(name, (32, queries, n), _BOTH if on_cpu else _GPU)

    for experts in (8, 128, 256):
        yield case(f"MoE router, {experts} experts", (8192, experts), _BOTH)

    # Segmentation maps: the softmax goes over the classes, dim 1, whose elements lie 512 * 512 apart
    for label, classes in (("VOC", 21), ("Cityscapes", 19)):
        for batch in (1, 16):
            name = f"{label}, {classes} classes, {'1 map' if batch == 1 else f'{batch} maps'}"
            yield case(name, (batch, classes, 512, 512), _BOTH if batch == 1 else _GPU, dim=1)


# What `rows` fills with rows: far more than any L2 on a GPU. The quick form on a CPU fills less.
FILL, CPU_FILL = 1 << 30, 8 << 20
# Powers of two and their neighbours, odd lengths, and the lengths of attention and of vocabularies
ROWS = (
    *(8, 16, 33, 64, 100, 128, 200, 256, 512, 781, 1000, 1024, 1025, 2048, 2176, 4096, 4224, 8192, 8320, 9216),
    *(12288, 12672, 16384, 32000, 32001, 32768, 50257, 50304, 65536, 128256, 131072, 151936, 256000, 262144),
)
REDUCED = (33, 256, 1024, 4096, 32768, 50257, 131072)  # the lengths at which `rows` has logsumexp too


def _rows() -> Iterable[Case]:
    dtypes = ("float32", "bfloat16")
    quick = {33: _BOTH, 256: _GPU, 1000: _BOTH, 1024: _GPU, 4096: _BOTH, 12288: _GPU, 32768: _GPU, 50257: _BOTH}
    for n in ROWS:
        on = _GPU if n in (131072, 151936) else quick.get(n, ())
        yield Case("rows", f"N {n}", (1, n), dtypes=dtypes, quick=on, fill=FILL)
    for n in REDUCED:
        on = _BOTH if n == 4096 else _GPU if n in (33, 50257) else ()
        yield Case("rows", f"logsumexp, N {n}", (1, n), function="logsumexp", dtypes=dtypes, quick=on, fill=FILL)


def _few() -> Iterable[Case]:
    both = ("float32", "bfloat16")
    shapes = (
        *((1, 1 << 17), (1, 1 << 20), (1, 1 << 22), (4, 1 << 20), (8, 128256), (32, 128256), (64, 151936)),
        *((1, 1 << 24), (4, 1 << 22)),
    )
    for m, n in shapes:
        yield Case("few", f"{m}x{n}", (m, n), dtypes=both, quick=_BOTH if m * n <= 1 << 20 else _GPU)
    yield Case("few", f"1x{1 << 28}", (1, 1 << 28))  # 1 GiB of float32, the longest row by far


def _backward() -> Iterable[Case]:
    """Gradients of rows, softmax's and log_softmax's: powers of two, vocabularies, many short rows, few long ones."""
    f32, bf16 = ("float32",), ("bfloat16",)
    shapes: list[tuple[int, int, tuple[str, ...]]] = [(4096, 1 << i, f32) for i in range(10, 18)]
    shapes += [(32768, 1 << i, bf16) for i in range(8, 14)]
    shapes += [(8192, n, bf16) for n in (32001, 50257, 50304, 128256, 151936)]
    shapes += [(m, n, (*f32, *bf16)) for m, n in ((2097152, 64), (8388608, 16))]
    long = ((1, 1 << 17), (1, 1 << 20), (1, 1 << 22), (4, 1 << 20), (8, 128256), (32, 128256))
    shapes += [(m, n, (*f32, *bf16)) for m, n in long]
    quick = {(4096, 1024): _BOTH, (4096, 8192): _GPU, (32768, 1024): _GPU, (8192, 50257): _GPU, (1, 1 << 20): _BOTH}
    for function in ("softmax", "log_softmax"):
        for m, n, dtypes in shapes:
            name = f"{m}x{n}" if function == "softmax" else f"{function}, {m}x{n}"
            on = quick.get((m, n), ())
            yield Case("backward", name, (m, n), -1, function, "backward", dtypes=dtypes, quick=on)


# What a CPU has to do with: rows of one tile and of many blocks, rows shorter than a vector, one row for all cores, and
# rows that lie side by side
CPU_ROWS = (
    *((4096, 64), (4096, 781), (4096, 1024), (4096, 4096), (512, 8192), (64, 50257), (8, 151936)),
    *((1, 1 << 20), (1, 1 << 24), (1 << 20, 16), (65536, 33)),
)
CPU_OTHER = (((16, 21, 256, 256), 1), ((64, 4096, 256), 1), ((1024, 4096), 0))  # (shape, dim)
CPU_REDUCED = ((4096, 781), (4096, 4096), (64, 50257), (1, 1 << 24), (1 << 20, 16))


def _cpu() -> Iterable[Case]:
    def case(shape: tuple[int, ...], dim: int, function: str, quick: bool) -> Case:
        sizes = "x".join(map(str, shape))
        name = f"{sizes}, dim {dim}" if dim != -1 else sizes
        name = name if function == "softmax" else f"{function}, {name}"
        return Case("cpu", name, shape, dim, function, dtypes=DTYPES, quick=_BOTH if quick else ())

    quick = {(4096, 64), (4096, 781), (4096, 1024), (64, 50257), (1, 1 << 20), (65536, 33)}
    for shape in CPU_ROWS:
        yield case(shape, -1, "softmax", shape in quick)
    for other, dim in CPU_OTHER:
        yield case(other, dim, "softmax", other == (1024, 4096))
    for shape in CPU_REDUCED:
        yield case(shape, -1, "logsumexp", shape == (4096, 781))
    yield case((1024, 4096), 0, "logsumexp", False)


def _cpu_backward() -> Iterable[Case]:
    """The points of `cpu`, and those that it writes of log_softmax too."""
    for case in _cpu():
        yield replace(case, suite="cpu-backward", direction="backward")
        if case.function == "softmax":
            name = f"log_softmax, {case.name}"
            yield replace(case, suite="cpu-backward", name=name, function="log_softmax", direction="backward")


SUITES: dict[str, Suite] = {
    suite.name: suite
    for suite in (
        Suite(
            "seeds",
            "4096 rows, N = 256 to 12672 in steps of 128: the sweep of the fused-softmax tutorial",
            tuple(_seeds()),
        ),
        Suite("powers", "4096 rows, N = 256 to 262144 in steps of 4x", tuple(_powers())),
        Suite("models", "the shapes of language models, attention, routers and segmentation", tuple(_models())),
        Suite("rows", "as many rows as 1 GiB holds, N = 8 to 262144, odd lengths among them", tuple(_rows())),
        Suite("few", "1 to 64 long rows: N = 128256 to 268435456", tuple(_few())),
        Suite("backward", "gradients of rows: many, few and long, vocabularies", tuple(_backward())),
        Suite("cpu", "the CPU engine: rows of 16 to 16777216, other dims, logsumexp", tuple(_cpu())),
        Suite(
            "cpu-backward",
            "gradients at the points of cpu, and of log_softmax",
            tuple(_cpu_backward()),
        ),
    )
}


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
