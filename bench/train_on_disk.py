"""Trains a model whose states are four times as large as all the memory that the process may have, with states on disk.

    python bench/train_on_disk.py [--layers N] [--steps N] [--dir DIR] [--output FILE] [--no-limit]

A stack of bf16 layers of 4096 x 4096, AdamW with fp32 moments and master weights (12 bytes an element in the file),
gradient release. The process limits itself (RLIMIT_AS, as ``ulimit -v``) to a quarter of the file before it imports
torch, so that code, parameters, gradients and buffers have to fit too: with 80 layers 4.0 GB, for 16.1 GB of states. A
step reads and writes all of the file; beside its time stands what the disk reads and writes directly (O_DIRECT) of the
same size, one after the other and both at once.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

WIDTH = 4096
STATE_BYTES = 12
CHUNK = 16 << 20
MOST = 10_000_000_000
"""Bytes of the disk's measurement."""


def train(layers: int, steps: int, folder: str, limited: bool) -> dict[str, Any]:
    """What the limited process does: seconds of each step, and the most memory it has had."""
    states = layers * WIDTH * WIDTH * STATE_BYTES
    if limited:
        resource.setrlimit(resource.RLIMIT_AS, (states // 4, states // 4))
    import torch

    import mo_fused

    torch.manual_seed(0)
    stack = [torch.nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16) for _ in range(layers)]
    model = torch.nn.Sequential(*stack)
    options: dict[str, Any] = dict(state_dtype="fp32", master_weights="fp32", offload=f"disk:{folder}")
    opt = mo_fused.AdamW(model.parameters(), lr=1e-3, **options)
    mo_fused.gradient_release(model, opt)
    x = torch.randn(4, WIDTH, dtype=torch.bfloat16)
    times, losses = [], []
    for _ in range(steps):
        start = time.perf_counter()
        loss = (model(x) - x).float().square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        times.append(time.perf_counter() - start)
        losses.append(float(loss.detach()))
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines())
    peaks = {name: int(status[name].split()[0]) << 10 for name in ("VmPeak", "VmHWM")}
    return {"states": states, "limit": states // 4 if limited else None, "times": times, "losses": losses, **peaks}


def disk_speed(folder: str, size: int) -> tuple[float, float, float]:
    """Bytes a second that are written, read, and moved when both happen at once."""

    def move(path: str, write: bool) -> None:
        buffer = mmap.mmap(-1, CHUNK)  # aligned, as O_DIRECT wants it
        flags = (os.O_RDWR | os.O_CREAT if write else os.O_RDONLY) | os.O_DIRECT
        try:
            descriptor = os.open(path, flags)
        except OSError:  # not every file system knows it
            descriptor = os.open(path, flags & ~os.O_DIRECT)
        for at in range(0, size, CHUNK):
            (os.pwritev if write else os.preadv)(descriptor, [buffer], at)
        os.close(descriptor)

    def timed(*threads: threading.Thread) -> float:
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.perf_counter() - start

    with tempfile.TemporaryDirectory(dir=folder) as inside:
        one, other = f"{inside}/one", f"{inside}/other"
        writing = timed(threading.Thread(target=move, args=(one, True)))
        reading = timed(threading.Thread(target=move, args=(one, False)))
        both = timed(
            threading.Thread(target=move, args=(one, False)), threading.Thread(target=move, args=(other, True))
        )
    return size / writing, size / reading, 2 * size / both


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--dir", help="where the files are (default: a temporary folder)")
    parser.add_argument("--output", metavar="FILE", help="append the result to FILE, a CSV file")
    parser.add_argument("--no-limit", action="store_true", help="for a few layers, beside which torch itself is large")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args(words)
    if given.child:
        print(json.dumps(train(given.layers, given.steps, given.child, not given.no_limit)))
        return
    with tempfile.TemporaryDirectory(dir=given.dir, prefix="train-on-disk-") as folder:
        call = [sys.executable, __file__, "--layers", str(given.layers), "--steps", str(given.steps)]
        call += ["--child", folder, *(["--no-limit"] if given.no_limit else [])]
        # Other arenas of malloc would reserve 64 MiB of addresses for each thread.
        done = subprocess.run(call, env={**os.environ, "MALLOC_ARENA_MAX": "1"}, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"training failed:\n{done.stderr[-2000:]}")
        found = json.loads(done.stdout)
        size = min(found["states"], MOST) // CHUNK * CHUNK
        writes, reads, both = disk_speed(folder, size)
    later = sorted(found["times"][1:])[len(found["times"][1:]) // 2]
    moved = 2 * found["states"] / later
    in_turn = 2 / (1 / writes + 1 / reads)
    limit = "none" if found["limit"] is None else f"{found['limit'] / 1e9:.2f} GB"
    print(
        f"{found['states'] / 1e9:.2f} GB of states, limit {limit}: at most {found['VmPeak'] / 1e9:.2f} GB of "
        f"addresses, {found['VmHWM'] / 1e9:.2f} GB resident\n"
        f"first step {found['times'][0]:.1f} s, later ones {later:.2f} s: {moved / 1e9:.2f} GB/s of the file\n"
        f"disk: writes {writes / 1e9:.2f}, reads {reads / 1e9:.2f}, in turn {in_turn / 1e9:.2f}, both at once "
        f"{both / 1e9:.2f} GB/s; the step moves {moved / in_turn:.2f} and {moved / both:.2f} of the last two"
    )
    if given.output:
        from mo_fused.bench import facts, results

        record = {
            "bench": "offload",
            "case": "train on disk",
            "contender": "mo_fused",
            "median_ms": later * 1e3,
            **found,
        }
        disk = {"disk_writes": writes, "disk_reads": reads, "disk_both": both, "layers": given.layers, "quick": False}
        results.append(given.output, [{**record, **found, **disk}], facts.circumstances())


if __name__ == "__main__":
    main()
