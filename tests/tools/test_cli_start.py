"""The command line: what answers without torch, how the library is loaded when it is needed, and `--json`."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

import onepass
from lib.cli import call, command, tiny
from lib.paths import RESULTS
from onepass.tools.bench import results
from onepass.tools.cli import cli

__all__ = ["tiny"]

PACKAGE = Path(onepass.__file__).parent
# What answers at once, and who has the operators at once


SEEDS = str(RESULTS / "few-h200-2026-11-22.json")
LIGHT: dict[str, tuple[str, ...]] = {
    "nothing": (),
    "--help": ("--help",),
    "--version": ("--version",),
    **{f"{name} -h": (name, "-h") for name in cli.commands},
    "gallery run -h": ("gallery", "run", "-h"),
    "gallery": ("gallery",),
    "gallery as JSON": ("gallery", "--json"),
    "gallery list": ("gallery", "list"),
    "gallery show": ("gallery", "show", "cuda-online"),
    "gallery shuffle": ("gallery", "shuffle"),
    "compare": ("compare", SEEDS, SEEDS),
    "a wrong option": ("explain", "--fast"),
}


@pytest.mark.parametrize("what", LIGHT)
def test_what_needs_no_torch_does_not_wait_for_it(what: str) -> None:
    start = time.perf_counter()
    done = command(*LIGHT[what], python=("-X", "importtime"))
    took = time.perf_counter() - start
    assert done.returncode == (2 if what == "a wrong option" else 0), done.stderr
    imported = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert {"onepass", "onepass.tools.cli", "click"} <= imported
    assert not imported & {"torch", "rich", "matplotlib", "numpy", "onepass.native"}
    assert took < 2  # 0.2 s on an idle machine


SCRIPT = "import sys; import onepass_launcher; sys.argv[0] = 'onepass'; onepass_launcher.main()"
REGISTERED = "import onepass, torch; print(torch.ops.onepass.softmax, onepass.explain.__name__, onepass.nn.__name__)"


def test_the_console_script_waits_with_the_library_too() -> None:
    entry = (PACKAGE.parent.parent / "pyproject.toml").read_text()
    assert 'onepass = "onepass_launcher:main"' in entry
    code = f"import atexit, sys; atexit.register(lambda: print('torch' in sys.modules)); {SCRIPT}"
    for arguments, last in ((("--version",), "False"), (("explain", "8", "8", "--device", "h200"), "True")):
        done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
        assert (done.returncode, done.stderr, done.stdout.splitlines()[-1]) == (0, "", last)


@pytest.mark.parametrize("how", ["-c", "a script", "-m"])
def test_everyone_else_has_the_operators_at_once(how: str, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    for file in ("mine/__init__.py", "mine/__main__.py", "onepass_user.py"):
        (tmp_path / file).write_text("" if file.endswith("__init__.py") else REGISTERED)
    started = {"-c": ("-c", REGISTERED), "a script": ("onepass_user.py",), "-m": ("-m", "mine", "onepass")}[how]
    done = subprocess.run([sys.executable, *started], capture_output=True, text=True, cwd=tmp_path)
    assert (done.stderr, done.stdout) == ("", "onepass.softmax explain onepass.nn\n")


def test_the_library_imports_none_of_its_tools() -> None:
    code = "import onepass, sys; print([m for m in sys.modules if m.startswith('onepass.tools')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr
    sources = [p for p in PACKAGE.rglob("*.py") if PACKAGE / "tools" not in p.parents and p.name != "__main__.py"]
    assert [p for p in sources if "onepass.tools" in p.read_text() or "from .tools" in p.read_text()] == []


@pytest.mark.parametrize("name", ["__all__", "explain, warmup, engines, patch"])
def test_a_name_loads_all_names_whatever_was_imported_before(name: str) -> None:
    """All names of the package are there after its modules were imported one by one."""
    ask = "sorted(set(onepass.__all__) - set(dir(onepass)))" if name == "__all__" else f"[f.__name__ for f in ({name})]"
    code = f"""
import onepass_launcher, sys
import onepass
assert "torch" not in sys.modules and not hasattr(onepass, "nothing")
from onepass.tools.cli.shared import Command
import onepass.native, onepass._engines, onepass._explain, onepass._warmup, onepass.patching
Command("x", callback=lambda: None).main([], standalone_mode=False)
from onepass import *
print({ask})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == ("[]\n" if name == "__all__" else f"{name.split(', ')}\n"), done.stderr


def test_a_library_that_cannot_be_loaded_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')")
    done = command("explain", "8", "8", env={**os.environ, "PYTHONPATH": f"{tmp_path}:{PACKAGE.parent}"})
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "onepass: no torch here\n")


# --json [FILE]

H200 = ("--device", "h200")
SAME: dict[str, tuple[str, ...]] = {
    "info": ("info",),
    "explain": ("explain", "4", "8", *H200),
    "traffic": ("traffic", "4", "8", *H200, "--only", "naive"),
    "compare": ("compare", SEEDS, SEEDS),
    "gallery": ("gallery",),
    "tune --show": ("tune", "--show", *H200),
    "bench --list": ("bench", "--list", "--device", "cpu"),
}
MEASURED: dict[str, tuple[str, ...]] = {
    "bench": ("bench", "tiny", "--quick", "--device", "cpu", "--only", "torch"),
    "gallery run": ("gallery", "run", "cpu-online", "4", "8", "--device", "cpu", "--no-baseline"),
    "profile": ("profile", "4", "8", "--device", "cpu"),
}


def steady(text: str) -> str:
    """Without what differs from one call to the next."""
    return re.sub(r'"(date|load)": [^,]*', "", text)


@pytest.mark.parametrize("what", SAME)
def test_json_alone_is_all_that_is_printed_and_json_file_is_beside_it(what: str, tmp_path: Path) -> None:
    file = tmp_path / "new" / "r.json"
    alone, beside, without = (call(*SAME[what], *more) for more in (("--json",), ("--json", str(file)), ()))
    assert (alone.exit_code, beside.exit_code, without.exit_code) == (0, 0, 0)
    assert json.loads(alone.stdout)
    assert steady(file.read_text()) == steady(alone.stdout)
    assert beside.stdout == without.stdout
    assert not without.stdout.startswith(("{", "["))


@pytest.mark.parametrize("what", MEASURED)
def test_what_measures_says_the_rest_on_stderr(what: str, tiny: None, tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    alone, beside = (call(*MEASURED[what], "--json", *more) for more in ((), (str(file),)))
    assert (alone.exit_code, beside.exit_code) == (0, 0), alone.output
    printed, kept = json.loads(alone.stdout), json.loads(file.read_text())
    assert printed.keys() == kept.keys()
    assert "onepass 0.1.0, torch" in alone.stderr
    assert "onepass 0.1.0, torch" in beside.stdout
    assert beside.stderr == ""
    if what == "profile":
        assert [line["name"] for line in printed["lines"]] == ["torch", "onepass"]
        assert printed["n"] == 8
    else:
        assert results.parse(printed).rows[0].provider == "copy"


@pytest.mark.parametrize("arguments", [("explain", "--json", "8", "8"), ("bench", "--json", "models")])
def test_json_before_an_argument_does_not_swallow_it(arguments: tuple[str, ...]) -> None:
    result = call(*arguments)
    assert result.exit_code == 2
    assert f"--json takes a FILE with a dot or a slash in its name, got '{arguments[2]}'" in result.stderr
    assert result.stderr.count("\n") == 1
