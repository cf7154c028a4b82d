"""The native core: loads the operators, and calls the library's functions for plans, kernels and its status."""

import ctypes
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

PATH = Path(__file__).with_name("_native.so")
Dtype = torch.dtype
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
PASSES = ("forward", "backward", "backward_broadcast")  # the last: the upstream gradient has one value per row
TIERS = (
    *("warp", "staged", "block", "cluster", "grid", "twopass"),
    *("columns", "columns-grid", "columns-twopass", "columns-staged", "columns-smem", "pipelined"),
)
_TABLES = ("write", "reduce", "unaligned", "few_rows", "columns", "columns_backward")
TABLES = tuple(f"{name}_f{bits}" for name in _TABLES for bits in (32, 16))  # as in csrc/plan/tables.h


class Plan(NamedTuple):
    """The numbers of a CUDA launch, as the private operators take them.

    For plans of columns, `threads_per_row` is the number of threads across columns, `rows_per_block` the number of
    threads down a column, and `blocks_per_row` the number of blocks that share a tile. For the tier staged, `smem_vecs`
    is the number of rows that a thread serves.
    """

    tier: int  # the index in TIERS
    threads_per_row: int
    rows_per_block: int
    items_per_thread: int
    vec_size: int
    blocks_per_row: int
    smem_vecs: int
    access: int = 0  # 0 predicated, 1 scalar, 2 aligned, 3 slab, 4 slab-aligned, 5 strided, 6 shifted


if not PATH.exists():
    raise ImportError(
        f"onepass: its native core is not built ({PATH} is missing); build it with "
        "`pip install --no-build-isolation .` against the torch that is installed"
    )
torch.ops.load_library(str(PATH))
library = torch.library.Library("onepass", "FRAGMENT")  # for operators and kernels written in Python
_library = ctypes.CDLL(str(PATH))
_SIZE = 1 << 16
_KERNELS = 1 << 22  # the buffer size for a list of kernels: about 6000 of them


def _ask(function: str, *arguments: Any, size: int = _SIZE) -> str:
    text = ctypes.create_string_buffer(size)
    failed = getattr(_library, function)(*arguments, text, ctypes.c_int64(size))
    answer = text.value.decode(errors="replace")
    if failed:
        raise RuntimeError(answer)
    return answer


# The functions ordered by their numbers in csrc/core/functions.h.
_IS_REDUCTION: dict[str, bool] = json.loads(_ask("onepass_functions"))  # whether a result has one element per row
FUNCTIONS = tuple(_IS_REDUCTION)
REDUCTIONS = tuple(name for name in FUNCTIONS if _IS_REDUCTION[name])


def _int64s(values: Sequence[int]) -> Any:
    return (ctypes.c_int64 * max(len(values), 1))(*values)


def _ask_for_plan(
    function: str,
    backward: bool,
    chip: tuple[int, int, str],
    sizes: Sequence[int],
    strides: Sequence[Sequence[int]],
    dims: Sequence[int],
    types: tuple[Dtype, Dtype],
    addresses: Sequence[int],
) -> dict[str, Any]:
    arch, sm_count, gpu = chip
    reduced = (ctypes.c_bool * max(len(sizes), 1))(*(i in dims for i in range(len(sizes))))
    view = len(sizes), _int64s(sizes), _int64s([s for tensor in strides for s in tensor]), reduced
    numbers = FUNCTIONS.index(function), backward, arch, sm_count, gpu.encode(), *view, *map(DTYPES.index, types)
    return json.loads(_ask("onepass_plan", *numbers, (ctypes.c_uint64 * 4)(*addresses)))


def plan(
    function: str,
    cuda: bool,
    sizes: Sequence[int],
    x_strides: Sequence[int],
    y_strides: Sequence[int],
    dims: Sequence[int],
    x_type: Dtype,
    y_type: Dtype,
    x_address: int = 0,
    y_address: int = 0,
    arch: int = 90,
    sm_count: int = 132,
    gpu: str = "",
) -> dict[str, Any]:
    """The plan of a call: view, rows, n, bytes, and the engine's tier and launch numbers.

    It is for a GPU of compute capability `arch` / 10 with `sm_count` multiprocessors and the tables for the name `gpu`.

    >>> plan("softmax", True, [8, 1000], [1000, 1], [1000, 1], [1], torch.float32, torch.float32)["tier"]
    'block'
    """
    chip, strides, addresses = (arch if cuda else 0, sm_count, gpu), (x_strides, y_strides), (x_address, y_address)
    return _ask_for_plan(function, False, chip, sizes, strides, dims, (x_type, y_type), addresses)


def backward_plan(
    function: str,
    sizes: Sequence[int],
    strides: Sequence[Sequence[int]],
    dims: Sequence[int],
    x_type: Dtype,
    dx_type: Dtype,
    addresses: Sequence[int] = (0, 0, 0, 0),
    arch: int = 90,
    sm_count: int = 132,
    gpu: str = "",
) -> dict[str, Any]:
    """The launch of a gradient: tier and launch numbers. The GPU is described as for `plan`.

    `x_type` is the dtype of the forward's result, `dx_type` that of its input and of the gradient. Strides and
    addresses: of the gradient dx, of the saved tensor, of the upstream gradient, of logsumexp's result. A tensor with
    one value per row has stride 0 over `dims`.

    >>> contiguous = [(4096 * 64, 64, 1)] * 3 + [(0, 0, 0)]
    >>> backward_plan("softmax", (8, 4096, 64), contiguous, (1,), torch.float32, torch.float32)["tier"]
    'columns'
    """
    chip = arch, sm_count, gpu
    return _ask_for_plan(function, True, chip, sizes, strides, dims, (x_type, dx_type), addresses)


def plan_from_entry(
    entry: Sequence[int],
    sizes: tuple[int, int, int],
    dtype: Dtype,
    arch: int,
    sm_count: int,
    shared: int,
    cooperative: bool = True,
    which: str = "forward",
    reduces: bool = False,
) -> Plan | None:
    """The plan of a table entry (given without its limit) for contiguous tensors of these sizes over the middle dim.

    None if rows, or columns, are too long for the entry. `shared`: bytes of shared memory per block. `reduces`: True
    for logsumexp, False for softmax.

    >>> tuple(plan_from_entry([0, 32, 0, 1, 0], (4096, 1000, 1), torch.float32, 90, 132, 227 * 1024) or ())
    (0, 32, 4, 32, 4, 1, 0, 2)
    """
    kind = PASSES.index(which), DTYPES.index(dtype), _int64s(entry), _int64s(sizes)
    flags = map(ctypes.c_bool, (cooperative, reduces))
    answer = _ask("onepass_plan_from_entry", *kind, arch, sm_count, shared, *flags, size=256)
    return Plan(*json.loads(answer)) if answer else None


def compile_kernel(
    function: str,
    x_type: Dtype,
    y_type: Dtype,
    plan: Sequence[int],
    arch: int,
    path: str | Path = "",
    which: str = "forward",
) -> None:
    """Compile the kernel of a plan for sm_<arch> to a file, or into the disk cache.

    `plan` has the numbers of a `Plan`, or those that `call_kernels` returns. `which` is one of `PASSES`. For a gradient
    `x_type` is the dtype of the forward's result, and `y_type` that of its input.
    """
    _ask("onepass_compile", *_kind(function, x_type, y_type, which), _kernel_numbers(plan), arch, str(path).encode())


def is_kernel_cached(
    function: str, x_type: Dtype, y_type: Dtype, plan: Sequence[int], arch: int, which: str = "forward"
) -> bool:
    """Whether the package of kernels or the disk cache has the kernel that `compile_kernel` would compile."""
    return _ask("onepass_is_cached", *_kind(function, x_type, y_type, which), _kernel_numbers(plan), arch) == "yes"


def package_kernel(
    function: str, x_type: Dtype, y_type: Dtype, plan: Sequence[int], arch: int, folder: str | Path, which: str
) -> None:
    """Add a kernel, from the disk cache or compiled as by `compile_kernel`, to a package of kernels in `folder`."""
    kind = _kind(function, x_type, y_type, which)
    _ask("onepass_package", *kind, _kernel_numbers(plan), arch, str(folder).encode())


def warm_kernel(
    function: str, x_type: Dtype, y_type: Dtype, plan: Sequence[int], device: int, which: str = "forward"
) -> None:
    """Load the kernel on CUDA device number `device`."""
    _ask("onepass_load", *_kind(function, x_type, y_type, which), _kernel_numbers(plan), device)


class KernelLaunch(NamedTuple):
    """The numbers of a launch of a gallery kernel, whose grid and blocks have one dim."""

    blocks: int
    threads: int  # threads of a block
    cluster: int = 0  # blocks of a cluster; 0: no clusters
    shared: int = 0  # bytes of dynamic shared memory of a block
    cooperative: bool = False  # whether the blocks must all be resident together, because they wait for each other


def load_kernel(source: str, name: str, options: str, device: int) -> int:
    """Compile a CUDA source (a name in the gallery, or a path) with NVRTC's `options`, one a line. Load its function
    `name`."""
    kernel = ctypes.c_void_p()
    _ask("onepass_kernel_load", source.encode(), name.encode(), options.encode(), device, ctypes.byref(kernel))
    assert kernel.value is not None
    return kernel.value


def launch_kernel(kernel: int, launch: KernelLaunch, stream: int, arguments: Sequence[Any]) -> None:
    """Launch a loaded kernel with ctypes `arguments`."""
    pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(a) for a in arguments))
    numbers = (ctypes.c_int * len(launch))(*launch)
    _ask("onepass_kernel_launch", ctypes.c_void_p(kernel), numbers, ctypes.c_void_p(stream), pointers)


def rank_memory(ranks: int) -> int:
    """Bytes of the memory through which the kernels of `ranks` ranks exchange states."""
    return call("onepass_rank_memory", ranks)


def over_ranks(
    function: str,
    backward: bool,
    x_type: Dtype,
    y_type: Dtype,
    rows: int,
    n: int,
    tensors: Sequence[torch.Tensor],
    stream: int,
    memory: torch.Tensor,
    fault: torch.Tensor,
    patience: int,
    ranks: int,
    rank: int,
) -> None:
    """Launch the kernel of contiguous rows that exchanges states with other ranks. This rank has n elements of a row.

    `tensors`: x and y, or dx, y and the gradient of y. `memory`: the address of each rank's memory. `fault`: two
    numbers in host memory, to which the kernel writes why results are NaN. `patience`: the timeout in nanoseconds.
    """
    addresses = (ctypes.c_void_p * len(tensors))(*(t.data_ptr() for t in tensors))
    kind = FUNCTIONS.index(function), backward, DTYPES.index(x_type), DTYPES.index(y_type)
    where = map(ctypes.c_void_p, (stream, memory.data_ptr(), fault.data_ptr()))
    on, ends = tensors[0].device.index, (ctypes.c_int64(patience), ranks, rank)
    _ask("onepass_over_ranks", *kind, ctypes.c_int64(rows), ctypes.c_int64(n), addresses, on, *where, *ends)


def compile_source(source: str, options: Sequence[str], arch: int, path: str | Path) -> None:
    """Compile a CUDA source (a name in the gallery, or a path) with NVRTC's `options` for sm_<arch> into a file."""
    _ask("onepass_kernel_compile", source.encode(), "\n".join(options).encode(), arch, str(path).encode())


def tables(gpu: str = "") -> dict[str, Any]:
    """The tables by which plans are chosen for GPUs of a name, as torch.cuda.get_device_name returns it.

    A dict with "origin", and "tables": the entries of each table in TABLES.

    >>> sorted(tables()["tables"]) == sorted(TABLES)
    True
    """
    origin, text = _ask("onepass_tables", gpu.encode()).split("\n", 1)
    return {"origin": origin, "tables": json.loads(text)}


def set_tables(gpu: str, origin: str, tables: dict[str, list[list[int]]]) -> None:
    """Use these tables from now on for GPUs of this name. Raises RuntimeError if they are invalid."""
    ordered = [tables[name] for name in TABLES]
    numbers = [number for table in ordered for entry in table for number in entry]
    counts = _int64s([len(table) for table in ordered])
    _ask("onepass_set_tables", gpu.encode(), origin.encode(), counts, _int64s(numbers))


def set_invariant(value: int, scoped: bool) -> int:
    """Set batch invariance of this thread (`scoped`) or of the process, and return the old value.

    `value` is 0 or 1; -1: a thread takes the value of the process; 2: set nothing.
    """
    return int(_ask("onepass_set_invariant", scoped, value))


def install_patch(cuda: bool, torchs_on_cpu: bool, torchs_on_cuda: bool) -> None:
    """Override aten's kernels for the CPU, and for CUDA if `cuda` is True, for the life of the process. The other
    arguments say whether the overridden kernels are torch's own."""
    _ask("onepass_patch_install", *map(ctypes.c_bool, (cuda, torchs_on_cpu, torchs_on_cuda)))


def patch_served(functions: int) -> list[int]:
    """How many calls of each of the first `functions` functions a patch has served since the start of the process."""
    counts = _int64s([0] * functions)
    _library.onepass_patch_served(counts)
    return list(counts)


def patch_raised(kind: type[BaseException], words: str) -> None:
    """Make the C++ kernel that called torch's own kernel raise this exception. The type has to stay alive."""
    _library.onepass_patch_raised(ctypes.c_void_p(id(kind)), words.encode(errors="replace"))


def call(name: str, *arguments: Any) -> int:
    """Call a C function of the native core that cannot fail. If it returns nothing, the number has no meaning."""
    return int(getattr(_library, name)(*arguments))


def status(what: str) -> str:
    """The status of "driver", "nvrtc", "compiler", "cache", "isa" or "counts". RuntimeError if it does not work."""
    return _ask("onepass_status", what.encode())


def counts() -> tuple[int, int]:
    """(kernels that this process has compiled, kernels that it has read from the disk)."""
    compiled, from_disk = status("counts").split()
    return int(compiled), int(from_disk)


def kernels_to_warm(
    function: str,
    x_type: Dtype,
    y_type: Dtype,
    device: int,
    arch: int,
    lengths: Sequence[int] = (),
    which: str = "forward",
    dims: bool = False,
) -> dict[str, Plan]:
    """The kernels that calls over contiguous rows of `lengths`, or of any length, may need; with `dims` also those of
    calls over other dims. Maps the identity of a kernel (its source file and macros) to a plan that uses it.

    They are for CUDA device number `device`, or if that is -1, for a GPU of compute capability `arch`, which need not
    be in this machine. `which` and the types are as for `compile_kernel`.
    """
    kind = _kind(function, x_type, y_type, which)
    wanted = _int64s(lengths), ctypes.c_int64(len(lengths)), ctypes.c_bool(dims)
    found = _ask("onepass_kernels_to_warm", *kind, device, arch, *wanted, size=_KERNELS)
    return {name: Plan(*plan) for name, plan in json.loads(found).items()}


def call_plan(
    call: str,
    types: tuple[Dtype, Dtype],
    sizes: Sequence[int],
    strides: Sequence[int],
    dim: int,
    segments: int = 0,
    address: int = 0,
    chip: tuple[int, int, str] = (0, 0, ""),
    which: str = "forward",
) -> dict[str, Any]:
    """The launches of a call of a loss, of segments or with scores: tier, launch numbers and the names of the kernels.
    Empty if no kernel takes the call.

    `call`: the names of the function and of its options (_call_names.py). `types`: the dtypes that are read and
    written. `strides`: those of the input, then those of a result of segments. `chip`: compute capability (0 for the
    CPU engine), multiprocessors and name of a GPU.

    >>> call_plan("cross_entropy", (torch.float32,) * 2, (8192, 32000), (32000, 1), 1, chip=(90, 132, ""))["source"]
    'loss_rows.cu'
    """
    arch, sm_count, gpu = chip
    kind = call.encode(), which != PASSES[0], *map(DTYPES.index, types), arch, sm_count, gpu.encode()
    where = len(sizes), _int64s(sizes), _int64s(strides), dim, ctypes.c_int64(segments), ctypes.c_uint64(address % 16)
    plan: dict[str, Any] = json.loads(_ask("onepass_call_plan", *kind, *where))
    return plan


def call_kernels(
    call: str,
    which: str,
    types: tuple[Dtype, Dtype],
    device: int,
    arch: int,
    lengths: Sequence[int] = (),
    dims: bool = False,
) -> dict[str, tuple[Any, ...]]:
    """As `kernels_to_warm`, for calls of a loss, of segments or with scores. Maps the identity of each kernel to
    (function, types, `which`, numbers).

    `call` is as for `call_plan`. `types` are the dtypes that its kernels read and write. For segments, `lengths` are
    mean lengths.
    """
    kind = call.encode(), which != PASSES[0], *map(DTYPES.index, types), device, arch
    wanted = _int64s(lengths), ctypes.c_int64(len(lengths)), ctypes.c_bool(dims)
    found = json.loads(_ask("onepass_call_kernels", *kind, *wanted, size=_KERNELS))
    return {
        name: (FUNCTIONS[function], DTYPES[x], DTYPES[y], PASSES[made], tuple(numbers))
        for name, (function, made, x, y, *numbers) in found.items()
    }


def _kernel_numbers(plan: Sequence[int]) -> Any:
    """The numbers of a plan, and the further numbers that kernels of losses, segments and scores have, 0 for others."""
    return _int64s([*plan, *[0] * (13 - len(plan))])


def _kind(function: str, x_type: Dtype, y_type: Dtype, which: str) -> tuple[int, int, int, int]:
    return FUNCTIONS.index(function), PASSES.index(which), DTYPES.index(x_type), DTYPES.index(y_type)
