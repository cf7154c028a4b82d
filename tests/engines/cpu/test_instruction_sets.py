"""Each instruction set of the CPU engine, in a process that takes it."""

import pytest

from lib.paths import ROOT
from onepass import native

FILES = ("engines/cpu/test_cpu_backward", "engines/cpu/test_cpu_tiles", "engines/cpu/test_cpu_scored")
FILES += ("api/test_special_values", "api/test_segments")


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("isa", ["baseline", "avx2", "avx512"])
def test_every_instruction_set(compilers, tmp_path, isa, file):
    """A file's `check_all`."""
    if isa == native.status("isa"):
        pytest.skip(f"all other tests here run {isa}")
    folder, _, name = file.rpartition("/")
    begin = f"import sys, torch; torch.set_num_threads(1); sys.path[:0] = {[str(ROOT / 'tests')]}; "
    begin += f"sys.path[:0] = {[str(ROOT / 'tests' / folder)]}; import {name}"
    (done,) = compilers.run(tmp_path, f"{begin}; {name}.check_all(); print('right')", ONEPASS_CPU_CAPABILITY=isa)
    if done.status and "ONEPASS_CPU_CAPABILITY is an instruction set that works here" in done.errors:
        assert isa != "baseline"
        pytest.skip(f"{isa} does not work here")
    assert done.out == "right\n", done.errors[-2000:]
