"""Adafactor's sums where a parameter is a part of a larger one: over rows, columns and all of it, wherever the rest is.

The whole is cut along any dimensions into slices that follow one another, which may be empty. ``row_var`` is kept by
all ranks that have a slice of these rows, ``col_var`` by all that have one of these columns. Means are those of the
whole, so that a step is that of the whole within rounding.

A step exchanges twice: what the first pass has found, and the squares of the update before it is limited. The mean of
row means, which needs both, is taken in the first: it is linear in the squares.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import dispatch
from ..factored import Tiling
from ..table import ACTIVE, ROW

Reduce = Callable[[Tensor], None]
"""Sums a 1-D float64 tensor in place over ranks. What has an equal one is summed together."""


@dataclass(frozen=True)
class Among:
    """Processes that have parts of something between them."""

    reduce: Reduce
    replicas: int = 1
    """How many of them have the same part."""

    def sum(self, x: Tensor) -> Tensor:
        """The sum of everybody's ``x``, in float64."""
        flat = x.detach().to(torch.float64, copy=True).reshape(-1)
        self.reduce(flat)
        return (flat / self.replicas).reshape(x.shape)


def _sum(over: Among | None, x: Tensor) -> Tensor:
    return x if over is None else over.sum(x)


@dataclass(frozen=True)
class Whole:
    """What a part belongs to."""

    shape: tuple[int, ...]
    along: Mapping[int, Among]
    """For each dimension that is cut (from 0): those with the other slices along it, and the same ones along others."""
    all: Among
    """Those with any part; where only one dimension is cut, the same as for it."""
    matrices: Among | None = None
    """Those with any part of the same matrices, where that is not all of them."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def of_rows(self) -> Among | None:
        """Those with the other parts of a matrix row; None where rows are complete."""
        return self.along.get(len(self.shape) - 1) if len(self.shape) > 1 else None

    @property
    def of_columns(self) -> Among | None:
        """Those with the other parts of a matrix column."""
        return self.along.get(len(self.shape) - 2) if len(self.shape) > 1 else None

    @property
    def of_matrices(self) -> Among | None:
        """Those with the other rows of a matrix, and all parts of them."""
        if self.of_rows is None or self.of_columns is None:
            return self.of_columns
        return self.all if self.matrices is None else self.matrices

    def means(self, square: Tensor, row_var: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor] | None]:
        """Means over the whole: of squares along rows and along columns.

        And where the rows of matrices are elsewhere too, over all of them: (of the present ``row_var``, of squares).
        """
        n, m = self.shape[-2:]
        of_rows = _sum(self.of_rows, square.sum(-1, keepdim=True)) / m
        of_columns = _sum(self.of_columns, square.sum(-2, keepdim=True)) / n
        if self.of_columns is None:
            return of_rows, of_columns, None
        old = _sum(self.of_columns, row_var.double().sum(-2, keepdim=True)) / n
        new = _sum(self.of_matrices, square.sum((-2, -1), keepdim=True)) / (n * m)
        return of_rows, of_columns, (old, new)

    def root_mean_square(self, x: Tensor) -> float:
        total = self.all.sum(x.detach().double().square().sum())
        return math.sqrt(total / self.numel) if self.numel else 0.0

    def take_part(self, param: Tensor) -> None:
        """In the sums of a step in which this part has no gradient: with zeros, in the same order."""
        nothing = torch.zeros_like(param, dtype=torch.float64)
        if param.dim() > 1:
            self.means(nothing, nothing.sum(-1, keepdim=True))
        self.root_mean_square(nothing)
        self.root_mean_square(nothing)


@dataclass(frozen=True)
class _Result:
    """Where the sum of something over ranks goes."""

    ranks: Among
    target: Tensor
    length: int = 1
    """What it is divided by for a mean."""
    root: bool = False


class _Exchange:
    """Sums over ranks of some numbers of each row, all that go over the same ranks at once."""

    def __init__(self, results: Sequence[_Result]) -> None:
        self._by_ranks: dict[Reduce, list[int]] = {}
        self._results = results
        for i, result in enumerate(results):
            self._by_ranks.setdefault(result.ranks.reduce, []).append(i)

    def __call__(self, found: Sequence[Tensor]) -> None:
        """``found``: what this process has of each result."""
        for reduce, which in self._by_ranks.items():
            flat = torch.cat([found[i].reshape(-1) for i in which])
            reduce(flat)
            pieces = list(torch.split(flat, [found[i].numel() for i in which]))
            mine = [self._results[i] for i in which]
            torch._foreach_div_(pieces, [float(r.ranks.replicas * max(1, r.length)) for r in mine])
            roots = [piece for piece, r in zip(pieces, mine, strict=True) if r.root]
            if roots:
                torch._foreach_sqrt_(roots)
            torch._foreach_copy_([r.target.reshape(-1) for r in mine], pieces)


def _added(x: Tensor, dim: int) -> Tensor:
    """Sums along a dimension, in an order that does not depend on the number of threads (torch's does on the host)."""
    return torch.from_numpy(np.asarray(x.numpy().sum(axis=dim))) if dispatch.is_cpu(x) else x.sum(dim)


@dataclass
class _Kind:
    """Parts of one shape of wholes of one shape: they are worked on together."""

    whole: Whole
    empty: bool
    members: list[int] = field(default_factory=list)
    """Rows of the table."""
    states: list[Mapping[str, Any]] = field(default_factory=list)
    row_norms: list[Tensor] = field(default_factory=list)
    """Views of the scratch, of one a tile: ``(grid_cols, batch, rows)``."""
    col_norms: list[Tensor] = field(default_factory=list)
    update_sums: list[Tensor] = field(default_factory=list)
    """Of every tile, as ``param_sums``."""
    param_sums: list[Tensor] = field(default_factory=list)

    def first(self) -> Iterator[Tensor]:
        """What the first pass has found of each part, in the order of a part's results."""
        if self.whole.of_rows is not None:
            yield _squares(self.row_norms)
        if self.whole.of_columns is not None:
            squares = _squares(self.col_norms)
            yield squares
            old = torch.stack([s["row_var"].detach() for s in self.states]).double()
            yield _added(old.reshape(*squares.shape[:2], old.shape[-2]), -1)
            yield _added(squares, -1)
        yield _added(torch.stack(self.param_sums), 1)

    def second(self) -> Iterator[Tensor]:
        """What the second pass has found."""
        yield _added(torch.stack(self.update_sums), 1)


def _squares(norms: list[Tensor]) -> Tensor:
    """Sums of squares of the rows or columns of parts, ``(parts, batch, n)``."""
    return _added(torch.stack(norms).double().square(), 1)


class CutMatrices:
    """The rows of one table that are parts of larger parameters. Nothing here waits for a device.

    All ranks call both exchanges in every step that is not skipped, with parts of the same wholes in the same order. A
    row without a gradient adds zeros.

    Args:
        tiling: of all rows; it says which are parts.
        states: of all rows.
        rows: their records as int32, shape ``(n, 64)``.
        scratch: bytes, where the tiling was placed.
        sums: of every tile: of squares of the update, and of the parameter; shape ``(2, tiles)``.
    """

    def __init__(
        self, tiling: Tiling, states: Sequence[Mapping[str, Any]], rows: Tensor, scratch: Tensor, sums: Tensor
    ) -> None:
        assert ROW.fields is not None
        self._flags = rows[:, ROW.fields["flags"][1] // 4]
        self._scratch = scratch
        self._others: list[Tensor] = []
        """Norms from all tiles of a row or column but the first: whose place the whole's takes."""
        kinds: dict[Any, _Kind] = {}
        first: dict[int, list[_Result]] = {}
        second: dict[int, list[_Result]] = {}
        chunk = tiling.counts.cumsum() - tiling.counts
        for i, whole in enumerate(tiling.wholes):
            if whole is None:
                continue
            f, size = tiling.factored[i], int(tiling.item_sizes[i])
            shape = int(f["batch"]), int(f["rows"]), int(f["cols"])
            key = (
                shape,
                size,
                whole.shape,
                tuple(sorted(whole.along.items(), key=lambda item: item[0])),
                whole.all,
                whole.matrices,
            )
            kind = kinds.setdefault(key, _Kind(whole, empty=0 in shape))
            kind.members.append(i)
            kind.states.append(states[i])
            chunks = slice(int(chunk[i]), int(chunk[i] + tiling.counts[i]))
            kind.update_sums.append(sums[0, chunks])
            kind.param_sums.append(sums[1, chunks])
            at = int(tiling.whole_at[i])
            of_whole = scratch[at : at + 16].view(torch.float64)
            first[i] = [*self._of_matrices(kind, tiling, i), _Result(whole.all, of_whole[1:])]
            second[i] = [_Result(whole.all, of_whole[:1])]
        self._kinds = list(kinds.values())
        self._members = [torch.tensor(kind.members, device=scratch.device) for kind in self._kinds]
        self._order = list(first)
        self._first = _Exchange([r for results in first.values() for r in results])
        self._second = _Exchange([r for results in second.values() for r in results])

    def _of_matrices(self, kind: _Kind, tiling: Tiling, i: int) -> Iterator[_Result]:
        f, whole = tiling.factored[i], kind.whole
        if not f["factored"]:
            return
        batch, rows, cols = int(f["batch"]), int(f["rows"]), int(f["cols"])
        norms = self._scratch[int(tiling.norms_at[i]) :].view(
            torch.float64 if tiling.item_sizes[i] == 8 else torch.float32
        )
        begin, grid_rows, grid_cols = int(f["col_norms"]), int(f["grid_rows"]), int(f["grid_cols"])
        kind.row_norms.append(norms[: grid_cols * batch * rows].view(grid_cols, batch, rows))
        kind.col_norms.append(norms[begin : begin + grid_rows * batch * cols].view(grid_rows, batch, cols))
        for over, of in ((whole.of_rows, kind.row_norms[-1]), (whole.of_columns, kind.col_norms[-1])):
            if over is not None:
                yield _Result(over, of[0], root=True)
                self._others += [of[1:]] if of[1:].numel() else []
        if whole.of_columns is not None and whole.of_matrices is not None:
            at = int(tiling.means_at[i])
            means = self._scratch[at : at + 16 * batch].view(torch.float64)
            n, m = whole.shape[-2:]
            yield _Result(whole.of_columns, means[:batch], n)
            yield _Result(whole.of_matrices, means[batch:], n * m)

    @torch.no_grad()
    def exchange_sums(self) -> None:
        """After the first pass: norms of rows and columns of the whole in the place of the part's, and its means."""
        self._first(self._found(_Kind.first))
        if self._others:
            torch._foreach_zero_(self._others)

    @torch.no_grad()
    def exchange_updates(self) -> None:
        """After the second pass: the squares of the whole's update."""
        self._second(self._found(_Kind.second))

    def _found(self, of: Callable[[_Kind], Iterator[Tensor]]) -> list[Tensor]:
        found: dict[int, list[Tensor]] = {i: [] for i in self._order}
        for kind, members in zip(self._kinds, self._members, strict=True):
            active = (self._flags[members] & (0 if kind.empty else ACTIVE)) != 0
            for x in of(kind):
                here = active.reshape(-1, *[1] * (x.dim() - 1))
                # What an earlier step, or nobody, has left need not be a number.
                for i, one in zip(kind.members, torch.where(here, x, 0.0).unbind(0), strict=True):
                    found[i].append(one)
        return [one for ones in found.values() for one in ones]
