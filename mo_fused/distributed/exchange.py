"""What the ranks tell each other in a step: totals over gradients before the decision, norms of updates after it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..backends.eager import ScaledSum, larger
from . import ranks, shards
from .factored import Among, Whole
from .ranks import Ranks, Share

RECORD = 5
"""Numbers of a total: sum of squares, its power of two, largest magnitude, non-finite and zero elements."""
ROW_SUMS = ("grad_norm", "nonfinite", "zeros", "update_norm", "stored_update_norm", "param_norm")
"""Fields of a row that are added up over the parts of a parameter."""
SQUARES = (0, 3, 4, 5)
"""Those of them that are norms, whose squares are added up."""

Partial = Tensor | Sequence[float]


class Exchange:
    """The shares that parameters belong to, and the ranks of each. Parameters are told apart by their positions.

    Args:
        params: all parameters, also those without a gradient: the same on every rank of a mesh, in the same order.
        partition: process group whose ranks have parameters of their own each (ZeRO-1, pipelines), or None.
    """

    def __init__(self, params: Sequence[Tensor], partition: Any = None) -> None:
        self._ranks: dict[tuple[int, ...], Ranks] = {}
        self._kept_weights: dict[tuple[tuple[int, ...], torch.device], Tensor] = {}
        self._lines: dict[tuple[Any, tuple[int, ...]], Among] = {}
        self._partition = None if partition is None else ranks.of_group(partition)
        meshes: dict[Any, Ranks] = {}
        self._counts: dict[tuple[int, ...], int] = {}
        self._place: list[int] = []
        self.shares: list[Share | None] = []
        """Of each parameter; None: a plain one."""
        for p in params:
            share, place = None, -1
            if shards.is_dtensor(p) and not shards.is_elsewhere(p):
                mesh = p.device_mesh  # type: ignore[attr-defined]
                if mesh not in meshes:
                    found = ranks.of_mesh(mesh)
                    meshes[mesh] = self._ranks.setdefault(found.members, found)
                members = meshes[mesh].members
                share = Share(members, shards.cut_of(p).replicas)
                place = self._counts.get(members, 0)
                self._counts[members] = place + 1
            self.shares.append(share)
            self._place.append(place)
        self.partial = any(shards.is_partial(p) for p in params)
        """Some of them are sums that nobody has added up (as gradients may be)."""
        self.places: dict[Share | None, list[int]] = {}
        """The parameters of each share; not those of meshes that this process is not in."""
        for i, p in enumerate(params):
            if not shards.is_elsewhere(p):
                self.places.setdefault(self.shares[i], []).append(i)
        known = dict.fromkeys(s for s in self.shares if s is not None)
        # Smaller sets first, all processes in one order: nobody waits for somebody who waits, and what the last knows
        # of the others' gradients, the larger sets learn too.
        self._order = sorted(
            (r for r in self._ranks.values() if r.members in self._counts), key=lambda r: (r.size, r.members)
        )
        self._of_ranks = {
            r.members: sorted((s for s in known if s.members == r.members), key=lambda s: s.replicas)
            for r in self._order
        }

    def __bool__(self) -> bool:
        return bool(self._order) or self._partition is not None

    def whole_of(self, p: Tensor) -> Whole | None:
        """What Adafactor has to know of a DTensor that is cut; None for one that is here as a whole."""
        if not (cut := shards.cut_of(p).dims) or shards.is_elsewhere(p):
            return None
        mesh, along = p.device_mesh, {}  # type: ignore[attr-defined]
        dims = [(d, x.dim % p.dim()) for d, x in enumerate(p.placements) if hasattr(x, "dim")]  # type: ignore[attr-defined]
        for dim in cut:
            along[dim] = self._among(mesh, tuple(d for d, of in dims if of == dim))
        of_matrices = tuple(d for d, of in dims if of >= p.dim() - 2)
        every = self._among(mesh, tuple(d for d, _ in dims))
        return Whole(tuple(p.shape), along, every, self._among(mesh, of_matrices) if of_matrices else None)

    def _among(self, mesh: Any, dims: tuple[int, ...]) -> Among:
        if (mesh, dims) not in self._lines:
            self._lines[mesh, dims] = Among(ranks.of_dims(mesh, dims).add_)
        return self._lines[mesh, dims]

    # -- before the decision ------------------------------------------------------------------------------------------

    def totals(
        self, partials: Mapping[Share | None, Sequence[Partial]], found_inf: Tensor | float | None, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Collective: (records that add up to everything, shape ``(n, 5)``; whether anybody has found_inf).

        ``partials``: records of this process by the share of their parameters; of None (plain, replicated parameters)
        they are taken as they are. Results are float64 on ``device``, and nothing waits for it.
        """
        given = _flag(found_inf, device)
        plain = _stacked(partials.get(None, ()), device)
        elsewhere = plain[:, 3].sum()  # non-finite elements that not all ranks may have
        out = [plain]
        for r in self._order:
            mine = [combined(_stacked(partials.get(s, ()), device)) for s in self._of_ranks[r.members]]
            own = torch.cat([*mine, torch.stack([given, elsewhere])])
            every = r.gathered(own)
            given = every[:, -2].amax()
            elsewhere = every[:, -1].amax()
            records = every[:, :-2].reshape(r.size, -1, RECORD)
            out.append((records * self._weights(r, device)).reshape(-1, RECORD))
            elsewhere = elsewhere + records[..., 3].sum()
        if self._partition is not None:  # whose other ranks have other parameters
            every = self._partition.gathered(torch.cat([combined(torch.cat(out)), torch.stack([given, elsewhere])]))
            given, elsewhere, out = every[:, -2].amax(), every[:, -1].amax(), [every[:, :-2]]
        others = torch.zeros((1, RECORD), dtype=torch.float64, device=device)
        # A plain gradient that should be the same everywhere is not: nobody steps on what one of them has seen.
        counted = torch.cat(out)[:, 3].sum()
        others[0, 3] = torch.where(counted == 0, elsewhere, 0.0)
        return torch.cat([*out, others]), given

    def totals_on_host(
        self, partials: Mapping[Share | None, Sequence[Sequence[float]]], found_inf: float
    ) -> tuple[list[list[float]], float]:
        """:meth:`totals` in Python's numbers, where all records are the host's: a tenth of its time."""
        out = [list(x) for x in partials.get(None, ())]
        given, elsewhere = float(found_inf != 0.0), sum(x[3] for x in out)
        for r in self._order:
            shares = self._of_ranks[r.members]
            own = [x for s in shares for x in added_up(partials.get(s, ()))]
            every = r.gathered(torch.tensor([*own, given, elsewhere], dtype=torch.float64)).tolist()
            given, elsewhere = max(x[-2] for x in every), max(x[-1] for x in every)
            for said in every:
                for k, s in enumerate(shares):
                    sumsq, exponent, amax, bad, zero = said[RECORD * k : RECORD * (k + 1)]
                    w = 1.0 / s.replicas
                    out.append([sumsq * w, exponent, amax, bad * w, zero * w])
                    elsewhere += bad
        if self._partition is not None:
            of_all = torch.tensor([*added_up(out), given, elsewhere], dtype=torch.float64)
            every = self._partition.gathered(of_all).tolist()
            given, elsewhere, out = max(x[-2] for x in every), max(x[-1] for x in every), [x[:-2] for x in every]
        if not any(x[3] for x in out):
            out.append([0.0, 0.0, 0.0, elsewhere, 0.0])
        return out, given

    def _weights(self, r: Ranks, device: torch.device) -> Tensor:
        """Replicas are counted once, as their mean."""
        found = self._kept_weights.get((r.members, device))
        if found is None:
            parts = [1.0 / s.replicas for s in self._of_ranks[r.members]]
            found = torch.tensor([[w, 1.0, 1.0, w, w] for w in parts], dtype=torch.float64, device=device)
            self._kept_weights[r.members, device] = found
        return found

    # -- after the update ---------------------------------------------------------------------------------------------

    def whole_rows(self, positions: Sequence[int], rows: Tensor, largest: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Collective: what rows of the parameters at ``positions`` are over all parts of them: (rows, largest).

        Also, as the third, squares of the three norms of an update over all shared parameters, those without a row here
        too: the same bits on every rank. ``rows``: ``(n, 6)`` as ROW_SUMS; ``largest``: ``(n,)``, magnitudes. Rows of
        plain parameters come back as they are. Parameters of a mesh that have no row here (no gradient) add zeros.
        """
        rows, largest = rows.clone(), largest.clone()
        updates = torch.zeros(3, dtype=torch.float64, device=rows.device)
        for r in self._order:
            n = self._counts.get(r.members, 0)
            if not n:
                continue
            of_ranks = [(at, s.replicas) for at, s in enumerate(self.shares) if s and s.members == r.members]
            replicas = torch.tensor([k for _, k in of_ranks], dtype=torch.float64, device=rows.device).reshape(-1, 1)
            there = {at for at, _ in of_ranks}
            mine = [(i, self._place[at]) for i, at in enumerate(positions) if at in there]
            index, place = torch.tensor(mine, dtype=torch.int64, device=rows.device).reshape(-1, 2).unbind(1)
            nan = largest[index].isnan()
            tops = torch.zeros(n, dtype=torch.float64, device=rows.device)
            tops[place] = torch.where(nan, math.inf, largest[index])
            tops = r.largest(tops)
            # Squares of gradients of 1e200 (float64) are none: a power of two that all ranks know is taken out.
            power = torch.frexp(torch.where(tops.isfinite(), tops, 0.0))[1].double()
            table = torch.zeros((n, len(ROW_SUMS) + 1), dtype=torch.float64, device=rows.device)
            table[place, :-1] = rows[index]
            table[:, 0] = shifted(table[:, 0], -power)
            table[:, SQUARES] = table[:, SQUARES].square()
            table[place, -1] = nan.double()
            table = r.add(table)
            table[:, :-1] /= replicas
            updates += table[:, SQUARES[1:]].sum(0)
            table[:, SQUARES] = table[:, SQUARES].sqrt()
            table[:, 0] = shifted(table[:, 0], power)
            rows[index] = table[place, :-1]
            largest[index] = torch.where(table[place, -1] > 0, math.nan, tops[place])
        return rows, largest, updates

    @property
    def partitioned(self) -> bool:
        """Other ranks have other parameters."""
        return self._partition is not None

    def partition_sums(self, values: Tensor) -> Tensor:
        """Collective: sums over the ranks that have parameters of their own each."""
        assert self._partition is not None
        return self._partition.add(values)


def shifted(x: Tensor, power: Tensor) -> Tensor:
    """x * 2**power, in two steps: one of them may be out of range."""
    half = (power / 2).trunc()
    return x * torch.exp2(half) * torch.exp2(power - half)


def _flag(found_inf: Tensor | float | None, device: torch.device) -> Tensor:
    if isinstance(found_inf, Tensor):
        return (found_inf.detach().reshape(()) != 0).to(device, torch.float64)
    return torch.full((), float(bool(found_inf)), dtype=torch.float64, device=device)


def _stacked(partials: Sequence[Partial], device: torch.device) -> Tensor:
    """Records as one tensor, shape ``(n, 5)``."""
    items = [
        x.to(device, torch.float64) if isinstance(x, Tensor) else torch.tensor(x, dtype=torch.float64, device=device)
        for x in partials
    ]
    return torch.stack(items) if items else torch.zeros((0, RECORD), dtype=torch.float64, device=device)


def added_up(records: Sequence[Sequence[float]]) -> list[float]:
    """Several records as one."""
    total, amax, nonfinite, zeros = ScaledSum(), 0.0, 0.0, 0.0
    for sumsq, exponent, largest, bad, zero in records:
        total.add(sumsq, int(exponent))
        amax, nonfinite, zeros = larger(amax, largest), nonfinite + bad, zeros + zero
    return [total.sumsq, float(total.exponent), amax, nonfinite, zeros]


def combined(records: Tensor) -> Tensor:
    """Several records as one, shape ``(5,)``; nothing waits."""
    if len(records) == 1:
        return records[0]
    if not len(records):
        return records.new_zeros(RECORD)
    none = float(-(1 << 20))
    exponents = torch.where(records[:, 0] != 0, records[:, 1], none)
    top = exponents.amax()
    top = torch.where(top == none, 0.0, top)
    shift = torch.clamp(records[:, 1] - top, -2000.0, 0.0)
    half = (shift / 2).trunc()
    sums = records[:, 0] * torch.exp2(half) * torch.exp2(shift - half)
    amax = records[:, 2].amax()  # a NaN stays
    return torch.stack([sums.sum(), top, amax, records[:, 3].sum(), records[:, 4].sum()])


def record_of(norms: np.ndarray[Any, Any], scale: float) -> tuple[float, float]:
    """(sum of squares, its power of two) of some norms, each times ``scale``."""
    with np.errstate(all="ignore"):
        if not len(norms):
            return 0.0, 0.0
        top = float(norms.max())
        if not math.isfinite(top) or top == 0.0:
            return float(np.square(norms).sum()), 0.0
        exponent = math.frexp(top * scale)[1] if math.isfinite(top * scale) else math.frexp(top)[1]
        return float(np.square(np.ldexp(norms * scale, -exponent)).sum()), 2.0 * exponent
