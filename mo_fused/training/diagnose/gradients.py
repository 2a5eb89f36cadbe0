"""Gradient norms of the first steps: over all parameters, and layer by layer."""

from __future__ import annotations

from typing import Any

import numpy as np

from mo_fused.training.diagnose.check import FIRST_STEPS, Check, Floats, curve, fault, not_judged, ok, some
from mo_fused.training.report.reading import Run

CHECK = f"gradient norms of the first {FIRST_STEPS} steps"
USUAL = (0.1, 10.0)
_HUGE, _TINY = 100.0, 1e-3  # norms over all parameters, of which ordinary training stays clear
_OFTEN = 0.05  # share of the steps
# As in a healthy start each layer passes on what it gets (He et al. 2015), layers differ by their sizes alone.
_OF_MEDIAN, _OF_ALL, _ABOVE_MEDIAN = 1e-3, 1e-5, 1e2


def gradient_norms(run: Run) -> Check:
    """Dead, vanishing and exploding gradients, in this order."""
    steps, norms = curve(run, "grad_norm")
    norms = norms[steps <= FIRST_STEPS]
    layers, at = layer_norms(run)
    dead = dead_parameters(run)
    if not len(norms) and not layers and not dead:
        later = f" before step {steps[0]}" if len(steps) else ""
        return not_judged(CHECK, f"no gradient norm was recorded{later}")
    seen, detail = _overall(norms), _layers(layers, at)
    text = f"{seen}; {detail}"
    if dead:
        means = "units that are never active, a factor of zero, or a branch that the loss does not depend on"
        return fault(
            CHECK, "dead gradient", f"{text}; exactly zero in {some(dead)}", means, f"look at what uses {dead[0]}"
        )
    vanishing, exploding = _outliers(layers)
    if vanishing or (len(norms) and np.median(norms) < _TINY and norms[0] < USUAL[0]):
        named = f"; vanishing in {some(vanishing)}" if vanishing else ""
        means = "each layer shrinks the gradient that it passes on: saturating activations, weights drawn too small"
        do = "take ReLU or GELU with residual connections and normalisation instead of saturating activations"
        return fault(CHECK, "vanishing gradient", f"{text}{named}", means, do)
    if exploding or (len(norms) and (norms > _HUGE).mean() >= _OFTEN):
        named = f"; exploding in {some(exploding)}" if exploding else ""
        means = "each layer enlarges the gradient that it passes on, the rate is too high, or the loss is a sum"
        do = "lower the rate to a tenth (then: normalise inputs and layers, clip to max_grad_norm=1)"
        return fault(CHECK, "exploding gradient", f"{text}{named}", means, do)
    return ok(CHECK, text)


def dead_parameters(run: Run) -> list[str]:
    """Parameters whose gradient was exactly zero: in two detailed records or more and all of them, or by the watcher.

    A gradient that reaches the parameter's layer otherwise (a bias before a normalisation) is no dead one.
    """
    layers = run.layers
    dead: list[str] = []
    if len(layers.steps) >= 2:
        norms = layers.norms["grad_norm"]
        known = np.isfinite(norms).sum(axis=1) >= 2
        alive = {_layer_of(name) for row, name in enumerate(layers.names) if np.nansum(norms[row]) > 0.0}
        zero = known & (np.nan_to_num(norms, nan=0.0) == 0.0).all(axis=1)
        dead = [name for row, name in enumerate(layers.names) if zero[row] and _layer_of(name) not in alive]
    for event in found_by(run, "DeadGradient"):
        if event.get("kind") == "zero gradient":
            dead += [name for name in _names(event) if name not in dead]
    return dead


def found_by(run: Run, watcher: str) -> list[dict[str, Any]]:
    """The events of one kind of watcher, in order of their steps."""
    return sorted((e for e in run.events if e.get("watcher") == watcher), key=lambda event: int(event["step"]))


def layer_norms(run: Run) -> tuple[dict[str, float], list[int]]:
    """The median norm of each layer (module) over the detailed records of the first steps, and these steps.

    The first record alone if all are later. Layers without any gradient are left out.
    """
    steps, norms = run.layers.steps, run.layers.norms.get("grad_norm")
    if norms is None or not len(steps):
        return {}, []
    chosen = steps <= FIRST_STEPS if steps[0] <= FIRST_STEPS else steps == steps[0]
    rows: dict[str, list[int]] = {}
    for row, name in enumerate(run.layers.names):
        rows.setdefault(_layer_of(name), []).append(row)
    found = {}
    for layer, members in rows.items():
        part = norms[members][:, chosen]
        whole = np.sqrt(np.nansum(part**2, axis=0))[np.isfinite(part).any(axis=0) & ~np.isinf(part).any(axis=0)]
        if len(whole):
            found[layer] = float(np.median(whole))
    return found, steps[chosen].tolist()


def _names(event: dict[str, Any]) -> list[str]:
    names = event.get("parameters")
    return [str(name) for name in names] if isinstance(names, (list, dict)) else ["a parameter"]


def _layer_of(name: str) -> str:
    return name.rpartition(".")[0] or name


def _overall(norms: Floats) -> str:
    if not len(norms):
        return "no norm over all parameters was recorded"
    low, high = USUAL
    inside = ((norms >= low) & (norms <= high)).mean()
    return (
        f"median {np.median(norms):.3g}, from {norms.min():.3g} to {norms.max():.3g} in {len(norms)} steps, "
        f"{inside:.0%} within {low:g} to {high:g}, which is usual (less once the loss is small)"
    )


def _layers(layers: dict[str, float], at: list[int]) -> str:
    if len(layers) < 2:
        return "layers were not judged (details.jsonl has no norms of two layers or more)"
    low, high = min(layers, key=lambda k: layers[k]), max(layers, key=lambda k: layers[k])
    where = f"step {at[0]}" if len(at) == 1 else f"steps {at[0]} to {at[-1]}"
    return f"layers ({where}) from {layers[low]:.2g} ({low}) to {layers[high]:.2g} ({high})"


def _outliers(layers: dict[str, float]) -> tuple[list[str], list[str]]:
    if len(layers) < 3:
        return [], []
    values = np.array(list(layers.values()))
    median, whole = float(np.median(values)), float(np.sqrt((values**2).sum()))
    top = max(_ABOVE_MEDIAN * median, USUAL[1])
    floor = max(_OF_MEDIAN * median, _OF_ALL * whole)
    return [k for k, v in layers.items() if v < floor], [k for k, v in layers.items() if v > top]
