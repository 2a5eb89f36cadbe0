"""What a device's backend would launch, and every way in which the host might wait for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from cases import BACKEND, DEVICE, ON_HOST
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mo_fused.backends import cuda, triton

PHASES = {
    cuda.MEASURE: "grad_stats_kernel",
    cuda.PARTIAL: "partial_kernel",
    cuda.FINISH: "finish_kernel",
    cuda.SCALE: "scale_grad_kernel",
    cuda.NORMS: "update_norms_kernel",
}


def count_launches(patch: pytest.MonkeyPatch, run: bool = True) -> list[str]:
    """A list to which every launch adds its kernel's name. ``run`` is about the CPU; a GPU always runs them."""
    names: list[str] = []
    if BACKEND == "cuda":
        call = cuda.launch

        def counted_call(step: Any) -> None:
            update = ("adamw_kernel", "sgd_kernel", "none")[int(step["rule"][0])]
            names.append(PHASES.get(int(step["phases"][0]), update))
            if run or not ON_HOST:
                call(step)

        patch.setattr(cuda, "launch", counted_call)
        return names
    real = triton.launch

    def counted(kernel: Any, programs: int, *args: Any, **options: Any) -> None:
        names.append(kernel.fn.__name__)
        if run or not ON_HOST:
            real(kernel, programs, *args, **options)

    patch.setattr(triton, "launch", counted)
    return names


class Waited(AssertionError):
    """The host asked the device for a value."""


# Operations by which C++ code reads a value without any of the Python methods below.
READING = {"_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "item"}


class NoReading(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in READING:
            raise Waited(f"{func}")
        return func(*args, **(kwargs or {}))


def watch(monkeypatch: pytest.MonkeyPatch) -> Callable[[], AbstractContextManager[None]]:
    """A context in which every way of asking a tensor of DEVICE for its value raises.

    On a GPU torch's own watch is on too. In the interpreter there is nothing to wait for, so the calls are what counts.
    """

    @contextmanager
    def context() -> Iterator[None]:
        def forbid(name: str) -> Any:
            real = getattr(Tensor, name)

            def raising(self: Tensor, *args: Any, **kwargs: Any) -> Any:
                if self.device.type == DEVICE.type:
                    raise Waited(f"Tensor.{name}")
                return real(self, *args, **kwargs)

            return raising

        def forbidden(*args: Any, **kwargs: Any) -> Any:
            raise Waited("synchronize")

        with monkeypatch.context() as patch:
            for name in ("item", "cpu", "tolist", "numpy", "__bool__", "__float__", "__int__", "__index__"):
                patch.setattr(Tensor, name, forbid(name))
            patch.setattr(torch.cuda, "synchronize", forbidden)
            if DEVICE.type == "cuda":
                torch.cuda.set_sync_debug_mode("error")
            try:
                with NoReading():
                    yield
            finally:
                if DEVICE.type == "cuda":
                    torch.cuda.set_sync_debug_mode("default")

    return context
