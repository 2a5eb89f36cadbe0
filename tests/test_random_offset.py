"""Random numbers go by an element's index in the whole tensor: parts of a tensor are rounded as the whole is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from cases import BACKENDS, DEVICE, INTERPRETED, PAIR, assert_backend, noise, some, states
from oracle import assert_same_bits
from torch import Tensor
from torch.nn import Parameter

import mo_fused
from mo_fused import masters, quantised
from mo_fused.optim.planning import RowPlanner

KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw": (mo_fused.AdamW, dict(lr=1e-3, weight_decay=0.1)),
    "amsgrad": (mo_fused.AdamW, dict(lr=1e-3, betas=(0.9, 0.5), amsgrad=True)),
    "sgd": (mo_fused.SGD, dict(lr=1e-2, momentum=0.9, weight_decay=0.1)),
}
ADAMW_AND_SGD = ("adamw", "sgd")
# Rows of blocks of 32 elements, and rows whose parts begin anywhere; the whole is two chunks.
WIDE, ODD = (96, 97) if INTERPRETED else (32 * 129, 4099)
FORMATS: dict[str, tuple[torch.dtype, int, dict[str, Any]]] = {
    "split8": (torch.bfloat16, ODD, dict(master_weights="split8")),
    "stochastic bf16": (torch.bfloat16, ODD, dict(master_weights="stochastic")),
    "stochastic fp16": (torch.float16, ODD, dict(master_weights="stochastic")),
    "int8 fp32": (torch.float32, WIDE, dict(state_dtype="int8")),
    "int4 bf16": (torch.bfloat16, WIDE, dict(state_dtype="int4")),
    "int8 split8": (torch.bfloat16, WIDE, dict(state_dtype="int8", master_weights="split8")),
    "int4 stochastic fp16": (torch.float16, WIDE, dict(state_dtype="int4", master_weights="stochastic")),
}


@pytest.fixture
def offsets(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """Row.offset by the id of the parameter. Small parts have quantised moments here."""
    chosen: dict[int, int] = {}
    real = RowPlanner.row

    def row(self: RowPlanner, optimizer: Any, position: int, g: int, p: Tensor, grad: Tensor) -> Any:
        made = real(self, optimizer, position, g, p, grad)
        made.offset = chosen.get(id(p), 0)
        return made

    monkeypatch.setattr(RowPlanner, "row", row)
    monkeypatch.setattr(quantised, "SMALLEST", 1)
    return chosen


class Part:
    """One parameter with an optimizer of its own, so that position and stream are the same for every part."""

    def __init__(self, kind: str, value: Tensor, offset: int, offsets: dict[int, int], backend: str, **options: Any):
        self.device = torch.device("cpu") if backend in ("cpu", "eager") else DEVICE
        self.param = Parameter(value.to(self.device).clone())
        offsets[id(self.param)] = offset
        make, arguments = KINDS[kind]
        self.opt = make([self.param], **arguments, **options, seed=3, backend=backend)
        self.backend = backend

    def step(self, grad: Tensor, layout: Any = torch.clone) -> dict[str, Tensor]:
        self.param.grad = layout(grad.to(self.device))
        self.opt.step()
        assert_backend(self.opt, self.backend)
        return {"param": self.param.detach().clone(), **states(self.opt, [self.param])[0]}


def joined(parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {k: torch.cat([p[k] for p in parts]) if k != "step" else parts[0][k] for k in parts[0]}


def cut(x: Tensor, rows: Sequence[int]) -> list[Tensor]:
    return [piece.clone() for piece in x.split(list(rows))]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ADAMW_AND_SGD)
@pytest.mark.parametrize("name", FORMATS)
def test_parts_have_the_bits_of_the_whole(name: str, kind: str, backend: str, offsets: dict[int, int]) -> None:
    dtype, width, options = FORMATS[name]
    rows = (5, 2)
    value = noise((sum(rows), width), 1, dtype)
    first = [sum(rows[:i]) * width for i in range(len(rows))]
    whole = Part(kind, value, 0, offsets, backend, **options)
    parts = [Part(kind, v, at, offsets, backend, **options) for v, at in zip(cut(value, rows), first, strict=True)]
    # What this would find if the offset meant nothing.
    alone = Part(kind, cut(value, rows)[1], 0, offsets, backend, **options)
    for t in range(3):
        grad = noise(value.shape, 10 + t, dtype)
        want = whole.step(grad)
        found = [part.step(g) for part, g in zip(parts, cut(grad, rows), strict=True)]
        assert_same_bits(joined(found), want, f"step {t}")
        other = alone.step(cut(grad, rows)[1])
        assert any(not torch.equal(other[k], found[1][k]) for k in other), "random bits are seen in the result"
    held = {k for k in want if k in quantised.ALL_SLOTS}
    assert bool(held) == ("state_dtype" in options), sorted(want)


def _transposed(x: Tensor) -> Tensor:
    return x.t().contiguous().t()


# Elements of the row that have the lower upper half: their end is within a vector, a tile and, in the last, a second
# chunk. Blocks of quantised moments are whole on both sides.
BORDERS = {"vector": 21, "chunk": 37} if INTERPRETED else {"vector": 21, "chunk": 16384 + 37}
BLOCK_BORDERS = {"block": 32, "blocks": 3 * 32} if INTERPRETED else {"block": 32, "blocks": 16384 + 3 * 32}


@pytest.mark.parametrize("upper", some([1, 2], [1]))
@pytest.mark.parametrize("stats", some([False, True], [False]))
@pytest.mark.parametrize("layout", [torch.clone, _transposed], ids=["dense", "strided"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FORMATS)
def test_the_upper_half_of_the_index_changes_within_a_row(
    name: str, kind: str, layout: Any, stats: bool, upper: int, offsets: dict[int, int]
) -> None:
    """Every backend as the eager one, whose indices are integers of 64 bits."""
    dtype, width, options = FORMATS[name]
    value = noise((7, width), 1, dtype)
    for where, before in (BLOCK_BORDERS if "state_dtype" in options else BORDERS).items():
        offset = (upper << 32) - before
        runs = [
            Part(kind, value, offset, offsets, backend, stats=stats, **options)
            for backend in dict.fromkeys(["eager", *PAIR])
        ]
        for t in range(2):
            grad = noise(value.shape, 10 + t, dtype)
            want, *found = [one.step(grad, layout) for one in runs]
            for one, bits in zip(runs[1:], found, strict=True):
                assert_same_bits(bits, want, f"{one.backend}, {where}, step {t}")


def drawn(index: int, key: int) -> int:
    """csrc/rules/random.h in Python's integers."""
    mask = 0xFFFFFFFF
    x = index % 2**32 * 0x9E3779B1 & mask
    x ^= (key % 2**32 + (index >> 32) * 0x85EBCA77) & mask
    x ^= x >> 16
    x = x * 0x21F0AAAD & mask
    x ^= x >> 15
    x = x + (key >> 32) & mask
    x = x * 0x735A2D97 & mask
    return x ^ (x >> 15)


@pytest.mark.cpu_only(reason="of the twin alone")
@pytest.mark.parametrize("offset", [0, 5, 2**32 - 7, 2**33 - 1, 2**40 + 3])
def test_draws_are_those_of_the_index(offset: int) -> None:
    key = masters.step_key(masters.stream(3, 1), 7)
    got = masters.draw(torch.Size((3, 5)), key, torch.device("cpu"), offset)
    assert got.flatten().tolist() == [drawn(offset + i, key) for i in range(15)]
    assert drawn(offset, key) != drawn(offset + 2**32, key)


@pytest.mark.cpu_only(reason="the host steps offloaded rows, whatever the backend under test")
@pytest.mark.parametrize("name", FORMATS)
def test_offloaded_rows_keep_their_offset(name: str, offsets: dict[int, int]) -> None:
    dtype, width, options = FORMATS[name]
    value = noise((7, width), 1, dtype)
    offset = 2**32 - 32
    homes: list[tuple[int, dict[str, Any]]] = [(offset, {}), (offset, {"offload": "cpu"}), (0, {"offload": "cpu"})]
    runs = [Part("adamw", value, at, offsets, "cpu", **options, **home) for at, home in homes]
    for t in range(3):
        near, far, other = (one.step(noise(value.shape, 10 + t, dtype)) for one in runs)
        assert_same_bits(far, near, f"step {t}")
    assert any(not torch.equal(other[k], near[k]) for k in near)
