"""Gradients that all lie on one device, measured and scaled there without waiting: behind the utilities of grad.py."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import dispatch
from .device_part import DevicePart, DeviceStats
from .layout import walking_order
from .request import Request
from .table import ACTIVE, GRAD, NO_RULE, OPERANDS, RECORD, ROW, scan

_KEPT = 8


class DeviceGradients:
    """A table over gradients alone. Get one from :func:`on_one_device`."""

    def __init__(
        self, records: np.ndarray[Any, Any], layouts: dict[int, list[int]], device: torch.device, backend: str
    ) -> None:
        self._rows = np.zeros(len(records), dtype=ROW)
        self._rows["numel"] = records["numel"]
        self._rows["dtype"][:, GRAD] = records["dtype"]
        self._rows["flags"] = ACTIVE
        signatures = [(code, code, -1, -1, -1) for code in records["dtype"].tolist()]
        self._part = DevicePart(self._rows, signatures, layouts, 1, device, backend)
        self._part.table.settings[1, 7] = 1.0  # clip
        self._strided = sorted(layouts)

    def find(self, grads: Sequence[Tensor], addresses: np.ndarray[Any, Any]) -> None:
        """Takes the present addresses of gradients with the layouts that this table was made for."""
        self._rows["grad"] = addresses
        expanded = any(s == 0 and n > 1 for i in self._strided for s, n in zip(grads[i].stride(), grads[i].shape))
        self.writable = len(set(addresses.tolist())) == len(addresses) and not expanded
        """No memory is listed twice or shared by the elements of one gradient, so all can be written side by side."""

    def measure(self, max_norm: float | None = None, count_zeros: bool = False) -> DeviceStats:
        """One read of every gradient; with ``max_norm`` also the factor for :meth:`scale`."""
        self._part.begin(measuring(max_norm), first=True)
        self._part.measure(count_zeros)
        self._part.finish()
        return self._part.stats

    def measure_part(self, count_zeros: bool = False) -> tuple[Tensor, DeviceStats]:
        """What these gradients add to the totals of more (see DevicePart.partial), and their statistics."""
        self._part.begin(measuring(), first=True)
        self._part.measure(count_zeros)
        record = self._part.partial().clone()
        self._part.finish()
        return record, self._part.stats

    def use_norm(self, norm: Tensor, max_norm: float) -> None:
        """The factor for :meth:`scale` from a norm that the caller knows (0-dim, any device and dtype)."""
        self._part.begin(measuring(max_norm), first=False)
        self._part.finish(norm=norm.detach().to(self._part.device, torch.float64, non_blocking=True))

    def scale(self) -> None:
        """Multiplies every gradient by the factor where that is not 1."""
        self._part.scale_gradients()


def measuring(max_norm: float | None = None) -> Request:
    """What a table of gradients alone is asked: their norm, and the factor that clips it."""
    return Request(
        rule=NO_RULE,
        max_grad_norm=max_norm,
        skip_nonfinite=False,
        stats=False,
        clip_in_place=False,
        grad_scale=None,
        found_inf=None,
        report=None,
    )


class _Kept(threading.local):
    """The last tables of this thread: what a table finds and what it then measures or scales must be the same."""

    def __init__(self) -> None:
        self.tables: OrderedDict[Any, DeviceGradients] = OrderedDict()


_kept = _Kept()


def on_one_device(grads: Sequence[Tensor]) -> DeviceGradients | None:
    """A table of these gradients, or None unless all of them lie on one device that has kernels for all of them.

    None also while a CUDA graph is being captured: torch's own operations are captured then.

    The last few tables are kept, by the layouts of their gradients and the stream that they are used on.
    """
    items = list(grads)
    if not items or type(items[0]) not in (Tensor, torch.nn.Parameter) or items[0].layout is not torch.strided:
        return None
    device = items[0].device
    if dispatch.is_capturing(device):
        return None  # a replay needs the memory of a table for ever, and tables here come and go
    backend = dispatch.choose(items[0]).backend
    if backend not in dispatch.ON_DEVICE:
        return None
    records = np.zeros(len(items), dtype=RECORD)
    scan(items, records)
    served = (records["plain"] == 1) & (records["dtype"] >= 0) & (records["device"] == dispatch.device_code(device))
    if not served.all() or any(g.is_neg() for g in items):
        return None
    key = (device, backend, dispatch.stream(device), records["layout"].tobytes())
    found = _kept.tables.pop(key, None)
    if found is None:
        layouts: dict[int, list[int]] = {}
        for i in np.flatnonzero(records["contiguous"] == 0).tolist():
            order = walking_order([None, items[i], *[None] * (OPERANDS - 2)], written=())
            if order.problem:
                return None
            if order.layout is not None:
                layouts[i] = order.layout
        found = DeviceGradients(records, layouts, device, backend)
    _kept.tables[key] = found
    while len(_kept.tables) > _KEPT:
        _kept.tables.popitem(last=False)
    found.find(items, records["address"])
    return found
