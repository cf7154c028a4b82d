"""The suites: lists of cases that run together, as plain data.

To add a suite, add it to `SUITES`. To run a case with `--quick`, name the device types that run it there
(`quick=("cpu", "cuda")`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from onepass.tools.bench.cases import DIRECTIONS, Case, Suite

_BOTH, _GPU = ("cpu", "cuda"), ("cuda",)
_F32, _BF16 = ("float32",), ("bfloat16",)
CPU_DTYPES = (*_F32, *_BF16, "float16")


def _tutorial() -> Iterable[Case]:
    quick = {2, 4, 8, 16, 24, 32, 48, 64, 80, 99}
    for i in range(2, 100):
        yield Case("tutorial", f"4096x{128 * i}", (4096, 128 * i), quick=_BOTH if i in quick else ())


def _powers_of_two() -> Iterable[Case]:
    for n in (256, 1024, 4096, 16384, 65536, 262144):
        # 4096 x 65536 float32 elements are 1 GiB in and 1 GiB out: naive PyTorch takes 5 s per call on two cores
        yield Case("powers-of-two", f"4096x{n}", (4096, n), quick=_BOTH if n <= 16384 else _GPU)


def _models() -> Iterable[Case]:
    def case(name: str, shape: tuple[int, ...], quick: bool = False, dim: int = -1) -> Case:
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
        yield Case("row-lengths", f"N {n}", (1, n), dtypes=(*_F32, *_BF16), quick=quick, fill=FILL)
    for n in LOGSUMEXP_LENGTHS:
        quick = _BOTH if n == 4096 else _GPU if n in (33, 50257) else ()
        name = f"logsumexp, N {n}"
        yield Case("row-lengths", name, (1, n), -1, "logsumexp", dtypes=(*_F32, *_BF16), quick=quick, fill=FILL)


_LONG = ((1, 1 << 17), (1, 1 << 20), (1, 1 << 22), (4, 1 << 20), (8, 128256), (32, 128256))


def _few_long_rows() -> Iterable[Case]:
    for m, n in (*_LONG, (64, 151936), (1, 1 << 24), (4, 1 << 22)):
        quick = _BOTH if m * n <= 1 << 20 else _GPU
        yield Case("few-long-rows", f"{m}x{n}", (m, n), dtypes=(*_F32, *_BF16), quick=quick)
    yield Case("few-long-rows", f"1x{1 << 28}", (1, 1 << 28))  # 1 GiB of float32, by far the longest row


def _backward() -> Iterable[Case]:
    """Gradients of softmax and log_softmax: powers of two, vocabularies, many short rows, few long rows."""
    shapes: list[tuple[int, int, tuple[str, ...]]] = [(4096, 1 << i, _F32) for i in range(10, 18)]
    shapes += [(32768, 1 << i, _BF16) for i in range(8, 14)]
    shapes += [(8192, n, _BF16) for n in (32001, 50257, 50304, 128256, 151936)]
    shapes += [(m, n, (*_F32, *_BF16)) for m, n in ((2097152, 64), (8388608, 16), *_LONG)]
    quick = {(4096, 1024): _BOTH, (4096, 8192): _GPU, (32768, 1024): _GPU, (8192, 50257): _GPU, (1, 1 << 20): _BOTH}
    for function in ("softmax", "log_softmax"):
        for m, n, dtypes in shapes:
            name = f"{m}x{n}" if function == "softmax" else f"{function}, {m}x{n}"
            on = quick.get((m, n), ())
            yield Case("backward", name, (m, n), -1, function, "backward", dtypes=dtypes, quick=on)


# Rows that are not contiguous: maps of classes, tables, batches of matrices, heads in the last dim, and other layouts.
# The last two are a column of 131072 and one of 1048576 elements.
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
    quick = {(64, 80, 14, 14): _BOTH, (2, 131072, 16): _BOTH, (64, 1000, 14, 14): _GPU, (4096, 4096): _GPU}
    for direction in DIRECTIONS:
        for shape, dim, layout in COLUMNS:
            over = "" if dim == -1 else f", dim {dim}" if isinstance(dim, int) else f", dims {','.join(map(str, dim))}"
            name = " ".join(filter(None, ("x".join(map(str, shape)), layout))) + over
            name = name if direction == "forward" else f"softmax backward, {name}"
            on = quick.get(shape, _GPU if layout else ())
            yield Case(
                "columns", name, shape, dim, direction=direction, dtypes=(*_F32, *_BF16), quick=on, layout=layout
            )


# The cases of a CPU: rows of one tile and of many blocks, rows shorter than a vector, one row for all cores, columns
CPU_ROWS = (
    *((4096, 64), (4096, 781), (4096, 1024), (4096, 4096), (512, 8192), (64, 50257), (8, 151936)),
    *((1, 1 << 20), (1, 1 << 24), (1 << 20, 16), (65536, 33)),
)
CPU_COLUMNS = (((16, 21, 256, 256), 1), ((64, 4096, 256), 1), ((1024, 4096), 0))  # (shape, dim)
CPU_LOGSUMEXP = ((4096, 781), (4096, 4096), (64, 50257), (1, 1 << 24), (1 << 20, 16))


def _cpu() -> Iterable[Case]:
    quick = {(4096, 64), (4096, 781), (4096, 1024), (64, 50257), (1, 1 << 20), (65536, 33)}
    cases: list[tuple[tuple[int, ...], int, str, bool]] = [(s, -1, "softmax", s in quick) for s in CPU_ROWS]
    cases += [(shape, dim, "softmax", shape == (1024, 4096)) for shape, dim in CPU_COLUMNS]
    cases += [(shape, -1, "logsumexp", shape == (4096, 781)) for shape in CPU_LOGSUMEXP]
    cases += [((1024, 4096), 0, "logsumexp", False)]
    for shape, dim, function, on in cases:
        name = "x".join(map(str, shape)) + (f", dim {dim}" if dim != -1 else "")
        name = name if function == "softmax" else f"{function}, {name}"
        yield Case("cpu", name, shape, dim, function, dtypes=CPU_DTYPES, quick=_BOTH if on else ())


def _cpu_backward() -> Iterable[Case]:
    """The cases of `cpu`, and log_softmax at those of softmax."""
    for case in _cpu():
        yield replace(case, suite="cpu-backward", direction="backward")
        if case.function == "softmax":
            name = f"log_softmax, {case.name}"
            yield replace(case, suite="cpu-backward", name=name, function="log_softmax", direction="backward")


SUITES = {
    name: Suite(name, about, tuple(cases))
    for name, about, cases in (
        ("tutorial", "4096 rows, N = 256 to 12672 in steps of 128, as in the fused-softmax tutorial", _tutorial()),
        ("powers-of-two", "4096 rows, N = 256 to 262144 in steps of 4x", _powers_of_two()),
        ("models", "the shapes of language models, attention, routers and segmentation", _models()),
        ("row-lengths", "as many rows as 1 GiB holds, N = 8 to 262144, including odd lengths", _row_lengths()),
        ("few-long-rows", "1 to 64 rows, N = 128256 to 268435456", _few_long_rows()),
        ("backward", "gradients of many rows, of few long rows and of vocabularies", _backward()),
        ("columns", "softmax over other dims and in other layouts, and its gradient", _columns()),
        ("cpu", "the CPU engine: rows of 16 to 16777216 elements, other dims, logsumexp", _cpu()),
        ("cpu-backward", "gradients at the points of cpu, and of log_softmax", _cpu_backward()),
    )
}
