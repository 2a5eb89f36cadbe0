"""What a Monitor with its JSON lines costs a training step of the text model.

    python bench/bench_monitor.py [--quick] [--output FILE] [--rounds N] [--threads N] [--only TEXT]

Two trainings of the model of ``mo-fused train`` take turns, one with a Monitor and one without; on CUDA ten steps at a
time, then the device is waited for. A difference of one per cent is small beside what one step differs from the next,
so the time inside of ``Monitor.step`` is added up too: on the CPU that is all but the hooks on the optimizer's step.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mo_fused.bench.case import Case, Goal, Settings, run_all
from mo_fused.bench.race import Contender, Sample
from mo_fused.training.batches import sample_count, to_device
from mo_fused.training.config import TrainConfig
from mo_fused.training.device import choose_device
from mo_fused.training.monitor import Monitor
from mo_fused.training.padding import count_targets
from mo_fused.training.sinks import JsonLines
from mo_fused.training.tasks import build_task

PLAIN, MONITORED = "text step", "text step, Monitor"


@dataclass
class Watched:
    """A training with a monitor, and what the monitor has taken of it."""

    call: Callable[[], None]
    folder: tempfile.TemporaryDirectory[str] | None
    monitor: Monitor | None
    inside: list[float] = field(default_factory=list)


def training(settings: Settings, monitored: bool, detail_every: int) -> Watched:
    """Steps of the text model as ``mo-fused train`` makes them; a call is one (on CUDA ten)."""
    device = choose_device()
    small: dict[str, Any] = (
        {"batch_size": 2, "context": 16, "layers": 1, "heads": 2, "width": 16} if settings.quick else {}
    )
    config = TrainConfig(task="lm", **small)
    task = build_task(config, device)
    optimizer = config.preset.build_optimizer(task.model, config.optimizer, skip_nonfinite=True, stats=True)
    folder = tempfile.TemporaryDirectory() if monitored else None
    monitor = None
    if folder is not None:
        sinks = [JsonLines(folder.name)]
        monitor = Monitor(optimizer, sinks, detail_every=detail_every, model=task.model)
    batches = iter(task.loader)
    watched = Watched(lambda: None, folder, monitor)

    def call() -> None:
        for _ in range(10 if device.type == "cuda" else 1):
            batch = next(batches)
            info = {"samples": sample_count(batch), "targets": count_targets(batch)}
            loss = task.loss_fn(task.model, to_device(batch, device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if monitor is not None:
                begun = time.perf_counter()
                monitor.step(loss, info)
                watched.inside.append(time.perf_counter() - begun)
        if device.type == "cuda":
            torch.cuda.synchronize()

    watched.call = call
    return watched


class Cost:
    """The race, and afterwards the shares."""

    def __init__(self, detail_every: int) -> None:
        self.detail_every = detail_every
        self.watched: Watched | None = None
        self.found: dict[str, float] = {}

    def contenders(self, settings: Settings) -> list[Contender]:
        plain = training(settings, False, self.detail_every)
        self.watched = training(settings, True, self.detail_every)
        return [Contender(PLAIN, plain.call), Contender(MONITORED, self.watched.call)]

    def notes(self, samples: dict[str, Sample]) -> list[str]:
        watched = self.watched
        assert watched is not None and watched.monitor is not None and watched.folder is not None
        watched.monitor.close()
        watched.folder.cleanup()
        steps = 10 if choose_device().type == "cuda" else 1
        step = samples[PLAIN].median / steps
        inside = statistics.median(watched.inside[3:])
        self.found = {"inside_us": inside * 1e6, "share_of_step": inside / step, "step_ms": step * 1e3}
        return [
            f"Monitor.step: median {inside * 1e6:.0f} us, {inside / step:.3%} of a step of {step * 1e3:.2f} ms; "
            f"the two trainings differ by {samples[MONITORED].median / samples[PLAIN].median - 1.0:+.2%}"
        ]

    def extra(self, settings: Settings, names: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Recorded beside the times of the training with a monitor."""
        return {MONITORED: self.found}


def case(title: str, detail_every: int, goals: list[Goal]) -> Case:
    cost = Cost(detail_every)
    return Case("monitor", title, cost.contenders, goals, 60, cost.notes, cost.extra)


CASES = {
    "every-step": case("text model, Monitor with JSON lines", 500, [Goal(MONITORED, PLAIN, 1.01, at_most=True)]),
    # What the one step in 500 costs that has a detailed record; it may take five times as long for 1 % of all.
    "details": case("text model, Monitor with a detailed record in every step", 1, []),
}


if __name__ == "__main__":
    run_all(CASES, __doc__, {})
