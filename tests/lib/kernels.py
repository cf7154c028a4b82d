"""A selection of CUDA kernels, and the contents of their cubins. Nothing here needs a GPU."""

import re
import struct
import subprocess
from collections.abc import Hashable, Iterator, Sequence
from itertools import product
from pathlib import Path

import torch

from lib.plan_tables import BF16, F16, F32, PAIRS, PREFETCH, TYPES, Access, Plan, Tier, names
from lib.warmup import plan_of_call
from onepass import native
from onepass._kernel_compiler import Kernel
from onepass.devices import KNOWN
from onepass.tools.bench.cases import SUITES, Case

TIMED = ("columns", "row-lengths", "few-long-rows", "backward")
GPUS = {90: [KNOWN["h200"].title, KNOWN["h100"].title]}  # by architecture; others use the tables without a name
# No call below needs these kernels. Some views with gaps between lines need them, and rows that do not fit on the chip.
MORE = [
    Kernel("softmax", BF16, BF16, "forward", Plan(Tier.BLOCK, 256, 1, 16, 8, 1, 0, Access.SCALAR)),
    Kernel("softmax", F32, F32, "forward", Plan(Tier.TWOPASS, 512, 1, 16, 4, 1, 0)),
    Kernel("softmax", BF16, BF16, "forward", Plan(Tier.TWOPASS, 512, 1, 16, 8, 1, 0)),
    Kernel("softmax", F32, F32, "backward", Plan(Tier.TWOPASS, 512, 1, 16, 4, 1, 0)),
    Kernel("log_softmax", BF16, BF16, "backward", Plan(Tier.TWOPASS, 512, 1, 16, 8, 1, 0)),
    Kernel("softmax", BF16, BF16, "forward", Plan(Tier.COLUMNS, 16, 8, 64, 4, 8, PREFETCH, Access.ALIGNED)),
    Kernel("softmax", BF16, BF16, "forward", Plan(Tier.COLUMNS, 8, 16, 104, 8, 1, 0)),
    Kernel("logsumexp", F32, F32, "forward", Plan(Tier.COLUMNS, 8, 16, 64, 4, 1, 0)),
    Kernel("softmax", F16, F16, "forward", Plan(Tier.COLUMNS_GRID, 8, 64, 64, 8, 12, 0)),
    Kernel("softmax", F32, BF16, "backward", Plan(Tier.COLUMNS, 32, 4, 24, 4, 1, 0)),
    Kernel("softmax", BF16, BF16, "backward", Plan(Tier.COLUMNS, 8, 32, 64, 8, 1, 8, Access.ALIGNED)),
    Kernel("softmax", BF16, BF16, "forward", Plan(Tier.COLUMNS, 17, 8, 64, 8, 4, 0, Access.SHIFTED)),
    Kernel("log_softmax", F32, F32, "backward", Plan(Tier.COLUMNS, 17, 12, 16, 4, 8, 8, Access.SHIFTED)),
    Kernel("softmax", BF16, BF16, "forward", Plan(Tier.COLUMNS_STAGED, 480, 1, 16, 1, 2, 8, Access.ALIGNED)),
    Kernel("logsumexp", F32, F32, "forward", Plan(Tier.COLUMNS_STAGED, 60, 8, 32, 1, 2, 8, Access.ALIGNED)),
    Kernel("log_softmax", BF16, BF16, "backward", Plan(Tier.COLUMNS_STAGED, 60, 8, 16, 1, 2, 8, Access.ALIGNED)),
    Kernel("softmax", BF16, BF16, "forward", Plan(Tier.COLUMNS_SMEM, 33, 12, 16, 4, 2, 0, Access.SHIFTED)),
    Kernel("softmax", BF16, BF16, "forward", Plan(Tier.COLUMNS_SMEM, 212, 1, 16, 4, 1, 0, Access.SLAB)),
    Kernel("log_softmax", F32, F32, "backward", Plan(Tier.COLUMNS_SMEM, 17, 14, 16, 4, 4, 0, Access.SHIFTED)),
]
Shape = tuple[tuple[int, ...], tuple[int, ...]]  # sizes, and the dims of a call


# The selection --------------------------------------------------------------------------------------------------------


def select_kernels(arch: int, every_pair: bool = False) -> list[tuple[Kernel, bool]]:
    """(kernel, whether it is one of the quick ones) for each selected kernel.

    Quick are the first kernel of each direction, tier and access, and of each pass and tier. Of the calls that the
    benchmark suites time, also the first of each direction, tier and input dtype. All kinds that the suites time are
    selected, and more kernels, until each direction and tier has every tested pair of dtypes, and each pass and tier
    has every function (with `every_pair`, at every pair of dtypes) and every access.
    """
    selected, seen = [], set()
    for kernel, is_timed in _every_kernel(arch, every_pair):
        function, x_type, y_type, which, tier, access, in_smem, is_shared = kind = _kind_of(kernel)
        direction = which.removesuffix("_broadcast")
        of_type = "quick", direction, tier, x_type
        quick = {(direction, tier, access), (which, tier)} | ({of_type} if is_timed else set())
        others = ({kind} if is_timed else set()) | {
            ("types", direction, tier, x_type, y_type),
            ("function", which, tier, function, *((x_type, y_type) if every_pair else ())),
            (which, tier, access, in_smem, is_shared),
        }
        if not quick | others <= seen:
            selected.append((kernel, not quick <= seen))
        seen |= quick | others
    return selected


def _kind_of(kernel: Kernel) -> tuple[Hashable, ...]:
    """The kind of a kernel: all its properties except the numbers of vectors and threads."""
    plan = Plan(*kernel.plan)
    in_smem = 0 if plan.tier == Tier.STAGED else min(plan.smem_vecs, PREFETCH + 1)
    return *kernel[:4], plan.tier, plan.access, in_smem, plan.blocks_per_row > 1


def _every_kernel(arch: int, every_pair: bool) -> Iterator[tuple[Kernel, bool]]:
    """(kernel, whether the suites time it): the kernels of the suites' calls, of other functions and dtypes at the same
    shapes, of any contiguous tensors with rows or columns of these lengths, and of other tensors."""
    shapes: dict[Shape, None] = {}
    for case in (case for name in TIMED for case in SUITES[name].cases):
        for dtype in case.dtypes:
            shape = _in_order_of_memory(case.at(dtype))
            shapes[shape] = None
            for gpu in GPUS.get(arch, [""]):
                types = (getattr(torch, dtype),) * 2
                yield _kernel_of_call(case.function, *types, case.direction, arch, shape, gpu), True
    for kind in kinds(every_pair):
        for shape in shapes:
            yield _kernel_of_call(*kind, arch, shape), False
    if arch in GPUS:
        lengths = sorted({case.row() for name in TIMED for case in SUITES[name].cases})
        for which in native.PASSES:
            for dtype in (F32, BF16):
                kind = "softmax", dtype, dtype
                for plan in native.kernels_to_warm(*kind, -1, arch, lengths, which, True).values():
                    yield Kernel(*kind, which, plan), False
        yield from ((kernel, False) for kernel in MORE)


def kinds(every_pair: bool) -> list[tuple[str, torch.dtype, torch.dtype, str]]:
    """Functions, dtypes and passes, as `native.compile_kernel` takes them."""
    pairs = list(product(native.DTYPES, repeat=2)) if every_pair else PAIRS
    forward = [(function, *types, "forward") for function in native.FUNCTIONS for types in TYPES.get(function, pairs)]
    backward = [(function, y, x, "backward") for function, x, y, _ in forward if function != "state"]
    return [*forward, *backward, *((*k[:3], "backward_broadcast") for k in backward if k[0] not in native.REDUCTIONS)]


def _in_order_of_memory(case: Case) -> Shape:
    """The sizes and dims of a case in memory order, as for a contiguous tensor."""
    order = list(range(len(case.shape)))
    if case.layout == "channels_last":
        order.append(order.pop(1))
    elif case.layout == "transposed":
        order[-2:] = order[:-3:-1]
    return tuple(case.shape[i] for i in order), tuple(order.index(dim) for dim in case.dims())


def _kernel_of_call(
    function: str, x_type: torch.dtype, y_type: torch.dtype, which: str, arch: int, shape: Shape, gpu: str = ""
) -> Kernel:
    plan = plan_of_call(function, which, (x_type, y_type), arch, list(shape[0]), list(shape[1]), gpu=gpu)
    return Kernel(function, x_type, y_type, which, Plan(*plan["plan"]))


def name_of(kernel: Kernel) -> str:
    """Pass, tier, access, function, dtypes and the other numbers of the plan, in words."""
    tier, *numbers, access = kernel.plan
    words = (kernel.which, native.TIERS[tier], Access(access), kernel.function, kernel.x_type, kernel.y_type)
    return " ".join([*(names(word) or str(word) for word in words), "-".join(map(str, numbers))])


# Cubins ---------------------------------------------------------------------------------------------------------------


def run_tool(name: str, *arguments: object) -> str:
    """The output of a tool for cubins."""
    import triton  # its package contains the tools

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return subprocess.run([path, *map(str, arguments)], stdout=subprocess.PIPE, text=True, check=True).stdout


def read_usage(cubin: Path) -> dict[str, int]:
    """Registers per thread (REG), and bytes of STACK, SHARED and LOCAL."""
    usage = run_tool("cuobjdump", "--dump-resource-usage", cubin)
    return {name: int(number) for name, number in re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", usage)}


def disassemble(cubins: Sequence[Path], arch: int) -> list[list[str]]:
    """The instructions of each cubin, without NOPs at the end. The disassembler runs once, as it takes 0.3 s to
    start."""
    codes = [_machine_code(cubin.read_bytes()) for cubin in cubins]
    together = cubins[0].with_suffix(".code")
    together.write_bytes(b"".join(codes))
    listing = iter(re.findall(r"/\*[0-9a-f]{4,}\*/\s+([^;]*)", run_tool("nvdisasm", "--binary", f"SM{arch}", together)))
    each = [[next(listing) for _ in range(len(code) // 16)] for code in codes]
    return [[line for line in lines if line != "NOP"] for lines in each]


def _machine_code(cubin: bytes) -> bytes:
    """The sections of an ELF file with instructions."""
    (table,), (count,) = struct.unpack_from("<Q", cubin, 40), struct.unpack_from("<H", cubin, 60)
    sections = [struct.unpack_from("<IIQQQQ", cubin, table + 64 * i) for i in range(count)]
    executable = 4
    return b"".join(cubin[at : at + size] for _, _, flags, _, at, size in sections if flags & executable)
