"""A tensor on its way to the host: asked for now, read later."""

from __future__ import annotations

import torch
from torch import Tensor

from .dispatch import is_cuda


class HostCopy:
    """A copy of ``tensor`` as it is now, which :meth:`read` waits for.

    On a CUDA device the copy is queued behind the work that makes the values, and an event behind the copy: reading
    waits for that event alone, not for what has been queued since. On the CPU it is there at once.
    """

    def __init__(self, tensor: Tensor) -> None:
        tensor = tensor.detach()
        self._event: torch.cuda.Event | None = None
        if is_cuda(tensor.device):
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(tensor.device))
        else:
            self._host = tensor.to("cpu", copy=True)

    @property
    def ready(self) -> bool:
        """Whether :meth:`read` would not wait."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def read(self) -> Tensor:
        """The copy, on the CPU."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return self._host
