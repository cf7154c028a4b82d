"""The wheels of compiled kernels (scripts/make_kernels.py), of a few kernels."""

import shutil
import subprocess
import sys
import zipfile

import pytest
import torch

from lib.paths import ROOT
from lib.scripts import load_script
from lib.warmup import needs_nvrtc
from onepass import native
from onepass.native import PASSES

HALF = (torch.bfloat16, torch.bfloat16)


@pytest.mark.parametrize("options", ["scale", "scale mask", "scale causal"])
@pytest.mark.parametrize("which", PASSES[:2])
def test_calls_of_attention_are_those_of_the_wheel(options, which):
    """Each kernel that a call of such a length takes is in the list that the wheel is made from."""
    script = load_script("make_kernels")
    plain = options.replace("scale ", "") if which == "backward" and options != "scale" else options
    listed = set()
    for kind in {options, plain}:
        listed |= set(native.call_kernels(f"softmax {kind}", which, HALF, -1, 90, script.SCORE_LENGTHS))
    for n in (64, 197, 1024, 1000, 4096, 16384):
        for rows in (1, 12, 4096, 300_000):
            launch = native.call_plan(
                f"softmax {options}", HALF, (rows, n), (n, 1) * 2, 1, chip=(90, 132, "NVIDIA H200"), which=which
            )
            assert set(launch["kernels"]) <= listed, (n, rows)
    kernels = script.score_kernels(90, [torch.bfloat16, torch.float32], [64, 1024], which == "backward")
    assert kernels
    assert all(kernel.x_type in HALF for kernel in kernels)
    assert len(kernels) == len(set(kernels))


@pytest.mark.slow
@needs_nvrtc
def test_the_wheels_have_what_they_are_made_of(tmp_path):
    for name in ("scripts/make_kernels.py", "packaging/kernels/pyproject.toml", "LICENSE"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    few = ["--arch=90", "--functions=softmax", "--dtypes=bfloat16", "--lengths=128", "--no-backward", "--columns=3"]
    subprocess.run([sys.executable, tmp_path / "scripts" / "make_kernels.py", *few], check=True)
    for wheel in ("onepass_kernels_sm90", "onepass_kernels_scores_sm90"):
        (file,) = (tmp_path / "dist").glob(f"{wheel}-*-py3-none-any.whl")
        names = zipfile.ZipFile(file).namelist()
        assert sum(name.startswith("onepass_kernels/sm_90/") and name.endswith(".cubin") for name in names) >= 8
