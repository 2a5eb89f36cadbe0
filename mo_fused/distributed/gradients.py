"""Gradients of which this process has parts: norm and health of the whole, behind the utilities of grad.py."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..device_gradients import on_one_device
from ..host_gradients import HostGradients
from ..stats import GradStats
from ..table import MEASURE
from . import shards
from .exchange import ROW_SUMS, Exchange, Partial, combined, record_of
from .ranks import Share


class SharedGradients:
    """One read of each gradient's local part, and what the ranks make of it together. Collective.

    Args:
        owners: the parameters, or the tensors themselves: which ranks share them.
        grads: the gradients, or None, in the same order.
    """

    def __init__(self, owners: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
        self._owners = list(owners)
        self._exchange = Exchange(owners)
        self._here: list[Tensor | None] = []
        for owner, grad in zip(owners, grads, strict=True):
            if grad is not None and shards.is_dtensor(owner):
                grad = shards.local(shards.added_up(grad) if owner is grad else shards.settled(owner, grad))
            self._here.append(None if grad is None or shards.is_elsewhere(owner) else grad.detach())
        there = [g for g in self._here if g is not None]
        self.device = there[0].device if there else torch.device("cpu")
        self._rows = torch.zeros((len(self._here), len(ROW_SUMS)), dtype=torch.float64)
        self._largest = torch.zeros(len(self._here), dtype=torch.float64)

    def norms(self) -> tuple[Tensor, Tensor]:
        """L2 norm and largest magnitude over everything (float64, 0-dim, on the gradients' device)."""
        total = combined(self._totals(rows=False))
        return total[0].sqrt() * torch.exp2(total[1] / 2), total[2]

    def stats(self) -> GradStats:
        """The same and counts, for each tensor too."""
        total = combined(self._totals(rows=True)).cpu()
        rows, largest = self._exchange.whole_rows(self._owners, self._rows, self._largest)

        def tensor(value: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
            return (value.round() if dtype == torch.int64 else value).to(self.device, dtype)

        return GradStats(
            total_norm=tensor(total[0].sqrt() * torch.exp2(total[1] / 2)),
            amax=tensor(total[2]),
            nonfinite=tensor(total[3], torch.int64),
            zeros=tensor(total[4], torch.int64),
            norms=tensor(rows[:, 0].sqrt()),
            amaxes=tensor(largest),
            nonfinites=tensor(rows[:, 1], torch.int64),
            zero_counts=tensor(rows[:, 2], torch.int64),
        )

    def _totals(self, rows: bool) -> Tensor:
        """Records that add up to everything; ``rows``: of each gradient too."""
        places: dict[Share | None, list[int]] = {}
        for i, grad in enumerate(self._here):
            if grad is not None:
                places.setdefault(self._exchange.share_of(self._owners[i]), []).append(i)
        partials: dict[Share | None, list[Partial]] = {
            share: [self._measured(index, rows)] for share, index in places.items()
        }
        return self._exchange.totals(partials, None, self.device)[0]

    def _measured(self, index: list[int], rows: bool) -> Partial:
        grads = [g for i in index if (g := self._here[i]) is not None]
        device = on_one_device(grads)
        if device is not None:
            record, stats = device.measure_part(count_zeros=rows)
            if rows:
                sums, largest = stats.row_sums()
                self._rows[index], self._largest[index] = sums.cpu(), largest.cpu()
            return record
        host = HostGradients(list(grads))
        host.run(MEASURE)
        values = torch.tensor(host.rows(), dtype=torch.float64)
        if rows:
            self._rows[index, 0] = values[:, 0].square()
            self._rows[index, 1], self._rows[index, 2] = values[:, 2], values[:, 3]
            self._largest[index] = values[:, 1]
        sumsq, exponent = record_of(values[:, 0].numpy(), 1.0)
        return [sumsq, exponent, host.amax, float(values[:, 2].sum()), float(values[:, 3].sum())]
