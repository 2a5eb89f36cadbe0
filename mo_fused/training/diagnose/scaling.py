"""Steps that changed nothing: a loss scale that falls, gradients that are exactly zero, updates lost in rounding."""

from __future__ import annotations

import math

from mo_fused.training.diagnose.check import Check, curve, fault, not_judged, ok, setting, some
from mo_fused.training.diagnose.gradients import dead_parameters, found_by
from mo_fused.training.report.reading import Run

CHECK = "loss scale and lost updates"
_HALVINGS, _FLOOR = 8, 1.0  # those of ScaleCollapse
_SETTLING = 20  # steps in which a loss scale may look for its place
_OFTEN = 0.05  # share of the steps
_LEAST = 20


def lost_updates(run: Run) -> Check:
    """fp16 underflow and a collapsed scale, skipped steps, losses that are not finite, stalled 16-bit parameters."""
    if not len(run.steps):
        return not_judged(CHECK, "no step was recorded")
    at, scales = curve(run, "loss_scale")
    scaled = bool(len(scales)) and not (scales == 1.0).all()
    fp16 = scaled or setting(run, "precision") == "fp16"
    _, norms = curve(run, "grad_norm")
    skipped = run.skipped[run.skipped > _SETTLING]
    bad = run.nonfinite.get("loss", run.steps[:0])
    zero, dead = int((norms == 0.0).sum()), dead_parameters(run)
    settled = scales[at > _SETTLING] if scaled else scales[:0]
    fallen = math.log2(max(settled.max(), 1e-300) / max(float(settled[-1]), 1e-300)) if len(settled) else 0.0
    many = len(run.steps) >= _LEAST
    collapsed = scaled and (fallen >= _HALVINGS or scales.min() < _FLOOR)
    parts = [f"loss scale {scales[0]:g} at first, {scales[-1]:g} at the end" if scaled else "no loss scale"]
    parts.append(f"{len(run.skipped)} of {len(run.steps)} steps skipped" if "skipped" in run.numbers else "")
    parts.append(f"{len(bad)} losses not finite" if len(bad) else "")
    parts.append(f"gradient norm exactly 0 in {zero} of {len(norms)} steps" if len(norms) else "")
    parts.append(f"gradients exactly zero in {some(dead)}" if dead else "")
    parts.append("ScaleCollapse was found" if found_by(run, "ScaleCollapse") else "")
    seen = "; ".join(part for part in parts if part)
    # Where the scale is high and stays, parameters without a gradient are dead for another reason.
    low = collapsed or fallen >= 1.0 or not scaled
    zeros = (low and bool(dead)) or (len(norms) >= _LEAST and zero >= _OFTEN * len(norms))
    again = "; it falls with every overflow, so something overflows again and again" if fallen >= 1.0 else ""
    if fp16 and zeros:
        means = f"fp16 underflow: gradients are so small, or the loss scale is so low, that they round to zero{again}"
        return fault(CHECK, "fp16 underflow", seen, means, 'train with precision="bf16", or else in fp32')
    if collapsed or (fp16 and found_by(run, "ScaleCollapse")):
        means = f"the loss scale is no longer one that keeps small gradients above fp16's smallest number{again}"
        return fault(CHECK, "loss scale collapse", seen, means, 'train with precision="bf16", or else in fp32')
    stalled = [e for e in found_by(run, "DeadGradient") if e.get("kind") == "stalled update"]
    if stalled:
        names = stalled[0].get("parameters")
        seen = f"{seen}; updates rounded away in {some(names if isinstance(names, list) else ['parameters'])}"
        means = "updates are smaller than the last place of 16-bit parameters"
        return fault(CHECK, "stalled updates", seen, means, "keep master weights (master_weights='fp32')")
    if len(bad):
        seen = f"{seen} (first in step {bad[0]})"
        means = "inputs that are not finite, log or division at 0, or a rate at which the model blows up"
        return fault(CHECK, "loss not finite", seen, means, "look at the batch of that step; else lower the rate")
    if many and len(skipped) > _OFTEN * len(run.steps):
        means = "gradients that are not finite again and again"
        return fault(CHECK, "skipped steps", seen, means, "find the first such parameter with the watcher NonFinite")
    if not len(norms) and not scaled and "skipped" not in run.numbers:
        return not_judged(CHECK, "neither loss scale nor gradient norms nor skipped steps were recorded")
    return ok(CHECK, seen)
