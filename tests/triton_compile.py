"""Compiles the Triton kernels for GPUs that are not here; reads registers, accesses and fusion off the result.

What is compiled is what the launcher launches: tests/triton_variants.py. Triton is imported by the processes of
:func:`compiling` alone, where TRITON_INTERPRET is off and the cache is a folder of the caller's, so that neither hides
anything.
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
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from triton_variants import OLD_TRITON, Target, Variant


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
    narrowest = min(*figures.loads, *figures.stores)
    if narrowest < variant.narrowest:
        found.append(f"an access of {narrowest} bits, expected {variant.narrowest} or more")
    if variant.shared is not None and figures.shared > variant.shared:
        found.append(f"{figures.shared} bytes of shared memory, expected at most {variant.shared}")
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
