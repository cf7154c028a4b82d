"""`onepass gallery check`: checks a learner's softmax, a CUDA kernel or a Python function, on inputs on which softmaxes
often go wrong."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onepass import reference
from onepass.native import KernelLaunch
from onepass.tools.bench.correctness import TOLERANCE, smallest_number
from onepass.tools.emulator.run import BACKWARDS, DRAWN, FORWARDS, IN_STEP, run
from onepass.tools.gallery.cuda_launches import H200, LAUNCHES, Launch, blocks_for, nvrtc_options, rows_launch
from onepass.tools.gallery.variants import VARIANTS

__all__ = ["Candidate", "Failure", "Trial", "load", "trials", "try_one"]

UNWRITTEN = -7.0  # the memory of a result is filled with this before a call: no softmax returns it
FAR = 2**30 + 8  # a row stride with which the third row begins after element 2^31
_BOUNDS = r"(?:__launch_bounds__\s*\([^)]*\)\s*)?"
_KERNEL = re.compile(rf'extern\s+"C"\s+__global__\s+{_BOUNDS}void\s+{_BOUNDS}(\w+)\s*\(([^)]*)\)')


# What is checked --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Candidate:
    """A CUDA kernel `function` (x, y, rows, n, x_stride, y_stride) of a file, or a Python function of x.

    like: a CUDA variant of the gallery. The kernel has its parameters, macros and launch, and computes the same.
    threads, blocks: the launch of a kernel. 0: those of `like`, or else 256 threads and as many blocks as rows.
    defines: macros of a kernel, in addition to TYPE. order: the order of threads in the emulator. IN_STEP hides races,
    so that a failure shows another mistake.
    """

    file: Path
    function: str
    call: Callable[[Tensor], Tensor] | None = None  # the Python function
    emulated: bool = False
    like: str = ""
    threads: int = 0
    blocks: int = 0
    defines: tuple[str, ...] = ()
    order: int = IN_STEP

    @property
    def computes(self) -> str:
        """What the candidate computes, one of variants.COMPUTES."""
        return VARIANTS[self.like].computes if self.like else "rows"

    def inputs(self, x: Tensor) -> tuple[Tensor, ...]:
        """The tensors that the kernel reads: x, or the softmax of x and the upstream gradient."""
        if self.computes != "gradient":
            return (x,)
        grad = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).to(x.device, x.dtype)
        return torch.softmax(x.float(), 1).to(x.dtype), grad

    def definition(self, x: Tensor) -> Tensor:
        """The expected result, in float64."""
        if self.computes != "gradient":
            return reference.softmax(x.double(), 0 if self.computes == "columns" else 1)
        y, grad = (t.double() for t in self.inputs(x))
        return y * (grad - (y * grad).sum(1, keepdim=True))

    def refuses(self, x: Tensor) -> str | None:
        """Why `like` does not take x, or None."""
        return VARIANTS[self.like].refuses(x.shape[0], x.shape[1], x.dtype) if self.like else None

    def __call__(self, x: Tensor, out: Tensor) -> None:
        """Writes the softmax of the rows of `x` into `out`, or what `like` computes."""
        if self.call is not None:
            y = self.call(x)
            if (y.shape, y.dtype) != (x.shape, x.dtype):
                raise ValueError(f"gave {tuple(y.shape)} of {y.dtype} for {tuple(x.shape)} of {x.dtype}")
            out.copy_(y)
            return
        launch = self._launch(x, out)
        launch.options += tuple(f"-D{define}" for define in self.defines)
        if not self.emulated:
            from onepass.tools.gallery.native_calls import run_on_gpu

            run_on_gpu(launch)
            return
        names = launch.options, launch.numbers, launch.arguments, launch.written
        run(Path(launch.source), self.function, *names, order=self.order)

    def _launch(self, x: Tensor, out: Tensor) -> Launch:
        source = str(self.file.resolve())
        if not self.like:
            numbers = KernelLaunch(self.blocks or blocks_for(x.shape[0], 1), self.threads or 256)
            return rows_launch(self.function, x, out, numbers, nvrtc_options(x.dtype), source)
        on = H200._replace(multiprocessors=4)
        if not self.emulated:
            from onepass.tools.gallery.native_calls import processor

            on = processor(x.device.index)
        launch = LAUNCHES[self.like](*self.inputs(x), out, on, **self.given())
        return replace(launch, source=source, name=self.function)

    def given(self) -> dict[str, int]:
        """The numbers of the launch that override those of `like`."""
        return {name: value for name, value in (("threads", self.threads), ("blocks", self.blocks)) if value}


def load(file: Path, function: str | None = None, like: str = "", **launch: Any) -> Candidate:
    """The candidate in a file: .cu, or .py with a function softmax or `function`.

    Raises ValueError for a file of another kind, without such a function, or with several kernels if none is named; and
    if `like` is no CUDA variant of the gallery.
    """
    if like and like not in LAUNCHES:
        raise ValueError(f"no CUDA variant {like!r}; there are {', '.join(LAUNCHES)}")
    if file.suffix == ".py":
        spec = importlib.util.spec_from_file_location(file.stem, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            raise ValueError(f"{file} cannot be imported: {type(error).__name__}: {error}") from error
        name = function or "softmax"
        call = getattr(module, name, None)
        if not callable(call):
            raise ValueError(f"{file} has no function {name}(x)")
        if like:
            raise ValueError(f"{file} is Python; only a kernel is launched like {like}")
        return Candidate(file, name, call)
    if file.suffix != ".cu":
        raise ValueError(f"takes a .cu or a .py file, got {file}")
    kernels = dict(_KERNEL.findall(file.read_text(encoding="utf-8")))
    if function is None and len(kernels) != 1:
        found = (
            f"has {', '.join(kernels)}: name one with --function" if kernels else 'has no extern "C" __global__ void'
        )
        raise ValueError(f"{file} {found}")
    name = function or next(iter(kernels))
    if name not in kernels:
        raise ValueError(f"{file} has no kernel {name}; it has {', '.join(kernels) or 'none'}")
    signature = "const TYPE* x, TYPE* y, int64_t rows, int64_t n, int64_t x_stride, int64_t y_stride"
    if like and (of_rung := _KERNEL.findall(VARIANTS[like].source)):  # cuda-auto has no kernel of its own
        ((_, signature),) = of_rung
    if kernels[name].count(",") != signature.count(","):
        takes, has = (" ".join(parameters.split()) for parameters in (signature, kernels[name]))
        raise ValueError(f"{name} must take ({takes}), or those of a --like; it takes ({has})")
    candidate = Candidate(file, name, like=like, **launch)
    if like:
        VARIANTS[like].check_launch_params(candidate.given())
    return candidate


# What it is tried on ----------------------------------------------------------------------------------------------


class Trial(NamedTuple):
    """An input. `make` returns x and the memory for its result. `hint` is the likely mistake if the trial fails. If
    `order` is given, the trial runs only in the emulator, with that order of threads."""

    name: str
    make: Callable[[torch.device], tuple[Tensor, Tensor]]
    hint: str
    order: int | None = None


def trials() -> Iterator[Trial]:
    """The inputs on which softmaxes often go wrong."""

    def trial(
        name: str,
        shape: tuple[int, int],
        hint: str,
        change: Callable[[Tensor], Any] = lambda x: None,
        dtype: torch.dtype = torch.float32,
        take: Callable[[Tensor], Tensor] = lambda x: x,
        order: int | None = None,
    ) -> Trial:
        def make(device: torch.device) -> tuple[Tensor, Tensor]:
            generator = torch.Generator().manual_seed(0)
            x = torch.randn(shape, generator=generator)
            change(x)
            x = take(x.to(dtype).to(device))
            # The result lies within a larger matrix, with another row stride than x.
            return x, torch.full((x.shape[0] + 2, x.shape[1] + 11), UNWRITTEN, dtype=dtype, device=device)[1:-1, 5:-6]

        return Trial(name, make, hint, order)

    beyond = "the last elements of a row, of a warp or of a vector: elements beyond the row must count as -inf"
    yield trial("N = 781", (5, 781), beyond)
    yield trial("N = 1", (3, 1), beyond)
    yield trial("N = 5003", (2, 5003), "rows of more elements than a block has threads take a loop")
    yield trial("one row", (1, 300), "the number of blocks must be rounded up, and rows beyond the last left out")
    yield trial("40 rows", (40, 33), "row r must be computed by one block or warp, from row r of x")
    stride = "row r begins at x + r * x_stride and is written at y + r * y_stride; strides count elements"
    yield trial("rows of a larger matrix", (7, 70), stride, take=lambda x: x[:, 3:50])
    yield trial("every third row", (13, 40), stride, take=lambda x: x[1::3])
    least = "the first maximum must be -inf: 0, or the least positive float, is larger than all of these"
    yield trial("around -200", (4, 300), least, lambda x: x.sub_(200))
    yield trial("around 10000", (4, 300), "subtract the maximum before the exponential", lambda x: x.add_(1e4))
    skip = "-inf - -inf is NaN: a pair (maximum, sum) must skip -inf until a number has come"
    yield trial("some -inf", (4, 300), skip, lambda x: x[:, 5:60].fill_(-torch.inf))
    yield trial("-inf at first", (4, 781), skip, lambda x: x[:, :700].fill_(-torch.inf))
    spread = "what is not a number must reach the sum, and so the whole row: {} - maximum is NaN by itself"
    yield trial("a row of -inf", (3, 300), spread.format("-inf"), lambda x: x[1].fill_(-torch.inf))
    yield trial("+inf", (3, 300), spread.format("+inf"), lambda x: x[1, 7].fill_(torch.inf))
    yield trial("NaN", (3, 300), spread.format("NaN") + "; fmaxf ignores it", lambda x: x[1, 7].fill_(torch.nan))
    half = "read through to_acc and write through from_acc<TYPE>; a sum of thousands in 16 bits loses elements"
    for name, dtype in (("float16", torch.float16), ("bfloat16", torch.bfloat16)):
        yield trial(name, (5, 781), half, dtype=dtype)
        yield trial(f"{name}, 4000 equal", (2, 4000), half, lambda x: x.fill_(1.5), dtype)
    race = "a race: a barrier is missing between what some threads write to shared memory and what others read there"
    for name, order in (("first warps first", FORWARDS), ("last warps first", BACKWARDS), ("warps at random", DRAWN)):
        yield trial(name, (3, 500), race, order=order)
    yield Trial("rows 2^30 apart", _far, "offsets need 64 bits: row * stride exceeds 2^31")


def _far(device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows of a matrix of 8 GB, of which a CPU touches only some pages."""
    store = torch.empty(4 * FAR + 600, dtype=torch.float16, device=device)
    x, out = (store.as_strided((5, 300), (FAR, 1), offset) for offset in (0, 300))
    x.copy_(torch.randn(5, 300, generator=torch.Generator().manual_seed(0)))
    return x, out.fill_(UNWRITTEN)


# The check --------------------------------------------------------------------------------------------------------


class Failure(NamedTuple):
    """A failed trial: an error, or the first wrong element; and the likely mistake."""

    what: str
    hint: str
    is_last: bool = False  # whether the GPU cannot be used afterwards


def try_one(candidate: Candidate, trial: Trial, device: torch.device) -> Failure | str | None:
    """None if the candidate is right on an input, its Failure, or the reason why it was not tried."""
    if trial.order is not None:
        if not candidate.emulated:
            return "only --emulate shows races"
        candidate = replace(candidate, order=trial.order)
    if trial.make is _far and device.type == "cuda" and torch.cuda.mem_get_info(device)[0] < 3 * FAR * 4:
        return "takes 9 GB of memory"
    try:
        x, out = trial.make(device)
    except RuntimeError:  # no memory
        return "takes 9 GB of memory"
    if (reason := candidate.refuses(x)) is not None:
        return f"{candidate.like} {reason}"
    before = x.clone()
    try:
        candidate(x, out)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except Exception as error:
        return _refused(error, trial)._replace(is_last=device.type == "cuda" and _is_lost(device))
    want = candidate.definition(before)
    # The elements of a gradient are differences, so their error is relative to the largest element of the row.
    scale = want.abs().amax(1, keepdim=True) if candidate.computes == "gradient" else want.abs()
    return _compare(out, want, scale, trial) or _beside(x, before, out)


def _is_lost(device: torch.device) -> bool:
    try:
        torch.cuda.synchronize(device)
    except Exception:
        return True
    return False


def _refused(error: Exception, trial: Trial) -> Failure:
    text = str(error).strip() or repr(error)
    if "error:" in text:  # from a compiler
        lines = [line for line in text.splitlines() if "error" in line]
        hint = "it is compiled with -DTYPE=float, half_t or bfloat16_t, and may include the gallery's files"
        return Failure("does not compile: " + "; ".join(lines[:3]), hint)
    first = text.splitlines()[0]
    hints = {
        "PTX: ": "the emulator does not know this instruction; a GPU does",
        "gave (": "the result has the shape and the dtype of x",
        "outside of all tensors": "an index is beyond the row, or a row beyond the matrix; " + trial.hint,
        "only read": "x is not to be written",
        "waits for ever": "a barrier or a shuffle that not all of its threads come to",
        "misaligned": "a vector may begin at multiples of 16 bytes only, which rows need not do",
        "shared memory": "the kernel indexes its shared memory beyond what it declares",
    }
    hint = next((hint for words, hint in hints.items() if words in first), trial.hint)
    return Failure(f"{type(error).__name__}: {first}", hint)


def _compare(out: Tensor, want: Tensor, scale: Tensor, trial: Trial) -> Failure | None:
    dtype = str(out.dtype).removeprefix("torch.")
    got, tolerance = out.double(), TOLERANCE[dtype]
    error = (got - want).abs() / scale.clamp(min=smallest_number(out.dtype) / tolerance)
    wrong = ~((error <= tolerance) | (got.isnan() & want.isnan()))
    if not bool(wrong.any()):
        return None
    row, column = (int(i) for i in wrong.nonzero()[0])
    value, right = float(got[row, column]), float(want[row, column])
    what = f"{int(wrong.sum())} of {wrong.numel()} wrong, first at row {row}, element {column}: "
    what += f"got {'nothing' if value == UNWRITTEN else f'{value:.6g}'}, want {right:.6g}"
    ratios = (got[row] / want[row])[want[row] > 1e-30]
    if value == UNWRITTEN:
        return Failure(what, f"nothing is written there; {trial.hint}")
    if len(ratios) > 2 and 0 < float(ratios.max()) < 1.001 * float(ratios.min()) and float(ratios.max()) < torch.inf:
        off = f"the whole row is {float(ratios[0]):.4g} times what it should be, so the sum is wrong"
        return Failure(what, f"{off}; {trial.hint}")
    return Failure(what, trial.hint)


def _beside(x: Tensor, before: Tensor, out: Tensor) -> Failure | None:
    """The Failure if other memory than the result was written, or None."""
    hint = "only y + row * y_stride + i for i < n is to be written"
    if not torch.equal(x.nan_to_num(), before.nan_to_num()):
        return Failure("x was written", hint)
    if out.untyped_storage().data_ptr() == x.untyped_storage().data_ptr():  # x and out share a storage
        return None
    store = torch.empty(0, dtype=out.dtype, device=out.device).set_(out.untyped_storage())
    written = int((store != UNWRITTEN).sum()) - out.numel()
    return Failure(f"{written} elements beside the result were written", hint) if written > 0 else None
