"""Each instruction set of the CPU engine, in a process that takes it."""

import pytest

from lib.paths import ROOT
from lib.support import slow
from onepass import native

FOLDERS = [str(ROOT / "tests" / name) for name in ("", "api", "engines/cpu")]
ALL, SOME = "cpu_backward cpu_tiles cpu_scored special_values segments", "cpu_tiles cpu_scored"
CODE = f"""
import importlib, sys, torch
torch.set_num_threads(1)
sys.path[:0] = {FOLDERS}
for name in "NAMES".split():
    importlib.import_module(f"test_{{name}}").check_all()
print("right")
"""


@pytest.mark.parametrize(("isa", "names"), [("baseline", SOME), slow("baseline", ALL), ("avx2", ALL), ("avx512", ALL)])
def test_every_instruction_set(compilers, tmp_path, isa, names):
    if isa == native.status("isa"):
        pytest.skip(f"all other tests here run {isa}")
    (done,) = compilers.run(tmp_path, CODE.replace("NAMES", names), ONEPASS_CPU_CAPABILITY=isa)
    if done.status and "ONEPASS_CPU_CAPABILITY is an instruction set that works here" in done.errors:
        assert isa != "baseline"
        pytest.skip(f"{isa} does not work here")
    assert done.out == "right\n", done.errors[-2000:]
