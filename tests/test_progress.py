"""What mo-fused train shows: whether anybody reads it must not matter to the run."""

from __future__ import annotations

import math
from typing import Any

from mo_fused.training.progress import EVERY, Progress


class Bar:
    """Stands for tqdm's, with a reader that has gone."""

    def __init__(self) -> None:
        self.steps = 0

    def set_postfix_str(self, text: str, refresh: bool) -> None: ...

    def update(self, steps: int) -> None:
        self.steps += steps

    def write(self, line: str) -> None:
        raise BrokenPipeError(32, "Broken pipe")


def test_a_reader_that_has_gone_does_not_hide_the_end_of_the_run() -> None:
    bar, task, asked = Bar(), Any, list[int]()
    progress = Progress(bar, task)  # type: ignore[arg-type]
    progress.on_divergence = lambda: asked.append(1)
    progress.write({"step": EVERY, "loss": 2.0})
    progress.event({"step": EVERY, "watcher": "LossSpike", "message": "high"})
    progress.write({"step": EVERY + 1, "loss": math.nan})
    assert bar.steps == 2 and progress.findings == 1
    assert progress.diverged_at == EVERY + 1 and asked == [1]
