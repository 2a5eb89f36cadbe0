"""Optimizer and schedule that are usual for a kind of model, as plain values any of which can be replaced."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from mo_fused.errors import bad_option
from mo_fused.training.allowed import BELOW_ONE, FLAG, NOT_NEGATIVE, POSITIVE, SHARE, Allowed, choice, whole

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

LIBRARIES = ("mo_fused", "torch")
SCHEDULES: dict[str, tuple[str, ...]] = {
    "warmup_cosine": ("total_steps", "warmup_steps", "min_ratio"),
    "warmup_linear": ("total_steps", "warmup_steps", "min_ratio"),
    "warmup_stable_decay": ("total_steps", "warmup_steps", "min_ratio"),
    "warmup_constant": ("total_steps", "warmup_steps"),
    "inverse_sqrt": ("total_steps", "warmup_steps"),
}
"""The functions of ``training.schedules`` by name, and what each of them takes from a preset."""

ALLOWED: dict[str, Allowed] = {
    "optimizer": choice("AdamW", "SGD"),
    "lr": POSITIVE,
    "eps": POSITIVE,
    "momentum": BELOW_ONE,
    "nesterov": FLAG,
    "weight_decay": NOT_NEGATIVE,
    "max_grad_norm": POSITIVE,
    "schedule": choice(*SCHEDULES),
    "warmup_steps": whole(0),
    "min_lr_ratio": SHARE,
    "embedding_lr_factor": POSITIVE,
    "clip_embeddings": FLAG,
}


@dataclass(frozen=True)
class Preset:
    """An optimizer with its groups and schedule. ``dataclasses.replace(TEXT, lr=1e-3)`` changes a value.

    Args:
        optimizer: "AdamW", which reads ``betas`` and ``eps``, or "SGD", which reads ``momentum`` and ``nesterov``.
        lr: the peak rate.
        betas: decay rates of AdamW's two moments.
        eps: what AdamW adds to the denominator.
        momentum: of SGD.
        nesterov: SGD looks ahead by its momentum.
        weight_decay: of everything but biases and the parameters of norm layers, which have none.
        max_grad_norm: limit on the global gradient norm; ``None``: no clipping.
        schedule: a name in ``SCHEDULES``.
        warmup_steps: steps of warm-up; ``None``: 1 % of all steps, at least one.
        min_lr_ratio: the last rate as a share of the peak, for schedules that go down to one.
        embedding_lr_factor: factor on the rate of embedding tables.
        clip_embeddings: ``False`` leaves embedding tables out of the norm and of the clipping.

    Raises:
        ValueError: a value is outside its range.
    """

    optimizer: str = "AdamW"
    lr: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 0.01
    max_grad_norm: float | None = 1.0
    schedule: str = "warmup_cosine"
    warmup_steps: int | None = None
    min_lr_ratio: float = 0.1
    embedding_lr_factor: float = 1.0
    clip_embeddings: bool = True

    def __post_init__(self) -> None:
        for name, allowed in ALLOWED.items():
            value = getattr(self, name)
            if value is None and name in ("max_grad_norm", "warmup_steps"):
                continue
            if not allowed.test(value):
                raise bad_option(name, allowed.expected, value, "give the preset such a value")
        pair = isinstance(self.betas, (tuple, list)) and len(self.betas) == 2
        if not pair or not all(BELOW_ONE.test(beta) for beta in self.betas):
            raise bad_option("betas", "two numbers from 0 to below 1", self.betas, "give the preset such a pair")
        if self.nesterov and self.momentum == 0:
            raise bad_option(
                "momentum", "above 0 with nesterov", self.momentum, "give a momentum or leave nesterov out"
            )

    def groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """Parameter groups of ``model``: no decay of biases and norm layers, embedding tables as the preset says.

        Returns:
            ``ParamGroups``: groups for any torch optimizer, which ``print`` shows as a table.
        """
        from mo_fused.training.rules import NO_DECAY, embedding_rule, param_groups

        rules = [*NO_DECAY]
        if self.embedding_lr_factor != 1.0 or not self.clip_embeddings:
            # Only a rule that leaves out clipping may speak of it: whatever other rules say stays.
            embeddings = embedding_rule(self.embedding_lr_factor, clip=None if self.clip_embeddings else False)
            rules.append(replace(embeddings, optional=True))
        return param_groups(model, rules, lr=self.lr, weight_decay=self.weight_decay)

    def build_optimizer(self, model: nn.Module, library: str = "mo_fused", **options: Any) -> Optimizer:
        """The preset's optimizer over :meth:`groups` of ``model``.

        Args:
            model: the module to be trained, on its device.
            library: "mo_fused", whose step clips by ``max_grad_norm`` too, or "torch", whose optimizers do not clip:
                :class:`Trainer` does with its own ``max_grad_norm``; torch's ``clip_grad_norm_`` alone knows nothing of
                groups with ``"clip": False``.
            options: of the class, over the preset's; ``lr`` and ``weight_decay`` are those of the groups.

        Raises:
            ValueError: no such library, or the class refuses an option.
        """
        if library not in LIBRARIES:
            raise bad_option("library", f"one of {', '.join(LIBRARIES)}", library, "name one of these")
        # The groups have both, and what a group has wins over the optimizer's default.
        own: dict[str, Any] = {name: options.pop(name, getattr(self, name)) for name in ("lr", "weight_decay")}
        groups = replace(self, **own).groups(model)
        if self.optimizer == "AdamW":
            own.update(betas=tuple(self.betas), eps=self.eps)
        else:
            own.update(momentum=self.momentum, nesterov=self.nesterov)
        if library == "mo_fused":
            own["max_grad_norm"] = self.max_grad_norm
        home = import_module("mo_fused" if library == "mo_fused" else "torch.optim")
        optimizer: Optimizer = getattr(home, self.optimizer)(groups, **{**own, **options})
        return optimizer

    def build_schedule(self, optimizer: Optimizer, total_steps: int) -> LRScheduler:
        """The preset's schedule over ``total_steps`` optimizer steps; the groups' present rates are its peaks.

        Raises:
            ValueError: ``total_steps`` below 1, or fewer than the steps of warm-up.
        """
        values = {"total_steps": total_steps, "warmup_steps": self.warmup_steps, "min_ratio": self.min_lr_ratio}
        make = getattr(import_module("mo_fused.training.schedules"), self.schedule)
        schedule: LRScheduler = make(optimizer, **{name: values[name] for name in SCHEDULES[self.schedule]})
        return schedule


TEXT = Preset()
"""Language models: AdamW 0.9/0.95, clipping at 1, cosine to a tenth."""

VISION = Preset(optimizer="SGD", lr=0.1, weight_decay=5e-4, max_grad_norm=None, min_lr_ratio=0.0)
"""Convolutional networks: SGD with momentum 0.9, no clipping, cosine to zero. Nesterov is ``replace(VISION,
nesterov=True)``."""

RECOMMENDATION = Preset(lr=1e-3, betas=(0.9, 0.999), embedding_lr_factor=0.3, clip_embeddings=False)
"""Click prediction over large embedding tables: AdamW, tables at 0.3 times the rate and outside of the clipping."""

PRESETS = {"text": TEXT, "vision": VISION, "recommendation": RECOMMENDATION}
