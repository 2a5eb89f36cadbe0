"""The training loop: accumulation, precision, schedule, validation and checkpoints around any torch optimizer."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from mo_fused.errors import bad_option, message
from mo_fused.optim.base import FusedOptimizer
from mo_fused.training.checkpoints import Checkpoints
from mo_fused.training.deferred import Deferred
from mo_fused.training.feed import Feed
from mo_fused.training.padding import count_targets
from mo_fused.training.plain import plain
from mo_fused.training.precision import Precision
from mo_fused.training.processes import Processes, device_of
from mo_fused.training.restoring import own_entry
from mo_fused.training.rng import kept_rng, set_rng_state
from mo_fused.training.trainer_checks import check_extra, check_folder, check_held, check_parts, check_steps
from mo_fused.training.trainer_saving import TrainerSaving
from mo_fused.training.trainer_step import LossFn, StepMonitor
from mo_fused.training.trials import Trials


class Trainer(TrainerSaving, Trials):
    """Trains a model; every part that it is made of also works in a loop of your own.

    One step takes ``accumulate`` batches of the loader. Each batch's mean loss is weighted by its share of the step's
    *valid targets* (over all batches, and over all processes), so that the step equals that of one large batch, also
    with padding and with a last step of fewer batches at the end of an epoch. A batch without any valid target is left
    out. Under ``DistributedDataParallel`` gradients are exchanged in the last backward pass only. Under ``fully_shard``
    every pass communicates, so each process has to have as many batches, and none is left out.

    The host doesn't wait for the device: that a step was skipped (gradients that were not finite) is known one step
    later, and the schedule then stays where it is once. Only in fp16 with another optimizer than this package's does
    torch's scaler wait, and holds the schedule at once.

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
        extra: further objects with ``state_dict()`` and ``load_state_dict()`` that checkpoints keep, by name: averaged
            weights, a second optimizer, a monitor.

    Raises:
        InputError: with ``checkpoints``, values that a checkpoint could be written with and not read again, or
            parameters of the optimizer that are not the model's, which no checkpoint would hold.
        ValueError: a value outside its range or of another kind, ``max_grad_norm`` for an optimizer that clips, a
            schedule of another optimizer, an optimizer that needs a closure (LBFGS).
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
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        if not isinstance(accumulate, int) or accumulate < 1:
            raise bad_option("accumulate", "a whole number, 1 or more", accumulate, "give the number of batches a step")
        if not isinstance(validate_every, int) or validate_every < 0:
            raise bad_option("validate_every", "a whole number, 0 or more", validate_every, "give a number of steps")
        check_parts(model, optimizer, loss_fn, schedule, monitor)
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
        if checkpoints is not None:
            check_held(model, optimizer)
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
        self.extra = check_extra(extra)
        self.step = 0
        """Optimizer steps done."""
        self._feed: Feed | None = None
        self._resumed: Mapping[str, Any] | None = None
        self._skipped: Deferred | bool | None = None  # of the step before
        self._left_out = False  # the last step, by a scaler that has waited for the device
        self._loss: Tensor | None = None
        self._best: dict[str, Any] = {"step": None, "value": None}
        self._saved: int | None = None
        self._abandoned: list[int] = []  # steps whose checkpoints the run has gone back behind
        self._warned = False
        self._stop_asked = self._save_at_stop = False
        self._stop_words: list[Deferred] = []

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
            InputError: the loader is empty, or is not the one that the resumed run began with; the folder of
                ``checkpoints`` holds those of another run.
            ValueError: ``steps`` is no whole number, or more than the schedule has.
            TypeError: ``loss_fn`` returned something else than a 0-dim tensor.
            OSError: the last checkpoint could not be written.
        """
        check_steps(steps, self.step, self.optimizer, self.schedule)
        if self.checkpoints is not None and self.step == 0 and self._saved is None:
            check_folder(self.checkpoints, self._processes)
        feed = self._open(loader)
        self._loader = loader
        self._stop_asked, self._stop_words = False, []
        self._save_at_stop = True
        self._join_monitor()
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

    def _join_monitor(self) -> None:
        """A watcher's wish to stop ends this trainer's fit; a monitor without a scaler is told of this trainer's."""
        monitor: Any = self.monitor
        on_stop = getattr(monitor, "on_stop", None)
        if isinstance(on_stop, list) and self.stop not in on_stop:
            on_stop.append(self.stop)
        if self.precision.scaler is not None and getattr(monitor, "scaler", self) is None:
            monitor.scaler = self.precision.scaler

    def _open(self, loader: Iterable[Any]) -> Feed:
        """The feed of ``loader``, at the place that was resumed; then the generators as the checkpoint has them."""
        if self._feed is None or self._feed.loader is not loader:
            feed, resumed, rank = Feed(loader), self._resumed or {}, self._processes.rank
            if len(resumed.get("data") or ()) in (0, self._processes.count):
                place, numbers = (own_entry(resumed.get(part), rank) for part in ("data", "rng"))
                if place is not None:
                    feed.load_state_dict(place)
                if numbers is not None:
                    set_rng_state(numbers)
            else:  # another share of the data
                feed.epoch = int(resumed.get("epoch") or 0)
            self._feed, self._resumed = feed, None
        return self._feed

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
        self.optimizer.zero_grad()  # of a validation that calls backward: they are no part of the next step
        for module, training in modes:
            module.training = training
        if not isinstance(values, Mapping):
            expected, remedy = "numbers by name, as a dict", 'return {"val_loss": ...}'
            raise TypeError(f"validate: {message(expected, type(values).__name__, remedy)}")
        try:
            return {name: float(value) for name, value in values.items()}
        except (TypeError, ValueError):
            found = ", ".join(f"{name}: {type(value).__name__}" for name, value in values.items())
            raise TypeError(f"validate: {message('numbers by name', found, 'return one number each')}") from None

    def _is_best(self, values: Mapping[str, float]) -> bool:
        if self.checkpoints is None:
            return False
        if self.checkpoints.best not in values:
            if not self._warned:
                found = f"validate returned {', '.join(values) or 'nothing'}, not {self.checkpoints.best}"
                remedy = "name one of these with Checkpoints(best=...)"
                warnings.warn(f"no best checkpoint is kept: {found}; {remedy}", RuntimeWarning, stacklevel=3)
                self._warned = True
            return False
        value = self._processes.from_first(values[self.checkpoints.best])  # all save, or none
        better = self.checkpoints.better(value, self._best["value"])
        if better:
            self._best = {"step": self.step, "value": value}
        return better
