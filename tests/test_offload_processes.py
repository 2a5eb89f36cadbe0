"""Offload under DistributedDataParallel, which averages gradients over processes after their hooks have run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

pytestmark = pytest.mark.cpu_only(reason="processes of their own, with the CPU's backends")

SCRIPT = """
import sys
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import mo_fused


def train(rank, bucket_view, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    model = DistributedDataParallel(model, gradient_as_bucket_view=bucket_view)
    opt = mo_fused.AdamW(model.parameters(), max_grad_norm=0.1, **options)
    generator = torch.Generator().manual_seed(rank)  # each process has data of its own
    for _ in range(3):
        with model.no_sync():
            model(torch.randn(8, 64, generator=generator)).square().mean().backward()
        model(torch.randn(8, 64, generator=generator)).square().mean().backward()
        opt.step()
        opt.zero_grad()
    return [p.detach() for p in model.parameters()]


def work(rank, file):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    for bucket_view in (False, True):
        plain = train(rank, bucket_view)
        for options in ({}, {"offload_gradients": True}):
            other = train(rank, bucket_view, offload="cpu", **options)
            assert all(torch.equal(a, b) for a, b in zip(plain, other, strict=True)), (bucket_view, options)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(work, (sys.argv[1],), 2)
    print("equal")
"""


def test_gradients_are_those_that_all_processes_agreed_on(
    run_python: Callable[..., CompletedProcess[str]], tmp_path: Path
) -> None:
    script = tmp_path / "processes.py"
    script.write_text(SCRIPT, encoding="utf-8")
    found = run_python(str(script), str(tmp_path / "meet"))
    assert found.returncode == 0 and found.stdout.strip() == "equal", found.stderr[-2000:]
