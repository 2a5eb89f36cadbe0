"""The run of one combination of a sweep, here or in a process of its own."""

from __future__ import annotations

import copy
import os
import pickle
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from mo_fused.training.errors import bad_input
from mo_fused.training.trainer import Trainer
from mo_fused.training.trial import Watch, is_out_of_memory, peak_memory, reset_peak


@dataclass(frozen=True)
class Setting:
    """A combination, the steps to run (the first few are warm-up) and the seconds that it may take."""

    batch_size: int
    accumulate: int
    recompute: str | None
    steps: int
    limit: float


@dataclass(frozen=True)
class Result:
    """What was measured; ``outcome`` as in a row of the table, or "running" while it is not over."""

    outcome: str
    note: str = ""
    samples_per_second: float | None = None
    seconds_per_step: float | None = None
    peak_memory: int | None = None

    def because(self, outcome: str, note: str) -> Result:
        return replace(self, outcome=outcome, note=note)


class _TimeIsUp(Exception):
    """More than a combination may take, in a run that nobody else ends."""


class _Timed(Watch):
    """Ends the run at its time limit and tells after each step that it is alive."""

    def __init__(self, setting: Setting, tell: Callable[[], object]) -> None:
        super().__init__()
        self._deadline = time.perf_counter() + setting.limit
        self._limit = setting.limit
        self._tell = tell

    def step(self, loss: Tensor, batch_info: Mapping[str, Any]) -> None:
        super().step(loss, batch_info)
        self._tell()
        if time.perf_counter() > self._deadline:
            raise _TimeIsUp(f"more than {self._limit:g} s")


class Resized:
    """Makes a ``DataLoader`` like another one with another batch size.

    Dataset, collate function, workers and pinning are the same; shuffled stays shuffled, any other sampler is taken
    over as it is.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader

    def __getstate__(self) -> dict[str, Any]:
        return {"options": self._options()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __call__(self, batch_size: int) -> DataLoader[Any]:
        options = self.__dict__.get("options")
        return DataLoader(batch_size=batch_size, **(self._options() if options is None else options))

    def _options(self) -> dict[str, Any]:
        old = self._loader
        options: dict[str, Any] = {
            "dataset": old.dataset,
            "collate_fn": old.collate_fn,
            "num_workers": old.num_workers,
            "pin_memory": old.pin_memory,
            "drop_last": old.drop_last,
            "worker_init_fn": old.worker_init_fn,
        }
        if old.num_workers:
            options["prefetch_factor"] = old.prefetch_factor
        if type(old.sampler) is RandomSampler:
            options["shuffle"] = True
        elif type(old.sampler) is not SequentialSampler and not isinstance(
            old.dataset, torch.utils.data.IterableDataset
        ):
            options["sampler"] = old.sampler
        return options


def resized(loader: Iterable[Any] | None, batch_size: int) -> Resized:
    """A function from a batch size to a loader.

    Raises:
        InputError: ``loader`` is no DataLoader that batches by a size.
    """
    if type(loader) is DataLoader and loader.batch_size is not None:
        return Resized(loader)
    found = type(loader).__name__ + (" with a batch_sampler" if isinstance(loader, DataLoader) else "")
    raise bad_input(
        "loader",
        expected="a torch DataLoader with a batch_size, which can be made again with another one",
        found=found,
        remedy="give make_loader=, a function from the batch size to a loader",
    )


def run_setting(
    parts: Mapping[str, Any], setting: Setting, tell: Callable[[Result], object] = lambda _: None, own: bool = False
) -> Result:
    """Run it and measure. ``own``: the parts belong to this run alone, so nothing is copied."""
    peak: int | None = None
    device = torch.device("cpu")
    try:
        model, optimizer = parts["model"], parts["optimizer"]
        if not own:
            model, optimizer = copy.deepcopy((model, optimizer))
        if setting.recompute is not None:
            from mo_fused.training.recompute import checkpoint_activations

            checkpoint_activations(model, setting.recompute)
        watch = _Timed(setting, lambda: tell(Result("running", peak_memory=peak_memory(device))))
        trainer = Trainer(
            model,
            optimizer,
            parts["loss_fn"],
            precision=parts["precision"],
            accumulate=setting.accumulate,
            monitor=watch,
            max_grad_norm=parts["max_grad_norm"],
            count=parts["count"],
        )
        device = trainer.device
        reset_peak(device)
        trainer.fit(parts["make_loader"](setting.batch_size), setting.steps)
        peak = peak_memory(device)
        return Result("ok", "", watch.samples_per_second(), statistics.median(watch.seconds()), peak)
    except _TimeIsUp as error:
        return Result("time limit", str(error), peak_memory=peak_memory(device))
    except Exception as error:
        outcome = "out of memory" if is_out_of_memory(error) else "error"
        note = "" if outcome == "out of memory" else f"{type(error).__name__}: {error}"
        return Result(outcome, note, peak_memory=peak_memory(device))


def measure_in_child(path: str, setting: Setting, threads: int, pipe: Connection) -> None:
    """What the process of one combination runs. It works in a folder of its own, which is thrown away."""
    pipe.send(Result("running"))
    os.chdir(Path(path).parent)
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    torch.set_num_threads(threads)
    try:
        parts = pickle.loads(Path(path).read_bytes())
    except Exception as error:
        remedy = (
            "what it needs must be importable in a new process: define it in a module, not in a notebook or with -c"
        )
        pipe.send(Result("error", f"{type(error).__name__}: {error} ({remedy}, or give isolate=False)"))
        return
    pipe.send(run_setting(parts, setting, pipe.send, own=True))
