"""A score with a parameter, which the Triton engine does not have. Importing this imports triton."""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl  # noqa: F401  (the interpreter looks for it here)


@triton.jit
def scale(x, params):
    return x / params[0]


SCALED = {"SCORE": scale, "SCORE_BACKWARD": scale}
