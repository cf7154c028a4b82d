"""Translates operands and types of PTX to C++."""

from __future__ import annotations

import re

_UNSIGNED = {"8": "uint8_t", "16": "uint16_t", "32": "uint32_t", "64": "uint64_t"}
TYPES = {
    **{kind + bits: name for kind in "bu" for bits, name in _UNSIGNED.items()},
    **{"s" + bits: name[1:] for bits, name in _UNSIGNED.items()},
    "f32": "float",
    "f64": "double",
    "pred": "bool",
    "b128": "Pair",
}
SPECIAL = {
    "%globaltimer": "nanoseconds()",
    "%tid.x": "t->index",
    "%ntid.x": "t->block->grid->launch.block",
    "%ctaid.x": "t->block->x",
    "%ctaid.y": "t->block->y",
    "%nctaid.x": "t->block->grid->launch.grid_x",
    "%nctaid.y": "t->block->grid->launch.grid_y",
    "%cluster_ctarank": "t->block->rank",
    "%envreg1": "uint32_t(uint64_t(t->block->grid->workspace) >> 32)",
    "%envreg2": "uint32_t(uint64_t(t->block->grid->workspace))",
}


def size_of(kind: str) -> int:
    """The bytes of a type."""
    return int(kind[1:]) // 8


def twice(kind: str) -> str:
    """The type of twice the width, that of a wide product."""
    return kind[0] + str(2 * int(kind[1:]))


def identifier(register: str) -> str:
    return register.lstrip("%$").replace(".", "_")


def split(text: str) -> list[str]:
    """The operands of an instruction. They are separated by commas; a vector in braces is one operand."""
    return [part.strip() for part in re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|[^,{\[])+", text) if part.strip()]


def members(operand: str) -> list[str]:
    """The members of a vector operand."""
    return [part.strip() for part in operand.strip("{} ").split(",")]


def _both_integers(one: str, other: str) -> bool:
    """Whether both are integer types of one size."""
    return one.endswith("_t") and one.lstrip("u") == other.lstrip("u")


def _as(to: str, of: str, value: str) -> str:
    """The bits of a value as another type. If a cast does that, it is used: it compiles twice as fast."""
    if to == of:
        return value
    return f"{to}({value})" if _both_integers(to, of) else f"as<{to}>({value})"


class Operands:
    """The names that operands refer to: registers, and addresses of kernel parameters and of memory."""

    def __init__(self) -> None:
        self.symbols: dict[str, str] = {}
        self.local = ""  # the array of a thread's local memory
        self.registers: dict[str, str] = {}  # their types; registers of inline assembly have no % prefix

    def symbol(self, operand: str) -> str:
        if operand not in self.symbols:
            raise ValueError(f"PTX: no such symbol: {operand}")
        return self.symbols[operand]

    def get(self, kind: str, operand: str) -> str:
        """The value of an operand as the PTX type `kind`."""
        to = TYPES[kind]
        if match := re.fullmatch(r"0[fFdD]([0-9a-fA-F]{8}|[0-9a-fA-F]{16})", operand):
            return f"as<{to}>(uint{4 * len(match[1])}_t(0x{match[1]}ull))"
        if re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)U?", operand):
            return f"{to}({operand.rstrip('U')}ll)"
        if operand in SPECIAL:
            return f"{to}({SPECIAL[operand]})"
        if operand.startswith("!"):
            return f"!{identifier(operand[1:])}"
        if operand in self.registers:
            return _as(to, self.registers[operand], identifier(operand))
        return f"{to}({self.symbol(operand)})"

    def put(self, to: str, value: str, kind: str) -> str:
        """Writes a value of the PTX type `kind` to the register `to`."""
        if to == "_":
            return ""
        if TYPES[kind] == self.registers[to] or _both_integers(TYPES[kind], self.registers[to]):
            return f"{identifier(to)} = {value};"
        return f"put({identifier(to)}, {TYPES[kind]}({value}));"

    def address(self, operand: str) -> str:
        """The address of an operand [base + offset]."""
        match = re.fullmatch(r"\[\s*(\S+?)\s*(?:\+\s*(-?\d+))?\s*\]", operand)
        if not match:
            raise ValueError(f"PTX: no address: {operand}")
        base = f"uint64_t({identifier(match[1])})" if match[1] in self.registers else self.symbol(match[1])
        return f"({base} + uint64_t({match[2] or 0}ll))"

    def at(self, modifiers: list[str], operand: str, size: int, writes: bool) -> str:
        """The checked pointer for an access of `size` bytes."""
        address = self.address(operand)
        if "shared" in modifiers or "shared::cluster" in modifiers:
            return f"shared_at(t, uint32_t({address}), {size})"
        if "param" in modifiers:
            return f"param_at({address})"
        if "local" in modifiers:
            return f"local_at({address}, {size}, {self.local}, sizeof {self.local})"
        if "const" in modifiers:
            raise ValueError(f"PTX: memory of {modifiers}")
        space = "global" if "global" in modifiers else "generic"
        return f"{space}_at(t, {address}, {size}, {str(writes).lower()})"
