"""The row lengths that are measured, and the numbers of rows. A limit of a table is found to within 15%."""

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
# fmt: on
LENGTHS = tuple(sorted({*ALIGNED, *UNALIGNED}))
FEW = 4096  # rows that are measured for the tables of few rows
FEW_ROWS = 8192  # the most rows that those tables serve (plan.h)
FEW_LENGTHS = 256, 16384
STAGED_REDUCED, STAGED_REDUCED_2_BYTES = 40, 256  # the longest rows that are only read for which the tier staged pays


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
    """Whether the tier staged serves rows of n elements that are only read and are no whole number of 16-byte vectors.

    >>> [n for n in (33, 77, 100, 300) if staged_pays_reduced(n, 2)], staged_pays_reduced(77, 4)
    ([33, 77], False)
    """
    return n <= STAGED_REDUCED or (size == 2 and n <= STAGED_REDUCED_2_BYTES and n % 4 != 0)


def rows_of(n: int, size: int, mib: int) -> int:
    """The rows that `mib` MiB hold, at least one.

    >>> rows_of(1024, 4, 256)
    65536
    """
    return max(1, mib * 2**20 // (n * size))


def row_counts(n: int, size: int, mib: int, reduces: bool = False) -> list[int]:
    """The numbers of rows of n elements of `size` bytes that a function is measured with.

    One is the number that `mib` MiB hold. If that is large, and rows of whole vectors are written, FEW is the other:
    there the last blocks of a launch count, and other plans may be faster.

    >>> row_counts(5120, 2, 1024), row_counts(64, 4, 1024), row_counts(65536, 4, 1024)
    ([104857, 4096], [4194304], [4096])
    """
    most = rows_of(n, size, mib)
    few = FEW_LENGTHS[0] <= n <= FEW_LENGTHS[1] and most > FEW_ROWS and not is_odd(n, size) and not reduces
    return [most, FEW] if few else [most]
