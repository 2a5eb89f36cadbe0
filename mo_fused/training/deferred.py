"""Numbers that are on their way from the device: asked for after one step, read after the next."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from mo_fused.host_copy import HostCopy


class Deferred:
    """A copy to the host of some 0-dim tensors, which :meth:`read` waits for.

    :class:`mo_fused.host_copy.HostCopy` says what is waited for: never what has been queued since.

    Args:
        values: 0-dim tensors by name, all on one device; bool, integer or floating (read as float64).
    """

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        self._names = list(values)
        self._copy = None
        if values:
            self._copy = HostCopy(torch.stack([value.detach().reshape(()).double() for value in values.values()]))

    @property
    def ready(self) -> bool:
        """Whether :meth:`read` would not wait."""
        return self._copy is None or self._copy.ready

    def read(self) -> dict[str, float]:
        """The values as Python numbers."""
        values = [] if self._copy is None else self._copy.read().tolist()
        return dict(zip(self._names, values, strict=True))
