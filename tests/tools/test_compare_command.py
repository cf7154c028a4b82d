"""`onepass compare`: what is shown, and the exit status."""

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from lib.compare import bad, file, row
from onepass.tools.bench import results
from onepass.tools.bench.results import Results
from onepass.tools.cli import Commands
from onepass.tools.cli.compare import compare as command

BEFORE = file(
    row(50.0, provider="copy"),
    row(100.0, 2.0),
    row(100.0, 2.0, provider="torch"),
    row(100.0, 2.0, provider="naive", function="logsumexp", direction="backward", dtype="bfloat16"),
    row(100.0, 2.0, case="same"),
    row(provider="liger"),
    commit="abc",
)
AFTER = file(
    row(50.0, provider="copy"),
    row(150.0, 2.0),
    row(50.0, 2.0, provider="torch"),
    bad(provider="naive", function="logsumexp", direction="backward", dtype="bfloat16"),
    row(100.0, 2.0, case="same"),
    bad(case="new"),
)


def call(tmp_path: Path, before: Results, after: Results, *options: str) -> Result:
    for name, made in (("a.json", before), ("b.json", after)):
        results.save(made, tmp_path / name)
    return run(str(tmp_path / "a.json"), str(tmp_path / "b.json"), *options)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(Commands(commands={"compare": command}), ["compare", *arguments])


def test_what_is_shown(tmp_path: Path) -> None:
    result = call(tmp_path, BEFORE, AFTER)
    assert result.exit_code == 1
    assert result.stderr == ""
    text = result.stdout.replace(f"{tmp_path}/", "")
    assert text == (
        "copy: +0.0% (geometric mean of 1 row)\n"
        "before: a.json, onepass 0.1.0, commit abc, 2026-11-21\n"
        "after:  b.json, onepass 0.1.0, commit unknown, 2026-11-21\n"
        "\n"
        "case                        shape  dtype     provider  before us  after us  change  noise\n"
        "--------------------------  -----  --------  --------  ---------  --------  ------  -----  ----------\n"
        "a case, logsumexp backward  4x100  bf16>f32  naive           100     WRONG                 regression\n"
        "a case                      4x100  f32       onepass         100       150  +50.0%   4.0%  regression\n"
        "a case                      4x100  f32       torch           100      50.0  -50.0%   8.0%  gain\n"
        "\n"
        "naive on a case, logsumexp backward, bf16>f32: wrong: error 0.5, allowed 1e-05\n"
        "only in a.json: 1 row (liger 1)\n"
        "only in b.json: 1 row (onepass 1), 1 of them wrong or raised\n"
        "onepass: +22.5% (geometric mean of 2 rows), 1 regression, 0 gains, 1 unchanged\n"
        "naive: 1 regression, 0 gains, 0 unchanged\n"
        "torch: -50.0% (geometric mean of 1 row), 0 regressions, 1 gain, 0 unchanged\n"
        "2 regressions, 1 gain, 1 unchanged\n"
    )
    assert re.search(r"^same .* \+0\.0%   4\.0%  unchanged$", call(tmp_path, BEFORE, AFTER, "--all").stdout, re.M)


def test_a_file_compared_with_itself(tmp_path: Path) -> None:
    result = call(tmp_path, AFTER, AFTER, "--least", "0")
    assert result.exit_code == 0
    assert "case " not in result.stdout
    assert "wrong or raised in both: 2 rows (naive 1, onepass 1)" in result.stdout
    assert result.stdout.endswith("\n0 regressions, 0 gains, 3 unchanged\n")


@pytest.mark.parametrize(
    ("options", "status", "last"),
    [
        (("--only", "onepass,torch"), 1, "1 regression, 1 gain, 1 unchanged"),
        (("--only", "torch"), 0, "0 regressions, 1 gain, 0 unchanged"),
        (("--skip", "onepass", "--skip", "naive"), 0, "0 regressions, 1 gain, 0 unchanged"),
        (("--skip", "naive", "--least", "60"), 0, "0 regressions, 0 gains, 3 unchanged"),
    ],
)
def test_the_status_is_that_of_the_rows_judged(options: Any, status: int, last: str, tmp_path: Path) -> None:
    result = call(tmp_path, BEFORE, AFTER, *options)
    assert (result.exit_code, result.stdout.splitlines()[-1]) == (status, last)


def test_json(tmp_path: Path) -> None:
    result = call(tmp_path, BEFORE, AFTER, "--json")
    data = json.loads(result.stdout)
    assert result.exit_code == 1
    assert data["before"]["file"] == str(tmp_path / "a.json")
    assert data["before"]["commit"] == "abc"
    assert data["after"]["device"] == "H200"
    assert [data[k] for k in ("of", "least_percent", "regressions", "gains", "unchanged")] == ["median_us", 2, 2, 1, 1]
    assert [data[k] for k in ("only_before", "only_after", "wrong_in_both", "untimed")] == [1, 1, 0, 0]
    assert data["copy"] == {"ratio": 1.0, "rows": 1, "differs": False}
    assert data["providers"]["torch"] == {"ratio": 0.5, "rows": 1, "regressions": 0, "gains": 1, "unchanged": 0}
    assert [(c["provider"], c["ratio"], c["verdict"]) for c in data["changes"]] == [
        ("naive", None, "regression"),
        ("onepass", 1.5, "regression"),
        ("onepass", 1.0, "unchanged"),
        ("torch", 0.5, "gain"),
    ]
    assert data["changes"][0]["error"] == "wrong: error 0.5, allowed 1e-05"


def test_machines_that_differ_are_told(tmp_path: Path) -> None:
    a, b = file(row(), row(provider="copy")), file(row(), row(106.0, provider="copy"), device="A100")
    result = call(tmp_path, a, b, "--any-device")
    assert result.exit_code == 0
    assert result.stdout.startswith(
        "copy: +6.0% (geometric mean of 1 row)\n"
        "the copy changed by more than 5%: the machines or their clocks differ\n"
        "the devices differ: H200 before, A100 after\n"
    )
    assert call(tmp_path, file(row()), file(row())).stdout.startswith("copy: not timed in both files")


def test_suites_and_threads_are_named_where_they_differ(tmp_path: Path) -> None:
    rows = [row(threads=1), row(threads=2), row(threads=2, suite="powers", world_size=4)]
    text = call(tmp_path, file(*rows), file(*rows), "--all").stdout
    assert re.findall(r"^(?:models|powers): .*?(?=  )", text, re.M) == [
        "models: a case, 1 thread, world size 1",
        "models: a case, 2 threads, world size 1",
        "powers: a case, 2 threads, world size 4",
    ]


def test_odd_rows_have_their_text(tmp_path: Path) -> None:
    text = call(tmp_path, file(row(shape=[], dim=0)), file(row(99.999, shape=[], dim=0)), "--all").stdout
    assert re.search(
        r"^a case  \(\)     f32    onepass         100       100   \+0\.0%   0\.0%  unchanged$", text, re.M
    )
    assert "onepass: +0.0% (geometric mean" in text


def test_times_by_their_names(tmp_path: Path) -> None:
    a, b = file(row(graph_us=5.0, call_us=9.0)), file(row(graph_us=6.0, call_us=9.0))
    assert [call(tmp_path, a, b, "--of", of).exit_code for of in ("median", "graph", "call")] == [0, 1, 0]
    result = call(tmp_path, file(row()), file(row()), "--of", "graph")
    assert result.exit_code == 2
    assert "no row has graph_us in both" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("a.json",), "Missing argument 'AFTER'"),
        (("a.json", "nowhere.json"), "nowhere.json: No such file or directory"),
        (("bad.json", "a.json"), "bad.json: not JSON (line 1"),
        (("old.json", "a.json"), "old.json: schema 0 is not known"),
        (("a.json", "zero.json"), "zero.json: onepass on a case, float32: 'median_us' is no time, got 0"),
        (("a.json", "a100.json"), "a.json was measured on H200, a100.json on A100"),
        (("a.json", "other.json"), "no row has median_us in both a.json and other.json"),
        (("a.json", "empty.json"), "no row has median_us in both a.json and empty.json"),
        (("a.json", "a.json", "--only", "x"), "unknown provider 'x': there are onepass, torch, naive, liger"),
        (("a.json", "a.json", "--least", "-1"), "-1"),
        (("a.json", "a.json", "--least", "nan"), "least must be a percentage from 0 on, got nan"),
        (("a.json", "a.json", "--least", "few"), "'few' is not a valid float"),
        (("a.json", "a.json", "--of", "mean"), "'mean' is not one of"),
    ],
)
def test_what_cannot_be_compared_is_told_in_one_line(
    arguments: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, made in {
        "a": BEFORE,
        "a100": file(row(), device="A100"),
        "other": file(row(case="other"), row(provider="copy")),
        "empty": file(),
        "zero": file(row(0.0)),
    }.items():
        results.save(made, f"{name}.json")
    Path("bad.json").write_text("{")
    Path("old.json").write_text('{"schema": 0}')
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert (result.stdout, result.stderr.count("\n")) == ("", 1)
    assert result.stderr.startswith("onepass: ")
    assert message in result.stderr


@pytest.mark.parametrize("columns", [60, 105, 140])
def test_a_terminal_gets_colours_and_a_table_that_fits(columns: int, tmp_path: Path) -> None:
    """On a real terminal, a pseudo one."""
    for name, made in (("a.json", BEFORE), ("b.json", AFTER)):
        results.save(made, tmp_path / name)
    code = (
        "from onepass.tools.cli import Commands; from onepass.tools.cli.compare import compare\n"
        "Commands(commands={'compare': compare}).main(['compare', 'a.json', 'b.json', '--all'])"
    )
    master, slave = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(columns), "TERM": "xterm-256color"}
    environment.pop("NO_COLOR", None)
    child = subprocess.Popen([sys.executable, "-c", code], stdout=slave, cwd=tmp_path, env=environment)
    os.close(slave)
    parts = []
    try:
        while part := os.read(master, 4096):
            parts.append(part)
    except OSError:  # Linux: the end of a terminal whose other side is closed
        pass
    os.close(master)
    assert child.wait() == 1
    text = b"".join(parts).decode()
    assert re.search(r"\x1b\[31m *WRONG", text)
    assert re.search(r"\x1b\[32m *-50\.0%", text)
    assert "\x1b[1;31m2 regressions, 1 gain, 1 unchanged" in text
    lines = [re.sub(r"\x1b\[[\d;]*m", "", line.rstrip("\r")) for line in text.split("\n")]
    table = lines[lines.index("") + 1 :][:-8]
    assert max(map(len, table)) <= columns
    assert ("shape" in text) == (columns == 140)
    assert ("unchanged" in "".join(table)) == (columns > 60)
