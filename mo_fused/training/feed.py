"""Batches without end from a loader, epoch after epoch, from a place that can be saved and found again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from mo_fused.errors import message
from mo_fused.training.errors import bad_input
from mo_fused.training.rng import kept_rng, rng_state, set_rng_state

_NOTHING = object()


class Feed:
    """The training batches of a run.

    Where the loader has ``state_dict`` and ``load_state_dict`` of its own (torchdata's ``StatefulDataLoader``, the
    loaders of :mod:`mo_fused.training.tasks`), they keep its place. For any other loader the place is the epoch, the
    batches drawn in it, and the random number generators as they stood when the epoch began: going on there means to
    begin that epoch again and to draw those batches once more without using them. This is exact for torch's
    ``DataLoader`` with its own samplers, shuffled or not, with workers or without; a sampler that draws from a *global*
    generator between batches, or from one that is not its attribute ``generator``, needs a loader with a state of its
    own, and so do random numbers drawn in workers that stay from epoch to epoch (``persistent_workers``).

    After an error while batches were drawn (Ctrl-C, a file that could not be read) the next :meth:`take` draws them
    once more: from the same place in the same epoch, and without losing those drawn before the error. A loader with a
    state of its own goes on where that says, and an iterator cannot be begun again.

    ``set_epoch`` is called, where it exists, on the loader, its sampler, its batch sampler and its dataset.

    Args:
        loader: gives the batches of one epoch each time that it is iterated; it may be endless.

    Raises:
        TypeError: ``loader`` gives single samples, or nothing that can be iterated.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        given: Any = loader
        if isinstance(loader, Dataset) and not hasattr(loader, "__iter__"):
            remedy = "wrap it: DataLoader(dataset, batch_size=...)"
            raise TypeError(f"loader: {message('batches', f'single samples ({type(loader).__name__})', remedy)}")
        if not hasattr(given, "__iter__") and not hasattr(given, "__getitem__"):
            remedy = "give a DataLoader, a list of batches, or anything else with __iter__"
            raise TypeError(f"loader: {message('batches to iterate over', type(loader).__name__, remedy)}")
        self.loader = loader
        self.epoch = 0
        self.batches = 0
        """Batches drawn in this epoch."""
        self._stateful = is_stateful(loader)
        self._iterator: Iterator[Any] | None = None
        self._begun: dict[str, Any] | None = None
        self._broken = False
        """Whether the last draw ended in an error, after which an iterator may have lost batches or give no more."""

    def take(self, count: int) -> list[Any]:
        """The next ``count`` batches; fewer, but at least one, where the epoch ends before.

        Raises:
            InputError: the loader gave no batch in a whole epoch.
        """
        if self._broken:
            self._broken = False
            with kept_rng():
                self.load_state_dict(self.state_dict())
        taken: list[Any] = []
        while not taken:
            fresh = self._iterator is None
            iterator = self._begin() if self._iterator is None else self._iterator
            for _ in range(count):
                try:
                    taken.append(next(iterator))
                except StopIteration:
                    self._end()
                    break
                except BaseException:
                    self._step_back(len(taken))
                    raise
                self.batches += 1
            if not taken and fresh:
                raise bad_input(
                    "loader",
                    expected="at least one batch in an epoch",
                    found="none",
                    remedy="give a longer dataset, a smaller batch size, or a loader that can be iterated again",
                )
        if self._iterator is not None and self.batches == _length(self.loader):
            self._look_for_the_end(self._iterator)
        return taken

    def state_dict(self) -> dict[str, Any]:
        """The place after the batches taken so far; tensors and plain values only (if the loader's own are)."""
        state: dict[str, Any] = {"epoch": self.epoch, "batches": self.batches}
        state["generators"] = [generator.get_state() for generator in _generators(self.loader)]
        if self._stateful:
            state["loader"] = self.loader.state_dict()  # type: ignore[attr-defined]
        else:
            state["begun"] = self._begun
            state["workers"] = _has_workers(self.loader)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to the place that ``state`` says. For a loader without a state this moves the global generators.

        Raises:
            InputError: the place is that of another kind of loader, or lies behind the end of the epoch.
        """
        if ("loader" in state) != self._stateful:
            kinds = ("a loader without state_dict", "a loader with state_dict")
            raise bad_input(
                "loader",
                expected=f"{kinds['loader' in state]}, as in the run that saved this place",
                found=kinds[self._stateful],
                remedy="give the loader that the run began with",
            )
        if len(state["generators"]) != len(_generators(self.loader)):
            raise bad_input(
                "loader",
                expected=f"{len(state['generators'])} generators of its own, as in the run that saved this place",
                found=f"{len(_generators(self.loader))}",
                remedy="give the loader that the run began with",
            )
        self._iterator, self._begun = None, None
        self.epoch, self.batches = int(state["epoch"]), 0
        if self._stateful:
            self.loader.load_state_dict(state["loader"])  # type: ignore[attr-defined]
            if state["batches"]:
                _set_epoch(self.loader, self.epoch)
                self._iterator = iter(self.loader)
            elif self.epoch and isinstance(self.loader, DataLoader):
                _set_epoch(self.loader, self.epoch - 1)
                with kept_rng():  # StatefulDataLoader makes the epoch that is over once more, and draws a seed for it
                    iter(self.loader)
            self.batches = int(state["batches"])
            _set_generators(self.loader, state["generators"])
            return
        # Persistent workers are started by the first epoch, which draws a seed for them; later ones draw none.
        going = state["begun"] if state["batches"] else state
        if going["workers"] and not _has_workers(self.loader):
            with kept_rng():
                iter(self.loader)
        if state["batches"]:
            set_rng_state(state["begun"]["rng"])
            _set_generators(self.loader, state["begun"]["generators"])
            iterator = self._begin()
            for drawn in range(state["batches"]):
                if next(iterator, _NOTHING) is _NOTHING:
                    raise bad_input(
                        "loader",
                        expected=f"an epoch of more than {drawn} batches: the saved place is behind {state['batches']}",
                        found=f"an end after {drawn}",
                        remedy="give the loader and the dataset that the run began with",
                    )
            self.batches = int(state["batches"])
        _set_generators(self.loader, state["generators"])

    def _begin(self) -> Iterator[Any]:
        _set_epoch(self.loader, self.epoch)
        if not self._stateful:
            states = [generator.get_state() for generator in _generators(self.loader)]
            self._begun = {"rng": rng_state(), "generators": states, "workers": _has_workers(self.loader)}
        self.batches = 0
        self._iterator = iter(self.loader)
        return self._iterator

    def _step_back(self, taken: int) -> None:
        """To the place before the ``taken`` batches, which nobody has got, as far as the loader allows."""
        if isinstance(self.loader, Iterator):
            return
        if self._stateful or self._begun is None:
            self._broken = self._stateful
        elif self.batches > taken:
            self.batches -= taken
            self._broken = True
        else:  # of the first draw in this epoch: since its beginning nobody else has drawn random numbers
            set_rng_state(self._begun["rng"])
            _set_generators(self.loader, self._begun["generators"])
            self.batches, self._iterator, self._begun = 0, None, None

    def _look_for_the_end(self, iterator: Iterator[Any]) -> None:
        """After as many batches as the length says: a place that is saved now should say that the epoch is over."""
        more = next(iterator, _NOTHING)
        if more is _NOTHING:
            self._end()
        elif self._stateful:
            raise bad_input(
                "loader",
                expected=f"as many batches in an epoch as its length says ({self.batches})",
                found="one more",
                remedy="let its __len__ return the number of batches of an epoch, or leave __len__ out",
            )
        else:
            self._iterator = chain([more], iterator)

    def _end(self) -> None:
        self.epoch += 1
        self.batches = 0
        self._iterator, self._begun = None, None


def is_stateful(loader: object) -> bool:
    """Whether the loader keeps its place by itself."""
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


def _has_workers(loader: Iterable[Any]) -> bool:
    """Whether workers of an earlier epoch go on with the next one (``persistent_workers``)."""
    return bool(getattr(loader, "persistent_workers", False)) and getattr(loader, "_iterator", None) is not None


def _length(loader: Iterable[Any]) -> int | None:
    try:
        return len(loader)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None


def _parts(loader: Iterable[Any]) -> list[Any]:
    """The loader and what it draws with, each once."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    parts = [loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)]
    parts.append(getattr(loader, "dataset", None))
    return list({id(part): part for part in parts if part is not None}.values())


def _generators(loader: Iterable[Any]) -> list[torch.Generator]:
    found = [getattr(part, "generator", None) for part in _parts(loader)]
    return list({id(one): one for one in found if isinstance(one, torch.Generator)}.values())


def _set_generators(loader: Iterable[Any], states: list[torch.Tensor]) -> None:
    for generator, state in zip(_generators(loader), states, strict=True):
        generator.set_state(state)


def _set_epoch(loader: Iterable[Any], epoch: int) -> None:
    for part in _parts(loader):
        if callable(getattr(part, "set_epoch", None)):
            part.set_epoch(epoch)
