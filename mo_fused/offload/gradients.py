"""Gradients that are copied to the host as the backward makes them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import dispatch
from .ring import Ring
from .streams import HostStream, Lanes, Mark, host_memory


class HostGradient:
    """One parameter's gradient on the host."""

    def __init__(self) -> None:
        self.value: Tensor | None = None
        """On the host, in the gradient's order."""
        self.taken = False
        """Nobody else has this gradient (``offload_gradients``)."""
        self.marks: list[Mark] = []
        """After these the value is there."""
        self._source: tuple[Tensor, int, int] | None = None  # gradient, its version and address when it was copied
        self._kept = False  # the value is the gradient itself

    def copy(self, grad: Tensor, lanes: Lanes) -> None:
        """Starts a copy. The gradient is kept alive until :meth:`done`."""
        self.taken = False
        self._make_room(grad)
        assert self.value is not None
        self._source = (grad, grad._version, grad.data_ptr())
        self.marks = [lanes.down.copy([(self.value, grad.detach())], lanes.now())]

    def take(self, grad: Tensor, lanes: Lanes, adder: HostStream, staging: Ring, keep: bool) -> None:
        """As :meth:`copy`, and adds to what was taken since the last step.

        ``keep``: the gradient itself may be kept, because it is on the host.
        """
        self._source = None
        if not self.taken and keep:
            self.value, self.marks, self._kept = grad.detach(), [], True
        elif not self.taken:
            self._make_room(grad)
            assert self.value is not None
            self.marks = [lanes.down.copy([(self.value, grad.detach())], lanes.now())]
        elif keep:
            total, more = self.value, grad.detach()
            self.marks = [adder.run(lambda: _add(total, more), self.marks)]
        else:
            total, slot = self.value, staging.next()
            memory = slot.take(grad.numel() * grad.element_size())
            there = _as(grad, memory)
            arrived = lanes.down.copy([(there, grad.detach())], [*slot.busy, *lanes.now()])
            self.marks = [adder.run(lambda: _add(total, there), [*self.marks, arrived])]
            slot.busy = self.marks
        self.taken = True

    def _make_room(self, grad: Tensor) -> None:
        value = self.value
        if value is None or value.dtype != grad.dtype or value.shape != grad.shape or value.stride() != _order(grad):
            for mark in self.marks:
                mark.failed()
            self.value = _like(grad)

    def is_of(self, grad: Tensor | None) -> bool:
        """Whether the copy is one of this gradient as it is now."""
        if self._source is None or grad is None:
            return False
        source, version, address = self._source
        return source is grad and version == grad._version and address == grad.data_ptr()

    def free_source(self) -> None:
        """Lets go of the gradient, which lives on until its copy is done."""
        self._source = None

    def forget(self) -> None:
        """The value is somebody else's from here on."""
        self.done()
        self.value = None

    def done(self) -> None:
        """The step has used it."""
        self.taken, self._source, self.marks = False, None, []
        if self._kept:
            self.value, self._kept = None, False

    def discard(self) -> None:
        """Forgets a gradient that no step will use."""
        for mark in self.marks:
            mark.failed()
        self.done()


def _order(grad: Tensor) -> Any:
    return torch.empty_like(grad, device="meta", memory_format=torch.preserve_format).stride()


def _like(grad: Tensor) -> Tensor:
    """Memory of the host for a gradient, in the gradient's order where that has no gaps."""
    return _as(grad, host_memory(grad.numel() * grad.element_size(), pinned=not dispatch.is_cpu(grad)))


def _as(grad: Tensor, memory: Tensor) -> Tensor:
    """The first bytes as a tensor like the gradient."""
    flat = memory[: grad.numel() * grad.element_size()].view(grad.dtype)
    return flat.as_strided(grad.shape, _order(grad))


def _add(total: Tensor | None, more: Tensor) -> None:
    assert total is not None
    with torch.no_grad():
        total.add_(more)
