"""Warming up losses, segments and scores: calls ask for no kernels but those that are listed, and these compile."""

import functools
import random
from typing import Any

import pytest
import torch

import onepass
from lib.plan_tables import names
from lib.scripts import python_output
from lib.support import slow
from lib.warmup import BF16, F16, F32, F64, call, needs_nvrtc
from onepass import native
from onepass._call_names import LOSSES, OPTIONS, SCORED, words
from onepass._warmup import check, kernels_of

FORWARD, BACKWARD = native.PASSES[:2]
H200 = 90, 132, ""
LENGTHS = (2, 10, 33, 100, 1000, 4096, 50257, 151936)
DTYPES = (F32, F64, F16, BF16)

# The kernels that are listed


@functools.cache
def listed(asked: str, which: str, types: tuple[Any, Any], lengths: tuple[int, ...], dims: bool) -> set[str]:
    return set(native.call_kernels(asked, which, types, -1, 90, lengths, dims))


def random_rows(rng: random.Random, n: int, dims: bool) -> tuple[list[int], int]:
    """Sizes, and the dim of n classes."""
    rows = int(2 ** rng.uniform(0, rng.choice([4, 10, 20])))
    if not dims:
        return [rows, n], 1
    inner = int(2 ** rng.uniform(0, 12))
    return [max(1, rows // inner), n, inner], 1


@pytest.mark.parametrize("which", [FORWARD, BACKWARD])
@pytest.mark.parametrize("dims", [False, True], ids=["rows", "all dims"])
@pytest.mark.parametrize("function", LOSSES)
@pytest.mark.parametrize("dtype", DTYPES, ids=names)
def test_calls_of_losses_ask_for_no_other_kernels(dtype, function, dims, which):
    rng = random.Random(0)
    for _ in range(200):
        options = [option for option in OPTIONS[function] if rng.random() < 0.2]
        sizes, dim = random_rows(rng, rng.choice(LENGTHS), dims)
        given = words(function, options), which, (dtype, dtype)
        address = rng.choice([0, 0, 1, 2, 3, 4, 6]) * dtype.itemsize
        strides = torch.empty(sizes, device="meta").stride()
        plan = native.call_plan(given[0], given[2], sizes, strides, dim, 0, address, H200, which)
        assert set(plan["kernels"]) <= listed(*given, (sizes[dim],), dims), (sizes, options, address)


@pytest.mark.parametrize("which", [FORWARD, BACKWARD])
@pytest.mark.parametrize("function", LOSSES)
def test_rows_of_any_length_ask_for_no_other_kernels(function, which):
    rng, given = random.Random(0), (function, which, (BF16, BF16))
    for _ in range(2000):
        sizes = [int(2 ** rng.uniform(0, 18)), int(2 ** rng.uniform(0, rng.choice([6, 12, 22])))]
        plan = native.call_plan(function, given[2], sizes, (sizes[1], 1), 1, 0, rng.choice([0, 2, 4, 8]), H200, which)
        assert set(plan["kernels"]) <= listed(*given, (), False), sizes


@pytest.mark.parametrize("which", [FORWARD, BACKWARD])
@pytest.mark.parametrize("function", [name for name in OPTIONS if name not in (*LOSSES, *SCORED)])
@pytest.mark.parametrize("types", [(F32, F32), (F64, F64), (BF16, BF16), (F16, F32)], ids=names)
def test_calls_of_segments_ask_for_no_other_kernels(types, function, which):
    if which == BACKWARD and function in ("segment_state", "segment_logsumexp"):
        types = types[:1] * 2
    if function == "segment_state":
        types = types[0], F64 if types[0] is F64 else F32
        if which == BACKWARD:
            return  # it has none
    rng = random.Random(0)
    for _ in range(200):
        options = [option for option in OPTIONS[function] if rng.random() < 0.5]
        mean, segments, heads = 2 ** rng.randrange(12), int(2 ** rng.uniform(0, 12)), rng.choice([1, 2, 3, 8, 20, 64])
        sizes = [mean * segments, heads] if heads > 1 else [mean * segments]
        strides = torch.empty(sizes, device="meta").stride()
        given = words(function, options), which, types
        address = rng.choice([0, 0, 1, 2, 4]) * types[0].itemsize
        plan = native.call_plan(given[0], types, sizes, [*strides, *strides], 0, segments, address, H200, which)
        for lengths in ((), (mean,)):
            assert set(plan["kernels"]) <= listed(*given, lengths, False), (sizes, segments, options)


@pytest.mark.parametrize("which", [FORWARD, BACKWARD])
@pytest.mark.parametrize("function", ["softmax", "log_softmax", "logsumexp"])
@pytest.mark.parametrize("types", [(F32, F32), (F64, F64), (BF16, BF16), (F16, F32)], ids=names)
def test_calls_with_scores_ask_for_no_other_kernels(types, function, which):
    rng = random.Random(0)
    for _ in range(60):
        options = [option for option in OPTIONS[function] if rng.random() < 0.3]
        sizes, dim = random_rows(rng, rng.choice(LENGTHS), False)
        given = words(function, options), which, types
        address = rng.choice([0, 0, 1, 2, 3, 4, 6]) * types[0].itemsize
        strides = torch.empty(sizes, device="meta").stride()
        made = strides
        if function == "logsumexp" and which == FORWARD:
            made = (1, 0)
        plan = native.call_plan(given[0], types, sizes, [*strides, *made], dim, 0, address, H200, which)
        if plan:
            assert set(plan["kernels"]) <= listed(*given, (sizes[dim],), False), (sizes, options, address)


def test_gradients_of_scores_are_listed():
    def listed_types(functions: list[str], options: list[str]) -> set[Any]:
        found = kernels(functions, [BF16], backward=True, options=options)
        return {(k.function, k.x_type, k.y_type, k.which) for k in found}

    both = {("softmax", BF16, BF16, FORWARD), ("softmax", BF16, BF16, BACKWARD)}
    assert listed_types(["softmax"], ["mask"]) == both
    assert listed_types(["softmin"], ["mask"]) == both  # of scores that are negated
    assert listed_types(["softmax"], ["bias"]) == {*both, ("softmax", BF16, F32, BACKWARD)}
    lse = {("logsumexp", BF16, to, which) for to in (BF16, F32) for which in (FORWARD, BACKWARD)}
    assert listed_types(["logsumexp"], ["bias"]) == lse
    # Another function's options leave a softmax without scores.
    plain = kernels(["softmax", "kl_div"], [BF16], options=["temperature"])
    assert plain[: len(kernels(["softmax"], [BF16]))] == kernels(["softmax"], [BF16])


def test_options_make_other_kernels():
    plain = listed("cross_entropy", FORWARD, (BF16, BF16), (1000,), False)
    for option in ("weight", "label_smoothing", "softcap", "probabilities"):
        assert not plain & listed(f"cross_entropy {option}", FORWARD, (BF16, BF16), (1000,), False), option
    for option in OPTIONS["softmax"]:
        assert not listed("softmax", FORWARD, (F32, F32), (100,), False) & listed(
            f"softmax {option}", FORWARD, (F32, F32), (100,), False
        ) or option in ("scale", "empty", "sink"), option
    for function, option in (("log_prob", "temperature"), ("segment_softmax", "bias"), ("segment_softmax", "order")):
        both = [listed(asked, FORWARD, (F32, F32), (100,), False) for asked in (function, f"{function} {option}")]
        assert both[0] != both[1], option
    with_lse = listed("cross_entropy return_lse", BACKWARD, (BF16, BF16), (1000,), False)
    assert not with_lse & listed("cross_entropy", BACKWARD, (BF16, BF16), (1000,), False)


def kernels(functions: list[str], dtypes: list[Any], **options: Any) -> list[Any]:
    return kernels_of(check(dtypes, functions, [100], 90), -1, 90, [100], **options)


def test_a_kernel_that_several_calls_ask_for_is_listed_once():
    one = kernels(["cross_entropy"], [BF16], backward=True)
    assert kernels(["cross_entropy"], [BF16, (BF16, F32)], backward=True) == one
    assert len(kernels(["cross_entropy"], [BF16])) < len(one)
    assert kernels(["softmax", "cross_entropy"], [BF16]) == kernels(["softmax"], [BF16]) + kernels(
        ["cross_entropy"], [BF16]
    )


# Among a plan's numbers, the parts that a kernel of segments is compiled for, and two of those.
SEGMENT_PARTS, OFFSETS, MOVES = 10, 64, 128


@pytest.mark.parametrize(("options", "part", "count"), [((), OFFSETS, 1), (("order",), MOVES, 3)])
def test_what_finds_offsets_and_moves_items_is_listed(options, part, count):
    listed = kernels(["segment_softmax"], [BF16], options=options)
    assert sum(bool(k.plan[SEGMENT_PARTS] & part) for k in listed) == count
    in_place = [k for k in listed if not k.plan[SEGMENT_PARTS] & (OFFSETS | MOVES)]
    assert any(k.plan[SEGMENT_PARTS] & 2 for k in in_place) == bool(options)  # by the order
    assert any(not k.plan[SEGMENT_PARTS] & 2 for k in in_place)


def test_functions_of_segments_read_what_is_cast_first():
    def types(functions: list[str], dtypes: list[Any], **options: Any) -> set[Any]:
        listed = kernels(functions, dtypes, **options)
        return {(k.x_type, k.y_type, k.which) for k in listed if not k.plan[SEGMENT_PARTS] & (OFFSETS | MOVES)}

    assert types(["segment_softmax"], [(F32, F16)]) == {(F16, F16, FORWARD)}
    assert types(["segment_softmax"], [(BF16, F32)], backward=True) == {(BF16, F32, FORWARD), (F32, BF16, BACKWARD)}
    lse = {(BF16, BF16, FORWARD), (BF16, F32, FORWARD), (BF16, BF16, BACKWARD)}
    assert types(["segment_logsumexp"], [BF16], backward=True) == lse
    assert types(["segment_state"], [BF16], backward=True) == {(BF16, F32, FORWARD)}


# They compile


FILLED: dict[str, tuple[list[str], list[str], dict[str, Any]]] = {
    "rows": (["cross_entropy"], [], {"backward": True}),
    "options": (["cross_entropy", "log_prob"], ["softcap", "return_lse", "temperature"], {"backward": True}),
    "divergence": (["kl_div", "entropy"], [], {"all_dims": True}),
    "probabilities": (["cross_entropy"], ["weight", "probabilities"], {"backward": True}),
    "segments": (["segment_softmax"], [], {}),
    "scores": (["softmax"], ["scale", "mask"], {"backward": True}),
    "gradients of segments": (["segment_log_softmax", "segment_logsumexp"], ["bias", "order"], {"backward": True}),
}


@needs_nvrtc
@pytest.mark.parametrize("what", [what if what == "rows" else slow(what) for what in FILLED])
def test_warmup_fills_the_cache(what, cache):
    functions, options, more = FILLED[what]
    given = {"functions": functions, "dtypes": [BF16], "lengths": [50257], "options": options, "arch": 90, **more}
    count = onepass.warmup(**given)
    assert count > 5
    assert len(list(cache.iterdir())) == count
    steps: list[tuple[int, int]] = []
    assert onepass.warmup(**given, progress=lambda *step: steps.append(step)) == count
    assert steps == [(0, 0)]
    flags = [f"--{name.replace('_', '-')}" for name in more]
    chosen = ["--options", ",".join(options)] if options else []
    asked = ["--functions", ",".join(functions), "--dtypes", "bf16", "--lengths", "50257", *chosen, *flags]
    said = call("--arch", "90", *asked).output
    assert said == f"{count} kernels for compute capability 9.0, 0 of them compiled now\n"


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"functions": ["cross_entropy"], "options": ["temperature"]}, ValueError, "weight, .*; got 'temperature'"),
        ({"functions": ["state"], "options": ["weight"]}, ValueError, "options takes none here; got 'weight'"),
        ({"functions": ["softmax"], "options": ["mask"], "all_dims": True}, ValueError, "the last dim"),
        ({"functions": ["kl_div"], "options": "temperature"}, TypeError, "a sequence of names, got 'temperature'"),
        ({"functions": ["nll"]}, ValueError, "cross_entropy, .*segment_state; got 'nll'"),
    ],
)
def test_wrong_arguments(options, error, words, cache):
    with pytest.raises(error, match=words):
        onepass.warmup(**{"arch": 90, **options})
    assert not cache.exists()


# With a GPU: calls of any sizes and alignment compile nothing, in a process of its own.
CALLS = """
import random, torch, onepass
from onepass import native
rng, bf16 = random.Random(0), torch.bfloat16

def view(*shape):
    size, first = torch.Size(shape).numel(), rng.choice([0, 0, 1, 2, 4, 7])
    return torch.randn(size + first, device="cuda", dtype=bf16)[first:].view(shape).requires_grad_()

def rows():
    n = int(2 ** rng.uniform(0, 18))
    return view(max(1, min(int(2 ** rng.uniform(0, 14)), 2**24 // n)), n)

def losses():
    x = rows()
    target = torch.randint(x.shape[1], (len(x),), device="cuda")
    onepass.cross_entropy(x, target).backward()
    onepass.log_prob(x, target).sum().backward()
    x = rows()
    onepass.kl_div(x, rng.choice([x.detach(), x.detach().clone().requires_grad_()])).sum().backward()

def scores():
    x = rows()
    mask = torch.rand(rng.choice([x.shape, x.shape[1:], (len(x), 1)]), device="cuda") > 0.1
    onepass.softmax(x, scale=0.5, mask=mask).sum().backward()

def segments():
    heads, counts = rng.choice([1, 2, 3, 8, 64]), torch.randint(2 ** rng.randrange(1, 12), (rng.randrange(1, 500),))
    x = view(int(counts.sum()), heads) if heads > 1 else view(int(counts.sum()))
    onepass.segment_softmax(x, onepass.Segments.from_lengths(counts).to("cuda")).sum().backward()

onepass.warmup(functions={functions}, dtypes=[bf16], backward=True, options={options})
before = native.counts()
for _ in range(200):
    {call}()
torch.cuda.synchronize()
assert native.counts() == before, (native.counts(), before)
"""


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("call", "functions", "options"),
    [
        ("losses", ["cross_entropy", "log_prob", "kl_div"], []),
        ("segments", ["segment_softmax"], []),
        ("scores", ["softmax"], ["scale", "mask"]),
    ],
)
def test_no_call_compiles_after_it(call, functions, options, cache):
    named = CALLS.replace("{functions}", str(functions)).replace("{options}", str(options))
    python_output(named.replace("{call}", call))
