"""One seed for every source of random numbers, in this process and in the workers of its data loaders."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import TypedDict

import numpy as np
import torch
import torch.distributed as dist

from mo_fused.errors import bad_option


class LoaderSeeds(TypedDict):
    """Arguments of ``torch.utils.data.DataLoader``."""

    generator: torch.Generator
    worker_init_fn: Callable[[int], None]


def seed_everything(seed: int, rank: int | None = None) -> LoaderSeeds:
    """Seeds Python's ``random``, NumPy and torch on all devices, and returns what seeds a ``DataLoader``.

    ::

        loader = DataLoader(data, batch_size=8, shuffle=True, num_workers=2, **seed_everything(0))

    The generator decides the order and, anew for each epoch, the seed of every worker; workers draw different numbers,
    and so do ranks. On rank 0 torch's seed is ``seed`` itself. Weights that have to start equal on all ranks
    (DistributedDataParallel copies rank 0's anyway) are made after ``seed_everything(seed, rank=0)``.

    Args:
        seed: from 0 to 2**63 - 1.
        rank: of this process; ``None`` asks torch.distributed if it is initialized, else torchrun's variable ``RANK``,
            else it is 0.

    Raises:
        ValueError: ``seed`` or ``rank`` outside its range.
    """
    if not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise bad_option("seed", "a whole number from 0 to 2**63 - 1", seed, "give such a number")
    if rank is None:
        ready = dist.is_available() and dist.is_initialized()
        rank = dist.get_rank() if ready else int(os.environ.get("RANK", "0"))
    if rank < 0:
        raise bad_option("rank", "0 or more", rank, "give this process's number, or leave it out")
    own = seed if rank == 0 else _mixed(seed, rank)
    _seed_process(own)
    # A stream of its own: torch's global one, seeded alike, would give the loader the numbers of the first weights.
    return LoaderSeeds(generator=torch.Generator().manual_seed(_mixed(own, 0)), worker_init_fn=_seed_worker)


def _seed_worker(_worker: int) -> None:
    """Seeds a loader's worker: torch has seeded itself with a number drawn for this epoch and this worker."""
    _seed_process(torch.initial_seed() % 2**63)


def _seed_process(seed: int) -> None:
    random.seed(seed)
    np.random.seed(np.random.SeedSequence(seed).generate_state(4))
    torch.manual_seed(seed)


def _mixed(seed: int, number: int) -> int:
    """A seed from 0 to 2**63 - 1 that has nothing in common with its neighbours'."""
    return int(np.random.SeedSequence((seed, number)).generate_state(1, np.uint64)[0]) >> 1
