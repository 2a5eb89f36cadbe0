"""Calls of the native part without torch and numpy, so that processors can be emulated on which neither runs.

A program: ``old_cpu_child.py LIBRARY`` takes calls on standard input, as tests/test_old_cpu.py pickles them, and
answers with the name of the instruction set and the memory that each call has left. ``old_cpu_child.py avx`` executes
an AVX instruction: what an emulated processor without AVX must refuse.
"""

from __future__ import annotations

import ctypes
import importlib.util
import mmap
import pickle
import struct
import sys
from dataclasses import dataclass

ALIGNMENT = 64


@dataclass
class Call:
    """The memory of one call: regions of bytes, and the addresses that stand in them."""

    regions: list[bytes]
    places: list[int]
    """Addresses that the regions had, modulo ALIGNMENT."""
    links: list[tuple[int, int, int, int]]
    """(region, offset) holds the address of (region, offset)."""
    table: int
    """Which region is the StepTable."""
    results: list[int]
    """Which regions are compared afterwards."""


def load(library: str) -> object:
    spec = importlib.util.spec_from_file_location("mo_fused._native", library)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(call: Call, native: object) -> list[bytes]:
    buffers, addresses = [], []
    for content, place in zip(call.regions, call.places):
        buffer = ctypes.create_string_buffer(len(content) + 2 * ALIGNMENT)
        start = ctypes.addressof(buffer)
        start += (place - start) % ALIGNMENT
        ctypes.memmove(start, content, len(content))
        buffers.append(buffer)
        addresses.append(start)
    for region, offset, target, distance in call.links:
        ctypes.memmove(addresses[region] + offset, struct.pack("<Q", addresses[target] + distance), 8)
    native.cpu_step(addresses[call.table])  # type: ignore[attr-defined]
    return [ctypes.string_at(addresses[i], len(call.regions[i])) for i in call.results]


def execute_avx() -> None:
    page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(bytes.fromhex("c5f877c3"))  # vzeroupper; ret
    ctypes.CFUNCTYPE(None)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()


if __name__ == "__main__":
    if sys.argv[1] == "avx":
        execute_avx()
    else:
        module = load(sys.argv[1])
        calls = [Call(*fields) for fields in pickle.load(sys.stdin.buffer)]
        answer = module.cpu_isa(), [run(call, module) for call in calls]  # type: ignore[attr-defined]
        sys.stdout.buffer.write(pickle.dumps(answer))
