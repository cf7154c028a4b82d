"""The definition of gradients, in float64."""

from collections.abc import Sequence

from torch import Tensor


def gradient(function: str, g: Tensor, saved: Tensor, dims: Sequence[int], lse: Tensor | None = None) -> list[Tensor]:
    """The gradient and the sum of the magnitudes of its terms. `saved` is the function's result, or for logsumexp its
    input; then g and lse have all dims of the input."""
    g, y, dims = g.double(), saved.double(), tuple(dims)
    if lse is not None:
        dx = g * (y - lse.double()).exp()
        return [dx, dx.abs()]
    if function == "log_softmax":
        return [g - y.exp() * g.sum(dims, keepdim=True), g.abs() + y.exp() * g.abs().sum(dims, keepdim=True)]
    dx = y * (g - (g * y).sum(dims, keepdim=True))
    return [dx if function == "softmax" else -dx, y.abs() * (g.abs() + (g * y).abs().sum(dims, keepdim=True))]
