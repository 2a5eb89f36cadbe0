"""What a trainer tries before the run: preflight, a few samples by heart, batch sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

from mo_fused.training.errors import bad_input

if TYPE_CHECKING:
    from mo_fused.training.overfit import OverfitCheck
    from mo_fused.training.preflight import Preflight
    from mo_fused.training.sweep import Sweep
    from mo_fused.training.trainer import Trainer


class Trials:
    """Short runs of a :class:`Trainer`, of which a copy of its state undoes everything afterwards."""

    _loader: Iterable[Any] | None = None

    def _known_loader(self) -> Iterable[Any]:
        """That of the last :meth:`Trainer.fit` or :meth:`preflight`.

        Raises:
            InputError: there was none.
        """
        if self._loader is None:
            raise bad_input(
                "loader",
                expected="the loader of the run",
                found="none given, and neither fit nor preflight has had one",
                remedy="give loader=",
            )
        return self._loader

    def preflight(
        self, loader: Iterable[Any], steps: int = 50, *, classes: int | None = None, total_steps: int | None = None
    ) -> Preflight:
        """Try the whole loop for a few steps, put everything back and report what the run would meet.

        Looked at are: values that are not finite, parameters without a gradient, whether the loss falls, whether the
        first loss is that of a model that knows nothing (ln(classes)), monitor, checkpoint, memory and time. The trial
        validates at its end, as the run does, and writes its checkpoint into a temporary folder. A monitor is told
        each step, with ``"trial": True`` in ``batch_info``; one that has ``for_trial()`` is asked for the monitor to
        use instead. :func:`mo_fused.training.snapshot.kept_state` says what is put back: a copy in the host's memory.

        Args:
            loader: that of the run.
            steps: of the trial.
            classes: of a cross-entropy; None looks at the model's output: logits for integer targets.
            total_steps: of the run, for the estimate of its time; None takes the schedule's.

        Raises:
            InputError: the loader cannot be iterated again. What the loop itself raises comes through.
        """
        from mo_fused.training.preflight import preflight

        self._loader = loader
        return preflight(cast("Trainer", self), loader, steps, classes=classes, total_steps=total_steps)

    def overfit_check(
        self,
        loader: Iterable[Any] | None = None,
        samples: int = 100,
        *,
        max_steps: int = 500,
        relative: float = 0.05,
        absolute: float = 0.01,
        every: int = 10,
    ) -> OverfitCheck:
        """Train on a few samples until the loss is near zero, then put everything back.

        A sound model learns a hundred samples by heart. The rate stays at its peak and weights don't decay; nothing is
        logged or saved. Training is as ever, dropout included. The loss that counts is the lower one of two: of the
        same samples in eval mode, every few steps (dropout would keep it up), and of the last pass of training (the
        running statistics of batch norm would keep that in eval mode up).

        Args:
            loader: that of the run; its first batches are used. None: that of the last :meth:`fit` or preflight.
            samples: how many; the last batch is cut to size.
            max_steps: optimizer steps before giving up.
            relative, absolute: the loss is near zero below the larger of ``relative`` times the first loss and
                ``absolute``. Raise them where the loss can't vanish (label smoothing, equal inputs, noise).
            every: steps between two measurements.

        Raises:
            InputError: the loader cannot be iterated again, or its samples have no valid targets.
        """
        from mo_fused.training.overfit import overfit_check

        return overfit_check(
            cast("Trainer", self),
            self._known_loader() if loader is None else loader,
            samples,
            max_steps=max_steps,
            relative=relative,
            absolute=absolute,
            every=every,
        )

    def sweep(
        self,
        batch_sizes: Sequence[int],
        accumulate: Sequence[int] = (1,),
        recompute: Sequence[str | None] = (None,),
        *,
        loader: Iterable[Any] | None = None,
        steps: int = 10,
        make_loader: Callable[[int], Iterable[Any]] | None = None,
        limit: float = 120.0,
        isolate: bool = True,
    ) -> Sweep:
        """Measure every combination in a short run: samples per second, peak memory, what does not fit.

        Each runs in a process of its own, with copies of model and optimizer, without schedule, monitor, validation
        and checkpoints; so everything has to be picklable, and a script has to guard its start with
        ``if __name__ == "__main__":``. Rates are medians after a warm-up of 3 steps. Peak memory is that of tensors on
        CUDA, else of the whole process. What this process holds on a CUDA device is missing there, so sweep before
        training.

        Args:
            batch_sizes, accumulate: to try, all with all.
            recompute: patterns for :func:`mo_fused.training.recompute.checkpoint_activations`; None recomputes nothing.
            loader: a ``DataLoader``, made again with each batch size. None: that of the last :meth:`fit` or preflight,
                unless there is ``make_loader``.
            steps: measured in each run.
            make_loader: batch size to loader, for any other loader.
            limit: seconds for one combination, from when its process is up.
            isolate: False measures in this process, on deep copies: no need to pickle anything, but running out of the
                host's memory ends the process, and the peak includes what is here already.

        Raises:
            InputError: something can't be pickled, the loader can't be made again, or there are several processes.
            ValueError: an empty list or a number below 1.
        """
        from mo_fused.training.sweep import sweep

        if loader is None and make_loader is None:
            loader = self._known_loader()
        return sweep(
            cast("Trainer", self),
            loader,
            batch_sizes,
            accumulate,
            recompute,
            steps=steps,
            make_loader=make_loader,
            limit=limit,
            isolate=isolate,
        )
