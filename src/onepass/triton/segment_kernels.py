"""The kernels of segments, rows of unequal length (csrc/core/segment_problem.h).

A tile is ROWS rows by LANES items by HEADS places of the inner dims, and a block STEPS tiles one after another, which
are separate tensors: so the threads that share a row are as many as its lanes, however many items they have. A program
of `row_kernel` takes ROWS segments, block by block. The first block stays on the chip, so that a row of one block is
read once.

A row of more than SPAN items is cut into parts of equal size, which `part_kernel` computes. Items are cut into slots of
SPAN too, and a part has one of those that begin in its row, so that no two parts have the same. `row_kernel` writes to
`owners` which segment has a slot. A program of `part_kernel` takes GROUP slots, and of these the ones that have a part.
It runs twice: it writes the states of parts to `states`, and then it merges those of a row and finishes the part. How a
row is cut, and the order in which its states are merged, depend on its length alone.

Nobody may have looked at offsets and an order: what they say is kept within the items, and so all slots exist.

`call` is an Operands of segments.py. What a row adds up, and what is made of it, is as in kernels.py and epilogue.py.
"""

# mypy: disable-error-code="no-untyped-def"

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .score import base_of, exponential, number, offset, round_to


class Rows(NamedTuple):
    """Segments or a part of one, a column, at some places of the inner dims, a line."""

    segment: Any
    begin: Any  # the first item
    length: Any
    head: Any
    exists: Any


class Items(NamedTuple):
    """A tile of items of rows."""

    k: Any  # their numbers in the rows
    place: Any  # where they are in the ragged dim
    exists: Any
    x: Any  # scores; where a gradient has sums, results
    g: Any  # and their gradients


# Where rows and items are ---------------------------------------------------------------------------------------------


@triton.jit
def heads_of(first, columns, INDEX: tl.constexpr, HEADS: tl.constexpr):
    """The number of the program among those of the same places of the inner dims, and these places."""
    program = first + tl.program_id(0).to(tl.int64)
    chunks = tl.cdiv(columns, HEADS)
    head = (program % chunks * HEADS + tl.arange(0, HEADS))[None, None, :]
    return (program // chunks).to(INDEX), head.to(INDEX)


@triton.jit
def bounds_of(call, segment, exists, items, INDEX: tl.constexpr):
    """The first item of segments, and how many they have."""
    begin = tl.load(call.offsets + segment, mask=exists, other=0)
    end = tl.load(call.offsets + segment + 1, mask=exists, other=0)
    begin = tl.minimum(tl.maximum(begin, 0), items).to(INDEX)
    return begin, tl.minimum(tl.maximum(end, 0), items).to(INDEX) - begin


@triton.jit
def cut(begin, length, SPAN: tl.constexpr, PART: tl.constexpr, MOST: tl.constexpr):
    """How rows of more than SPAN items are cut: the slot of the first part, and from one to the next; how many parts
    there are, and their size."""
    count = tl.minimum(tl.maximum(length // PART, 1), MOST)
    return tl.cdiv(begin, SPAN), tl.maximum(length // SPAN // count, 1), count, tl.cdiv(length, count)


@triton.jit
def mark_slots(owners_ptr, rows, lane, SPAN: tl.constexpr, PART: tl.constexpr, MOST: tl.constexpr):
    """Writes the owners of the slots that the parts of rows have."""
    first_slot, step, count, _ = cut(rows.begin, rows.length, SPAN, PART, MOST)
    count = tl.where(rows.length > SPAN, count, 0)
    for start in range(0, tl.max(count), lane.shape[1]):
        part = start + lane
        tl.store(owners_ptr + first_slot + part * step, rows.segment + tl.zeros_like(part), mask=part < count)


@triton.jit
def item_address(operand, call, rows, k, place):
    data = operand.data + offset(rows.head, call.sizes, operand.strides)
    if len(call.order) > 0:
        return data + place * operand.step
    else:  # products of a row and of a number, none of each item
        return data + rows.begin * operand.step + k * operand.step


@triton.jit
def row_address(operand, call, rows):
    return operand.data + rows.segment * operand.step + offset(rows.head, call.sizes, operand.strides)


# A block of items -----------------------------------------------------------------------------------------------------


@triton.jit
def load_items(call, rows, k, items, TERM: tl.constexpr, ACC: tl.constexpr):
    in_row = k < rows.length
    place = rows.begin + k
    if len(call.order) > 0:
        place = tl.load(call.order[0] + place, mask=in_row, other=0)
        place = tl.minimum(tl.maximum(place, 0), items - 1).to(rows.begin.dtype)
    exists = in_row & rows.exists
    x = tl.load(item_address(call.first, call, rows, k, place), mask=exists, other=0.0).to(ACC)
    second = x
    if len(call.second) > 0:
        second = tl.load(item_address(call.second, call, rows, k, place), mask=exists, other=0.0).to(ACC)
    if TERM is None:
        x *= number(call.factor, ACC)
        if len(call.second) > 0:
            x += second
        x = tl.where(exists, x, -float("inf"))
    return Items(k, place, exists, x, second)


@triton.jit
def load_block(call, rows, k, items, TERM: tl.constexpr, ACC: tl.constexpr, STEPS: tl.constexpr):
    """The items from ``k`` on, as a tree of pairs."""
    if STEPS == 1:
        return load_items(call, rows, k, items, TERM, ACC)
    else:
        half = load_block(call, rows, k, items, TERM, ACC, STEPS // 2)
        return half, load_block(call, rows, k + STEPS // 2 * k.shape[1], items, TERM, ACC, STEPS // 2)


@triton.jit
def largest(block, STEPS: tl.constexpr):
    """The maxima of scores, of each place of a tile."""
    if STEPS == 1:
        return block.x
    else:
        return tl.maximum(largest(block[0], STEPS // 2), largest(block[1], STEPS // 2))


@triton.jit
def terms_of(block, base, TERM: tl.constexpr, TYPE: tl.constexpr, STEPS: tl.constexpr):
    """The sums of what items add to their rows, of each place of a tile."""
    if STEPS > 1:
        half = terms_of(block[0], base, TERM, TYPE, STEPS // 2)
        return half + terms_of(block[1], base, TERM, TYPE, STEPS // 2)
    elif TERM is None:
        return exponential(block.x - base, TYPE)
    else:
        return TERM(block.x, block.g)


@triton.jit
def absorb(m, l, block, TERM: tl.constexpr, REDUCES: tl.constexpr, TYPE: tl.constexpr, STEPS: tl.constexpr):
    """The states of rows with a block more. Sums have no m."""
    if TERM is None:
        top = tl.maximum(m, tl.max(largest(block, STEPS), 1, keep_dims=True))
        base = base_of(top, REDUCES)
        terms = terms_of(block, base, TERM, TYPE, STEPS)
        return top, l * exponential(m - base, TYPE) + tl.sum(terms, 1, keep_dims=True)
    else:
        return m, l + tl.sum(terms_of(block, m, TERM, TYPE, STEPS), 1, keep_dims=True)


@triton.jit
def store_block(call, rows, block, numbers, EPILOGUE: tl.constexpr, STEPS: tl.constexpr):
    TYPE: tl.constexpr = call.result.data.dtype.element_ty
    if STEPS > 1:
        store_block(call, rows, block[0], numbers, EPILOGUE, STEPS // 2)
        store_block(call, rows, block[1], numbers, EPILOGUE, STEPS // 2)
    else:
        g = block.g
        if len(call.grad) > 0:
            g = numbers[1]
        y = EPILOGUE(block.x, g, numbers, TYPE)
        if len(call.is_gradient) > 0:
            y *= number(call.factor, y.dtype)
        tl.store(item_address(call.result, call, rows, block.k, block.place), round_to(y, TYPE), mask=block.exists)


# Rows -----------------------------------------------------------------------------------------------------------------


@triton.jit
def nothing(ROWS: tl.constexpr, HEADS: tl.constexpr, ACC: tl.constexpr):
    """The states of rows without items."""
    return tl.full((ROWS, 1, HEADS), -float("inf"), ACC), tl.zeros((ROWS, 1, HEADS), ACC)


@triton.jit
def absorb_from(
    m, l, call, rows, start, longest, lane, items, TERM: tl.constexpr, REDUCES: tl.constexpr, STEPS: tl.constexpr
):
    """The states of rows with all items from a number on."""
    for k in range(start, longest, STEPS * lane.shape[1]):
        block = load_block(call, rows, k + lane, items, TERM, m.dtype, STEPS)
        m, l = absorb(m, l, block, TERM, REDUCES, call.result.data.dtype.element_ty, STEPS)
    return m, l


@triton.jit
def store_from(
    call, rows, start, longest, lane, items, numbers, TERM: tl.constexpr, EPILOGUE: tl.constexpr, STEPS: tl.constexpr
):
    """The results of these items."""
    for k in range(start, longest, STEPS * lane.shape[1]):
        block = load_block(call, rows, k + lane, items, TERM, numbers[0].dtype, STEPS)
        store_block(call, rows, block, numbers, EPILOGUE, STEPS)


@triton.jit
def merge_parts(
    states, columns, rows, first_slot, step, count, TERM: tl.constexpr, REDUCES: tl.constexpr, BLOCK: tl.constexpr
):
    """The state of a row from those of its parts."""
    TYPE: tl.constexpr = states[0].dtype.element_ty
    m, l = nothing(1, rows.head.shape[2], TYPE)
    for start in range(0, count, BLOCK):
        part = start + tl.arange(0, BLOCK)[None, :, None]
        exists = (part < count) & rows.exists
        at = (first_slot + part * step).to(tl.int64) * columns + rows.head
        own_l = tl.load(states[1] + at, mask=exists, other=0.0)
        if TERM is None:
            own_m = tl.load(states[0] + at, mask=exists, other=-float("inf"))
            top = tl.maximum(m, tl.max(own_m, 1, keep_dims=True))
            base = base_of(top, REDUCES)
            l = l * exponential(m - base, TYPE)
            own_l *= exponential(own_m - base, TYPE)
            m = top
        l += tl.sum(own_l, 1, keep_dims=True)
    return m, l


@triton.jit
def load_row(call, rows):
    """The numbers of the gradient of logsumexp: the result and its gradient."""
    lse = tl.load(row_address(call.row, call, rows), mask=rows.exists, other=0.0)
    return lse, tl.load(row_address(call.grad, call, rows), mask=rows.exists, other=0.0)


@triton.jit
def store_row(call, rows, numbers):
    TYPE: tl.constexpr = call.result.data.dtype.element_ty
    to = row_address(call.result, call, rows)
    for k in tl.static_range(len(numbers)):
        tl.store(to + k * call.plane[0], round_to(numbers[k], TYPE), mask=rows.exists)


# Kernels --------------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["first", "segments", "items", "columns"])
def row_kernel(
    call,
    owners_ptr,
    first,
    segments,
    items,
    columns,
    TERM: tl.constexpr,
    ROW: tl.constexpr,
    EPILOGUE: tl.constexpr,
    IS_WIDE: tl.constexpr,
    STEPS: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    HEADS: tl.constexpr,
    SPAN: tl.constexpr,
    PART: tl.constexpr,
    MOST: tl.constexpr,
):
    TYPE: tl.constexpr = call.result.data.dtype.element_ty
    ACC: tl.constexpr = tl.float64 if call.first.data.dtype.element_ty.is_fp64() else tl.float32
    INDEX: tl.constexpr = tl.int64 if IS_WIDE else tl.int32
    REDUCES: tl.constexpr = EPILOGUE is None
    program, head = heads_of(first, columns, INDEX, HEADS)
    lane = tl.arange(0, LANES)[None, :, None].to(INDEX)
    segment = (program * ROWS + tl.arange(0, ROWS))[:, None, None]
    exists = segment < segments
    begin, length = bounds_of(call, segment, exists, items, INDEX)
    exists = exists & (head < columns)
    if owners_ptr is not None:
        if tl.max(length) > SPAN:
            mark_slots(owners_ptr, Rows(segment, begin, length, head, exists), lane, SPAN, PART, MOST)
        length = tl.where(length > SPAN, 0, length)
    rows = Rows(segment, begin, length, head, exists)
    longest = tl.max(length)

    own = load_block(call, rows, lane, items, TERM, ACC, STEPS)
    if len(call.grad) > 0:
        numbers = load_row(call, rows)
    else:
        m, l = nothing(ROWS, HEADS, ACC)
        m, l = absorb(m, l, own, TERM, REDUCES, TYPE, STEPS)
        m, l = absorb_from(m, l, call, rows, STEPS * LANES, longest, lane, items, TERM, REDUCES, STEPS)
        numbers = ROW(m, l, TYPE)
    if EPILOGUE is None:
        store_row(call, rows, numbers)
    else:
        store_block(call, rows, own, numbers, EPILOGUE, STEPS)
        store_from(call, rows, STEPS * LANES, longest, lane, items, numbers, TERM, EPILOGUE, STEPS)


@triton.jit(do_not_specialize=["first", "slots", "items", "columns"])
def part_kernel(
    call,
    owners_ptr,
    states,
    first,
    slots,
    items,
    columns,
    TERM: tl.constexpr,
    ROW: tl.constexpr,
    EPILOGUE: tl.constexpr,
    FINISHES: tl.constexpr,
    IS_WIDE: tl.constexpr,
    GROUP: tl.constexpr,
    STEPS: tl.constexpr,
    LANES: tl.constexpr,
    HEADS: tl.constexpr,
    SPAN: tl.constexpr,
    PART: tl.constexpr,
    MOST: tl.constexpr,
):
    TYPE: tl.constexpr = call.result.data.dtype.element_ty
    ACC: tl.constexpr = tl.float64 if call.first.data.dtype.element_ty.is_fp64() else tl.float32
    INDEX: tl.constexpr = tl.int64 if IS_WIDE else tl.int32
    REDUCES: tl.constexpr = EPILOGUE is None
    program, head = heads_of(first, columns, INDEX, HEADS)
    lane = tl.arange(0, LANES)[None, :, None].to(INDEX)
    place = tl.arange(0, GROUP)
    owners = tl.load(owners_ptr + program * GROUP + place, mask=program * GROUP + place < slots, other=-1)
    own = tl.full((), -1, tl.int32)
    for _ in range(tl.sum((owners >= 0).to(tl.int32))):
        own = tl.min(tl.where((owners >= 0) & (place > own), place, GROUP))
        slot = program * GROUP + own
        segment = tl.load(owners_ptr + slot).to(INDEX)
        begin, length = bounds_of(call, segment, True, items, INDEX)
        first_slot, step, count, size = cut(begin, length, SPAN, PART, MOST)
        done = (slot - first_slot) // step * size
        size = tl.minimum(size, length - done)
        rows = Rows(segment, begin + done, size, head, head < columns)
        if not FINISHES:
            m, l = nothing(1, HEADS, ACC)
            m, l = absorb_from(m, l, call, rows, 0, size, lane, items, TERM, REDUCES, STEPS)
            at = slot.to(tl.int64) * columns + head
            if TERM is None:
                tl.store(states[0] + at, m, mask=rows.exists)
            tl.store(states[1] + at, l, mask=rows.exists)
        elif EPILOGUE is None:
            if done == 0:
                m, l = merge_parts(states, columns, rows, first_slot, step, count, TERM, REDUCES, STEPS * LANES)
                store_row(call, rows, ROW(m, l, TYPE))
        else:
            if len(call.grad) > 0:
                numbers = load_row(call, rows)
            else:
                m, l = merge_parts(states, columns, rows, first_slot, step, count, TERM, REDUCES, STEPS * LANES)
                numbers = ROW(m, l, TYPE)
            store_from(call, rows, 0, size, lane, items, numbers, TERM, EPILOGUE, STEPS)
