"""The suites: which cases are run together. Plain data, as `cases.py`.

To add a suite, add it to `SUITES`; to add a case to the quick form, name the device types that take it there
(`quick=("cpu", "cuda")`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from onepass.tools.bench.cases import DIRECTIONS, Case, Suite

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


# Rows that are no pieces of memory: maps of classes, tables, batches of matrices, heads that lie last, and contiguous
# tensors seen otherwise. The last ones are a column of 131072 and one of 1048576 elements.
COLUMNS: tuple[tuple[tuple[int, ...], int | tuple[int, ...], str], ...] = (  # (shape, dim, layout)
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
    """Each forward, then each backward."""
    quick = {(64, 80, 14, 14): _BOTH, (2, 131072, 16): _BOTH, (64, 1000, 14, 14): _GPU, (4096, 4096): _GPU}
    for direction in DIRECTIONS:
        for shape, dim, layout in COLUMNS:
            over = "" if dim == -1 else f", dim {dim}" if isinstance(dim, int) else f", dims {','.join(map(str, dim))}"
            name = " ".join(filter(None, ("x".join(map(str, shape)), layout))) + over
            name = name if direction == "forward" else f"softmax backward, {name}"
            on = quick.get(shape, _GPU if layout else ())
            both = ("float32", "bfloat16")
            yield Case("columns", name, shape, dim, "softmax", direction, both, quick=on, layout=layout)


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
        Suite("columns", "softmax over other dims and in other layouts, and its gradient", tuple(_columns())),
        Suite("cpu", "the CPU engine: rows of 16 to 16777216, other dims, logsumexp", tuple(_cpu())),
        Suite(
            "cpu-backward",
            "gradients at the points of cpu, and of log_softmax",
            tuple(_cpu_backward()),
        ),
    )
}
