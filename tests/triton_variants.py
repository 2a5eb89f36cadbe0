"""Every Triton kernel in every form that is checked, as it is launched, and what is expected of its compilation.

:func:`variants` calls mo_fused/backends/triton.py with a launch that writes down its arguments.
tests/triton_compile.py compiles them and reads the figures off the result.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from mo_fused import dispatch
from mo_fused.backends import triton as launcher
from mo_fused.device_table import Launch, Signature
from mo_fused.request import Request

REGISTERS = 80
"""A thread of an aligned update or of aligned statistics may hold this many: six blocks fit on a multiprocessor."""
OLD_TRITON = (3, 9)
OLD_REGISTERS = 128
"""Of an update with sums, by a Triton before 3.9: four blocks fit. It begins more of the sums at the same time."""
FACTOR_SUMS_REGISTERS = 128
"""Of Adafactor's first pass over matrices: it has two ways of adding up, and four blocks fit on a multiprocessor."""
QUANTISED_REGISTERS = 96
"""Of an update of quantised moments with sums, or of three moments: five blocks fit. Each moment takes a scale, its
inverse and random bits besides. On sm_100 that makes up to 96; without sums, two moments take up to 80."""
SPILLS = 16
"""Bytes of a thread's registers that may lie in memory in the kernels that are launched once a step, over sums: now and
then ptxas puts a scalar or two aside for the length of a loop. Updates and statistics have none."""

F32, BF16, F16, F64, NONE = 0, 1, 2, 3, -1
Q8, Q8_ROOT, Q4, Q4_ROOT = 6, 7, 8, 9
BYTES = {F32: 4, BF16: 2, F16: 2, F64: 8}
BITS = {**{code: 8 * size for code, size in BYTES.items()}, Q8: 8, Q8_ROOT: 8, Q4: 4, Q4_ROOT: 4}
ADAM, SGD, NO_RULE, ADAFACTOR = 0, 1, 2, 3

ADAMW_SIGNATURES: dict[str, Signature] = {
    "fp32": (F32, F32, F32, F32, NONE),
    "bf16": (BF16, BF16, BF16, BF16, NONE),
    "fp16": (F16, F16, F16, F16, NONE),
    "bf16/fp32": (BF16, BF16, F32, F32, NONE),
    "fp32 amsgrad": (F32, F32, F32, F32, F32),
    "bf16 amsgrad": (BF16, BF16, BF16, BF16, BF16),
    "fp64": (F64, F64, F64, F64, NONE),
}
SGD_SIGNATURES: dict[str, Signature] = {
    "fp32": (F32, F32, NONE, NONE, NONE),
    "bf16": (BF16, BF16, NONE, NONE, NONE),
    "fp32 momentum": (F32, F32, F32, NONE, NONE),
    "bf16 momentum": (BF16, BF16, BF16, NONE, NONE),
}
# Of matrices; a vector's second slot is the variance of its elements, and it has no third.
ADAFACTOR_SIGNATURES: dict[str, Signature] = {
    "fp32": (F32, F32, F32, F32, NONE),
    "bf16": (BF16, BF16, F32, F32, NONE),
    "fp32 momentum": (F32, F32, F32, F32, F32),
    "fp64": (F64, F64, F64, F64, NONE),
}
# Rule, signature, MasterMode, bits of an element of the rest of the weights, elements of a block.
QUANTISED: dict[str, tuple[int, Signature, int, int, int]] = {
    "adamw int8 bf16": (ADAM, (BF16, BF16, Q8, Q8_ROOT, NONE), 0, 0, 256),
    "adamw int8 bf16 split8": (ADAM, (BF16, BF16, Q8, Q8_ROOT, NONE), 3, 8, 256),
    "adamw int8 bf16 amsgrad": (ADAM, (BF16, BF16, Q8, Q8_ROOT, Q8_ROOT), 0, 0, 128),
    "adamw int8 fp32": (ADAM, (F32, F32, Q8, Q8_ROOT, NONE), 0, 0, 256),
    "adamw int4 bf16": (ADAM, (BF16, BF16, Q4, Q4_ROOT, NONE), 0, 0, 128),
    "adamw int4 bf16 master": (ADAM, (BF16, BF16, Q4, Q4_ROOT, NONE), 1, 32, 128),
    "sgd int8 bf16": (SGD, (BF16, BF16, Q8, NONE, NONE), 0, 0, 256),
    "sgd int8 fp32": (SGD, (F32, F32, Q8, NONE, NONE), 0, 0, 32),
}
ADDRESSING = {"aligned": (True, False), "unaligned": (False, False), "strided": (False, True)}


@dataclass(frozen=True)
class Target:
    name: str
    backend: str
    arch: int | str
    warp_size: int

    @property
    def nvidia(self) -> bool:
        return self.backend == "cuda"


TARGETS = {
    t.name: t
    for t in (
        Target("sm_80", "cuda", 80, 32),
        Target("sm_90", "cuda", 90, 32),
        Target("sm_100", "cuda", 100, 32),
        Target("gfx942", "hip", "gfx942", 64),
    )
}


@dataclass(frozen=True)
class Variant:
    """A kernel as it is launched. ``keywords``: its constants and the options of the compiler."""

    name: str
    kernel: str
    keywords: Mapping[str, Any] = field(hash=False)
    loads: tuple[int, ...] = ()
    """Bits of one access to each operand that the kernel reads, where every thread takes 16 bytes of the widest."""
    stores: tuple[int, ...] = ()
    """The same for each operand that it writes."""
    narrowest: int = 0
    """Fewest bits of any access."""
    registers: int | None = None
    """Most registers of a thread on an NVIDIA GPU; None: as many as it takes."""
    old_registers: int | None = None
    """The same by a Triton before 3.9."""
    spills: int | None = SPILLS
    """Most bytes of a thread's registers in memory; None: as many as it takes."""
    shared: int | None = None
    """Most bytes of a block's shared memory; None: as many as it takes."""
    integer_division: bool = False
    """On AMD's GPUs, the machine code divides integers by multiplying and adding floats."""


class _Kernels:
    """Stands for the launcher's kernels: their names."""

    def __getattr__(self, name: str) -> str:
        return name


@contextmanager
def _recording(target: Target) -> Iterator[list[tuple[str, dict[str, Any]]]]:
    """Launches become (kernel, keywords), as on a machine with this target."""
    seen: list[tuple[str, dict[str, Any]]] = []

    def clear() -> None:
        launcher.shape.cache_clear()
        launcher.tile_shape.cache_clear()
        launcher.fixed_options.cache_clear()

    with (
        mock.patch.object(dispatch, "warp_size", lambda: target.warp_size),
        mock.patch.object(dispatch, "is_nvidia", lambda: target.nvidia),
        mock.patch.object(launcher, "kernels", _Kernels),
        mock.patch.object(launcher, "launch", lambda kernel, programs, *args, **more: seen.append((kernel, more))),
    ):
        clear()
        try:
            yield seen
        finally:
            clear()


def _table(
    signature: Signature,
    addressing: str = "aligned",
    from_tensors: bool = False,
    tiled: bool = False,
    mode: int = 0,
    block: int = 0,
) -> Any:
    aligned, strided = ADDRESSING[addressing]
    wide = signature[0] == F64
    one = Launch(signature, aligned, strided, programs=1, programs_at=0, wide=wide, mode=mode, block=block)
    work = SimpleNamespace(chunks_at=0, launches=[one])
    empty = torch.zeros((2, 1), dtype=torch.float64)
    return SimpleNamespace(
        work=work,
        linear=work,
        rows=[0],
        n_chunks=1,
        from_tensors=from_tensors,
        rows_at=0,
        settings_at=0,
        scalars_at=0,
        tiling="of Adafactor" if tiled else None,
        tiles=empty,
        sums=empty,
        runs=empty,
        n_runs=1,
        wide_runs=[wide] if signature[3] >= 0 else [],
    )


def _request(rule: int, max_grad_norm: float | None = None, skip_nonfinite: bool = False) -> Request:
    return Request(
        rule=rule,
        max_grad_norm=max_grad_norm,
        skip_nonfinite=skip_nonfinite,
        stats=False,
        clip_in_place=False,
        grad_scale=None,
        found_inf=None,
        report=None,
    )


# Updates whose eight elements of every operand would not fit into the registers.
BY_8_BYTES = (ADAMW_SIGNATURES["fp16"], ADAMW_SIGNATURES["bf16 amsgrad"])


def _bits(codes: list[int], signature: Signature, sums: bool) -> tuple[int, ...]:
    """Of each operand what goes with 16 bytes of the widest; with sums, 16-bit tensors go by 8 bytes."""
    widest = max(BYTES[code] for code in signature if code != NONE)
    elements = 16 // max(widest, 4 if sums or signature in BY_8_BYTES else 1)
    return tuple(8 * elements * BYTES[code] for code in codes if code != NONE)


@cache
def variants(target: Target) -> dict[str, Variant]:
    """Every kernel in every form that is checked, by name."""
    found: dict[str, Variant] = {}
    with _recording(target) as seen:

        def add(name: str, signature: Signature = (NONE,) * 5, reads: str = "", sums: bool = False) -> None:
            ((kernel, keywords),) = seen
            seen.clear()
            loads: tuple[int, ...] = ()
            stores: tuple[int, ...] = ()
            if "aligned" in name.split():
                p, g, *slots = signature
                loads = _bits([p, g, *slots] if reads == "update" else [g], signature, sums)
                writes = [p, *slots] if reads == "update" else [g] if reads == "scale" else []
                stores = _bits(writes, signature, sums)
            limits: dict[str, Any] = {}
            if reads:  # without alignment, and more with strides, it is the addresses that take the registers
                aligned = "aligned" in name.split()
                most = REGISTERS if aligned and F64 not in signature else None
                limits = dict(registers=most, old_registers=OLD_REGISTERS if most and sums else most)
                limits |= dict(spills=0 if aligned else None, integer_division="strided" in name.split())
            found[name] = Variant(name, kernel, keywords, loads, stores, **limits)

        for rule, kernel, signatures in ((ADAM, "adamw", ADAMW_SIGNATURES), (SGD, "sgd", SGD_SIGNATURES)):
            for dtypes, signature in signatures.items():
                for sums in (0, 1, 2):
                    for addressing in ADDRESSING:
                        launcher.update(_table(signature, addressing), 0, _request(rule), sums)
                        add(f"{kernel} {dtypes} sums={sums} {addressing}", signature, "update", sums != 0)
        for dtype, code in (("fp32", F32), ("bf16", BF16), ("fp16", F16), ("fp64", F64)):
            gradient: Signature = (code, code, NONE, NONE, NONE)
            for addressing in ADDRESSING:
                launcher.measure(_table(gradient, addressing), 0)
                add(f"grad_stats {dtype} {addressing}", gradient, "measure")
                launcher.scale_gradients(_table(gradient, addressing), 0)
                add(f"scale_grad {dtype} {addressing}", gradient, "scale")
            launcher.measure(_table(gradient), 0, count_zeros=True)
            add(f"grad_stats {dtype} zeros aligned", gradient, "measure")
        some = ADAMW_SIGNATURES["fp32"]
        for name, rule in (("adam", ADAM), ("sgd", SGD), ("no rule", NO_RULE), ("adafactor", ADAFACTOR)):
            launcher.finish(_table(some), 0, _request(rule), False)
            add(f"finish {name}")
            launcher.finish(_table(some), 0, _request(rule, 1.0, True), True)
            add(f"finish {name} measured")
            launcher.finish(_table(some, from_tensors=True), 0, _request(rule, 1.0, True), True)
            add(f"finish {name} measured from-tensors")
            launcher.finish(_table(some), 0, _request(rule, 1.0), False, norm=torch.ones((), dtype=torch.float64))
            add(f"finish {name} norm-given")
        launcher.partial(_table(some), 0, torch.zeros(5, dtype=torch.float64))
        add("partial")
        for gradients in (False, True):
            launcher.update_norms(_table(some), 0, 0, gradients)
            add("update_norms gradients" if gradients else "update_norms")
        for variant in (*_adafactor(seen), *_quantised(seen)):
            found[variant.name] = variant
    return found


def _adafactor(seen: list[tuple[str, dict[str, Any]]]) -> Iterator[Variant]:
    """Adafactor's passes in representative forms; ``seen``: the launches of one update."""
    for dtypes, matrix in ADAFACTOR_SIGNATURES.items():
        vector: Signature = (*matrix[:3], NONE, matrix[4])
        for kind, signature in (("", matrix), (" vector", vector)):
            for addressing in ADDRESSING:
                table = _table(signature, addressing, tiled=True)
                launcher.measure(table, 0)
                launcher.factors(table, 0)
                for sums in (0, 1):
                    launcher.update(table, 0, _request(ADAFACTOR), sums)
                    for kernel, keywords in seen:
                        named = f"{kernel} {dtypes}{kind}" + (f" sums={sums}" if kernel == "adafactor" else "")
                        if kernel in ("factor_sums", "factored_rms", "adafactor"):
                            yield _pass_over_tiles(f"{named} {addressing}", kernel, keywords, signature)
                        elif kernel == "factors" or dtypes == "fp32":
                            yield Variant("sizes" if kernel == "sizes" else named, kernel, keywords)
                    seen.clear()
    launcher.update(_table(vector, from_tensors=True, tiled=True), 0, _request(ADAFACTOR), 0)
    yield Variant("sizes from-tensors", *next(one for one in seen if one[0] == "sizes"))
    seen.clear()


def _pass_over_tiles(name: str, kernel: str, keywords: Mapping[str, Any], signature: Signature) -> Variant:
    p, g, second, columns, first = signature
    variance = NONE if columns != NONE else second  # read and written by lanes, of vectors alone
    reads = {"factor_sums": (g,), "factored_rms": (g, variance), "adafactor": (p, g, variance, first)}[kernel]
    writes = {"factor_sums": (), "factored_rms": (variance,), "adafactor": (p, first)}[kernel]
    aligned = name.endswith(" aligned")
    most = FACTOR_SUMS_REGISTERS if kernel == "factor_sums" and columns != NONE else REGISTERS
    widths = max(BYTES[code] for code in reads if code != NONE)
    limit = most if aligned and F64 not in signature else None
    return Variant(
        name,
        kernel,
        keywords,
        loads=tuple(128 * BYTES[code] // widths for code in reads if code != NONE) if aligned else (),
        stores=tuple(128 * BYTES[code] // widths for code in writes if code != NONE) if aligned else (),
        registers=limit,
        old_registers=limit and OLD_REGISTERS,
        spills=0 if aligned else None,
        integer_division=True,
    )


def _quantised(seen: list[tuple[str, dict[str, Any]]]) -> Iterator[Variant]:
    """Updates of quantised moments in representative forms: four elements a thread, whatever the dtypes. Gradients are
    measured before them, so there is no SUMS = 2."""
    for name, (rule, signature, mode, rest, block) in QUANTISED.items():
        p, g, *slots = (BITS[code] for code in signature if code != NONE)
        weights = [p, rest] if mode else [p]
        for sums in (0, 1):
            for addressing in ADDRESSING:
                launcher.update(_table(signature, addressing, mode=mode, block=block), 0, _request(rule), sums)
                ((kernel, keywords),) = seen
                seen.clear()
                full = f"{name} sums={sums} {addressing}"
                if addressing == "aligned":
                    much = bool(sums) or len(slots) > 2
                    yield Variant(
                        full,
                        kernel,
                        keywords,
                        loads=tuple(4 * bits for bits in (*weights, g, *slots)),
                        stores=tuple(4 * bits for bits in (*weights, *slots)),
                        narrowest=4 * min(slots),
                        registers=QUANTISED_REGISTERS if much else REGISTERS,
                        old_registers=OLD_REGISTERS,
                        spills=SPILLS if sums else 0,
                        shared=32,  # what a reduction over four warps takes: nothing else goes through it
                    )
                else:
                    yield Variant(full, kernel, keywords, spills=None, integer_division=addressing == "strided")
