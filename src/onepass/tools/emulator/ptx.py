"""Translates a kernel's PTX from NVRTC to C++ for machine.h: one function, which each thread runs."""

from __future__ import annotations

import re
from collections.abc import Iterator

from .instructions import Instructions
from .operands import TYPES, identifier, size_of, split

_STATEMENT = re.compile(r"\s*(?:(?P<label>\$?\w+):(?!:)|(?P<brace>[{}])(?=\s)|(?P<statement>[^;]+);)")


class Kernel(Instructions):
    """The kernel `name` of a PTX file. `source` is its C++."""

    def __init__(self, ptx: str, name: str) -> None:
        super().__init__()
        self.shared = 0  # bytes of shared memory that the kernel declares
        ptx = re.sub(r"//[^\n]*", "", ptx)
        entries = re.split(r"\.visible \.entry\s+", ptx)
        entry = next((entry for entry in entries if re.match(rf"{re.escape(name)}\b", entry)), None)
        if entry is None:
            raise ValueError(f'the source has no kernel {name}: declare it extern "C" __global__ void {name}(...)')
        parameters, body = entry.split(")", 1)
        sizes = self.parameters(parameters)
        for symbol in re.findall(r"\.extern \.shared [^;]*?([\w$]+)\[\]", ptx):
            self.symbols[symbol] = "uint64_t(static_shared)"  # dynamic shared memory begins after the declared one
        lines = [self.line(statement) for statement in self.statements(body[body.index("{") + 1 : body.rindex("}")])]
        self.shared = -(-self.shared // 16) * 16
        text = "\n".join(lines)
        self.source = f"""#include "barriers.h"
using namespace emulator;
extern "C" {{
extern const uint32_t static_shared = {self.shared}, parameters = {len(sizes)}, sizes[] = {{{", ".join(sizes)}}};
void kernel(Thread* t) {{
{text}
}}
}}
"""

    def parameters(self, text: str) -> list[str]:
        """The sizes of the parameters. In memory each begins at a multiple of 8 bytes."""
        sizes, at = [], 0
        declared = re.findall(r"\.param (?:\.align \d+ )?\.(\w+) (\w+)(?:\[(\d+)\])?", text)
        for kind, symbol, count in declared:
            size = size_of(kind) * int(count or 1)
            at = -(-at // 8) * 8
            self.symbols[symbol] = f"(uint64_t(t->block->grid->params) + {at})"
            sizes.append(str(size))
            at += size
        return sizes

    def statements(self, body: str) -> Iterator[str]:
        at = 0
        while match := _STATEMENT.match(body, at):
            at = match.end()
            yield f"{match['label']}:" if match["label"] else match["brace"] or " ".join(match["statement"].split())
        if body[at:].strip():
            raise ValueError(f"PTX that is not understood: {body[at : at + 80]!r}")

    def line(self, text: str) -> str:
        if text in "{}":
            return text
        if text.endswith(":"):
            return f"{identifier(text[:-1])}:;"
        if text.startswith("."):
            return self.declaration(text)
        guard = ""
        if text.startswith("@"):
            guard, text = text.split(None, 1)
        name, *modifiers = text.split()[0].split(".")
        made = self.made(name, modifiers, split(text.partition(" ")[2]))
        return f"if ({self.get('pred', guard[1:])}) {{ {made} }}" if guard else made

    def declaration(self, text: str) -> str:
        if match := re.fullmatch(r"\.reg \.(\w+) (%?\w+)(?:<(\d+)>)?", text):
            kind, register, count = match.groups()
            names = [f"{register}{i}" for i in range(int(count))] if count else [register]
            self.registers |= dict.fromkeys(names, TYPES[kind])
            return f"{TYPES[kind]} {', '.join(map(identifier, names))};"
        if match := re.fullmatch(r"\.shared \.align (\d+) \.(\w+) ([\w$]+)(?:\[(\d+)\])?", text):
            align, kind, symbol, count = match.groups()
            self.shared = -(-self.shared // int(align)) * int(align)
            self.symbols[symbol] = f"uint64_t({self.shared})"
            self.shared += size_of(kind) * int(count or 1)
            return ""
        if match := re.fullmatch(r"\.local \.align (\d+) \.b8 ([\w$]+)\[(\d+)\]", text):
            align, self.local, count = match.groups()
            self.symbols[self.local] = f"uint64_t({self.local})"
            return f"alignas({align}) char {self.local}[{count}];"
        if text.startswith(".pragma"):
            return ""
        raise ValueError(f"PTX: a declaration that is not known: {text}")
