"""Checkpoints of a trial run: written, read again, compared and thrown away."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mo_fused.training.checkpoints import Checkpoints, load_checkpoint
from mo_fused.training.errors import InputError


class TrialCheckpoints(Checkpoints):
    """Writes as the real ones do; notes the last one's seconds and bytes and whether it was read back the same."""

    seconds: float | None = None
    """Of writing one, to the disk."""
    bytes: int | None = None
    error: str | None = None
    folder_error: str | None = None

    @classmethod
    @contextmanager
    def beside(cls, real: Checkpoints | None) -> Iterator[TrialCheckpoints]:
        """In a hidden folder inside the real one's (so on the same disk), else where the system keeps such things."""
        made: list[Path] = []
        parent: Path | None = None
        refusal = None
        if real is not None:
            parent = real.folder
            try:
                while not parent.exists():
                    made.append(parent)
                    parent = parent.parent
                parent = real.folder
                parent.mkdir(parents=True, exist_ok=True)
                tempfile.TemporaryFile(dir=parent).close()
            except OSError as error:
                parent, refusal = None, f"{real.folder} can't be written: {error}"
        try:
            with tempfile.TemporaryDirectory(prefix=".preflight-", suffix=".part", dir=parent) as folder:
                if real is None:
                    trial = cls(folder)
                else:
                    trial = cls(folder, best=real.best, higher_is_better=real.higher_is_better)
                trial.folder_error = refusal
                yield trial
        finally:
            for path in made:  # the innermost first
                try:
                    path.rmdir()
                except OSError:
                    break

    def save(self, state: Mapping[str, Any], best_step: int | None = None, abandoned: Sequence[int] = ()) -> Path:
        path = self.path(int(state["step"]))
        try:
            begun = time.perf_counter()
            super().save(state, best_step, abandoned)
            self.seconds = time.perf_counter() - begun
            self.bytes = path.stat().st_size
            difference = first_difference(dict(state), load_checkpoint(path))
        except (OSError, InputError) as error:
            self.error = str(error)
        else:
            self.error = None if difference is None else f"{difference} was not read back as it was written"
        return path


def first_difference(written: Any, found: Any, where: str = "the checkpoint") -> str | None:
    """The path to the first value that differs in bits; None where all are the same."""
    if isinstance(written, Tensor):
        return None if isinstance(found, Tensor) and _same(written, found) else where
    if isinstance(written, Mapping):
        if not isinstance(found, Mapping) or list(written) != list(found):
            return where
        pairs = ((f"{where}[{key!r}]", value, found[key]) for key, value in written.items())
    elif isinstance(written, (list, tuple)):
        if type(found) is not type(written) or len(found) != len(written):
            return where
        pairs = ((f"{where}[{n}]", one, other) for n, (one, other) in enumerate(zip(written, found, strict=True)))
    else:
        return None if written == found or (written != written and found != found) else where
    return next((fault for at, one, other in pairs if (fault := first_difference(one, other, at)) is not None), None)


def _same(one: Tensor, other: Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(_bits(one), _bits(other))


def _bits(tensor: Tensor) -> Tensor:
    """Its bytes, so that NaN equals itself."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
