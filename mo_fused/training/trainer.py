"""The training loop: accumulation, precision, schedule, validation and checkpoints around any torch optimizer."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from mo_fused.errors import bad_option, message
from mo_fused.optim.base import FusedOptimizer
from mo_fused.training.batches import sample_count, to_device
from mo_fused.training.checkpoints import FORMAT_VERSION, Checkpoints, load_checkpoint
from mo_fused.training.deferred import Deferred
from mo_fused.training.errors import bad_input
from mo_fused.training.feed import Feed
from mo_fused.training.padding import count_targets
from mo_fused.training.plain import plain
from mo_fused.training.precision import Precision
from mo_fused.training.processes import Processes, device_of
from mo_fused.training.restoring import Parts, own_entry
from mo_fused.training.rng import kept_rng, rng_state, set_rng_state
from mo_fused.training.trials import Trials

LossFn = Callable[[nn.Module, Any], Tensor]
"""(model, batch on the model's device) to the mean loss over the batch's valid targets, a 0-dim tensor."""


MOST_WITHOUT = 10_000
"""Batches in a row without a valid target after which an endless loader is taken to have none."""


class StepMonitor(Protocol):
    """What a trainer calls after every step; :class:`Trainer` says what ``batch_info`` holds."""

    def step(self, loss: Tensor, batch_info: Mapping[str, Any]) -> None: ...


def check_loss(loss: object) -> None:
    """Raises TypeError unless ``loss`` is what a :data:`LossFn` returns."""
    if not isinstance(loss, Tensor) or loss.dim() != 0 or not loss.requires_grad:
        found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        found += " without a gradient" if isinstance(loss, Tensor) and not loss.requires_grad else ""
        remedy = "return the mean over the batch's valid targets"
        raise TypeError(f"loss_fn: {message('a 0-dim tensor to call backward on', found, remedy)}")


class Trainer(Trials):
    """Trains a model; every part that it is made of also works in a loop of your own.

    One step takes ``accumulate`` batches of the loader. Each batch's mean loss is weighted by its share of the step's
    *valid targets* (over all batches, and over all processes), so that the step equals that of one large batch, also
    with padding and with a last step of fewer batches at the end of an epoch. A batch without any valid target is left
    out. Under ``DistributedDataParallel`` gradients are exchanged in the last backward pass only.

    The host never waits for the device: that a step was skipped (gradients that were not finite) is known one step
    later, and the schedule then stays where it is once.

    ``monitor.step(loss, batch_info)`` gets the step's loss (0-dim, on the device, the mean over its valid targets) and
    ``step`` (from 1), ``epoch``, ``lr`` (of the first group), ``batches``, ``samples``, ``targets``, ``data_seconds``
    (time waiting for the loader), ``seconds`` (the whole step, without validation and checkpoint), ``measured`` (0-dim
    tensors on the device: ``grad_norm``, ``clip_coef``, ``update_norm``, ``skipped``, as far as they are known) and
    ``validation`` (what ``validate`` returned after this step, or None).

    Args:
        model: on its device; ``DistributedDataParallel`` and ``fully_shard`` models too (the latter without
            ``checkpoints``).
        optimizer: any torch optimizer. Ours clips by itself.
        loss_fn: (model, batch) to the 0-dim mean loss over the valid targets of the batch.
        schedule: a torch ``LRScheduler`` of this optimizer, stepped once a step.
        precision: ``"fp32"``, ``"bf16"`` or ``"fp16"``: autocast of forward pass and loss; fp16 with a gradient scaler.
        accumulate: batches a step.
        monitor: see above.
        checkpoints: where and how often to save, or the folder (then at the end only).
        validate: called every ``validate_every`` steps and after the last; returns numbers by name. The value called
            ``checkpoints.best`` decides which checkpoint is the best.
        validate_every: steps; 0 validates after the last step only.
        max_grad_norm: clips the gradients of an optimizer that does not do so itself (``clip_grad_norm_``; groups with
            ``"clip": False`` are left out).
        count: number of valid targets of a batch, where :func:`mo_fused.training.count_targets` doesn't know.
        scaler: the gradient scaler to use with fp16.
        config: plain values that checkpoints carry along.

    Raises:
        InputError: with ``checkpoints``, values that a checkpoint could be written with and not read again.
        ValueError: a value outside its range, ``max_grad_norm`` for an optimizer that clips, a schedule of another
            optimizer.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss_fn: LossFn,
        *,
        schedule: LRScheduler | None = None,
        precision: str = "fp32",
        accumulate: int = 1,
        monitor: StepMonitor | None = None,
        checkpoints: Checkpoints | str | Path | None = None,
        validate: Callable[[], Mapping[str, float]] | None = None,
        validate_every: int = 0,
        max_grad_norm: float | None = None,
        count: Callable[[Any], int] = count_targets,
        scaler: torch.amp.GradScaler | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        if not isinstance(accumulate, int) or accumulate < 1:
            raise bad_option("accumulate", "a whole number, 1 or more", accumulate, "give the number of batches a step")
        if not isinstance(validate_every, int) or validate_every < 0:
            raise bad_option("validate_every", "a whole number, 0 or more", validate_every, "give a number of steps")
        if schedule is not None and schedule.optimizer is not optimizer:
            expected = "a schedule of this optimizer"
            raise bad_option("schedule", expected, "one of another", "build it from the optimizer that you pass")
        if isinstance(schedule, ReduceLROnPlateau):
            expected = "one that is stepped without a value"
            raise bad_option("schedule", expected, "ReduceLROnPlateau", "step it yourself, in validate")
        if max_grad_norm is not None:
            if not max_grad_norm > 0:
                raise bad_option("max_grad_norm", "above 0 or None", max_grad_norm, "give the largest norm")
            if isinstance(optimizer, FusedOptimizer) and optimizer.defaults["max_grad_norm"] is not None:
                expected = "None: this optimizer clips to its own max_grad_norm"
                raise bad_option("max_grad_norm", expected, max_grad_norm, "give it to one of the two")
        self.device = device_of(model)
        self._processes = Processes(model)
        if checkpoints is not None and self._processes.sharded:
            expected = "None for a model of DTensors, which no process holds whole"
            raise bad_option("checkpoints", expected, str(checkpoints), "save it with torch.distributed.checkpoint")
        if checkpoints is not None:  # better now than when the first one is written
            plain(dict(config or {}), "config")
            for group in optimizer.param_groups:
                plain({key: value for key, value in group.items() if key != "params"}, "optimizer.param_groups")
            plain({} if schedule is None else schedule.state_dict(), "schedule.state_dict()")
        self.model = model
        self.optimizer = optimizer
        self.loss_fn = loss_fn
        self.schedule = schedule
        self.precision = Precision(precision, self.device, optimizer, scaler)
        self.accumulate = accumulate
        self.monitor = monitor
        self.checkpoints = Checkpoints(checkpoints) if isinstance(checkpoints, (str, Path)) else checkpoints
        self.validate = validate
        self.validate_every = validate_every
        self.max_grad_norm = max_grad_norm
        self.count = count
        self.config = dict(config or {})
        self.step = 0
        """Optimizer steps done."""
        self._feed: Feed | None = None
        self._resumed: Mapping[str, Any] | None = None
        self._skipped: Deferred | bool | None = None  # of the step before
        self._left_out = False  # the last step, by a scaler that has waited for the device
        self._loss: Tensor | None = None
        self._best: dict[str, Any] = {"step": None, "value": None}
        self._saved: int | None = None
        self._stop_asked = self._save_at_stop = False
        self._stop_words: list[Deferred] = []

    @property
    def epoch(self) -> int:
        """Epochs of the loader that are over."""
        if self._feed is not None:
            return self._feed.epoch
        return 0 if self._resumed is None else int(self._resumed.get("epoch") or 0)

    def fit(self, loader: Iterable[Any], steps: int) -> int:
        """Train until ``steps`` optimizer steps have been done in all, those before a resume included.

        The model is put into training mode. Gradients that are there already count with the first step.

        Args:
            loader: batches, by epochs or without end; :class:`mo_fused.training.feed.Feed` says how its place is kept.
                The same loader as in an earlier call goes on where that call ended.
            steps: of the whole run.

        Returns:
            The number of steps done in all; fewer than asked for after :meth:`stop`.

        Raises:
            InputError: the loader is empty, or is not the one that the resumed run began with.
            TypeError: ``loss_fn`` returned something else than a 0-dim tensor.
            OSError: the last checkpoint could not be written.
        """
        feed = self._open(loader)
        self._loader = loader
        self._stop_asked, self._stop_words = False, []
        self._save_at_stop = True
        self.model.train()
        while self.step < steps and not self._stopping():
            loss, info = self._one_step(feed)
            self.step += 1
            self._loss = loss
            improved, best = False, self._best
            if self._validation_due(steps):
                info["validation"] = self._validated()
                improved = self._is_best(info["validation"])
            if self.monitor is not None:
                self.monitor.step(loss, {"step": self.step, **info})
            every = 0 if self.checkpoints is None else self.checkpoints.every
            if every and self.step < steps and (improved or self.step % every == 0):
                try:
                    saved = self._save_if_finite()
                except OSError as error:  # training goes on: the earlier checkpoints are whole, the next may succeed
                    saved = False
                    warnings.warn(f"step {self.step}: no checkpoint was written: {error}", RuntimeWarning, stacklevel=2)
                if not saved:
                    self._best = best  # of which there is a checkpoint
        if self.checkpoints is not None and self._saved != self.step and (self.step >= steps or self._save_at_stop):
            self._save_if_finite()
        return self.step

    def stop(self, *, save: bool = True) -> None:
        """End :meth:`fit` after the step at hand (with several processes: one or two later, on all the same).

        For monitors, signal handlers and other threads.

        Args:
            save: whether a checkpoint is written then.
        """
        self._stop_asked, self._save_at_stop = True, save

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
                self.checkpoints.save(state, self._best["step"])
            except (OSError, ValueError) as caught:  # the other processes have to learn of it
                error = caught
        error = self._processes.from_first(error)
        if error is not None:
            raise error
        self._saved = self.step
        return self.checkpoints.path(self.step)

    def resume(self, source: str | Path | None = None) -> Path | None:
        """Go on from a checkpoint: everything is as it was when it was written, and the next :meth:`fit` continues.

        Args:
            source: a checkpoint file; None is the newest one of ``checkpoints`` that can be read.

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
        return {
            "format_version": FORMAT_VERSION,
            "model_state_dict": self._processes.module.state_dict(),
            "optimizer_state_dict": self.optimizer.state_dict(),
            "scheduler_state_dict": None if self.schedule is None else self.schedule.state_dict(),
            "scaler_state_dict": None if self.precision.scaler is None else self.precision.scaler.state_dict(),
            "step": self.step,
            "epoch": self.epoch,
            "data": self._processes.gather(place),
            "rng": self._processes.gather(numbers),
            "config": self.config,
            "trainer": {"skipped": self._skipped, "best_step": self._best["step"], "best_value": self._best["value"]},
        }

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
        state = {key: state[key] for key in state if key not in ("data", "rng") or isinstance(state[key], list)}
        lines = parts.load(state)
        self.step = int(state.get("step") or 0)
        extra = state.get("trainer") or {}
        self._skipped = bool(extra.get("skipped", False))
        self._best = {"step": extra.get("best_step"), "value": extra.get("best_value")}
        self._feed = None
        self._resumed = {key: state[key] for key in ("epoch", "data", "rng") if key in state}
        processes = len(state.get("rng") or [None] * self._processes.count)
        if processes != self._processes.count:
            shared = "samples and random numbers are shared out anew"
            lines.append(
                f"the checkpoint was saved by {processes} processes, here are {self._processes.count}: {shared}"
            )
        for line in lines:
            warnings.warn(line, RuntimeWarning, stacklevel=2)
        return lines

    def _open(self, loader: Iterable[Any]) -> Feed:
        """The feed of ``loader``, at the place that was resumed; then the generators as the checkpoint has them."""
        if self._feed is None or self._feed.loader is not loader:
            feed, resumed, rank = Feed(loader), self._resumed, self._processes.rank
            place = None if resumed is None else own_entry(resumed.get("data"), rank)
            if place is not None:
                feed.load_state_dict(place)
            numbers = None if resumed is None else own_entry(resumed.get("rng"), rank)
            if numbers is not None:
                set_rng_state(numbers)
            self._feed, self._resumed = feed, None
        return self._feed

    def _one_step(self, feed: Feed) -> tuple[Tensor, dict[str, Any]]:
        """One optimizer step: its loss and what a monitor is told."""
        begun = time.perf_counter()
        batches, targets = self._take(feed)
        waited = time.perf_counter() - begun
        lr = self.optimizer.param_groups[0]["lr"]
        loss = self._backward(batches, targets)
        measured = self._update()
        info: dict[str, Any] = {
            "epoch": self.epoch,
            "lr": float(lr),
            "batches": len(batches),
            "samples": sum(sample_count(batch) for batch in batches),
            "targets": sum(targets),
            "data_seconds": waited,
            "seconds": time.perf_counter() - begun,
            "measured": measured,
            "validation": None,
        }
        return loss, info

    def _take(self, feed: Feed) -> tuple[list[Any], list[int]]:
        """The batches of a step and their numbers of valid targets; those without any are left out."""
        epoch, without = feed.epoch, 0
        while True:
            batches = feed.take(self.accumulate)
            targets = [int(self.count(batch)) for batch in batches]
            kept = [i for i, count in enumerate(targets) if count > 0]
            if not kept and self._processes.count > 1:
                kept = [0]  # the other processes wait for this one's backward pass
            if kept:
                return [batches[i] for i in kept], [targets[i] for i in kept]
            without += len(batches)
            if feed.epoch > epoch + 1 or without >= MOST_WITHOUT:
                raise bad_input(
                    "loader",
                    expected="batches with valid targets",
                    found=f"{without} batches without any",
                    remedy="look at the targets (ignore_index marks those that don't count), or give count= to Trainer",
                )

    def _backward(self, batches: list[Any], targets: list[int]) -> Tensor:
        """Backward passes of a step; returns its mean loss over all valid targets of all processes (detached)."""
        processes, scaler = self._processes, self.precision.scaler
        total: Tensor | float = float(sum(targets))
        if processes.count > 1:  # gradients will be averaged, so each process's share counts that much more
            total = (
                processes.sum(torch.tensor(total, device=self.device, dtype=torch.float64)).clamp(min=1.0)
                / processes.count
            )
        parts = []
        for number, (batch, count) in enumerate(zip(batches, targets, strict=True), 1):
            with nullcontext() if number == len(batches) else processes.no_sync():
                with self.precision.autocast():
                    loss = self.loss_fn(self.model, to_device(batch, self.device))
                check_loss(loss)
                if count == 0:
                    loss = loss.nan_to_num(0.0, 0.0, 0.0)
                share = count / total
                if isinstance(share, Tensor):
                    share = share.to(torch.promote_types(loss.dtype, torch.float32))
                weighted = loss if processes.count == 1 and count == total else loss * share
                (weighted if scaler is None else scaler.scale(weighted)).backward()  # type: ignore[no-untyped-call]
            parts.append(weighted.detach().to(torch.promote_types(weighted.dtype, torch.float32)))
        mean = torch.stack(parts).sum()
        if processes.count > 1:
            unsaved = self._stop_asked and not self._save_at_stop
            own = mean.new_tensor([float(self._stop_asked), float(unsaved)])
            mean, stop, unsaved = processes.sum(torch.cat([mean.reshape(1) / processes.count, own]))
            self._stop_words = [*self._stop_words[-1:], Deferred({"stop": stop, "unsaved": unsaved})]
        return mean

    def _update(self) -> dict[str, Tensor]:
        """Clip, step, schedule; returns what was measured (0-dim tensors on the device)."""
        optimizer, scaler = self.optimizer, self.precision.scaler
        # Without amp="fused" the scaler may leave the step out, and last_step is another's.
        ours = isinstance(optimizer, FusedOptimizer) and (scaler is None or optimizer._step_supports_amp_scaling)
        measured: dict[str, Tensor] = {}
        if self.max_grad_norm is not None:
            if scaler is not None:
                scaler.unscale_(optimizer)
            groups = [group for group in optimizer.param_groups if group.get("clip", True)]
            parameters = [parameter for group in groups for parameter in group["params"]]
            norm = nn.utils.clip_grad_norm_(parameters, self.max_grad_norm)
            # The same formula that clip_grad_norm_ applies and doesn't return.
            coefficient = (self.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
            measured.update({"grad_norm": norm, "clip_coef": coefficient})
        skipped_now = False
        if scaler is None:
            optimizer.step()
        else:
            # With another optimizer torch's scaler waits for the device anyway, and knows at once.
            before = 0.0 if ours else scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            skipped_now = not ours and scaler.get_scale() < before
        if isinstance(optimizer, FusedOptimizer) and not skipped_now:
            names = ("grad_norm", "update_norm", "clip_coef", "skipped")
            last = optimizer.last_step
            measured.update({name: value for name in names if (value := getattr(last, name)) is not None})
        if scaler is not None and not ours:
            measured["skipped"] = torch.tensor(skipped_now)
        optimizer.zero_grad()
        # That the step before this one was skipped is read only now, with this one queued.
        if self.schedule is not None and not skipped_now and not self._was_skipped():
            self.schedule.step()
        self._skipped = Deferred({"skipped": measured["skipped"]}) if ours else None
        self._left_out = skipped_now
        return measured

    def _was_skipped(self) -> bool:
        skipped = self._skipped
        return bool(skipped.read()["skipped"]) if isinstance(skipped, Deferred) else bool(skipped)

    def _stopping(self) -> bool:
        if self._processes.count == 1:
            return self._stop_asked
        if len(self._stop_words) < 2:
            return False
        word = self._stop_words[0].read()  # a step late, and so at the same step on every process
        if word["stop"]:
            self._save_at_stop = not word["unsaved"]
        return bool(word["stop"])

    def _validation_due(self, steps: int) -> bool:
        if self.validate is None or (self._stop_asked and self._processes.count == 1):
            return False
        return self.step == steps or bool(self.validate_every and self.step % self.validate_every == 0)

    def _validated(self) -> dict[str, float]:
        """What ``validate`` returns; every module gets back the mode (training or not) that it was in.

        Random numbers too: a run that is stopped before a validation, or has more of them, goes on with the same.
        """
        assert self.validate is not None
        modes = [(module, module.training) for module in self.model.modules()]
        with kept_rng():
            values: Any = self.validate()
        for module, training in modes:
            module.training = training
        if not isinstance(values, Mapping):
            expected, remedy = "numbers by name, as a dict", 'return {"val_loss": ...}'
            raise TypeError(f"validate: {message(expected, type(values).__name__, remedy)}")
        return {name: float(value) for name, value in values.items()}

    def _is_best(self, values: Mapping[str, float]) -> bool:
        if self.checkpoints is None or self.checkpoints.best not in values:
            return False
        value = self._processes.from_first(values[self.checkpoints.best])  # all save, or none
        better = self.checkpoints.better(value, self._best["value"])
        if better:
            self._best = {"step": self.step, "value": value}
        return better

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
