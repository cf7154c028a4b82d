"""The mistakes of the published code, each as a change of a variant that is right: `onepass gallery mistakes`."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import NamedTuple

__all__ = ["MISTAKES", "Change", "Mistake"]

INFINITY, FLT_MIN = "__int_as_float(0xff800000)", "__int_as_float(0x00800000)"  # the least positive normal float
INT_ROW = "x + int(row) * int(x_stride)"
PLAIN = ("warp", "block", "online")


class Change(NamedTuple):
    """A change of a gallery file that breaks `variant`: the right text, and the text with the mistake."""

    variant: str
    file: str
    right: str
    mistaken: str


class Mistake(NamedTuple):
    """A mistake: where the published code has it, and the change that puts it into a variant for an exercise, or
    None."""

    name: str
    about: str
    changes: tuple[Change, ...] = ()
    exercise: Change | None = None

    def texts(self) -> tuple[str, str]:
        """(source with the mistake, right source) of the variant. Raises ValueError if the mistake has no change."""
        if self.exercise is None:
            raise ValueError(f"{self.name} is no mistake of a kernel, so that there is no rung to mend")
        right = Path(__file__).with_name(self.exercise.file).read_text(encoding="utf-8")
        return right.replace(self.exercise.right, self.exercise.mistaken), right

    def answer(self) -> str:
        """The difference from the mistaken source to the right one."""
        mistaken, right = (text.splitlines() for text in self.texts())
        return "\n".join(difflib.unified_diff(mistaken, right, "mistaken", "right", lineterm="", n=1))


def _cuda(file: str, right: str, mistaken: str, names: tuple[str, ...] = PLAIN) -> tuple[Change, ...]:
    return tuple(Change(f"cuda-{name}", file.format(name), right, mistaken) for name in names)


def _triton(right: str, mistaken: str) -> tuple[Change, ...]:
    return tuple(
        Change(f"triton-{name}", f"triton_{name}.py", right, mistaken) for name in ("row", "persistent", "online")
    )


_ROUNDED = "cuda_launches.py", "-(-rows // rows_per_block)", "rows // rows_per_block"
_ONE_ARRAY = _cuda("cuda_{}.cu", "partials.sum", "partials.maximum", ("block", "online"))

MISTAKES = {
    mistake.name: mistake
    for mistake in (
        Mistake(
            "least-maximum",
            "The smallest positive float (std::numeric_limits<float>::min()) as the first maximum. A row of negative "
            "numbers keeps it, and the exponentials of a row around -200 are all zero.",
            (
                *_cuda("cuda_warp.cu", INFINITY, FLT_MIN, (*PLAIN, "auto")),
                *(
                    Change(
                        f"cpu-{name}",
                        f"cpu_{name}.cpp",
                        f"maximum = {infinity}",
                        "maximum = std::numeric_limits<float>::min()",
                    )
                    for name, infinity in (
                        ("threepass", "-std::numeric_limits<float>::infinity()"),
                        ("online", "-infinity"),
                    )
                ),
            ),
            Change("cuda-warp", "cuda_warp.cu", INFINITY, FLT_MIN),
        ),
        Mistake(
            "padding",
            "+inf as padding of a tile that is wider than the row. The maximum is then inf and everything is NaN.",
            _triton('other=-float("inf")', 'other=float("inf")'),
            Change("cuda-vector", "cuda_vector.cu", "n, NOTHING)", "n, -NOTHING)"),
        ),
        Mistake(
            "empty-grid",
            "rows / warps_per_block, rounded down, as the number of blocks: none for fewer than 8 rows.",
            _cuda(*_ROUNDED, ("warp", "auto")),
        ),
        Mistake(
            "race",
            "Two reductions through one array of shared memory, without a barrier between the reads of the first and "
            "the writes of the second.",
            _ONE_ARRAY,
            _ONE_ARRAY[0],
        ),
        Mistake(
            "offsets",
            "32-bit offsets: row * stride exceeds 2^31 in a matrix of 8 GB.",
            (
                *_cuda("cuda_{}.cu", "x + row * x_stride", INT_ROW),
                *_triton("tl.int64", "tl.int32"),
                *(
                    Change(f"cpu-{name}", "cpu.h", "in + row * x_stride", INT_ROW.replace("x +", "in +"))
                    for name in ("threepass", "online")
                ),
            ),
            Change("cuda-warp", "cuda_warp.cu", "x + row * x_stride", INT_ROW),
        ),
        Mistake(
            "stale-specialisation",
            "A compiled kernel kept by the size of its tile alone. Triton compiles another kernel where a length is a "
            "multiple of 16, so one compiled for 784 columns is launched for 781.",
        ),
        Mistake(
            "unset-variable",
            "A register count that is read on AMD GPUs outside the CDNA family and was never set.",
        ),
    )
}
