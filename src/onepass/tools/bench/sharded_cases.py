"""The cases of `onepass bench sharded`: rows split over ranks. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from onepass.tools.bench.cases import DIRECTIONS, ITEMSIZE, Case
from onepass.tools.bench.random_cases import known_names

SUITE = "sharded"
DTYPES = ("bfloat16", "float32")
# For each function, in the forward and in the backward: MOVES is how many tensors of a shard's size are read or
# written, SENT how many numbers per row a rank sends to each other rank. onepass sends the states of rows, the sums of
# gradients, and the logits of targets.
MOVES = {"softmax": (2, 3), "log_softmax": (2, 3), "logsumexp": (1, 2), "cross_entropy": (1, 2)}
SENT = {"softmax": (2, 1), "log_softmax": (2, 1), "logsumexp": (2, 0), "cross_entropy": (3, 0)}
# The phases without an exchange, and the tensors that they read or write: (phase, function, direction, moves)
PHASES = (
    ("state", "softmax", "forward", 1),
    ("finish", "softmax", "forward", 2),
    ("finish", "log_softmax", "forward", 2),
    ("gradient_sum", "softmax", "backward", 2),
    ("gradient_finish", "softmax", "backward", 3),
    ("gradient_finish", "log_softmax", "backward", 3),
)
ODD, ALONE = "odd", "phases"
CLASSES = (*(f"{name.replace('_', '-')}-{d}" for name in (*MOVES, ODD) for d in DIRECTIONS), ALONE)
# (rows, columns of all ranks together). The shapes of `odd` cannot be divided into equal shards.
Sizes = tuple[tuple[int, int], ...]
NAMED: dict[str, Sizes] = {
    "cuda": ((8192, 262144), (8192, 131072), (1024, 131072), (64, 1048576)),
    "cpu": ((256, 16384), (16, 131072)),
}
ODDS: dict[str, Sizes] = {
    "cuda": ((8191, 131073), (1021, 50257), (33333, 4099), (3, 10_000_019)),
    "cpu": ((37, 5003), (3, 100_003)),
}
SIZES_OF_LOSS: dict[str, Sizes] = {"cuda": ((8192, 131072),), "cpu": ((256, 16384),)}


@dataclass(frozen=True)
class ShardedCase(Case):
    """Rows of `shape`, whose columns are split over the ranks as torch.chunk splits them."""

    ranks: int = 1
    phase: str = ""
    moves: int = 2

    def columns(self, rank: int) -> range:
        """The columns of a rank."""
        columns = self.shape[1]
        each = -(-columns // self.ranks)
        return range(min(columns, rank * each), min(columns, (rank + 1) * each))

    def bytes(self, dtype: str) -> int:
        """The bytes that the first rank, whose shard is the largest, reads and writes."""
        return self.moves * self.shape[0] * len(self.columns(0)) * ITEMSIZE[dtype]


def make(classes: Sequence[str], dtypes: Sequence[str], kind: str, ranks: int) -> list[Case]:
    """The cases for a device type, of the chosen classes. Raises ValueError for an unknown class."""
    made = [case for name in known_names(classes, CLASSES) for case in _class(name, kind)]
    return [replace(case, ranks=ranks, dtypes=(dtype,)) for case in made for dtype in dtypes or DTYPES]


def wire_bytes(function: str, direction: str, rows: int, ranks: int, dtype: str) -> int:
    """The bytes that each rank receives from the others in a call of onepass."""
    number = 8 if dtype == "float64" else 4
    return number * SENT[function][direction == "backward"] * rows * (ranks - 1)


def _class(name: str, kind: str) -> Iterator[ShardedCase]:
    suite = f"{SUITE}/{name}"
    if name == ALONE:
        for rows, columns in NAMED[kind]:
            for phase, function, direction, moves in PHASES:
                text = f"{rows} x {columns}, {phase}"
                case = ShardedCase(suite, text, (rows, columns), -1, function, direction, phase=phase, moves=moves)
                yield replace(case, without=("onepass-kernel", "dtensor", "loss_parallel"), quick=("cpu", "cuda"))
        return
    of, _, direction = name.rpartition("-")
    function = "softmax" if of == ODD else of.replace("-", "_")
    sizes = ODDS if of == ODD else SIZES_OF_LOSS if function == "cross_entropy" else NAMED
    has_results = function in ("softmax", "log_softmax")  # one result per element
    without: tuple[str, ...] = ("dtensor",) if function == "cross_entropy" else ("loss_parallel",)
    without = without if has_results else (*without, "onepass-kernel")
    for i, (rows, columns) in enumerate(sizes[kind]):
        moves, quick = MOVES[function][direction == "backward"], () if i else ("cpu", "cuda")
        case = ShardedCase(suite, f"{rows} x {columns}", (rows, columns), -1, function, direction, moves=moves)
        yield replace(case, without=without, quick=quick)
