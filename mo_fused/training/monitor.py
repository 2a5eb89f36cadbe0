"""What happens in each step, written down without slowing it."""

from __future__ import annotations

import atexit
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mo_fused.dispatch import is_cuda
from mo_fused.distributed import shards
from mo_fused.errors import bad_option, message
from mo_fused.training.deferred import Deferred
from mo_fused.training.details import check_patterns, parameter_names
from mo_fused.training.record import RECORD, Waiting
from mo_fused.training.step_hooks import StepHooks, weak
from mo_fused.training.trial import host_peak

T = TypeVar("T")

_HOST_MEMORY_EVERY = 1.0  # seconds: reading it takes a tenth of a millisecond


class Monitor:
    """Records every step, hands the records to sinks and watchers, and never waits for the device by itself.

    What is measured on the device is copied to the host behind the step and read when the next one has been queued, so
    a record arrives one step late (:meth:`flush` fetches it). Norms come from ``optimizer.last_step``; build the
    optimizer with ``stats=True`` to have all of them. For other optimizers give what is known as ``measured``.

    In a loop of your own::

        for batch in monitor.timed(loader):
            ...
            optimizer.step()
            monitor.step(loss, {"samples": len(batch)})  # before or after zero_grad, after a scaler's update
            if monitor.stopped:  # a watcher's wish
                break
        monitor.close()

    Every ``detail_every`` steps, and in the step after :meth:`request_detail`, a detailed record is made: for each
    parameter what ``StepStats.per_param`` says (of other optimizers gradient and parameter norms, which takes one more
    read of both), and the histograms that were asked for. For these the monitor hooks the optimizer's step: gradients
    are counted right before it, so :meth:`step` may be called after ``zero_grad``, and updates right after it.

    A sink or watcher that raises is left out from then on, with one warning. What waits is written at exit, after an
    exception that ends the process, and when nothing refers to the monitor any more;
    :class:`mo_fused.training.sinks.JsonLines` says what a killed process can lose.

    Args:
        optimizer: any torch optimizer.
        sinks: see :class:`mo_fused.training.sinks.Sink`.
        watchers: see :class:`mo_fused.training.watchers.Watcher`.
        detail_every: steps; 0 makes detailed records on request only.
        histograms: patterns of parameters' names whose gradients' and updates' magnitudes are counted in each detailed
            record; ``"*"`` is all. During that step a second copy of these parameters is held. Of DTensors this
            process's part is counted.
        model: gives names to the parameters of an optimizer that has none.
        scaler: the gradient scaler, for ``loss_scale``.
        reset_peak: begin to measure the device's peak memory anew with each record (this sets torch's own counter
            back); False reports the peak so far.

    Attributes:
        stopped: :meth:`stop` was called.
        on_stop: called by :meth:`stop`, without arguments.
        last: the newest record that has been read.
        skipped_steps: how many steps were skipped so far; set it when a run goes on.

    Raises:
        InputError: a pattern that matches no parameter.
        TypeError: no torch optimizer.
        ValueError: ``detail_every`` below 0.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        sinks: Iterable[Any] = (),
        watchers: Iterable[Any] = (),
        *,
        detail_every: int = 500,
        histograms: str | Iterable[str] = (),
        model: nn.Module | None = None,
        scaler: torch.amp.GradScaler | None = None,
        reset_peak: bool = True,
    ) -> None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(message("a torch optimizer", type(optimizer).__name__, "give the optimizer of the loop"))
        if isinstance(detail_every, bool) or not isinstance(detail_every, int) or detail_every < 0:
            raise bad_option("detail_every", "a whole number, 0 or more", detail_every, "give a number of steps")
        self.optimizer, self.model = optimizer, model
        self.detail_every, self.reset_peak = detail_every, reset_peak
        self.histograms = (histograms,) if isinstance(histograms, str) else tuple(histograms)
        if self.histograms:
            check_patterns(self.histograms, (name for name, _ in parameter_names(optimizer, model)))
        self.sinks, self.watchers = list(sinks), list(watchers)
        self.stopped = False
        self.on_stop: list[Callable[[], object]] = []
        self.last: dict[str, Any] | None = None
        self.skipped_steps = 0
        self._hooks = StepHooks(optimizer, model, scaler, self.histograms)
        self._device = next((one.device for group in optimizer.param_groups for one in group["params"]), None)
        self._waiting: list[Waiting] = []
        self._events: list[dict[str, Any]] = []
        self._lock = threading.RLock()  # a sink's thread may ask for what waits
        self._step = 0
        self._data_seconds: float | None = None
        self._ended: float | None = None
        self._host_memory: tuple[float, int] | None = None
        self._closed, self._process = False, os.getpid()
        for sink in self.sinks:
            if hasattr(sink, "ask"):
                sink.ask = weak(self._hand_over, sink)
        for watcher in self.watchers:
            if hasattr(watcher, "attach"):
                watcher.attach(self)
        self._at_exit: Callable[..., Any] = atexit.register(weak(self._close_at_exit))
        self._plan_details()

    def step(self, loss: Tensor | float, batch_info: Mapping[str, Any] | None = None) -> None:
        """Measure the step that the optimizer has just made, and write the one before it.

        Args:
            loss: of the step; a tensor of one element, on any device, or a number.
            batch_info: what the loop knows, any of: ``step`` (else steps are counted from 1), ``epoch``, ``samples``,
                ``lengths`` (of the samples, a tensor or a list), ``tokens`` (else the sum of ``lengths``, else
                ``targets`` where there are more of them than samples), ``targets``, ``seconds`` (of the step, else the
                time between two calls), ``data_seconds`` (waiting for data, else what :meth:`timed` has measured),
                ``lr``, ``measured`` (0-dim tensors or numbers: ``grad_norm``, ``clip_coef``, ``update_norm``,
                ``param_norm``, ``skipped``, ``loss_scale``), ``validation`` (a mapping: ``val_loss``, ``val_metric``).
                Watchers may want more: ``sample_losses``, ``sample_ids``.

        Raises:
            TypeError: a loss that is no number and no tensor of one element.
        """
        if isinstance(loss, Tensor) and loss.numel() != 1:
            found = f"a tensor of shape {tuple(loss.shape)}"
            raise TypeError(f"loss: {message('a number or a tensor of one element', found, 'give the mean')}")
        if self._closed:
            return
        info = dict(batch_info or {})
        self._step = info["step"] = int(info.get("step", self._step + 1))
        arrived = time.perf_counter()
        waiting = self._measure(loss, info)
        self._plan_details()
        for watcher in list(self.watchers):
            self._call(self.watchers, watcher, "on_step", self, loss, info)
        with self._lock:
            waited = self._deliver()
            if info.get("seconds") is not None:
                waiting.row["step_seconds"] = float(info["seconds"]) + waited
            elif self._ended is not None:
                waiting.row["step_seconds"] = arrived + waited - self._ended
            self._waiting.append(waiting)
            self._tell_events()
        self._ended = arrived + waited

    def flush(self) -> None:
        """Read what waits (this waits for the device), write it, and let the sinks put it where it stays."""
        if self._closed:
            return
        with self._lock:
            self._deliver()
            self._tell_events()
            self._tell("flush")

    def close(self) -> None:
        """Write what waits, close sinks and watchers, leave the optimizer alone. Later calls do nothing."""
        if self._closed:
            return
        with self._lock:
            self._deliver()
            self._tell_events()
            self._closed = True
            for watcher in list(self.watchers):
                self._call(self.watchers, watcher, "close")
            self._tell_events()
            self._tell("close")
        self._hooks.remove()
        atexit.unregister(self._at_exit)

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        # A loop in a function of its own may end without close(); atexit finds nothing any more then.
        if hasattr(self, "_at_exit"):  # not if __init__ has raised
            self._close_at_exit()

    def request_detail(self) -> None:
        """Make a detailed record of the next step."""
        self._hooks.details_next = True

    def timed(self, loader: Iterable[T]) -> Iterator[T]:
        """The batches of ``loader``; the time that it takes to get them becomes the steps' ``data_share``."""
        batches = iter(loader)
        while True:
            begun = time.perf_counter()
            try:
                batch = next(batches)
            except StopIteration:
                return
            self._data_seconds = (self._data_seconds or 0.0) + time.perf_counter() - begun
            yield batch

    def for_trial(self) -> Monitor:
        """A monitor that measures the same and has nobody to tell: for a trial run whose steps don't count."""
        return Monitor(
            self.optimizer,
            detail_every=self.detail_every,
            histograms=self.histograms,
            model=self.model,
            scaler=self.scaler,
            reset_peak=False,  # the trial measures it too
        )

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The gradient scaler whose scale is recorded."""
        return self._hooks.scaler

    @scaler.setter
    def scaler(self, scaler: torch.amp.GradScaler | None) -> None:
        self._hooks.scaler = scaler

    def emit(self, event: dict[str, Any]) -> None:
        """A watcher's finding, for the sinks: after the records of the steps before."""
        self._events.append(event)

    def stop(self) -> None:
        """Ask for the end of training: sets ``stopped`` and calls what is in ``on_stop``."""
        self.stopped = True
        for call in self.on_stop:
            call()

    # -- a step -------------------------------------------------------------------------------------------------------

    def _plan_details(self) -> None:
        if self.detail_every and (self._step + 1) % self.detail_every == 0:
            self._hooks.details_next = True

    def _measure(self, loss: Tensor | float, info: Mapping[str, Any]) -> Waiting:
        """Everything that is known now, and copies of the rest that are on their way."""
        found, details = self._hooks.take()
        found["loss"] = loss
        if info.get("lr") is not None:
            found["lr"] = info["lr"]
        for key, value in (info.get("measured") or {}).items():
            # What the optimizer has told as a number needs no copy of the same as a tensor.
            if key in RECORD and not (isinstance(value, Tensor) and isinstance(found.get(key), float)):
                found[key] = value
        validation = info.get("validation") or {}
        found.update({key: validation.get(key) for key in ("val_loss", "val_metric")})
        found["samples"], found["tokens"] = _counts(info)
        row: dict[str, Any] = {"step": info["step"], "epoch": info.get("epoch"), **self._memory()}
        row["data_seconds"], self._data_seconds = info.get("data_seconds", self._data_seconds), None
        devices: dict[torch.device, dict[str, Tensor]] = {}
        for key, value in found.items():
            if not isinstance(value, Tensor):
                row[key] = value
            elif not shards.is_dtensor(value):  # whose whole value only all processes together know
                devices.setdefault(value.device, {})[key] = value
        return Waiting(row, [Deferred(together) for together in devices.values()], details)

    def _memory(self) -> dict[str, int | None]:
        now = time.perf_counter()
        if self._host_memory is None or now - self._host_memory[0] > _HOST_MEMORY_EVERY:
            self._host_memory = now, host_peak()
        device = None
        if self._device is not None and is_cuda(self._device):
            # What max_memory_allocated reads, without the hundred other numbers that it makes of it.
            found: Any = torch.cuda.memory_stats_as_nested_dict(self._device)
            device = int(found["allocated_bytes"]["all"]["peak"])
            if self.reset_peak:
                torch.cuda.reset_peak_memory_stats(self._device)
        return {"memory_device": device, "memory_host": self._host_memory[1]}

    # -- to those who want to know ------------------------------------------------------------------------------------

    def _deliver(self) -> float:
        """Hands out the steps that wait; the seconds that their numbers were waited for."""
        waited = 0.0
        while self._waiting:
            waiting = self._waiting.pop(0)
            waited += self._read(waiting)
            for sink in list(self.sinks):
                if sink not in waiting.given:
                    self._give(sink, waiting)
            for watcher in list(self.watchers):
                self._call(self.watchers, watcher, "on_record", waiting.record)
        return waited

    def _read(self, waiting: Waiting) -> float:
        waited = waiting.read(self.skipped_steps)
        assert waiting.record is not None
        self.last, self.skipped_steps = waiting.record, waiting.record["skipped_steps"]
        return waited

    def _give(self, sink: Any, waiting: Waiting) -> None:
        self._call(self.sinks, sink, "write", waiting.record)
        if waiting.detail is not None:
            self._call(self.sinks, sink, "detail", waiting.detail)

    def _hand_over(self, sink: Any) -> None:
        """For a sink's own thread: what waits for the next step, if it has arrived. Watchers hear of it in the step."""
        with self._lock:
            for waiting in self._waiting:
                if sink in self.sinks and sink not in waiting.given and waiting.ready:
                    self._read(waiting)
                    self._give(sink, waiting)
                    waiting.given.append(sink)

    def _tell_events(self) -> None:
        while self._events:
            self._tell("event", self._events.pop(0))

    def _tell(self, method: str, *values: Any) -> None:
        for sink in list(self.sinks):
            self._call(self.sinks, sink, method, *values)

    def _call(self, among: list[Any], one: Any, method: str, *values: Any) -> None:
        """Calls a method, if there is one; an error takes ``one`` out."""
        if one not in among:
            return
        try:
            if (call := getattr(one, method, None)) is not None:
                call(*values)
        except Exception as error:
            among.remove(one)
            self._warn(f"{type(one).__name__}.{method} failed and is left out from now on: {_words(error)}")

    def _warn(self, text: str) -> None:
        warnings.warn(f"{text}; training goes on", RuntimeWarning, stacklevel=2)

    def _close_at_exit(self, *_: object) -> None:
        if os.getpid() == self._process:  # not in a forked child, whose parent goes on writing
            self.close()


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _counts(info: Mapping[str, Any]) -> tuple[Any, Any]:
    """Samples and tokens of the batch, as far as they are known."""
    samples, tokens, lengths, targets = (info.get(key) for key in ("samples", "tokens", "lengths", "targets"))
    if lengths is not None:
        samples = len(lengths) if samples is None else samples
        tokens = (lengths.sum() if isinstance(lengths, Tensor) else sum(lengths)) if tokens is None else tokens
    if tokens is None and samples is not None and targets is not None and targets > samples:
        tokens = targets
    return samples, tokens
