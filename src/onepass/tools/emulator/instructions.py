"""Translates the PTX instructions that the kernels use to C++ statements, which call functions of arithmetic.h and
barriers.h. There is a method for each instruction; `m` are its modifiers, `o` its operands."""

from __future__ import annotations

from .operands import TYPES, Operands, identifier, members, size_of, twice

_SIGNS = {"add": "+", "sub": "-", "mul": "*", "and": "&", "or": "|", "xor": "^"}
_FUNCTIONS = {"abs": "std::abs", "bfi": "inserted", "div": "divided", "ex2": "ex2", "lg2": "lg2", "max": "largest"}
_OF_BITS = {"brev": "reversed", "clz": "leading_zeros", "popc": "ones"}  # for 32 bits only
_FUNCTIONS |= {"min": "smallest", "neg": "-", "prmt": "prmt", "rem": "remainder"}
_FUNCTIONS |= {"shl": "shifted_left", "shr": "shifted_right"}
_COMPARE = {"eq": "==", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "ne": "!="}
_UNORDERED = {"neu": "eq", "ltu": "ge", "leu": "gt", "gtu": "le", "geu": "lt"}  # the negation: true for a NaN
_PAIRS = {"add": "a + b", "sub": "a - b", "mul": "a * b", "fma": "std::fma(a, b, c)", "max": "largest(a, b)"}
_PAIRS["min"] = "smallest(a, b)"
# For each shuffle: the lane that a lane reads from, and the comparison that says whether that lane is in the group. If
# it is not, the lane keeps its own value.
_LANES = {"bfly": ("t->lane ^ by", "<="), "idx": ("first | (by & ~group)", "<=")}
_LANES |= {"up": ("t->lane - by", ">="), "down": ("t->lane + by", "<=")}
_VOTES = {"any": "!= 0", "all": "== ballot(t, true, {})"}
# These do nothing here: writes are visible to all threads at once, and a kernel starts after the previous one has
# ended.
IGNORED = ("fence", "griddepcontrol", "membar", "prefetch")


class Instructions(Operands):
    def made(self, name: str, m: list[str], o: list[str]) -> str:
        if name in IGNORED:
            return ""
        if name in ("max", "min") and "NaN" in m and (name, m[-1]) != ("max", "f32"):
            return self.refuse(name, m)
        if name in _PAIRS and m[-1] in ("f16x2", "bf16x2"):
            return self.pairs(_PAIRS[name], m[-1][:-2], o)
        if name in _SIGNS and m[0] not in ("wide", "hi"):
            kind = m[-1].replace("s", "u")  # signed overflow is undefined in C++
            return self.put(o[0], f"{TYPES[kind]}({self.get(kind, o[1])} {_SIGNS[name]} {self.get(kind, o[2])})", kind)
        if name in _FUNCTIONS:
            values = ", ".join(self.get(m[-1], operand) for operand in o[1:])
            function = "largest_or_nan" if name == "max" and "NaN" in m else _FUNCTIONS[name]
            return self.put(o[0], f"{function}({values})", m[-1])
        if name in _OF_BITS and m == ["b32"]:
            return self.put(o[0], f"{_OF_BITS[name]}({self.get('b32', o[1])})", "u32")
        method = getattr(self, f"{name}_", None)
        if method is None:
            raise ValueError(f"PTX: no such instruction here: {name}.{'.'.join(m)}")
        return method(m, o)

    def refuse(self, name: str, m: list[str]) -> str:
        raise ValueError(f"PTX: no such instruction here: {name}.{'.'.join(m)}")

    # Arithmetic -------------------------------------------------------------------------------------------------------

    def pairs(self, value: str, kind: str, o: list[str]) -> str:
        values = ", ".join(f"{v} = of_{kind}({v}h)" for v in "abc")
        f = f"[](uint16_t ah, uint16_t bh, uint16_t ch) {{ const float {values}; return to_{kind}({value}); }}"
        operands = [*(self.get("b32", operand) for operand in o[1:]), "0u"][:3]
        return self.put(o[0], f"by_halves({', '.join(operands)}, {f})", "b32")

    def mul_(self, m: list[str], o: list[str]) -> str:
        a, b = self.get(m[1], o[1]), self.get(m[1], o[2])
        if m[0] == "wide":
            return self.put(o[0], f"{TYPES[twice(m[1])]}({TYPES[twice(m[1])]}({a}) * {b})", twice(m[1]))
        wide = "__int128" if m[1][0] == "s" else "unsigned __int128"
        return self.put(o[0], f"{TYPES[m[1]]}(({wide}({a}) * {b}) >> {m[1][1:]})", m[1])

    def mad_(self, m: list[str], o: list[str]) -> str:
        kind = m[1].replace("s", "u") if m[0] == "lo" else twice(m[1])
        a, b = (f"{TYPES[kind]}({self.get(m[1], operand)})" for operand in o[1:3])
        return self.put(o[0], f"{TYPES[kind]}({a} * {b} + {self.get(kind, o[3])})", kind)

    def fma_(self, m: list[str], o: list[str]) -> str:
        if m[0] not in ("rn", "rm"):
            return self.refuse("fma", m)
        function = "fma_down" if m[0] == "rm" else "std::fma"
        return self.put(o[0], f"{function}({', '.join(self.get(m[-1], operand) for operand in o[1:])})", m[-1])

    def rcp_(self, m: list[str], o: list[str]) -> str:
        value = self.get(m[-1], o[1])
        return self.put(o[0], f"rcp({value})" if m[0] == "approx" else f"{TYPES[m[-1]]}(1 / {value})", m[-1])

    def copysign_(self, m: list[str], o: list[str]) -> str:  # in PTX the sign is the first operand
        sign, value = (self.get(m[-1], operand) for operand in o[1:])
        return self.put(o[0], f"std::copysign({value}, {sign})", m[-1])

    def shf_(self, m: list[str], o: list[str]) -> str:
        if m[1] != "wrap":
            return self.refuse("shf", m)
        low, high, by = (self.get("b32", operand) for operand in o[1:])
        shifted = f"<< ({by} & 31) >> 32" if m[0] == "l" else f">> ({by} & 31)"
        return self.put(o[0], f"uint32_t((uint64_t({high}) << 32 | {low}) {shifted})", "b32")

    def not_(self, m: list[str], o: list[str]) -> str:
        sign = "!" if m[-1] == "pred" else "~"
        return self.put(o[0], f"{TYPES[m[-1]]}({sign}{self.get(m[-1], o[1])})", m[-1])

    def bfind_(self, m: list[str], o: list[str]) -> str:
        if m != ["shiftamt", "u32"]:
            return self.refuse("bfind", m)
        return self.put(o[0], f"largest_shift({self.get('u32', o[1])})", "u32")

    def trap_(self, m: list[str], o: list[str]) -> str:
        return 'fail("a trap");'

    # Values -----------------------------------------------------------------------------------------------------------

    def mov_(self, m: list[str], o: list[str]) -> str:
        kind, to, of = m[-1], members(o[0]), members(o[1])
        if kind == "b128":
            if len(of) == 2:
                return f"{identifier(to[0])} = {{{self.get('b64', of[0])}, {self.get('b64', of[1])}}};"
            return f"{self.put(to[0], f'{of[0]}.low', 'u64')} {self.put(to[1], f'{of[0]}.high', 'u64')}"
        if len(of) > 1:
            each = 8 * size_of(kind) // len(of)
            parts = [f"{TYPES[kind]}({self.get(f'b{each}', part)}) << {i * each}" for i, part in enumerate(of)]
            return self.put(to[0], f"{TYPES[kind]}({' | '.join(parts)})", kind)
        value = self.get(kind, of[0])
        if len(to) > 1:
            each = 8 * size_of(kind) // len(to)
            parts = [f"{TYPES[f'b{each}']}({value} >> {i * each})" for i in range(len(to))]
            return " ".join(self.put(part, part_of, f"b{each}") for part, part_of in zip(to, parts, strict=True))
        return self.put(to[0], value, kind)

    def selp_(self, m: list[str], o: list[str]) -> str:
        return self.put(o[0], f"{self.get('pred', o[3])} ? {self.get(m[-1], o[1])} : {self.get(m[-1], o[2])}", m[-1])

    def setp_(self, m: list[str], o: list[str]) -> str:
        a, b = self.get(m[-1], o[1]), self.get(m[-1], o[2])
        ordered, negated = _UNORDERED.get(m[0], m[0]), m[0] in _UNORDERED
        if m[0] in ("num", "nan"):
            return self.put(o[0], f"bool({'' if m[0] == 'num' else '!'}({a} == {a} && {b} == {b}))", "pred")
        if len(m) > 2 or ordered not in _COMPARE:
            return self.refuse("setp", m)
        value = f"{a} {_COMPARE[ordered]} {b}"
        if m[0] == "ne" and m[-1][0] == "f":
            value = f"{a} < {b} || {a} > {b}"
        return self.put(o[0], f"bool({'!' if negated else ''}({value}))", "pred")

    def cvt_(self, m: list[str], o: list[str]) -> str:
        to, of = m[-2:]
        if to in ("f16x2", "bf16x2"):
            high, low = (f"uint32_t(to_{to[:-2]}({self.get('f32', operand)}))" for operand in o[1:])
            return self.put(o[0], f"uint32_t({high} << 16 | {low})", "b32")
        if of in ("f16", "bf16"):
            return self.put(o[0], f"{TYPES[to]}(of_{of}({self.get('b16', o[1])}))", to)
        value = self.get(of, o[1])
        if to in ("f16", "bf16"):
            return self.put(o[0], f"to_{to}{'_down' if 'rm' in m else ''}(float({value}))", "b16")
        if "sat" in m:
            value = f"saturated({value})"
        if "rni" in m:
            value = f"std::nearbyint({value})"
        return self.put(o[0], f"{TYPES[to]}({value})", to)

    def cvta_(self, m: list[str], o: list[str]) -> str:
        """The generic address of shared memory is its address in this process."""
        value = self.get("u64", o[1])
        if "shared" in m:
            value += f" {'-' if m[0] == 'to' else '+'} uint64_t(t->block->shared)"
        return self.put(o[0], f"uint64_t({value})", "u64")

    def mapa_(self, m: list[str], o: list[str]) -> str:
        return self.put(o[0], f"uint32_t({self.get('u32', o[1])} | ({self.get('u32', o[2])} + 1) << 24)", "u32")

    # Memory -----------------------------------------------------------------------------------------------------------

    def ld_(self, m: list[str], o: list[str]) -> str:
        kind, to = m[-1], members(o[0])
        at = self.at(m, o[1], size_of(kind) * len(to), False)
        looks = "wait(t); " if {"relaxed", "acquire", "volatile"} & set(m) else ""  # other threads may change it
        if kind == "b128":
            return f"{looks}{identifier(to[0])} = load<Pair>({at});"
        loads = [self.put(part, f"load<{TYPES[kind]}>(from + {i * size_of(kind)})", kind) for i, part in enumerate(to)]
        return f"{{ {looks}const char* const from = {at}; {' '.join(loads)} }}"

    def st_(self, m: list[str], o: list[str]) -> str:
        of = members(o[1])
        if m[0] == "async":
            to, counter = (f"uint32_t({self.address(operand)})" for operand in (o[0], o[2]))
            words = ", ".join(self.get("b32", word) for word in of)
            return f"{{ const uint32_t words[] = {{{words}}}; send(t, {to}, words, {counter}); }}"
        kind = m[-1]
        at = self.at(m, o[0], size_of(kind) * len(of), True)
        told = " has_happened(t);" if {"relaxed", "release", "volatile"} & set(m) else ""
        if kind == "b128":
            return f"store({at}, {identifier(of[0])});{told}"
        stores = [f"store(to + {i * size_of(kind)}, {self.get(kind, part)});" for i, part in enumerate(of)]
        return f"{{ char* const to = {at}; {' '.join(stores)}{told} }}"

    def red_(self, m: list[str], o: list[str]) -> str:
        return self.updated(m, o[0], o[1]) + ";"

    def atom_(self, m: list[str], o: list[str]) -> str:
        return self.put(o[0], self.updated(m, o[1], o[2]), m[-1])

    def updated(self, m: list[str], at: str, by: str) -> str:
        """An atomic update of memory with a value. Returns the old value."""
        kind, update = m[-1], {"add": "before + by", "max": "largest(before, by)", "min": "smallest(before, by)"}
        update["or"] = "before | by"
        if m[-2] not in update:
            return self.refuse("atom", m)
        function = f"[]({TYPES[kind]} before, {TYPES[kind]} by) {{ return {TYPES[kind]}({update[m[-2]]}); }}"
        return f"update(t, {self.at(m, at, size_of(kind), True)}, {self.get(kind, by)}, {function})"

    def _shared(self, operand: str) -> str:
        return f"uint32_t({self.address(operand)})"

    def cp_(self, m: list[str], o: list[str]) -> str:
        if m[1] == "commit_group":
            return "commit_copies(t);"
        if m[1] == "wait_group":
            return f"await_copies(t, {o[0]});"
        if m[1:3] == ["bulk", "commit_group"]:
            return "commit_stores(t);"
        if m[1:4] == ["bulk", "wait_group", "read"] and o == ["0"]:
            return "await_stores(t);"
        if m[1:4] == ["bulk", "shared::cluster", "global"]:
            to, counter = self._shared(o[0]), self._shared(o[3])
            return f"copy_bulk(t, {to}, {self.address(o[1])}, {self.get('s32', o[2])}, {counter});"
        if m[1:4] == ["bulk", "global", "shared::cta"]:
            return f"store_bulk(t, {self.address(o[0])}, {self._shared(o[1])}, {self.get('s32', o[2])});"
        if m[1] not in ("ca", "cg"):
            return self.refuse("cp", m)
        return f"copy_async(t, {self._shared(o[0])}, {self.address(o[1])}, {o[2]});"

    # Control and barriers ---------------------------------------------------------------------------------------------

    def bra_(self, m: list[str], o: list[str]) -> str:
        return f"goto {identifier(o[0])};"

    def ret_(self, m: list[str], o: list[str]) -> str:
        return "return;"

    def bar_(self, m: list[str], o: list[str]) -> str:
        if m == ["sync"]:
            return f"block_sync(t, {', '.join(self.get('u32', operand) for operand in o)});"
        if m == ["arrive"]:
            return f"block_arrive(t, {self.get('u32', o[0])}, {self.get('u32', o[1])});"
        if m == ["warp", "sync"]:
            return f"warp_sync(t, {self.get('u32', o[0])});"
        if m == ["red", "or", "pred"]:
            return self.put(o[0], f"block_any(t, {self.get('u32', o[1])}, {self.get('pred', o[2])})", "pred")
        if m == ["red", "and", "pred"]:
            return self.put(o[0], f"block_all(t, {self.get('u32', o[1])}, {self.get('pred', o[2])})", "pred")
        if m == ["red", "popc", "u32"]:
            return self.put(o[0], f"block_count(t, {self.get('u32', o[1])}, {self.get('pred', o[2])})", "u32")
        return self.refuse("bar", m)

    def barrier_(self, m: list[str], o: list[str]) -> str:
        if m[0] != "cluster":
            return self.refuse("barrier", m)
        return "arrive_in_cluster(t);" if m[1] == "arrive" else "await_cluster(t);"

    def mbarrier_(self, m: list[str], o: list[str]) -> str:
        if m[0] == "init":
            return f"open_barrier(t, {self._shared(o[0])}, {self.get('u32', o[1])});"
        at = self._shared(o[1])
        if m[:2] == ["arrive", "expect_tx"]:
            return f"expect(t, {at}, {self.get('u32', o[2])});"
        if m[:2] == ["try_wait", "parity"]:
            return self.put(o[0], f"is_over(t, {at}, {self.get('u32', o[2])})", "pred")
        return self.refuse("mbarrier", m)

    def shfl_(self, m: list[str], o: list[str]) -> str:
        to, _, there = o[0].partition("|")
        value, by, group, mask = (self.get("u32", operand) for operand in o[1:])
        lane, compare = _LANES[m[1]]
        from_lane = (
            f"const uint32_t by = {by}, group = {group} >> 8, first = t->lane & group; "
            f"const uint32_t last = first | ({group} & 31 & ~group), from = {lane}; "
            f"const bool has = int32_t(from) {compare} int32_t(last);"
        )
        told = f" {identifier(there)} = has;" if there else ""
        exchanged = self.put(to, f"exchanged(t, {value}, has ? from : t->lane, {mask})", "u32")
        return f"{{ {from_lane} {exchanged}{told} }}"

    def vote_(self, m: list[str], o: list[str]) -> str:
        mask = self.get("u32", o[2])
        votes = f"ballot(t, {self.get('pred', o[1])}, {mask})"
        if m == ["sync", "ballot", "b32"]:
            return self.put(o[0], votes, "b32")
        if m[1] not in _VOTES:
            return self.refuse("vote", m)
        return self.put(o[0], f"bool({votes} {_VOTES[m[1]].format(mask)})", "pred")

    def redux_(self, m: list[str], o: list[str]) -> str:
        if m != ["sync", "max", "s32"]:
            return self.refuse("redux", m)
        return self.put(o[0], f"largest_of_warp(t, {self.get('s32', o[1])}, {self.get('u32', o[2])})", "s32")
