"""Names of calls of losses, of segments and with scores in `explain` and `warmup`: a function, and the options (the
arguments of the call that select another kernel)."""

from collections.abc import Iterable, Sequence

# The arguments, and kinds of tensors, that select another kernel. "probabilities": the target has class probabilities
# in place of classes. "order": the items are not sorted by segment.
OPTIONS: dict[str, tuple[str, ...]] = {
    "cross_entropy": ("weight", "label_smoothing", "softcap", "return_lse", "probabilities"),
    "log_prob": ("temperature", "return_entropy"),
    "entropy": ("temperature",),
    "kl_div": ("temperature",),
    **{f"segment_{name}": ("bias", "order") for name in ("softmax", "log_softmax", "logsumexp", "state")},
}
LOSSES = tuple(name for name in OPTIONS if not name.startswith("segment_"))
# "causal" stands for any window, "empty" for empty="zero".
SCORED = ("softmax", "log_softmax", "softmin", "logsumexp")
OPTIONS |= dict.fromkeys(SCORED, ("scale", "bias", "mask", "causal", "alibi", "softcap", "sink", "empty"))


def is_call(function: str, options: Sequence[str]) -> bool:
    """Whether a function is a loss or a function of segments, or its options are of scores."""
    return function in OPTIONS and (function not in SCORED or any(option in OPTIONS[function] for option in options))


def check_options(caller: str, functions: Iterable[str], options: Sequence[str]) -> None:
    """Raises ValueError for an option that none of the functions has."""
    if isinstance(options, str):
        raise TypeError(f"onepass.{caller}(): options takes a sequence of names, got {options!r}")
    known = {option: None for function in functions for option in OPTIONS.get(function, ())}
    for option in options:
        if option not in known:
            takes = f"takes {', '.join(known)}" if known else "takes none here"
            raise ValueError(f"onepass.{caller}(): options {takes}; got {option!r}")


def words(function: str, options: Sequence[str]) -> str:
    """A call as `native` takes it: the function, and the options that the function has."""
    return " ".join((function, *(option for option in OPTIONS[function] if option in options)))
