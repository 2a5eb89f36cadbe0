"""From parameter groups to the rows of a table: which tensors a step works on, by which backend, and since when.

`RowSet.refresh` runs every step. While nothing but addresses changes it compares arrays; when the set of parameters,
their layouts, dtypes, state or groups changes, the rows are planned again (only those that changed).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from .. import dispatch, errors, masters, quantised, state
from ..device_part import DevicePart
from ..device_table import chunk_elements
from ..factored import HOST, Tiling, device_limits
from ..layout import Plan, dense_in_one_order, walking_order
from ..offload.files import OnDisk
from ..offload.homes import Home, row_major
from ..offload.rows import OffloadedRows
from ..offload.states import bring_back, settle
from ..stats import RING, StatsBuffer
from ..table import (
    ACTIVE,
    FRESH,
    GRAD_SHARED,
    MISSING_GRADIENT,
    OPERANDS,
    PARAM_UNKNOWN,
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
from .formats import MASTER_SLOTS, Formats, expand, take_out
from .fresh import FreshSlot
from .hyper import HyperWriter, same_values
from .overlaps import sharing

if TYPE_CHECKING:
    from .base import FusedOptimizer


@dataclass
class Row:
    """One parameter of the step and what was decided about it."""

    position: int  # in the order of the state_dict
    group: int
    param: Tensor
    state: dict[str, Any]
    slots: tuple[str, ...]
    has_step: bool
    factored: bool = False  # Adafactor's
    master_mode: str | None = None
    stream: int = 0  # of its random numbers
    backend: str = ""
    reason: str = ""
    plan: Plan | None = None
    fresh: bool = False  # the momentum buffer was made for this step and holds no value yet
    fresh_flag: Tensor | None = None  # on a device: 1 while that is so, as only the device knows
    structure: Any = None  # what the group said when the plan was made
    key: list[int] = field(default_factory=list)  # layout hashes that the plan was made for: param, grad, slots, step
    home: Home | None = None  # where its state is offloaded to; the following are of such rows
    order: tuple[int, ...] = ()  # strides of slots that have an element for each of the parameter's
    dense: bool = False  # parameter and gradient lie without gaps in this order
    measured_by: str = ""  # the backend of the parameter's device
    grad_dtype: torch.dtype = torch.float32


class RowSet:
    """The rows of one optimizer, cached between steps."""

    def __init__(self, optimizer: FusedOptimizer) -> None:
        self._rule = optimizer._rule
        self._backend = optimizer.defaults.get("backend")
        self._clip_in_place = bool(optimizer.defaults.get("clip_in_place"))
        self._formats = Formats(optimizer.defaults)
        self._offload = optimizer._offload
        self._params: list[Tensor] = []
        self._sizes: list[int] = []
        self._structure: list[Any] = []
        self._state: Any = None
        self._states: list[Any] = []
        self._cache: dict[int, Row] = {}
        self._on_device: dict[tuple[torch.device, str], list[Row]] = {}
        self.devices: list[DevicePart] = []
        self._fresh: dict[int, FreshSlot] = {}
        self._captured: list[DevicePart] = []
        self._unseen: list[Tensor] = []
        self._values: list[Any] = []
        self._hyper = HyperWriter(self._rule)
        self._hyper_written = False
        self._all_active = True
        self.native: list[Row] = []  # those of kernels and of the eager backend: first the host's, then each device's
        self.host: list[Row] = []
        self.other: list[Row] = []
        self.all: list[Row] = []
        # Address and version that the carried sum of each parameter belongs to (Adafactor), shape (2, n).
        self._known_params: np.ndarray[Any, Any]
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
        values = [self._rule.values(g) for g in groups]
        changed = not same_values(values, self._values)
        structure = [self._rule.structure(g) for g in groups] if changed else self._structure
        known = (
            same_items(params, self._params)
            and [len(g["params"]) for g in groups] == self._sizes
            and structure == self._structure
            and optimizer.state is self._state
            and same_items(list(optimizer.state.values()), self._states)
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

    def plan_again(self) -> None:
        """The next step looks at every parameter anew."""
        self._sizes = []

    def _update_addresses(self) -> list[Tensor | None] | None:
        """Looks at all operands of the native rows; their gradients, or None when more than addresses changed."""
        grads, noticed = refresh_rows(
            self.rows,
            self.row_params,
            self._row_states,
            self._keys,
            self._rule.has_step,
            self._seen,
            self._flags,
            self._places,
        )
        if noticed & ROWS_CHANGED:
            return None
        if self.offloaded is not None:
            if not self._add_taken(grads) or self.offloaded.has_moved():
                return None
            noticed &= ~MISSING_GRADIENT if all(g is not None for g in grads) else -1
        if noticed & STRIDED_GRADIENT and any(g is not None and g.is_neg() for g in grads):
            return None
        self._all_active = not noticed & MISSING_GRADIENT
        if self._clip_in_place:
            self._mark_shared_gradients()
        if self._rule.factored:
            self._mark_unknown_params()
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

    def _mark_unknown_params(self) -> None:
        """Asks for the sum of squares of parameters that somebody else may have written since the last step.

        A write through ``p.data`` leaves no trace: one step goes on with the sum of before, the one after it is right.
        """
        now = self._params_now()
        # A tensor of inference mode has no version, and is looked at every time.
        unknown = (now != self._known_params).any(axis=0) | (now[1] == NO_VERSION)
        self.rows["flags"] |= np.where(unknown, PARAM_UNKNOWN, 0).astype(self.rows["flags"].dtype)

    def _params_now(self) -> np.ndarray[Any, Any]:
        """Addresses and versions of the native rows' parameters, shape (2, n)."""
        return np.stack([self.rows["param"].astype(np.int64), _versions(self.row_params)])

    def params_are_known(self, measured: bool, skipped: bool) -> None:
        """After a step of Adafactor: the sums of the parameters that took part are those of what they hold now.

        Not of the host's where the step was skipped before it had measured anything.
        """
        active = self.rows["flags"] & ACTIVE != 0
        active[: len(self.host)] &= measured or not skipped
        if self.offloaded is not None:
            active[self.offloaded.elsewhere] &= not skipped
        self._known_params = np.where(active, self._params_now(), self._known_params)

    def _mark_shared_gradients(self) -> None:
        """Parameters may be given one and the same gradient tensor; it is scaled once."""
        flags = self.rows["flags"]
        _, first, at, count = np.unique(self.rows["grad"], return_index=True, return_inverse=True, return_counts=True)
        shared = (count[at] > 1) & (flags & ACTIVE != 0)
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
        of_group = chain.from_iterable([g] * len(group["params"]) for g, group in enumerate(groups))
        entries = [(i, g, p, self._grad(p)) for i, (g, p) in enumerate(zip(of_group, params, strict=True))]
        self._validate(optimizer, entries)
        cache: dict[int, Row] = {}
        rows: list[Row] = []
        unseen: list[Tensor] = []
        for position, g, p, grad in entries:
            if id(p) in cache:  # listed twice in one group: torch warns at construction, and one step is one update
                continue
            old = self._cache.get(id(p))
            if old is not None and old.param is not p:
                old = None
            if old is not None and self._still_good(old, optimizer, g, p, grad, structure[g]):
                old.position, old.group = position, g
                old.stream = masters.stream(self._formats.seed, optimizer.first_position + position)
                row = old
            elif grad is None:
                unseen.append(p)
                continue
            else:
                row = self._row(optimizer, position, g, p, grad)
                row.structure = structure[g]
                self._keep_freshness(row)
            cache[id(p)] = row
            rows.append(row)
        self._cache = cache
        self._resolve_overlaps(rows)
        for row in rows:
            if row.backend == "torch" and self._rule.copies_first:
                self._drop_valueless(row, optimizer.state)
        self._params, self._sizes = params, [len(g["params"]) for g in groups]
        self._structure, self._unseen = structure, unseen
        self._states = list(optimizer.state.values())
        self.host = [r for r in rows if r.backend in ("cpu", "eager")]
        self.other = [r for r in rows if r.backend == "torch"]
        self._on_device = {}
        for r in rows:
            if r.backend in dispatch.ON_DEVICE:
                self._on_device.setdefault((r.param.device, r.backend), []).append(r)
        on_devices = list(chain.from_iterable(self._on_device.values()))
        self.native = [*self.host, *on_devices]
        self.all = [*on_devices, *self.host, *self.other]  # in the order of execute.buffers
        self._build(groups)

    def _validate(self, optimizer: FusedOptimizer, entries: list[tuple[int, int, Tensor, Tensor | None]]) -> None:
        """Refuses what no backend may touch; nothing has been changed yet."""
        for position, g, p, grad in entries:
            if grad is None:
                continue
            group = optimizer.param_groups[g]
            name = optimizer._name(g, position)
            self._rule.refuse(p, grad)
            if grad.shape != p.shape:
                raise errors.grad_mismatch("shape", name, tuple(p.shape), tuple(grad.shape))
            if grad.device != p.device and grad is p.grad:
                raise errors.grad_mismatch("device", name, p.device, grad.device)
            if self._clip_in_place and type(grad) is Tensor and walking_order([grad], written=(0,)).overlapping:
                raise errors.overlapping_tensor()
            self._formats.refuse(p, name)
            entry = optimizer.state.get(p) or {}
            moments = self._rule.slots(group, p)
            for key in (*moments, *(k for k in self._slots(group, p) if k in MASTER_SLOTS)):
                if entry.get(key) is not None:
                    anywhere = self._offload is not None
                    state.check_slot(entry, p, key, name, self._rule.slot_shape(key, p), anywhere)
            for key in moments:
                quantised.check(entry, key, p.shape, name)
            if type(p) in (Tensor, torch.nn.Parameter) and p.layout is torch.strided:
                if walking_order([p], written=(0,)).overlapping:
                    raise errors.overlapping_tensor()

    def _still_good(
        self, old: Row, optimizer: FusedOptimizer, g: int, p: Tensor, grad: Tensor | None, structure: Any
    ) -> bool:
        """The plan of an earlier step still fits this parameter, its state and (when there is one) its gradient."""
        if old.plan is None or old.structure != structure or old.slots != self._slots(optimizer.param_groups[g], p):
            return False
        if (old.slots or old.has_step) and optimizer.state.get(p) is not old.state:
            return False
        if isinstance(old.state, OnDisk) and not old.state.holds(old.slots):
            return False
        key = _layouts(p, grad, old)
        if key is None or (grad is not None and grad.is_neg()):
            return False
        return key[0] == old.key[0] and key[2:] == old.key[2:] and (grad is None or key[1] == old.key[1])

    def _slots(self, group: dict[str, Any], p: Tensor) -> tuple[str, ...]:
        return self._formats.slots(self._rule.slots(group, p), p)

    def _row(self, optimizer: FusedOptimizer, position: int, g: int, p: Tensor, grad: Tensor) -> Row:
        group = optimizer.param_groups[g]
        slots = self._slots(group, p)
        row = Row(position, g, p, {}, slots, self._rule.has_step, self._rule.factored, self._formats.mode_of(p))
        row.stream = masters.stream(self._formats.seed, optimizer.first_position + position)
        row.backend, row.reason = self._choose(group, p, grad)
        if row.backend == "torch":
            self._leave_to_torch(row, row.reason, optimizer.state.get(p))
            return row
        row.home = None if self._offload is None else self._offload.home_of(p)
        if row.home is None and self._offload is not None:
            bring_back(optimizer.state.get(p), p)
        if row.home is not None:
            self._offload_row(row, grad, row.home)
        if slots or self._rule.has_step:
            row.state = optimizer.state[p] if row.home is None else row.home.entry(optimizer.state, p)
        if self._rule.has_step:
            state.ensure_step(row.state, p, group, on_host=row.home is not None)
        if row.home is None:
            made = self._formats.ensure_moments(self._rule, row.state, p, self._rule.slots(group, p))
            self._formats.ensure(row.state, p)
        else:
            made = bool(slots) and settle(row.home, row.state, p, row.order, self._rule, self._formats, group)
        row.fresh = made and self._rule.copies_first
        row.reason += self._formats.why_not(p)
        operands: list[Tensor | None] = [p, grad, None, None, None, None]
        dtypes = [dispatch.FLOATS.get(t.dtype, -1) for t in (p, grad)] + [-1] * 4
        for slot in slots:
            place = self._formats.place(slot, self._rule)
            if place < OPERANDS:
                value = row.state.extents[slot] if isinstance(row.state, OnDisk) else row.state[slot]
                dtypes[place] = self._formats.code(slot, value.dtype)
                operands[place] = value if isinstance(value, Tensor) else None
        if row.home is not None:  # pieces of states come in the row's order
            operands[2:] = [None] * 4
        tensors = [t for t in operands if t is not None]
        if any(type(t) not in (Tensor, torch.nn.Parameter) for t in tensors):
            self._leave_to_torch(row, "its state is a tensor subclass", row.state)
            return row
        if any(code < 0 for t, code in zip(operands, dtypes, strict=True) if t is not None):
            self._leave_to_torch(row, "its gradient or state has a dtype that the kernels do not compute", row.state)
            return row
        block = self._formats.block_of(p)
        if self._rule.factored:  # row_var, col_var and variance are walked by index
            operands[2:4] = [None, None]
        elif block:  # and so are codes
            operands[2:5] = [None, None, None]
        order = walking_order(
            operands,
            [i for i in (0, 2, 3, 4, 5) if operands[i] is not None],
            keep_order=self._rule.factored or self._formats.by_index(p),
        )
        if order.problem:
            self._leave_to_torch(row, order.problem, row.state)
            return row
        key = _layouts(p, grad, row)
        if key is None:
            self._leave_to_torch(row, "its storage cannot be read as plain memory", row.state)
            return row
        row.key = key
        row.plan = Plan(p.numel(), tuple(dtypes), order.layout, block)  # type: ignore[arg-type]
        return row

    def _offload_row(self, row: Row, grad: Tensor, home: Home) -> None:
        """A row that the host steps, whatever its device."""
        p = row.param
        row.measured_by = row.backend if grad is p.grad else ""  # one that was taken is on the host
        choice = dispatch.choose_host(self._backend)
        row.backend, row.reason = choice.backend, f"{choice.reason}, {home.words}"
        by_index = row.factored or self._formats.by_index(p)
        in_order = dense_in_one_order([p]) and (not by_index or p.is_contiguous())
        row.order = p.stride() if in_order else row_major(tuple(p.shape))
        row.dense = in_order and dense_in_one_order([p, grad]) and (not by_index or grad.is_contiguous())
        row.grad_dtype = grad.dtype

    def _leave_to_torch(self, row: Row, reason: str, entry: dict[str, Any] | None) -> None:
        """torch's own step for this row, which knows of no master weights."""
        mode = self._formats.mode_of(row.param)
        row.backend, row.reason = "torch", reason if mode is None else f"{reason}; without master weights"
        row.plan, row.master_mode, row.home = None, None, None
        row.slots = ()
        if self._offload is not None:
            bring_back(entry, row.param)
        self._formats.drop(entry)
        expand(entry, row.param, row.param.dtype)

    def _keep_freshness(self, row: Row) -> None:
        """A momentum buffer that a skipped first step left without a value is still fresh when it is planned again."""
        if row.backend not in dispatch.ON_DEVICE or not self._rule.copies_first or not row.slots:
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
            take_out(entry, self._rule.all_slots)
            if not entry:
                entries.pop(row.param)
        row.fresh = False

    def _choose(self, group: dict[str, Any], p: Tensor, grad: Tensor) -> tuple[str, str]:
        if group.get("differentiable"):
            return "torch", "differentiable=True needs a step that autograd can see"
        for what, t in (("parameter", p), ("gradient", grad)):
            if t.layout is not torch.strided:
                return "torch", f"the {what} is sparse"
            if type(t) not in (Tensor, torch.nn.Parameter):
                return "torch", f"the {what} is a {type(t).__name__}, a tensor subclass"
            if t.dtype not in dispatch.FLOATS:
                return "torch", f"the {what} is {t.dtype}"
            if t.is_neg():
                return "torch", f"the {what} is a lazily negated view"
        choice = dispatch.choose(p, self._backend)
        return choice.backend, choice.reason

    def _resolve_overlaps(self, rows: list[Row]) -> None:
        """Rows that write memory of another row go to torch, one after the other, as torch's for-loop does them."""
        written = [
            (i, t)
            for i, row in enumerate(rows)
            if row.plan is not None and row.plan.numel
            for t in (row.param, *(dict.get(row.state, k) for k in row.slots))
            if t is not None  # in a file
        ]
        for pair in sharing(written):
            both = [rows[i] for i in pair]
            if all(row.plan is not None for row in both):
                for row in both:
                    self._leave_to_torch(row, "it shares memory with another parameter", row.state)

    def _build(self, groups: list[dict[str, Any]]) -> None:
        n = len(self.native)
        self.row_params = [r.param for r in self.native]
        self._row_states = [r.state for r in self.native]
        used = {k for r in self.native for k in r.slots}
        known = (*self._rule.all_slots, *quantised.ALL_SLOTS, *MASTER_SLOTS)
        self._slot_keys = tuple(k for k in known if k in used)
        self._places = np.array([self._formats.place(k, self._rule) for k in self._slot_keys], dtype=np.int32)
        self._keys = (*self._slot_keys, "step") if self._rule.has_step else self._slot_keys
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
        self.rows["fresh"] = [0 if r.fresh_flag is None else r.fresh_flag.data_ptr() for r in self.native]
        h = len(self.host)
        self.table = Table(self.rows[:h], _layout_words(plans[:h]), len(groups), self._tiling(self.host))
        self._captured += [part for part in self.devices if part.captured]
        self.devices = []
        first = h
        for (device, backend), rows in self._on_device.items():
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
            self.devices.append(part)
            first = last
        self._seen = np.zeros((2 + len(self._keys), n), dtype=np.uint64)
        for i, r in enumerate(self.native):
            places = dict(zip(("param", "grad", *r.slots, *(("step",) if r.has_step else ())), r.key, strict=True))
            self._seen[:, i] = [places.get(key, 0) for key in ("param", "grad", *self._keys)]
        self._known_params = np.full((2, n), -1, dtype=np.int64)
        self._hyper_written = False
        self.eager = any(r.backend == "eager" for r in self.host)
        self.ring = [StatsBuffer(h + len(self.other)) for _ in range(RING)]
        self.turn = 0
        self.offloaded = None
        if self._offload is not None and any(r.home is not None for r in self.host):
            place = partial(self._formats.place, rule=self._rule)
            self.offloaded = OffloadedRows(self._offload, self.host, self.table, place, len(groups))

    def _tiling(self, rows: list[Row], on_device: bool = False) -> Tiling | None:
        if not self._rule.factored:
            return None
        sizes = [8 if r.param.dtype == torch.float64 else 4 for r in rows]
        elements = sum(r.param.numel() for r in rows)
        limits = device_limits(elements, chunk_elements(elements)) if on_device else HOST
        return Tiling([tuple(r.param.shape) for r in rows], sizes, limits)

    # -- after a step -------------------------------------------------------------------------------------------------

    def active_params(self, grads: list[Tensor | None]) -> list[Tensor]:
        """Parameters of the native rows that had a gradient."""
        if self._all_active:
            return self.row_params
        return [p for p, g in zip(self.row_params, grads, strict=True) if g is not None]

    def _take_back(self, row: Row) -> None:
        take_out(row.state, self._rule.all_slots)  # and not the rest of the weights
        if not row.state:
            self._state.pop(row.param, None)
        self._states = []  # plan again: the slot has to be made anew

    def settle_devices(self) -> None:
        """Asks the devices which momentum buffers still hold no value and takes those back (this waits for them)."""
        unsettled, self._fresh = self._fresh, {}
        for found in unsettled.values():
            if self._state.get(found.param) is found.state and found.holds_nothing():
                take_out(found.state, self._rule.all_slots)
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


NO_VERSION = -2


def _versions(params: Sequence[Tensor]) -> np.ndarray[Any, Any]:
    try:
        return np.fromiter((p._version for p in params), dtype=np.int64, count=len(params))
    except RuntimeError:  # a tensor of inference mode has none, and is looked at every time
        return np.full(len(params), NO_VERSION, dtype=np.int64)


def _layout_words(plans: Sequence[Plan]) -> dict[int, list[int]]:
    return {i: plan.layout for i, plan in enumerate(plans) if plan.layout is not None}


def _layouts(p: Tensor, grad: Tensor | None, row: Row) -> list[int] | None:
    """Layout hashes of a row's tensors in the order of Row.key, or None when one of them is not plain."""
    # Of states that are in a file nothing is looked at.
    items = [p, grad, *(dict.get(row.state, k) for k in row.slots), *((row.state.get("step"),) if row.has_step else ())]
    records = np.zeros(len(items), dtype=RECORD)
    return None if scan(items, records) else records["layout"].tolist()
