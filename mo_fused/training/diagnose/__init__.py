"""``mo-fused diagnose``: what is wrong with a run, in the order in which one looks for it by hand."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mo_fused.training.diagnose.check import Check
from mo_fused.training.diagnose.falling import after_warm_up
from mo_fused.training.diagnose.gap import train_validation_gap
from mo_fused.training.diagnose.gradients import gradient_norms
from mo_fused.training.diagnose.scaling import lost_updates
from mo_fused.training.diagnose.spikes import late_spikes
from mo_fused.training.diagnose.start import expected_loss, first_loss
from mo_fused.training.errors import bad_input
from mo_fused.training.report.reading import Run, read_run

__all__ = ["Check", "Diagnosis", "diagnose"]

_UPSETS = {
    "fp16 underflow": {
        *("dead gradient", "vanishing gradient", "exploding gradient", "no warm-up", "rate too high", "wrong labels"),
        *("loss does not fall", "rate too low", "diverged", "late spikes", "over-fitting", "loss not finite"),
    },
    "dead gradient": {"wrong labels", "loss does not fall"},
    "vanishing gradient": {"wrong labels", "loss does not fall", "rate too low"},
    "no warm-up": {"exploding gradient", "vanishing gradient", "dead gradient", "late spikes", "loss not finite"},
    "rate too high": {"exploding gradient", "late spikes", "loss not finite"},
    "bad samples": {"exploding gradient", "diverged"},
    "diverged": {"late spikes", "exploding gradient"},
    "wrong labels": {"over-fitting"},
}
"""What a fault brings with it, which is then no fault of its own."""


@dataclass
class Diagnosis:
    """The checks of one run, in their fixed order.

    Attributes:
        run: its folder.
        steps: how many were read.
        checks: first loss, gradient norms, loss after the warm-up, late spikes, train/validation gap, lost updates.
        not_read: what of the folder was not read.
    """

    run: str
    steps: int
    checks: list[Check]
    not_read: list[str]

    @property
    def faults(self) -> list[str]:
        """The names of the faults found, each once; without what only follows from another one."""
        return list(dict.fromkeys(check.fault for check in self.checks if check.state == "fault"))

    def as_json(self) -> str:
        """One JSON object: ``run``, ``steps``, ``faults``, ``checks`` (each with all its fields) and ``not_read``."""
        found: dict[str, Any] = {"run": self.run, "steps": self.steps, "faults": self.faults}
        return json.dumps({**found, "checks": [asdict(c) for c in self.checks], "not_read": self.not_read}, indent=2)

    def __str__(self) -> str:
        judged = sum(check.state != "not judged" for check in self.checks)
        if self.faults:
            verdict = f"found: {', '.join(self.faults)}"
        else:
            verdict = "no fault found" if judged else "nothing could be judged"
        lines = [f"{self.run}: {self.steps:,} steps read", *(f"  {note}" for note in self.not_read), ""]
        lines += [f"{number}. {check}" for number, check in enumerate(self.checks, 1)]
        return "\n".join([*lines, "", f"{verdict} ({judged} of {len(self.checks)} checks were possible)"])


def diagnose(run: str | Path | Run, classes: int | None = None) -> Diagnosis:
    """Look for what is wrong with a run.

    Args:
        run: its folder, or what :func:`mo_fused.training.report.read_run` has read of it.
        classes: for the theoretical first loss ln(classes) of a mean cross-entropy; else the run's config says it.

    Returns:
        What each check has seen, or why it was not possible.

    Raises:
        InputError: no folder of a run, or ``classes`` below 2.
    """
    if classes is not None and (isinstance(classes, bool) or not isinstance(classes, int) or classes < 2):
        remedy = "give the number of classes, or leave it out"
        raise bad_input("--classes", expected="a whole number, 2 or more", found=repr(classes), remedy=remedy)
    run = run if isinstance(run, Run) else read_run(run)
    expected = expected_loss(run, classes)
    checks = [
        first_loss(run, expected),
        gradient_norms(run),
        after_warm_up(run, expected),
        late_spikes(run),
        train_validation_gap(run, expected),
        lost_updates(run),
    ]
    _explain(checks)
    return Diagnosis(str(run.path), len(run.steps), checks, list(run.notes))


def _explain(checks: list[Check]) -> None:
    """Marks faults that others have brought with them; of two that explain each other the one named first stays."""
    for cause, brought in _UPSETS.items():
        if not any(check.fault == cause and check.state == "fault" for check in checks):
            continue
        for check in checks:
            if check.state == "fault" and check.fault in brought:
                check.state = "follows"
                check.means = f"it follows from: {cause}"
                check.do = f"see to the {cause} first"
