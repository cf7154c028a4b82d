"""Calls of losses, of segments and with scores as `explain` and `warmup` name them: a function, and options that a call
is given."""

from collections.abc import Iterable, Sequence

# What makes other kernels of a call's: its arguments, and the kinds of its tensors. "probabilities": a target that has
# them in the place of classes. "order": segments whose items do not lie in their order.
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
    """Whether a function is that of a loss or of segments, or has scores."""
    return function in OPTIONS and (function not in SCORED or any(option in OPTIONS[function] for option in options))


def check_options(caller: str, functions: Iterable[str], options: Sequence[str]) -> None:
    """Each option is one of some function."""
    if isinstance(options, str):
        raise TypeError(f"onepass.{caller}(): options takes a sequence of names, got {options!r}")
    known = {option: None for function in functions for option in OPTIONS.get(function, ())}
    for option in options:
        if option not in known:
            takes = f"takes {', '.join(known)}" if known else "takes none here"
            raise ValueError(f"onepass.{caller}(): options {takes}; got {option!r}")


def words(function: str, options: Sequence[str]) -> str:
    """A call as `native` takes it: the function and those of the options that it has."""
    return " ".join((function, *(option for option in OPTIONS[function] if option in options)))
