"""Gradient release: each parameter is stepped when its gradient is complete, and the gradient is freed at once.

The gradients of a model then never exist all together. What opt.step() does otherwise in one pass over all parameters
happens here for one at a time, through the same rows, requests and backends.
"""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from . import errors
from .device_part import DeviceStats
from .distributed import shards
from .offload.engine import on_complete_gradient
from .optim.base import FusedOptimizer, param_name, run_step
from .optim.planning import Row
from .optim.rows import RowSet
from .request import Request
from .stats import RESULT, RESULT_AT, RESULT_WIDTH, Buffer, StatsBuffer, StepStats
from .stats import ROW as ROW_FIELDS

_SCALED_ROWS = [ROW_FIELDS.index("grad_norm"), ROW_FIELDS.index("grad_amax")]
# Fields of a Result that are norms, those in units of the gradient, and counts; how each is put together.
_NORMS = ("grad_norm", "update_norm", "stored_update_norm", "param_norm")
_IN_GRADIENT_UNITS = ("grad_norm", "grad_amax")
_COUNTS = ("nonfinite", "zeros")
_TINY = 1e-6  # as in torch's clip_grad_norm_
_MOST = 1e38  # of what a float32 divisor holds


def gradient_release(model: torch.nn.Module, opt: FusedOptimizer, accumulation_steps: int = 1) -> GradientRelease:
    """Steps each parameter as soon as its gradient is complete, during the backward, and frees the gradient.

    The training loop stays as it is (``loss.backward(); opt.step(); opt.zero_grad(); schedule.step()``): ``opt.step()``
    steps what is left, runs hooks, and makes ``opt.last_step``. Learning rates are those at the time of the backward.
    Without ``max_grad_norm`` results have the bits of the ordinary loop.

    With ``max_grad_norm`` they have not: the exact global norm is known when the backward is over. The norm of the
    previous step takes its place; in the first step, and in the first after loading a checkpoint, each gradient is
    clipped by its own norm. A norm that is not finite is not used: the last finite one is.

    With ``offload`` the host works on a parameter beside the backward of others, and ``opt.step()`` waits for it.

    Args:
        model: whose parameters are watched. Those that ``opt`` does not have are left alone; those of ``opt`` that are
            not the model's are stepped by ``opt.step()``, like all whose hook has not fired.
        opt: an optimizer of this package, without ``skip_nonfinite`` and ``clip_in_place``, and without a GradScaler.
        accumulation_steps: a parameter is stepped when its gradient has been added to this many times since the last
            ``opt.step()``; with fewer ``opt.step()`` steps it, with more there is an error.

    Returns:
        A handle: ``remove()``, or the end of a ``with`` block, gives the optimizer its ordinary step back.

    Raises:
        TypeError: another optimizer; no module.
        ValueError: options that cannot be kept, differentiable groups, DistributedDataParallel, DTensors, parameters
            that ranks share out among them, a second release.
    """
    if not isinstance(opt, FusedOptimizer):
        raise errors.release_optimizer(f"{type(opt).__module__}.{type(opt).__qualname__}")
    opt = opt._bare()
    if not isinstance(model, torch.nn.Module):
        raise errors.release_model(type(model).__name__)
    if isinstance(accumulation_steps, bool) or not isinstance(accumulation_steps, int) or accumulation_steps < 1:
        raise errors.bad_option("accumulation_steps", "a whole number >= 1", accumulation_steps, "use 1 for none")
    if any(isinstance(m, torch.nn.parallel.DistributedDataParallel) for m in model.modules()):
        raise errors.release_ddp()
    if opt._release() is not None:
        raise errors.release_twice()
    in_opt = {id(p) for group in opt.param_groups for p in group["params"]}
    if not any(id(p) in in_opt for p in model.parameters()):
        raise errors.release_of_nothing()
    release = GradientRelease(model, opt, accumulation_steps)
    if opt.defaults["max_grad_norm"] is not None:
        warnings.warn(
            "gradient_release clips by the norm of the previous step (in the first step each gradient by its own), "
            "not by the exact global norm, which is known only after the backward",
            UserWarning,
            stacklevel=2,
        )
    return release


class GradientRelease:
    """The handle that :func:`gradient_release` returns; a context manager that removes itself."""

    def __init__(self, model: torch.nn.Module, opt: FusedOptimizer, accumulation_steps: int) -> None:
        self.accumulation_steps = accumulation_steps
        # The optimizer holds this object, and parameters hold their hooks: strong references would be a cycle.
        self._model = weakref.ref(model)
        self._opt = weakref.ref(opt)
        self._kind = type(opt).__name__
        self._singles: dict[int, _Single] = {}
        self._hooks: dict[int, Any] = {}
        self._done: list[_Done] = []
        self._entries = -1  # of opt.state that are in order
        self._norm: float | Tensor | None = None  # of the previous step; a 0-dim float64 tensor where devices know it
        self._scales: dict[torch.device | None, float | Tensor] = {}
        if opt.defaults["skip_nonfinite"]:
            reason = "parameters have been written when a later gradient turns out not to be finite"
            raise errors.release_option("skip_nonfinite", reason, "leave it out")
        if opt.defaults["clip_in_place"]:
            raise errors.release_option("clip_in_place", "there are no gradients left to be read", "leave it out")
        for group in opt.param_groups:
            self.refuse_group(group)
        if opt.__dict__.get("_partition") is not None:
            raise errors.release_distributed("one rank's part of the parameters (ZeroRedundancyOptimizer)")
        self.refuse_scaler(opt)
        opt._settle()  # buffers without a value, which the rows of a single parameter would not know of
        opt.__dict__.pop("_row_set", None)
        self.attach(opt)
        opt.__dict__["_gradient_release"] = self
        if opt._offload is not None:
            opt._offload.in_background = True

    def remove(self) -> None:
        """Puts everything back. Gradients that have not been used are left for ``opt.step()``."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()
        self._singles.clear()
        self._done.clear()
        opt = self._opt()
        if opt is not None and opt._release() is self:
            del opt.__dict__["_gradient_release"]
            if opt._offload is not None:
                opt._offload.in_background = False
                opt._offload.join()

    def __enter__(self) -> GradientRelease:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        opt = self._opt()
        parts = [self._kind, f"{len(self._hooks)} parameters", f"accumulation_steps={self.accumulation_steps}"]
        if opt is None or opt._release() is not self:
            parts.append("removed")
        elif opt.defaults["max_grad_norm"] is not None:
            parts.append("clips by the norm of the previous step, not by the exact global norm")
        return f"GradientRelease({', '.join(parts)})"

    # -- what the optimizer calls -------------------------------------------------------------------------------------

    def attach(self, opt: FusedOptimizer) -> None:
        """Puts a hook on every parameter that the model and the optimizer share and that has none."""
        self._index(opt)
        model = self._model()
        for p in () if model is None else model.parameters():
            if id(p) not in self._singles or id(p) in self._hooks:
                continue
            if not p.requires_grad and not (p.is_floating_point() or p.is_complex()):
                continue  # can never have a gradient
            self._hooks[id(p)] = on_complete_gradient(p, _hook(self))

    def refuse_group(self, group: dict[str, Any]) -> None:
        """Raises for a group that cannot be stepped during the backward."""
        if group.get("differentiable"):
            reason = "autograd would need gradients that are freed"
            raise errors.release_option("differentiable", reason, "leave it out")
        if any(shards.is_dtensor(p) for p in group["params"]):
            raise errors.release_distributed("a DTensor")

    def refuse_scaler(self, opt: FusedOptimizer) -> None:
        """Raises when a GradScaler has something to do with the optimizer."""
        known = opt.__dict__
        attached = [name for name in ("grad_scale", "found_inf") if known.get(name) is not None]
        if not attached:
            return
        # torch's scaler sets both, and would leave them behind for steps without it; one alone is the user's.
        if "grad_scale" in known and "found_inf" in known:
            del opt.grad_scale, opt.found_inf
        raise errors.release_with_scaler(f"opt.{attached[0]}, which a GradScaler sets")

    def forget_norm(self) -> None:
        """After loading a checkpoint: the norm of the previous step is that of another run."""
        self._norm = None

    def rows(self) -> list[Row]:
        """The rows of all parameters that have been stepped."""
        return [row for single in self._singles.values() for row in single.rows.all]

    def step_the_rest(self, opt: FusedOptimizer) -> StepStats:
        """Steps the parameters that have a gradient still; the results of the whole step. Called by ``opt.step()``."""
        for g, group in enumerate(opt.param_groups):
            for at, p in enumerate(group["params"]):
                if p.grad is None:
                    continue
                single = self._single(opt, p)
                if single is None or (single.group, single.at) != (g, at):
                    continue  # listed twice
                self._step(opt, single)
                if id(p) in self._hooks:
                    p.grad = None
        if opt._offload is not None:
            opt._offload.join()
            opt._offload.settle_gradients()
        for single in self._singles.values():
            single.fired = 0
        self._put_state_in_order(opt)
        done, self._done = self._done, []
        options = opt.defaults
        clips = options["max_grad_norm"] is not None
        if clips and done:
            self._norm = _last_finite(_total_norm(done), self._norm, options["max_grad_norm"])
            self._scales.clear()
        whole = _Whole(done, measured=clips or options["stats"], updated=options["stats"])
        return StepStats([cast(Buffer, whole)], partial(_names, opt.param_groups, [(d.group, d.at) for d in done]))

    def _put_state_in_order(self, opt: FusedOptimizer) -> None:
        """Entries are made in the order of the backward; a state_dict has them in that of the groups."""
        state = opt.state
        if len(state) == self._entries:
            return
        places = {key: i for i, key in enumerate(self._singles)}
        entries = sorted(state.items(), key=lambda item: places.get(id(item[0]), len(places)))
        state.clear()
        state.update(entries)
        self._entries = len(state)

    # -- during the backward ------------------------------------------------------------------------------------------

    def complete(self, p: Tensor) -> None:
        """A gradient has been added to ``p.grad``."""
        opt = self._opt()
        if opt is None or p.grad is None:
            return
        single = self._single(opt, p)
        if single is None:
            return  # taken out of the optimizer
        self.refuse_scaler(opt)
        if single.fired == self.accumulation_steps:
            raise errors.release_second_gradient(single.name(opt), self.accumulation_steps)
        single.fired += 1
        if single.fired < self.accumulation_steps:
            return
        if opt._offload is not None:
            opt._offload.copy(p)
        before = torch.is_grad_enabled()
        try:
            torch.set_grad_enabled(False)
            self._step(opt, single)
        finally:
            torch.set_grad_enabled(before)
        p.grad = None

    def _index(self, opt: FusedOptimizer) -> None:
        """Finds the place of each parameter again."""
        old, self._singles = self._singles, {}
        for g, group in enumerate(opt.param_groups):
            for at, p in enumerate(group["params"]):
                if id(p) not in self._singles:
                    single = self._singles[id(p)] = old.get(id(p)) or _Single(opt, p)
                    single.group, single.at = g, at
        for gone in self._hooks.keys() - self._singles.keys():  # another parameter may get its id
            self._hooks.pop(gone).remove()

    def _single(self, opt: FusedOptimizer, p: Tensor) -> _Single | None:
        single = self._singles.get(id(p))
        if single is None or not single.is_there(opt.param_groups):
            self._index(opt)
            single = self._singles.get(id(p))
        return single

    def _step(self, opt: FusedOptimizer, single: _Single) -> None:
        grads = single.refresh(opt)
        options, rows = opt.defaults, single.rows
        limit: float | None = options["max_grad_norm"]
        scale: float | Tensor | None = None
        counted = limit is not None and bool(single.param_groups[0].get("clip", True))
        # With a limit of 0 nothing follows from any norm.
        if counted and limit and self._norm is not None:
            scale = self._scale(rows.devices[0].device if rows.devices else None, self._norm, limit)
        ask = Request(
            rule=opt._rule.code,
            max_grad_norm=limit if counted and scale is None else None,
            skip_nonfinite=False,
            stats=options["stats"] or limit is not None,
            clip_in_place=False,
            grad_scale=scale,
            found_inf=None,
            report=None,
        )
        (buffer,) = run_step(rows, grads, ask, opt._rule, single.state, single.param_groups)
        self._done.append(_Done(cast(StatsBuffer | DeviceStats, buffer), scale, single.group, single.at))

    def _scale(self, device: torch.device | None, norm: float | Tensor, limit: float) -> float | Tensor:
        """What gradients are divided by: 1 / min(1, limit / (norm + 1e-6)), on this device or (None) on the host."""
        found = self._scales.get(device)
        if found is None:
            if device is None:
                found = min(_MOST, max(1.0, (float(norm) + _TINY) / limit))
            elif isinstance(norm, Tensor):
                there = norm.to(device, non_blocking=True)
                found = ((there + _TINY) / limit).clamp(1.0, _MOST).float()
            else:
                value = min(_MOST, max(1.0, (norm + _TINY) / limit))
                found = torch.full((), value, dtype=torch.float32, device=device)
            self._scales[device] = found
        return found


def _hook(release: GradientRelease) -> Any:
    held = weakref.ref(release)

    def hook(p: Tensor) -> None:
        release = held()
        if release is not None:
            release.complete(p)

    return hook


class _OwnState:
    """One parameter's entry of an optimizer's state, for a RowSet, which looks at all that there are."""

    def __init__(self, param: Tensor, everything: dict[Tensor, Any]) -> None:
        self._param = param
        self.everything = everything

    def values(self) -> list[Any]:
        entry = self.everything.get(self._param)
        return [] if entry is None else [entry]

    def get(self, param: Tensor, default: Any = None) -> Any:
        return self.everything.get(param, default)

    def __getitem__(self, param: Tensor) -> Any:
        return self.everything[param]

    def __setitem__(self, param: Tensor, entry: Any) -> None:
        self.everything[param] = entry

    def pop(self, param: Tensor, *default: Any) -> Any:
        return self.everything.pop(param, *default)


class _Single:
    """One parameter in the place of an optimizer: what a RowSet asks of one."""

    def __init__(self, opt: FusedOptimizer, param: Tensor) -> None:
        self.param = param
        self.group = self.at = 0
        self.first_position = 0
        self.fired = 0  # since the last opt.step()
        self._rule = opt._rule
        self.defaults = opt.defaults
        self._offload = opt._offload
        self.param_groups: list[dict[str, Any]] = []
        self.state = _OwnState(param, opt.state)
        self._opt = weakref.ref(opt)
        self.rows = RowSet(cast(FusedOptimizer, self))

    def is_there(self, groups: list[dict[str, Any]]) -> bool:
        """Whether the parameter still has the place in the groups that it was found at."""
        if self.group >= len(groups):
            return False
        params = groups[self.group]["params"]
        return self.at < len(params) and params[self.at] is self.param

    def refresh(self, opt: FusedOptimizer) -> list[Tensor | None]:
        """Takes over what the group says now, and brings the row up to date."""
        self.param_groups = [{**opt.param_groups[self.group], "params": [self.param]}]
        position = self.position(opt)
        if position != self.first_position:
            self.first_position = position
            self.rows.plan_again()
        if self.state.everything is not opt.state:
            self.state = _OwnState(self.param, opt.state)
        return self.rows.refresh(cast(FusedOptimizer, self))

    def position(self, opt: FusedOptimizer) -> int:
        """In the order of the state_dict."""
        return sum(len(g["params"]) for g in opt.param_groups[: self.group]) + self.at

    def name(self, opt: FusedOptimizer) -> str:
        return opt._name(self.group, self.position(opt))

    def _name(self, group: int, position: int) -> str:
        opt = self._opt()
        assert opt is not None  # it called this step
        return self.name(opt)


class _Done:
    """What one parameter's step has left."""

    def __init__(self, buffer: StatsBuffer | DeviceStats, scale: float | Tensor | None, group: int, at: int) -> None:
        self.buffer = buffer
        self.generation = buffer.generation
        self.scale = scale  # what the gradient was divided by
        self.group = group
        self.at = at

    @property
    def result(self) -> Tensor:
        """The Result, shape ``(RESULT_WIDTH,)``, float64, where it is."""
        return self.buffer.tensor[:RESULT_WIDTH]


def _names(groups: list[dict[str, Any]], places: list[tuple[int, int]]) -> list[tuple[Any, int, bool]]:
    """(name or position, row) in the order of the state_dict."""
    first = np.cumsum([0, *(len(g["params"]) for g in groups)]).tolist()
    out = []
    for i in sorted(range(len(places)), key=places.__getitem__):
        group, at = places[i]
        position = first[group] + at
        out.append((param_name(groups, group, position) or position, i, True))
    return out


def _root_of_squares(norms: Tensor) -> Tensor:
    """2-norm of a vector of norms, float64, without overflow."""
    top = norms.max()
    unit = torch.where((top > 0) & top.isfinite(), top, torch.ones_like(top))
    return (norms / unit).square().sum().sqrt() * unit


def _total_norm(done: Sequence[_Done]) -> float | Tensor:
    """The gradients' norm over all of a step, in units of the gradients. Waits for no device."""
    host: list[float] = []
    devices: dict[torch.device, list[_Done]] = {}
    for one in done:
        if isinstance(one.buffer, StatsBuffer):
            host.append(one.buffer["grad_norm"] * (1.0 if one.scale is None else float(one.scale)))
        else:
            devices.setdefault(one.result.device, []).append(one)
    on_host = math.hypot(*host)
    if not devices:
        return on_host
    parts = []
    for ones in devices.values():
        norms = torch.stack([one.result[0] for one in ones])
        # Of one step all scales of a device are one; those that have none are not counted, and their norms are 0.
        scale = next((one.scale for one in ones if one.scale is not None), 1.0)
        parts.append(_root_of_squares(norms) * scale)
    first = parts[0].device
    if host:
        parts.append(torch.full((), on_host, dtype=torch.float64, device=first))
    return (
        _root_of_squares(torch.stack([p.to(first, non_blocking=True) for p in parts])) if len(parts) > 1 else parts[0]
    )


def _last_finite(norm: float | Tensor, before: float | Tensor | None, limit: float) -> float | Tensor:
    """The norm, or the one before where it is inf or NaN (the limit itself where there was none)."""
    before = limit if before is None else before
    if not isinstance(norm, Tensor):
        return norm if math.isfinite(norm) else before
    if not isinstance(before, Tensor):
        before = torch.full_like(norm, before)
    return torch.where(norm.isfinite(), norm, before.to(norm.device, non_blocking=True))


class _Whole:
    """The steps of all parameters as one :class:`mo_fused.stats.Buffer`, put together when a field is asked for."""

    def __init__(self, done: list[_Done], measured: bool, updated: bool) -> None:
        self._done = done
        self.measured = measured
        self.updated = updated
        self._fields: dict[str, Tensor] | None = None

    @property
    def generation(self) -> int:
        """0 as long as no parameter's buffer has been used for another step."""
        return sum(one.buffer.generation != one.generation for one in self._done)

    def field(self, name: str) -> Tensor:
        """A 0-dim float64 on the first parameter's device."""
        if self._fields is None:
            self._fields = self._put_together()
        return self._fields[name].clone()

    def _put_together(self) -> dict[str, Tensor]:
        if not self._done:
            empty = dict.fromkeys(RESULT, 0.0) | {"clip_coef": 1.0, "grad_scale": 1.0}
            return {name: torch.tensor(value, dtype=torch.float64) for name, value in empty.items()}
        device = self._done[0].result.device
        table = torch.stack([one.result.to(device) for one in self._done])
        scales = torch.stack(
            [
                torch.as_tensor(1.0 if one.scale is None else one.scale, dtype=torch.float64).to(device)
                for one in self._done
            ]
        )
        out = {}
        for name in RESULT:
            column = table[:, RESULT_AT[name]]
            if name in _IN_GRADIENT_UNITS:
                column = column * scales
            if name in _NORMS:
                out[name] = _root_of_squares(column)
            elif name in _COUNTS:
                out[name] = column.sum()
            elif name == "clip_coef":
                out[name] = (column / scales).min()
            else:
                out[name] = column.max()
        return out

    def per_row(self) -> np.ndarray[Any, Any]:
        """The RowStats of every parameter, shape ``(n, 8)`` (this waits for devices)."""
        return self.per_row_later()()

    def per_row_later(self) -> Callable[[], np.ndarray[Any, Any]]:
        """What :meth:`per_row` gives now, whenever the result is called."""
        later = [(one.buffer.per_row_later(), one.scale) for one in self._done]

        def rows() -> np.ndarray[Any, Any]:
            out = np.zeros((len(later), len(ROW_FIELDS)))
            for i, (of_one, scale) in enumerate(later):
                out[i] = of_one()[0]
                if scale is not None:
                    out[i, _SCALED_ROWS] *= float(scale)
            return out

        return rows
