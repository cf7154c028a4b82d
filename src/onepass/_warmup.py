"""`warmup` compiles and loads every kernel that a plan may choose, before the first call needs it."""

from collections.abc import Callable, Sequence

import torch

from . import native
from ._call_names import LOSSES, OPTIONS, SCORED, check_options, is_call, words
from ._engines import resolve
from ._kernel_compiler import Kernel, compile_all
from .segment_ops import _fuses
from .validation import FLOATS, HALF_DTYPES, reduces_to, result_dtype

Progress = Callable[[int, int], None]  # (done, total)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def warmup(
    device: torch.device | str | int | None = None,
    dtypes: Sequence[torch.dtype | tuple[torch.dtype, torch.dtype]] = DTYPES,
    functions: Sequence[str] = native.FUNCTIONS,
    lengths: Sequence[int] | None = None,
    *,
    backward: bool = False,
    all_dims: bool = False,
    options: Sequence[str] = (),
    arch: int | None = None,
    progress: Progress | None = None,
) -> int:
    """Compile and load every CUDA kernel that calls with contiguous rows may need, so that no later call waits for one.

    Contiguous rows means a call over the last dim of a contiguous tensor, which may be a view that begins at any
    element. The result is a new tensor or in-place, and there may be few rows or many. With `all_dims` it includes
    calls over one or several other dims of such a tensor, with any number of columns. Kernels come from a package of
    kernels or the disk cache if these have them, otherwise from NVRTC. Many kernels are compiled in several processes,
    because NVRTC compiles one at a time in a process.

    Args:
        device: a CUDA device; None is the current one.
        dtypes: dtypes of the input and the result. A pair (input, result) stands for a call with `dtype=` or under
            torch.autocast, which widens half types to float32. logsumexp and state skip pairs that they do not support.
            The kernels of losses depend on the input's dtype only.
        functions: names of functions. The default is softmax, log_softmax, softmin, logsumexp and state. Kernels of
            losses ("cross_entropy", "log_prob", "entropy", "kl_div") and of segments ("segment_softmax" and so on) are
            compiled only if these are named. Kernels of segments serve any number of dims beside the items.
        lengths: lengths of the rows, in elements; None for any length. With `all_dims` also the lengths of columns: the
            product of the sizes of the dims that a call is over. For segments it is their mean length.
        backward: whether to include the kernels of gradients, for an upstream gradient that is contiguous (a view or
            not), or has one value per row, as the gradient of a sum over the dims of the call has. "state" needs none:
            its gradient is plain torch arithmetic.
        all_dims: whether to include calls over other dims of contiguous tensors, without scores. These are a few
            hundred more kernels per function and dtype (20 to 520 for one length). Slices whose lines are not
            contiguous may need other kernels.
        options: arguments of calls of losses, of segments and with scores, as `onepass.explain` lists them. A function
            skips an option that it does not have. A call with other options needs other kernels.
        arch: fill the disk cache for GPUs of this compute capability (90 for 9.0), which need not be in this machine.
            Nothing is loaded, and `device` may not be given.
        progress: called with (done, total) as the work goes on.

    Returns:
        The number of kernels that the plans may choose, compiled now or before.

    Raises:
        ValueError: an unknown function or option, a length below 1, a compute capability below 80, `device` together
        with `arch`. TypeError: an unsupported dtype, or no dtype. RuntimeError: no CUDA device and no `arch`; a device
        that another engine serves; no NVRTC; no disk cache with `arch`.

    >>> import onepass
    >>> onepass.warmup(arch=90, functions=["softmax"], dtypes=[], lengths=[128])  # nothing asked for
    0
    """
    wanted = check(dtypes, functions, lengths, arch)
    check_options("warmup", functions, options)
    if all_dims and any(f in SCORED and is_call(f, options) for f in functions):
        raise ValueError("onepass.warmup(): scores are compiled for the last dim of tensors, without all_dims")
    index = -1
    if arch is None:
        index = _device_index(device)
        major, minor = torch.cuda.get_device_capability(index)
        arch = 10 * major + minor
    elif device is not None:
        raise ValueError(f"onepass.warmup(): takes device or arch, got both: {device!r} and {arch}")
    elif wanted and (error := _cache_error()):
        raise RuntimeError(f"onepass.warmup(): no disk cache to fill: {error}") from error
    kernels = kernels_of(wanted, index, arch, lengths, backward, all_dims, options)
    missing = []
    if not _cache_error():
        missing = [k for k in kernels if not native.is_kernel_cached(*k[:3], k.plan, arch, k.which)]
    report = progress or (lambda done, total: None)
    total = len(missing) + (len(kernels) if index >= 0 else 0)
    report(0, total)
    for done, _ in enumerate(compile_all(missing, arch), 1):
        report(done, total)
    if index >= 0:
        with torch.cuda.device(index):  # the kernels are loaded into the context of this device
            torch.cuda.current_stream().synchronize()
            for done, kernel in enumerate(kernels, len(missing) + 1):
                native.warm_kernel(*kernel[:3], kernel.plan, index, kernel.which)
                report(done, total)
    return len(kernels)


def kernels_of(
    wanted: Sequence[tuple[str, torch.dtype, torch.dtype]],
    index: int,
    arch: int,
    lengths: Sequence[int] | None,
    backward: bool = False,
    all_dims: bool = False,
    options: Sequence[str] = (),
) -> list[Kernel]:
    """The kernels of the triples that `check` returns."""
    of_rows = [types for types in wanted if not is_call(types[0], options)]
    kinds = [(*types, "forward") for types in of_rows]
    if backward:  # it reads the result's dtype and writes the input's
        passes = native.PASSES[1:]
        kinds += [(f, y_type, x_type, which) for f, x_type, y_type in of_rows if f != "state" for which in passes]
    of = index, arch, tuple(lengths or ())
    kernels = [
        Kernel(*kind, plan)
        for kind in kinds
        for plan in native.kernels_to_warm(*kind[:3], *of, kind[3], all_dims).values()
    ]
    calls = {call: None for types in wanted if types not in of_rows for call in _calls(*types, backward, options)}
    found: dict[str, Kernel] = {}  # one kernel may serve several calls
    for call in calls:
        found |= {name: Kernel(*kind) for name, kind in native.call_kernels(*call, *of, all_dims).items()}
    return kernels + list(found.values())


def _calls(
    function: str, x: torch.dtype, y: torch.dtype, backward: bool, options: Sequence[str]
) -> list[tuple[str, str, tuple[torch.dtype, torch.dtype]]]:
    """(words, pass, dtypes that are read and written) of a call of a loss, of segments or with scores."""
    call = words(function, options)
    if function in LOSSES:
        return [(call, which, (x, x)) for which in ("forward", "backward")[: 1 + backward]]
    if function in SCORED:
        if not backward:
            return [(call, "forward", (x, y))]
        grads = _gradients_of_scores(function, x, y, options)
        kept = [(f"{call} lse", "forward", (x, y))] if any(of.endswith(" lse") for of, *_ in grads) else []
        return [(call, "forward", (x, y)), *kept, *grads]
    read = x if _fuses(x, y) else y  # if the kernel cannot convert, the input is cast first
    calls = [(call, "forward", (read, y))]
    if not backward or function == "segment_state":
        return calls
    if function == "segment_logsumexp":  # its gradient is computed from the unrounded result
        wide = torch.float32 if y in HALF_DTYPES else y
        return [*calls, (call, "forward", (read, wide)), (call, "backward", (read, read))]
    calls.append((call, "backward", (y, read)))
    if "bias" in options:  # the bias may need a gradient
        calls.append((call, "backward", (y, y)))
    return calls


def _gradients_of_scores(
    function: str, x: torch.dtype, y: torch.dtype, options: Sequence[str]
) -> list[tuple[str, str, tuple[torch.dtype, torch.dtype]]]:
    """The calls of the backward with scores (score_gradients.gradients): one for the gradient of the input, and one in
    the accumulator's dtype for the gradient of the scores, if one of their tensors may need a gradient."""
    wide = torch.float64 if torch.float64 in (x, y) else torch.float32
    call = words(function, options)
    of_scores = any(option in options for option in ("scale", "bias", "alibi"))
    if function == "logsumexp":  # its gradient is computed from the unrounded result
        return [(call, "forward", (x, wide)), *((call, "backward", (x, to)) for to in (x, wide)[: 1 + of_scores])]
    plain = words(function, [option for option in options if option not in ("scale", "softcap")])
    grads = [(call, "backward", (y, x)), *([(plain, "backward", (y, wide))] if of_scores else ())]
    # The slope of most softcaps (scored.caps_from_result).
    from_result = "softcap" in options and x is y and x in HALF_DTYPES and function in ("softmax", "softmin")
    if from_result and "alibi" not in options:
        grads.append((f"{call} lse", "backward", (y, x)))
    return grads


def check(
    dtypes: Sequence[torch.dtype | tuple[torch.dtype, torch.dtype]],
    functions: Sequence[str],
    lengths: Sequence[int] | None,
    arch: int | None,
) -> list[tuple[str, torch.dtype, torch.dtype]]:
    """Checks arguments of `warmup`. Returns the triples (function, input dtype, result dtype), each once."""
    if isinstance(functions, str):
        raise TypeError(f"onepass.warmup(): functions takes a sequence of names, got {functions!r}")
    for function in functions:
        if function not in native.FUNCTIONS and function not in OPTIONS:
            known = ", ".join(dict.fromkeys((*native.FUNCTIONS, *OPTIONS)))
            raise ValueError(f"onepass.warmup(): functions are {known}; got {function!r}")
    for n in lengths if lengths is not None else ():
        if isinstance(n, bool) or not isinstance(n, int):
            raise TypeError(f"onepass.warmup(): a length is an int, got {n!r}")
        if not 1 <= n < 2**62:
            raise ValueError(f"onepass.warmup(): a length is at least 1 and below 2**62, got {n}")
    if lengths is not None and not lengths:
        raise ValueError("onepass.warmup(): lengths is empty; None is for any length")
    if arch is not None and (type(arch) is not int or not 80 <= arch <= 999):
        raise ValueError(f"onepass.warmup(): arch is 80 or more (90 for compute capability 9.0), got {arch!r}")
    wanted = []
    for given in dtypes:
        pair = given if isinstance(given, tuple) else (given, given)
        if len(pair) != 2 or not all(dtype in FLOATS for dtype in pair):
            takes = ", ".join(str(dtype) for dtype in FLOATS)
            raise TypeError(f"onepass.warmup(): dtypes takes {takes} and pairs (input, result) of them; got {given!r}")
        x, y = pair
        for f in functions:
            of = f.removeprefix("segment_")
            if of in LOSSES:
                wanted.append((f, x, x))
            elif x is y or of not in native.REDUCTIONS or f == "segment_logsumexp" or reduces_to(of, x, y):
                wanted.append((f, x, result_dtype(of, x, y)))
    return list(dict.fromkeys(wanted))


def _device_index(device: torch.device | str | int | None) -> int:
    if not torch.cuda.is_available():
        raise RuntimeError(
            "onepass.warmup(): no CUDA device here; arch=90 (--arch 90) compiles for one that is elsewhere"
        )
    chosen = torch.device("cuda") if device is None else torch.device(device)
    if chosen.type != "cuda":
        raise ValueError(f"onepass.warmup(): takes a CUDA device, got {str(chosen)!r}")
    index = torch.cuda.current_device() if chosen.index is None else chosen.index
    if index >= torch.cuda.device_count():
        raise RuntimeError(f"onepass.warmup(): no {str(chosen)!r} here: there are {torch.cuda.device_count()} GPUs")
    resolve("cuda", torch.device("cuda", index))  # raises an error if the engine cannot run
    resolve("auto", torch.device("cuda", index))  # so that the first call need not do it
    return index


def _cache_error() -> RuntimeError | None:
    """Why there is no disk cache of kernels, or None."""
    try:
        native.status("cache")
    except RuntimeError as error:
        return error
    return None
