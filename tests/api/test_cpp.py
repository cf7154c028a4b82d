"""The native core without Python: what a graph exported to C++ needs of it."""

import re
import subprocess

import torch

from lib.cpp import build_with_torch, output
from onepass import native


def test_an_operator_runs_in_a_program_without_python(tmp_path):
    program = build_with_torch(tmp_path, "plain", "-std=c++17", "-DTORCH_TARGET_VERSION=0x020a000000000000")
    answer = output(program, native.PATH)
    y = torch.tensor([1.0, 2.0]).exp() / torch.tensor([1.0, 2.0]).exp().sum()
    assert [float(word) for word in answer.split()] == [round(v, 6) for v in [*y.tolist(), *y.tolist()]]


def test_the_binary_needs_neither_python_nor_cuda():
    libraries = subprocess.run(["ldd", native.PATH], capture_output=True, text=True, check=True).stdout
    assert not re.search(r"libpython|libcuda|libcudart|libnvrtc|torch_cuda", libraries), libraries
    symbols = subprocess.run(["nm", "-D", "--undefined-only", native.PATH], capture_output=True, text=True, check=True)
    wanted = re.findall(r" U (\S+)", symbols.stdout)
    assert not [name for name in wanted if name.startswith(("Py", "_Py"))]
    # Of libtorch only the C functions of the stable ABI: no C++ symbol of c10, at or torch.
    assert not [name for name in wanted if re.search(r"N3c10|N2at|N5torch", name)]
    assert any(name.startswith("aoti_torch_") for name in wanted)
