"""Short measured runs over batch sizes, accumulation and recomputation: which fits, and which is the fastest."""

from __future__ import annotations

import multiprocessing
import pickle
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mo_fused.dispatch import is_cuda
from mo_fused.errors import bad_option
from mo_fused.training.errors import bad_input
from mo_fused.training.snapshot import kept_state
from mo_fused.training.sweep_run import Result, Setting, measure_in_child, resized, run_setting
from mo_fused.training.trial import WARM_UP, readable_bytes

if TYPE_CHECKING:
    from mo_fused.training.trainer import Trainer

NEAR = 0.05  # of the fastest rate: what is within it counts as fast, and less memory decides
_START = 120.0  # seconds until a process has imported torch
_CHILD = "mo_fused.training.sweep_run"


@dataclass(frozen=True)
class Row:
    """One combination. ``outcome`` is "ok", "out of memory", "time limit" or "error"; ``note`` says more."""

    batch_size: int
    accumulate: int
    recompute: str | None
    outcome: str
    samples_per_second: float | None = None
    seconds_per_step: float | None = None
    peak_memory: int | None = None
    """Bytes, as far as it came."""
    note: str = ""


@dataclass(frozen=True)
class Sweep:
    """All rows, and the recommended one (None where nothing fits); printed, it is a table."""

    rows: tuple[Row, ...]

    @property
    def recommended(self) -> Row | None:
        """The fastest that fits; of those within 5 % of it the one that takes the least memory."""
        fits = [row for row in self.rows if row.outcome == "ok"]
        if not fits:
            return None
        best = max(row.samples_per_second or 0.0 for row in fits)
        near = [row for row in fits if (row.samples_per_second or 0.0) >= (1 - NEAR) * best]
        return min(near, key=lambda row: (row.peak_memory or 0, -(row.samples_per_second or 0.0)))

    def __str__(self) -> str:
        head = ("batch size", "accumulate", "recompute", "samples/s", "s/step", "peak memory", "")
        lines = [head, *(_cells(row, row == self.recommended) for row in self.rows)]
        widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
        text = ("  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)) for line in lines)
        return "\n".join(line.rstrip() for line in text)


def sweep(
    trainer: Trainer,
    loader: Iterable[Any] | None,
    batch_sizes: Sequence[int],
    accumulate: Sequence[int] = (1,),
    recompute: Sequence[str | None] = (None,),
    *,
    steps: int = 10,
    make_loader: Callable[[int], Iterable[Any]] | None = None,
    limit: float = 120.0,
    isolate: bool = True,
) -> Sweep:
    """:meth:`Trainer.sweep`, which says what it does."""
    _check(trainer, batch_sizes, accumulate, recompute, steps, limit)
    make = make_loader if make_loader is not None else resized(loader, batch_sizes[0])
    settings = [Setting(*one, WARM_UP + steps, limit) for one in product(batch_sizes, accumulate, recompute)]
    parts = {
        "model": trainer.model,
        "optimizer": trainer.optimizer,
        "loss_fn": trainer.loss_fn,
        "count": trainer.count,
        "make_loader": make,
        "precision": trainer.precision.name,
        "max_grad_norm": trainer.max_grad_norm,
    }
    if not isolate:
        with kept_state(trainer, *(() if loader is None else (loader,))):
            return Sweep(tuple(_row(one, run_setting(parts, one)) for one in settings))
    if is_cuda(trainer.device):
        torch.cuda.empty_cache()  # what is cached here would be missing there
    with tempfile.TemporaryDirectory(prefix="mo_fused-sweep-") as folder:
        path = Path(folder) / "parts.pickle"
        path.write_bytes(_pickled(parts))
        return Sweep(tuple(_row(one, _in_child(path, one)) for one in settings))


def _check(
    trainer: Trainer,
    batch_sizes: Sequence[int],
    accumulate: Sequence[int],
    recompute: Sequence[str | None],
    steps: int,
    limit: float,
) -> None:
    for name, numbers in (("batch_sizes", batch_sizes), ("accumulate", accumulate), ("steps", [steps])):
        if (
            isinstance(numbers, (int, str))
            or not numbers
            or any(isinstance(one, bool) or not isinstance(one, int) or one < 1 for one in numbers)
        ):
            raise bad_option(name, "whole numbers, 1 or more", numbers, "give at least one")
    if not recompute or isinstance(recompute, str):
        raise bad_option("recompute", "a list of patterns and None", recompute, "give (None,) to recompute nothing")
    if not limit > 0:
        raise bad_option("limit", "above 0", limit, "give the seconds that one combination may take")
    if trainer._processes.count > 1:
        found = f"one of {trainer._processes.count} processes"
        raise bad_input("sweep", expected="a model of one process", found=found, remedy="sweep without torchrun")


# --- processes


def _pickled(parts: dict[str, Any]) -> bytes:
    """One pickle for all, so that the optimizer's parameters stay the model's; by value, nothing is shared."""
    for name, part in parts.items():
        try:
            pickle.dumps(part)
        except Exception as error:
            raise bad_input(
                name,
                expected="something that can be pickled, since each combination runs in a process of its own",
                found=f"{type(part).__name__}, which can't ({error})",
                remedy="define it at the top level of a module (no lambda, no function inside a function), "
                "or give isolate=False to measure in this process",
            ) from error
    return pickle.dumps(parts)


def _in_child(path: Path, setting: Setting) -> Result:
    """Measure in a process that is ended at the time limit, and that memory may end.

    Not forked from this one: threads that have computed here (OpenMP's) don't survive a fork, and a child that waits
    for them hangs; nor does CUDA. Forked from a server, which has imported torch and computed nothing.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([_CHILD])
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=measure_in_child, args=(str(path), setting, torch.get_num_threads(), theirs))
    child.start()
    theirs.close()
    try:
        return _outcome(child, ours, setting)
    finally:
        if child.is_alive():
            child.kill()
        child.join()
        ours.close()


def _outcome(child: Any, pipe: Connection, setting: Setting) -> Result:
    last = Result("error")
    if not pipe.poll(_START):
        return last.because("error", f"the process did not start within {_START:g} s")
    deadline = time.monotonic() + setting.limit
    while pipe.poll(max(0.0, deadline - time.monotonic())):
        try:
            last = pipe.recv()
        except EOFError:  # it has ended
            child.join()
            if last.outcome != "running" and last != Result("error"):
                return last
            if child.exitcode == -9:
                return last.because("out of memory", "killed, most likely by the system's out-of-memory killer")
            note = f"the process ended with exit code {child.exitcode}; its messages are on standard error"
            return last.because("error", note)
    return last.because("time limit", f"more than {setting.limit:g} s")


# --- table


def _row(setting: Setting, result: Result) -> Row:
    rate, memory = result.samples_per_second, result.peak_memory
    return Row(
        batch_size=setting.batch_size,
        accumulate=setting.accumulate,
        recompute=setting.recompute,
        outcome=result.outcome,
        samples_per_second=rate if result.outcome == "ok" else None,
        seconds_per_step=result.seconds_per_step if result.outcome == "ok" else None,
        peak_memory=memory,
        note=result.note,
    )


def _cells(row: Row, recommended: bool) -> tuple[str, ...]:
    note = "recommended" if recommended else "" if row.outcome == "ok" else row.outcome
    if row.note:
        note += f": {row.note.splitlines()[0]}"
    return (
        str(row.batch_size),
        str(row.accumulate),
        row.recompute or "-",
        "-" if row.samples_per_second is None else f"{row.samples_per_second:,.1f}",
        "-" if row.seconds_per_step is None else f"{row.seconds_per_step:.3g}",
        "-" if row.peak_memory is None else readable_bytes(row.peak_memory),
        note,
    )
