"""A trainer's checkpoints: what they hold, when one is refused, and how a run goes on from one."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from mo_fused.errors import bad_option
from mo_fused.training.checkpoints import FORMAT_VERSION, Checkpoints, load_checkpoint
from mo_fused.training.restoring import Parts, own_entry
from mo_fused.training.rng import rng_state
from mo_fused.training.trainer_step import TrainerStep


class TrainerSaving(TrainerStep):
    """The part of :class:`Trainer` that saves and resumes."""

    checkpoints: Checkpoints | None
    config: dict[str, Any]
    extra: dict[str, Any]
    step: int
    _loss: Tensor | None
    _best: dict[str, Any]
    _saved: int | None
    _abandoned: list[int]

    def save(self) -> Path:
        """Write a checkpoint of this moment now. With several processes all have to call it; the first one writes.

        Raises:
            ValueError: the trainer has no ``checkpoints``.
            OSError: it could not be written; all earlier ones are still there.
        """
        if self.checkpoints is None:
            raise bad_option("checkpoints", "a folder", None, "give checkpoints= to the Trainer")
        if self.monitor is not None and hasattr(self.monitor, "flush"):
            self.monitor.flush()  # what the log says of steps before a checkpoint is never lost
        state, error = self.state_dict(), None
        if self._processes.rank == 0:
            try:
                self.checkpoints.save(state, self._best["step"], self._abandoned)
            except (OSError, ValueError) as caught:  # the other processes have to learn of it
                error = caught
        error = self._processes.from_first(error)
        if error is not None:
            raise error
        self._saved, self._abandoned = self.step, []
        return self.checkpoints.path(self.step)

    def resume(self, source: str | Path | None = None) -> Path | None:
        """Go on from a checkpoint: everything is as it was when it was written, and the next :meth:`fit` continues.

        Args:
            source: a checkpoint file; None is the newest one of ``checkpoints`` that can be read. Going back to an
                earlier one of ``checkpoints`` leaves the later ones out of the run: with the next save they are renamed
                (``.pt.abandoned``), never removed.

        Returns:
            The file, None where there is no checkpoint yet: then nothing is changed.

        Raises:
            InputError: it cannot be read, or is that of another model or optimizer.
            ValueError: neither ``source`` nor ``checkpoints``.
        """
        path: Path | None
        if source is not None:
            path = Path(source)
        elif self.checkpoints is None:
            raise bad_option("source", "a checkpoint file", None, "name one, or give checkpoints= to the Trainer")
        else:
            newest: Path | ValueError | None = None
            if self._processes.rank == 0:
                try:
                    found = self.checkpoints.latest()
                    newest = None if found is None else found[0]
                except ValueError as caught:  # the other processes have to learn of it
                    newest = caught
            newest = self._processes.from_first(newest)
            if isinstance(newest, ValueError):
                raise newest
            if newest is None:
                return None
            path = newest
        self.load_state_dict(load_checkpoint(path))
        self._saved = self.step
        if self.checkpoints is not None and path.resolve().parent == self.checkpoints.folder.resolve():
            # A newer one that can't be read was passed over; the run will write it again.
            later = [step for step in self.checkpoints.steps() if step > self.step]
            self._abandoned = later if source is not None else []
        return path

    def state_dict(self) -> dict[str, Any]:
        """All that a later process needs to go on as if nothing had happened (:data:`checkpoints.KEYS`).

        Tensors are those of the model and the optimizer themselves, not copies. With several processes all have to
        call it, since ``data`` and ``rng`` are lists with an entry for each.
        """
        self._skipped = self._was_skipped()
        place, numbers = None if self._feed is None else self._feed.state_dict(), rng_state()
        if self._resumed is not None:  # and not gone on yet
            place = own_entry(self._resumed.get("data"), self._processes.rank)
            numbers = own_entry(self._resumed.get("rng"), self._processes.rank) or numbers
        optimizer: Any = self.optimizer
        if hasattr(optimizer, "consolidate_state_dict"):  # ZeroRedundancyOptimizer: to the process that writes
            optimizer.consolidate_state_dict(0)
        own = not hasattr(optimizer, "consolidate_state_dict") or self._processes.rank == 0
        state = {
            "format_version": FORMAT_VERSION,
            "model_state_dict": self._processes.module.state_dict(),
            "optimizer_state_dict": optimizer.state_dict() if own else None,
            "scheduler_state_dict": None if self.schedule is None else self.schedule.state_dict(),
            "scaler_state_dict": None if self.precision.scaler is None else self.precision.scaler.state_dict(),
            "step": self.step,
            "epoch": self.epoch,
            "data": self._processes.gather(place),
            "rng": self._processes.gather(numbers),
            "config": self.config,
            "trainer": {"skipped": self._skipped, "best_step": self._best["step"], "best_value": self._best["value"]},
        }
        if self.extra:
            state["extra"] = {name: part.state_dict() for name, part in self.extra.items()}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        """Take over what :meth:`state_dict` gave, or as much of it as somebody saved by hand.

        ``model_state_dict`` is needed; for each other part that is missing a warning says what starts anew. The
        loader's place and the random numbers are set when :meth:`fit` begins.

        Returns:
            These warnings.

        Raises:
            InputError: the model or the optimizer is another one; nothing has been changed then.
        """
        parts = Parts(self._processes.module, self.optimizer, self.schedule, self.precision.scaler)
        parts.check(state)
        state = {key: state[key] for key in state if key not in ("data", "rng") or _by_process(state[key])}
        lines = parts.load(state)
        found: Any = state.get("extra") if isinstance(state.get("extra"), Mapping) else {}
        for name, part in self.extra.items():
            if name in found:
                part.load_state_dict(found[name])
            else:
                lines.append(f"the checkpoint has no extra {name!r}: it stays as it is")
        self.step = int(state.get("step") or 0)
        extra: Any = state.get("trainer")
        extra = extra if isinstance(extra, Mapping) else {}
        self._skipped = bool(extra.get("skipped", False))
        self._best = {"step": extra.get("best_step"), "value": extra.get("best_value")}
        self._feed = None
        self._resumed = {key: state[key] for key in ("epoch", "data", "rng") if key in state}
        before, here = len(state.get("data") or ()), self._processes.count
        if before not in (0, here):
            anew = "the epoch at hand begins again, with other random numbers"
            lines.append(f"the checkpoint was saved by {before} processes, here are {here}: {anew}")
        for line in lines:
            warnings.warn(line, RuntimeWarning, stacklevel=2)
        return lines

    def _save_if_finite(self) -> bool:
        """Save, unless a parameter, the loss of a step that was taken, or a buffer is not finite: such a state must not
        become the newest checkpoint. Infinity in a buffer is none of that: masks have it."""
        finite = self._loss is None or self._left_out or self._was_skipped() or bool(self._loss.isfinite())
        finite = finite and all(bool(p.detach().isfinite().all()) for p in self.model.parameters())
        finite = finite and not any(bool(b.isnan().any()) for b in self.model.buffers() if b.is_floating_point())
        finite = all(self._processes.gather(finite))
        if finite:
            self.save()
        else:
            found = "the loss, a parameter or a buffer is not finite"
            warnings.warn(f"step {self.step}: no checkpoint was written: {found}", RuntimeWarning, stacklevel=3)
        return finite


def _by_process(entries: Any) -> bool:
    """Whether it is what a trainer saves of each process; by hand ``data`` and ``rng`` may be anything."""
    return isinstance(entries, list) and all(entry is None or isinstance(entry, Mapping) for entry in entries)
