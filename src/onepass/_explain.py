"""`explain` describes the plan of a call."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from . import native
from . import triton as triton_engine
from ._call_names import LOSSES, OPTIONS, check_options, is_call, words
from ._engines import ENGINES, resolve
from ._explain_calls import check_call, describe_call
from .devices import KNOWN, UNKNOWN, KnownDevice, known, measured_copy_gbs
from .item_route import bytes_of_moves
from .native import REDUCTIONS
from .ops import reduced_shape
from .tables import GpuModel, gpu_model, note
from .validation import (
    FLOATS,
    LAST,
    check_dtype,
    check_input,
    normalize_dims,
    reduces_to,
    refuse_dtensors,
    result_dtype,
)

Place = tuple[torch.device | None, KnownDevice | None]  # a real device, and its entry in the table of known ones


@dataclass(frozen=True)
class Explanation:
    """The plan of a call. `str()` returns it as text, `as_dict()` as data.

    bytes: read + written, each element once. bandwidth_gbs: the bandwidth of a copy on the device, in 1e9 bytes a
    second. copy_us: the time a copy of as many bytes would take, in microseconds, without the launch.
    """

    function: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dim: tuple[int, ...]
    dtype: str
    out_dtype: str
    device: str
    engine: str
    tier: str
    launch: dict[str, int | str]
    bytes: int
    bandwidth_gbs: float | None
    copy_us: float | None
    notes: tuple[str, ...] = field(default=())

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        dims = ", ".join(map(str, self.dim))
        types = self.dtype if self.dtype == self.out_dtype else f"{self.dtype} -> {self.out_dtype}"
        lines = [
            f"onepass.{self.function} over dim {dims} of {list(self.shape)} {types} on {self.device}",
            f"  strides  {list(self.strides)}",
            f"  engine   {self.engine}",
            f"  tier     {self.tier}",
            "  launch   " + (", ".join(f"{k.replace('_', ' ')} {v}" for k, v in self.launch.items()) or "none"),
            f"  bytes    {self.bytes:,} read and written",
        ]
        if self.copy_us is not None:
            lines.append(f"  a copy   {self.copy_us:,.1f} us at {self.bandwidth_gbs:,.0f} GB/s")
        return "\n".join(lines + [f"  note     {note}" for note in self.notes])


def _is_here(device: torch.device) -> bool:
    return device.type == "cpu" or (device.type == "cuda" and torch.cuda.is_available())


def _bandwidth(device: torch.device | None, entry: KnownDevice | None, given: float | None) -> tuple[float | None, str]:
    if given is not None:
        return float(given), "the bandwidth is the one given"
    here = device is not None and _is_here(device)
    if entry is not None and (entry.copy_gbs is not None or not here):
        gbs, source = entry.bandwidth
        return gbs, f"the bandwidth is {source}"
    if device is not None and here:
        return measured_copy_gbs(device), "the bandwidth is that of a copy, measured here now"
    return None, "no bandwidth is known for this device; give one with bandwidth="


def _gpu_of(device: torch.device | None, entry: KnownDevice | None, arch: int | None, sm_count: int | None) -> GpuModel:
    """The GPU that a plan is for: the device, or `entry` or an H200 if there is no CUDA device. `arch` and `sm_count`
    replace its own numbers if they are given."""
    if device is not None and device.type == "cuda" and torch.cuda.is_available():
        gpu = gpu_model(device.index)
    else:
        model = entry if entry and entry.compute else KNOWN["h200"]
        gpu = GpuModel(model.title, model.compute or 0, model.multiprocessors)
    asked = gpu._replace(compute=arch or gpu.compute, multiprocessors=sm_count or gpu.multiprocessors)
    return asked if asked == gpu else asked._replace(name="")


def _parse_device(device: Any, tensor: Tensor | None, gpu: bool) -> tuple[torch.device | None, KnownDevice | None, str]:
    """(a real device or None, its entry in the table or None, its name). `gpu`: whether the call is on a GPU."""
    if device is None:
        device = tensor.device if tensor is not None else "cuda" if gpu or torch.cuda.is_available() else "cpu"
    if isinstance(device, str) and (entry := known(device)):
        return None, entry, entry.title
    try:
        real = torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(
            f"onepass.explain(): device must be a torch device or the name of a known GPU, got {device!r}; {UNKNOWN}"
        ) from None
    if real.type == "cuda" and torch.cuda.is_available():
        name = torch.cuda.get_device_name(real)
        return real, known(name), name
    return real, None, str(real)


def _engine(engine: str, real: torch.device | None, entry: KnownDevice | None, notes: list[str]) -> str:
    """The engine of the plan, or "none" for a meta tensor. Raises the errors that the call would raise."""
    if engine not in ("auto", *ENGINES):
        raise ValueError(f"onepass: engine must be 'auto', 'cpu', 'cuda' or 'triton', got {engine!r}")
    amd = entry is not None and entry.compute is None
    if real is None and (engine == "cpu" or (amd and engine == "cuda")):
        takes = "CPU tensors" if engine == "cpu" else "NVIDIA GPUs"
        raise RuntimeError(f"onepass: engine {engine!r} cannot run a tensor on {entry and entry.title}: serves {takes}")
    if amd:
        notes.append("the Triton kernels are compiled for this GPU; they have not been run on one")
        return "triton"
    if real is not None and real.type == "meta" and engine == "auto":
        notes.append("a meta tensor has no data, and no engine runs; device= tells what one like it would get there")
        return "none"
    if real is None or (real.type == "cuda" and not _is_here(real) and engine != "cpu"):
        if real is not None:
            notes.append("no CUDA device is here: the plan is that of an NVIDIA GPU with the tables of the H200")
        return "cuda" if engine == "auto" else engine
    return resolve(engine, real)


def _properties(device: torch.device | None, entry: KnownDevice | None) -> Any:
    """The properties of a GPU that the plans of Triton use."""
    here = device is not None and device.type == "cuda" and _is_here(device)
    return torch.cuda.get_device_properties(device) if here else entry


def _native_plan(
    gpu: GpuModel, function: str, x: Tensor, y_type: torch.dtype, dims: list[int], address: int, out: Tensor | None
) -> dict[str, Any]:
    """The plan on that GPU, or the CPU engine's if the compute capability is 0."""
    if function in REDUCTIONS:
        contiguous = torch.empty(reduced_shape(x.shape, dims, True), device="meta").stride()
        y_strides: Sequence[int] = [0 if i in dims else s for i, s in enumerate(contiguous)]
    else:
        y_strides = (torch.empty_like(x, device="meta") if out is None else out).stride()
    sizes, x_strides, y_strides = (list(numbers) or [1] for numbers in (x.shape, x.stride(), y_strides))
    call = function, gpu.compute > 0, sizes, x_strides, y_strides, dims, x.dtype, y_type
    return native.plan(*call, address, 0, gpu.compute, gpu.multiprocessors, gpu.name)


def explain(
    x: Tensor | Sequence[int],
    dim: int | Sequence[int] = LAST,
    *,
    function: str = "softmax",
    options: Sequence[str] = (),
    segments: int | None = None,
    dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    engine: str = "auto",
    bandwidth: float | None = None,
    arch: int | None = None,
    sm_count: int | None = None,
    out: Tensor | None = None,
) -> Explanation:
    """The plan of a call: engine, tier, launch numbers, bytes moved, the time a copy of as many bytes would take.

    Args:
        x: the input, or its sizes for a contiguous tensor of `dtype` on `device`. For a loss, the logits; a second
            tensor of logits is assumed to have the same layout.
        dim: the `dim=` of the call. For cross_entropy the dim of the classes is always the one that the function takes.
        function: "softmax", "log_softmax", "softmin", "logsumexp" or "state"; or a loss, "cross_entropy", "log_prob",
            "entropy" or "kl_div"; or a function of segments, "segment_softmax", "segment_log_softmax",
            "segment_logsumexp" or "segment_state".
        options: the other arguments of the call that select another kernel. For cross_entropy: "weight",
            "label_smoothing", "softcap", "return_lse" and "probabilities" (the target). For other losses:
            "temperature", and for log_prob "return_entropy" too. For segments: "bias" and "order" (an index that is not
            sorted). For softmax, log_softmax, softmin and logsumexp, the scores: "scale" (a number), "bias" and "mask"
            (of x's layout), "causal" (any window), "alibi", "softcap", "sink" and "empty" (empty="zero").
        segments: the number of segments.
        dtype: the input's dtype if x is given as sizes; float32 by default.
        out_dtype: the `dtype=` of the call, if it has one; float32 for a half tensor under torch.autocast.
        device: the device of the call, in place of the tensor's: "cpu", "cuda:0", or a known GPU, which need not be in
            this machine: a100, h100, h200, b200, l4, rtx4090, mi300x.
        engine: the `engine=` of the call.
        bandwidth: the bandwidth of a copy, in 1e9 bytes a second, if it should not be looked up or measured.
        arch, sm_count: compute capability (80 for 8.0) and number of multiprocessors of the GPU that the plan is for,
            if they should differ from the device's.
        out: the `out=` of the call, for softmax, log_softmax or softmin, also of segments. The plan may depend on its
            layout.

    Raises:
        ValueError, TypeError, IndexError, RuntimeError: as the call itself would.

    >>> import onepass
    >>> plan = onepass.explain((8192, 1024), device="h200")
    >>> plan.engine, plan.tier, plan.bytes
    ('cuda', 'block', 67108864)
    >>> onepass.explain((8192, 32000), function="cross_entropy", device="h200").launch["source"]
    'loss_rows.cu'
    """
    known = (*dict.fromkeys((*native.FUNCTIONS, *OPTIONS)),)
    if function not in known:
        raise ValueError(f"onepass.explain(): function must be one of {', '.join(known)}, got {function!r}")
    check_options("explain", [function], options)
    if segments is not None and not function.startswith("segment_"):
        raise ValueError(f"onepass.explain(): segments goes with a function of segments, got {function!r}")
    if bandwidth is not None and not bandwidth > 0:
        raise ValueError(f"onepass.explain(): bandwidth must be positive, in GB/s, got {bandwidth!r}")
    for key, value, least, most in (("arch", arch, 80, 999), ("sm_count", sm_count, 1, 4096)):
        if value is not None and (type(value) is not int or not least <= value <= most):
            raise ValueError(f"onepass.explain(): {key} is a whole number from {least} to {most}, got {value!r}")
    tensor = x if isinstance(x, Tensor) else None
    if tensor is None:
        if dtype is not None and dtype not in FLOATS:
            raise ValueError(f"onepass.explain(): dtype must be a floating dtype that onepass serves, got {dtype}")
        try:
            shaped = torch.empty(tuple(x), dtype=dtype or torch.float32, device="meta")
        except (RuntimeError, TypeError):
            raise ValueError(f"onepass.explain(): takes a tensor or a tuple of sizes, got {x!r}") from None
    else:
        check_input(function, tensor)
        refuse_dtensors("explain", tensor)
        if tensor.dtype not in FLOATS:
            raise ValueError(f"onepass.explain(): explains floating dtypes, got {tensor.dtype}; it is cast first")
        shaped = tensor
    has_call = is_call(function, options)
    if has_call:
        shaped, dims, y_type = check_call(function, shaped, dim, out_dtype, segments)
    else:
        dims, y_type = _check_call(function, shaped, dim, out_dtype)
    takes_out = function.removeprefix("segment_") not in (*REDUCTIONS, *LOSSES)
    if out is not None and (not takes_out or not isinstance(out, Tensor) or out.shape != shaped.shape):
        raise ValueError(f"onepass.explain(): out is a tensor of the input's shape, for a softmax; got {out!r:.80}")
    real, entry, name = _parse_device(device, tensor, bool(arch or sm_count))
    notes: list[str] = []
    chosen = _engine(engine, real, entry, notes)
    address = tensor.data_ptr() if tensor is not None and tensor.device.type != "meta" else 0
    if chosen != "cuda" and (arch or sm_count):
        raise ValueError(
            f"onepass.explain(): arch and sm_count are for plans of the CUDA engine, got engine {chosen!r}"
        )
    gpu = None if chosen in ("cpu", "none") else _gpu_of(real, entry, arch, sm_count)
    chip = gpu or GpuModel("", 0, 0)
    if has_call:
        properties = _properties(real, entry)
        extra = bytes_of_moves(shaped, function, options, dims[0], y_type, chosen)
        if extra:
            options = [option for option in options if option != "order"]
            notes.append(f"items move to their order, and results back (item_moves.cu): {extra:,} bytes more")
        call = words(function, options), shaped, dims[0], y_type, segments, out, address
        tier, launch, moved = describe_call(chosen, *call, chip, properties, notes)
        moved += extra
    else:
        plan = _native_plan(chip, function, shaped, y_type, dims, address, out)
        moved = plan["bytes"] if chosen != "none" else 0
        tier, launch = _describe(chosen, plan, function, shaped, y_type, (real, entry), notes)
        if chosen == "cuda" and launch:
            notes.append(note(native.tables(chip.name)["origin"], chip.name))
    if gpu is not None and not gpu.name:  # `arch` or `sm_count` differ: a GPU of which no more is known
        real = entry = None
    gbs, why = _bandwidth(real, entry, bandwidth) if chosen != "none" else (None, "")
    notes += [why] if why else []
    return Explanation(
        function=function,
        shape=tuple(shaped.shape),
        strides=tuple(shaped.stride()),
        dim=tuple(dims),
        dtype=str(shaped.dtype).removeprefix("torch."),
        out_dtype=str(y_type).removeprefix("torch."),
        device=name,
        engine=chosen,
        tier=tier,
        launch=launch,
        bytes=moved,
        bandwidth_gbs=gbs,
        copy_us=None if gbs is None else moved / gbs / 1e3,
        notes=tuple(notes),
    )


def _check_call(function: str, x: Tensor, dim: Any, out_dtype: torch.dtype | None) -> tuple[list[int], torch.dtype]:
    """(dims, dtype of the result) of a call."""
    if function != "state":
        check_dtype(function, x, out_dtype)
    y_type = result_dtype(function, x.dtype, out_dtype)
    if function in REDUCTIONS and not reduces_to(function, x.dtype, out_dtype or y_type):
        raise ValueError(f"onepass.explain(): {function} has no dtype=; of {x.dtype} no out_dtype is {out_dtype}")
    return normalize_dims(function, x, dim), y_type


_LAUNCH_KEYS = {
    *("threads_per_row", "rows_per_block", "threads_x", "threads_y", "items_per_thread", "vec_size"),
    *("blocks_per_row", "blocks_per_tile", "smem_vecs", "rows_per_thread", "access", "stages"),
    "slices_per_group",
}
_STREAMED = {
    "twopass": "a row streams through its block: it is read twice",
    "columns-twopass": "columns stream through their blocks: they are read twice",
}


def _describe(
    engine: str, plan: dict[str, Any], function: str, x: Tensor, y_type: torch.dtype, place: Place, notes: list[str]
) -> tuple[str, dict[str, int | str]]:
    """(tier, launch numbers) of the chosen engine. Appends to `notes`."""
    if engine == "none":
        return "none", {}
    if plan["rows"] == 0 or plan["n"] == 0:
        notes.append("nothing to compute")
        return "none", {}
    if engine == "cpu":
        if not plan["fused"]:
            notes.append(f"the input is cast to {y_type} first, into a temporary")
        if plan["copied"] == "input":
            notes.append("the input is copied to out first, and computed there in place: their layouts differ")
        if plan["copied"] == "result":
            notes.append("the result has the input's layout first, and is then copied to out: their layouts differ")
    elif plan["view"] != "rows" and (engine == "triton" or not plan["tier"].startswith("columns")):
        plan["copied"] = "both"
    if plan.get("copied") == "both":
        extra = plan["rows"] * plan["n"] * x.element_size() * 2
        if function not in REDUCTIONS:
            extra += plan["rows"] * plan["n"] * y_type.itemsize * 2
        notes.append(f"gathered: rows of this layout are copied to unit stride and back, {extra:,} bytes more")
    if engine == "cpu":
        keys = ("isa", "route", "work_items", "grain_size")
        return plan["view"], {"threads": torch.get_num_threads(), **{key: plan[key] for key in keys}}
    if engine == "triton":
        numbers = triton_engine.plan_forward(plan["rows"], plan["n"], x.dtype, y_type, _properties(*place)).as_dict()
        return str(numbers.pop("tier")), numbers
    shown = ["source", "grid", "threads", *(key for key in plan if key in _LAUNCH_KEYS)]
    shown += ["read_again"] if plan["read_again"] else []
    if function not in REDUCTIONS:
        if plan["tier"] in _STREAMED:
            notes.append(_STREAMED[plan["tier"]])
        if plan["read_again"]:
            notes.append(f"{plan['read_again']:,} elements of a row do not fit the chip: they are read twice")
    return plan["tier"], {key: plan[key] for key in shown}
