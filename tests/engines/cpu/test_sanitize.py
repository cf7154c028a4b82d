"""The CPU engine under AddressSanitizer and UndefinedBehaviorSanitizer, shortly; `make sanitize` is the long form."""

import os
import subprocess
import sys

import pytest

from lib.paths import ROOT

SCRIPT = ROOT / "scripts" / "sanitize.py"
FOUND = {
    "read": "heap-buffer-overflow",
    "page": "AddressSanitizer: SEGV",  # what the sanitizer does not look at stops at the page behind the tensor
    "write": "is no element of it, and was written",
    "value": "got 0.123",
}


def sanitizers() -> bool:
    """Whether the compiler has their libraries: some distributions ship it without."""
    command = ["g++", "-fsanitize=address,undefined", "-x", "c++", "-", "-o", "/dev/null"]
    return subprocess.run(command, input="int main() {}", capture_output=True, text=True).returncode == 0


def sanitize(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True)


@pytest.mark.skipif("ONEPASS_SANITIZE" not in os.environ, reason="minutes of compiling: `make sanitize` runs it")
@pytest.mark.skipif(not sanitizers(), reason="g++ has no libasan or libubsan here")
def test_every_instruction_set_stays_in_its_memory_and_planted_faults_are_found():
    """One test, so that the programs are built once."""
    done = sanitize("--calls", "250", "--sets", "all")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert "baseline  250 calls checked, all right" in lines
    assert all("250 calls checked, all right" in line or "this CPU has no avx" in line for line in lines)
    assert sanitize("--calls", "251", "--seed", "5", "--sets", "baseline").stdout == (
        "baseline  251 calls checked, all right\n"
    )
    for fault, words in FOUND.items():
        done = sanitize("--calls", "100", "--sets", "baseline", "--plant", fault)
        assert done.returncode == 1, fault
        assert words in done.stdout + done.stderr, fault


@pytest.mark.parametrize("wrong", [("--sets", "mmx"), ("--calls", "0"), ("--plant", "nothing")], ids=" ".join)
def test_a_wrong_option_is_reported(wrong):
    done = sanitize(*wrong)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert wrong[0] in done.stderr or wrong[1] in done.stderr
