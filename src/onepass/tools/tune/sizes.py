"""The functions, lengths and shapes that are measured. A limit of a table of rows is found to within 15%."""

# The measured kernels, each with its function in `native` and its pass. Softmax stands for all functions that write
# rows, logsumexp for those that only read them, columns for softmax over other dims, and columns_backward for its
# gradient, which keeps two operands.
KERNELS = {
    "softmax": ("softmax", "forward"),
    "logsumexp": ("logsumexp", "forward"),
    "columns": ("softmax", "forward"),
    "columns_backward": ("softmax", "backward"),
}
FUNCTIONS = tuple(KERNELS)
# fmt: off
ALIGNED = (  # a whole number of 16-byte vectors, except the shortest
    4, 8, 16, 24, 32, 40, 48, 64, 80, 96, 112, 128, 160, 200, 224, 256, 320, 384, 448, 512, 640, 768, 896,
    1000, 1024, 1280, 1536, 1792, 2048, 2176, 2560, 3072, 3584, 4096, 4224, 5120, 6144, 7168, 8192, 8320,
    9216, 10240, 12288, 12672, 14336, 16384, 18432, 20000, 24000, 28000, 32000, 32768, 36864, 40000, 45000,
    50304, 57344, 65536, 73000, 81000, 90000, 100000, 110000, 128256, 131072, 151936, 170000, 190000, 210000,
    230000, 256000, 262144, 300000, 350000, 400000, 460000, 524288, 1048576,
)
UNALIGNED = (  # no whole number of vectors, at least in 2-byte dtypes; among them lengths of real models
    2, 3, 5, 7, 9, 13, 17, 25, 33, 50, 77, 100, 125, 157, 197, 251, 333, 411, 501, 627, 781, 1025, 1251, 1500,
    2049, 4099, 8195, 16387, 32001, 50257,
)
COLUMN_LENGTHS = (
    8, 16, 21, 24, 32, 48, 64, 96, 128, 196, 256, 320, 512, 768, 1000, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288,
    16384, 32768,
)
# fmt: on
LENGTHS = tuple(sorted({*ALIGNED, *UNALIGNED}))
LONGEST = 131072  # longer columns use the whole GPU in any case
SIDE = 4096  # adjacent columns in the measured tensors
FEW = 4096  # rows that are measured for the tables of few rows
FEW_ROWS = 8192  # the most rows that those tables serve (plan.h)
FEW_LENGTHS = 256, 16384
STAGED_REDUCED, STAGED_REDUCED_2_BYTES = 40, 160  # the longest rows of reductions for which the tier staged pays


def is_columns(function: str) -> bool:
    return function.startswith("columns")


def up(a: int, b: int) -> int:
    """a / b, rounded up.

    >>> up(9, 4)
    3
    """
    return -(-a // b)


def is_odd(n: int, size: int) -> bool:
    """Whether rows of n elements of `size` bytes are not a whole number of 16-byte vectors.

    >>> is_odd(100, 4), is_odd(100, 2)
    (False, True)
    """
    return n * size % 16 != 0


def staged_pays_reduced(n: int, size: int) -> bool:
    """Whether the tier staged serves reductions of rows of n elements that are no whole number of 16-byte vectors.

    >>> [n for n in (33, 77, 100, 300) if staged_pays_reduced(n, 2)], staged_pays_reduced(77, 4)
    ([33, 77], False)
    """
    return n <= STAGED_REDUCED or (size == 2 and n <= STAGED_REDUCED_2_BYTES and n % 4 != 0)


def shapes(function: str, n: int, size: int, mib: int) -> list[tuple[int, int]]:
    """The shapes with which a function is measured for rows or columns of n elements of `size` bytes: (tensors,
    adjacent columns), or (rows, 1).

    The first has as many elements as `mib` MiB hold. If it has many rows, and rows of whole vectors are written, the
    second has FEW rows: there the last wave of blocks matters, and other plans may be faster.

    >>> shapes("softmax", 5120, 2, 1024), shapes("softmax", 65536, 4, 1024), shapes("logsumexp", 1024, 4, 256)
    ([(104857, 1), (4096, 1)], [(4096, 1)], [(65536, 1)])
    >>> shapes("columns", 1024, 4, 256), shapes("columns", 131072, 2, 256), shapes("columns", 131072, 4, 1)
    ([(16, 4096)], [(1, 1024)], [(1, 64)])
    """
    count = max(1, mib * 2**20 // (n * size))
    if is_columns(function):
        side = max(64, min(SIDE, count // 64 * 64))
        return [(max(1, count // side), side)]
    few = FEW_LENGTHS[0] <= n <= FEW_LENGTHS[1] and count > FEW_ROWS and not is_odd(n, size) and function == "softmax"
    return [(count, 1), (FEW, 1)] if few else [(count, 1)]
