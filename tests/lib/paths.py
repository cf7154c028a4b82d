"""Folders of the project that tests read."""

from pathlib import Path

import onepass

ROOT = Path(__file__).resolve().parents[2]
CORE = Path(onepass.__file__).with_name("csrc")
NATIVE = ROOT / "tests" / "native"  # the C++ programs that tests build
RESULTS = ROOT / "benchmarks" / "results"
