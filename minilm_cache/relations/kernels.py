"""Kernels of form `fused` of the relation loss, in Triton (relations/fused.py launches them).

A program has a block of rows of one head of one sequence, and goes over the columns in tiles; for gradients
of columns it has a block of these, and goes over the rows. With S the student's scores, T the teacher's,
P = softmax T, and LSE the logarithm of a sum of exponentials, the loss of a row is
    KL = LSE(S) - sum_j P_j S_j - (LSE(T) - sum_j P_j T_j),
whose sums are kept as those of an online softmax are (Milakov and Gimelshein 2018, arXiv 1805.02867). Its
gradient in S is softmax(S) - P, which is subtracted before it is multiplied by vectors: in the difference of
two products, which form `sdpa` takes, rounding counts for more the closer the student is to its teacher.
Sparse rows are entries instead of softmax T, and their loss is the cross entropy LSE(S) - sum_j P_j S_j.

All vectors are `(batch, length, heads, size)`, with `step` numbers from one position to the next, and numbers
of rows `(batch, length, heads)`, float32. `first` and `second` are the teacher's left-hand and right-hand
vectors, or the columns and weights of entries. Vectors of float32 are multiplied as three products of TF32,
which keeps what float32 does.
"""

from typing import Final, no_type_check

import triton
import triton.language as tl

_LEAST: Final = tl.constexpr(-1.0e30)
"""Score of columns that a row does not see."""


@triton.jit
@no_type_check
def losses_of_rows(
    left, right, first, second, base, mask, lengths, losses, student_lse, teacher_lse,
    scaling, teacher_scaling, size, step, teacher_step, of_batch, of_head, of_row, of_column,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
    TEACHER_WIDTH: tl.constexpr, TEACHER_PADDED: tl.constexpr,
    IS_SPARSE: tl.constexpr, HAS_BASE: tl.constexpr, HAS_MASK: tl.constexpr, IS_CAUSAL: tl.constexpr,
    IS_HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the loss of each row of a block, and the logarithms of its sums of exponentials."""
    sequence, head, begin = _place(size, HEADS, BLOCK)
    length = tl.load(lengths + sequence).to(tl.int32)
    at = sequence * size * HEADS + head
    left += sequence * size * step + head * WIDTH
    right += sequence * size * step + head * WIDTH
    if not IS_SPARSE:
        first += sequence * size * teacher_step + head * TEACHER_WIDTH
        second += sequence * size * teacher_step + head * TEACHER_WIDTH
    row = begin + tl.arange(0, BLOCK)
    rows = at + row.to(tl.int64) * HEADS
    queries = _vectors(left, row, length, step, WIDTH, PADDED)
    if not IS_SPARSE:
        teacher_queries = _vectors(first, row, length, teacher_step, TEACHER_WIDTH, TEACHER_PADDED)
    nothing = tl.zeros([BLOCK], tl.float32)
    most, total, teacher_most, teacher_total = nothing + _LEAST, nothing, nothing + _LEAST, nothing
    expected, own = nothing, nothing
    for start in range(0, _after(begin, length, BLOCK, IS_CAUSAL), BLOCK):
        column = start + tl.arange(0, BLOCK)
        seen = _seen(row, column, length, IS_CAUSAL)
        scores = _scores(queries, _vectors(right, column, length, step, WIDTH, PADDED), scaling)
        most, total, _, _ = _added(most, total, scores, seen)
        if IS_SPARSE:
            probs = _entries(first, second, base, rows, row < length, column, seen, TEACHER_WIDTH, HAS_BASE)
            expected += tl.sum(probs * scores, 1)
        else:
            keys = _vectors(second, column, length, teacher_step, TEACHER_WIDTH, TEACHER_PADDED)
            theirs = _scores(teacher_queries, keys, teacher_scaling)
            if HAS_MASK:
                shown = mask + sequence * of_batch + head * of_head
                seen = _shown(shown, row, column, seen, of_row, of_column)
            teacher_most, teacher_total, less, weights = _added(teacher_most, teacher_total, theirs, seen)
            expected = expected * less + tl.sum(weights * scores, 1)
            own = own * less + tl.sum(weights * theirs, 1)
    lse = most + tl.log(tl.where(row < length, total, 1.0))
    if IS_SPARSE:
        loss = lse - expected
    else:
        teacher_total = tl.where(row < length, teacher_total, 1.0)
        teacher = teacher_most + tl.log(teacher_total)
        loss = (lse - expected / teacher_total) - (teacher - own / teacher_total)
        tl.store(teacher_lse + rows, teacher, mask=row < length)
    tl.store(student_lse + rows, lse, mask=row < length)
    tl.store(losses + rows, loss, mask=row < length)


@triton.jit
@no_type_check
def gradients_of_vectors(
    left, right, first, second, base, mask, lengths, gradient, student_lse, teacher_lse, factor,
    scaling, teacher_scaling, size, step, teacher_step, of_batch, of_head, of_row, of_column,
    BY_COLUMNS: tl.constexpr,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
    TEACHER_WIDTH: tl.constexpr, TEACHER_PADDED: tl.constexpr,
    IS_SPARSE: tl.constexpr, HAS_BASE: tl.constexpr, HAS_MASK: tl.constexpr, IS_CAUSAL: tl.constexpr,
    IS_HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the gradient of a block of left-hand vectors, or of right-hand ones, which are columns."""
    sequence, head, begin = _place(size, HEADS, BLOCK)
    length = tl.load(lengths + sequence).to(tl.int32)
    at = sequence * size * HEADS + head
    left += sequence * size * step + head * WIDTH
    right += sequence * size * step + head * WIDTH
    if not IS_SPARSE:
        first += sequence * size * teacher_step + head * TEACHER_WIDTH
        second += sequence * size * teacher_step + head * TEACHER_WIDTH
    held = begin + tl.arange(0, BLOCK)
    mine = _vectors(right if BY_COLUMNS else left, held, length, step, WIDTH, PADDED)
    if not IS_SPARSE:
        own = _vectors(
            second if BY_COLUMNS else first, held, length, teacher_step, TEACHER_WIDTH, TEACHER_PADDED
        )
    found = tl.zeros([BLOCK, PADDED], tl.float32)
    after = _after(begin, length, BLOCK, IS_CAUSAL and not BY_COLUMNS)
    for start in range(begin if IS_CAUSAL and BY_COLUMNS else 0, after, BLOCK):
        met = start + tl.arange(0, BLOCK)
        row, column = (met, held) if BY_COLUMNS else (held, met)
        rows = at + row.to(tl.int64) * HEADS
        seen = _seen(row, column, length, IS_CAUSAL)
        others = _vectors(left if BY_COLUMNS else right, met, length, step, WIDTH, PADDED)
        if BY_COLUMNS:
            scores = _scores(others, mine, scaling)
        else:
            scores = _scores(mine, others, scaling)
        lse = tl.load(student_lse + rows, mask=row < length, other=0.0)
        change = tl.where(seen, tl.exp(scores - lse[:, None]), 0.0)
        if IS_SPARSE:
            change -= _entries(first, second, base, rows, row < length, column, seen, TEACHER_WIDTH, HAS_BASE)
        else:
            theirs = _vectors(
                first if BY_COLUMNS else second, met, length, teacher_step, TEACHER_WIDTH, TEACHER_PADDED
            )
            if BY_COLUMNS:
                scores = _scores(theirs, own, teacher_scaling)
            else:
                scores = _scores(own, theirs, teacher_scaling)
            if HAS_MASK:
                shown = mask + sequence * of_batch + head * of_head
                seen = _shown(shown, row, column, seen, of_row, of_column)
            lse = tl.load(teacher_lse + rows, mask=row < length, other=0.0)
            change -= tl.where(seen, tl.exp(scores - lse[:, None]), 0.0)
        if BY_COLUMNS:
            change = tl.trans(change)
        found = _multiplied(change, others, found, IS_HALF)
    found *= tl.load(factor)
    places = (at + held.to(tl.int64) * HEADS)[:, None] * WIDTH + tl.arange(0, PADDED)[None, :]
    inside = (held < length)[:, None] & (tl.arange(0, PADDED) < WIDTH)[None, :]
    tl.store(gradient + places, found.to(gradient.dtype.element_ty), mask=inside)


@triton.jit
@no_type_check
def _multiplied(change, vectors, found, IS_HALF: tl.constexpr):
    """Add the products of changes of scores and vectors."""
    if IS_HALF:
        # In two parts: a row's changes add up to 0, and what is common to all vectors must not come through.
        high = change.to(tl.bfloat16)
        found = tl.dot(high, vectors, found)
        found = tl.dot((change - high.to(tl.float32)).to(tl.bfloat16), vectors, found)
    else:
        found = tl.dot(change, vectors, found, input_precision="tf32x3")
    return found


@triton.jit
@no_type_check
def _place(size, HEADS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the sequence and the head of a program, and where its block begins."""
    blocks = tl.cdiv(size, BLOCK)
    program = tl.program_id(0)
    sequence = (program // blocks // HEADS).to(tl.int64)
    return sequence, program // blocks % HEADS, program % blocks * BLOCK


@triton.jit
@no_type_check
def _after(begin, length, BLOCK: tl.constexpr, IS_CAUSAL: tl.constexpr):
    """Return the position after the last one that a block meets: none if it is padding."""
    last = tl.minimum(length, begin + BLOCK) if IS_CAUSAL else length
    return tl.where(begin < length, last, 0)


@triton.jit
@no_type_check
def _vectors(part, position, length, step, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Return the vectors of a head at some positions, `(positions, PADDED)`; zeros beyond the length."""
    number = tl.arange(0, PADDED)
    places = position.to(tl.int64)[:, None] * step + number[None, :]
    return tl.load(part + places, mask=(position < length)[:, None] & (number < WIDTH)[None, :], other=0.0)


@triton.jit
@no_type_check
def _scores(left, right, scaling):
    """Return the scores of rows and columns, float32."""
    return tl.dot(left, tl.trans(right), input_precision="tf32x3") * scaling


@triton.jit
@no_type_check
def _seen(row, column, length, IS_CAUSAL: tl.constexpr):
    """Return True at columns that rows see, and False in rows that are padding."""
    seen = (row < length)[:, None] & (column < length)[None, :]
    if IS_CAUSAL:
        seen = seen & (column[None, :] <= row[:, None])
    return seen


@triton.jit
@no_type_check
def _shown(mask, row, column, seen, of_row, of_column):
    """Return True at columns that rows see, and that the teacher's own mask shows."""
    places = row.to(tl.int64)[:, None] * of_row + column.to(tl.int64)[None, :] * of_column
    return seen & (tl.load(mask + places, mask=seen, other=0) != 0)


@triton.jit
@no_type_check
def _added(most, total, scores, seen):
    """Add a tile to sums of exponentials; return them, the factor of older sums, and the tile's weights."""
    shown = tl.where(seen, scores, _LEAST)
    new = tl.maximum(most, tl.max(shown, 1))
    less = tl.exp(most - new)
    weights = tl.where(seen, tl.exp(shown - new[:, None]), 0.0)
    return new, total * less + tl.sum(weights, 1), less, weights


@triton.jit
@no_type_check
def _entries(index, weight, base, rows, is_row, column, seen, ENTRIES: tl.constexpr, HAS_BASE: tl.constexpr):
    """Return a tile of sparse rows."""
    probs = tl.where(seen, 0.0, 0.0)
    if HAS_BASE:
        probs += tl.where(seen, tl.load(base + rows, mask=is_row, other=0.0)[:, None], 0.0)
    for entry in range(ENTRIES):
        at = tl.load(index + rows * ENTRIES + entry, mask=is_row, other=-1)
        share = tl.load(weight + rows * ENTRIES + entry, mask=is_row, other=0.0)
        probs += tl.where(at[:, None] == column[None, :], share[:, None], 0.0)
    return probs
