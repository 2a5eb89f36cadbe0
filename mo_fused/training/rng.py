"""The random number generators of this process as plain values: what a checkpoint needs to go on with the same numbers.

Covered are Python's ``random``, NumPy's global generator, torch's on the CPU and torch's on every CUDA device. The
values are tensors and numbers, so a file of them loads with ``weights_only=True``.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def rng_state() -> dict[str, Any]:
    """Where each generator stands."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss},
        "numpy": {
            "kind": str(kind),
            "keys": torch.from_numpy(np.asarray(keys, dtype=np.int64)),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "gauss": float(cached),
        },
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],  # type: ignore[no-untyped-call]
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Put the generators where ``state`` was taken; those of CUDA devices that are not here are left out."""
    python, numpy = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    keys = numpy["keys"].numpy().astype(np.uint32)
    np.random.set_state((numpy["kind"], keys, numpy["position"], numpy["has_gauss"], numpy["gauss"]))
    torch.set_rng_state(state["torch"])
    for index, device_state in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(device_state, index)


@contextmanager
def kept_rng() -> Iterator[None]:
    """What is drawn inside leaves no trace outside."""
    before = rng_state()
    try:
        yield
    finally:
        set_rng_state(before)
