"""Gradient norms of every layer in the first steps of a run."""

from __future__ import annotations

import atexit
import math
import statistics
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from mo_fused.distributed import shards
from mo_fused.errors import bad_option
from mo_fused.grad import grad_stats
from mo_fused.optim.base import FusedOptimizer
from mo_fused.training.errors import bad_input
from mo_fused.training.watchers.base import whole
from mo_fused.training.watchers.recent_steps import listed

USUAL = (0.1, 10.0)
"""The range that the norm over all layers is usually in."""
VANISHING, VANISHING_OF_ALL, EXPLODING = 1e-3, 1e-5, 1e2
"""Of the median layer's norm, of that over all layers (but exploding ones), and of the median layer's. Where weights
are scaled as they should be, back-propagated gradients keep their size from layer to layer (Glorot and Bengio 2010; He
et al. 2015), and what is left are the sizes of the layers: 0.04 to 130 medians in the text and vision models of
``mo-fused train``. A factor a layer that is not 1 gives powers of ten over a few layers (Pascanu et al. 2013)."""
_COLUMNS = 6  # of the last table


def layer_norms(
    source: Optimizer | nn.Module,
    every: int = 10,
    until: int = 100,
    *,
    model: nn.Module | None = None,
    write: Callable[[str], object] = print,
) -> LayerNorms:
    """Prints every layer's gradient norm in the first steps, and is silent after that.

    In step 1 and every ``every`` steps a line: the norm over all layers, whether that is in the usual range (0.1 to
    10), and the layers whose norm is below a thousandth of the median layer's or a hundred-thousandth of that over all
    (vanishing; zero included), or above a hundred times the median layer's and above 10 (exploding). After step
    ``until``, or at the end of the program, a table of all layers. A layer is the module that holds parameters itself,
    its norm that of its parameters' gradients together, unscaled and before clipping.

    Args:
        source: any torch optimizer, or a model: the first optimizer that steps parameters of it is watched then.
        every: steps.
        until: the last step looked at.
        model: gives names to the parameters of an optimizer that was built without names.
        write: gets the text: ``print``, or ``tqdm.write`` beside a bar.

    Returns:
        A handle: ``table()``, ``steps`` (what was measured) and ``close()``.

    An optimizer of this package with ``stats=True`` tells what it has measured; for any other,
    :func:`mo_fused.grad_stats` reads the gradients once more in the steps that are looked at. Those steps wait for the
    device, the others don't. With several processes each writes; give all but one a ``write`` that does nothing.

    Raises:
        ValueError: ``every`` or ``until`` is below 1.
        InputError: neither an optimizer nor a model; an optimizer whose gradients are gone before the step
            (``gradient_release``, ``offload_gradients``) and that doesn't measure them.
    """
    return LayerNorms(source, every, until, model, write)


class LayerNorms:
    """The handle that :func:`layer_norms` returns.

    Attributes:
        steps: by step, the norm of each layer by its name.
        totals: by step, the norm over all of them.

    Raises:
        ValueError, InputError: as :func:`layer_norms`; ``write`` is no function.
    """

    def __init__(
        self,
        source: Optimizer | nn.Module,
        every: int,
        until: int,
        model: nn.Module | None,
        write: Callable[[str], object],
    ) -> None:
        self.every, self.until = whole("every", every, 1), whole("until", until, 1)
        if not callable(write):
            raise bad_option("write", "a function of one text", write, "give print or tqdm.write")
        self.steps: dict[int, dict[str, float]] = {}
        self.totals: dict[int, float] = {}
        self._write = write
        self._done = 0
        self._ended = False
        self._measured: list[tuple[str, float]] | None = None
        self._handles: list[Any] = []
        self._optimizer: weakref.ref[Optimizer] | None = None
        self._names: dict[int, str] = {}
        self._sizes: dict[str, int] = {}
        if isinstance(source, Optimizer):
            _refuse_without_gradients(source)
            self._names = _names_by_id(source, model)
            self._handles = [source.register_step_pre_hook(self._before), source.register_step_post_hook(self._after)]
        elif isinstance(source, nn.Module):
            self._names = {id(one): name for name, one in source.named_parameters()}
            self._handles = [
                register_optimizer_step_pre_hook(self._before),
                register_optimizer_step_post_hook(self._after),
            ]
        else:
            raise bad_input(
                "layer_norms",
                expected="a torch optimizer or a torch.nn.Module",
                found=type(source).__name__,
                remedy="pass the optimizer that trains, or the model",
            )
        self._at_exit = _closer(weakref.ref(self))
        atexit.register(self._at_exit)

    def close(self) -> None:
        """Takes the hooks away; prints the table if anything was measured and it was not printed yet."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._end()

    def _end(self) -> None:
        """The last step was looked at. Hooks stay, doing nothing: torch is going through them."""
        if self._ended:
            return
        self._ended = True
        atexit.unregister(self._at_exit)
        if self.steps:
            self._write(self.table())

    def table(self) -> str:
        """A line a layer: elements, norm in up to six of the steps, and the last one over the median layer's."""
        if not self.steps:
            return "gradient norms: no step was looked at"
        steps = _spread(sorted(self.steps), _COLUMNS)
        last = self.steps[steps[-1]]
        median, marks = _median(last), _marks(last)
        names = list(dict.fromkeys(name for step in steps for name in self.steps[step]))
        rows = [("gradient norm of layer", "elements", *(f"step {step}" for step in steps), "of median", "")]
        for name in names:
            norms = [self.steps[step].get(name) for step in steps]
            ratio = "" if norms[-1] is None or not median else f"{norms[-1] / median:.2g}"
            cells = ["-" if norm is None else f"{norm:.3g}" for norm in norms]
            mark = marks.get(name, "")
            rows.append((name, f"{self._sizes.get(name, 0):,}", *cells, ratio, mark))
        totals = [self.totals[step] for step in steps]
        rows.append(("all layers", "", *(f"{total:.3g}" for total in totals), "", _overall(totals[-1])))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = []
        for row in rows:
            cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:-1], widths[1:-1]))]
            lines.append("  ".join([*cells, row[-1]]).rstrip())
        return "\n".join(lines)

    def vanishing(self, step: int) -> list[str]:
        """Layers that :func:`layer_norms` calls vanishing in a step that was looked at."""
        return self._marked(step, "vanishing")

    def exploding(self, step: int) -> list[str]:
        """Layers that :func:`layer_norms` calls exploding, or whose norm is not finite."""
        return self._marked(step, "exploding")

    def _marked(self, step: int, mark: str) -> list[str]:
        return [name for name, found in _marks(self.steps[step]).items() if found == mark]

    # -- hooks --------------------------------------------------------------------------------------------------------

    def _due(self) -> bool:
        step = self._done + 1
        return step == 1 or step % self.every == 0

    def _before(self, optimizer: Optimizer, *_: object) -> None:
        self._measured = None
        if self._ended:
            return
        if self._trains(optimizer) and self._due() and not _tells(optimizer):
            _refuse_without_gradients(optimizer)
            self._measured = self._look(optimizer)

    def _after(self, optimizer: Optimizer, *_: object) -> None:
        if self._ended or not self._trains(optimizer):
            return
        if self._due():
            found = self._measured
            if found is None and isinstance(optimizer, FusedOptimizer) and (last := optimizer.last_step) is not None:
                keys = _by_key(optimizer)
                norms = [(keys[key], one.grad_norm) for key, one in last.per_param().items()]
                found = [(self._name(one), norm) for one, norm in norms if norm is not None]
            self._note(self._done + 1, found or [], optimizer)
        self._done += 1
        if self._done >= self.until:
            self._end()

    def _trains(self, optimizer: Optimizer) -> bool:
        known = None if self._optimizer is None else self._optimizer()
        if known is None and any(id(one) in self._names for g in optimizer.param_groups for one in g["params"]):
            self._optimizer = weakref.ref(optimizer)
            return True
        return known is optimizer

    def _look(self, optimizer: Optimizer) -> list[tuple[str, float]]:
        parameters = [one for group in optimizer.param_groups for one in group["params"] if one.grad is not None]
        dense = [one.grad.coalesce().values() if one.grad.is_sparse else one.grad for one in parameters]
        norms = grad_stats([one.detach() for one in dense]).norms.tolist() if dense else []
        scale = shards.present(getattr(optimizer, "grad_scale", None))  # of a fused step, which unscales by itself
        factor = 1.0 if scale is None else 1.0 / float(scale)
        return [(self._name(one), norm * factor) for one, norm in zip(parameters, norms)]

    def _name(self, parameter: torch.Tensor) -> str:
        return self._names.get(id(parameter), "parameters added later")

    def _note(self, step: int, norms: Sequence[tuple[str, float]], optimizer: Optimizer) -> None:
        squares: dict[str, list[float]] = {}
        for name, norm in norms:
            squares.setdefault(_layer(name), []).append(norm)
        layers = {name: math.hypot(*values) for name, values in squares.items()}
        if not layers:
            self._write(f"gradient norms, step {step}: no gradient")
            return
        if not self._sizes:
            for group in optimizer.param_groups:
                for one in group["params"]:
                    name = _layer(self._name(one))
                    self._sizes[name] = self._sizes.get(name, 0) + one.numel()
        order = {_layer(name): None for name in self._names.values()}
        self.steps[step] = {name: layers[name] for name in [*order, *layers.keys() - order.keys()] if name in layers}
        self.totals[step] = total = math.hypot(*layers.values())
        parts = [
            f"gradient norms, step {step}: all {total:.3g} ({_overall(total)}), median layer {_median(layers):.3g}"
        ]
        for mark, names in (("vanishing", self.vanishing(step)), ("exploding", self.exploding(step))):
            if names:
                parts.append(f"{mark}: {listed(names)}")
        self._write("; ".join(parts))


def _tells(optimizer: Optimizer) -> bool:
    """Whether the step measures each parameter's gradient anyway (of parts of a parameter, stats=True alone tells)."""
    return isinstance(optimizer, FusedOptimizer) and bool(optimizer.defaults["stats"])


def _refuse_without_gradients(optimizer: Optimizer) -> None:
    if not isinstance(optimizer, FusedOptimizer) or _tells(optimizer):
        return
    gone = "gradient_release" if optimizer._release() is not None else ""
    gone = "offload_gradients" if optimizer.defaults["offload_gradients"] else gone
    if gone:
        raise bad_input(
            "layer_norms",
            expected="gradients that are there before the step, or an optimizer that measures them",
            found=f"an optimizer with {gone} and stats=False",
            remedy="build it with stats=True",
        )


def _names_by_id(optimizer: Optimizer, model: nn.Module | None) -> dict[int, str]:
    of_model = {} if model is None else {id(one): name for name, one in model.named_parameters()}
    names: dict[int, str] = {}
    for g, group in enumerate(optimizer.param_groups):
        given = group.get("param_names")
        for i, one in enumerate(group["params"]):
            own = str(given[i]) if given else f"parameter {len(names)} (group {g})"
            names.setdefault(id(one), of_model.get(id(one), own))
    return names


def _by_key(optimizer: Optimizer) -> dict[Any, torch.Tensor]:
    """Parameters by what ``per_param()`` calls them."""
    found: dict[Any, torch.Tensor] = {}
    position = 0
    for group in optimizer.param_groups:
        given = group.get("param_names")
        for i, one in enumerate(group["params"]):
            found[str(given[i]) if given else position] = one
            position += 1
    return found


def _layer(name: str) -> str:
    return name.rpartition(".")[0] or name


def _median(layers: Mapping[str, float]) -> float:
    """Of the layers with a gradient that is finite and not 0."""
    values = [norm for norm in layers.values() if norm > 0.0 and math.isfinite(norm)]
    return statistics.median(values) if values else 0.0


def _marks(layers: Mapping[str, float]) -> dict[str, str]:
    median = _median(layers)
    top = max(EXPLODING * median, USUAL[1])
    exploding = {name for name, norm in layers.items() if not norm <= top}  # NaN too
    # An exploding layer makes no other one small.
    others = math.hypot(*(norm for name, norm in layers.items() if name not in exploding))
    floor = max(VANISHING * median, VANISHING_OF_ALL * others)
    vanishing = {name for name, norm in layers.items() if norm == 0.0 or norm < floor}
    return {name: "exploding" if name in exploding else "vanishing" if name in vanishing else "" for name in layers}


def _overall(total: float) -> str:
    if not math.isfinite(total):
        return "not finite"
    low, high = USUAL
    return (
        f"below the usual {low:g} to {high:g}"
        if total < low
        else (f"above the usual {low:g} to {high:g}" if total > high else "usual")
    )


def _spread(steps: Sequence[int], most: int) -> list[int]:
    """At most so many of them, the first and the last among them."""
    if len(steps) <= most:
        return list(steps)
    return [steps[round(i * (len(steps) - 1) / (most - 1))] for i in range(most)]


def _closer(handle: weakref.ref[LayerNorms]) -> Callable[[], None]:
    """No method: the program's end must not keep the model alive until then."""

    def close() -> None:
        if (found := handle()) is not None:
            found.close()

    return close
