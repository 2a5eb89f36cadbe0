"""What offloading states costs: steps on the CPU, a file against its disk, a limit on memory, a training step on a GPU.

    python bench/bench_offload.py [--quick] [--output FILE] [--rounds N] [--threads N] [--only TEXT] [--dir DIR]
    python bench/bench_offload.py --limit [--quick] [--dir DIR]      steps within a quarter of the states' bytes
    python bench/bench_offload.py --only gpu [--batch N] [--model NAME]

The races are those of `mo-fused bench offload`, over AdamW on GPT-2's 124 M parameters in fp32.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mo_fused.bench import case
from mo_fused.bench.case import More, Settings
from mo_fused.bench.offload import DISK, MODEL, cases
from mo_fused.bench.peers import ours
from mo_fused.bench.results import Record
from mo_fused.bench.workloads import MAX_NORM, Shape, gpt2_shapes
from mo_fused.offload import files, ring

# -- the file against its disk ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Disk:
    """Reads and writes of a file as large as the states, in chunks as large as a step's."""

    descriptor: int
    size: int
    chunk: int

    def read(self) -> None:
        buffer = np.empty(self.chunk, dtype=np.uint8)
        for at in range(0, self.size, self.chunk):
            os.preadv(self.descriptor, [buffer[: min(self.chunk, self.size - at)].data], at)

    def write(self) -> None:
        buffer = np.ones(self.chunk, dtype=np.uint8)
        for at in range(0, self.size, self.chunk):
            os.pwritev(self.descriptor, [buffer[: min(self.chunk, self.size - at)].data], at)


def forget(descriptor: int) -> None:
    """Nothing of the file stays in memory."""
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def timed(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def against_the_disk(folder: str, settings: Settings) -> tuple[str, list[Record]]:
    """Bytes of the states that a step reads and writes over its time, beside what plain reads and writes reach.

    "warm": the file is in memory (the page cache), as far as it fits. "cold": it is not, and is on the disk at the end.
    """
    params = MODEL.parameters(settings.quick)
    optimizer = ours(params, offload=f"disk:{folder}")
    optimizer.step()
    file = next(e.file for entry in optimizer.state.values() for e in entry.extents.values())
    size = sum(e.size for entry in optimizer.state.values() for e in entry.extents.values())
    own = os.open(file.path, os.O_RDWR)
    times: dict[str, list[float]] = {}

    def note(name: str, seconds: float) -> None:
        times.setdefault(name, []).append(seconds)

    def to_disk(call: Callable[[], Any], descriptor: int) -> Callable[[], None]:
        def both() -> None:
            call()
            os.fsync(descriptor)

        return both

    # A piece holds two moments, each of which is read and written by itself, at most so much at once.
    chunk = min(ring.SLOT_BYTES // 2, files.IO_BYTES)
    with tempfile.TemporaryFile(dir=folder) as plain:
        disk = Disk(plain.fileno(), size, chunk)
        disk.write()
        try:
            for _ in range(settings.rounds_of(5)):
                disk.read()
                note("reads, warm", timed(disk.read))
                note("writes, warm", timed(disk.write))
                optimizer.step()
                note("step, warm", timed(optimizer.step))
                forget(disk.descriptor)
                note("reads, cold", timed(disk.read))
                note("writes, cold", timed(to_disk(disk.write, disk.descriptor)))
                forget(own)
                note("step, cold", timed(to_disk(optimizer.step, own)))
        finally:
            os.close(own)
    lines = [f"[disk] a step's file of {size / 1e9:.3f} GB under {folder}, chunks of {chunk / 2**20:g} MiB"]
    records = []
    for how in ("warm", "cold"):
        read, write, step = (statistics.median(times[f"{what}, {how}"]) for what in ("reads", "writes", "step"))
        of_disk, of_step = 2 * size / (read + write) / 1e9, 2 * size / step / 1e9
        lines.append(
            f"  {how}: disk reads {size / read / 1e9:.2f} GB/s, writes {size / write / 1e9:.2f} GB/s, one after the "
            f"other {of_disk:.2f} GB/s; step {step * 1e3:.1f} ms, {of_step:.2f} GB/s: {of_step / of_disk:.2f}x the disk"
        )
        records.append(
            {
                "bench": "offload",
                "case": f"disk, {how}",
                "contender": DISK,
                "quick": settings.quick,
                "median_ms": step * 1e3,
                "bytes": 2 * size,
                "gb_per_s": of_step,
                "disk_read_gb_per_s": size / read / 1e9,
                "disk_write_gb_per_s": size / write / 1e9,
                "share_of_disk": of_step / of_disk,
                "rounds": len(times[f"step, {how}"]),
            }
        )
    if settings.quick:
        lines.append("  (tiny sizes: says nothing)")
    return "\n".join(lines), records


# -- a limit on memory ------------------------------------------------------------------------------------------------


def of_status(field: str) -> int:
    """Bytes of a field of /proc/self/status."""
    text = Path("/proc/self/status").read_text(encoding="utf-8")
    return next(int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith(f"{field}:"))


class Peak:
    """The largest RssAnon while it is watched: the kernel keeps no peak of it."""

    def __init__(self) -> None:
        self.bytes = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._over.wait(0.002):
            self.bytes = max(self.bytes, of_status("RssAnon"))

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self.bytes = max(self.bytes, of_status("RssAnon"))


def train_limited(shapes: Sequence[Shape], folder: str | None, steps: int) -> Record:
    """What the process under the limit does; with ``folder`` None it keeps its states in memory, and must fail."""
    params = [torch.nn.Parameter(torch.full(shape, 0.5)) for shape in shapes]
    for p in params:
        p.grad = torch.full_like(p, 1e-3)
    states = sum(8 * p.numel() for p in params)
    small = torch.nn.Parameter(torch.ones(8))
    small.grad = torch.ones(8)
    ours([small], max_grad_norm=MAX_NORM).step()  # imports what a first step imports
    optimizer = ours(params, max_grad_norm=MAX_NORM, offload=None if folder is None else f"disk:{folder}")
    gc.collect()
    may = states // 4
    limit = of_status("VmSize") + may
    before = of_status("RssAnon")
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    with Peak() as peak:
        times = [timed(optimizer.step) for _ in range(steps)]
    return {"states": states, "may": may, "before": before, "peak": peak.bytes, "times": times}


def under_a_limit(folder: str, settings: Settings) -> tuple[str, list[Record]]:
    shapes, steps = (gpt2_shapes(1, 512, 46000, 64), 3) if settings.quick else (gpt2_shapes(), 6)

    def run(where: str | None) -> subprocess.CompletedProcess[str]:
        words = json.dumps([shapes, where, steps, 1 << 20 if settings.quick else ring.SLOT_BYTES])
        # One arena of malloc: others would reserve 64 MiB of addresses for each thread.
        env = {**os.environ, "MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": str(torch.get_num_threads())}
        return subprocess.run(
            [sys.executable, __file__, "--limited", words], env=env, capture_output=True, text=True, check=False
        )

    in_memory, done = run(None), run(folder)
    if done.returncode:
        raise SystemExit(f"[limit] training within the limit failed:\n{done.stderr[-2000:]}")
    if not in_memory.returncode:
        raise SystemExit("[limit] states in memory fitted too: the limit proves nothing")
    found: Record = json.loads(done.stdout)
    later = statistics.median(found["times"][1:])
    text = (
        f"[limit] {found['states'] / 2**20:.0f} MiB of states, of which {found['may'] / 2**20:.0f} MiB could be "
        f"allocated: peak RssAnon {found['peak'] / 2**20:.0f} MiB, {found['before'] / 2**20:.0f} MiB before the first "
        f"step; first step {found['times'][0] * 1e3:.1f} ms, later ones {later * 1e3:.1f} ms\n"
        f"  without offload: {in_memory.stderr.strip().splitlines()[-1][:200]}"
    )
    record = {
        "bench": "offload",
        "case": "limit on memory",
        "contender": DISK,
        "quick": settings.quick,
        "median_ms": later * 1e3,
        **found,
    }
    return text, [record]


# -- on a GPU ---------------------------------------------------------------------------------------------------------


def on_a_gpu(batch: int | None, model: str, settings: Settings) -> tuple[str, list[Record]]:
    import gpu_offload

    if not torch.cuda.is_available() and not settings.quick:
        return "[gpu] needs a GPU", []
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    size = gpu_offload.TINY if settings.quick else gpu_offload.SIZES[model]
    seconds = 1.0 if settings.quick else 120.0
    found = gpu_offload.race(device, size, batch, seconds, settings.rounds_of(15), settings.quick)
    return f"[gpu] {found.text()}", found.records()


# -- main -------------------------------------------------------------------------------------------------------------


def main(words: Sequence[str] | None = None) -> None:
    parser = case.parser(__doc__)
    parser.add_argument("--dir", metavar="DIR", help="where files of states are (default: a temporary folder)")
    parser.add_argument("--limit", action="store_true", help="only the steps within a limit on memory")
    parser.add_argument("--batch", type=int, help="sequences of a training step (default: the largest that fits)")
    parser.add_argument("--model", default="0.1 B", help="size of the GPU's model: 0.1 B, 0.5 B or 1.9 B")
    parser.add_argument("--limited", help=argparse.SUPPRESS)
    given = parser.parse_args(words)
    if given.limited:
        shapes, where, steps, ring.SLOT_BYTES = json.loads(given.limited)
        print(json.dumps(train_limited([tuple(s) for s in shapes], where, steps)))
        return
    settings = case.settings_of(given)
    if given.limit:
        settings = replace(settings, only="limit")
    with tempfile.TemporaryDirectory(dir=given.dir, prefix="bench-offload-") as folder:
        others: dict[str, More] = {
            "disk": partial(against_the_disk, folder),
            "limit": partial(under_a_limit, folder),
            "gpu": partial(on_a_gpu, given.batch, given.model),
        }
        case.run(cases(folder), others, settings)


if __name__ == "__main__":
    main()
