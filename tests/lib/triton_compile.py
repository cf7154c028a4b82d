"""What the tests share that compile Triton kernels for GPUs that are not here."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from typing import Any

import torch

from onepass.triton import Plan

TARGETS = [("cuda", 80), ("cuda", 90), ("cuda", 100), ("cuda", 120), ("hip", "gfx942")]
POINTERS = {torch.float64: "*fp64", torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16"}


class Properties:
    """Of a device: what a plan reads."""

    def __init__(self, backend: str) -> None:
        self.warp_size = 64 if backend == "hip" else 32


def compiled(
    kernel: Any, types: dict[str, Any], constants: dict[Any, Any], multiples: Any, chosen: Plan, backend: str, arch: Any
) -> dict[str, Any]:
    """The kernel's tier and resources, per thread.

    `types` of arguments that are not 32-bit integers; `constants` by name, or by place where they are in a tuple;
    `multiples`: the arguments, by name or place, that are multiples of 16.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {a: "constexpr" if a in constants else types.get(a, "i32") for a in kernel.arg_names}
    places = [(kernel.arg_names.index(a),) if isinstance(a, str) else a for a in multiples]
    attributes = {place: [["tt.divisibility", 16]] for place in places}
    target = GPUTarget(backend, arch, Properties(backend).warp_size)
    options = {"num_warps": chosen.num_warps, "num_stages": chosen.num_stages, "enable_fp_fusion": True}
    built = triton.compile(ASTSource(kernel, signature, constants, attributes), target=target, options=options)

    found: dict[str, Any] = {"tier": chosen.tier}
    if backend == "hip":
        text = built.asm["amdgcn"]
        for name in ("private_segment_fixed_size", "vgpr_spill_count"):
            found[name] = int(re.search(rf"\.{name}:\s+(\d+)", text)[1])
        found["wide"] = len(re.findall(r"global_load_dwordx4|buffer_load_dwordx4", text))
        return found
    tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        report = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    for name in ("REG", "STACK", "LOCAL"):
        found[name] = int(re.search(rf"{name}:(\d+)", report.stdout)[1])
    found["wide"] = len(re.findall(r"ld\.global[.\w:]*\.(v4\.b32|v2\.b64)", built.asm["ptx"]))
    found["exponentials"] = built.asm["ptx"].count("ex2.approx")
    return found


def assert_no_spills(found: dict[str, Any], backend: str) -> None:
    if backend == "hip":
        assert found["private_segment_fixed_size"] == found["vgpr_spill_count"] == 0
    else:
        # ptxas parks up to 6 registers of a thread to run more warps at once; a tile that is too large spills 64 bytes
        # and more.
        assert found["STACK"] <= 24
        assert found["LOCAL"] == 0
