"""From a parameter, its gradient and its state to a row: what is refused, which backend takes it, what it needs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from .. import dispatch, errors, masters, quantised, state
from ..distributed import shards
from ..distributed.factored import Whole
from ..layout import Plan, dense_in_one_order, walking_order
from ..offload.files import OnDisk
from ..offload.homes import Home, row_major
from ..offload.states import bring_back, settle
from ..table import OPERANDS, RECORD, scan
from .formats import MASTER_SLOTS, Formats, expand

if TYPE_CHECKING:
    from ..distributed.ranks import Share
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
    offset: int = 0  # index of its first element in the whole tensor of which the parameter is a shard
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
    measured_by: str = ""  # the backend of the parameter's device; none where the gradient was taken to the host
    grad_dtype: torch.dtype = torch.float32
    share: Share | None = None  # whom the parameter is shared with
    cut: shards.Cut = field(default_factory=lambda: shards.cut_of(torch.empty(0)))
    whole: Whole | None = None  # Adafactor's: the parameter is a part of a larger one
    absent: bool = False  # it never had a gradient here, and takes part in what ranks tell each other alone

    @property
    def local(self) -> Tensor:
        """What of the parameter is in this process: all of a plain one."""
        return shards.local(self.param)  # type: ignore[no-any-return]


class RowPlanner:
    """Makes the rows of one optimizer, and their state."""

    def __init__(self, optimizer: FusedOptimizer) -> None:
        self._rule = optimizer._rule
        self._backend = optimizer.defaults.get("backend")
        self._clip_in_place = bool(optimizer.defaults.get("clip_in_place"))
        self._formats = Formats(optimizer.defaults)
        self._offload = optimizer._offload

    def validate(self, optimizer: FusedOptimizer, entries: list[tuple[int, int, Tensor, Tensor | None]]) -> None:
        """Refuses what no backend may touch; nothing has been changed yet."""
        for position, g, p, grad in entries:
            if grad is None:
                continue
            group = optimizer.param_groups[g]
            name = optimizer._name(g, position)
            self._rule.refuse(p, grad)
            if shards.is_dtensor(grad) != shards.is_dtensor(p):
                raise errors.grad_mismatch("kind", name, type(p).__name__, type(grad).__name__)
            if grad.shape != p.shape:
                raise errors.grad_mismatch("shape", name, tuple(p.shape), tuple(grad.shape))
            if grad.device != p.device and grad is p.grad:
                raise errors.grad_mismatch("device", name, p.device, grad.device)
            here = shards.local(grad)
            if self._clip_in_place and type(here) is Tensor and walking_order([here], written=(0,)).overlapping:
                raise errors.overlapping_tensor()
            self._formats.refuse(p, name)
            entry = optimizer.state.get(p) or {}
            if isinstance(entry, OnDisk):  # what is in the file has been looked at before it went there
                entry = entry.in_memory()
            moments = self._rule.slots(group, p)
            for key in (*moments, *(k for k in self._slots(group, p) if k in MASTER_SLOTS)):
                if entry.get(key) is not None:
                    anywhere = self._offload is not None
                    state.check_slot(entry, p, key, name, self._rule.slot_shape(key, p), anywhere)
            for key in moments:
                quantised.check(entry, key, p.shape, name)
            here = shards.local(p)
            if type(here) in (Tensor, torch.nn.Parameter) and here.layout is torch.strided:
                if walking_order([here], written=(0,)).overlapping:
                    raise errors.overlapping_tensor()

    def still_good(
        self, old: Row, optimizer: FusedOptimizer, g: int, p: Tensor, grad: Tensor | None, structure: Any
    ) -> bool:
        """The plan of an earlier step still fits this parameter, its state and (when there is one) its gradient."""
        if old.absent and grad is not None:
            return False
        if old.plan is None or old.structure != structure or old.slots != self._slots(optimizer.param_groups[g], p):
            return False
        if (old.slots or old.has_step) and optimizer.state.get(p) is not old.state:
            return False
        if old.cut != shards.cut_of(p):
            return False
        if self._offload is not None and self._offload.home_of(p) is not old.home:
            return False
        if old.home is not None and isinstance(old.state, OnDisk) and not old.state.holds(old.slots):
            return False
        key = _layouts(p, grad, old)
        if key is None or (grad is not None and grad.is_neg()):
            return False
        return key[0] == old.key[0] and key[2:] == old.key[2:] and (grad is None or key[1] == old.key[1])

    def _slots(self, group: dict[str, Any], p: Tensor) -> tuple[str, ...]:
        return self._formats.slots(self._rule.slots(group, p), p)

    def row(self, optimizer: FusedOptimizer, position: int, g: int, p: Tensor, grad: Tensor) -> Row:
        """The row of a parameter that has a gradient; its state is made, converted or moved where that is needed.

        Of a DTensor ``grad`` is a local tensor, and so is what its row works on.
        """
        group = optimizer.param_groups[g]
        slots = self._slots(group, p)
        row = Row(position, g, p, {}, slots, self._rule.has_step, self._rule.factored, self._formats.mode_of(p))
        row.stream = masters.stream(self._formats.seed, optimizer.first_position + position)
        row.cut = shards.cut_of(p)
        row.offset = row.cut.offset
        row.backend, row.reason = self.choose(group, p, grad)
        if row.backend == "torch":
            self.leave_to_torch(row, row.reason, optimizer.state.get(p))
            return row
        row.home = None if self._offload is None else self._offload.home_of(p)
        if row.home is None and self._offload is not None:
            bring_back(optimizer.state.get(p), p)
        if row.home is not None:
            self._offload_row(row, grad, row.home)
        if slots or self._rule.has_step:
            row.state = optimizer.state[p] if row.home is None else row.home.entry(optimizer.state, p)
        if row.home is None:
            if self._rule.has_step:
                state.ensure_step(row.state, p, group)
            made = self._formats.ensure_moments(self._rule, row.state, p, self._rule.slots(group, p))
            self._formats.ensure(row.state, p)
        else:
            made = self._settle(row, row.home, optimizer.state, group)
        row.fresh = made and self._rule.copies_first
        row.reason += self._formats.why_not(p)
        if self._offload is not None and shards.is_dtensor(p):
            row.reason += "; not offloaded: a DTensor"
        operands: list[Tensor | None] = [row.local, grad, None, None, None, None]
        dtypes = [dispatch.FLOATS.get(t.dtype, -1) for t in (p, grad)] + [-1] * 4
        for slot in slots:
            place = self._formats.place(slot, self._rule)
            if place < OPERANDS:
                in_file = row.state.extents if isinstance(row.state, OnDisk) else {}
                value = in_file[slot] if slot in in_file else shards.local(row.state[slot])
                dtypes[place] = self._formats.code(slot, value.dtype)
                operands[place] = value if isinstance(value, Tensor) else None
        if row.home is not None:  # pieces of states come in the row's order
            operands[2:] = [None] * 4
        tensors = [t for t in operands if t is not None]
        if any(type(t) not in (Tensor, torch.nn.Parameter) for t in tensors):
            self.leave_to_torch(row, "its state is a tensor subclass", row.state)
            return row
        if any(code < 0 for t, code in zip(operands, dtypes, strict=True) if t is not None):
            self.leave_to_torch(row, "its gradient or state has a dtype that the kernels do not compute", row.state)
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
            self.leave_to_torch(row, order.problem, row.state)
            return row
        key = _layouts(p, grad, row)
        if key is None:
            self.leave_to_torch(row, "its storage cannot be read as plain memory", row.state)
            return row
        row.key = key
        row.plan = Plan(row.local.numel(), tuple(dtypes), order.layout, block)  # type: ignore[arg-type]
        return row

    def absent(self, position: int, g: int, group: dict[str, Any], p: Tensor) -> Row | None:
        """Adafactor's row of a part without a gradient, for exchanges in which every rank has to take part.

        It has no state in the optimizer, only zeros of its own. None for a parameter that is here as a whole.
        """
        backend, reason = self.choose(group, p, p)
        if not shards.cut_of(p).dims or backend == "torch":
            return None
        row = Row(position, g, p, {}, (), has_step=False, factored=True, backend=backend, absent=True)
        row.reason = f"{reason} (no gradient yet)"
        row.cut = shards.cut_of(p)
        here = shards.local(p)
        dtypes = [dispatch.FLOATS[p.dtype]] * 2 + [-1] * 4
        for slot in self._rule.slots(group, p):
            form = self._rule.slot(slot, p, None)
            dtypes[self._formats.place(slot, self._rule)] = self._formats.code(slot, form.dtype)
            if slot == "row_var":
                row.state[slot] = shards.local(shards.zeros(p, form.shape, form.dtype, slot))
        row.plan = Plan(here.numel(), tuple(dtypes), None)  # type: ignore[arg-type]
        key = _layouts(p, None, row)
        if key is None:
            return None
        row.key = key
        return row

    def _settle(self, row: Row, home: Home, states: Any, group: dict[str, Any]) -> bool:
        """Makes the state of an offloaded row; True when a moment was made."""
        new = "step" not in row.state
        if self._rule.has_step:
            state.ensure_step(row.state, row.param, group, on_host=True)
        try:
            return bool(row.slots) and settle(home, row.state, row.param, row.order, self._rule, self._formats, group)
        except OSError:  # as before
            if new:
                row.state.pop("step", None)
            if not row.state:
                states.pop(row.param)
            raise

    def _offload_row(self, row: Row, grad: Tensor, home: Home) -> None:
        """A row that the host steps, whatever its device."""
        p = row.param
        assert self._offload is not None
        self._offload.serve(p)
        row.measured_by = row.backend if grad is p.grad else ""
        row.backend, row.reason = self._on_host(home)
        by_index = row.factored or self._formats.by_index(p)
        in_order = dense_in_one_order([p]) and (not by_index or p.is_contiguous())
        row.order = p.stride() if in_order else row_major(tuple(p.shape))
        row.dense = in_order and dense_in_one_order([p, grad]) and (not by_index or grad.is_contiguous())
        row.grad_dtype = grad.dtype

    def _on_host(self, home: Home) -> tuple[str, str]:
        choice = dispatch.choose_host(self._backend)
        return choice.backend, f"{choice.reason}, {home.words}"

    def expected(self, group: dict[str, Any], p: Tensor, grad: Tensor) -> tuple[str, str]:
        """What a parameter without a row would get."""
        backend, reason = self.choose(group, p, grad)
        home = None if self._offload is None else self._offload.home_of(p)
        return (backend, reason) if home is None or backend == "torch" else self._on_host(home)

    def leave_to_torch(self, row: Row, reason: str, entry: dict[str, Any] | None) -> None:
        """torch's own step for this row, which knows of no master weights."""
        mode = self._formats.mode_of(row.param)
        row.backend, row.reason = "torch", reason if mode is None else f"{reason}; without master weights"
        row.plan, row.master_mode, row.home = None, None, None
        row.slots = ()
        if self._offload is not None:
            bring_back(entry, row.param)
            self._offload.leave(row.param)
        self._formats.drop(entry)
        expand(entry, row.param, row.param.dtype)

    def choose(self, group: dict[str, Any], p: Tensor, grad: Tensor) -> tuple[str, str]:
        """The backend of the parameter's device, and why."""
        if group.get("differentiable"):
            return "torch", "differentiable=True needs a step that autograd can see"
        for what, t in (("parameter", p), ("gradient", grad)):
            if t.layout is not torch.strided:
                return "torch", f"the {what} is sparse"
            t = shards.local(t)
            if type(t) not in (Tensor, torch.nn.Parameter):
                return "torch", f"the {what} is a {type(t).__name__}, a tensor subclass"
            if t.dtype not in dispatch.FLOATS:
                return "torch", f"the {what} is {t.dtype}"
            if t.is_neg():
                return "torch", f"the {what} is a lazily negated view"
        choice = dispatch.choose(shards.local(p), self._backend)
        return choice.backend, choice.reason + (", on the local part" if shards.is_dtensor(p) else "")


def _layouts(p: Tensor, grad: Tensor | None, row: Row) -> list[int] | None:
    """Layout hashes of a row's tensors in the order of Row.key, or None when one of them is not plain."""
    # Of states that are in a file nothing is looked at.
    items = [p, grad, *(dict.get(row.state, k) for k in row.slots), *((row.state.get("step"),) if row.has_step else ())]
    records = np.zeros(len(items), dtype=RECORD)
    return None if scan(items, records) else records["layout"].tolist()
