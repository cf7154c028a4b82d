"""For tests of `onepass.patch`: the names that it has to serve, and runs with and without the patch."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

# Imported before any patch, as in users' modules.
from torch.nn.functional import cross_entropy, log_softmax, softmax, softmin
from torch.special import logsumexp

import onepass

OPERATORS = (
    *("_softmax", "softmax.int_out", "_log_softmax", "log_softmax.int_out", "logsumexp"),
    *("_softmax_backward_data", "_log_softmax_backward_data", "cross_entropy_loss"),
)
SCRIPT = torch.jit.CompilationUnit(
    "def softmax(x: Tensor, d: int) -> Tensor:\n    return torch.softmax(x, d)\n"
    "def cross_entropy(x: Tensor, y: Tensor) -> Tensor:\n    return torch.nn.functional.cross_entropy(x, y)\n"
)


def _classes(x: torch.Tensor) -> torch.Tensor:
    return torch.arange(len(x), device=x.device) % x.shape[1]


# name -> (the function that the report counts, the call)
FACES: dict[str, tuple[str, Any]] = {
    "torch.softmax": ("softmax", torch.softmax),
    "torch.log_softmax": ("log_softmax", torch.log_softmax),
    "torch.logsumexp": ("logsumexp", torch.logsumexp),
    "Tensor.softmax": ("softmax", lambda x, d: x.softmax(d)),
    "Tensor.softmax of before": ("softmax", torch.Tensor.softmax),
    "Tensor.log_softmax": ("log_softmax", lambda x, d: x.log_softmax(d)),
    "Tensor.logsumexp": ("logsumexp", lambda x, d: x.logsumexp(d)),
    "F.softmax": ("softmax", lambda x, d: F.softmax(x, d)),
    "F.softmax of before": ("softmax", softmax),
    "F.log_softmax": ("log_softmax", lambda x, d: F.log_softmax(x, d)),
    "F.log_softmax of before": ("log_softmax", log_softmax),
    "F.softmin": ("softmax", lambda x, d: F.softmin(x, d)),
    "F.softmin of before": ("softmax", softmin),
    "nn.Softmax": ("softmax", lambda x, d: nn.Softmax(d)(x)),
    "nn.LogSoftmax": ("log_softmax", lambda x, d: nn.LogSoftmax(d)(x)),
    "nn.Softmin": ("softmax", lambda x, d: nn.Softmin(d)(x)),
    "nn.Softmax2d": ("softmax", lambda x, _: nn.Softmax2d()(x[:, :, None, None])),
    "torch.special.softmax": ("softmax", torch.special.softmax),
    "torch.special.log_softmax": ("log_softmax", torch.special.log_softmax),
    "torch.special.logsumexp": ("logsumexp", lambda x, d: torch.special.logsumexp(x, d)),
    "torch.special.logsumexp of before": ("logsumexp", logsumexp),
    "torch.ops.aten.softmax": ("softmax", lambda x, d: torch.ops.aten.softmax.int(x, d)),
    "torch.ops.aten._softmax": ("softmax", lambda x, d: torch.ops.aten._softmax(x, d, False)),
    "TorchScript": ("softmax", SCRIPT.softmax),
    "F.cross_entropy": ("cross_entropy", lambda x, _: F.cross_entropy(x, _classes(x))),
    "F.cross_entropy of before": ("cross_entropy", lambda x, _: cross_entropy(x, _classes(x))),
    "nn.CrossEntropyLoss": ("cross_entropy", lambda x, _: nn.CrossEntropyLoss()(x, _classes(x))),
    "cross_entropy of TorchScript": ("cross_entropy", lambda x, _: SCRIPT.cross_entropy(x, _classes(x))),
    "Categorical": ("logsumexp", lambda x, _: torch.distributions.Categorical(logits=x).logits),
}


def with_and_without(call: Callable[[], Any]) -> tuple[Any, Any, onepass.patch]:
    """(result of `call` without a patch, result inside a patch, that patch, which has counted)."""
    plain = call()
    with onepass.patch(report=True) as patched:
        ours = call()
    return plain, ours, patched


def dispatch_tables() -> str:
    """All kernels that torch has for the operators that a patch overrides."""
    return "".join(torch._C._dispatch_dump(f"aten::{name}") for name in OPERATORS)
