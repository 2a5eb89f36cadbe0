"""Adafactor's first pass over every tile: norms of its rows and columns, and with them the gradient's statistics.

Formula: sqrt(sum g^2) along the rows and columns of a tile, in the compute type; of the tile and of vectors in float64.
  A tile whose sum overflows or nearly vanishes is summed again with a power of two taken out.
Reference: tests/test_adafactor_numerics.py, against float64.
Bytes read per element: the gradient once (fp32 4, bf16 and fp16 2, fp64 8; of matrices of at most 32 x 32 twice, from a
  cache), on request the parameter once; written per row and column of a tile 4 (float64: 8), per tile 48.
Assumes of the table: Row.factored, a Tile at the chunk's place, scratch for its norms; where ALIGNED, a gradient whose
  rows begin at multiples of 16 bytes.
"""

import triton
import triton.language as tl

from . import _chunk as t
from ._param_sums import param_sum
from ._rules import F64, infinity_bits, magnitude_bits, power_of_two, square_root
from ._tile import MATRIX_COLS, MATRIX_ROWS, NORMS, matrices_of, numbers, tile_at

SMALL = tl.constexpr(32)  # matrices of at most so many rows and columns go by lanes


@triton.jit
def grad_squares(
    at,
    layout,
    start,
    index,
    inside,
    scale,
    largest,
    P: tl.constexpr,
    G: tl.constexpr,
    STRIDED: tl.constexpr,
    WIDTH: tl.constexpr = 1,
    MASKED: tl.constexpr = True,
):
    """Squares of (g * scale), 0 where there is no element, and the largest magnitudes of g so far.

    Of runs of WIDTH elements, which a thread has loaded together, only one magnitude is kept; those are flat then.
    """
    COMPUTE: tl.constexpr = tl.float64 if P == F64 else tl.float32
    g = t.load_tile(at, t.place(layout, index, start, t.GRAD, STRIDED), inside, G, COMPUTE, MASKED)
    bits = magnitude_bits(g)
    if WIDTH > 1:
        bits = tl.max(tl.reshape(bits, (bits.numel // WIDTH, WIDTH)), axis=1)
    g = g * scale
    return g * g, tl.maximum(largest, bits)


@triton.jit
def sums_of_vector(
    at,
    layout,
    start,
    length,
    scale,
    P: tl.constexpr,
    G: tl.constexpr,
    STRIDED: tl.constexpr,
    FOLD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    BITS: tl.constexpr = tl.int64 if P == F64 else tl.int32
    sums = tl.zeros((BLOCK // FOLD,), tl.float64)
    largest = tl.zeros((BLOCK // FOLD,), BITS)
    lane = tl.arange(0, BLOCK)
    whole = length // BLOCK * BLOCK
    for i in range(0, whole, BLOCK):
        s, largest = grad_squares(
            at, layout, start, i + lane, i + lane < length, scale, largest, P, G, STRIDED, FOLD, False
        )
        sums += t.by_thread(s, FOLD).to(tl.float64)
    if whole < length:
        s, largest = grad_squares(
            at, layout, start, whole + lane, whole + lane < length, scale, largest, P, G, STRIDED, FOLD
        )
        sums += t.by_thread(s, FOLD).to(tl.float64)
    return tl.sum(sums), tl.max(largest)


@triton.jit
def sums_of_small(
    at,
    layout,
    start,
    tile,
    matrix,
    norms,
    scale,
    back,
    P: tl.constexpr,
    G: tl.constexpr,
    STRIDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Whole matrices: one row, then one column, a lane. ``tile`` and ``matrix``: (rows, columns)."""
    height = matrix[0].to(tl.int32)
    width = matrix[1].to(tl.int32)
    COMPUTE: tl.constexpr = tl.float64 if P == F64 else tl.float32
    BITS: tl.constexpr = tl.int64 if P == F64 else tl.int32
    largest = tl.zeros((BLOCK,), BITS)
    total = tl.zeros((BLOCK,), tl.float64)
    for i in range(0, tile[0], BLOCK):
        row = i + tl.arange(0, BLOCK)
        here = row < tile[0]
        sums = tl.zeros((BLOCK,), COMPUTE)
        for j in range(width):
            index = row * width + j
            squares, largest = grad_squares(at, layout, start, index, here, scale, largest, P, G, STRIDED)
            sums += squares
        total += sums.to(tl.float64)
        tl.store(norms[0] + row, square_root(sums) * back, mask=here)
    columns = tile[0] // height * width
    for i in range(0, columns, BLOCK):
        place = i + tl.arange(0, BLOCK)
        here = place < columns
        first = place // width * (height * width) + place % width
        sums = tl.zeros((BLOCK,), COMPUTE)
        for j in range(height):
            index = first + j * width
            squares, largest = grad_squares(at, layout, start, index, here, scale, largest, P, G, STRIDED)
            sums += squares
        tl.store(norms[1] + place, square_root(sums) * back, mask=here)
    return tl.sum(total), tl.max(largest)


@triton.jit
def block_squares(
    at,
    layout,
    start,
    first,
    here,
    col,
    cols,
    scale,
    largest,
    P: tl.constexpr,
    G: tl.constexpr,
    ALIGNED: tl.constexpr,
    STRIDED: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """grad_squares of a block. Where ALIGNED, rows begin at multiples of eight elements, and so do and end tiles."""
    offsets = first + col
    inside = here & (col < cols)
    if ALIGNED:
        offsets = tl.max_contiguous(tl.multiple_of(offsets, (1, 8)), (1, 8))
        inside = tl.max_constancy(inside, (1, 8))
    return grad_squares(at, layout, start, offsets, inside, scale, largest, P, G, STRIDED, WIDTH)


@triton.jit
def store_column_norms(to, col, cols, sums, back):
    tl.store(to + col, square_root(tl.sum(sums, axis=0)) * back, mask=col < cols)


@triton.jit
def sums_of_blocks(
    at,
    layout,
    start,
    tile,
    matrix,
    norms,
    scale,
    back,
    P: tl.constexpr,
    G: tl.constexpr,
    ALIGNED: tl.constexpr,
    STRIDED: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """ROWS rows at a time, in two or four blocks of COLS columns side by side, 512 in all: no tile is wider.

    COLS are a warp's 16-byte loads (of float64 two warps'), so that the sum of a row need not leave it.
    """
    COMPUTE: tl.constexpr = tl.float64 if P == F64 else tl.float32
    BITS: tl.constexpr = tl.int64 if P == F64 else tl.int32
    rows = tl.minimum(tile[0], matrix[0].to(tl.int32))
    cols = tile[1]
    pitch = matrix[1]
    col = tl.arange(0, COLS)[None, :]
    largest = tl.zeros((ROWS * COLS // WIDTH,), BITS)
    total = tl.zeros((ROWS,), tl.float64)
    for m in range(tile[0] // rows):
        sums0 = tl.zeros((ROWS, COLS), COMPUTE)
        sums1 = sums0
        sums2 = sums0
        sums3 = sums0
        for i in range(0, rows, ROWS):
            row = i + tl.arange(0, ROWS)[:, None]
            first = (m * rows + row) * pitch
            here = row < rows
            s, largest = block_squares(
                at, layout, start, first, here, col, cols, scale, largest, P, G, ALIGNED, STRIDED, WIDTH
            )
            sums0 += s
            of_row = s
            c = col + COLS
            s, largest = block_squares(
                at, layout, start, first, here, c, cols, scale, largest, P, G, ALIGNED, STRIDED, WIDTH
            )
            sums1 += s
            of_row += s
            if COLS == 128:
                c = col + 2 * COLS
                s, largest = block_squares(
                    at, layout, start, first, here, c, cols, scale, largest, P, G, ALIGNED, STRIDED, WIDTH
                )
                sums2 += s
                of_row += s
                c = col + 3 * COLS
                s, largest = block_squares(
                    at, layout, start, first, here, c, cols, scale, largest, P, G, ALIGNED, STRIDED, WIDTH
                )
                sums3 += s
                of_row += s
            squares = tl.sum(of_row, axis=1)
            total += squares.to(tl.float64)
            r = i + tl.arange(0, ROWS)
            tl.store(norms[0] + m * rows + r, square_root(squares) * back, mask=r < rows)
        to = norms[1] + m * pitch
        c = tl.arange(0, COLS)
        store_column_norms(to, c, cols, sums0, back)
        store_column_norms(to, c + COLS, cols, sums1, back)
        if COLS == 128:
            store_column_norms(to, c + 2 * COLS, cols, sums2, back)
            store_column_norms(to, c + 3 * COLS, cols, sums3, back)
    return tl.sum(total), tl.max(largest)


@triton.jit
def count_nonfinite(
    at, layout, start, tile, pitch, P: tl.constexpr, G: tl.constexpr, STRIDED: tl.constexpr, BLOCK: tl.constexpr
):
    COMPUTE: tl.constexpr = tl.float64 if P == F64 else tl.float32
    count = tl.zeros((BLOCK,), tl.int32)
    for r in range(tile[0]):
        for i in range(0, tile[1], BLOCK):
            col = i + tl.arange(0, BLOCK)
            offsets = t.place(layout, r * pitch + col, start, t.GRAD, STRIDED)
            g = t.load_tile(at, offsets, col < tile[1], G, COMPUTE, True)
            count += (magnitude_bits(g) >= infinity_bits(g)).to(tl.int32)
    return tl.sum(count).to(tl.float64)


# Values never make another kernel: addresses and counts change from step to step.
@triton.jit(do_not_specialize=["rows", "settings", "chunks", "programs", "tiles", "param_sums", "stats", "n_chunks"])
def factor_sums_kernel(
    rows: tl.int64,
    settings: tl.int64,
    chunks: tl.int64,
    programs: tl.int64,
    tiles: tl.int64,
    param_sums: tl.int64,
    stats: tl.int64,
    n_chunks: tl.int32,
    P: tl.constexpr,
    G: tl.constexpr,
    FACTORED: tl.constexpr,
    ALIGNED: tl.constexpr,
    STRIDED: tl.constexpr,
    LANES: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    FOLD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """LANES: small matrices' rows or columns at a time; WIDTH: elements of a 16-byte load; ROWS, COLS: of a block of
    other matrices, 128 or 256 columns; FOLD, BLOCK: of the parameter's sum, see _param_sums.py."""
    COMPUTE: tl.constexpr = tl.float64 if P == F64 else tl.float32
    # Below LOW squares may have lost bits to denormal numbers, above HIGH a sum of several may have overflown; 2**MOST
    # and its inverse are normal numbers.
    LOW: tl.constexpr = 1e-280 if P == F64 else 1e-30
    HIGH: tl.constexpr = 1e300 if P == F64 else 1e36
    MOST: tl.constexpr = 1000 if P == F64 else 120
    first, last = t.work(programs)
    for c in range(first, last):
        start, row_index, length, slot = t.chunk_at(chunks, c)
        row = t.row_at(rows, row_index)
        flags = t.flags_of(row)
        total = tl.full([], 0.0, tl.float64)
        exponent = tl.full([], 0, tl.int64)
        amax = tl.full([], 0.0, tl.float64)
        nonfinite = tl.full([], 0.0, tl.float64)
        if (flags & t.ACTIVE) != 0:
            tile_rows, tile_cols, row_norms, col_norms = tile_at(tiles, slot)
            tile = (tile_rows, tile_cols)
            view = matrices_of(row)
            matrix = (tl.load(view + MATRIX_ROWS), tl.load(view + MATRIX_COLS))
            if (flags & t.PARAM_UNKNOWN) != 0:
                squares = param_sum(
                    row, start, tile_rows, tile_cols, matrix[1], P, FACTORED, ALIGNED, STRIDED, FOLD, BLOCK
                )
                tl.store(t.doubles(param_sums) + slot, squares)
            scratch = numbers(tl.load(view + NORMS), COMPUTE)
            norms = (scratch + row_norms, scratch + col_norms)
            layout = tl.load(row + t.LAYOUT)
            at = t.operand(tl.load(row + t.GRAD), start, G, ALIGNED, STRIDED)
            bits = tl.full([], 0, tl.int64)
            left = 1
            while left > 0:
                scale = power_of_two(-exponent).to(COMPUTE)
                back = power_of_two(exponent).to(COMPUTE)
                if not FACTORED:
                    total, found = sums_of_vector(at, layout, start, length, scale, P, G, STRIDED, FOLD, BLOCK)
                elif (matrix[0] <= SMALL) & (matrix[1] <= SMALL):
                    total, found = sums_of_small(
                        at, layout, start, tile, matrix, norms, scale, back, P, G, STRIDED, LANES
                    )
                else:
                    total, found = sums_of_blocks(
                        at,
                        layout,
                        start,
                        tile,
                        matrix,
                        norms,
                        scale,
                        back,
                        P,
                        G,
                        ALIGNED,
                        STRIDED,
                        WIDTH,
                        ROWS,
                        COLS,
                    )
                bits = found.to(tl.int64)
                left = 0
                if (exponent == 0) & (bits != 0) & ((total < LOW) | (total > HIGH)):
                    if P == F64:
                        exponent = (bits >> 52) - 1023
                    else:
                        exponent = (bits >> 23) - 127
                    exponent = tl.minimum(tl.maximum(exponent, -MOST), MOST)
                    if bits >= (0x7FF0000000000000 if P == F64 else 0x7F800000):
                        exponent = exponent * 0
                    left = (exponent != 0).to(tl.int32)
            if bits >= (0x7FF0000000000000 if P == F64 else 0x7F800000):
                runs = (tile_rows, tile_cols)
                if tile_cols == matrix[1]:  # one run
                    runs = (1, length)
                nonfinite = count_nonfinite(at, layout, start, runs, matrix[1], P, G, STRIDED, LANES)
            if P == F64:
                amax = bits.to(tl.float64, bitcast=True)
            else:
                amax = bits.to(tl.int32).to(tl.float32, bitcast=True).to(tl.float64)
        tl.store(t.column(stats, t.SUMSQ, n_chunks) + slot, total)
        tl.store(t.column(stats, t.EXPONENT, n_chunks) + slot, (exponent * 2).to(tl.float64))
        tl.store(t.column(stats, t.AMAX, n_chunks) + slot, amax)
        tl.store(t.column(stats, t.NONFINITES, n_chunks) + slot, nonfinite)
        tl.store(t.column(stats, t.ZERO_COUNT, n_chunks) + slot, 0.0)
        tl.store(t.column(stats, t.CLIPS, n_chunks) + slot, t.group_clips(settings, row))
