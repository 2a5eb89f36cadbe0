"""What the norm of DTensors costs: wall time beside torch's utilities, in processes that take turns together.

    python bench/bench_distributed.py [--quick] [--output FILE] [--rounds N] [--only TEXT]

Two gloo processes on the CPU hold the halves of the 500 parameters of an FSDP2 model. Every process calls the same
contender at the same time; the times are the first one's. Norms are far below the limit, so that nothing is scaled.
"all-reduce" is one of a dozen numbers, which no norm over ranks can do without. "clip and step" is what a training loop
does: torch clips, then steps; ours does both in the step.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import mo_fused
from mo_fused.bench import facts, results
from mo_fused.bench.case import Goal, Outcome, Settings, arguments
from mo_fused.bench.race import sample

PROCESSES = 2
TENSORS = 500
SHAPES = ((64, 64), (256, 256))
"""Of the whole parameters: 4 and 64 MB of gradients a process."""
FAR = 1e9
"""A limit that no norm here reaches."""
TORCH, OURS, ALONE = "torch", "mo_fused", "all-reduce"
GOAL = Goal(OURS, TORCH, 5.0)
CASES = ("clip_grad_norm_", "get_total_norm", "clip and step")


class Many(torch.nn.Module):
    """Parameters, and a forward that uses each of them once."""

    def __init__(self, count: int, shape: tuple[int, int]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        parts = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for _ in range(count)]
        self.parts = torch.nn.ParameterList(parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([(p * x).sum() for p in self.parts]).sum()


def parameters(shape: tuple[int, int], quick: bool) -> list[torch.nn.Parameter]:
    """Those of an FSDP2 model, with the gradients that its backward leaves."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = Many(10 if quick else TENSORS, shape)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    model(torch.randn(shape, generator=torch.Generator().manual_seed(1))).backward()
    return list(model.parameters())


def contenders(case: str, shape: tuple[int, int], quick: bool) -> dict[str, Callable[[], Any]]:
    params = parameters(shape, quick)
    numbers = torch.zeros(12, dtype=torch.float64)
    alone = {ALONE: lambda: dist.all_reduce(numbers)}
    grads = [p.grad for p in params]
    if case == "clip_grad_norm_":
        return {
            TORCH: lambda: torch.nn.utils.clip_grad_norm_(params, FAR).full_tensor(),
            OURS: lambda: mo_fused.clip_grad_norm_(params, FAR),
            **alone,
        }
    if case == "get_total_norm":
        return {
            TORCH: lambda: torch.nn.utils.get_total_norm(grads).full_tensor(),
            OURS: lambda: mo_fused.get_total_norm(grads),
            **alone,
        }
    plain = torch.optim.AdamW(params, fused=True)
    fused = mo_fused.AdamW(parameters(shape, quick), max_grad_norm=FAR)

    def clip_and_step() -> None:
        torch.nn.utils.clip_grad_norm_(params, FAR)
        plain.step()

    return {TORCH: clip_and_step, OURS: fused.step, **alone}


def race(rank: int, store: str, case: str, shape: tuple[int, int], settings: Settings, out: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=PROCESSES, init_method=f"file://{store}")
    calls = contenders(case, shape, settings.quick)
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


def run(case: str, shape: tuple[int, int], settings: Settings) -> Outcome:
    context = mp.get_context("spawn")
    out = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        children = [
            context.Process(target=race, args=(rank, os.path.join(folder, "store"), case, shape, settings, out))
            for rank in range(PROCESSES)
        ]
        for child in children:
            child.start()
        times = out.get(timeout=600)
        for child in children:
            child.join()
    samples = {}
    for name, found in times.items():
        samples[name] = sample(found, 1)
    count = 10 if settings.quick else TENSORS
    title = f"{case}, {count} DTensors {shape[0]}x{shape[1]} fp32 over {PROCESSES} gloo processes"
    goals = [GOAL] if case == "clip_grad_norm_" else []
    return Outcome("distributed", title, samples, {}, goals, settings.quick)


def main() -> None:
    settings = arguments(__doc__)
    here = facts.circumstances()
    print(facts.heading(here))
    for shape in SHAPES:
        for case in CASES:
            if settings.only in case:
                done = run(case, shape, settings)
                print(done.text())
                results.append(settings.output, done.records(), here)


if __name__ == "__main__":
    main()
