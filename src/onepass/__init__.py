"""onepass: the softmax family for PyTorch at the speed of memory."""

from . import nn, reference
from .autocast import autocast_keeps_half
from .engines import engines
from .explain import Explanation, explain
from .functional import log_softmax, logsumexp, softmax, softmin
from .invariance import batch_invariant, is_batch_invariant, set_batch_invariant
from .partial import State, merge, state
from .patch import patch
from .version import __version__
from .warmup import warmup

__all__ = [
    "Explanation",
    "State",
    "__version__",
    "autocast_keeps_half",
    "batch_invariant",
    "engines",
    "explain",
    "is_batch_invariant",
    "log_softmax",
    "logsumexp",
    "merge",
    "nn",
    "patch",
    "reference",
    "set_batch_invariant",
    "softmax",
    "softmin",
    "state",
    "warmup",
]
