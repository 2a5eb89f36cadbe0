"""Gradients measured and scaled by the host: the native rows through the kernels, whatever else through torch."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from . import dispatch, reference
from .backends import cpu
from .backends.eager import ScaledSum, clip_coefficient, larger
from .stats import StatsBuffer
from .table import FINISH, ROW, SCALE, Table, gradient_table
from .tracing import phase

KEPT = 8
"""Tables that are kept for gradients that look alike."""


class HostGradients:
    """One read of many gradients by the host: the native rows through the kernels, whatever else through torch.

    ``kept``: see :func:`mo_fused.table.gradient_table`; :meth:`give_back` puts the table there again.
    """

    def __init__(self, grads: list[Tensor | None], kept: dict[bytes, Table] | None = None) -> None:
        self._kept = kept
        there = [g for g in grads if g is not None]
        self._index = [i for i, g in enumerate(grads) if g is not None]
        if dispatch.native() is None:
            self.table, self.others = Table(np.zeros(0, dtype=ROW), {}, 1), list(range(len(there)))
        else:
            self.table, self.others = gradient_table(there, kept)
        self.grads = there
        self._served = sorted(set(range(len(there))) - set(self.others)) if self.others else range(len(there))
        # Which rows have a Layout: only those can be expanded tensors.
        strided = self.table.rows["layout"] != 0
        self._strided = [there[i] for i, s in zip(self._served, strided.tolist(), strict=True) if s]
        self.buffer = StatsBuffer(len(self.table.rows))
        self.table.set_outputs(self.buffer.result_address, self.buffer.rows_address)
        self.values: list[tuple[float, float, int, int]] = [(0.0, 0.0, 0, 0)] * len(grads)
        self.total = 0.0
        self.amax = 0.0

    @property
    def writable(self) -> bool:
        """No memory is listed twice or shared by the elements of one gradient, so all can be written side by side."""
        address = self.table.rows["grad"]
        return len(set(address.tolist())) == len(address) and not any(
            s == 0 and n > 1 for g in self._strided for s, n in zip(g.stride(), g.shape, strict=True)
        )

    def run(self, phases: int, max_norm: float = math.nan) -> None:
        control = self.table.control
        total = ScaledSum()
        amax = 0.0
        for i in self.others:
            sumsq, exponent, row_max, bad, zero = reference.grad_sums(self.grads[i])
            one = ScaledSum()
            one.add(sumsq, exponent)
            total.add(sumsq, exponent)
            amax = larger(amax, row_max)
            self.values[self._index[i]] = (one.norm(), row_max, bad, zero)
        control["extra_sumsq"], control["extra_exponent"], control["extra_amax"] = total.sumsq, total.exponent, amax
        control["max_grad_norm"], control["phases"] = max_norm, phases
        if dispatch.native() is not None:
            with phase("norm"):
                cpu.run(self.table)
            self.total, self.amax = self.buffer["grad_norm"], self.buffer["grad_amax"]
        else:
            self.total, self.amax = total.norm(), amax

    def record(self) -> list[float]:
        """What all of them add to the totals of more: see DevicePart.partial."""
        norm, counts = self.total, self.buffer.rows[:, 2:4].sum(axis=0)
        fraction, exponent = math.frexp(norm) if math.isfinite(norm) else (norm, 0)
        for i in self.others:
            counts += self.values[self._index[i]][2:]
        return [fraction * fraction, 2.0 * exponent, self.amax, *counts.tolist()]

    def give_back(self) -> None:
        """Another one may use this table."""
        if self._kept is not None and self.table.key:
            self._kept[self.table.key] = self.table
            while len(self._kept) > KEPT:
                del self._kept[next(iter(self._kept))]

    def rows(self) -> list[tuple[float, float, int, int]]:
        for i, row in zip(self._served, self.buffer.rows[:, :4].tolist(), strict=True):
            self.values[self._index[i]] = (row[0], row[1], int(row[2]), int(row[3]))
        return self.values

    def scale(self, norm: float, max_norm: float) -> None:
        """Multiplies every gradient by clip_coefficient(norm, max_norm), unless that is 1."""
        coef = clip_coefficient(norm, max_norm)
        if coef == 1.0:
            return
        if not self.writable:  # one after the other, and torch's error for an expanded gradient
            for g in self.grads:
                g.mul_(coef)
            return
        for i in self.others:
            self.grads[i].mul_(coef)
        if len(self.others) == len(self.grads):
            return
        self.buffer["grad_norm"], self.buffer["measured"] = norm, 1.0
        self.table.control["max_grad_norm"], self.table.control["phases"] = max_norm, FINISH | SCALE
        with phase("scale"):
            cpu.run(self.table)
        torch.autograd.graph.increment_version([self.grads[i] for i in self._served])
