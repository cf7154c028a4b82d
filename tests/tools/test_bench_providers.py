"""The providers: who runs, what each supports, and what becomes of a wrong one."""

import re
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from lib.bench import CASE, CPU, TINY, Odd, run, softmax
from lib.transcript import assert_snapshot
from onepass import reference
from onepass.tools.bench import providers, report
from onepass.tools.bench.cases import SUITES, Case
from onepass.tools.bench.correctness import make_inputs
from onepass.tools.bench.providers import (
    COPY,
    GalleryProvider,
    Liger,
    Naive,
    Onepass,
    Provider,
    Quack,
    Torch,
    TorchCompile,
    register,
    registry,
    select_providers,
)
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"only": ("torhc",)}, "unknown provider 'torhc': there are onepass, "),
        ({"skip": ("x",)}, "unknown provider 'x'"),
        ({"only": ("onepass-cuda",)}, "'onepass-cuda' cannot run on cpu: does not support cpu tensors"),
        ({"only": ("cuda-warp",)}, "'cuda-warp' cannot run on cpu: runs only on NVIDIA GPUs"),
        ({"only": ("torch",), "skip": ("torch",)}, "no provider is left"),
    ],
)
def test_who_cannot_run_is_an_error(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        select_providers(CPU, **options)


def test_a_kernel_joins_by_registering(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onepass.tools.bench.providers._REGISTRY", registry())
    odd = Odd(softmax)
    register(odd)
    assert select_providers(CPU, only=("odd",))[0] == [odd]
    for taken in (odd, COPY):
        with pytest.raises(ValueError, match="is registered already"):
            register(taken)


def test_one_engine_runs_beside_auto_only_if_it_is_named() -> None:
    assert list(run(CASE, Onepass(), Onepass("cpu"))[0]) == ["copy", "onepass"]
    rows, _ = run(CASE, Onepass(), Onepass("cpu"), named=frozenset({"onepass-cpu"}))
    assert (rows["onepass-cpu"].ok, rows["onepass-cpu"].engine) == (True, "cpu")


# What they support

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


def test_quack_supports_every_row_of_whole_vectors() -> None:
    cases = [(c.at(d), d) for c in SUITES["row-lengths"].cases if c.function == "softmax" for d in c.dtypes]
    odd = (33, 781, 1025, 32001, 50257)
    assert {(c.row(), d) for c, d in cases if Quack().unsupported(c, d)} == {
        *((n, d) for n in odd for d in ("float32", "bfloat16")),
        (100, "bfloat16"),
    }


# Calls into a given output


@pytest.mark.parametrize("function", ["softmax", "log_softmax", "logsumexp"])
@pytest.mark.parametrize("provider", [Onepass(), Torch()], ids=["onepass", "torch"])
def test_a_gradient_goes_into_the_given_output(provider: Provider, function: str) -> None:
    for dim, dtype in ((-1, "float32"), (0, "bfloat16")):
        inputs = make_inputs(Case("t", "t", (6, 40), dim, function, "backward"), dtype, CPU, 0)
        assert inputs.out is not None
        assert provider.writes_out(inputs)
        inputs.out.fill_(float("nan"))
        assert provider.prepare(inputs)() is inputs.out
        allocated = provider.prepare(replace(inputs, out=None))()
        assert allocated is not inputs.out
        torch.testing.assert_close(inputs.out, allocated)


def test_a_provider_without_such_a_gradient_uses_autograd() -> None:
    inputs = make_inputs(Case("t", "t", (6, 40), direction="backward"), "float32", CPU, 0)
    assert not Naive().writes_out(inputs)
    assert not TorchCompile().writes_out(inputs)
    softmin = Case("t", "t", (6, 40), function="softmin", direction="backward")
    assert not Torch().writes_out(make_inputs(softmin, "float32", CPU, 0))
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
    assert (row.median_us, len(said), report.time_text(row)) == (None, 1, "WRONG")
    assert rows["torch"].ok


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


# The gallery


@pytest.fixture
def picky(monkeypatch: pytest.MonkeyPatch) -> tuple[Variant, list[dict[str, int]]]:
    """A variant that keeps its launch parameters and refuses rows of more than 64."""
    seen: list[dict[str, int]] = []

    def f(x: torch.Tensor, out: torch.Tensor, **launch: int) -> torch.Tensor:
        seen.append(launch)
        return out.copy_(reference.softmax(x, 1))

    module = types.ModuleType("onepass.tools.gallery.picky")
    module.softmax = f  # type: ignore[attr-defined]
    module.refuses = lambda rows, n, dtype: f"rows of 64, got {n}" if n > 64 else None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "onepass.tools.gallery.picky", module)
    return Variant("picky", "naive.py", "picky:softmax", lambda device: None, ("num_warps", "threads")), seen


def test_launch_parameters_and_refusals_of_a_variant(picky: Any) -> None:
    variant, seen = picky
    for launch in ({"num_warps": 8}, {}):
        seen.clear()
        rows, said = run(MATRIX, GalleryProvider(variant, **launch))
        assert rows["picky"].ok, said
        assert seen
        assert all(given == launch for given in seen)
    rows, _ = run(replace(MATRIX, shape=(5, 65)), GalleryProvider(variant))
    assert rows["picky"].error == "unsupported: rows of 64, got 65"
    for provider in (p for p in registry().values() if p.gallery):
        least = 16 * 5 * 33 if provider.name.startswith("naive") else 2 * 5 * 33
        assert provider.workspace(MATRIX, "bfloat16") == least
    languages = ("naive", "triton-row", "cpu-online", "cuda-warp", "cuda-auto")
    assert [VARIANTS[name].language for name in languages] == ["Python", "Triton", "C++", "CUDA", "Python"]


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
        assert row.ok, f"{row.provider}: {row.error}"
        assert all(us is not None and 0 < us < 1e5 for us in (row.median_us, row.call_us)), row.provider
        if not row.provider.endswith(("jit", "compile")):
            assert row.graph_us is not None, row.provider
