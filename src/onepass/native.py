"""The native core: loads the operators and asks the library about plans, kernels and what works here."""

import ctypes
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

PATH = Path(__file__).with_name("_native.so")
Dtype = torch.dtype
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
PASSES = ("forward", "backward", "backward_broadcast")  # the last: the result's gradient has one value per row
TIERS = (
    *("warp", "staged", "block", "cluster", "grid", "twopass"),
    *("columns", "columns-grid", "columns-twopass", "columns-staged", "columns-smem", "pipelined"),
)
_TABLES = ("write", "reduce", "unaligned", "few_rows", "columns", "columns_backward")
TABLES = tuple(f"{name}_f{bits}" for name in _TABLES for bits in (32, 16))  # as in csrc/plan/tables.h


class Plan(NamedTuple):
    """The numbers of a CUDA launch, as the private operators take them.

    Of columns `threads_per_row` are the threads side by side, `rows_per_block` those down a column, and
    `blocks_per_row` the blocks that share a tile; of the tier staged `smem_vecs` are the rows that a thread serves.
    """

    tier: int  # its place in TIERS
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
library = torch.library.Library("onepass", "FRAGMENT")  # for the operators and kernels that are written in Python
_library = ctypes.CDLL(str(PATH))
_SIZE = 1 << 16
_KERNELS = 1 << 22  # what a list of kernels takes: some 6000 of them


def _ask(function: str, *arguments: Any, size: int = _SIZE) -> str:
    text = ctypes.create_string_buffer(size)
    failed = getattr(_library, function)(*arguments, text, ctypes.c_int64(size))
    answer = text.value.decode(errors="replace")
    if failed:
        raise RuntimeError(answer)
    return answer


# The functions in the order of their numbers, as csrc/core/functions.h lists them.
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

    For a GPU of compute capability `arch` / 10 with `sm_count` multiprocessors and the tables of the name `gpu`.

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
    """The launch of a gradient: tier and launch numbers, for a GPU as `plan` takes it.

    `x_type` is that of the forward's result, `dx_type` that of its input and so the gradient's. Strides and addresses:
    of the gradient, of what the forward saved, of the result's gradient, of logsumexp's result. A tensor that has one
    value per row has stride 0 over `dims`.

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
    """The plan by a table entry alone, without its limit, of contiguous tensors of these sizes over the middle dim.

    None where the entry does not hold rows, or columns, so long. `shared`: bytes of shared memory per block. `reduces`:
    of logsumexp, else of softmax.

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

    `plan` has the numbers of a `Plan`, or those that `call_kernels` gives. `which` is one of `PASSES`; of a gradient
    `x_type` is that of the forward's result, and `y_type` that of its input.
    """
    _ask("onepass_compile", *_kind(function, x_type, y_type, which), _kernel_numbers(plan), arch, str(path).encode())


def is_kernel_cached(
    function: str, x_type: Dtype, y_type: Dtype, plan: Sequence[int], arch: int, which: str = "forward"
) -> bool:
    """Whether the package of kernels or the disk cache has what `compile_kernel` compiles."""
    return _ask("onepass_is_cached", *_kind(function, x_type, y_type, which), _kernel_numbers(plan), arch) == "yes"


def package_kernel(
    function: str, x_type: Dtype, y_type: Dtype, plan: Sequence[int], arch: int, folder: str | Path, which: str
) -> None:
    """Put what `compile_kernel` compiles, or the disk cache has, into a package of kernels that is made in `folder`."""
    kind = _kind(function, x_type, y_type, which)
    _ask("onepass_package", *kind, _kernel_numbers(plan), arch, str(folder).encode())


def warm_kernel(
    function: str, x_type: Dtype, y_type: Dtype, plan: Sequence[int], device: int, which: str = "forward"
) -> None:
    """Load the kernel on CUDA device number `device`."""
    _ask("onepass_load", *_kind(function, x_type, y_type, which), _kernel_numbers(plan), device)


class KernelLaunch(NamedTuple):
    """The numbers of a launch of a kernel of the gallery, whose grid and blocks have one dim."""

    blocks: int
    threads: int  # of a block
    cluster: int = 0  # blocks of a cluster, 0: there are none
    shared: int = 0  # bytes of shared memory of a block, beside what the kernel declares
    cooperative: bool = False  # whether the blocks must all be resident together, because they wait for each other


def load_kernel(source: str, name: str, options: str, device: int) -> int:
    """Compile a CUDA source, a name in the gallery or a path, with NVRTC's `options`, one a line, and load its function
    `name`."""
    kernel = ctypes.c_void_p()
    _ask("onepass_kernel_load", source.encode(), name.encode(), options.encode(), device, ctypes.byref(kernel))
    assert kernel.value is not None
    return kernel.value


def launch_kernel(kernel: int, launch: KernelLaunch, stream: int, arguments: Sequence[Any]) -> None:
    """Launch a loaded kernel; the ctypes `arguments` are those of the kernel."""
    pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(a) for a in arguments))
    numbers = (ctypes.c_int * len(launch))(*launch)
    _ask("onepass_kernel_launch", ctypes.c_void_p(kernel), numbers, ctypes.c_void_p(stream), pointers)


def rank_memory(ranks: int) -> int:
    """Bytes of the memory through which the kernels of so many ranks exchange states."""
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
    """Launch the kernel of contiguous rows, n elements of each on this rank, which exchanges states with other ranks.

    `tensors`: x and y, or dx, y and its gradient. `memory`: the address of each rank's memory. `fault`: two numbers of
    the host, why results are NaN. `patience`: nanoseconds.
    """
    addresses = (ctypes.c_void_p * len(tensors))(*(t.data_ptr() for t in tensors))
    kind = FUNCTIONS.index(function), backward, DTYPES.index(x_type), DTYPES.index(y_type)
    where = map(ctypes.c_void_p, (stream, memory.data_ptr(), fault.data_ptr()))
    on, ends = tensors[0].device.index, (ctypes.c_int64(patience), ranks, rank)
    _ask("onepass_over_ranks", *kind, ctypes.c_int64(rows), ctypes.c_int64(n), addresses, on, *where, *ends)


def compile_source(source: str, options: Sequence[str], arch: int, path: str | Path) -> None:
    """Compile a CUDA source, a name in the gallery or a path, with NVRTC's `options` for sm_<arch> into a file."""
    _ask("onepass_kernel_compile", source.encode(), "\n".join(options).encode(), arch, str(path).encode())


def tables(gpu: str = "") -> dict[str, Any]:
    """The tables that plans for the GPUs of a name, as torch.cuda.get_device_name has it, are made with.

    "origin", and "tables": entries by the names in TABLES.

    >>> sorted(tables()["tables"]) == sorted(TABLES)
    True
    """
    origin, text = _ask("onepass_tables", gpu.encode()).split("\n", 1)
    return {"origin": origin, "tables": json.loads(text)}


def set_tables(gpu: str, origin: str, tables: dict[str, list[list[int]]]) -> None:
    """Make the plans for the GPUs of a name with these tables from now on; RuntimeError where they are unsound."""
    ordered = [tables[name] for name in TABLES]
    numbers = [number for table in ordered for entry in table for number in entry]
    counts = _int64s([len(table) for table in ordered])
    _ask("onepass_set_tables", gpu.encode(), origin.encode(), counts, _int64s(numbers))


def set_invariant(value: int, scoped: bool) -> int:
    """Set the switch of batch invariance of this thread (`scoped`) or of the process; gives what it was.

    -1: as the process has it, for a thread. 2: only ask.
    """
    return int(_ask("onepass_set_invariant", scoped, value))


def install_patch(cuda: bool, torchs_on_cpu: bool, torchs_on_cuda: bool) -> None:
    """Override aten's kernels of the CPU, and of CUDA where `cuda`, for as long as the process lives; the others say
    whether it is torch's kernels that are overridden."""
    _ask("onepass_patch_install", *map(ctypes.c_bool, (cuda, torchs_on_cpu, torchs_on_cuda)))


def patch_served(functions: int) -> list[int]:
    """How many calls of each of so many functions a patch has served since the start of the process."""
    counts = _int64s([0] * functions)
    _library.onepass_patch_served(counts)
    return list(counts)


def patch_raised(kind: type[BaseException], words: str) -> None:
    """Have the kernel that called for torch's own raise this; the type has to live on."""
    _library.onepass_patch_raised(ctypes.c_void_p(id(kind)), words.encode(errors="replace"))


def call(name: str, *arguments: Any) -> int:
    """Call a C function of the native core that cannot fail; of one that returns nothing the number says nothing."""
    return int(getattr(_library, name)(*arguments))


def status(what: str) -> str:
    """What works here: "driver", "nvrtc", "compiler", "cache", "isa", "counts"; RuntimeError with why it does not."""
    return _ask("onepass_status", what.encode())


def counts() -> tuple[int, int]:
    """How many kernels this process has compiled, and how many it has read from the disk."""
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
    """The kernels that contiguous rows of `lengths`, or of any length, may ask for; with `dims` those over other dims
    too. A plan of each, by what tells it from others: its source file and macros.

    On CUDA device number `device`; where it is -1, on a GPU of compute capability `arch` that need not be here.
    `which` and the types are those of `compile_kernel`.
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
    """The launches of a call of a loss, of segments or with scores: tier, launch numbers and the names of the kernels;
    empty where no kernel takes it.

    `call`: the function's name, then those of its options (_call_names.py). `types`: of what is read and made.
    `strides`: of the input, then of a result of segments. `chip`: compute capability, multiprocessors and name of a
    GPU; 0 for the CPU engine.

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
    """What `kernels_to_warm` says of functions, of calls of a loss, of segments or with scores: (function, types,
    `which`, numbers) of each kernel, by what tells it from others.

    `call` is that of `call_plan`, `types` are those of what its kernels read and make. `lengths` of segments are their
    mean.
    """
    kind = call.encode(), which != PASSES[0], *map(DTYPES.index, types), device, arch
    wanted = _int64s(lengths), ctypes.c_int64(len(lengths)), ctypes.c_bool(dims)
    found = json.loads(_ask("onepass_call_kernels", *kind, *wanted, size=_KERNELS))
    return {
        name: (FUNCTIONS[function], DTYPES[x], DTYPES[y], PASSES[made], tuple(numbers))
        for name, (function, made, x, y, *numbers) in found.items()
    }


def _kernel_numbers(plan: Sequence[int]) -> Any:
    """The numbers of a plan, and those by which kernels of losses, segments and scores differ besides, 0 of others."""
    return _int64s([*plan, *[0] * (13 - len(plan))])


def _kind(function: str, x_type: Dtype, y_type: Dtype, which: str) -> tuple[int, int, int, int]:
    return FUNCTIONS.index(function), PASSES.index(which), DTYPES.index(x_type), DTYPES.index(y_type)
