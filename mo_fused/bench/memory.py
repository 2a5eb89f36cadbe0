"""The suite memory: what a step takes beyond parameters, gradients and state, and how large the state is.

On the CPU it is the growth of resident memory at its highest, on a GPU that of allocated memory; each contender in a
process of its own, so that no freed memory of another one is at hand.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mo_fused import dispatch
from mo_fused.bench import peers
from mo_fused.bench.case import SMALL, More, Settings
from mo_fused.bench.peers import OURS, OURS_LIKE, Peer
from mo_fused.bench.results import Record
from mo_fused.bench.room import too_large
from mo_fused.bench.workloads import MAX_NORM, WORKLOADS

CLIPPING = f"{OURS}, clipping"
GOAL = 0.01
"""Temporaries of a parameter's size: none. What is left are tables and small buffers."""
FAMILIES: dict[str, Sequence[Peer]] = {"AdamW": peers.ADAMW, "Adafactor": peers.ADAFACTOR}


def _kilobytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1])
    raise RuntimeError(f"/proc/self/status: expected a line {field}, found none; this measurement needs Linux")


def growth(call: Callable[[], Any]) -> int:
    """Bytes by which resident memory rises, at its highest, above what it was before the call."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # glibc: memory that was freed before must not serve the call unseen
        libc.malloc_trim(0)
    # Sets VmHWM back to VmRSS. ru_maxrss would not do: it cannot be set back, and it starts at the parent's.
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = _kilobytes("VmRSS")
    call()
    return max(0, _kilobytes("VmHWM") - before) * 1024


def growth_on_gpu(device: torch.device, call: Callable[[], Any]) -> int:
    """Likewise of the memory that torch's allocator has handed out, synchronised."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    torch.cuda.synchronize(device)
    return int(max(0, torch.cuda.max_memory_allocated(device) - before))


def _tensors(value: Any) -> Iterable[Tensor]:
    """Those of a state, however a peer nests them; of a subclass of tensor what it is made of."""
    if isinstance(value, Tensor):
        inner = getattr(value, "__tensor_flatten__", None)
        if inner is None:
            yield value
        else:
            for name in inner()[0]:
                yield from _tensors(getattr(value, name))
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Memory of all tensors of the state, each once."""
    once = {t.untyped_storage().data_ptr(): t for entry in optimizer.state.values() for t in _tensors(entry)}
    return sum(t.untyped_storage().nbytes() for t in once.values())


def _find(family: str, who: str) -> tuple[Peer, dict[str, Any]]:
    name = OURS if who == CLIPPING else who
    options = {"max_grad_norm": MAX_NORM} if who == CLIPPING else {}
    return next(p for p in FAMILIES[family] if p.name == name), options


def measure(family: str, who: str, workload: str, quick: bool, device: torch.device) -> Record:
    """In a process of its own.

    Returns:
        ``first_beyond_state``, growth by the first step beyond the state that it makes, and ``later``, the largest of
        the three steps after it, as fractions of the parameters' size ``parameters`` in bytes; ``state`` likewise.
    """
    peer, options = _find(family, who)
    grow = partial(growth_on_gpu, device) if dispatch.is_cuda(device) else growth
    # Code pages, thread stacks and allocator arenas that come with the first use of anything.
    dtype = WORKLOADS[workload].dtype
    warm = [torch.nn.Parameter(torch.zeros(512, 512, dtype=dtype, device=device)) for _ in range(4)]
    for p in warm:
        p.grad = torch.ones_like(p)
    warm_optimizer = peer.make(warm, **options)
    for _ in range(3):
        warm_optimizer.step()
    params = WORKLOADS[workload].parameters(quick, device)
    size = sum(p.numel() * p.element_size() for p in params)
    optimizer = peer.make(params, **options)
    first = grow(optimizer.step)
    state = state_bytes(optimizer)
    later = max(grow(optimizer.step) for _ in range(3))
    return {
        "first_beyond_state": max(0, first - state) / size,
        "later": later / size,
        "state": state / size,
        "parameters": size,
    }


def _in_a_child(family: str, who: str, workload: str, settings: Settings) -> Record | None:
    words = [sys.executable, "-m", __name__, family, who, workload, str(int(settings.quick)), str(settings.device)]
    env = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        line = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        settings.says(f"{who} is left out of {workload}: {line[:200]}")
        return None
    found: Record = json.loads(done.stdout.splitlines()[-1])
    return found


def table(family: str, workload: str, settings: Settings) -> tuple[str, list[Record]]:
    """What to print, and a record for each contender."""
    title = f"{WORKLOADS[workload].name}, {family}, memory of a step"
    reason = too_large(WORKLOADS[workload], settings)
    if reason:
        return f"{title}: left out, as it {reason}", []
    there = peers.available(FAMILIES[family], settings.device, settings.peers, settings.says)
    size = sum(torch.Size(s).numel() for s in WORKLOADS[workload].shapes)
    names = [p.name for p in there if p.name != OURS_LIKE and p.wrap is None and size <= p.elements]
    names.insert(1, CLIPPING)
    lines = [f"{title}, in shares of the parameters' size"]
    lines.append(f"  {'':<31} {'state':>9} {'first step, beyond its state':>29} {'later steps':>12}")
    records = []
    for who in names:
        found = _in_a_child(family, who, workload, settings)
        if found is None:
            continue
        lines.append(f"  {who:<31} {found['state']:>9.2%} {found['first_beyond_state']:>29.3%} {found['later']:>12.3%}")
        version = _find(family, who)[0].version
        row = {"bench": "memory", "case": title, "contender": who, "version": version, "quick": settings.quick}
        records.append({**row, **found})
    if settings.quick:
        lines.append(f"  {SMALL.strip()}")
    return "\n".join(lines), records


MEMORY: dict[str, More] = {
    f"memory-{family.lower()}-{name}": partial(table, family, name)
    for family in FAMILIES
    for name in ("gpt2-fp32", "gpt2-bf16")
}

if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4] == "1", torch.device(sys.argv[5]))))
