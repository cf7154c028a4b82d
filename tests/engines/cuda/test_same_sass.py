"""The script that proves renames: what it takes for equal, and what it reports."""

import doctest
from types import ModuleType

import pytest

from lib.scripts import load_script


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("same_sass")


def test_examples(script):
    assert not doctest.testmod(script).failed


def test_a_moved_and_renamed_function_is_the_same(script):
    body = "{0:x}:\tjne    {1:x} <{2}+0x8>\n{0:x}:\tcall   {1:x} <_Z{2}v>\n"
    one, other = (script.read_assembly(name, body.format(at, at + 8, name)) for at, name in ((16, "f"), (4096, "g")))
    assert one == other == "jne +0x8\ncall"


@pytest.mark.parametrize("line", ["vaddps %ymm1,%ymm2,%ymm3", "jne    18 <f+0x10>", "mov    $0x2,%eax"])
def test_another_instruction_is_not_the_same(script, line):
    text = "10:\t{}\n"
    assert script.read_assembly("f", text.format(line)) != script.read_assembly("f", text.format("mov    $0x1,%eax"))


def test_differences_are_counted_and_shown(script, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(script, "LISTINGS", tmp_path)
    monkeypatch.setenv("SAME_SASS_LISTINGS", str(tmp_path))
    one, other = script.keep("FADD R1 ;\n"), script.keep("FMUL R1 ;\n")
    assert script.compare_cuda({"a": one, "b": one}, {"a": one, "b": one}) == 0
    assert script.compare_cuda({"a": one, "b": one}, {"a": other, "c": one}) == 3
    printed = capsys.readouterr().out
    assert "a: differs" in printed
    assert "c: in one tree alone" in printed
    assert "-FADD R1 ;\n+FMUL R1 ;" in printed
    assert script.compare_cpu({"f": one, "g": other}, {"h": other, "i": one}) == 0
    assert script.compare_cpu({"f": one, "g": other}, {"f": one, "g": one}) == 1
