"""Every variant of the gallery: its values, its layouts, its errors, its launch parameters and its header."""

from __future__ import annotations

import math
import os

import pytest
import torch

from lib.gallery import every_variant, needs_triton
from lib.scripts import run_python
from lib.support import assert_defined, maker
from lib.warmup import needs_nvrtc
from onepass import native
from onepass.tools.gallery import VARIANTS
from onepass.tools.gallery.native_calls import nvrtc_options
from onepass.tools.gallery.variants import DTYPES, Count, Traffic, parse_header

INF, NAN = math.inf, math.nan
every_dtype = pytest.mark.parametrize("dtype", [getattr(torch, name) for name in DTYPES], ids=DTYPES)
# torch.compile takes seconds for each shape on a CPU
SHAPES = [(1, 1), (1, 2), (3, 7), (9, 32), (17, 33), (5, 781), (2, 1024), (3, 1025), (40, 64), (2, 5003)]


@every_variant
@every_dtype
def test_values(variant, device, dtype):
    make = maker(dtype, device, scale=3.0)
    for shape in SHAPES[4:6] if variant.name == "naive-compile" else SHAPES:
        x = make(*shape)
        before, y = x.clone(), variant(x)
        assert (y.shape, y.dtype) == (x.shape, dtype)
        assert_defined("softmax", y, x, 1, f" by {variant.name}")
        assert torch.equal(variant(x), y)
        assert torch.equal(x, before)


@every_variant
def test_special_values_give_torch_s_results(variant, device):
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
    for kwargs in ({}, {"block_size": 16}) if variant.name == "triton-online" else ({},):
        torch.testing.assert_close(variant(x, **kwargs), torch.softmax(x, 1), equal_nan=True)


@every_variant
def test_rows_far_from_zero(variant, device):
    """Rows of large negative numbers, of large positive ones and of both: a wrong initial maximum fails here."""
    x = maker(torch.float32, device)(6, 300)
    for row, shift in enumerate((-1e4, 1e4, -200.0, 3e38, -3e38, 0.0)):
        x[row] += shift
    assert_defined("softmax", variant(x), x, 1)


@every_variant
def test_results_are_rounded_once(variant, device):
    """float16 and bfloat16 are summed in float32: 4000 equal elements give 1/4000 to the last place."""
    for dtype in (torch.float16, torch.bfloat16):
        y = variant(torch.full((2, 4000), 1.5, dtype=dtype, device=device))
        want = torch.tensor(1 / 4000, dtype=dtype)
        assert (y.cpu().double() - want.double()).abs().max() <= want.item() * torch.finfo(dtype).eps


@every_variant
@every_dtype
def test_row_strides_and_offsets(variant, device, dtype):
    make = maker(dtype, device)
    inputs = [
        make(7, 70)[:, 3:50],
        make(1, 33).expand(4, 33),
        make(12, 40)[1::3],
        make(5, 40)[:, 39:],
        make(90)[1:].view(1, 89),
    ]
    for x in inputs[:1] if variant.name == "naive-compile" else inputs:  # it takes seconds per layout
        assert_defined("softmax", variant(x), x, 1, f" by {variant.name}")


@every_variant
def test_out_has_any_row_stride_and_nothing_beside_it_is_written(variant, device):
    if not variant.takes_out:
        x = torch.zeros(2, 3, device=device)
        with pytest.raises(TypeError, match="takes no out"):
            variant(x, out=x)
        return
    for shape in ((6, 45), (3, 1030), (1, 1)):
        x = maker(torch.float32, device)(*shape)
        store = torch.full((shape[0] + 2, shape[1] + 11), NAN, device=device)
        out = store[1:-1, 5:-6]
        assert variant(x, out=out) is out
        assert_defined("softmax", out, x, 1)
        assert int(store.isnan().sum()) == store.numel() - out.numel()


@every_variant
def test_empty(variant, device):
    for shape in ((0, 5), (5, 0), (0, 0)):
        assert variant(torch.zeros(shape, device=device)).shape == shape


@every_variant
def test_wrong_arguments(variant, device):
    x = torch.randn(4, 6, device=device)
    cases = [
        (ValueError, r"\(M, N\), got x of shape \(6,\)", x[0], {}),
        (ValueError, r"got x of shape \(2, 2, 6\)", x.view(2, 2, 6), {}),
        (TypeError, "float32, float16 and bfloat16, got x of torch.float64", x.double(), {}),
        (TypeError, "torch.int64", x.long(), {}),
        (TypeError, "must be a tensor, got list", [[1.0]], {}),
        (ValueError, r"unit stride, got x with strides \(1, 6\)", x.t(), {}),
        (TypeError, "got num_wraps; it takes ", x, {"num_wraps": 4}),
    ]
    if variant.takes_out:
        shapes = r"shape of x, torch.Size\(\[4, 6\]\); got torch.Size\(\[4, 5\]\)"
        cases += [
            (ValueError, shapes, x, {"out": x[:, 1:].clone()}),
            (ValueError, "dtype of x", x, {"out": x.half()}),
            (ValueError, "must not overlap x", x, {"out": x}),
            (ValueError, "rows of out must not overlap", x, {"out": torch.empty(6, device=device).expand(4, 6)}),
        ]
    for error, message, given, kwargs in cases:
        with pytest.raises(error, match=f"^{variant.name}: .*{message}"):
            variant(given, **kwargs)


def test_a_variant_that_cannot_run_says_why():
    x = torch.zeros(2, 2, device="meta")
    for name in ("cuda-warp", "cpu-online", "triton-row"):
        with pytest.raises(RuntimeError, match=f"{name}: cannot run on meta: "):
            VARIANTS[name](x)


def test_a_torch_without_torchscript_is_an_error(monkeypatch):
    from onepass.tools.gallery import naive_jit

    def script(*args, **kwargs):
        raise RuntimeError("torch.jit.script is not supported on this Python\nand more lines")

    monkeypatch.setattr(torch.jit, "script", script)
    monkeypatch.setattr(naive_jit, "_scripted", naive_jit._scripted.__wrapped__)
    monkeypatch.setattr(naive_jit, "missing", naive_jit.missing.__wrapped__)
    with pytest.raises(RuntimeError, match="naive-jit: cannot run on cpu: torch"):
        VARIANTS["naive-jit"](torch.zeros(2, 2))


@every_variant
def test_limits_of_the_idea(variant, device):
    """A row that no tile covers is refused by name; the variants whose idea takes it compute it."""
    x = torch.zeros(1, 65537, device=device)
    if variant.name in ("triton-row", "triton-persistent"):
        with pytest.raises(ValueError, match=f"{variant.name}: .*65536.* got N = 65537"):
            variant(x)
    elif variant.name != "naive-compile":
        assert_defined("softmax", variant(x), x, 1)
    if variant.name in ("triton-row", "triton-online"):
        assert "2147483647 of them; got M = 2147483648" in variant.refuses(2**31, 4, torch.float32)


# Launch parameters -----------------------------------------------------------------------------------------------

VALUES = {  # name -> (right values, wrong ones)
    "num_warps": ((1, 2, 8, 32), (0, 3, 64, -1)),
    "num_stages": ((1, 2, 3), (0, 17)),
    "num_ctas": ((), (0, 3, 32)),
    "maxnreg": ((64, 128), (8, 256)),
    "block_size": ((512, 1024), (0, 500, 1 << 21)),
    "programs": ((1, 2, 7, 1000), (0,)),
    "threads": ((32, 64, 512, 1024), (0, 16, 33, 1056, 2048)),
    "blocks": ((1, 3, 100), (0, 2**31)),
}


@every_variant
def test_launch_parameters(variant, device):
    x = maker(torch.float32, device)(11, 300)
    for name in variant.launch_params:
        right, wrong = VALUES[name]
        for value in right:
            assert_defined("softmax", variant(x, **{name: value}), x, 1, f" by {variant.name} with {name}={value}")
        for value in wrong:
            with pytest.raises(ValueError, match=rf"^{variant.name}: {name} must be .*; got {value}$"):
                variant(x, **{name: value})
        for value in ("4", 4.0, True):
            with pytest.raises(TypeError, match=rf"^{variant.name}: {name} must be an int"):
                variant(x, **{name: value})
    if variant.name in ("triton-row", "triton-persistent"):
        with pytest.raises(ValueError, match="block_size must cover a row of 300, 512 to 65536; got 256"):
            variant(x, block_size=256)
    if variant.name == "triton-online":
        for block in (1, 2, 64):
            assert_defined("softmax", variant(x[:2, :65], block_size=block), x[:2, :65], 1)


@needs_triton
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="this is that process")
def test_triton_variants_in_the_interpreter():
    """The tests above, for the Triton variants on the CPU: Triton reads the variable when it is imported."""
    options = ("-k", "triton and cpu", "-p", "no:xdist", "-p", "no:cacheprovider")
    done = run_python("-m", "pytest", __file__, *options, TRITON_INTERPRET="1")
    if "needs NumPy" in done.stdout:
        pytest.skip("the interpreter of this Triton does not run with this NumPy")
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout


@needs_nvrtc
def test_cuda_sources_compile_for_gpus_that_are_not_here(tmp_path):
    for name in ("warp", "block", "online"):
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            cubin = tmp_path / f"{name}-{dtype}"
            native.compile_source(f"cuda_{name}.cu", nvrtc_options(dtype, 64), 90, cubin)
            assert cubin.stat().st_size > 1000


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_every_file_is_short_and_has_its_header(variant):
    assert len(variant.source.splitlines()) <= 160
    head = variant.source.removeprefix('"""').removeprefix("// ")
    assert head.startswith(f"{variant.name}: ")
    for text in (variant.header.idea, variant.header.traffic_text, variant.header.limit):
        assert text[-1] == "."
    cached = variant.header.cached
    assert cached is None or cached.elements(100, 1000) < variant.header.traffic.elements(100, 1000)


def test_the_header_has_the_traffic():
    naive, online = VARIANTS["naive"].header, VARIANTS["cuda-online"].header
    assert (naive.traffic, naive.cached) == (Traffic(Count(5, 2), Count(3, 2)), None)
    assert (online.traffic, online.cached) == (Traffic(Count(2), Count(1)), Traffic(Count(1), Count(1)))
    for header in (naive, online):
        assert header.traffic_text.startswith(f"reads {header.traffic.reads}, writes {header.traffic.writes}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", "lacks Idea, Traffic, Limit"),
        ('"""a: b\n\nIdea: c.\n\nTraffic: reads MN, writes MN.\n"""', "lacks Limit"),
        ("// Idea: a\n//\n// Traffic: some.\n//\n// Limit: b", "no 'reads"),
        ("// Idea: a\n//\n// Traffic: reads M + N, writes MN.\n//\n// Limit: b", "no 'reads"),
    ],
)
def test_a_wrong_header_is_an_error(text, message):
    with pytest.raises(ValueError, match=message):
        parse_header(text)
