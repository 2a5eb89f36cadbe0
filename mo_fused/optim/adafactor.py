"""Adafactor: torch's class on the fused step, with the options of the other convention in wide use."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import errors
from .adamw import STEP_OPTIONS_DOC
from .base import OPTIONS, FusedOptimizer, check_options
from .rules import AdafactorRule

_ALIASES = {"clip_threshold": "d", "decay_rate": "beta2_decay"}


class Adafactor(FusedOptimizer, torch.optim.Adafactor):
    __doc__ = f"""torch.optim.Adafactor with the whole step fused (Shazeer & Stern 2018, arXiv:1804.04235).

    Of a parameter of two or more dimensions only the means of the squared gradient over columns and over rows of its
    last two are kept; a step reads the gradient three times and the parameter once, and writes the parameter. Arguments
    before ``scale_parameter`` are torch's, in torch's order.

    State: ``step``; ``row_var`` ``(..., n, 1)`` and ``col_var`` ``(..., 1, m)``, or ``variance`` for fewer than two
    dimensions; with ``beta1`` also ``exp_avg``. Second moments are float32 (float64 for float64 parameters).

    Keyword-only options beyond torch's, which groups may have too (``like_transformers`` sets them all at once):

    Args:
        scale_parameter: multiply the step size by max(eps[1], RMS of the parameter).
        relative_step: None: min(lr, 1/sqrt(step)), as torch; False: ``lr`` as it is; True: min(0.01, 1/sqrt(step)), and
            ``lr`` is not used.
        warmup_init: with ``relative_step=True``, begin with 1e-6 * step instead of 0.01.
        clip_threshold: another name of ``d``.
        decay_rate: another name of ``beta2_decay``.
        beta1: keep a first moment of the updates with this decay. None: none.
        transformers_form: ``eps[0]`` is added to the squared gradient instead of bounding its mean and the root from
            below, and weight decay is multiplied by the scaled step size instead of ``lr``.

    Keyword-only options of the whole optimizer, as of the others; ``master_weights`` and ``seed`` are not among them:

    Args:{STEP_OPTIONS_DOC}
        state_dtype: of the first moment, where ``beta1`` asks for one: "fp32", "bf16", or None for the type that the
            update is computed in. An existing one is converted to the dtype that is named, and stays with None.

    ``foreach`` is stored and shown; it does not choose the backend (``opt.explain()`` tells which runs).
    """

    _rule = AdafactorRule()

    def __init__(
        self,
        params: Any,
        lr: float | Tensor | None = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        scale_parameter: bool = True,
        relative_step: bool | None = None,
        warmup_init: bool = False,
        clip_threshold: float | None = None,
        decay_rate: float | None = None,
        beta1: float | None = None,
        transformers_form: bool = False,
        state_dtype: str | None = None,
        max_grad_norm: float | None = None,
        skip_nonfinite: bool = False,
        clip_in_place: bool = False,
        stats: bool = False,
        amp: str = "fused",
        backend: str | None = None,
        offload: str | None = None,
        offload_gradients: bool = False,
        offload_fraction: float = 1.0,
    ) -> None:
        arguments = locals()
        given = {name: arguments[name] for name in OPTIONS if name in arguments}
        options = check_options({**OPTIONS, **given}, quantises=False)
        own = {name: arguments[name] for name in AdafactorRule.group_keys}
        _check(own, lr)
        if clip_threshold is not None:
            d = _one_of("clip_threshold", clip_threshold, d, 1.0)
        if decay_rate is not None:
            beta2_decay = _one_of("decay_rate", decay_rate, beta2_decay, -0.8)
        # What torch's constructor refuses goes past it: a rate of None, and transformers' thresholds below 1.
        self._own_defaults = {**own, "lr": lr, "d": d}
        stand_ins = 1e-2 if lr is None else lr, max(1.0, d) if transformers_form and d > 0.0 else d
        try:
            super().__init__(
                params,
                stand_ins[0],
                beta2_decay,
                eps,
                stand_ins[1],
                weight_decay,
                foreach=foreach,
                maximize=maximize,
            )
        finally:
            self.__dict__.pop("_own_defaults")
        self.defaults.update(own, lr=lr, d=d)
        self._adopt(options)

    @classmethod
    def like_transformers(
        cls,
        params: Any,
        lr: float | Tensor | None = None,
        eps: tuple[float, float] = (1e-30, 1e-3),
        clip_threshold: float = 1.0,
        decay_rate: float = -0.8,
        beta1: float | None = None,
        weight_decay: float = 0.0,
        scale_parameter: bool = True,
        relative_step: bool = True,
        warmup_init: bool = False,
        **options: Any,
    ) -> Adafactor:
        """Adafactor with the signature and the results of the transformers library's.

        ``lr=None`` goes with ``relative_step=True``. Schedulers work as with torch's classes, and so does
        ``transformers.optimization.AdafactorSchedule``. ``options``: the keyword-only options of this class.

        Raises:
            ValueError: ``lr`` together with ``relative_step=True``, or ``warmup_init=True`` without it.
        """
        if lr is not None and relative_step:
            raise ValueError("Cannot combine manual `lr` and `relative_step=True` options")
        if warmup_init and not relative_step:
            raise ValueError("`warmup_init=True` requires `relative_step=True`")
        return cls(
            params,
            lr,
            decay_rate,
            eps,
            clip_threshold,
            weight_decay,
            scale_parameter=scale_parameter,
            relative_step=relative_step,
            warmup_init=warmup_init,
            beta1=beta1,
            transformers_form=True,
            **options,
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch.optim.Optimizer.add_param_group; ``clip_threshold`` and ``decay_rate`` are understood."""
        for alias, name in _ALIASES.items():
            if alias in param_group:
                param_group[name] = param_group.pop(alias)
        defaults = {**self.defaults, **self.__dict__.get("_own_defaults", {})}
        own = {name: param_group.get(name, defaults[name]) for name in (*AdafactorRule.group_keys, "lr", "d")}
        _check(own, own["lr"])
        super().add_param_group(param_group)
        self.param_groups[-1].update(own)

    def _get_lr(self, group: dict[str, Any], entry: dict[str, Any]) -> float:
        """The step size of a group's parameter with this state: what transformers' AdafactorSchedule asks for.

        Of a DTensor, whose parts are on several ranks, all of them have to ask.
        """
        step = float(entry.get("step", 0.0))
        lr = group["lr"]
        if step > 0 and group["relative_step"] is not False:
            cap = lr if group["relative_step"] is None else 1e-6 * step if group["warmup_init"] else 1e-2
            lr = min(float(cap), step**-0.5)
        scale = 1.0
        if group["scale_parameter"]:
            param = next((p for p in group["params"] if self.state.get(p) is entry), None)
            rms = 0.0 if param is None else float(param.detach().double().square().mean().sqrt())
            scale = max(group["eps"][1], rms)
        return 0.0 if lr is None else scale * float(lr)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As :meth:`FusedOptimizer.load_state_dict`; checkpoints of the transformers library's class load too."""
        super().load_state_dict(_from_transformers(state_dict))

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # torch's Optimizer makes it a default, its Adafactor has no such key
            group.pop("differentiable", None)
        for place in (self.defaults, *self.param_groups):  # of a pickled torch.optim.Adafactor
            for name, value in _TORCH_FORM.items():
                place.setdefault(name, value)


_TORCH_FORM: dict[str, Any] = {
    "scale_parameter": True,
    "relative_step": None,
    "warmup_init": False,
    "beta1": None,
    "transformers_form": False,
}


def _one_of(alias: str, value: float, torchs: float, default: float) -> float:
    name = _ALIASES[alias]
    if torchs not in (default, value):
        raise errors.bad_option(alias, f"absent, or equal to {name}={torchs}", value, f"pass {name} alone")
    return value


def _check(own: dict[str, Any], lr: Any) -> None:
    """Refuses options of a group that contradict each other."""
    for name in ("scale_parameter", "warmup_init", "transformers_form"):
        if not isinstance(own[name], bool):
            raise errors.bad_option(name, "True or False", own[name], "pass a bool")
    relative, beta1 = own["relative_step"], own["beta1"]
    if relative is not None and not isinstance(relative, bool):
        raise errors.bad_option(
            "relative_step", "True, False or None", relative, "None is torch's min(lr, 1/sqrt(step))"
        )
    if lr is None and relative is not True:
        raise errors.bad_option("lr", "a number", lr, "None goes with relative_step=True alone")
    if own["warmup_init"] and relative is not True:
        raise errors.bad_option("warmup_init", "False", True, "it goes with relative_step=True alone")
    if beta1 is not None and not 0.0 <= beta1 < 1.0:
        raise errors.bad_option("beta1", "in [0, 1) or None", beta1, "None keeps no first moment")


_SLOTS = {"exp_avg_sq_row": "row_var", "exp_avg_sq_col": "col_var", "exp_avg_sq": "variance"}


def _from_transformers(state_dict: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint of transformers' class under the names of this one; any other as it is."""
    groups = state_dict.get("param_groups", [])
    if not any("decay_rate" in g and "clip_threshold" in g for g in groups):
        return state_dict
    renamed = []
    for saved in groups:
        group = {_ALIASES.get(k, k): v for k, v in saved.items()}
        renamed.append({"foreach": None, "maximize": False, **group, "transformers_form": True})
    state = {}
    for key, entry in state_dict["state"].items():
        out = {_SLOTS.get(k, k): v for k, v in entry.items() if k != "RMS"}
        if "row_var" in out:
            out["row_var"], out["col_var"] = out["row_var"].unsqueeze(-1), out["col_var"].unsqueeze(-2)
        state[key] = out
    return {**state_dict, "state": state, "param_groups": renamed}
