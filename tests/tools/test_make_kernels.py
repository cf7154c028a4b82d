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
from onepass._kernel_compiler import Kernel
from onepass.native import PASSES

BF16 = torch.bfloat16


@pytest.mark.parametrize("options", ["scale", "scale mask", "scale causal"])
@pytest.mark.parametrize("which", PASSES[:2])
def test_calls_of_attention_find_their_kernels(options, which):
    """Each kernel that a call of such a length takes is in the list that the wheel is made from."""
    script = load_script("make_kernels")
    listed = script.score_kernels(90, [BF16, torch.float32], script.SCORE_LENGTHS, backward=which == "backward")
    assert {kernel.x_type for kernel in listed} == {BF16}
    call, types, lengths = f"softmax {options}", (BF16, BF16), (64, 197, 1024, 1000, 4096, 16384)
    known = native.call_kernels(call, which, types, -1, 90, lengths)
    for n in lengths:
        for rows in (1, 12, 4096, 300_000):
            shape = (rows, n), (n, 1) * 2, 1
            launch = native.call_plan(call, types, *shape, chip=(90, 132, "NVIDIA H200"), which=which)
            for name in launch["kernels"]:
                assert Kernel(*known[name]) in listed, (n, rows)
                assert name.endswith("-DBIAS_TYPE=float"), "without a bias all calls take the same kernel"


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
