"""Gradients of which this process has parts: norm and health of the whole, behind the utilities of grad.py."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..backends.eager import norm_of
from ..device_gradients import on_one_device
from ..host_gradients import HostGradients
from ..stats import GradStats, whole_number
from ..table import MEASURE, Table, same_items
from . import shards
from .exchange import ROW_SUMS, Exchange, Partial, added_up, combined
from .ranks import Share

_KEPT = 8


class _Kept(threading.local):
    """The last exchanges of this thread, by how their tensors lie."""

    def __init__(self) -> None:
        self.exchanges: OrderedDict[Any, Exchange] = OrderedDict()
        self.last: tuple[list[Any], Exchange] = ([], Exchange([]))
        self.world: Any = None
        self.tables: dict[bytes, Table] = {}

    def forget_other_worlds(self) -> None:
        """Process groups end with their world; a mesh of the next one may look just as one of the last."""
        if self.world is not dist.group.WORLD:
            self.exchanges.clear()
            self.last = ([], Exchange([]))
            self.world = dist.group.WORLD


_kept = _Kept()


def _exchange_of(owners: Sequence[Tensor]) -> Exchange:
    _kept.forget_other_worlds()
    specs = [getattr(owner, "_spec", None) for owner in owners]
    if same_items(specs, _kept.last[0]):  # which are alive, so that identities mean something
        return _kept.last[1]
    key = tuple(specs)
    found = _kept.exchanges.pop(key, None)
    if found is None:
        found = Exchange(owners)
    _kept.exchanges[key] = found
    _kept.last = specs, found
    while len(_kept.exchanges) > _KEPT:
        _kept.exchanges.popitem(last=False)
    return found


def _settled(owner: Tensor, grad: Tensor | None) -> Tensor | None:
    if grad is None or not shards.is_dtensor(grad):
        return grad
    # A gradient that is measured in its own right may be a part of a sum, a parameter is not.
    whole = shards.added_up(grad) if shards.is_partial(owner) else shards.settled(owner, grad)
    return shards.local(whole)  # type: ignore[no-any-return]


class SharedGradients:
    """One read of each gradient's local part, and what the ranks make of it together. Collective.

    Args:
        owners: the parameters, or the tensors themselves: which ranks share them.
        grads: the gradients, or None, in the same order.
    """

    def __init__(self, owners: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
        self._exchange = _exchange_of(owners)
        self._here: list[Tensor | None]
        if not self._exchange.partial and shards.lie_alike(owners, grads):
            kind = shards.dtensor_type()
            self._here = [g._local_tensor if type(g) is kind else g for g in grads]  # type: ignore[union-attr]
        else:
            self._here = [_settled(owner, grad) for owner, grad in zip(owners, grads, strict=True)]
        self.here = [g for g in self._here if g is not None]
        """The gradients' local tensors."""
        self.device = self.here[0].device if self.here else torch.device("cpu")
        self._rows = torch.zeros((len(self._here), len(ROW_SUMS)), dtype=torch.float64)
        self._largest = torch.zeros(len(self._here), dtype=torch.float64)

    def norms(self) -> tuple[Tensor | float, Tensor | float]:
        """L2 norm and largest magnitude over everything: 0-dim float64 tensors of a device, or the host's numbers."""
        partials = self._partials(rows=False)
        if any(isinstance(x, Tensor) for records in partials.values() for x in records):
            total = combined(self._exchange.totals(partials, None, self.device)[0])
            return total[0].sqrt() * torch.exp2(total[1] / 2), total[2]
        records, _ = self._exchange.totals_on_host(partials, 0.0)  # type: ignore[arg-type]
        sumsq, exponent, amax, _, _ = added_up(records)
        return norm_of(sumsq, int(exponent)), amax

    def stats(self) -> GradStats:
        """The same and counts, for each tensor too."""
        total = combined(self._exchange.totals(self._partials(rows=True), None, self.device)[0]).cpu()
        rows, largest, _ = self._exchange.whole_rows(range(len(self._here)), self._rows, self._largest)

        def tensor(value: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
            return (whole_number(value) if dtype == torch.int64 else value).to(self.device, dtype)

        return GradStats(
            total_norm=tensor(total[0].sqrt() * torch.exp2(total[1] / 2)),
            amax=tensor(total[2]),
            nonfinite=tensor(total[3], torch.int64),
            zeros=tensor(total[4], torch.int64),
            norms=tensor(rows[:, 0]),
            amaxes=tensor(largest),
            nonfinites=tensor(rows[:, 1], torch.int64),
            zero_counts=tensor(rows[:, 2], torch.int64),
        )

    def _partials(self, rows: bool) -> dict[Share | None, list[Partial]]:
        """What the gradients here add to the totals; ``rows``: of each gradient too."""
        partials: dict[Share | None, list[Partial]] = {}
        for share, places in self._exchange.places.items():
            if len(places) == len(self.here) == len(self._here):
                partials[share] = [self._measured(places, self.here, rows)]
                continue
            index = [i for i in places if self._here[i] is not None]
            if index:
                grads = [g for i in index if (g := self._here[i]) is not None]
                partials[share] = [self._measured(index, grads, rows)]
        return partials

    def _measured(self, index: list[int], grads: list[Tensor], rows: bool) -> Partial:
        device = on_one_device(grads)
        if device is not None:
            record, stats = device.measure_part(count_zeros=rows)
            if rows:
                sums, largest = stats.row_sums()
                self._rows[index], self._largest[index] = sums.cpu(), largest.cpu()
            return record
        host = HostGradients(list(grads), _kept.tables)
        host.run(MEASURE)
        if rows:
            values = torch.tensor(host.rows(), dtype=torch.float64)
            self._rows[index, 0] = values[:, 0]
            self._rows[index, 1:3] = values[:, 2:]
            self._largest[index] = values[:, 1]
        of_host = host.record()
        host.give_back()
        return of_host
