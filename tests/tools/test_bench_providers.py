"""The providers: who runs, what each supports, how each is checked, and what becomes of a wrong one."""

import sys
from collections.abc import Callable
from dataclasses import replace
from math import prod
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from lib.bench import CASE, CPU, TINY, Odd, run, softmax
from lib.transcript import assert_snapshot
from onepass import reference
from onepass.tools.bench import providers, report
from onepass.tools.bench.cases import DIRECTIONS, FUNCTIONS, SUITES, Case
from onepass.tools.bench.correctness import Checker, make_inputs, reference_bytes
from onepass.tools.bench.gallery_providers import GalleryProvider
from onepass.tools.bench.provider import COPY, Provider
from onepass.tools.bench.providers import Liger, Naive, Onepass, Quack, Torch, TorchCompile
from onepass.tools.bench.registry import register, registry, select_providers
from onepass.tools.bench.runner import Runner
from onepass.tools.gallery import VARIANTS, Variant

CUDA = torch.device("cuda")
GALLERY = [name for name in VARIANTS if name != "naive"]
MATRIX = Case("tiny", "tiny 5x33", (5, 33))


def names(**options: Any) -> list[str]:
    return [p.name for p in select_providers(CPU, **options)[0]]


def test_who_runs() -> None:
    assert [*registry()] == [
        *("onepass", "onepass-cpu", "onepass-cuda", "onepass-triton", "torch", "torch-compile", "naive"),
        *("liger", "quack", *GALLERY),
    ]
    assert [name for name, p in registry().items() if p.gallery] == GALLERY
    here = [n for n in GALLERY if VARIANTS[n].unavailable(CPU) is None and not n.startswith("triton")]
    quick = ["onepass", "torch", "naive"]
    for options, expected in (
        ({"quick": True}, quick),
        ({"only": ("torch", "onepass-cpu")}, ["onepass-cpu", "torch"]),  # in the registry's order
        ({"skip": ("naive", "torch-compile")}, ["onepass", "torch"]),
        ({"gallery": True}, [*names(), *here]),
        ({"gallery": True, "quick": True}, [*quick, *(n for n in here if n != "naive-compile")]),
        ({"gallery": True, "skip": ("naive-jit",)}, [*names(), *(n for n in here if n != "naive-jit")]),
        ({"gallery": True, "only": ("naive-jit", "torch")}, ["torch", "naive-jit"]),
        ({"only": ("naive-jit", "torch")}, ["torch", "naive-jit"]),
    ):
        assert names(**options) == expected, options
    excluded = select_providers(CPU, quick=True)[1]
    assert {"onepass-cpu", "onepass-cuda", "torch-compile", "liger"} <= set(excluded)
    assert not set(GALLERY) & set(excluded)
    excluded = select_providers(CPU, quick=True, gallery=True)[1]
    assert (excluded["cuda-warp"], excluded["naive-compile"]) == ("runs only on NVIDIA GPUs", "not part of --quick")
    triton = registry()["triton-row"]
    assert triton.redundant(CPU) == "interprets its kernels on the CPU, which takes minutes"
    assert (triton.redundant(CUDA), registry()["cpu-online"].redundant(CPU)) == (None, None)
    # One engine runs beside auto only if it is named.
    assert list(run(CASE, Onepass(), Onepass("cpu"))[0]) == ["copy", "onepass"]
    rows, _ = run(CASE, Onepass(), Onepass("cpu"), named=frozenset({"onepass-cpu"}))
    assert (rows["onepass-cpu"].ok, rows["onepass-cpu"].engine) == (True, "cpu")


def test_a_kernel_joins_by_registering(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onepass.tools.bench.registry._REGISTRY", registry())
    odd = Odd(softmax)
    register(odd)
    assert select_providers(CPU, only=("odd",))[0] == [odd]
    for taken in (odd, COPY):
        with pytest.raises(ValueError, match="is registered already"):
            register(taken)


UNSUPPORTED: list[tuple[Case, str]] = [
    *[(Case("t", "f32, f16", (4, 1024)), dtype) for dtype in ("float32", "float16", "float64")],
    (Case("t", "row of 12", (4, 12)), "float32"),
    (Case("t", "row of 12", (4, 12)), "bfloat16"),
    (Case("t", "row of 33", (4, 33)), "float32"),
    (Case("t", "dim 1", (4, 1024), dim=(1,)), "bfloat16"),
    (Case("t", "dim 0", (4, 1024), dim=0), "float32"),
    (Case("t", "dims 0 and 1", (4, 1024), dim=(0, 1)), "float32"),
    (Case("t", "3 dims", (2, 4, 1024)), "float32"),
    (Case("t", "1 dim", (1024,)), "float32"),
    (Case("t", "transposed", (8, 16), layout="transposed"), "float32"),
    (Case("t", "backward", (4, 1024), direction="backward"), "float32"),
    (Case("t", "logsumexp", (4, 1024), function="logsumexp"), "float32"),
    (Case("t", "out_dtype", (4, 1024), out_dtype="float32"), "float16"),
    (Case("t", "1 row of 2**20", (1, 1 << 20)), "bfloat16"),
    (Case("t", "1 row of 2**20", (1, 1 << 20)), "float32"),
]


def test_what_others_do_not_support() -> None:
    text, others = "", (Quack(), Liger(), GalleryProvider(VARIANTS["naive"]))
    for case, dtype in UNSUPPORTED:
        reasons = [provider.unsupported(case, dtype) for provider in others]
        text += f"{case.name}, {dtype}: {'; '.join(filter(None, reasons)) or 'all do'}\n"
    assert_snapshot("unsupported", text)
    cases = [(c.at(d), d) for c in SUITES["row-lengths"].cases if c.function == "softmax" for d in c.dtypes]
    odd = (33, 781, 1025, 32001, 50257)
    assert {(c.row(), d) for c, d in cases if Quack().unsupported(c, d)} == {
        *((n, d) for n in odd for d in ("float32", "bfloat16")),
        (100, "bfloat16"),
    }


GRADIENT = Case("t", "t", (6, 40), direction="backward")


@pytest.mark.parametrize("function", ["softmax", "log_softmax", "logsumexp"])
@pytest.mark.parametrize("provider", [Onepass(), Torch()], ids=["onepass", "torch"])
def test_a_gradient_goes_into_the_given_output(provider: Provider, function: str) -> None:
    for dim, dtype in ((-1, "float32"), (0, "bfloat16")):
        inputs = make_inputs(replace(GRADIENT, dim=dim, function=function), dtype, CPU, 0)
        assert inputs.out is not None
        assert provider.writes_out(inputs)
        inputs.out.fill_(float("nan"))
        assert provider.prepare(inputs)() is inputs.out
        allocated = provider.prepare(replace(inputs, out=None))()
        assert allocated is not inputs.out
        torch.testing.assert_close(inputs.out, allocated)
    inputs = make_inputs(GRADIENT, "float32", CPU, 0)  # others have no such gradient and use autograd
    assert not any(other.writes_out(inputs) for other in (Naive(), TorchCompile()))
    assert not Torch().writes_out(make_inputs(replace(GRADIENT, function="softmin"), "float32", CPU, 0))
    assert Naive().prepare(inputs)() is not inputs.out


def test_naive_is_the_variant_of_the_gallery_where_that_supports_the_case() -> None:
    for dtype in ("float32", "float16", "bfloat16"):
        assert Naive().forward(MATRIX, dtype) is VARIANTS["naive"]
    for case, dtype in (
        (MATRIX, "float64"),
        (replace(MATRIX, dim=0), "bfloat16"),
        (replace(MATRIX, dim=(0, 1)), "float16"),
        (replace(MATRIX, out_dtype="float32"), "float16"),
        (replace(MATRIX, out_dtype="bfloat16"), "float32"),
        (replace(MATRIX, function="logsumexp"), "bfloat16"),
    ):
        assert Naive().forward(case, dtype) is not VARIANTS["naive"]
        rows, said = run(case, Naive(), dtype=dtype)  # the checker fills the output with NaN
        assert rows["naive"].ok, said


# Other packages, with modules that stand in for them


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Replaces the softmax of both packages."""

    def install(f: Callable[[torch.Tensor], torch.Tensor], version: str = "1.2.3") -> None:
        for name in ("liger_kernel", "liger_kernel.ops", "liger_kernel.ops.softmax", "quack", "quack.softmax"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        modules: Any = sys.modules
        modules["quack"].softmax = f  # as in the package, the function hides the module of its name
        modules["quack.softmax"].softmax = f
        modules["liger_kernel.ops.softmax"].LigerSoftmaxFunction = type("F", (), {"apply": staticmethod(f)})
        monkeypatch.setattr(providers, "version_of", lambda name: version)

    return install


def test_other_packages_are_unavailable_if_they_are_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for version, hip, reasons in (
        (None, None, ["liger-kernel is not installed", "quack-kernels is not installed"]),
        ("1.2.3", None, [None, None]),
        ("1.2.3", "6.4", [None, "needs an NVIDIA GPU"]),
    ):
        monkeypatch.setattr(providers, "version_of", lambda name, version=version: version)
        monkeypatch.setattr(torch.version, "hip", hip)
        assert [registry()[name].unavailable(CUDA) for name in ("liger", "quack")] == reasons
        assert {registry()[name].unavailable(CPU) for name in ("liger", "quack")} == {"does not support cpu tensors"}


@pytest.mark.parametrize("provider", [Quack(), Liger()], ids=lambda p: p.name)
def test_a_right_package_is_timed_and_a_nan_is_wrong(provider: Provider, install: Any) -> None:
    case = Case("t", "t", (4, 32))
    install(softmax)
    rows, said = run(case, provider, Torch())
    assert (rows[provider.name].ok, rows[provider.name].version, said) == (True, "1.2.3", [])
    install(lambda x: softmax(x).index_fill(1, torch.tensor([5]), float("nan")))
    rows, said = run(case, provider, Torch())
    row = rows[provider.name]
    assert (row.error or "").startswith("wrong: error nan at row 0, element 5")
    assert (row.median_us, len(said), rows["torch"].ok) == (None, 1, True)


def test_the_limit_of_liger_and_its_errors(install: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("out of resource: shared memory")

    for f, n, version, error in (
        (softmax, 65536, "0.8.5", None),
        (softmax, 65537, "0.8.5", "unsupported: Liger takes rows of at most 65536 elements"),
        (softmax, 65537, "0.9.0", None),
        (broken, 65537, "0.9.0", "raised: RuntimeError: out of resource: shared memory"),
    ):
        install(f, version)
        rows, said = run(Case("t", "t", (1, n)), Liger(), Torch())
        assert (rows["liger"].error, rows["liger"].ok, rows["torch"].ok) == (error, error is None, True)
        assert len(said) == (f is broken)
    monkeypatch.setitem(sys.modules, "quack.softmax", None)
    rows, _ = run(Case("t", "t", (4, 32)), Quack(), Torch())
    assert "ModuleNotFoundError" in (rows["quack"].error or "")
    assert rows["torch"].ok
    assert (run(CASE, Quack())[0]["quack"].error or "").startswith("unsupported")  # a row of 33 imports nothing


@pytest.fixture
def picky(monkeypatch: pytest.MonkeyPatch) -> tuple[Variant, Mock]:
    """A variant that keeps its launch parameters and refuses rows of more than 64."""
    f = Mock(side_effect=lambda x, out, **launch: out.copy_(reference.softmax(x, 1)))
    refuses = lambda rows, n, dtype: f"rows of 64, got {n}" if n > 64 else None  # noqa: E731
    monkeypatch.setitem(sys.modules, "onepass.tools.gallery.picky", SimpleNamespace(softmax=f, refuses=refuses))
    return Variant("picky", "naive.py", "picky:softmax", lambda device: None, ("num_warps", "threads")), f


def test_launch_parameters_and_refusals_of_a_variant(picky: Any) -> None:
    variant, f = picky
    for launch in ({"num_warps": 8}, {}):
        f.reset_mock()
        rows, said = run(MATRIX, GalleryProvider(variant, **launch))
        assert rows["picky"].ok, said
        assert f.call_args_list
        assert all({name: v for name, v in c.kwargs.items() if name != "out"} == launch for c in f.call_args_list)
    rows, _ = run(replace(MATRIX, shape=(5, 65)), GalleryProvider(variant))
    assert rows["picky"].error == "unsupported: rows of 64, got 65"
    for provider in (p for p in registry().values() if p.gallery):
        least = 16 * 5 * 33 if provider.name.startswith("naive") else 2 * 5 * 33
        assert provider.workspace(MATRIX, "bfloat16") == least


def test_variants_of_columns_and_of_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(
        columns=lambda x, out: out.copy_(torch.softmax(x, 0)),
        gradient=lambda y, grad, out: out.copy_(y * (grad - (y * grad).sum(1, keepdim=True))),
    )
    monkeypatch.setitem(sys.modules, "onepass.tools.gallery.more", module)
    made = {c: Variant(c, "naive.py", f"more:{c}", lambda device: None, computes=c) for c in ("columns", "gradient")}
    cases = {"rows": MATRIX, "columns": replace(MATRIX, dim=0), "gradient": replace(MATRIX, direction="backward")}
    for computes, variant in made.items():
        for of, case in cases.items():
            row = run(case, GalleryProvider(variant))[0][computes]
            assert row.ok == (of == computes), row.error
            assert of == computes or (row.error or "").startswith("unsupported: the variant ")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", VARIANTS)
def test_each_variant_of_the_cpu_is_right(name: str, dtype: str) -> None:
    reason = VARIANTS[name].unavailable(CPU)
    if reason is not None:
        pytest.skip(reason)
    provider = registry()[name]
    rows, said = run(MATRIX, provider, dtype=dtype)
    assert rows[name].ok, said
    assert rows[name].version
    assert provider.writes_out(make_inputs(MATRIX, dtype, CPU, 0)) == VARIANTS[name].takes_out


@pytest.mark.gpu
def test_each_variant_of_a_gpu_is_right_and_has_all_three_times() -> None:
    providers = [p for n, p in registry().items() if n in VARIANTS and p.unavailable(CUDA) is None]
    assert {"naive", "triton-row", "cuda-warp"} <= {p.name for p in providers}
    runner = Runner(CUDA, providers, budget=TINY, graph=True)
    for row in runner.run([(Case("t", "64x1000", (64, 1000)), "bfloat16")]).rows:
        others = {"cuda-columns": "takes the first dim of a matrix", "cuda-backward": "computes the backward"}
        if row.provider in others:
            assert row.error == f"unsupported: the variant {others[row.provider]}"
            continue
        assert row.ok, f"{row.provider}: {row.error}"
        assert all(us is not None and 0 < us < 1e5 for us in (row.median_us, row.call_us)), row.provider
        if not row.provider.endswith(("jit", "compile")):
            assert row.graph_us is not None, row.provider


# Every provider is checked before it is timed; a wrong one is shown and has no time

# A mistake, and what the row says of it. tests/conftest.py fixes no seed; the data depends on the case.
WRONG: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "zeros": (torch.zeros_like, "error 1.0e+00 at row"),
    "one element": (lambda x: softmax(x).index_fill(0, torch.tensor([3]), 0.5), " at row 3, element"),
    "a NaN": (lambda x: softmax(x).masked_fill(torch.arange(33) == 32, float("nan")), "error nan at row 0, element 32"),
    "no last element": (lambda x: torch.cat([softmax(x[:, :-1]), torch.zeros(4, 1)], 1), "error 1.0e+00 at row"),
    "bfloat16": (lambda x: softmax(x.bfloat16()).float(), "allowed 1.0e-05"),
    "a shape": (lambda x: softmax(x)[:2], "shape (2, 33), torch.float32; it should be (4, 33), torch.float32"),
    "a dtype": (lambda x: softmax(x).double(), "shape (4, 33), torch.float64; it should be (4, 33), torch.float32"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_provider_is_shown_and_never_timed(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    f, message = WRONG[what]
    odd = Odd(f)
    rows, said = run(CASE, odd, Torch())
    error = rows["odd"].error or ""
    assert error.startswith("wrong: ")
    assert message in error
    assert said == [f"tiny 4x33, float32, odd: {error}"]
    assert odd.calls == 1  # the check
    assert (rows["odd"].ok, rows["odd"].median_us, rows["odd"].gbps) == (False, None, None)
    assert report.time_text(rows["odd"]) == "WRONG"
    assert rows["torch"].ok
    monkeypatch.setattr(odd, "writes_out", lambda inputs: True)
    monkeypatch.setattr(odd, "forward", lambda case, dtype: lambda x, out: out)  # does not write its output
    assert (run(CASE, Torch(), odd)[0]["odd"].error or "").startswith("wrong: error nan")


def test_what_cannot_run_has_a_row_that_says_why() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("no row of 33\nand more")

    odd = Odd(f)
    text = ""
    for chosen, options in (
        ([odd], {}),
        ([Odd(softmax, takes=1 << 30)], {"free": lambda: 1 << 20}),
        ([Odd(softmax, unsupported="rows of a multiple of 4 only")], {}),
        ([], {"free": lambda: 100}),
    ):
        rows, said = run(CASE, *chosen, Torch(), **options)
        text += "".join(f"{name}: {row.error}\n" for name, row in rows.items() if row.error)
        text += "".join(f"    says: {line}\n" for line in [*said, *report.problems(list(rows.values()))])
    assert_snapshot("cannot-run", text)
    assert odd.calls == 1


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_torch_and_naive_are_right(function: str, direction: str, dtype: str) -> None:
    case = replace(CASE, function=function, direction=direction, shape=(2, 5, 3), dim=1)
    rows, said = run(case, Torch(), Naive(), dtype=dtype)
    assert not said
    assert [(name, row.ok, row.error) for name, row in rows.items()] == [
        (name, True, None) for name in ("copy", "torch", "naive")
    ]


LAYOUTS: list[tuple[tuple[int, ...], Any, str, bool]] = [  # (shape, dim, layout, whether torch supports it)
    ((2, 5, 3, 4), 1, "", True),
    ((2, 5, 3, 4), 1, "channels_last", True),
    ((2, 5, 3, 4), 3, "channels_last", True),
    ((3, 7, 5), -1, "transposed", True),
    ((7, 5), 0, "transposed", True),
    ((2, 5, 3, 4), (2, 3), "", True),
    ((2, 5, 3, 4), (-2, -1), "", True),
    ((2, 5, 3, 4), (1, 3), "", False),
    ((2, 5, 3, 4), (2, 3), "channels_last", False),
]


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(("shape", "dim", "layout", "torch_can"), LAYOUTS, ids=str)
def test_every_layout_is_right(shape: tuple[int, ...], dim: Any, layout: str, torch_can: bool, direction: str) -> None:
    case = Case("t", "t", shape, dim, direction=direction, layout=layout)
    for dtype in ("float32", "bfloat16"):
        rows, said = run(case, Onepass(), Torch(), Naive(), dtype=dtype)
        assert not said
        assert rows["onepass"].engine == "cpu"
        assert all(row.ok for name, row in rows.items() if torch_can or name != "torch")
        assert torch_can or (rows["torch"].error or "").startswith("unsupported: torch's softmax takes one dim")


@pytest.mark.parametrize(
    ("dim", "last"),
    [(-1, (19, 29, slice(None))), (1, (19, slice(None), 6)), ((0, 2), (slice(None), 29, slice(None)))],
)
@pytest.mark.parametrize("function", ["softmax", "logsumexp"])
def test_drawn_rows_are_whole_rows_of_the_result(
    dim: Any, last: Any, function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case("t", "t", (20, 30, 7), dim=dim, function=function)
    monkeypatch.setattr("onepass.tools.bench.correctness.SAMPLE", 400)
    inputs = make_inputs(case, "float64", CPU, 0)
    checker = Checker(inputs, seed=1)
    assert checker.rows is not None
    assert len(checker.rows) < case.rows()
    assert {0, case.rows() - 1} <= set(checker.rows.tolist())
    result = getattr(reference, function)(inputs.x, dim)
    assert checker.check(result) is None
    wrong = result.clone()  # a change in the last row is found and named
    (wrong[last] if function == "softmax" else wrong.view(-1)[-1:]).add_(1.0)
    assert f"row {case.rows() - 1}" in (checker.check(wrong) or "")


@pytest.mark.parametrize("shape", [(7, 300), (40, 300), (3, 5000), (1, 5000)])
def test_the_memory_of_a_check_bounds_what_is_drawn(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onepass.tools.bench.correctness.SAMPLE", 2100)
    case = Case("t", "t", shape)
    checker = Checker(make_inputs(case, "float32", CPU, 0), seed=0)
    assert checker.expected.numel() <= reference_bytes(case) // 64 <= prod(shape)
    assert reference_bytes(replace(case, function="logsumexp")) == reference_bytes(case)
