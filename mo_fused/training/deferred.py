"""Numbers that are on their way from the device: asked for after one step, read after the next."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from mo_fused.dispatch import is_cuda


class Deferred:
    """A copy to the host of some 0-dim tensors, which :meth:`read` waits for.

    On a CUDA device the copy is queued behind the work that makes the values, and an event behind the copy: reading
    waits for that event alone, not for what has been queued since. On the CPU the values are there at once.

    Args:
        values: 0-dim tensors by name, all on one device; bool, integer or floating (read as float64).
    """

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        self._names = list(values)
        self._event: torch.cuda.Event | None = None
        if not values:
            self._host = torch.empty(0, dtype=torch.float64)
            return
        together = torch.stack([value.detach().reshape(()).double() for value in values.values()])
        if is_cuda(together.device):
            self._host = torch.empty(len(values), dtype=torch.float64, pin_memory=True)
            self._host.copy_(together, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(together.device))
        else:
            self._host = together.cpu()

    def read(self) -> dict[str, float]:
        """The values as Python numbers."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return dict(zip(self._names, self._host.tolist(), strict=True))
