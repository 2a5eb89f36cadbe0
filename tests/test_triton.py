"""What is particular to the Triton backend: addresses above 2**31 elements, records, launches.

What it shares with other backends of a device is in tests/test_device_step.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from cases import ADAMW, BACKEND, DEVICE, DTYPES, assert_backend, noise, short
from device_watch import count_launches
from oracle import assert_same_bits
from torch.nn import Parameter

import mo_fused
from mo_fused import masters, quantised
from mo_fused.backends.triton import fixed_options
from mo_fused.reference import square_root
from mo_fused.stats import RESULT_AT
from mo_fused.table import ACTIVE, GRAD_SHARED, HYPER, ROW, SCALES_SHARED, STEP_F64

pytestmark = pytest.mark.triton_only(reason="needs the Triton backend: tests/test_triton_suite.py runs it")


# -- addresses --------------------------------------------------------------------------------------------------------

BASE = 0x7F00_0000_0000 + 48
BLOCK = 16
BYTES = {torch.float32: (0, 4), torch.bfloat16: (1, 2), torch.float16: (2, 2), torch.float64: (3, 8)}


def places(start: int, dtype: torch.dtype, operand: int, layout: Sequence[int] | None) -> list[int]:
    from place_kernel import place_kernel

    out = torch.zeros(BLOCK, dtype=torch.int64, device=DEVICE)
    words = torch.tensor(layout or [0], dtype=torch.int64, device=DEVICE)
    place_kernel[(1,)](
        BASE,
        start,
        words.data_ptr(),
        out.data_ptr(),
        DTYPE=BYTES[dtype][0],
        OPERAND=operand,
        STRIDED=layout is not None,
        BLOCK=BLOCK,
    )
    found: list[int] = out.tolist()
    return found


# Below, across and above 2**31 and 2**32 elements; a start that is no multiple of anything.
STARTS = [0, 2048, 2**31 - 8, 2**31, 2**31 + 2048, 2**32 - 8, 2**32 + 1024, 5 * 2**33 + 7]


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_addresses_of_huge_tensors(dtype: torch.dtype) -> None:
    size = BYTES[dtype][1]
    for start in STARTS:
        assert places(start, dtype, 0, None) == [BASE + (start + i) * size for i in range(BLOCK)], start


# (sizes, strides of the five operands): a matrix and its transpose; gaps; three dimensions with strides above 2**31;
# one dimension. Some operands repeat elements. Each has more than 5 * 2**33 elements.
SHAPED = {
    "transposed": ([300_000, 200_003], [[1, 300_000], [200_003, 1], [1, 300_000], [1, 300_000], [200_003, 1]]),
    "gaps": ([300_000, 200_003], [[400_007, 2], [1, 300_000], [200_003, 1], [0, 1], [0, 0]]),
    "three": (
        [5000, 7, 2_000_003],
        [[3_000_000_019, 400_000_007, 3], [1, 5000, 35_000], *[[14_000_021, 2_000_003, 1]] * 3],
    ),
    "one": ([70_000_000_000], [[3], [1], [2], [1], [1]]),
}


@pytest.mark.parametrize("operand", [0, 1, 4])
@pytest.mark.parametrize("shape", list(SHAPED))
def test_addresses_of_huge_strided_tensors(shape: str, operand: int) -> None:
    sizes, strides = SHAPED[shape]
    pad = [0] * (8 - len(sizes))
    layout = [len(sizes), *sizes, *pad]
    for one in strides:
        layout += [*one, *pad]
    layout += [0] * 5
    for start in STARTS:
        want = []
        for e in range(start, start + BLOCK):
            index = np.unravel_index(e, tuple(sizes))
            want.append(BASE + 4 * sum(int(k) * s for k, s in zip(index, strides[operand], strict=True)))
        assert places(start, torch.float32, operand, layout) == want, start


def test_records_mirror_each_other() -> None:
    """The kernels' constants are the offsets of the host's records."""
    from mo_fused.triton_kernels import _chunk as t
    from mo_fused.triton_kernels import _tile
    from mo_fused.triton_kernels import finish_kernel as finish

    from mo_fused import device_table, factored, layout, table

    def words(dtype: np.dtype[Any], name: str) -> int:
        assert dtype.fields is not None
        at = dtype.fields[name][1]
        assert at % 8 == 0
        return at // 8

    names = {"PARAM": "param", "GRAD": "grad", "STATE0": "state", "STEP": "step", "LAYOUT": "layout", "FRESH": "fresh"}
    names |= {"GROUP_AND_FLAGS": "group", "NUMEL": "numel", "DTYPES": "dtype", "FIRST_CHUNK": "first_chunk"}
    names |= {"CHUNKS": "chunks", "FACTORED": "factored", "MASTER": "master", "STREAM": "stream", "SCALE0": "scale"}
    names["OFFSET"] = "offset"
    for constant, name in names.items():
        assert getattr(t, constant).value == words(ROW, name), name
    assert (t.STATE1.value, t.STATE2.value) == (t.STATE0.value + 1, t.STATE0.value + 2)
    assert (t.SCALE1.value, t.SCALE2.value) == (t.SCALE0.value + 1, t.SCALE0.value + 2)
    assert ROW.fields is not None
    assert ROW.fields["flags"][1] == ROW.fields["group"][1] + 4, "the flags are the upper half of the group's word"
    assert ROW.itemsize == 8 * t.ROW_WORDS.value
    assert t.REST.value == table.MASTER
    flags = {
        "PARAM_UNKNOWN": table.PARAM_UNKNOWN,
        "ACTIVE": ACTIVE,
        "STEP_F64": STEP_F64,
        "GRAD_SHARED": GRAD_SHARED,
        "SCALES_SHARED": SCALES_SHARED,
    }
    for constant, flag in flags.items():
        assert getattr(t, constant).value == flag, constant

    names = {"NORMS": "norms", "COL_NORMS": "col_norms", "GRID_ROWS": "grid_rows", "GRID_COLS": "grid_cols"}
    names |= {"MATRIX_ROWS": "rows", "MATRIX_COLS": "cols", "BATCH": "batch", "MEANS": "means", "WHOLE": "whole"}
    names |= {"WHOLE_ROWS": "whole_rows", "WHOLE_COLS": "whole_cols", "WHOLE_NUMEL": "whole_numel"}
    for constant, name in names.items():
        assert getattr(_tile, constant).value == words(factored.FACTORED, name), name
    assert factored.TILE.itemsize == 8 * _tile.TILE_WORDS.value

    hyper = ["LR", "BETA1", "BETA2", "EPS", "WEIGHT_DECAY", "MOMENTUM", "DAMPENING", "CLIP", "MAXIMIZE", "DECOUPLED"]
    for constant in [*hyper, "NESTEROV", "EPS2", "THRESHOLD", "STEP_KIND", "FACTOR_FLAGS"]:
        assert getattr(t, constant).value == words(HYPER, constant.lower()), constant
    assert HYPER.itemsize == 8 * t.SOURCES.value
    assert t.SETTINGS_WORDS.value == table.SETTINGS_WORDS == 2 * t.SOURCES.value
    assert finish.SOURCE_F64.value == device_table.SOURCE_F64

    result = ["GRAD_NORM", "CLIP_COEF", "SKIPPED", "NONFINITE", "ZEROS", "GRAD_AMAX", "UPDATE_NORM", "PARAM_NORM"]
    for constant in [*result, "FOUND_INF", "MEASURED", "UPDATED", "GRAD_SCALE"]:
        assert getattr(t, constant).value == RESULT_AT[constant.lower()], constant
    assert t.STORED_NORM.value == RESULT_AT["stored_update_norm"]
    assert t.RESULT_WORDS.value == mo_fused.stats.RESULT_WIDTH

    columns = ["SUMSQ", "EXPONENT", "AMAX", "NONFINITES", "ZERO_COUNT", "CLIPS", "UPDATE_SUMSQ", "STORED_SUMSQ"]
    host = ["sumsq", "exponent", "amax", "nonfinite", "zeros", "clips", "update", "stored", "param"]
    assert tuple(host) == table.STAT_COLUMNS
    assert [getattr(t, c).value for c in [*columns, "PARAM_SUMSQ"]] == list(range(len(host)))
    assert t.COLUMNS.value == len(host)
    assert (t.CHUNK_WORDS.value, t.SCALARS.value) == (table.DEVICE_CHUNK_WORDS, table.DEVICE_SCALARS)
    assert (layout.MAX_DIMS, layout.OPERANDS) == (8, 6), "the offsets that `place` reads a layout by"


# -- quantised moments ------------------------------------------------------------------------------------------------

CODES = (quantised.Q8, quantised.Q8_ROOT, quantised.Q4, quantised.Q4_ROOT)


def difficult(blocks: int, block: int) -> torch.Tensor:
    """A row a block: noise of any size, and what is not finite, denormal, zero, or at the ends of the scale."""
    x = noise((blocks, block), 5).cpu() * 10.0 ** torch.linspace(-37, 37, blocks).reshape(-1, 1)
    x[1], x[2], x[3, 1:] = 0.0, -0.0, 0.0
    x[4, 3], x[5, 5], x[6, 7] = math.inf, math.nan, -math.inf
    x[7], x[8, ::2], x[9] = 1e-42, 3.4028234663852886e38, 2.0**-110
    x[10] = torch.linspace(-1, 1, block)
    return x


@pytest.mark.parametrize("width", [2, 4, 8])
@pytest.mark.parametrize("block", [32, 64, 128, 256])
@pytest.mark.parametrize("code", CODES, ids=lambda c: f"{c.bits}{'root' if c.root else ''}")
def test_codes_and_scales_are_those_of_the_twin(code: quantised.Code, block: int, width: int) -> None:
    from moment_kernel import moment_kernel

    tile = 128 * width
    blocks = max(11, 2 * tile // block) + 1  # the last tile is not full, unless a tile is one block
    values = difficult(blocks, block)
    if code.root:
        values = values.abs()
    key = masters.step_key(masters.stream(3, 1), 7, quantised.STATE_SLOT)
    old_codes = (noise((blocks, block * code.bits // 8), 6).cpu() * 300).to(torch.int32).to(code.dtype)
    old_scale = noise((blocks,), 7).cpu().abs()
    wanted_old = quantised.decode(old_codes, old_scale, code)
    random = masters.draw(values.shape, key, values.device) >> 16
    kept = square_root(values) if code.root else values
    wanted_codes, wanted_scale = quantised.encode(kept, code, old_scale, random)
    for start in (0, 2**32 - tile, 2**33 - block):
        codes, scale, new = (x.clone().to(DEVICE) for x in (old_codes, old_scale, values))
        found = torch.zeros(values.shape, device=DEVICE)
        apart = torch.full(values.shape, -1, dtype=torch.int64, device=DEVICE)
        moment_kernel[(-(-values.numel() // tile),)](
            *(x.data_ptr() for x in (codes, scale, new, found, apart)),
            start,
            key if key < 2**63 else key - 2**64,
            values.numel(),
            T=code.number,
            QBLOCK=block,
            WIDTH=width,
            BLOCK=tile,
            **fixed_options(),
        )
        assert_same_bits(found.cpu(), wanted_old * wanted_old if code.root else wanted_old, "decoded")
        assert_same_bits(scale.cpu(), wanted_scale, "scales")
        assert not apart.any()
        if start == 0:
            assert_same_bits(codes.cpu(), wanted_codes.reshape(codes.shape), "codes")


# -- launches ---------------------------------------------------------------------------------------------------------


def stepped(groups: int, each: int, unaligned: bool, launches: list[str], **options: Any) -> list[str]:
    """Kernels launched by the second step over fp32 and bf16 parameters."""
    params: list[list[Parameter]] = []
    for g in range(groups):
        params.append([])
        for i in range(each):
            size = 33 + g + i
            value = noise((size + 1,), g * 100 + i, DTYPES[i % 2])
            params[g].append(Parameter(value[1:] if unaligned and i < 2 else value[:size].clone()))
    opt = ADAMW.ours([{"params": ps, "lr": 0.1 / (g + 1)} for g, ps in enumerate(params)], **options)
    for _ in range(2):
        for ps in params:
            for i, p in enumerate(ps):
                p.grad = noise(p.shape, 7 + i, p.dtype)
        launches.clear()
        opt.step()
    assert_backend(opt, BACKEND)
    return list(launches)


def test_launches_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """One per kind of work and pair of dtypes, whatever the number of tensors and groups."""
    launches = count_launches(monkeypatch, run=False)
    clipped = ["grad_stats_kernel"] * 2 + ["finish_kernel"] + ["adamw_kernel"] * 2
    assert stepped(5, 4, False, launches, max_grad_norm=1.0) == clipped
    assert stepped(1, 2, False, launches, max_grad_norm=1.0) == clipped
    assert stepped(3, 12, False, launches, max_grad_norm=1.0) == clipped
    # Tensors that do not lie at a multiple of 16 bytes have launches of their own.
    odd = ["grad_stats_kernel"] * 4 + ["finish_kernel"] + ["adamw_kernel"] * 4
    assert stepped(5, 4, True, launches, max_grad_norm=1.0) == odd
    assert stepped(5, 4, False, launches) == clipped[2:], "no statistics are needed"
    assert stepped(5, 4, False, launches, stats=True) == [*clipped[2:], "update_norms_kernel"]
    full = stepped(5, 4, False, launches, max_grad_norm=1.0, stats=True, clip_in_place=True)
    assert full == [*clipped, *["scale_grad_kernel"] * 2, "update_norms_kernel"]
