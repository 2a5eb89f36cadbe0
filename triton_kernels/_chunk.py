"""From a program id to chunks, and from a chunk to its row and typed pointers with alignment hints.

Records (all addresses are integers; ``mo_fused/device_table.py`` writes them, ``tests/test_triton.py`` compares):

* row: 32 words, csrc/abi.h's Row;
* chunk: 4 words: first element, row, elements, place among the statistics;
* programs: edges of the runs of chunks that each program works on, int32;
* settings: records of 32 words; the first holds the control, then one a group: 16 float64 (csrc/abi.h's Hyper) and for
  each of them the address and dtype of a tensor on the device to be read in its place, or 0;
* row scalars: 16 float64 a row, written by the finish (``SCALARS`` below);
* tile (Adafactor): 4 words, and a row's view as matrices: 16 words (csrc/abi.h's Tile and Factored; ``_tile.py``);
* statistics of a step: csrc/abi.h's Result (16 float64), then columns of one float64 a chunk (``COLUMNS`` below).
"""

import triton
import triton.language as tl

from ._rules import BF16, F16, F32, F64, narrow, widen

# Words of a row.
PARAM = tl.constexpr(0)
GRAD = tl.constexpr(1)
STATE0 = tl.constexpr(2)
STATE1 = tl.constexpr(3)
STATE2 = tl.constexpr(4)
REST = tl.constexpr(5)  # an operand of layouts; its word in a row is MASTER
STEP = tl.constexpr(5)
LAYOUT = tl.constexpr(6)
NUMEL = tl.constexpr(7)
DTYPES = tl.constexpr(8)  # a byte an operand
GROUP_AND_FLAGS = tl.constexpr(9)
FIRST_CHUNK = tl.constexpr(10)
CHUNKS = tl.constexpr(11)
FRESH = tl.constexpr(13)
FACTORED = tl.constexpr(14)
MASTER = tl.constexpr(15)
STREAM = tl.constexpr(16)
SCALE0 = tl.constexpr(17)  # of quantised moments
SCALE1 = tl.constexpr(18)
SCALE2 = tl.constexpr(19)
OFFSET = tl.constexpr(21)  # of the row's first element in the whole tensor: what random numbers go by
ROW_WORDS = tl.constexpr(32)

# Flags of a row, as in csrc/abi.h.
ACTIVE = tl.constexpr(1)
STEP_F64 = tl.constexpr(4)
GRAD_SHARED = tl.constexpr(8)
SCALES_SHARED = tl.constexpr(16)
PARAM_UNKNOWN = tl.constexpr(32)

CHUNK_WORDS = tl.constexpr(4)
SETTINGS_WORDS = tl.constexpr(32)
# Hyper-parameters in a record of the settings.
LR = tl.constexpr(0)
BETA1 = tl.constexpr(1)
BETA2 = tl.constexpr(2)
EPS = tl.constexpr(3)
WEIGHT_DECAY = tl.constexpr(4)
MOMENTUM = tl.constexpr(5)
DAMPENING = tl.constexpr(6)
CLIP = tl.constexpr(7)
MAXIMIZE = tl.constexpr(8)
DECOUPLED = tl.constexpr(9)
NESTEROV = tl.constexpr(11)
EPS2 = tl.constexpr(12)
THRESHOLD = tl.constexpr(13)
STEP_KIND = tl.constexpr(14)
FACTOR_FLAGS = tl.constexpr(15)
SOURCES = tl.constexpr(16)  # where the second half of the record begins
SCALARS = tl.constexpr(16)
KEY = tl.constexpr(15)  # of the random numbers of the row's weights in this step, 64 bits
STATE_KEY = tl.constexpr(14)  # of those of its moments

# Fields of the result.
GRAD_NORM = tl.constexpr(0)
CLIP_COEF = tl.constexpr(1)
SKIPPED = tl.constexpr(2)
NONFINITE = tl.constexpr(3)
ZEROS = tl.constexpr(4)
GRAD_AMAX = tl.constexpr(5)
UPDATE_NORM = tl.constexpr(6)
STORED_NORM = tl.constexpr(7)
PARAM_NORM = tl.constexpr(8)
FOUND_INF = tl.constexpr(9)
MEASURED = tl.constexpr(10)
UPDATED = tl.constexpr(11)
GRAD_SCALE = tl.constexpr(12)
RESULT_WORDS = tl.constexpr(16)

# Columns of the statistics.
SUMSQ = tl.constexpr(0)
EXPONENT = tl.constexpr(1)
AMAX = tl.constexpr(2)
NONFINITES = tl.constexpr(3)
ZERO_COUNT = tl.constexpr(4)
CLIPS = tl.constexpr(5)
UPDATE_SUMSQ = tl.constexpr(6)
STORED_SUMSQ = tl.constexpr(7)
PARAM_SUMSQ = tl.constexpr(8)
COLUMNS = tl.constexpr(9)


@triton.jit
def words(address):
    """Pointer to 64-bit integers."""
    return address.to(tl.int64).to(tl.pointer_type(tl.int64))


@triton.jit
def doubles(address):
    """Pointer to float64."""
    return address.to(tl.int64).to(tl.pointer_type(tl.float64))


@triton.jit
def work(programs):
    """First and last chunk (exclusive) of this program."""
    edges = programs.to(tl.int64).to(tl.pointer_type(tl.int32)) + tl.program_id(0)
    return tl.load(edges), tl.load(edges + 1)


@triton.jit
def chunk_at(chunks, c):
    """(first element, row, elements, place among the statistics) of chunk c; all int64 but the elements, int32."""
    at = words(chunks) + c * CHUNK_WORDS
    return tl.load(at), tl.load(at + 1), tl.load(at + 2).to(tl.int32), tl.load(at + 3)


@triton.jit
def row_at(rows, row):
    return words(rows) + row * ROW_WORDS


@triton.jit
def flags_of(row):
    return tl.load(row + GROUP_AND_FLAGS) >> 32


@triton.jit
def group_of(row):
    return tl.load(row + GROUP_AND_FLAGS) & 0x7FFFFFFF


@triton.jit
def group_clips(settings, row):
    """1.0 where the row's group takes part in clipping, else 0.0."""
    return tl.load(doubles(settings) + (group_of(row) + 1) * SETTINGS_WORDS + CLIP)


@triton.jit
def column(stats, name, n_chunks):
    """Pointer to a column of the statistics."""
    return doubles(stats) + RESULT_WORDS + name * n_chunks.to(tl.int64)


@triton.jit
def operand(address, start, DTYPE: tl.constexpr, ALIGNED: tl.constexpr, STRIDED: tl.constexpr):
    """Pointer to element ``start`` (int64) of a tensor, to its first one where STRIDED; bf16 as integers of 16 bits.

    ALIGNED promises that the tensor begins at a multiple of 16 bytes; chunks begin at multiples of 2048 elements.
    """
    if STRIDED:  # places are counted from there
        start = start * 0
    if DTYPE == F32:
        at = (address + start * 4).to(tl.pointer_type(tl.float32))
    elif DTYPE == BF16:
        at = (address + start * 2).to(tl.pointer_type(tl.uint16))
    elif DTYPE == F16:
        at = (address + start * 2).to(tl.pointer_type(tl.float16))
    elif DTYPE == F64:
        at = (address + start * 8).to(tl.pointer_type(tl.float64))
    else:  # the rule has no such operand
        at = address.to(tl.pointer_type(tl.uint8))
    if ALIGNED:
        at = tl.multiple_of(at, 16)
    return at


@triton.jit
def place(layout, index, start, OPERAND: tl.constexpr, STRIDED: tl.constexpr):
    """Offset in elements of ``index`` (within the chunk that begins at ``start``) from :func:`operand`'s pointer.

    STRIDED: the row has a Layout record (csrc/abi.h) and the pointer is to the tensor's first element.
    """
    if STRIDED:
        at = words(layout)
        dims = tl.load(at).to(tl.int32)
        rest = index.to(tl.int64) + start
        offset = tl.zeros_like(rest)
        for k in range(dims):
            d = dims - 1 - k
            size = tl.load(at + 1 + d)
            offset += (rest % size) * tl.load(at + 9 + OPERAND * 8 + d)
            rest = rest // size
        return offset
    else:
        return index


@triton.jit
def load_tile(at, offsets, inside, DTYPE: tl.constexpr, COMPUTE: tl.constexpr, MASKED: tl.constexpr):
    """A tile of an operand in the compute type; elements that are not inside are 0."""
    if MASKED:
        x = tl.load(at + offsets, mask=inside, other=0)
    else:
        x = tl.load(at + offsets)
    return widen(x, DTYPE, COMPUTE)


@triton.jit
def store_tile(at, offsets, inside, x, DTYPE: tl.constexpr, MASKED: tl.constexpr):
    """Rounds a tile to the operand's storage type and stores it."""
    if MASKED:
        tl.store(at + offsets, narrow(x, DTYPE), mask=inside)
    else:
        tl.store(at + offsets, narrow(x, DTYPE))


@triton.jit
def by_thread(x, WIDTH: tl.constexpr):
    """Sums runs of WIDTH consecutive elements: what one thread holds after a 16-byte load, so nothing is exchanged.

    ``x``: ``(n,)``, or ``(n // WIDTH, WIDTH)``.
    """
    if len(x.shape) == 1:
        x = tl.reshape(x, (x.shape[0] // WIDTH, WIDTH))
    return tl.sum(x, axis=1)
