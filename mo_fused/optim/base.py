"""The only ``step()``: what every optimizer of this package does, whatever its rule."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import dispatch, errors, masters, quantised
from ..distributed import partition, shards
from ..offload.engine import Offload, check_offload
from ..offload.files import mapped
from ..request import Request
from ..state import STATE_DTYPES, Loader
from ..stats import Buffer, StepStats
from ..tracing import not_compiled, phase
from . import execute, hooked, shared
from .formats import Formats
from .planning import Row
from .rows import RowSet
from .rules import Rule

if TYPE_CHECKING:
    from ..distributed.ddp_norms import NormHook
    from ..release import GradientRelease

OPTIONS: dict[str, Any] = {
    "max_grad_norm": None,
    "skip_nonfinite": False,
    "clip_in_place": False,
    "stats": False,
    "amp": "fused",
    "backend": None,
    "state_dtype": None,
    "master_weights": None,
    "seed": 0,
    "offload": None,
    "offload_gradients": False,
    "offload_fraction": 1.0,
}
"""Options of this package with their defaults. They live in ``defaults`` and never in groups or checkpoints."""


@dataclass(frozen=True)
class Explanation:
    """How one parameter is stepped."""

    name: str
    """Its name when the optimizer was given named parameters, else its position in the state_dict."""
    group: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    backend: str
    """"cpu", "cuda", "triton" or "eager", or "torch" for torch's single-tensor step (Adafactor: the reference's)."""
    reason: str

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape)) or "scalar"
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.name:<32} {self.group:>5}  {shape:<16} {dtype:<9} {self.backend:<8} {self.reason}"


class Explanations(list[Explanation]):
    """The list that ``opt.explain()`` returns; printed, it is a table."""

    def __str__(self) -> str:
        head = f"{'parameter':<32} {'group':>5}  {'shape':<16} {'dtype':<9} {'backend':<8} why"
        return "\n".join([head, *map(str, self)])


def check_options(options: dict[str, Any], quantises: bool = True) -> dict[str, Any]:
    """The options of this package, validated; raises before anything is constructed.

    ``quantises``: this optimizer can keep moments in fewer than 16 bits.
    """
    norm = options["max_grad_norm"]
    if norm is not None and (isinstance(norm, bool) or not isinstance(norm, (int, float, Tensor)) or not norm >= 0.0):
        raise errors.bad_option("max_grad_norm", "a number >= 0 or None", norm, "use None to leave gradients unclipped")
    for name in ("skip_nonfinite", "clip_in_place", "stats"):
        if not isinstance(options[name], bool):
            raise errors.bad_option(name, "True or False", options[name], "pass a bool")
    if options["amp"] not in ("fused", "torch"):
        raise errors.bad_option(
            "amp",
            "'fused' or 'torch'",
            options["amp"],
            "'fused' unscales inside the step, 'torch' leaves it to the scaler, for frameworks that clip by themselves",
        )
    dispatch.requested(options["backend"])
    check_offload(options)
    _check_formats(options, (*STATE_DTYPES, *quantised.QUANTISED) if quantises else tuple(STATE_DTYPES))
    return {**options, "max_grad_norm": None if norm is None else float(norm)}


def _check_formats(options: dict[str, Any], state_dtypes: tuple[str, ...]) -> None:
    if options["state_dtype"] not in (None, *state_dtypes):
        known = ", ".join(map(repr, state_dtypes))
        remedy = "pass one of the names, or None for the parameter's dtype"
        raise errors.bad_option("state_dtype", f"{known} or None", options["state_dtype"], remedy)
    if options["master_weights"] not in (None, *masters.MODES):
        known = ", ".join(map(repr, masters.MODES))
        remedy = "pass one of the names, or None for parameters without"
        raise errors.bad_option("master_weights", f"{known} or None", options["master_weights"], remedy)
    if isinstance(options["seed"], bool) or not isinstance(options["seed"], int):
        raise errors.bad_option("seed", "a whole number", options["seed"], "pass an int, or leave it out for 0")


def param_name(groups: list[dict[str, Any]], group: int, position: int) -> str | None:
    """The name that the user gave the parameter at this position of the state_dict, if names were given."""
    names = groups[group].get("param_names")
    return str(names[position - sum(len(g["params"]) for g in groups[:group])]) if names else None


def _stats_rows(
    groups: list[dict[str, Any]], rows: list[Row], told: bool, hidden: bool = False
) -> list[tuple[Any, int, bool]]:
    """(name or position, row in the buffer, whether its values are known) in the order of the state_dict.

    ``told``: ranks have told each other about the parts of a parameter. ``hidden``: nobody knows of single rows.

    No method: statistics that hold the optimizer which holds them would keep its parameters alive.
    """
    order = sorted(range(len(rows)), key=lambda i: rows[i].position)
    names = [param_name(groups, rows[i].group, rows[i].position) or rows[i].position for i in order]
    return [(name, i, not hidden and (told or not rows[i].cut.dims)) for name, i in zip(names, order, strict=True)]


def run_step(
    rows: RowSet,
    grads: list[Tensor | None],
    ask: Request,
    rule: Rule,
    state: Any,
    groups: list[dict[str, Any]],
    hook: NormHook | None = None,
) -> list[Buffer]:
    """One step of these rows and what has to be noted after it; where its statistics are.

    ``hook``: has measured the gradients, if they are still what they were.
    """
    run: Callable[..., bool]
    on_devices = bool(rows.devices) or (ask.gated and rows.offloaded is not None and bool(rows.offloaded.on_devices))
    run = execute.device_step if on_devices else execute.host_step
    if shared.needed(rows, ask):
        run = shared.shared_step
    elif hook is not None and hooked.usable(rows, hook, ask):
        run = partial(hooked.hooked_step, hook=hook)
    on_host_skipped = run(rows, grads=grads, ask=ask, rule=rule, state=state, groups=groups)
    skipped = on_host_skipped and not rows.devices  # as far as the host knows
    if not rows.devices:
        rows.settle(skipped, grads)
    if not skipped:
        _raise_versions(rows, grads, ask.clip_in_place)
    if rule.factored:
        measured = ask.measured if rows.devices else ask.gated  # before the decision
        rows.params_are_known(measured, on_host_skipped)
    return execute.buffers(rows)


def _raise_versions(rows: RowSet, grads: list[Tensor | None], clip_in_place: bool) -> None:
    """Raw writes do not raise the version counters, and a stale backward would be wrong in silence."""
    params, written = rows.active_params(grads), grads
    if rows.eager:  # whose rows, the host's, are written by torch itself, unless they are offloaded
        first = len(rows.host)
        params = [p for p, g in zip(rows.row_params[first:], grads[first:], strict=True) if g is not None]
        params += [r.param for r, g in zip(rows.host, grads, strict=False) if r.home is not None and g is not None]
        written = grads[first:]
    if rows.exchange:
        params = [*params, *(shards.local(p) for p in params if shards.is_dtensor(p))]
    torch.autograd.graph.increment_version(params)
    if clip_in_place:
        torch.autograd.graph.increment_version([g for g in written if g is not None])


class FusedOptimizer(torch.optim.Optimizer):
    """Mixin over a torch.optim class: the fused step, its options, statistics, and exact loading."""

    _rule: Rule
    _options: Mapping[str, Any] = OPTIONS
    first_position = 0
    """What is added to a parameter's position for the key of its random numbers: see release.py."""
    grad_scale: Tensor | None
    found_inf: Tensor | None

    def _adopt(self, options: dict[str, Any]) -> None:
        """Called at the end of a constructor: our options go to ``defaults`` alone."""
        self.defaults.update(options)
        for group in self.param_groups:
            self._drop_options(group)
        _ = self._offload  # hooks have to be there before the first backward
        if (group := partition.zero_group()) is not None:
            self.__dict__["_partition"] = group

    def _bare(self) -> FusedOptimizer:
        """The optimizer itself, also where this is Lightning's or Fabric's wrapper around it.

        Those take on its class, so that our methods run on the wrapper, which has no attributes of the optimizer: it
        passes on what neither it nor the class has.
        """
        if "param_groups" in self.__dict__:
            return self
        inside = getattr(self, "optimizer", None)
        return inside if isinstance(inside, FusedOptimizer) else self

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """What a GradScaler asks before it leaves unscaling and skipping to the step.

        No when somebody has replaced ``opt.step`` to see whether it is called (Accelerate holds its schedulers back by
        that): the scaler then unscales by itself and does not call the step on overflow. torch's schedulers replace it
        too, but mark what they put there.
        """
        if self._release() is not None:
            return True  # so that the step is called, and refuses the scaler
        watched = self._bare().__dict__.get("step")
        if watched is None or getattr(watched, "__func__", None) is type(self).step:
            return bool(self.defaults["amp"] == "fused")
        return bool(self.defaults["amp"] == "fused") and hasattr(watched, "_wrapped_by_lr_sched")

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, value: bool) -> None:
        """torch's constructors set it when ``fused=True``; here ``amp`` decides."""

    @classmethod
    def _drop_options(cls, group: dict[str, Any]) -> None:
        for name in cls._options:
            group.pop(name, None)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, as torch.optim.Optimizer.add_param_group; ``"clip": False`` takes it out of clipping.

        Raises:
            ValueError: an option of this package stands in the group, or gradient release cannot take the group.
        """
        if partition.zero_group() is not None:  # which has written its defaults, our options too, into its groups
            param_group = {key: value for key, value in param_group.items() if key not in self._options}
        for name in self._options:
            if name in param_group:
                raise errors.bad_option(
                    f"the group key {name!r}", "absent", param_group[name], f"pass {name}= to the constructor"
                )
        for name, value in self._options.items():  # a derived class may call torch.optim.Optimizer's constructor alone
            self.defaults.setdefault(name, value)
        release = self._release()
        if release is not None:
            release.refuse_group(param_group)
        super().add_param_group(param_group)
        self._drop_options(self.param_groups[-1])
        if (offload := self._bare().__dict__.get("_offload_engine")) is not None:
            offload.attach(self)
        if release is not None:
            release.attach(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        new.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        if "_partition" in self.__dict__:  # which no copy of the state carries
            new.__dict__["_partition"] = self.__dict__["_partition"]
        return new

    def __getstate__(self) -> dict[str, Any]:
        self._settle()
        found: dict[str, Any] = super().__getstate__()
        return found

    def state_dict(self) -> dict[str, Any]:
        """As torch.optim.Optimizer.state_dict. States in files are mapped: they are read when somebody reads them."""
        self._settle()
        found = super().state_dict()
        if self._offload is not None:
            found["state"] = mapped(found["state"])
        return found

    def _settle(self) -> None:
        """A momentum buffer that a skipped first step on a device left without a value is no state."""
        kept = self._bare().__dict__
        if (offload := kept.get("_offload_engine")) is not None:
            offload.join()
        if "_row_set" in kept:
            self._rows().settle_devices()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for name, value in self._options.items():
            self.defaults.setdefault(name, value)
        for group in self.param_groups:
            self._drop_options(group)
            for name, value in self.defaults.items():
                if name not in self._options:
                    group.setdefault(name, value)
        self.__dict__.pop("_row_set", None)
        _ = self._offload
        release = self._release()
        if release is not None:
            release.forget_norm()

    # -- the step -----------------------------------------------------------------------------------------------------

    @not_compiled
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Performs one optimization step: unscale, non-finite check, clip, update, statistics, all in one pass or two.

        Args:
            closure: re-evaluates the model under ``torch.enable_grad()`` and returns the loss.

        Returns:
            The closure's result, or None.
        """
        loss = None
        if (release := self._release()) is not None:
            release.refuse_scaler(self)
        self._look_at_scaler()
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        before = torch.is_grad_enabled()
        try:
            torch.set_grad_enabled(bool(self.defaults.get("differentiable")))
            if (release := self._release()) is None:
                self._fused_step()
            else:
                self.__dict__["_last_step"] = release.step_the_rest(self)
        finally:
            torch.set_grad_enabled(before)
        return loss

    def _release(self) -> GradientRelease | None:
        """What steps each parameter during the backward (see :func:`mo_fused.gradient_release`), if anything does."""
        return self._bare().__dict__.get("_gradient_release")

    @property
    def _offload(self) -> Offload | None:
        """What keeps states away from the parameters, if ``offload`` asks for it."""
        bare = self._bare()
        found: Offload | None = bare.__dict__.get("_offload_engine")
        if found is None and bare.defaults.get("offload") is not None:
            found = bare.__dict__["_offload_engine"] = Offload(bare)
        return found

    def _look_at_scaler(self) -> None:
        """A scaler that unscales by itself works on ``.grad``, which may be on the host already."""
        offload = self._offload
        if offload is None or "found_inf" not in self.__dict__:
            return
        unscaled = getattr(self, "grad_scale", None) is None
        if not offload.takes_gradients:
            if unscaled:  # an edit that raises no version
                offload.forget_copies()
        elif unscaled or "_found_inf_report" not in self.__dict__:
            for name in ("grad_scale", "found_inf", "_found_inf_report"):  # which would be there in later steps too
                self.__dict__.pop(name, None)
            raise errors.offload_scaler("torch's scaler, or a scaler whose unscale_ was called")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch.optim.Optimizer.zero_grad; gradients that were taken to the host are forgotten too."""
        super().zero_grad(set_to_none)
        if self._release() is None and (offload := self._offload) is not None:
            offload.discard_gradients()

    def _rows(self) -> RowSet:
        bare = self._bare()
        rows: RowSet | None = bare.__dict__.get("_row_set")
        if rows is None:
            rows = bare.__dict__["_row_set"] = RowSet(bare)
        return rows

    def _fused_step(self) -> None:
        options = self.defaults
        rows = self._rows()
        with phase("table"):
            grads = rows.refresh(self)
        ask = Request(
            rule=self._rule.code,
            max_grad_norm=options["max_grad_norm"],
            skip_nonfinite=options["skip_nonfinite"],
            stats=options["stats"],
            clip_in_place=options["clip_in_place"],
            # Of DTensors torch's scaler says it in DTensors; what other ranks have found, the step tells.
            grad_scale=shards.present(getattr(self, "grad_scale", None)),
            found_inf=shards.present(getattr(self, "found_inf", None)),
            report=self.__dict__.pop("_found_inf_report", None),
        )
        hook: NormHook | None = self.__dict__.get("_norm_hook")
        hits = 0 if hook is None else hook.hits
        with phase("step"):
            buffers = run_step(rows, grads, ask, self._rule, self.state, self.param_groups, hook)
        rows.settled = {}
        if self._offload is not None:
            self._offload.settle_gradients()
        hidden = hook is not None and hook.hits > hits and bool(rows.devices)
        names = partial(_stats_rows, self.param_groups, rows.all, options["stats"], hidden)
        self.__dict__["_last_step"] = StepStats(buffers, names, rows.all)

    # -- what it tells ------------------------------------------------------------------------------------------------

    @property
    def last_step(self) -> StepStats | None:
        """What the last step measured, or None before the first (see :class:`mo_fused.StepStats`)."""
        return self._bare().__dict__.get("_last_step")

    def _name(self, group: int, position: int) -> str:
        return param_name(self.param_groups, group, position) or f"parameter {position} (group {group})"

    def explain(self) -> Explanations:
        """Which backend steps each parameter, and why. Parameters without a gradient say what they would get."""
        rows = self._rows()
        release = self._release()
        known = {id(r.param): r for r in (rows.all if release is None else release.rows())}
        out = Explanations()
        position = 0
        for g, group in enumerate(self.param_groups):
            for p in group["params"]:
                row = known.get(id(p))
                if row is not None:
                    backend, reason = row.backend, row.reason
                else:
                    grad = p.grad if p.grad is not None else p
                    backend, reason = rows.planner.expected(group, p, grad)
                    reason = f"{reason} (no step yet)"
                name = param_name(self.param_groups, g, position) or str(position)
                out.append(Explanation(name, g, tuple(p.shape), p.dtype, backend, reason))
                position += 1
        return out

    # -- loading ------------------------------------------------------------------------------------------------------

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a checkpoint of this class, of torch's, or of an older version of either.

        State keeps the dtype it was saved with (torch casts it to the parameter's) and is copied, never shared with
        ``state_dict``; ``step`` may be any kind of number; missing group options and slots are filled. State of another
        shape and groups whose named parameters are in another order are refused, before anything is changed.

        Raises:
            ValueError: the checkpoint does not fit these parameters.
        """
        if (bare := self._bare()) is not self:  # torch would load into the wrapper
            bare.load_state_dict(state_dict)
            return
        self._settle()
        loader = Loader(self.param_groups, self._rule, self._offload)
        taken = self.register_load_state_dict_pre_hook(lambda _, sd: loader.take(sd))
        put = self.register_load_state_dict_post_hook(lambda _: loader.put(self.state), prepend=True)
        try:
            super().load_state_dict(state_dict)
        finally:
            taken.remove()
            put.remove()
        if changes := Formats(self.defaults).changes(self.state):
            warnings.warn(f"this checkpoint is kept in other formats: {'; '.join(changes)}", UserWarning, stacklevel=2)
