"""For tests of the Triton engine: plans that force a tier, special rows, gradients and their definition, and processes.

Triton reads TRITON_INTERPRET when it is imported, and one process cannot both interpret and compile. So the kernels run
in two separate processes, which depend neither on this process's variable nor on what other tests have imported.
"""

from __future__ import annotations

import importlib.util
import io
import math
import multiprocessing
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import onepass.triton as engine
from lib import samples
from lib.gradients import gradient
from lib.support import DTYPES, Make, accumulator, assert_defined, assert_state, maker, slow
from onepass import State, reference
from onepass.triton import Plan
from onepass.triton.launch import _kernel
from onepass.triton.loss import Tile

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
F32, F64, F16, BF16 = DTYPES
INF, NAN = math.inf, math.nan

# Plans that force a tier on rows of up to 32: tiles that no row count divides, chunks that no row length divides, and
# grids that need several launches.
TIERS = {
    "row": Plan("row", block=32, rows=1, depth=1, num_warps=1, num_stages=1, grid=1000),
    "rows of 4 a program, split launch": Plan("row", block=32, rows=4, depth=1, num_warps=1, num_stages=1, grid=1),
    "online": Plan("online", block=8, rows=1, depth=2, num_warps=1, num_stages=1, grid=1000),
    "online, split launch": Plan("online", block=16, rows=1, depth=1, num_warps=1, num_stages=1, grid=2),
}
# Each tier takes only two dtypes, because interpreting sums of float32 and float64 takes 1 ms per element.
SOME_DTYPES = [(tier, DTYPES[(k + j) % 4]) for k, tier in enumerate(TIERS) for j in (0, 2)]


def name_of(value: Any) -> str:
    return str(value).removeprefix("torch.")


# Processes ------------------------------------------------------------------------------------------------------------


def reduce_by_halves() -> None:
    """Makes the interpreter combine the two parts of a block at once. Element by element takes ten times as long."""
    try:
        import numpy
        from triton.runtime.interpreter import ReduceOps
    except ImportError:  # the tests report it
        return
    one_by_one = ReduceOps.generic_reduce

    def reduce(self: Any, values: Any) -> Any:
        parts, axis, types = [value.handle.data for value in values], self.axis, [value.dtype for value in values]
        if axis is None or parts[0].shape[axis].bit_count() != 1:
            return one_by_one(self, values)
        while parts[0].shape[axis] > 1:
            pairs = zip(*(numpy.split(part, 2, axis) for part in parts), strict=True)
            first, second = (
                [self.to_tensor(part, kind) for part, kind in zip(half, types, strict=True)] for half in pairs
            )
            made = self.combine_fn.fn(*first, *second)
            parts = [one.handle.data for one in (made if isinstance(made, tuple) else (made,))]
        whole = parts if self.keep_dims else [part.squeeze(axis) for part in parts]
        return [self.to_tensor(part, kind) for part, kind in zip(whole, types, strict=True)]

    ReduceOps.generic_reduce = reduce


def process(interpret: str) -> Iterator[Callable[..., Any]]:
    """Yields a function that calls a function in a process where TRITON_INTERPRET is `interpret`."""
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = interpret  # inherited by the child, which starts at the first call
    ready = reduce_by_halves if interpret == "1" else None
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=ready) as pool:
        try:
            pool.submit(os.getpid).result()
        finally:
            if before is None:
                del os.environ["TRITON_INTERPRET"]
            else:
                os.environ["TRITON_INTERPRET"] = before
        yield lambda function, *arguments, **named: pool.submit(function, *arguments, **named).result()


def unavailable(device: str) -> str | None:
    return engine.unavailable(torch.device(device))


class Case(NamedTuple):
    """A call, or the gradient of one. Its result is filled with a value that no right answer has."""

    function: str
    operands: tuple[Tensor, ...]  # the input; for a gradient, the upstream gradient and the saved tensors
    out: Tensor
    dims: tuple[int, ...]
    backward: bool = False


def launch(given: Case, plan: Plan | None = None) -> Tensor:
    function, operands, out, dims, backward = given
    if backward:
        engine.launch_backward(function, operands[0], operands[1:], out, dims, plan=plan)
    else:
        engine.launch_forward(function, *operands, out, dims, plan=plan)
    return out


class OnGpu:
    device = "cuda"

    def run(self, step: Callable[..., Tensor], *given: Any) -> Tensor:
        return step(*given)


class Interpreted:
    device = "cpu"

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call

    def run(self, step: Callable[..., Tensor], *given: Any) -> Tensor:
        """The result of `step` in that process, with all of its storage."""
        return _unpack(self.call(_run, step, _pack(given)))


Runs = OnGpu | Interpreted


def _pack(given: Any) -> bytes:
    box = io.BytesIO()
    torch.save(given, box)  # preserves strides, offsets and shared storages
    return box.getvalue()


def _unpack(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)


def _run(step: Callable[..., Tensor], data: bytes) -> bytes:
    return _pack(step(*_unpack(data)))


# Calls and gradients --------------------------------------------------------------------------------------------------


def sorted_dims(x: Tensor, dims: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(d % x.dim() for d in dims)) if x.dim() else ()


def case(
    function: str, x: Tensor, dims: Sequence[int] = (1,), dtype: torch.dtype | None = None, backward: bool = False
) -> Case:
    """A call on `x`; or the gradient of one, on an input of the result's dtype. `dtype`: the dtype of the result. The
    saved tensor has the strides of x."""
    dims = sorted_dims(x, dims)
    if not backward:
        shape = [1 if function in ("logsumexp", "state") and d in dims else size for d, size in enumerate(x.shape)]
        if function == "state":
            shape, dtype = [2, *shape], accumulator(x.dtype)
        return Case(function, (x,), torch.full(shape, 777.0, dtype=dtype or x.dtype, device=x.device), dims)
    over = dims or (0,)
    if function == "logsumexp":
        saved: tuple[Tensor, ...] = (x, reference.logsumexp(x, over, True).to(x.dtype))
    else:
        y = getattr(reference, function)(x, over) if x.numel() else x
        saved = (torch.empty_like(x).copy_(y),)
    grad = maker(x.dtype, x.device.type, 5)(*saved[-1].shape)
    return Case(function, (grad, *saved), torch.full_like(x, 777.0, dtype=dtype or x.dtype), dims, True)


def check(runs: Runs, given: Case, plan: Plan | None = None, note: str = "") -> Tensor:
    """Runs a call or a gradient, compares its result with the definition, and returns it."""
    got = runs.run(launch, given, plan)
    assert_case(got, given, note)
    return got


def assert_case(got: Tensor, given: Case, note: str = "") -> None:
    function, operands, _, dims, backward = given
    if backward:
        assert_gradient(got, given, note)
    elif function == "state":
        assert_state(State(*got), operands[0], dims or 0, True, note)
    else:
        x = operands[0] if function == "logsumexp" else operands[0].to(got.dtype)
        assert_defined(function, got, x, dims or 0, note)


def special(n: int, dtype: torch.dtype, device: str) -> Tensor:
    """Rows of special values between ordinary rows."""
    x = samples.special(n, dtype, device).roll(1, 0)
    tiny = torch.finfo(dtype).smallest_normal
    subnormal = (x != 0) & (x.abs() < tiny)  # the interpreter makes those of bfloat16 0
    return x[~subnormal.any(1)]


def definition(given: Case) -> tuple[Tensor, Tensor]:
    """The gradient in float64, and the magnitude of its terms, enlarged for exponentials of rounded logarithms."""
    function, dims = given.function, given.dims or (0,)
    g, y = (t.double() for t in given.operands[:2])
    lse = given.operands[2] if function == "logsumexp" else None
    dx, terms = gradient(function, g, y, dims, lse)
    if lse is not None:
        terms = terms * (1 + (y - lse.double()).nan_to_num(0, 0, 0).abs())
    elif function == "log_softmax":
        terms = g.abs() + (terms - g.abs()) * (1 + y.nan_to_num(0, 0, 0).abs())
    return dx, terms


def assert_gradient(got: Tensor, given: Case, note: str = "") -> None:
    """Allows one rounding of the result, and a few roundings of its terms in the accumulator's dtype."""
    want, terms = definition(given)
    wide = F64 in (given.operands[0].dtype, given.operands[1].dtype)
    kind = torch.finfo(got.dtype)
    limit = kind.eps * want.abs() + 6 * torch.finfo(F64 if wide else F32).eps * terms + 2 * kind.smallest_normal
    y = got.double()
    good = (y == want) | (y.isnan() & want.isnan()) | ((y - want).abs() <= limit)
    if not bool(good.all()):
        at = tuple((~good).nonzero()[0].tolist())
        raise AssertionError(
            f"gradient of {given.function} over {given.dims} of {tuple(got.shape)}, {given.operands[1].dtype} -> "
            f"{got.dtype}{note}: {int((~good).sum())} of {good.numel()} wrong, first at {at}: got {y[at].item()!r}, "
            f"want {want[at].item()!r} within {limit[at].item():.3g}"
        )


# Losses and divergences -----------------------------------------------------------------------------------------------

# Tiles that divide neither the rows nor the classes of the tested tensors. The second takes several launches.
ROWS, COLUMNS = Tile(2, 16, 1, 1000), Tile(4, 8, 1, 1)
TILES = pytest.mark.parametrize("tile", [ROWS, COLUMNS], ids=["rows", "columns"])

SHAPES: dict[str, tuple[Callable[[Make], Tensor], int]] = {
    "rows": (lambda r: r(5, 37), 1),
    "short rows": (lambda r: r(40, 3), 1),
    "rows of one": (lambda r: r(5, 1), 1),
    "a vector": (lambda r: r(37), 0),
    "a strided vector": (lambda r: r(90)[5::3], 0),
    "columns": (lambda r: r(17, 6), 0),
    "middle": (lambda r: r(3, 7, 5), 1),
    "transposed": (lambda r: r(17, 5).t(), 1),
    "sliced": (lambda r: r(7, 40)[1:6, 3:36:2], 1),
    "gaps": (lambda r: r(3, 4, 24)[:, 1:3, ::2], 2),
    "rows in another order": (lambda r: r(4, 3, 2, 5).permute(2, 0, 1, 3), 3),
    "channels last": (lambda r: r(2, 5, 4, 3).contiguous(memory_format=torch.channels_last), 1),
    "rows of the last three dims": (lambda r: r(5, 2, 4, 3).permute(1, 0, 3, 2), 1),
    "expanded rows": (lambda r: r(1, 19).expand(4, 19), 1),
    "expanded classes": (lambda r: r(5, 1).expand(5, 11), 1),
}


def rows_of(x: Tensor, dim: int) -> Tensor:
    return x.movedim(dim, -1).reshape(-1, x.size(dim))


def assert_close(got: Tensor, want: Tensor, error: Tensor, note: Any) -> None:
    limit = error + torch.finfo(got.dtype).eps * want.abs() + torch.finfo(got.dtype).smallest_normal
    good = ((got.double() - want).abs() <= limit) | (got.isnan() & want.isnan()) | (got == want)
    assert bool(good.all()), (
        note,
        int((~good).sum()),
        got[~good][:4],
        want[~good][:4],
        limit.expand_as(got)[~good][:4],
    )


# Kernels compiled for GPUs that are not in this machine ---------------------------------------------------------------

TARGETS = [("cuda", 90), ("hip", "gfx942"), ("hip", "gfx950"), ("cuda", 80), ("cuda", 100), ("cuda", 120)]
POINTERS = {F64: "*fp64", F32: "*fp32", F16: "*fp16", BF16: "*bf16"}


def every_target(names: str, cases: Sequence[tuple[Any, ...]], nth: int) -> Any:
    """Each case for each target. Every nth case is compiled for one of the first two targets in turn; all other
    combinations are marked slow."""
    each = [
        (*case, *target) if k % nth == 0 and target == TARGETS[k // nth % 2] else slow(*case, *target)
        for target in TARGETS
        for k, case in enumerate(cases)
    ]
    return pytest.mark.parametrize((*names.split(), "backend", "arch"), each, ids=name_of)


class Properties:
    """The properties of a device that a plan reads."""

    def __init__(self, backend: str) -> None:
        self.warp_size = 64 if backend == "hip" else 32


def resources(
    function: str,
    chosen: Plan,
    dtypes: Sequence[torch.dtype | None],
    steps: tuple[str, ...],
    aligned: bool,
    backend: str,
    arch: Any,
) -> dict[str, Any]:
    """The tier and the resources, per thread, of the kernel of a plan without scores.

    `dtypes`: those of the tensors x, out, g and lse. `steps`: the types of their strides in a row, "constexpr" for 1.
    `aligned`: the rows are multiples of 16 elements.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel, constants = _kernel(function, dtypes[2] is not None, chosen)
    place = kernel.arg_names.index
    pointers = {name: dtype for name, dtype in zip(kernel.arg_names, dtypes, strict=False) if dtype}
    signature = dict.fromkeys(kernel.arg_names, "constexpr") | dict.fromkeys(("first", "rows", "n"), "i32")
    signature |= {name: POINTERS[dtype] for name, dtype in pointers.items()}
    signature |= {"row_sizes": (), "sizes": (), "score": ()}
    signature |= {"row_strides": (("i32",),) * len(pointers), "strides": tuple((step,) for step in steps)}
    values: dict[Any, Any] = {
        (place(name),): constants.get(name) for name, kind in signature.items() if kind == "constexpr"
    }
    values |= {(place("strides"), k, 0): 1 for k, step in enumerate(steps) if step == "constexpr"}
    multiples = [(place(name),) for name in pointers if name != "lse_ptr"]
    if aligned:
        multiples += [(place("n"),), *((place("row_strides"), k, 0) for k in range(len(steps)))]
    attributes = {at: [["tt.divisibility", 16]] for at in multiples}
    target = GPUTarget(backend, arch, Properties(backend).warp_size)
    options = {"num_warps": chosen.num_warps, "num_stages": chosen.num_stages, "enable_fp_fusion": True}
    built = triton.compile(ASTSource(kernel, signature, values, attributes), target=target, options=options)
    return {"tier": chosen.tier, **usage(built, backend)}


def usage(built: Any, backend: str) -> dict[str, Any]:
    import triton

    found: dict[str, Any] = {}
    if backend == "hip":
        text = built.asm["amdgcn"]
        for name in ("private_segment_fixed_size", "vgpr_spill_count", "group_segment_fixed_size"):
            found[name] = int(re.search(rf"\.{name}:\s+(\d+)", text)[1])
        found["wide"] = len(re.findall(r"global_load_dwordx4|buffer_load_dwordx4", text))
        return found
    tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        report = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    for name in ("REG", "STACK", "LOCAL"):
        found[name] = int(re.search(rf"{name}:(\d+)", report.stdout)[1])
    found["wide"] = len(re.findall(r"ld\.global[.\w:]*\.(v4\.b32|v2\.b64)", built.asm["ptx"]))
    found["exponentials"] = built.asm["ptx"].count("ex2.approx")
    return found


class Absent:
    """Replaces Triton's driver: a GPU that need not be in this machine."""

    def __init__(self, backend: str, arch: Any) -> None:
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget(backend, arch, Properties(backend).warp_size)

    def get_current_target(self) -> Any:
        return self.target

    get_current_device = get_current_target

    def get_current_stream(self, device: Any) -> int:
        return 0


class Compiles:
    """Replaces a kernel: it is compiled for its arguments, but not launched."""

    def __init__(self, kernel: Any, built: list[Any]) -> None:
        self.kernel, self.built = kernel, built

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *given, **named: self.built.append(self.kernel.run(*given, grid=grid, warmup=True, **named))


def launched_resources(
    launches: Callable[[], Any], backend: str, arch: Any, module: Any = engine.launch
) -> dict[str, Any]:
    """The resources, per thread, of the only kernel that a module launches, on a GPU of that architecture."""
    (found,) = all_resources(launches, backend, arch, module)
    return found


def all_resources(launches: Callable[[], Any], backend: str, arch: Any, module: Any) -> list[dict[str, Any]]:
    """The resources of all kernels that are launched."""
    from triton.runtime import driver

    compiled: list[Any] = []
    found = module._kernel

    def kernel(*call: Any) -> Any:
        made = found(*call)
        return (Compiles(made[0], compiled), made[1]) if isinstance(made, tuple) else Compiles(made, compiled)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(driver, "_active", Absent(backend, arch))
        patched.setattr(module, "_kernel", kernel)
        for where in (engine.loss, engine.segments):
            patched.setattr(where, "properties_of", lambda _: Properties(backend))
        launches()
    return [usage(built, backend) for built in compiled]


def assert_no_spills(found: dict[str, Any], backend: str) -> None:
    if backend == "hip":
        assert found["private_segment_fixed_size"] == found["vgpr_spill_count"] == 0
        assert found["group_segment_fixed_size"] <= 65536  # a block's shared memory on an MI300; an MI350 has 160 KiB
    else:
        # ptxas spills up to 6 registers per thread to run more warps at once. A tile that is too large spills 64 bytes
        # and more.
        assert found["STACK"] <= 24
        assert found["LOCAL"] == 0
