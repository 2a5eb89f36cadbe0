"""What the norm of DTensors costs: wall time beside torch's utilities, in processes that take turns together.

    python bench/bench_distributed.py [--quick] [--json FILE] [--rounds N] [--only TEXT]

Two gloo processes on the CPU hold the halves of 500 gradients. Every process calls the same contender at the same time;
the times are the first one's. Norms are far below the limit, so that nothing is scaled. torch's step alone has no norm;
the steps beside it are what a training loop does: clip, then step, or ours, which does both.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import measure
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from measure import Goal, Outcome, Sample, Settings

import mo_fused

PROCESSES = 2
TENSORS = 500
SHAPE = (256, 64)
FAR = 1e9
"""A limit that no norm here reaches."""
TORCH, OURS = "torch", "mo_fused"
GOAL = Goal(OURS, TORCH, 5.0)
CASES = ("clip_grad_norm_", "get_total_norm", "clip and step")


def parameters(quick: bool) -> list[torch.nn.Parameter]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    generator = torch.Generator().manual_seed(0)
    params = []
    for _ in range(10 if quick else TENSORS):
        whole = torch.randn(SHAPE, generator=generator)
        p = torch.nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]))
        p.grad = distribute_tensor(whole, mesh, [Shard(0)])
        params.append(p)
    return params


def contenders(case: str, quick: bool) -> dict[str, Callable[[], Any]]:
    params = parameters(quick)
    grads = [p.grad for p in params]
    if case == "clip_grad_norm_":
        return {
            TORCH: lambda: torch.nn.utils.clip_grad_norm_(params, FAR).full_tensor(),
            OURS: lambda: mo_fused.clip_grad_norm_(params, FAR),
        }
    if case == "get_total_norm":
        return {
            TORCH: lambda: torch.nn.utils.get_total_norm(grads).full_tensor(),
            OURS: lambda: mo_fused.get_total_norm(grads),
        }
    plain = torch.optim.AdamW(params, fused=True)
    fused = mo_fused.AdamW(parameters(quick), max_grad_norm=FAR)
    for p in fused.param_groups[0]["params"]:
        p.grad = p.grad.clone()

    def clip_and_step() -> None:
        torch.nn.utils.clip_grad_norm_(params, FAR)
        plain.step()

    return {TORCH: clip_and_step, OURS: fused.step}


def race(rank: int, store: str, case: str, settings: Settings, out: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=PROCESSES, init_method=f"file://{store}")
    calls = contenders(case, settings.quick)
    times: dict[str, list[float]] = {name: [] for name in calls}
    order = list(calls)
    for k in range(3 + (2 if settings.quick else settings.rounds or 31)):
        for name in order:
            dist.barrier()
            start = time.perf_counter()
            calls[name]()
            if k >= 3:  # state, code, caches
                times[name].append(time.perf_counter() - start)
        order.append(order.pop(0))
    dist.barrier()
    if rank == 0:
        out.put(times)
        out.close()
        out.join_thread()
    os._exit(0)  # gloo's threads have been seen to abort an orderly end


def run(case: str, settings: Settings) -> Outcome:
    context = mp.get_context("spawn")
    out = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        children = [
            context.Process(target=race, args=(rank, os.path.join(folder, "store"), case, settings, out))
            for rank in range(PROCESSES)
        ]
        for child in children:
            child.start()
        times = out.get(timeout=600)
        for child in children:
            child.join()
    samples = {}
    for name, found in times.items():
        low, median, high = statistics.quantiles(found, n=4, method="inclusive")
        samples[name] = Sample(median, low, high, len(found), 1)
    count = 10 if settings.quick else TENSORS
    title = f"{case}, {count} DTensors {SHAPE[0]}x{SHAPE[1]} fp32 over {PROCESSES} gloo processes"
    goals = [] if case == "clip and step" else [GOAL]
    return Outcome("distributed", title, samples, {}, goals, settings.quick)


def main() -> None:
    settings = measure.arguments(__doc__)
    facts = measure.circumstances()
    print(measure.heading(facts))
    for case in CASES:
        if settings.only in case:
            done = run(case, settings)
            print(done.text())
            measure.append(settings.json, done.records(), facts)


if __name__ == "__main__":
    main()
