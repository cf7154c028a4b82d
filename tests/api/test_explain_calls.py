"""`onepass.explain` of losses, of segments and with scores."""

import pytest
import torch

import onepass
from onepass import native
from onepass._call_names import OPTIONS

F32, F64, F16, BF16 = torch.float32, torch.float64, torch.float16, torch.bfloat16


@pytest.mark.parametrize(
    ("shape", "options", "tier", "launch"),
    [
        ((8192, 32000), {}, "rows", {"source": "loss_rows.cu", "threads_per_row": 128, "then": "loss_total.cu"}),
        ((8192, 300), {}, "rows", {"source": "loss_rows.cu", "threads": 256, "vec_size": 4, "access": "aligned"}),
        ((4, 151936), {}, "rows", {"parts_per_row": 25, "then": "loss_merge.cu, loss_total.cu"}),
        ((8192, 10), {}, "staged", {"source": "loss_staged.cu", "threads_per_row": 1, "grid": 32}),
        ((64, 1000, 14, 14), {}, "columns", {"source": "loss_columns.cu", "threads_x": 8, "threads_y": 16}),
        ((8192, 300), {"options": ["probabilities"]}, "rows", {"source": "divergence.cu", "threads": 256}),
        ((8192, 300), {"function": "kl_div"}, "rows", {"source": "divergence.cu", "vec_size": 4}),
        ((64, 1000, 30), {"function": "kl_div", "dim": 1}, "columns", {"then": "divergence_merge.cu"}),
        ((8192, 300), {"function": "log_prob"}, "rows", {"source": "loss_rows.cu"}),
        ((8192, 300), {"function": "entropy", "dim": 0}, "columns", {"source": "loss_columns.cu"}),
    ],
)
def test_explain_of_a_loss_on_a_gpu(shape, options, tier, launch):
    plan = onepass.explain(shape, device="h200", **{"function": "cross_entropy", **options})
    assert (plan.engine, plan.tier) == ("cuda", tier)
    assert plan.launch | launch == plan.launch


@pytest.mark.parametrize(
    ("shape", "options", "tier", "launch"),
    [
        ((64, 1024, 1024), {"options": ["mask"]}, "warp", {"source": "rows_onchip.cu", "access": "aligned"}),
        ((64, 2048, 2047), {"options": ["bias", "sink"]}, "block", {"threads": 64, "access": "predicated"}),
        ((64, 1024, 1024), {"options": ["mask"], "dim": 1}, "columns", {"source": "columns.cu"}),
        ((64, 1024, 1024), {"options": ["scale"], "function": "logsumexp"}, "warp", {"source": "rows_onchip.cu"}),
        ((8, 4, 2, 3, 5, 6, 7, 1024), {"options": ["mask"]}, "warp", {"grid": 20160}),
    ],
)
def test_explain_of_scores(shape, options, tier, launch):
    plan = onepass.explain(shape, dtype=BF16, device="h200", **options)
    assert (plan.engine, plan.tier) == ("cuda", tier)
    assert plan.launch | launch == plan.launch
    here = onepass.explain(shape, dtype=BF16, device="cpu", bandwidth=100, **options)
    assert (here.engine, here.tier) == ("cpu", "columns" if tier == "columns" else "rows")
    assert here.bytes == plan.bytes
    elements = torch.Size(shape).numel()
    assert 0 <= plan.bytes - (2 if "function" in options else 4) * elements <= 2 * elements


def test_scores_take_the_plans_of_calls_with_them():
    plain, scored = (onepass.explain((4096, 1024), device="h200", options=given) for given in ((), ("causal",)))
    assert plain.bytes == scored.bytes
    assert plain.launch != scored.launch
    assert onepass.explain((4096, 1024), device="mi300x", options=["causal"]).engine == "triton"


def test_explain_of_a_loss_takes_another_gpu():
    here, part = (
        onepass.explain((300, 32000), function="cross_entropy", device="h200", sm_count=count) for count in (132, 20)
    )
    assert ("parts_per_row" in here.launch, "parts_per_row" in part.launch) == (True, False)
    assert (here.bandwidth_gbs, part.bandwidth_gbs) == (4270, None)


def test_explain_of_a_loss_reads_as_that_of_a_softmax():
    text = str(onepass.explain((8192, 32000), dtype=BF16, function="cross_entropy", device="h200"))
    first, _, engine, tier, launch, moved, *_ = text.splitlines()
    assert first == "onepass.cross_entropy over dim 1 of [8192, 32000] bfloat16 on NVIDIA H200"
    assert (engine, tier) == ("  engine   cuda", "  tier     rows")
    assert launch.startswith("  launch   source loss_rows.cu, grid 1056, threads 128, threads per row 128, items per ")
    assert launch.endswith(", vec size 8, access aligned, then loss_total.cu")
    assert moved == f"  bytes    {8192 * (32000 * 2 + 8) + 2:,} read and written"


@pytest.mark.parametrize(
    ("options", "read", "made"),
    [
        ({}, 64 * 8, 4),
        ({"options": ["probabilities"]}, 64 * 300 * 4, 4),
        ({"options": ["return_lse"]}, 64 * 8, 4 + 64 * 4),
        ({"function": "log_prob"}, 64 * 8, 64 * 4),
        ({"function": "log_prob", "options": ["return_entropy"], "out_dtype": F64}, 64 * 8, 2 * 64 * 8),
        ({"function": "entropy"}, 0, 64 * 4),
        ({"function": "kl_div"}, 64 * 300 * 4, 64 * 4),
        ({"function": "segment_softmax", "segments": 5}, 6 * 8, 64 * 300 * 4),
        ({"function": "segment_softmax", "segments": 5, "options": ["bias"]}, 6 * 8 + 64 * 300 * 4, 64 * 300 * 4),
        ({"function": "segment_logsumexp", "segments": 5, "options": ["order"]}, (6 + 64) * 8, 5 * 300 * 4),
        ({"function": "segment_state", "segments": 5}, 6 * 8, 2 * 5 * 300 * 4),
    ],
)
def test_bytes_beside_the_input(options, read, made):
    plan = onepass.explain((64, 300), device="h200", **{"function": "cross_entropy", **options})
    assert plan.bytes == 64 * 300 * 4 + read + made


def test_explain_of_a_loss_looks_at_the_tensor():
    x = torch.empty(50 * 301 + 1)
    for first, access in ((0, "aligned"), (1, "predicated")):
        plan = onepass.explain(x[first : first + 50 * 300].view(50, 300), function="entropy", device="h200")
        assert plan.launch["access"] == access
    across = x[: 50 * 300].view(300, 50).t()
    assert onepass.explain(across, function="entropy", device="h200").tier == "columns"
    assert onepass.explain(torch.zeros(5), function="cross_entropy", device="h200").dim == (0,)
    assert onepass.explain(torch.zeros(()), function="entropy", device="h200").shape == (1,)


def test_explain_on_a_cpu():
    on_cpu = {"device": "cpu", "bandwidth": 100}
    tiers = {
        onepass.explain(shape, dim, function=function, **on_cpu).tier
        for function in ("log_prob", "kl_div")
        for shape, dim in (((64, 1000), 0), ((64, 4), 1))
    }
    assert tiers == {"columns"}
    plan = onepass.explain((64, 32000), function="cross_entropy", **on_cpu)
    assert (plan.engine, plan.tier, plan.launch["threads"]) == ("cpu", "rows", torch.get_num_threads())
    assert plan.launch["isa"] == native.status("isa")
    assert plan.launch["work_items"] >= 1
    plan = onepass.explain((100_000, 8), function="segment_softmax", segments=1000, **on_cpu)
    assert (plan.engine, plan.tier, plan.dim) == ("cpu", "segments", (0,))
    assert plan.launch.keys() == {"threads", "isa", "work_items", "grain_size"}


def test_explain_of_segments():
    plan = onepass.explain((100_000, 8), function="segment_softmax", segments=1000, device="h200", dtype=F16)
    assert (plan.engine, plan.tier, plan.dim, plan.launch["vec_size"]) == ("cuda", "segments", (0,), 4)
    assert plan.launch["source"].startswith("segments")
    x = torch.empty(100_000, 8)
    strided = onepass.explain(x, function="segment_softmax", segments=9, device="h200", out=torch.empty(8, 100_000).t())
    assert strided.launch["vec_size"] == 1
    cast = onepass.explain((64, 8), function="segment_softmax", segments=9, device="h200", out_dtype=F16)
    assert "the input is cast to torch.float16 first, into a temporary" in cast.notes
    with onepass.batch_invariant():
        plan = onepass.explain((1000, 8), function="segment_logsumexp", segments=9, device="h200")
    assert plan.launch["source"] == "segments_invariant.cu"


@pytest.mark.parametrize("function", OPTIONS)
@pytest.mark.parametrize("name", ["h200", "mi300x"])
def test_explain_of_the_triton_engine(name, function):
    segments = {"segments": 100} if function.startswith("segment_") else {}
    plan = onepass.explain((4096, 1000), function=function, device=name, engine="triton", **segments)
    assert plan.engine == "triton"
    assert plan.launch["grid"] * plan.launch["rows"] >= (100 if segments else 4096)
    assert plan.launch["num_warps"] * (64 if name == "mi300x" else 32) <= 1024


@pytest.mark.parametrize("function", OPTIONS)
def test_every_function_on_every_engine_is_explained(function):
    segments = {"segments": 100} if function.startswith("segment_") else {}
    for engine, device in (("cpu", "cpu"), ("cuda", "a100"), ("none", "meta")):
        for option in ((), *([option] for option in OPTIONS[function])):
            given = {"function": function, "options": option, "device": device, "bandwidth": 1, **segments}
            plan = onepass.explain((4096, 100), **given)
            assert (plan.function, plan.engine, plan.launch != {}) == (function, engine, engine != "none")
    empty = onepass.explain((4096, 0), function=function, device="h200", **segments)
    assert (empty.tier, empty.launch) == ("none", {})


def test_explain_says_where_there_is_no_kernel():
    x = torch.empty_strided((2,) * 8, [3**d for d in range(8)])
    plan = onepass.explain(x, function="entropy", device="h200")
    assert (plan.engine, plan.tier, plan.launch) == ("cuda", "arithmetic", {})
    assert "more than 6 dims" in plan.notes[0]
    assert "2**30" in plan.notes[0]
    plan = onepass.explain(x, function="segment_softmax", segments=1, device="h200", out=x)
    assert plan.tier == "arithmetic"
    assert onepass.explain((1, 2**30), function="kl_div", device="h200").tier == "arithmetic"


@pytest.mark.parametrize(
    ("arguments", "options", "error", "words"),
    [
        (((3, 4),), {"function": "state", "options": ["weight"]}, ValueError, "options takes none here; got 'weight'"),
        (((3, 4),), {"function": "kl_div", "options": ["weight"]}, ValueError, "takes temperature; got 'weight'"),
        (((3, 4),), {"function": "kl_div", "options": "temperature"}, TypeError, "a sequence of names"),
        (((3, 4), 0), {"function": "cross_entropy"}, ValueError, "its classes in dim 1, got dim 0"),
        (((3, 4), (0, 1)), {"function": "entropy"}, TypeError, r"entropy takes one dim, got \(0, 1\)"),
        (((3, 4), 2), {"function": "entropy"}, IndexError, "got 2"),
        (((),), {"function": "cross_entropy"}, ValueError, "a tensor without dims"),
        (((3, 4),), {"function": "cross_entropy", "out_dtype": F64}, ValueError, "cross_entropy has no dtype="),
        (((3, 4),), {"function": "log_prob", "out_dtype": torch.int8}, NotImplementedError, "int8"),
        (((3, 4),), {"function": "entropy", "out": torch.zeros(3)}, ValueError, "out is a tensor of the input's shape"),
        (((3, 4),), {"function": "softmax", "segments": 3}, ValueError, "segments goes with a function of segments"),
        (((3, 4),), {"function": "segment_softmax"}, ValueError, "takes segments=, how many there are, got None"),
        (((3, 4),), {"function": "segment_softmax", "segments": -1}, ValueError, "got -1"),
        (((),), {"function": "segment_softmax", "segments": 1}, ValueError, "a tensor without dims"),
        (((3, 4),), {"function": "segment_state", "segments": 1, "out_dtype": F16}, ValueError, "has no dtype="),
        (((3, 4),), {"function": "kl_div", "device": "h200", "engine": "cpu"}, RuntimeError, "'cpu' cannot run"),
        (((3, 4),), {"function": "kl_div", "engine": "cuda", "device": "cpu"}, RuntimeError, "serves CUDA tensors"),
    ],
)
def test_explain_refuses(arguments, options, error, words):
    with pytest.raises(error, match=words):
        onepass.explain(*arguments, **options)


def test_explain_of_items_that_move():
    """Of four bytes each: there and back by two passes of a read and a write, with eight bytes of places a way."""
    given = {"function": "segment_softmax", "segments": 10, "options": ["order"], "device": "h200"}
    items = onepass.item_route.LEAST
    moved, stay = (onepass.explain((n,), **given) for n in (items, items - 1))
    assert any("items move to their order" in note for note in moved.notes)
    assert moved.bytes == items * (2 * 4 + 2 * (4 * 4 + 8)) + 11 * 8
    assert not any("move" in note for note in stay.notes)
    assert stay.bytes < moved.bytes / 2
