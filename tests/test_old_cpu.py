"""The native part on processors without the newer instruction sets: it runs, and its bits are this machine's.

torch itself needs AVX, and takes half a minute to be imported under emulation. So the calls that optimizers make here
are recorded with all the memory that they reach, and made again by tests/old_cpu_child.py on an emulated processor.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import pickle
import platform
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from old_cpu_child import ALIGNMENT, Call

import mo_fused
from mo_fused import _native
from mo_fused.backends import cpu
from mo_fused.table import ROW, STEP_TABLE, Table

QEMU = shutil.which("qemu-x86_64") if platform.machine() in ("x86_64", "AMD64") else None
pytestmark = [
    pytest.mark.cpu_only(reason="the subject is the instruction sets of the host's kernels"),
    pytest.mark.skipif(QEMU is None, reason="no qemu-x86_64 here"),
]
CHILD = Path(__file__).with_name("old_cpu_child.py")

# qemu64 has SSE2 and little more: the oldest that x86-64 can mean. SandyBridge has AVX, which is not enough for the
# kernels called avx2; Haswell has all that they need, and no AVX-512.
PROCESSORS = {"qemu64": "base", "Nehalem": "base", "SandyBridge": "base", "Haswell": "avx2"}

# (optimizer, its options, dtype). Two sizes reach full vectors and tails; quantised states want 4096 elements.
STEPS: list[tuple[Any, dict[str, Any], torch.dtype]] = [
    (mo_fused.AdamW, dict(lr=0.01, max_grad_norm=1.0, stats=True), torch.float32),
    (mo_fused.AdamW, dict(lr=0.01, amsgrad=True, skip_nonfinite=True), torch.float16),
    (mo_fused.AdamW, dict(lr=0.01, state_dtype="int8", master_weights="split8", stats=True), torch.bfloat16),
    (mo_fused.Adam, dict(lr=0.01, state_dtype="int4", master_weights="stochastic"), torch.bfloat16),
    (mo_fused.AdamW, dict(lr=0.01, state_dtype="fp32", master_weights="kahan"), torch.float16),
    (mo_fused.SGD, dict(lr=0.01, momentum=0.9, nesterov=True, max_grad_norm=1.0), torch.bfloat16),
    (mo_fused.SGD, dict(lr=0.01, momentum=0.9, clip_in_place=True, max_grad_norm=1.0), torch.float64),
    (mo_fused.Adafactor, dict(lr=0.01, beta1=0.9, max_grad_norm=1.0, stats=True), torch.float32),
    (mo_fused.Adafactor, dict(lr=0.01, stats=True), torch.bfloat16),
]


class Memory:
    """Stretches of this process's memory, and which addresses in them point into others."""

    def __init__(self) -> None:
        self.stretches: list[tuple[int, int, bool]] = []  # address, bytes, whether addresses may stand there

    def add(self, address: int, size: int, links: bool) -> int:
        if size:
            self.stretches.append((address, size, links))
        return len(self.stretches) - 1

    def find(self, address: int) -> tuple[int, int] | None:
        found = (
            (i, address - start) for i, (start, size, _) in enumerate(self.stretches) if 0 <= address - start < size
        )
        return next(found, None)

    def content(self, which: int) -> bytes:
        address, size, _ = self.stretches[which]
        return ctypes.string_at(address, size)

    def links(self) -> list[tuple[int, int, int, int]]:
        low, high = min(s[0] for s in self.stretches), max(s[0] + s[1] for s in self.stretches)
        out = []
        for i, (_, size, links) in enumerate(self.stretches):
            words = np.frombuffer(self.content(i), dtype="<u8", count=size // 8) if links else np.zeros(0, dtype="<u8")
            for at in np.flatnonzero((words >= low) & (words < high)).tolist():
                if (target := self.find(int(words[at]))) is not None:
                    out.append((i, 8 * at, *target))
        return out


def arrays_of(table: Table) -> list[np.ndarray[Any, Any]]:
    owners = [table] if table.tiling is None else [table, table.tiling]
    return [value for owner in owners for value in vars(owner).values() if isinstance(value, np.ndarray)]


def record(table: Table, tensors: list[torch.Tensor]) -> tuple[Call, Callable[[], list[bytes]]]:
    """A call as the child takes it, and what reads its results off this process once it has been made here."""
    memory = Memory()
    results = [memory.add(t.data_ptr(), t.numel() * t.element_size(), links=False) for t in tensors]
    results.append(memory.add(int(table.step["result"][0]), 128, links=False))
    results.append(memory.add(int(table.step["row_stats"][0]), 64 * len(table.rows), links=False))
    for array in arrays_of(table):
        memory.add(array.ctypes.data, array.nbytes, links=True)
    places = [memory.find(table.address), *map(memory.find, addresses_in(table))]
    assert None not in places, "the table has an address that is not recorded"
    assert places[0] is not None
    call = Call(
        [memory.content(i) for i in range(len(memory.stretches))],
        [address % ALIGNMENT for address, _, _ in memory.stretches],
        memory.links(),
        places[0][0],
        results,
    )
    return call, lambda: [memory.content(i) for i in results]


def addresses_in(table: Table) -> list[int]:
    fields = [table.step[name] for name in STEP_TABLE.names or () if not name.startswith("n_")]
    names = ("param", "grad", "state", "step", "layout", "factored", "master", "scale")
    assert set(names) < set(ROW.names or ())
    fields += [table.rows[name] for name in names]
    return [int(address) for field in fields for address in field.ravel() if address]


@pytest.fixture(scope="module")
def recorded() -> tuple[list[Call], list[list[bytes]]]:
    """The second step of every case: the calls, and what they have left on this machine."""
    calls, left = [], []
    original = cpu.run
    with pytest.MonkeyPatch.context() as patch:
        for number, (optimizer, options, dtype) in enumerate(STEPS):
            draw = torch.Generator().manual_seed(number)
            params = [
                torch.nn.Parameter(torch.randn(s, generator=draw).to(dtype)) for s in ((64, 131), (64, 128), (77,))
            ]
            opt = optimizer(params, backend="cpu", **options)

            def run(table: Table, opt: Any = opt, params: list[Any] = params) -> None:
                tensors = [t for p in params for t in (p, p.grad, *opt.state[p].values()) if torch.is_tensor(t)]
                call, results = record(table, tensors)
                original(table)
                calls.append(call)
                left.append(results())

            for step in range(2):
                for p in params:
                    p.grad = torch.randn(p.shape, generator=draw).to(dtype)
                if step == 1:
                    patch.setattr(cpu, "run", run)
                opt.step()
            patch.setattr(cpu, "run", original)
    assert len(calls) == len(STEPS)
    return calls, left


def emulate(processor: str, *args: str, given: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    assert QEMU is not None
    python = os.path.realpath(sys.executable)
    env = {name: value for name, value in os.environ.items() if name != "MO_FUSED_ISA"}
    command = [QEMU, "-cpu", processor, python, "-I", "-S", str(CHILD), *args]
    return subprocess.run(command, input=given, capture_output=True, timeout=120, check=False, env=env)


@pytest.mark.parametrize("processor", PROCESSORS)
def test_steps_have_the_same_bits(processor: str, recorded: tuple[list[Call], list[list[bytes]]]) -> None:
    calls, left = recorded
    given = pickle.dumps([dataclasses.astuple(call) for call in calls])
    done = emulate(processor, str(_native.__file__), given=given)
    assert done.returncode == 0, f"status {done.returncode}: {done.stderr.decode()[-2000:]}"
    isa, found = pickle.loads(done.stdout)
    assert isa == (PROCESSORS[processor], None)
    for number, (want, got) in enumerate(zip(left, found, strict=True)):
        assert want[0] != calls[number].regions[0], "the step did nothing"
        assert got == want, f"{STEPS[number]}: other bits"


def test_an_emulated_processor_refuses_what_it_does_not_have() -> None:
    """Else the test above could not fail."""
    assert emulate("Haswell", "avx").returncode == 0
    assert emulate("Nehalem", "avx").returncode == -signal.SIGILL
