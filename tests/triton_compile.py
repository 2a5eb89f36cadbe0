"""Compiles the Triton kernels for GPUs that are not here; reads registers, accesses and fusion off the result.

What is compiled is what the launcher launches: :func:`variants` calls mo_fused/backends/triton.py with a launch that
writes down its arguments. Triton is imported by the processes of :func:`compiling` alone, where TRITON_INTERPRET is off
and the cache is a folder of the caller's, so that neither hides anything.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
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
SPILLS = 16
"""Bytes of a thread's registers that may lie in memory in the kernels that are launched once a step, over sums: now and
then ptxas puts a scalar or two aside for the length of a loop. Updates and statistics have none."""

F32, BF16, F16, F64, NONE = 0, 1, 2, 3, -1
BYTES = {F32: 4, BF16: 2, F16: 2, F64: 8}
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
    registers: int | None = None
    """Most registers of a thread on an NVIDIA GPU; None: as many as it takes."""
    old_registers: int | None = None
    """The same by a Triton before 3.9."""
    spills: int | None = SPILLS
    """Most bytes of a thread's registers in memory; None: as many as it takes."""
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


def _table(signature: Signature, addressing: str = "aligned", from_tensors: bool = False, tiled: bool = False) -> Any:
    aligned, strided = ADDRESSING[addressing]
    one = Launch(signature, aligned, strided, programs=1, programs_at=0, wide=signature[0] == F64)
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
        for variant in _adafactor(seen):
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


@dataclass(frozen=True)
class Figures:
    """What one compilation gave."""

    registers: int
    """Of a thread; AMD: vector registers."""
    spills: int
    """Bytes of stack and local memory of a thread."""
    shared: int
    """Bytes of shared memory of a block."""
    loads: Mapping[int, int]
    """Global loads by their bits: how many instructions."""
    stores: Mapping[int, int]
    fused: int
    """Fused multiply-adds that somebody made of a product and a sum: NVIDIA: in PTX; AMD: in LLVM's code and in machine
    code, but for what division and square root are made of."""
    inexact: int
    """Instructions or flags that allow an inexact quotient or root, or flush denormal numbers."""
    fusion: bool
    """Whether the compiler was allowed to fuse."""
    version: tuple[int, ...]
    """Of Triton."""


def compile_variant(target: Target, variant: Variant, changed: Mapping[str, Any] | None = None) -> Figures:
    """Compiles in this process, which must not have imported Triton in its interpreter. ``changed``: other keywords."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module = import_module(f"mo_fused.triton_kernels.{variant.kernel}_kernel")
    fn = getattr(module, f"{variant.kernel}_kernel")
    keywords = {**variant.keywords, **(changed or {})}
    constants = {name: keywords.pop(name) for name in fn.arg_names if name in keywords}
    # As the launch does: arguments with annotations are not specialised.
    types = {p.name: "constexpr" if p.is_constexpr else p.annotation_type for p in fn.params}
    source = ASTSource(fn, types, constants, {})
    done = triton.compile(source, target=GPUTarget(target.backend, target.arch, target.warp_size), options=keywords)
    return _read_nvidia(done) if target.nvidia else _read_amd(done, variant.integer_division)


def _version() -> tuple[int, ...]:
    import triton

    return tuple(int(part) for part in re.findall(r"\d+", triton.__version__)[:2])


_PTX_ACCESS = re.compile(r"\b(ld|st)\.global((?:[.:]+\w+)*)")
_PTX_FUSED = re.compile(r"\b(?:fma|mad)\.[\w.]*\bb?f(?:16|32|64)")
_PTX_INEXACT = re.compile(r"\.ftz\b|\.approx\b|\bdiv\.full\b")


def count_inexact_ptx(ptx: str) -> int:
    return len(_PTX_INEXACT.findall(ptx))


def _read_nvidia(done: Any) -> Figures:
    ptx: str = done.asm["ptx"]
    accesses: dict[str, Counter[int]] = {"ld": Counter(), "st": Counter()}
    for kind, suffix in _PTX_ACCESS.findall(ptx):
        lanes = re.search(r"\.v(\d)\b", suffix)
        element = re.search(r"\.[bfus](\d+)$", suffix)
        assert element, f"unknown access ld.global{suffix}"
        accesses[kind][int(element[1]) * (int(lanes[1]) if lanes else 1)] += 1
    used = _resources(done.asm["cubin"])
    return Figures(
        registers=used["REG"],
        spills=used["STACK"] + used["LOCAL"],
        shared=done.metadata.shared,
        loads=dict(accesses["ld"]),
        stores=dict(accesses["st"]),
        fused=len(_PTX_FUSED.findall(ptx)),
        inexact=count_inexact_ptx(ptx),
        fusion=done.metadata.enable_fp_fusion,
        version=_version(),
    )


def _resources(cubin: bytes) -> dict[str, int]:
    """Registers and memory of the one kernel in a cubin, from cuobjdump, which comes with Triton."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        told = subprocess.run([str(tool), "-res-usage", file.name], capture_output=True, text=True, check=True)
    lines = [line for line in told.stdout.splitlines() if "REG:" in line]
    if len(lines) != 1:
        raise RuntimeError(f"expected one kernel in the cubin, cuobjdump said {told.stdout!r}{told.stderr!r}")
    return {name: int(number) for name, number in re.findall(r"\b(REG|STACK|LOCAL|SHARED):(\d+)", lines[0])}


_GCN_ACCESS = re.compile(r"\b(?:global|flat|buffer)_(load|store)_(\w+)")
_GCN_BITS = {"dwordx4": 128, "dwordx3": 96, "dwordx2": 64, "dword": 32}
_GCN_FUSED = re.compile(r"\bv_(pk_)?(?:fma|fmac|mad|mac)(?:ak|mk)?_f(?:16|32|64)\w*|\bv_fma_mix\w* (.*)")
# A product or a sum of which an operand is float16: x * y - 0 or x * 1 + y, rounded once all the same.
_GCN_PLAIN_MIX = re.compile(r"\bneg\(0\)|, 1\.0,")
# Fused multiply-adds in an IEEE division, an IEEE square root and the conversion of a float64 to an integer (exact
# there), by the instruction that each of them has once. Triton 3.6 writes the square root of float32 itself, in LLVM's
# code; later ones leave it to LLVM.
_GCN_MADE_OF = {
    "v_div_fixup_f32": 5,
    "v_sqrt_f32": 2,
    "v_rsq_f32": 5,
    "v_div_fixup_f64": 5,
    "v_rsq_f64": 7,
    "v_floor_f64": 1,
}
_LLVM_MADE_OF = {"llvm.amdgcn.rsq.f32(": 5}
_LLVM_LOAD = re.compile(r"= load <(\d+) x (\w+)>, ptr addrspace\(1\)")
_LLVM_BITS = {"float": 32, "double": 64, "half": 16, "i8": 8, "i16": 16, "i32": 32, "i64": 64}
_LLVM_ARITHMETIC = re.compile(r"= (?:tail |musttail |notail )?(?:f(?:add|sub|mul|div|neg|rem)|call) .*")
_LLVM_FMA = re.compile(r"@llvm\.(?:fma|fmuladd)\.(?:v(\d+))?|\b(contract|fast)\b")
_LLVM_INEXACT = re.compile(r"!fpmath|\b(?:afn|arcp|reassoc)\b")
_LLVM_FLUSHING = re.compile(r"denormal-fp-math[\w-]*\"=\"(?!ieee)")


def _read_amd(done: Any, integer_division: bool) -> Figures:
    code: str = done.asm["amdgcn"]
    llvm: str = done.asm["llir"]
    accesses: dict[str, Counter[int]] = {"load": Counter(), "store": Counter()}
    for kind, what in _GCN_ACCESS.findall(code):
        accesses[kind][_GCN_BITS.get(what, 8 if "byte" in what else 16)] += 1
    # Machine code loads neighbouring scalars together; what was meant as one load can be seen in LLVM's code.
    vectors = Counter(int(lanes) * _LLVM_BITS[element] for lanes, element in _LLVM_LOAD.findall(llvm))
    loads = {bits: min(n, vectors[bits]) if bits > 64 else n for bits, n in accesses["load"].items()}

    def told(name: str) -> int:
        found = re.search(rf"^\s*(?:- )?\.{name}:\s*(\d+)", code, re.M)
        assert found, f"the machine code has no .{name}"
        return int(found[1])

    arithmetic = "\n".join(_LLVM_ARITHMETIC.findall(llvm))
    return Figures(
        registers=told("vgpr_count"),
        spills=4 * (told("vgpr_spill_count") + told("sgpr_spill_count")) + told("private_segment_fixed_size"),
        shared=done.metadata.shared,
        loads={bits: n for bits, n in loads.items() if n},
        stores=dict(accesses["store"]),
        fused=_fused_in_llvm(arithmetic) + (0 if integer_division else _fused_in_machine_code(code)),
        inexact=len(_LLVM_INEXACT.findall(arithmetic)) + len(_LLVM_FLUSHING.findall(llvm)),
        fusion=done.metadata.enable_fp_fusion,
        version=_version(),
    )


def _fused_in_llvm(arithmetic: str) -> int:
    """Fused multiply-adds, each lane one, that no square root is made of, and permissions to make some."""
    fused = sum(int(lanes or 1) for lanes, _ in _LLVM_FMA.findall(arithmetic))
    return fused - sum(each * arithmetic.count(name) for name, each in _LLVM_MADE_OF.items())


def _fused_in_machine_code(code: str) -> int:
    """Fused multiply-adds that no division, square root or conversion is made of."""
    fused = 0
    for match in _GCN_FUSED.finditer(code):
        packed, mixed = match.groups()
        if mixed is None or not _GCN_PLAIN_MIX.search(mixed):
            fused += 2 if packed else 1
    return fused - sum(each * len(re.findall(rf"\b{name}", code)) for name, each in _GCN_MADE_OF.items())


def problems(target: Target, variant: Variant, figures: Figures) -> list[str]:
    """What is wrong with a compilation, in words; empty when all is as promised."""
    found = []
    for what, wanted, there in (
        ("load", variant.loads, figures.loads),
        ("store", variant.stores, figures.stores),
    ):
        for bits in sorted(set(wanted)):
            need = sum(1 for w in wanted if w >= bits)
            have = sum(count for w, count in there.items() if w >= bits)
            if have < need:
                found.append(f"{have} global {what}s of {bits} bits or more, expected {need}, one an operand")
    if figures.fusion or figures.fused:
        found.append(f"{figures.fused} fused multiply-adds (fusion allowed: {figures.fusion}), expected 0 (False)")
    if figures.inexact:
        found.append(f"{figures.inexact} inexact or flushing instructions, expected 0")
    if variant.spills is not None and figures.spills > variant.spills:
        found.append(f"{figures.spills} bytes spilled, expected at most {variant.spills}")
    most = variant.old_registers if figures.version < OLD_TRITON else variant.registers
    if target.nvidia and most is not None and figures.registers > most:
        found.append(f"{figures.registers} registers, expected at most {most}")
    return found


def _prepare(cache_folder: str) -> None:
    os.environ["TRITON_CACHE_DIR"] = cache_folder
    os.environ["TRITON_INTERPRET"] = "0"
    torch.set_num_threads(1)


@contextmanager
def compiling(cache_folder: Path, processes: int = 2) -> Iterator[ProcessPoolExecutor]:
    """Processes to submit :func:`compile_variant` to. What was not begun when the context ends is not compiled."""
    pool = ProcessPoolExecutor(
        processes, mp_context=get_context("spawn"), initializer=_prepare, initargs=(str(cache_folder),)
    )
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
