"""onepass: the softmax family for PyTorch at the speed of memory."""

from . import reference
from .engines import engines
from .explain import Explanation, explain
from .functional import log_softmax, logsumexp, softmax, softmin
from .partial import State, merge, state
from .version import __version__
from .warmup import warmup

__all__ = [
    "Explanation",
    "State",
    "__version__",
    "engines",
    "explain",
    "log_softmax",
    "logsumexp",
    "merge",
    "reference",
    "softmax",
    "softmin",
    "state",
    "warmup",
]
