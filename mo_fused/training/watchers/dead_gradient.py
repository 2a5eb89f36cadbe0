"""Parameters that nothing moves: no gradient, or updates that rounding swallows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from mo_fused.optim.base import FusedOptimizer
from mo_fused.row_peaks import Peak, RowPeaks, TakenPeaks
from mo_fused.training.watchers.base import Action, Observed, Watcher, whole
from mo_fused.training.watchers.recent_steps import listed, parameter_names


class DeadGradient(Watcher):
    """Parameters whose gradient is exactly zero in ``steps`` steps on end, or whose update leaves nothing in them.

    The second is the stall of 16-bit parameters: the rule asks for a change (``update_norm > 0``) too small for a
    parameter's last place in every element, and rounding gives the old value back (``stored_update_norm == 0``).
    It needs ``stats=True``; the gradients need that or something that gates the update. An optimizer that isn't of this
    package, and one with a ``gradient_release``, has no such statistics, which is said once.

    Steps in which a parameter has no gradient at all don't count. The event has ``kind`` ("zero gradient" or "stalled
    update"), ``parameters`` (names), ``groups`` (those of which every parameter is dead) and ``steps``. A parameter is
    named once, and again after it has moved.

    Counting costs one small operation on the device a step: a running maximum of each parameter's magnitudes, which is
    copied every tenth of ``steps`` and read a step later. So a finding comes up to a tenth of ``steps`` (and a step)
    late, and never early. A healthy run has no finding, whatever its noise: "exactly" leaves no room for one.

    Args:
        steps: on end.
        action: see :class:`Watcher`.
    """

    def __init__(self, steps: int = 100, *, action: Action = "warn") -> None:
        super().__init__(action=action)
        self.steps = whole("steps", steps, 1)
        self._block = max(1, steps // 10)
        self._peaks = RowPeaks()
        self._in_block = 0
        self._taken: tuple[int, bool, TakenPeaks] | None = None
        self._last: Any = None
        self._runs: dict[str, dict[Any, int]] = {"zero gradient": {}, "stalled update": {}}
        self._told: dict[str, set[Any]] = {"zero gradient": set(), "stalled update": set()}
        self._said = False

    def on_step(self, monitor: Observed, loss: Tensor | float, batch_info: Mapping[str, Any]) -> None:
        self._read(monitor)
        optimizer, step = monitor.optimizer, batch_info["step"]
        last = optimizer.last_step if isinstance(optimizer, FusedOptimizer) else None
        if last is None or not last._measured or last._rows is None:
            # stats=True measures in the update, which a torch scaler may have told the step to leave out.
            if last is None or last._rows is None or not optimizer.defaults["stats"]:
                self._cannot(step, optimizer)
            return
        if last is self._last:  # a scaler has left the step out
            return
        self._last = last
        if not self._peaks.add(last):
            self._in_block = 0  # other rows: what was counted in this block is gone, and with it what "on end" means
            for runs in self._runs.values():
                runs.clear()
        self._in_block += 1
        if self._in_block >= self._block:
            self._taken = (step, last._updated, self._peaks.take())
            self._in_block = 0

    def on_record(self, record: Mapping[str, Any]) -> None:
        """Nothing: what is counted comes from the optimizer."""

    def close(self) -> None:
        if self.monitor is not None:
            self._read(self.monitor)

    def _cannot(self, step: int, optimizer: Optimizer) -> None:
        if self._said:
            return
        self._said = True
        reason = "an optimizer of mo_fused with stats=True and without gradient_release is needed"
        self.emit(step, f"gradients are not looked at: {reason}", kind="not looked at")

    def _read(self, monitor: Observed) -> None:
        if self._taken is None:
            return
        (step, updated, taken), self._taken = self._taken, None
        peaks = taken.read()
        dead: dict[str, list[Any]] = {}
        for key, peak in peaks.items():
            self._count("zero gradient", key, peak, peak.grad == 0.0, dead)
            if updated:
                self._count("stalled update", key, peak, peak.update > 0.0 and peak.stored == 0.0, dead)
        for kind, keys in dead.items():
            self._tell(monitor, step, kind, keys)

    def _count(self, kind: str, key: Any, peak: Peak, still: bool, dead: dict[str, list[Any]]) -> None:
        if not peak.steps:
            return
        runs, told = self._runs[kind], self._told[kind]
        if not still:
            runs.pop(key, None)
            told.discard(key)
            return
        runs[key] = runs.get(key, 0) + peak.steps
        if runs[key] >= self.steps and key not in told:
            told.add(key)
            dead.setdefault(kind, []).append(key)

    def _tell(self, monitor: Observed, step: int, kind: str, keys: Sequence[Any]) -> None:
        optimizer = monitor.optimizer
        groups, empty = _groups(optimizer)
        keys = [key for key in keys if key not in empty]
        if not keys:
            return
        names = parameter_names(optimizer, getattr(monitor, "model", None))
        told = self._told[kind]
        whole_groups = [g for g, members in enumerate(groups) if members and told.issuperset(members)]
        new = [g for g in whole_groups if not groups[g].isdisjoint(keys)]
        found = [names.get(key, str(key)) for key in keys]
        what = {
            "zero gradient": "the gradient was exactly zero",
            "stalled update": "rounding left nothing of an update that was asked for",
        }[kind]
        where = listed(found)
        if new:
            where += f" (all of group {', '.join(map(str, new))})"
        run = max(self._runs[kind][key] for key in keys)
        message = f"{what} in {run} steps on end: {where}"
        self.emit(step, message, kind=kind, parameters=found, groups=new, steps=run)


def _groups(optimizer: Optimizer) -> tuple[list[set[Any]], set[Any]]:
    """The keys of each group's parameters that have elements, and those without any."""
    groups: list[set[Any]] = []
    empty: set[Any] = set()
    position = 0
    for group in optimizer.param_groups:
        given = group.get("param_names")
        members: set[Any] = set()
        for i, parameter in enumerate(group["params"]):
            (members if parameter.numel() else empty).add(str(given[i]) if given else position)
            position += 1
        groups.append(members)
    return groups, empty
