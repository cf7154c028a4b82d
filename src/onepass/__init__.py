"""onepass: the softmax family for PyTorch at the speed of memory."""

import importlib
import sys
from typing import TYPE_CHECKING, Any

from .version import __version__

__all__ = [
    "Explanation",
    "Segments",
    "State",
    "__version__",
    "autocast_keeps_half",
    "batch_invariant",
    "cross_entropy",
    "distributed",
    "engines",
    "entropy",
    "explain",
    "finish",
    "is_batch_invariant",
    "kl_div",
    "linear_cross_entropy",
    "log_prob",
    "log_softmax",
    "logsumexp",
    "merge",
    "nn",
    "patch",
    "reference",
    "segment_log_softmax",
    "segment_logsumexp",
    "segment_softmax",
    "segment_state",
    "set_batch_invariant",
    "softmax",
    "softmin",
    "state",
    "warmup",
]

# `import onepass` registers the operators at once. Only the command line delays this until one of the names below is
# used: importing torch takes 2 s, and `onepass --help` does not need it. `python -m onepass` runs this file before any
# other file of the package; sys.argv[0] is then "-m".
_WAITS = "_WAITS" not in globals() and (
    "onepass_launcher" in sys.modules or (sys.argv[:1] == ["-m"] and sys.orig_argv[-len(sys.argv)] == __name__)
)

if TYPE_CHECKING or not _WAITS:
    from . import distributed, nn, reference
    from ._engines import engines
    from ._explain import Explanation, explain
    from ._state import State, finish, merge, state
    from ._warmup import warmup
    from ._when_imported import when_imported
    from .functional import log_softmax, logsumexp, softmax, softmin
    from .linear_loss import linear_cross_entropy
    from .losses import cross_entropy, entropy, kl_div, log_prob
    from .patching import patch
    from .segments import Segments, segment_log_softmax, segment_logsumexp, segment_softmax, segment_state
    from .settings import autocast_keeps_half, batch_invariant, is_batch_invariant, set_batch_invariant

    when_imported("torch.distributed.tensor", lambda _: importlib.import_module("onepass.dtensor"))
else:

    def __getattr__(name: str) -> Any:
        """Runs this file again, which then imports everything."""
        if not _WAITS or name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        importlib.reload(sys.modules[__name__])
        return globals()[name]

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
