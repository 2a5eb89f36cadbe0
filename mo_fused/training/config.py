"""Every setting of a training run, with its default, checked in one place (no torch needed)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mo_fused.training.errors import InputError, bad_input

TASKS = ("lm",)
OPTIMIZERS = ("mo_fused", "torch")
_LARGEST_SIZE = 2**20


@dataclass(frozen=True)
class TrainConfig:
    """Settings of one run; the defaults train the text model in less than two minutes on two cores.

    ``text=None`` is the prose inside Python, ``device=None`` the best device, ``run_dir=None`` a new folder under
    ``runs/``. ``context`` counts bytes, ``width`` is the model's embedding size, ``validate_every`` counts steps.

    Raises:
        InputError: a value is outside its range; the message names the option as the command line spells it.
    """

    task: str = "lm"
    text: str | None = None
    optimizer: str = "mo_fused"
    steps: int = 700
    seed: int = 0
    device: str | None = None
    run_dir: str | None = None
    lr: float = 3e-3
    batch_size: int = 8
    context: int = 128
    layers: int = 4
    heads: int = 6
    width: int = 192
    warmup_steps: int = 100
    min_lr_ratio: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    validate_every: int = 100

    def __post_init__(self) -> None:
        for name, choices in (("task", TASKS), ("optimizer", OPTIMIZERS)):
            if getattr(self, name) not in choices:
                raise _bad(name, f"one of {', '.join(choices)}", getattr(self, name))
        for name in ("steps", "validate_every"):
            if getattr(self, name) < 1:
                raise _bad(name, "a whole number of 1 or more", getattr(self, name))
        for name in ("batch_size", "context", "layers", "heads", "width"):
            if not 1 <= getattr(self, name) <= _LARGEST_SIZE:
                raise _bad(name, f"a whole number from 1 to {_LARGEST_SIZE}", getattr(self, name))
        if not 0 <= self.seed < 2**63:
            raise _bad("seed", "a whole number from 0 to 2**63 - 1", self.seed)
        for name in ("lr", "eps", "max_grad_norm"):
            if not 0 < getattr(self, name) < math.inf:
                raise _bad(name, "a finite number above 0", getattr(self, name))
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise _bad(name, "a number from 0 to below 1", getattr(self, name))
        if not 0 <= self.weight_decay < math.inf:
            raise _bad("weight_decay", "a finite number of 0 or more", self.weight_decay)
        if not 0 <= self.min_lr_ratio <= 1:
            raise _bad("min_lr_ratio", "a number from 0 to 1", self.min_lr_ratio)
        if self.warmup_steps < 0:
            raise _bad("warmup_steps", "a whole number of 0 or more", self.warmup_steps)
        if self.width % self.heads:
            raise _bad("width", f"a multiple of the number of heads ({self.heads})", self.width)

    @property
    def schedule_steps(self) -> int:
        """Steps that the schedule is made for: a run shorter than two warm-ups is the beginning of one that is not.

        So the first steps of a run don't depend on its length. And squeezed into a few steps, the warm-up would drive
        this model so fast that rounding alone moves the loss in the fifth digit, and two optimizers that differ in
        nothing else could no longer be compared.
        """
        return max(self.steps, 2 * self.warmup_steps)


def _bad(name: str, expected: str, found: object) -> InputError:
    option = "--" + name.replace("_", "-")
    return bad_input(option, expected=expected, found=repr(found), remedy=f"give {option} such a value")
