"""Which device a run uses."""

from __future__ import annotations

import torch

from mo_fused.training.errors import bad_input


def choose_device(name: str | None = None) -> torch.device:
    """The device called ``name``, or the best one that really works: CUDA if it computes, else the CPU.

    Raises:
        InputError: no such device, or it does not compute here.
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() and _refusal("cuda") is None else "cpu")
    reason = _refusal(name)
    if reason is not None:
        usable = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
        raise bad_input(
            "--device",
            expected=f"a device that computes here ({', '.join(usable)})",
            found=f"{name!r} ({reason})",
            remedy="name one of these, or leave --device out",
        )
    return torch.device(name)


def _refusal(name: str) -> str | None:
    """Why ``name`` cannot be used, None when it can: one addition is tried, since what is listed may not run."""
    try:
        torch.ones(1, device=name).add(1.0).item()
    except (RuntimeError, AssertionError, ImportError, ValueError) as error:
        return (str(error).splitlines() or [type(error).__name__])[0]
    return None
