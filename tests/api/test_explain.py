"""`onepass.explain`: the plan of a call for people, on GPUs that need not be here."""

import pytest
import torch

import onepass
from onepass.devices import KNOWN, known

F32, F64, F16, BF16 = torch.float32, torch.float64, torch.float16, torch.bfloat16


def test_explain_is_readable_and_complete():
    text = str(onepass.explain((8192, 151936), dtype=BF16, device="h200"))
    words = ["softmax", "8192, 151936", "bfloat16", "NVIDIA H200", "cuda", "cluster", "4,978,638,848", "4,270 GB/s"]
    assert [word for word in words if word not in text] == []
    plan = onepass.explain((64, 1000, 14, 14), dim=1, device="h200", dtype=F16, out_dtype=F32)
    assert plan.bytes == 64 * 1000 * 14 * 14 * (2 + 4)
    assert not any("gathered" in note for note in plan.notes)
    assert plan.copy_us == pytest.approx(plan.bytes / 4270e3)
    assert (plan.tier, plan.as_dict()["launch"]["source"]) == ("columns", "columns.cu")
    with onepass.batch_invariant():
        plan = onepass.explain((64, 1000, 14, 14), dim=1, device="h200")
    assert plan.launch["source"] == "rows_onchip.cu"
    assert any("gathered" in note for note in plan.notes)
    assert onepass.explain((8, 8), device="cpu", bandwidth=100).copy_us == pytest.approx(512 / 100e3)
    assert onepass.explain(torch.randn(4, 4)).engine == "cpu"
    assert onepass.explain((3, 0), device="cpu").launch == {}
    assert onepass.explain((16, 4096), function="logsumexp", device="h200").bytes == 16 * 4097 * 4
    assert onepass.explain((16, 4096), device="h200", engine="triton").engine == "triton"


def test_explain_takes_another_gpu():
    shape = (8192, 131072)
    here = onepass.explain(shape, device="h200")
    part = onepass.explain(shape, device="h200", sm_count=60)
    assert (here.tier, here.launch["blocks_per_row"], here.bandwidth_gbs) == ("cluster", 16, 4270)
    assert (part.tier, part.launch["blocks_per_row"]) == ("cluster", 8)  # those of 16 are for the whole chip alone
    assert [note for note in part.notes if note.startswith("tables measured on NVIDIA H200") and "nearest" in note]
    assert part.bandwidth_gbs is None  # a part of a GPU has not its bandwidth
    assert onepass.explain(shape, device="h200", sm_count=60, bandwidth=100.0).bandwidth_gbs == 100
    assert onepass.explain(shape, device="h200", arch=90, sm_count=132) == here
    few = onepass.explain((1, 2**23), device="h200", arch=80, sm_count=108)
    assert (few.tier, few.launch["blocks_per_row"]) == ("grid", 108)
    plan = onepass.explain((8192, 32000), arch=80, sm_count=108, bandwidth=1555)  # needs no device
    there = onepass.explain((8192, 32000), device="a100", bandwidth=1555)
    assert (plan.engine, plan.tier, plan.launch, plan.copy_us) == ("cuda", there.tier, there.launch, there.copy_us)


@pytest.mark.parametrize("name", [*KNOWN, "RTX 4090", "NVIDIA H100 80GB HBM3"])
@pytest.mark.parametrize("shape", [(4096, 33), (8192, 32000), (1, 2**23), (8, 512, 300)])
def test_explain_knows_gpus_that_are_not_here(name, shape):
    entry = known(name)
    plan = onepass.explain(shape, 1, device=name)
    assert (plan.device, plan.engine) == (entry.title, "triton" if name == "mi300x" else "cuda")
    notes = " ".join(plan.notes)
    assert plan.bandwidth_gbs == (entry.copy_gbs or entry.peak_gbs)
    assert ("not measured" in notes) == (entry.copy_gbs is None)
    assert ("(the nearest)" in notes) == (name not in ("h200", "mi300x"))
    if name == "mi300x":
        assert "not been run on one" in notes
        assert plan.launch["num_warps"] * 64 <= 1024  # threads of a warp
    else:
        in_grid = plan.tier.endswith("grid") or plan.tier.endswith("twopass")
        cluster = 1 if entry.compute < 90 else 16 if entry.compute == 90 else 8
        blocks = plan.launch["blocks_per_tile" if plan.tier.startswith("columns") else "blocks_per_row"]
        assert blocks <= (entry.multiprocessors if in_grid else cluster)
        assert plan.launch["threads"] <= 1024


def test_only_the_h200_is_measured():
    assert [name for name, entry in KNOWN.items() if entry.date] == ["h200"]
    assert all(entry.copy_gbs is None or entry.copy_gbs < entry.peak_gbs for entry in KNOWN.values())


def test_explain_of_a_meta_tensor_says_that_nothing_runs():
    x = torch.empty(300, 4096, device="meta").t()
    plan = onepass.explain(x, 0)
    assert (plan.device, plan.engine, plan.tier, plan.launch, plan.bytes) == ("meta", "none", "none", {}, 0)
    assert (plan.bandwidth_gbs, plan.copy_us) == (None, None)
    assert "no engine runs" in plan.notes[0]
    assert onepass.softmax(x, 0).device.type == "meta"
    there = onepass.explain(x, 0, device="h200")
    assert (there.engine, there.tier, there.strides) == ("cuda", "block", (1, 4096))
    with pytest.raises(RuntimeError, match="serves CPU tensors, got a tensor on meta"):
        onepass.explain(x, engine="cpu")


RESULT = "the result has the input's layout first, and is then copied to out: their layouts differ"
INPUT = "the input is copied to out first, and computed there in place: their layouts differ"


@pytest.mark.parametrize(
    ("strides", "out_strides", "tier", "notes"),
    [
        ((1, 40), (30, 1), "rows", [RESULT]),
        ((30, 1), (1, 40), "rows", [INPUT]),
        ((30, 1), (30, 1), "columns", []),
        ((1, 40), (1, 40), "rows", []),
        ((60, 2), (30, 1), "columns", [INPUT]),
        ((60, 2), (80, 2), "strided", []),
    ],
)
def test_explain_of_an_out_of_another_layout(strides, out_strides, tier, notes):
    """The elements of a row, or of neighbouring rows, lie side by side in one of the two: a copy makes them alike."""
    x, out = (torch.empty_strided((40, 30), s) for s in (strides, out_strides))
    plan = onepass.explain(x, 0, out=out, bandwidth=1)
    assert (plan.tier, [note for note in plan.notes if "layouts differ" in note]) == (tier, notes)


def test_explain_of_logsumexp_in_float32_and_of_a_state():
    plan = onepass.explain((8192, 1024), function="logsumexp", dtype=BF16, out_dtype=F32, device="h200")
    assert (plan.out_dtype, plan.bytes) == ("float32", 8192 * (1024 * 2 + 4))
    plan = onepass.explain((16, 4096), function="state", device="h200", dtype=BF16)
    assert (plan.function, plan.engine, plan.dtype, plan.out_dtype) == ("state", "cuda", "bfloat16", "float32")
    assert plan.bytes == 16 * (4096 * 2 + 2 * 4)
    assert onepass.explain(torch.zeros(3, 5, dtype=F64), 0, function="state").bytes == 8 * (15 + 10)
    assert onepass.explain((4, 9, 3), 1, function="state", device="h200", engine="triton").tier == "row"
    assert onepass.explain((4, 0), function="state", device="cpu").tier == "none"
    long = onepass.explain((2000, 10**6), function="state", device="h200")
    assert long.tier == "twopass"
    assert not any("twice" in note for note in long.notes)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "words"),
    [
        (((3, 4),), {"function": "tanh"}, ValueError, "tanh"),
        (((3, 4), 2), {}, IndexError, "got 2"),
        (((3, -4),), {}, ValueError, "-4"),
        (("abc",), {}, ValueError, "abc"),
        (((3, 4),), {"dtype": torch.int64}, ValueError, "int64"),
        (((3, 4),), {"device": "h2000"}, ValueError, "got 'h2000'; known GPUs, .* a100, .* --arch, --sm-count"),
        (((3, 4),), {"device": "h200", "engine": "cpu"}, RuntimeError, "'cpu' cannot run a tensor on NVIDIA H200"),
        (((3, 4),), {"device": "mi300x", "engine": "cuda"}, RuntimeError, "cannot run a tensor on AMD Instinct MI300X"),
        (((3, 4),), {"device": "xpu"}, RuntimeError, "no engine serves a tensor on a xpu device"),
        (((3, 4),), {"engine": "gpu"}, ValueError, "gpu"),
        (((3, 4),), {"engine": "cuda", "device": "cpu"}, RuntimeError, "serves CUDA tensors"),
        (((3, 4),), {"bandwidth": 0}, ValueError, "got 0"),
        (((3, 4),), {"out": torch.zeros(4, 3)}, ValueError, "out is a tensor of the input's shape"),
        (((3, 4),), {"out": torch.zeros(3, 4), "function": "logsumexp"}, ValueError, "for a softmax"),
        (((3, 4),), {"arch": 75}, ValueError, "arch is a whole number from 80 to 999, got 75"),
        (((3, 4),), {"sm_count": 1.5}, ValueError, "sm_count is a whole number from 1 to 4096, got 1.5"),
        (((3, 4),), {"device": "cpu", "sm_count": 60}, ValueError, "plans of the CUDA engine, got engine 'cpu'"),
        (((3, 4),), {"function": "logsumexp", "out_dtype": F64}, ValueError, "out_dtype"),
        (((3, 4),), {"function": "state", "out_dtype": F16}, ValueError, "state has no dtype="),
        ((torch.zeros(3, dtype=torch.int64),), {}, ValueError, "int64"),
        ((torch.zeros(3, dtype=torch.complex64),), {}, NotImplementedError, "complex64"),
    ],
)
def test_explain_refuses(arguments, options, error, words):
    with pytest.raises(error, match=words):
        onepass.explain(*arguments, **options)
