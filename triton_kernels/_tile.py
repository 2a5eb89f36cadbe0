"""From a tile of Adafactor's to its elements: the same order in every pass, whatever the dtypes and addresses.

A tile's rows (those of whole matrices one after another; a vector is one row) take the lanes of a block one after
another, each a power of two of them; a block is BLOCK lanes, WIDTH neighbours a thread. Tensors of lanes have the shape
``(BLOCK // WIDTH, WIDTH)``; where ALIGNED, what WIDTH neighbours have in common has ``(BLOCK // WIDTH, 1)``.
"""

import triton
import triton.language as tl

from . import _chunk as t

# Words of csrc/abi.h's Tile and Factored.
TILE_WORDS = tl.constexpr(4)
MATRIX_ROWS = tl.constexpr(1)
MATRIX_COLS = tl.constexpr(2)
NORMS = tl.constexpr(4)
COL_NORMS = tl.constexpr(5)
GRID_ROWS = tl.constexpr(6)
GRID_COLS = tl.constexpr(7)
BATCH = tl.constexpr(0)
WHOLE_ROWS = tl.constexpr(8)
WHOLE_COLS = tl.constexpr(9)
WHOLE_NUMEL = tl.constexpr(10)
MEANS = tl.constexpr(11)
WHOLE = tl.constexpr(12)


@triton.jit
def tile_at(tiles, slot):
    """(rows, columns: int32; places of the norms of its rows and of its columns: int64) of a tile."""
    at = t.words(tiles) + slot * TILE_WORDS
    return tl.load(at).to(tl.int32), tl.load(at + 1).to(tl.int32), tl.load(at + 2), tl.load(at + 3)


@triton.jit
def matrices_of(row):
    """Pointer to the words of the row's Factored."""
    return t.words(tl.load(row + t.FACTORED))


@triton.jit
def numbers(address, COMPUTE: tl.constexpr):
    """Pointer to numbers of the compute type."""
    return address.to(tl.int64).to(tl.pointer_type(COMPUTE))


@triton.jit
def breadth(cols, FACTORED: tl.constexpr):
    """log2 of the lanes that a row of a tile takes; tiles of matrices have at most 512 columns."""
    bits = cols * 0 + 30
    if FACTORED:
        bits = cols * 0
        for k in tl.static_range(9):
            bits += (cols > (1 << k)).to(tl.int32)
    return bits


@triton.jit
def lanes(i, bits, ALIGNED: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """(row, column) in the tile of the block of lanes that begins at lane ``i``; of the first neighbour if ALIGNED."""
    lane = i + tl.arange(0, BLOCK // WIDTH)[:, None] * WIDTH
    if not ALIGNED:
        lane += tl.arange(0, WIDTH)[None, :]
    return lane >> bits, lane & ((1 << bits) - 1)


@triton.jit
def all_lanes(first, ALIGNED: tl.constexpr, WIDTH: tl.constexpr):
    """Offsets of all lanes from those of the first neighbours, which are multiples of WIDTH where ALIGNED."""
    if ALIGNED:
        offsets = first + tl.arange(0, WIDTH)[None, :]
        return tl.max_contiguous(tl.multiple_of(offsets, (1, WIDTH)), (1, WIDTH))
    else:
        return first


@triton.jit
def there(row, col, rows, cols, ALIGNED: tl.constexpr, FACTORED: tl.constexpr, WIDTH: tl.constexpr):
    """Which lanes have elements. A vector may end between neighbours."""
    if ALIGNED and not FACTORED:
        col = col + tl.arange(0, WIDTH)[None, :]
    return (row < rows) & (col < cols)


@triton.jit
def roots_at(row, start, COMPUTE: tl.constexpr):
    """Of the tile that begins at element ``start``: pointers to the inverse roots of its first row and of its first
    column, columns (int64) and rows (int32) of a matrix."""
    view = matrices_of(row)
    height = tl.load(view + MATRIX_ROWS)
    width = tl.load(view + MATRIX_COLS)
    norms = numbers(tl.load(view + NORMS), COMPUTE)
    of_row = start // width
    of_column = tl.load(view + COL_NORMS) + of_row // height * width + start % width
    return norms + of_row, norms + of_column, width, height.to(tl.int32)


@triton.jit
def row_roots(roots, row, inside):
    return tl.load(roots[0] + row, mask=inside, other=0.0)


@triton.jit
def column_roots(roots, row, col, inside, ALIGNED: tl.constexpr, WIDTH: tl.constexpr):
    """``row``: as it counts in the tile, which may have several matrices."""
    return tl.load(roots[1] + all_lanes(row // roots[3] * roots[2] + col, ALIGNED, WIDTH), mask=inside, other=0.0)
