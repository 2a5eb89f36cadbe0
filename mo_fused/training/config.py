"""Every setting of a training run, with its default, checked in one place (no torch needed)."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from mo_fused.training import presets
from mo_fused.training.allowed import BELOW_ONE, NOT_NEGATIVE, TEXT, Allowed, choice, whole
from mo_fused.training.errors import InputError, bad_input
from mo_fused.training.presets import LIBRARIES, RECOMMENDATION, SCHEDULES, VISION, Preset

TASKS = ("lm", "vision", "ctr")
OPTIMIZERS = LIBRARIES
PRECISIONS = ("fp32", "bf16", "fp16")
OPTIONS = (
    *("task", "text", "optimizer", "steps", "seed", "device", "run_dir", "lr", "batch_size", "warmup_steps"),
    *("precision", "accumulate", "checkpoint_every", "profile"),
)
"""The settings that are options of the command line, too; every setting is a key of a config file."""

_SIZE = whole(1, 2**20)
ALLOWED: dict[str, Allowed] = {
    **{name: allowed for name, allowed in presets.ALLOWED.items() if name != "optimizer"},
    "task": choice(*TASKS),
    "text": TEXT,
    "optimizer": choice(*OPTIMIZERS),
    "steps": whole(1),
    "seed": whole(0, 2**63 - 1),
    "device": TEXT,
    "run_dir": TEXT,
    "batch_size": _SIZE,
    "context": _SIZE,
    "layers": _SIZE,
    "heads": _SIZE,
    "width": _SIZE,
    "beta1": BELOW_ONE,
    "beta2": BELOW_ONE,
    "max_grad_norm": NOT_NEGATIVE,
    "validate_every": whole(1),
    "precision": choice(*PRECISIONS),
    "accumulate": _SIZE,
    "checkpoint_every": whole(0),
    "keep_checkpoints": whole(1),
    "profile": whole(0),
}
"""What each setting may be."""

TASK_PRESETS: dict[str, Preset] = {
    "lm": replace(presets.TEXT, lr=3e-3, warmup_steps=100),
    "vision": replace(VISION, warmup_steps=66),
    "ctr": replace(RECOMMENDATION, lr=6e-3, warmup_steps=60),
}
_TABLES = ("embedding_lr_factor", "clip_embeddings")


def _settings(preset: Preset, *without: str) -> dict[str, Any]:
    """The preset as settings; those that its optimizer has no use for are left out."""
    shared = ("lr", "weight_decay", "schedule", "warmup_steps", "min_lr_ratio", *_TABLES)
    own = ("eps",) if preset.optimizer == "AdamW" else ("momentum", "nesterov")
    settings = {name: getattr(preset, name) for name in (*shared, *own) if name not in without}
    if preset.optimizer == "AdamW":
        settings.update(beta1=preset.betas[0], beta2=preset.betas[1])
    return {**settings, "max_grad_norm": preset.max_grad_norm or 0.0}


TASK_DEFAULTS: dict[str, dict[str, Any]] = {
    "lm": _settings(TASK_PRESETS["lm"])
    | dict(steps=700, batch_size=8, validate_every=100, text=None, context=128, layers=4, heads=6, width=192),
    "vision": _settings(TASK_PRESETS["vision"], *_TABLES)
    | dict(steps=660, batch_size=64, validate_every=110, width=16),
    "ctr": _settings(TASK_PRESETS["ctr"]) | dict(steps=600, batch_size=256, validate_every=100, context=20, width=16),
}
"""The settings whose default depends on the task, by task. What a task does not list is what it does not have."""

_OF_TASKS = {name for defaults in TASK_DEFAULTS.values() for name in defaults}
_BY_TASK: Any = None  # Any: after construction the value is there, and readers shall not have to rule out None


@dataclass(frozen=True)
class TrainConfig:
    """Settings of one run; each task's defaults train it in less than two minutes on two cores.

    ``None`` stands for the default. What depends on the task is taken from :data:`TASK_DEFAULTS`, so that every value
    is concrete after construction; only what the task does not have stays ``None`` (``layers`` of "vision", ``beta1``
    where the optimizer is SGD, ``min_lr_ratio`` of a schedule without a minimum). ``text=None`` is the prose inside
    Python, ``device=None`` the best device, ``run_dir=None`` a new folder under ``runs/``; a folder that is named is
    resumed if it holds an earlier run.

    ``steps``, ``warmup_steps``, ``validate_every`` and ``checkpoint_every`` count optimizer steps, each of
    ``accumulate`` batches of ``batch_size`` samples; ``checkpoint_every=0`` is a checkpoint at the end only.
    ``context`` counts bytes ("lm") or items of the history ("ctr"). ``width`` is the size of embeddings, or the
    channels of the first layer ("vision"). ``max_grad_norm=0`` is no clipping. ``profile`` is the number of steps to
    profile.

    Raises:
        InputError: a value is outside its range, or not one of the task's; the message names an option as the command
            line spells it.
    """

    task: str = "lm"
    text: str | None = None
    optimizer: str = "mo_fused"
    steps: int = _BY_TASK
    seed: int = 0
    device: str | None = None
    run_dir: str | None = None
    lr: float = _BY_TASK
    batch_size: int = _BY_TASK
    context: int = _BY_TASK
    layers: int = _BY_TASK
    heads: int = _BY_TASK
    width: int = _BY_TASK
    warmup_steps: int = _BY_TASK
    min_lr_ratio: float = _BY_TASK
    beta1: float = _BY_TASK
    beta2: float = _BY_TASK
    eps: float = _BY_TASK
    weight_decay: float = _BY_TASK
    max_grad_norm: float = _BY_TASK
    validate_every: int = _BY_TASK
    schedule: str = _BY_TASK
    momentum: float = _BY_TASK
    nesterov: bool = _BY_TASK
    embedding_lr_factor: float = _BY_TASK
    clip_embeddings: bool = _BY_TASK
    precision: str = "fp32"
    accumulate: int = 1
    checkpoint_every: int = 100
    keep_checkpoints: int = 3
    profile: int = 0

    def __post_init__(self) -> None:
        for name, allowed in ALLOWED.items():
            value = getattr(self, name)
            by_default = value is None and (name in _OF_TASKS or name in ("device", "run_dir"))
            if not by_default and not allowed.test(value):
                raise _bad(name, allowed.expected, value)
        self._fill_in(TASK_DEFAULTS[self.task])
        if self.heads is not None and self.width % self.heads:
            raise _bad("width", f"a multiple of the number of heads ({self.heads})", self.width)
        if self.nesterov and self.momentum == 0:
            raise _bad("momentum", "a number above 0, which nesterov needs", self.momentum)
        if self.schedule == "inverse_sqrt" and self.warmup_steps == 0:
            raise _bad("warmup_steps", "1 or more with the schedule inverse_sqrt, which falls from there", 0)
        if self.warmup_steps > self.schedule_steps:
            raise _bad("warmup_steps", f"at most the steps of the run ({self.steps})", self.warmup_steps)

    def _fill_in(self, defaults: dict[str, Any]) -> None:
        given = dict(vars(self))
        schedule = given["schedule"] or defaults["schedule"]
        if "min_ratio" not in SCHEDULES[schedule]:
            defaults = {name: value for name, value in defaults.items() if name != "min_lr_ratio"}
            if self.min_lr_ratio is not None:
                raise _superfluous("min_lr_ratio", self.min_lr_ratio, f"the schedule {schedule}, which has no minimum")
        for name in sorted(_OF_TASKS):
            if given[name] is None:
                object.__setattr__(self, name, defaults.get(name))
            elif name not in defaults:
                raise _superfluous(name, given[name], f"the task {self.task}, which has no such setting")
        if given["warmup_steps"] is None:
            usual = defaults["warmup_steps"]
            usual = max(1, self.steps // 100) if usual is None else usual
            # The text model's schedule reaches beyond a short run instead: see schedule_steps.
            object.__setattr__(self, "warmup_steps", usual if self.task == "lm" else min(usual, self.steps))

    @property
    def preset(self) -> Preset:
        """The task's preset with every value of this config."""
        shared = {field.name for field in fields(Preset)} - {"optimizer", "betas", "max_grad_norm"}
        values = {name: value for name in shared if (value := getattr(self, name)) is not None}
        if "beta1" in TASK_DEFAULTS[self.task]:
            values["betas"] = (self.beta1, self.beta2)
        return replace(TASK_PRESETS[self.task], max_grad_norm=self.max_grad_norm or None, **values)

    @property
    def schedule_steps(self) -> int:
        """Steps that the schedule is made for: those of the run.

        Except for the text model, whose run shorter than two warm-ups is the beginning of one that is not. So the first
        steps of its run don't depend on its length. And squeezed into a few steps, the warm-up would drive this model
        so fast that rounding alone moves the loss in the fifth digit, and two optimizers that differ in nothing else
        could no longer be compared.
        """
        return max(self.steps, 2 * self.warmup_steps) if self.task == "lm" else self.steps


def spelled(name: str) -> str:
    """A setting as the user writes it: an option of the command line, or else the key of a config file."""
    return "--" + name.replace("_", "-") if name in OPTIONS else name


def _bad(name: str, expected: str, found: object) -> InputError:
    option = spelled(name)
    return bad_input(option, expected=expected, found=repr(found), remedy=f"give {option} such a value")


def _superfluous(name: str, found: object, owner: str) -> InputError:
    option = spelled(name)
    return bad_input(option, expected=f"none with {owner}", found=repr(found), remedy=f"leave {option} out")
