"""A trace of a few training steps, to be looked at in Perfetto or TensorBoard."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from mo_fused.errors import bad_option
from mo_fused.training.atomic import write_atomically

WARM_UP = 1
"""Steps that run under the profiler without being recorded: its own start is slow."""


class StepProfiler:
    """Records steps with ``torch.profiler`` (the CPU, and CUDA where there is a device) and writes the trace.

    ``path`` is None until the trace is there. Afterwards, and after :meth:`close`, :meth:`step` does nothing.

    Raises:
        ValueError: ``steps`` below 1.
    """

    def __init__(self, steps: int, folder: str | Path) -> None:
        if steps < 1:
            raise bad_option("steps", "1 or more", steps, "give the number of steps to record")
        self.path: Path | None = None
        self._folder = Path(folder) / "profile"
        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])
        self._profile: Any = profile(
            activities=activities,
            schedule=schedule(wait=0, warmup=WARM_UP, active=steps, repeat=1),
            on_trace_ready=self._write,
        )
        self._profile.start()

    def step(self, *_: Any) -> None:
        """Call it after each step; takes what a trainer tells its monitor, and so is one itself."""
        if self._profile is not None:
            self._profile.step()
            if self.path is not None:
                self.close()

    def close(self) -> Path | None:
        """Ends the recording; where fewer steps were done than asked for, those are written.

        Returns:
            The file, None where no step was recorded.

        Raises:
            OSError: it could not be written.
        """
        running, self._profile = self._profile, None
        if running is not None:
            running.stop()
        return self.path

    def __enter__(self) -> StepProfiler:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, recorded: Any) -> None:
        if self.path is not None:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        # The name that torch.profiler.tensorboard_trace_handler gives, which TensorBoard's plugin looks for.
        path = self._folder / f"{socket.gethostname()}_{os.getpid()}.{time.time_ns()}.pt.trace.json"
        with tempfile.TemporaryDirectory() as elsewhere:
            trace = Path(elsewhere) / "trace.json"
            recorded.export_chrome_trace(str(trace))
            with open(trace, "rb") as source:
                write_atomically(path, lambda file: shutil.copyfileobj(source, file))
        self.path = path


def profile_steps(steps: int, folder: str | Path) -> StepProfiler:
    """Record ``steps`` steps, after one of warm-up, into ``folder/profile/NAME.pt.trace.json``.

    The profiler starts at once: the first step to end is the warm-up. Open the file at https://ui.perfetto.dev, or the
    folder with TensorBoard and its profiler plugin.

    Raises:
        ValueError: ``steps`` below 1.
    """
    return StepProfiler(steps, folder)
