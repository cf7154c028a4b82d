"""What the README shows runs, and what it points to is there."""

import re
import subprocess
import sys

import pytest

from lib.paths import ROOT

PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)


@every_page
def test_examples_run(page, capsys):
    examples = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    for example in examples:
        exec(compile(example, page.name, "exec"), {})
    if page.name == "README.md":
        assert len(examples) == 2
        assert "a copy" in capsys.readouterr().out


@every_page
def test_links_and_results_exist(page):
    text = page.read_text()
    for link in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (page.parent / link).exists(), f"{page.name} points to {link}"
    for file in re.findall(r"benchmarks/results/[\w.-]+\.json", text):
        assert (ROOT / file).exists(), f"{page.name} names {file}"


def test_tables_are_what_the_results_files_say():
    """Every mean in the docs is made from the file that it links (`make figures`)."""
    check = [sys.executable, str(ROOT / "scripts" / "make_figures.py"), "--check"]
    done = subprocess.run(check, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_no_mean_is_typed_by_hand():
    """A geometric mean over a file's points is a cell of a generated table, not a number in a sentence."""
    for page in PAGES:
        prose = re.sub(r"<!-- table: [\w-]+ -->.*?<!-- end -->", "", page.read_text(), flags=re.DOTALL)
        typed = re.findall(r"[^.|\n]*\b\d+\.\d+[^.|\n]*geometric mean[^.|\n]*", prose)
        assert not typed, f"{page.name}: {typed}"
