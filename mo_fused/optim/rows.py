"""From parameter groups to the rows of a table: which tensors a step works on, by which backend, and since when.

`RowSet.refresh` runs every step. While nothing but addresses changes it compares arrays; when the set of parameters,
their layouts, dtypes, state or groups changes, the rows are planned again (only those that changed).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from .. import dispatch, errors, masters, quantised
from ..device_part import DevicePart
from ..device_table import chunk_elements
from ..distributed import shards
from ..distributed.exchange import Exchange
from ..distributed.factored import CutMatrices
from ..factored import HOST, Tiling, device_limits
from ..layout import Plan
from ..offload.step import OffloadedRows
from ..stats import RING, StatsBuffer
from ..table import (
    ACTIVE,
    FRESH,
    GRAD_SHARED,
    MISSING_GRADIENT,
    OPERANDS,
    RECORD,
    ROW,
    ROWS_CHANGED,
    SCALES_SHARED,
    STEP_F64,
    STRIDED_GRADIENT,
    Table,
    refresh_rows,
    same_items,
    scan,
)
from .formats import MASTER_SLOTS, Formats, take_out
from .fresh import FreshSlot
from .hyper import HyperWriter, same_values
from .known_params import KnownParams
from .overlaps import sharing
from .planning import Row, RowPlanner

if TYPE_CHECKING:
    from ..distributed.ranks import Share
    from .base import FusedOptimizer


class RowSet:
    """The rows of one optimizer, cached between steps."""

    def __init__(self, optimizer: FusedOptimizer) -> None:
        self.rule = optimizer._rule
        self._clip_in_place = bool(optimizer.defaults.get("clip_in_place"))
        self._formats = Formats(optimizer.defaults)
        self._offload = optimizer._offload
        self.planner = RowPlanner(optimizer)
        self._params: list[Tensor] = []
        self._sizes: list[int] = []
        self._structure: list[Any] = []
        self._state: Any = None
        self._states: list[Any] = []
        self._cache: dict[int, Row] = {}
        self._partition: Any = optimizer.__dict__.get("_partition")
        self._dtensors: list[Tensor] = []
        self._specs: list[Any] = []
        self.settled: dict[int, Tensor] = {}
        """By id of a DTensor, the gradient of this step that was made to lie as it does."""
        self._distributed: list[int] = []  # rows of the kernels whose parameters are DTensors
        self.exchange = Exchange([], self._partition)
        self.cut: CutMatrices | None = None
        """Those of the host's rows that are parts of larger parameters, but for the eager backend's."""
        self._on_device: dict[tuple[torch.device, str, Share | None], list[Row]] = {}
        self.devices: list[DevicePart] = []
        self._fresh: dict[int, FreshSlot] = {}
        self._captured: list[DevicePart] = []
        self._unseen: list[Tensor] = []
        self._values: list[Any] = []
        self._hyper = HyperWriter(self.rule)
        self._hyper_written = False
        self._all_active = True
        self.native: list[Row] = []  # those of kernels and of the eager backend: first the host's, then each device's
        self.host: list[Row] = []
        self.other: list[Row] = []
        self.all: list[Row] = []
        self.offloaded: OffloadedRows | None = None
        self._build([])

    # -- every step ---------------------------------------------------------------------------------------------------

    def refresh(self, optimizer: FusedOptimizer) -> list[Tensor | None]:
        """Brings the table up to date; returns the gradients of the native rows, which keep their memory alive."""
        groups = optimizer.param_groups
        params = list(chain.from_iterable([g["params"] for g in groups]))
        if self._offload is not None:
            self._offload.check()
            self._offload.take_the_rest(params)
        values = [self.rule.values(g) for g in groups]
        changed = not same_values(values, self._values)
        structure = [self.rule.structure(g) for g in groups] if changed else self._structure
        same = same_items(params, self._params)
        if not same:
            self._dtensors = [p for p in params if shards.is_dtensor(p)]
        if self._dtensors:
            self._settle_gradients()
        known = (
            same
            and [len(g["params"]) for g in groups] == self._sizes
            and structure == self._structure
            and optimizer.state is self._state
            and same_items(list(optimizer.state.values()), self._states)
            and same_items([p._spec for p in self._dtensors], self._specs)  # type: ignore[attr-defined]
            # A parameter with a first gradient gets its row, and its state, now.
            and all(self._grad(p) is None for p in self._unseen)
        )
        grads = self._update_addresses() if known else None
        if grads is None:
            self._plan(optimizer, params, structure)
            grads = self._update_addresses()
            if grads is None:
                raise errors.changed_meanwhile()
        if changed or not self._hyper_written:
            self._write_hyper(groups, range(len(groups)))
            self._values = values
        elif stale := self._hyper.stale():
            self._write_hyper(groups, stale)
        return grads

    def _grad(self, p: Tensor) -> Tensor | None:
        """The parameter's gradient, which may be on the host while the parameter is not."""
        return p.grad if self._offload is None else self._offload.gradient(p)

    def _settle_gradients(self) -> None:
        """Gradients of DTensors that do not lie as their parameters do, as they should: once a step, on every rank.

        Whether rows are planned again is each rank's own business, so nothing that communicates depends on it.
        """
        self.settled = {}
        for p in shards.unsettled(self._dtensors):
            grad = p.grad
            if grad is None or not shards.is_dtensor(grad):  # refused when it is validated
                continue
            self.settled[id(p)] = grad = shards.settled(p, grad)
            if self._clip_in_place:  # which writes to it
                p.grad = grad

    def plan_again(self) -> None:
        """The next step looks at every parameter anew."""
        self._sizes = []

    def _update_addresses(self) -> list[Tensor | None] | None:
        """Looks at all operands of the native rows; their gradients, or None when more than addresses changed."""
        given = {}
        if self.settled:
            given = {i: self.settled[id(p)] for i in self._distributed if id(p := self.row_params[i]) in self.settled}
        grads, noticed = refresh_rows(
            self.rows,
            self.row_params,
            self._row_states,
            self._keys,
            self.rule.has_step,
            self._seen,
            self._flags,
            self._places,
            given,
        )
        if noticed & ROWS_CHANGED:
            return None
        if self._distributed:
            mine = [grads[i] for i in self._distributed]
            if any(g is not None and not shards.is_dtensor(g) for g in mine):
                return None
            for i, grad in zip(self._distributed, mine, strict=True):
                if grad is not None:
                    grads[i] = grad._local_tensor  # type: ignore[attr-defined]
        if self.offloaded is not None:
            if not self._add_taken(grads) or self.offloaded.has_moved():
                return None
            if all(g is not None for g in grads):
                noticed &= ~MISSING_GRADIENT
        if noticed & STRIDED_GRADIENT and any(g is not None and g.is_neg() for g in grads):
            return None
        self._all_active = not noticed & MISSING_GRADIENT
        if self._clip_in_place:
            self._mark_shared_gradients()
        if self.rule.factored:
            self.known_params.mark()
        return grads

    def _add_taken(self, grads: list[Tensor | None]) -> bool:
        """Adds gradients that were taken from their parameters; False when one has another layout than planned."""
        assert self._offload is not None and self.offloaded is not None
        if not self._offload.takes_gradients:
            return True
        for i in self.offloaded.indices.tolist():
            if grads[i] is None:
                grads[i] = self._offload.gradient(self.row_params[i])
        index = [i for i in self.offloaded.indices.tolist() if grads[i] is not None]
        found = np.zeros(len(index), dtype=RECORD)
        scan([grads[i] for i in index], found)
        if (found["layout"] != self._seen[1, index]).any():
            return False
        self.rows["grad"][index] = found["address"]
        self.rows["flags"][index] |= ACTIVE
        return True

    def params_are_known(self, measured: bool, skipped: bool) -> None:
        """After a step of Adafactor: the sums of the parameters that took part are those of what they hold now.

        Not of the host's where the step was skipped before it had measured anything.
        """
        active = self.rows["flags"] & ACTIVE != 0
        active[: len(self.host)] &= measured or not skipped
        if self.offloaded is not None:
            active[self.offloaded.elsewhere] &= not skipped
        self.known_params.learn(active)

    def _mark_shared_gradients(self) -> None:
        """Parameters may be given one and the same gradient tensor; it is scaled once."""
        flags = self.rows["flags"]
        offloaded = np.array([r.home is not None for r in self.native], dtype=bool)
        order = np.argsort(offloaded, kind="stable")  # of rows that share, one that is not offloaded does it
        grads = self.rows["grad"][order]
        _, first, at, count = np.unique(grads, return_index=True, return_inverse=True, return_counts=True)
        shared = np.zeros(len(order), dtype=bool)
        shared[order] = count[at] > 1
        shared &= flags & ACTIVE != 0
        first = order[first]
        flags |= np.where(shared, GRAD_SHARED, 0).astype(flags.dtype)
        flags[first] |= np.where(shared[first], SCALES_SHARED, 0).astype(flags.dtype)

    def _write_hyper(self, groups: list[dict[str, Any]], which: Sequence[int]) -> None:
        devices = self.devices if self.offloaded is None else [*self.devices, *self.offloaded.on_devices]
        self._hyper.write(groups, which, self.table if self.host or self.other else None, devices)
        self._hyper_written = True

    # -- when something changed ---------------------------------------------------------------------------------------

    def _plan(self, optimizer: FusedOptimizer, params: list[Tensor], structure: list[Any]) -> None:
        groups = optimizer.param_groups
        self._state = optimizer.state
        if self._offload is not None:
            self._offload.look_again()
        of_group = chain.from_iterable([g] * len(group["params"]) for g, group in enumerate(groups))
        entries = [(i, g, p, self._grad(p)) for i, (g, p) in enumerate(zip(of_group, params, strict=True))]
        entries = [entry for entry in entries if not shards.is_elsewhere(entry[2])]
        self.planner.validate(optimizer, entries)
        specs = [p._spec for p in self._dtensors]  # type: ignore[attr-defined]
        self.exchange, self._specs = Exchange(params, self._partition), []
        cache: dict[int, Row] = {}
        rows: list[Row] = []
        unseen: list[Tensor] = []
        try:
            for position, g, p, grad in entries:
                if id(p) in cache:  # listed twice in one group: torch warns at construction, and one step is one update
                    continue
                old = self._cache.get(id(p))
                if old is not None and old.param is not p:
                    old = None
                if grad is not None and shards.is_dtensor(p):
                    grad = shards.local(self.settled.get(id(p), grad))
                if old is not None and self.planner.still_good(old, optimizer, g, p, grad, structure[g]):
                    old.position, old.group = position, g
                    old.stream = masters.stream(self._formats.seed, optimizer.first_position + position)
                    row = old
                elif grad is None:
                    unseen.append(p)
                    if not self.rule.factored or (absent := self.planner.absent(position, g, groups[g], p)) is None:
                        continue
                    row = absent
                else:
                    row = self.planner.row(optimizer, position, g, p, grad)
                    row.structure = structure[g]
                    self._keep_freshness(row)
                if self.rule.factored and row.backend != "torch" and shards.is_dtensor(p):
                    row.whole = self.exchange.whole_of(p)
                row.share = self.exchange.shares[position]
                cache[id(p)] = row
                rows.append(row)
        except BaseException:
            for row in rows:  # or a later step would take zeros for their momentum
                if row.fresh:
                    self._take_back(row)
            raise
        self._cache = cache
        self._resolve_overlaps(rows)
        for row in rows:
            if row.backend == "torch" and self.rule.copies_first:
                self._drop_valueless(row, optimizer.state)
        self._params, self._sizes = params, [len(g["params"]) for g in groups]
        self._structure, self._unseen, self._specs = structure, unseen, specs
        self._states = list(optimizer.state.values())
        self.host = [r for r in rows if r.backend in ("cpu", "eager")]
        self.other = [r for r in rows if r.backend == "torch"]
        self._on_device = {}
        for r in rows:
            if r.backend in dispatch.ON_DEVICE:
                self._on_device.setdefault((r.local.device, r.backend, r.share), []).append(r)
        on_devices = list(chain.from_iterable(self._on_device.values()))
        self.native = [*self.host, *on_devices]
        self.all = [*on_devices, *self.host, *self.other]  # in the order of execute.buffers
        self._build(groups)

    def _keep_freshness(self, row: Row) -> None:
        """A momentum buffer that a skipped first step left without a value is still fresh when it is planned again."""
        if row.backend not in dispatch.ON_DEVICE or not self.rule.copies_first or not row.slots:
            return
        key = row.slots[0]
        if row.fresh:
            flag = torch.ones((), dtype=torch.int32, device=row.param.device)
            self._fresh[id(row.param)] = FreshSlot(row.param, row.state, key, row.state[key], flag)
            row.fresh = False  # the device knows from here on
        found = self._fresh.get(id(row.param))
        if found is not None and found.param is row.param and row.state.get(key) is found.slot:
            row.fresh_flag = found.flag

    def _drop_valueless(self, row: Row, entries: Any) -> None:
        """torch's step takes any momentum buffer that is there for a value."""
        found = self._fresh.pop(id(row.param), None)
        if row.fresh or (found is not None and found.holds_nothing()):
            entry = entries[row.param]
            take_out(entry, self.rule.all_slots)
            if not entry:
                entries.pop(row.param)
        row.fresh = False

    def _resolve_overlaps(self, rows: list[Row]) -> None:
        """Rows that write memory of another row go to torch, one after the other, as torch's for-loop does them."""
        written = [
            (i, t)
            for i, row in enumerate(rows)
            if row.plan is not None and row.plan.numel
            for t in (row.local, *(shards.local(dict.get(row.state, k)) for k in row.slots))
            if t is not None  # in a file
        ]
        for pair in sharing(written):
            both = [rows[i] for i in pair]
            if all(row.plan is not None for row in both):
                for row in both:
                    self.planner.leave_to_torch(row, "it shares memory with another parameter", row.state)

    def _build(self, groups: list[dict[str, Any]]) -> None:
        n = len(self.native)
        self.row_params = [r.param for r in self.native]
        self._row_states = [r.state for r in self.native]
        self._distributed = [i for i, r in enumerate(self.native) if shards.is_dtensor(r.param)]
        used = {k for r in self.native for k in r.slots}
        known = (*self.rule.all_slots, *quantised.ALL_SLOTS, *MASTER_SLOTS)
        self._slot_keys = tuple(k for k in known if k in used)
        self._places = np.array([self._formats.place(k, self.rule) for k in self._slot_keys], dtype=np.int32)
        self._keys = (*self._slot_keys, "step") if self.rule.has_step else self._slot_keys
        self._flags = np.zeros(n, dtype=np.int32)
        for i, r in enumerate(self.native):
            if r.fresh and r.fresh_flag is None:
                self._flags[i] |= FRESH
            if r.has_step and r.state["step"].dtype == torch.float64:
                self._flags[i] |= STEP_F64
        plans = [r.plan for r in self.native if r.plan is not None]
        self.rows = np.zeros(n, dtype=ROW)
        self.rows["numel"] = [p.numel for p in plans]
        self.rows["block"] = [p.block for p in plans]
        if n:
            self.rows["dtype"][:, :OPERANDS] = np.maximum([p.dtypes for p in plans], 0)
        self.rows["group"] = [r.group for r in self.native]
        self.rows["master_mode"] = [0 if r.master_mode is None else masters.MODES[r.master_mode] for r in self.native]
        self.rows["stream"] = np.array([r.stream for r in self.native], dtype=np.uint64)
        self.rows["offset"] = [r.offset for r in self.native]
        self.rows["fresh"] = [0 if r.fresh_flag is None else r.fresh_flag.data_ptr() for r in self.native]
        h = len(self.host)
        self.table = Table(self.rows[:h], _layout_words(plans[:h]), len(groups), self._tiling(self.host))
        self._captured += [part for part in self.devices if part.captured]
        self.devices = []
        first = h
        for (device, backend, share), rows in self._on_device.items():
            last = first + len(rows)
            mine = plans[first:last]
            signatures = [plan.dtypes[:5] for plan in mine]
            part = DevicePart(
                self.rows[first:last],
                signatures,
                _layout_words(mine),
                len(groups),
                device,
                backend,
                self._tiling(rows, on_device=True),
            )
            part.share = share
            if (tiling := part.table.tiling) is not None:
                part.cut = self._cut(rows, tiling, part.table.row_words, part.table.scratch, part.table.sums)
            self.devices.append(part)
            first = last
        self._seen = np.zeros((2 + len(self._keys), n), dtype=np.uint64)
        for i, r in enumerate(self.native):
            places = dict(zip(("param", "grad", *r.slots, *(("step",) if r.has_step else ())), r.key, strict=True))
            self._seen[:, i] = [places.get(key, 0) for key in ("param", "grad", *self._keys)]
        self.known_params = KnownParams(self.rows, self.row_params)
        self._hyper_written = False
        of_host = [r.share for r in (*self.host, *self.other)]
        self.host_shares = [(s, np.flatnonzero([s == x for x in of_host])) for s in dict.fromkeys(of_host)]
        self.eager = any(r.backend == "eager" for r in self.host)
        self.cut = None
        if not self.eager and self.table.tiling is not None:
            words, scratch, sums = (
                self.rows[:h].view(np.int32).reshape(h, ROW.itemsize // 4),
                self.table.scratch,
                self.table.sums,
            )
            self.cut = self._cut(self.host, self.table.tiling, *map(torch.from_numpy, (words, scratch, sums)))
        self.ring = [StatsBuffer(h + len(self.other)) for _ in range(RING)]
        self.turn = 0
        self.offloaded = None
        if self._offload is not None and any(r.home is not None for r in self.host):
            place = partial(self._formats.place, rule=self.rule)
            self.offloaded = OffloadedRows(self._offload, self.host, self.table, place, len(groups))

    def _tiling(self, rows: list[Row], on_device: bool = False) -> Tiling | None:
        if not self.rule.factored:
            return None
        sizes = [8 if r.param.dtype == torch.float64 else 4 for r in rows]
        elements = sum(r.local.numel() for r in rows)
        limits = device_limits(elements, chunk_elements(elements)) if on_device else HOST
        return Tiling([tuple(r.local.shape) for r in rows], sizes, limits, [r.whole for r in rows])

    @staticmethod
    def _cut(rows: list[Row], tiling: Tiling, words: Tensor, scratch: Tensor, sums: Tensor) -> CutMatrices | None:
        if all(r.whole is None for r in rows):
            return None
        states = [{key: shards.local(value) for key, value in r.state.items()} for r in rows]
        return CutMatrices(tiling, states, words, scratch, sums)

    # -- after a step -------------------------------------------------------------------------------------------------

    def active_params(self, grads: list[Tensor | None]) -> list[Tensor]:
        """Parameters of the native rows that had a gradient."""
        if self._all_active:
            return self.row_params
        return [p for p, g in zip(self.row_params, grads, strict=True) if g is not None]

    def _take_back(self, row: Row) -> None:
        take_out(row.state, self.rule.all_slots)  # and not the rest of the weights
        if not row.state:
            self._state.pop(row.param, None)
        self._states = []  # plan again: the slot has to be made anew

    def settle_devices(self) -> None:
        """Asks the devices which momentum buffers still hold no value and takes those back (this waits for them)."""
        unsettled, self._fresh = self._fresh, {}
        for found in unsettled.values():
            if self._state.get(found.param) is found.state and found.holds_nothing():
                take_out(found.state, self.rule.all_slots)
                if not found.state:
                    self._state.pop(found.param, None)
                self._states = []  # plan again: the slot has to be made anew
        if unsettled:
            self.rows["fresh"] = 0
            for row in self.native:
                row.fresh_flag = None

    def settle(self, skipped: bool, grads: list[Tensor | None]) -> None:
        """A first momentum buffer of the host holds a value now, or is taken back when the step was skipped."""
        if not (self._flags & FRESH).any():
            return
        for i, (row, grad) in enumerate(zip(self.host, grads, strict=False)):
            if not row.fresh or grad is None:
                continue
            if skipped:
                self._take_back(row)
            else:
                row.fresh = False
                self._flags[i] &= ~FRESH


def _layout_words(plans: Sequence[Plan]) -> dict[int, list[int]]:
    return {i: plan.layout for i, plan in enumerate(plans) if plan.layout is not None}
