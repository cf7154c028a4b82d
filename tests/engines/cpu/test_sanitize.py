"""The CPU engine under AddressSanitizer and UndefinedBehaviorSanitizer, shortly; `make sanitize` is the long form."""

import os
import subprocess

import pytest

from lib.paths import ROOT
from lib.scripts import load_script, run_python

SCRIPT = ROOT / "scripts" / "sanitize.py"
# The engine reads 40 elements where there are 33: on the heap, and in front of a page that cannot be touched.
BEYOND = f"""
import ctypes, sys, torch, onepass
sys.path.append({str(ROOT / "tests")!r})
from lib.random_calls import guarded
x = {{}}
onepass.softmax(torch.frombuffer((ctypes.c_float * 40).from_address(x.data_ptr()), dtype=torch.float32))
"""
FOUND = {
    "torch.zeros(33)": "heap-buffer-overflow",
    "guarded(33, torch.float32, True)": "SEGV",
}


def sanitizers() -> bool:
    """Whether the compiler has their libraries: some distributions ship it without."""
    command = ["g++", "-fsanitize=address,undefined", "-x", "c++", "-", "-o", "/dev/null"]
    return subprocess.run(command, input="int main() {}", capture_output=True, text=True).returncode == 0


@pytest.mark.skipif("ONEPASS_SANITIZE" not in os.environ, reason="minutes of compiling: `make sanitize` runs it")
@pytest.mark.skipif(not sanitizers(), reason="g++ has no libasan or libubsan here")
def test_every_instruction_set_stays_in_its_memory_and_reads_beyond_it_are_found():
    """One test, so that the library is built once."""
    done = run_python(SCRIPT, "--minutes", "0.1", "--sets", "all", timeout=3600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(", 0 failures" in line or "this CPU lacks it" in line for line in done.stdout.splitlines())
    script = load_script("sanitize")
    for memory, words in FOUND.items():
        done = script.run(ROOT / "build" / "sanitize", "baseline", "-c", BEYOND.format(memory))
        assert done.returncode
        assert "ERROR: AddressSanitizer" in done.stderr
        assert words in done.stderr
        assert "onepass" in done.stderr.split("ERROR")[1], "the engine does it"
