"""A score with a parameter, which the Triton engine does not have. Importing this imports triton."""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl  # noqa: F401  (the interpreter looks for it here)

from onepass.triton.score import value_of


@triton.jit
def scale(x, params):
    return x / value_of(params[0], x)


SCALED = {"SCORE": scale, "SCORE_BACKWARD": scale}
