"""Every rung of the gallery: its values, its layouts, what it refuses, and its launch parameters."""

from __future__ import annotations

import importlib.util
import math
import os
import subprocess
import sys

import pytest
import torch

from lib.gallery import every_rung
from lib.support import assert_defined, maker
from onepass.tools.gallery import RUNGS, Rung
from onepass.tools.gallery.checks import DTYPES
from onepass.tools.gallery.rung import header_of

INF, NAN = math.inf, math.nan
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
# torch.compile takes seconds for each shape on a CPU
SHAPES = [(1, 1), (1, 2), (3, 7), (9, 32), (17, 33), (5, 781), (2, 1024), (3, 1025), (40, 64), (2, 5003)]


def shapes_for(rung: Rung, shapes):
    return shapes[4:6] if rung.name == "naive-compile" else shapes


# Values --------------------------------------------------------------------------------------------------------


@every_rung
@every_dtype
def test_values(rung, device, dtype):
    make = maker(dtype, device, scale=3.0)
    for shape in shapes_for(rung, SHAPES):
        x = make(*shape)
        y = rung(x)
        assert y.shape == x.shape
        assert y.dtype == dtype
        assert_defined("softmax", y, x, 1, f" by {rung.name}")


@every_rung
def test_input_is_left_alone_and_results_repeat(rung, device):
    x = maker(torch.float32, device)(5, 781)
    before = x.clone()
    first = rung(x)
    assert torch.equal(rung(x), first)
    assert torch.equal(x, before)


@every_rung
def test_special_values_are_torch_s(rung, device):
    """-inf in a row, a row of -inf, a +inf, a NaN, the largest and the smallest floats, -inf for whole chunks."""
    x = maker(torch.float32, device)(10, 97)
    x[0, 5:60] = -INF
    x[1] = -INF
    x[2, 96] = INF
    x[3, 0] = NAN
    x[4] = torch.finfo(torch.float32).max
    x[5] = torch.finfo(torch.float32).min
    x[6, :96] = -INF
    x[7] = torch.tensor([1e-45, -1e-45], device=device).repeat(49)[:97]
    x[8, 3], x[8, 50] = INF, -INF
    for kwargs in ({}, {"block_size": 16}) if rung.name == "triton-online" else ({},):
        torch.testing.assert_close(rung(x, **kwargs), torch.softmax(x, 1), equal_nan=True)


@every_rung
def test_rows_far_from_zero(rung, device):
    """Rows of large negative, of large positive numbers and of both: what a wrong initial maximum gets wrong."""
    x = maker(torch.float32, device)(6, 300)
    for row, shift in enumerate((-1e4, 1e4, -200.0, 3e38, -3e38, 0.0)):
        x[row] += shift
    assert_defined("softmax", rung(x), x, 1)


@every_rung
def test_rounding_once(rung, device):
    """Half types are summed in float32: 4000 equal elements give 1/4000 to the last place."""
    for dtype in (torch.float16, torch.bfloat16):
        x = torch.full((2, 4000), 1.5, dtype=dtype, device=device)
        y = rung(x)
        want = torch.tensor(1 / 4000, dtype=dtype)
        step = want.item() * torch.finfo(dtype).eps
        assert (y.cpu().double() - want.double()).abs().max() <= step


# Layouts -------------------------------------------------------------------------------------------------------


@every_rung
@every_dtype
def test_row_strides_and_offsets(rung, device, dtype):
    make = maker(dtype, device)
    # naive-compile takes seconds a layout
    inputs = [
        make(7, 70)[:, 3:50],
        make(1, 33).expand(4, 33),
        make(12, 40)[1::3],
        make(5, 40)[:, 39:],
        make(90)[1:].view(1, 89),
    ]
    for x in inputs[:1] if rung.name == "naive-compile" else inputs:
        assert_defined("softmax", rung(x), x, 1, f" by {rung.name}")


@every_rung
def test_out_of_any_row_stride_and_nothing_beside_it(rung, device):
    if not rung.takes_out:
        with pytest.raises(TypeError, match="takes no out"):
            rung(torch.zeros(2, 3, device=device), out=torch.zeros(2, 3, device=device))
        return
    for shape in ((6, 45), (3, 1030), (1, 1)):
        x = maker(torch.float32, device)(*shape)
        store = torch.full((shape[0] + 2, shape[1] + 11), NAN, device=device)
        out = store[1:-1, 5:-6]
        assert rung(x, out=out) is out
        assert_defined("softmax", out, x, 1)
        assert int(store.isnan().sum()) == store.numel() - out.numel()


@every_rung
def test_empty(rung, device):
    for shape in ((0, 5), (5, 0), (0, 0)):
        assert rung(torch.zeros(shape, device=device)).shape == shape


# Refusals ------------------------------------------------------------------------------------------------------


@every_rung
def test_refusals(rung, device):
    x = torch.randn(4, 6, device=device)
    bad = [
        (ValueError, r"\(M, N\), got x of shape \(6,\)", (x[0],), {}),
        (ValueError, r"got x of shape \(2, 2, 6\)", (x.view(2, 2, 6),), {}),
        (TypeError, "float32, float16 and bfloat16, got x of torch.float64", (x.double(),), {}),
        (TypeError, "torch.int64", (x.long(),), {}),
        (TypeError, "must be a tensor, got list", ([[1.0]],), {}),
        (ValueError, r"unit stride, got x with strides \(1, 6\)", (x.t(),), {}),
        (TypeError, "got num_wraps; it takes ", (x,), {"num_wraps": 4}),
    ]
    if rung.takes_out:
        bad += [
            (
                ValueError,
                r"shape of x, torch.Size\(\[4, 6\]\); got torch.Size\(\[4, 5\]\)",
                (x,),
                {"out": x[:, 1:].clone()},
            ),
            (ValueError, "dtype of x", (x,), {"out": x.half()}),
            (ValueError, "must not overlap x", (x,), {"out": x}),
            (ValueError, "rows of out must not overlap", (x,), {"out": torch.empty(6, device=device).expand(4, 6)}),
        ]
    for error, words, args, kwargs in bad:
        with pytest.raises(error, match=words) as info:
            rung(*args, **kwargs)
        assert str(info.value).startswith(rung.name + ":")


def test_a_rung_that_cannot_run_says_why():
    x = torch.zeros(2, 2, device="meta")
    for name in ("cuda-warp", "cpu-online", "triton-row"):
        with pytest.raises(RuntimeError, match=f"{name}: cannot run on meta: "):
            RUNGS[name](x)


def test_torchscript_that_is_gone_is_told(monkeypatch):
    from onepass.tools.gallery import naive_jit

    def gone(*args, **kwargs):
        raise RuntimeError("torch.jit.script is not supported on this Python\nand more lines")

    monkeypatch.setattr(torch.jit, "script", gone)
    naive_jit._scripted.cache_clear()
    naive_jit.missing.cache_clear()
    try:
        with pytest.raises(RuntimeError, match="naive-jit: cannot run on cpu: torch"):
            RUNGS["naive-jit"](torch.zeros(2, 2))
    finally:
        naive_jit._scripted.cache_clear()
        naive_jit.missing.cache_clear()


@every_rung
def test_limits_of_the_idea(rung, device):
    """A row that no tile covers is refused by name; the rungs whose idea takes it, take it."""
    x = torch.zeros(1, 65537, device=device)
    if rung.name in ("triton-row", "triton-persistent"):
        with pytest.raises(ValueError, match=f"{rung.name}: .*65536.* got N = 65537"):
            rung(x)
    elif rung.name != "naive-compile":
        assert_defined("softmax", rung(x), x, 1)
    if rung.name in ("triton-row", "triton-online"):
        assert "2147483647, got M = 2147483648" in rung.refuses(2**31, 4, torch.float32)


# Launch parameters ---------------------------------------------------------------------------------------------

VALUES = {
    "num_warps": (1, 2, 8, 32),
    "num_stages": (1, 2, 3),
    "maxnreg": (64, 128),
    "block_size": (512, 1024),
    "programs": (1, 2, 7, 1000),
    "threads": (32, 64, 512, 1024),
    "blocks": (1, 3, 100),
}
WRONG = {
    "num_warps": (0, 3, 64, -1),
    "num_stages": (0, 17),
    "num_ctas": (0, 3, 32),
    "maxnreg": (8, 256),
    "block_size": (0, 500, 1 << 21),
    "programs": (0,),
    "threads": (0, 16, 33, 1056, 2048),
    "blocks": (0, 2**31),
}


@every_rung
def test_launch_parameters(rung, device):
    x = maker(torch.float32, device)(11, 300)
    for name in rung.options:
        for value in VALUES.get(name, ()):
            assert_defined("softmax", rung(x, **{name: value}), x, 1, f" by {rung.name} with {name}={value}")
        for value in WRONG[name]:
            with pytest.raises(ValueError, match=rf"^{rung.name}: {name} must be .*; got {value}$"):
                rung(x, **{name: value})
        for value in ("4", 4.0, True):
            with pytest.raises(TypeError, match=rf"^{rung.name}: {name} must be an int"):
                rung(x, **{name: value})
    if rung.name in ("triton-row", "triton-persistent"):
        with pytest.raises(ValueError, match="block_size must cover a row of 300, 512 to 65536; got 256"):
            rung(x, block_size=256)
    if rung.name == "triton-online":
        for block in (1, 2, 64):
            assert_defined("softmax", rung(x[:2, :65], block_size=block), x[:2, :65], 1)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="this is that process")
def test_triton_s_rungs_under_its_interpreter():
    """The tests above, for the Triton rungs on the CPU: Triton reads the variable when it is imported."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        __file__,
        "-k",
        "triton and cpu",
        "-p",
        "no:xdist",
        "-p",
        "no:cacheprovider",
    ]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "TRITON_INTERPRET": "1"})
    if "needs NumPy" in done.stdout:
        pytest.skip("the interpreter of this Triton does not run with this NumPy")
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout


# Headers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rung", RUNGS.values(), ids=lambda r: r.name)
def test_every_file_is_short_and_has_its_header(rung):
    assert rung.path.is_file()
    assert len(rung.source.splitlines()) <= 160
    head = rung.source.removeprefix('"""').removeprefix("// ")
    assert head.startswith(f"{rung.name}: ")
    for text in (rung.header.idea, rung.header.traffic_text, rung.header.limit):
        assert text[-1] == "."
    cached = rung.header.cached
    assert cached is None or cached.ratio(100, 1000) < rung.header.traffic.ratio(100, 1000)


def test_traffic():
    assert RUNGS["naive"].header.traffic.elements(4096, 781) == (5 * 4096 * 781 + 2 * 4096, 3 * 4096 * 781 + 2 * 4096)
    assert RUNGS["triton-row"].header.traffic.elements(10, 7) == (70, 70)
    assert RUNGS["cuda-block"].header.traffic.ratio(10, 7) == 2.0
    assert RUNGS["cuda-online"].header.cached.ratio(10, 7) == 1.0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = 1", "lacks Idea, Traffic, Limit"),
        ('"""a: b\n\nIdea: c.\n\nTraffic: reads MN, writes MN.\n"""', "lacks Limit"),
        ("// Idea: a\n//\n// Traffic: some.\n//\n// Limit: b", "no 'reads"),
        ("// Idea: a\n//\n// Traffic: reads M + N, writes MN.\n//\n// Limit: b", "not a count"),
    ],
)
def test_a_bad_header_is_told(text, words):
    with pytest.raises(ValueError, match=words):
        header_of(text)
