"""The kernels of segments, rows of unequal length (csrc/core/segment_problem.h).

A row is a segment at one position of the inner dims (heads). A tile is ROWS rows by LANES items by HEADS positions of
the inner dims. A block is STEPS consecutive tiles, held in separate tensors, so that the number of threads that share a
row is the number of its lanes, whatever STEPS is. A program of `row_kernel` takes ROWS segments, block by block. The
first block stays on the chip, so that a row of one block is read once.

A row of more than SPAN items is cut into parts of equal size, which `part_kernel` computes. All items are cut into
slots of SPAN items. Each part owns one of the slots that begin in its row, so no slot has two parts. `row_kernel`
writes to `owners` which segment owns a slot. A program of `part_kernel` takes GROUP slots and computes the parts that
own them. It runs twice: first it writes the states of parts to `states`, then it merges the states of a row and
finishes the part. How a row is cut, and the order in which its states are merged, depend only on its length.

Offsets and an order may be unchecked. Their values are clamped to the range of the items, so that all slots exist.

`call` is an Operands of segments.py. TERM, ROW and EPILOGUE are as in kernels.py and epilogue.py.
"""

# mypy: disable-error-code="no-untyped-def"

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .score import base_of, exponential, number, offset, round_to


class Rows(NamedTuple):
    """Segments, or a part of one, as a column; and some positions of the inner dims, as a row."""

    segment: Any
    begin: Any  # the first item
    length: Any
    head: Any
    exists: Any


class Items(NamedTuple):
    """A tile of items of rows."""

    k: Any  # positions in the rows
    place: Any  # positions in the ragged dim
    exists: Any
    x: Any  # scores; for a gradient with sums, results of the forward
    g: Any  # upstream gradients, for a gradient with sums


# Where rows and items are ---------------------------------------------------------------------------------------------


@triton.jit
def heads_of(first, columns, INDEX: tl.constexpr, HEADS: tl.constexpr):
    """The number of the program among programs for the same positions of the inner dims, and these positions."""
    program = first + tl.program_id(0).to(tl.int64)
    chunks = tl.cdiv(columns, HEADS)
    head = (program % chunks * HEADS + tl.arange(0, HEADS))[None, None, :]
    return (program // chunks).to(INDEX), head.to(INDEX)


@triton.jit
def bounds_of(call, segment, exists, items, INDEX: tl.constexpr):
    """The first item of segments, and their lengths."""
    begin = tl.load(call.offsets + segment, mask=exists, other=0)
    end = tl.load(call.offsets + segment + 1, mask=exists, other=0)
    begin = tl.minimum(tl.maximum(begin, 0), items).to(INDEX)
    return begin, tl.minimum(tl.maximum(end, 0), items).to(INDEX) - begin


@triton.jit
def cut(begin, length, SPAN: tl.constexpr, PART: tl.constexpr, MOST: tl.constexpr):
    """How rows of more than SPAN items are cut: (the slot of the first part, slots from one part to the next, number of
    parts, items of a part)."""
    count = tl.minimum(tl.maximum(length // PART, 1), MOST)
    return tl.cdiv(begin, SPAN), tl.maximum(length // SPAN // count, 1), count, tl.cdiv(length, count)


@triton.jit
def mark_slots(owners_ptr, rows, lane, SPAN: tl.constexpr, PART: tl.constexpr, MOST: tl.constexpr):
    """Writes to `owners` the segment of each slot that a part owns."""
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
    else:  # without an order, no product of `place` is needed for each item
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
    """The block of items from ``k`` on, as a binary tree of STEPS tiles."""
    if STEPS == 1:
        return load_items(call, rows, k, items, TERM, ACC)
    else:
        half = load_block(call, rows, k, items, TERM, ACC, STEPS // 2)
        return half, load_block(call, rows, k + STEPS // 2 * k.shape[1], items, TERM, ACC, STEPS // 2)


@triton.jit
def largest(block, STEPS: tl.constexpr):
    """The maximum over the tiles of a block, for each element of a tile."""
    if STEPS == 1:
        return block.x
    else:
        return tl.maximum(largest(block[0], STEPS // 2), largest(block[1], STEPS // 2))


@triton.jit
def terms_of(block, base, TERM: tl.constexpr, TYPE: tl.constexpr, STEPS: tl.constexpr):
    """The sum of the terms of items over the tiles of a block, for each element of a tile."""
    if STEPS > 1:
        half = terms_of(block[0], base, TERM, TYPE, STEPS // 2)
        return half + terms_of(block[1], base, TERM, TYPE, STEPS // 2)
    elif TERM is None:
        return exponential(block.x - base, TYPE)
    else:
        return TERM(block.x, block.g)


@triton.jit
def absorb(m, l, block, TERM: tl.constexpr, REDUCES: tl.constexpr, TYPE: tl.constexpr, STEPS: tl.constexpr):
    """Merges a block into the states of rows. Sums of a gradient have no m."""
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
    """The states of empty rows."""
    return tl.full((ROWS, 1, HEADS), -float("inf"), ACC), tl.zeros((ROWS, 1, HEADS), ACC)


@triton.jit
def absorb_from(
    m, l, call, rows, start, longest, lane, items, TERM: tl.constexpr, REDUCES: tl.constexpr, STEPS: tl.constexpr
):
    """Merges all items from position ``start`` on into the states of rows."""
    for k in range(start, longest, STEPS * lane.shape[1]):
        block = load_block(call, rows, k + lane, items, TERM, m.dtype, STEPS)
        m, l = absorb(m, l, block, TERM, REDUCES, call.result.data.dtype.element_ty, STEPS)
    return m, l


@triton.jit
def store_from(
    call, rows, start, longest, lane, items, numbers, TERM: tl.constexpr, EPILOGUE: tl.constexpr, STEPS: tl.constexpr
):
    """Writes the results of all items from position ``start`` on."""
    for k in range(start, longest, STEPS * lane.shape[1]):
        block = load_block(call, rows, k + lane, items, TERM, numbers[0].dtype, STEPS)
        store_block(call, rows, block, numbers, EPILOGUE, STEPS)


@triton.jit
def merge_parts(
    states, columns, rows, first_slot, step, count, TERM: tl.constexpr, REDUCES: tl.constexpr, BLOCK: tl.constexpr
):
    """The state of a row, merged from the states of its parts."""
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
    """The numbers of a row for the gradient of logsumexp: the result and its gradient."""
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
