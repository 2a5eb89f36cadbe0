"""Checkpoints in a folder: written all or nothing, the last few and the best one kept, broken ones passed over."""

from __future__ import annotations

import math
import os
import re
import warnings
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from mo_fused.errors import bad_option
from mo_fused.training.atomic import write_atomically
from mo_fused.training.errors import InputError, bad_input
from mo_fused.training.plain import plain

FORMAT_VERSION = 1
KEYS = (
    "format_version",
    "model_state_dict",
    "optimizer_state_dict",
    "scheduler_state_dict",
    "scaler_state_dict",
    "step",
    "epoch",
    "data",
    "rng",
    "config",
    "trainer",
)
"""What a checkpoint holds. ``data`` and ``rng`` are lists with an entry for each process; ``trainer`` is what the loop
has in hand: whether the step before was skipped, and the best validation so far. ``extra`` is there if the trainer has
such parts."""

_NAME = re.compile(r"step-(\d{8,})\.pt")


def load_checkpoint(path: str | Path) -> dict[str, Any]:
    """The dictionary in a checkpoint file, on the CPU.

    Loads with ``weights_only=True``: no code of the file is run. Every byte is checked against the checksums inside,
    which ``torch.load`` by itself leaves out (its format before torch 1.6 has none). A file saved by hand
    with some of the keys loads too.

    Raises:
        InputError: no such file, cut short or damaged, no file of torch.save, of a newer format, or without a model.
    """
    path = Path(path)
    expected = "a checkpoint: a file of torch.save with a dictionary that has model_state_dict"
    remedy = "give another checkpoint; those of a run lie in its folder checkpoints/"

    def refused(found: str) -> InputError:
        return bad_input(f"checkpoint {path}", expected=expected, found=found, remedy=remedy)

    if not path.is_file():
        raise refused("a folder" if path.is_dir() else "no such file")
    try:
        if zipfile.is_zipfile(path):  # the format of torch.save for years; a file cut short is none
            with zipfile.ZipFile(path) as archive:
                damaged = archive.testzip()
            if damaged is not None:
                raise refused(f"a damaged file: the checksum of {damaged} does not fit")
        elif _begins_as_zip(path):
            raise refused(f"a file cut short ({path.stat().st_size} bytes)")
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        size = path.stat().st_size
        raise refused(f"a file cut short, damaged or of another kind ({size} bytes; {error})") from error
    except (InputError, MemoryError):
        raise
    except Exception as error:  # torch.load has no error of its own: pickle's, RuntimeError, KeyError …
        raise refused(f"what torch.load refuses ({str(error).splitlines()[0] if str(error) else error!r})") from error
    if not isinstance(state, dict):
        raise refused(f"a {type(state).__name__}")
    if "model_state_dict" not in state:
        keys = ", ".join(str(key) for key in list(state)[:4]) or "nothing"
        raise refused(f"a dictionary with {keys}{' ...' if len(state) > 4 else ''}")
    version = state.get("format_version", FORMAT_VERSION)
    if not isinstance(version, int) or version > FORMAT_VERSION:
        raise refused(f"format {version}, made by a newer version (this one reads up to {FORMAT_VERSION})")
    return state


def _begins_as_zip(path: Path) -> bool:
    with open(path, "rb") as file:
        return file.read(2) == b"PK"


class Checkpoints:
    """The checkpoints of one run: ``step-XXXXXXXX.pt`` in ``folder``, and ``best.pt``, a link to the best of them.

    Args:
        folder: where they lie; made at the first save.
        every: steps from one checkpoint to the next; 0 saves only when the run ends or is stopped.
        keep: how many of the latest are kept, at least 1. The best one is kept besides.
        best: the value that :class:`Trainer`'s ``validate`` returns and that decides which is best.
        higher_is_better: whether a larger value is better.

    Raises:
        ValueError: ``every`` below 0 or ``keep`` below 1.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        every: int = 0,
        keep: int = 3,
        best: str = "val_loss",
        higher_is_better: bool = False,
    ) -> None:
        if not isinstance(every, int) or every < 0:
            raise bad_option("every", "a whole number of steps, 0 or more", every, "give such a number")
        if not isinstance(keep, int) or keep < 1:
            raise bad_option("keep", "a whole number, 1 or more", keep, "keep at least the latest checkpoint")
        self.folder = Path(folder)
        self.every = every
        self.keep = keep
        self.best = best
        self.higher_is_better = higher_is_better

    def path(self, step: int) -> Path:
        """Where the checkpoint of ``step`` lies."""
        return self.folder / f"step-{step:08d}.pt"

    def steps(self) -> list[int]:
        """The steps that there is a checkpoint of, ascending."""
        if not self.folder.is_dir():
            return []
        matches = (_NAME.fullmatch(entry.name) for entry in self.folder.iterdir())
        return sorted(int(match[1]) for match in matches if match)

    def better(self, value: float, than: float | None) -> bool:
        """Whether ``value`` beats what was best so far; what is not a number beats nothing."""
        if math.isnan(value):
            return False
        return than is None or (value > than if self.higher_is_better else value < than)

    def save(self, state: Mapping[str, Any], best_step: int | None = None, abandoned: Sequence[int] = ()) -> Path:
        """Write the checkpoint of ``state["step"]`` and remove what is no longer kept.

        Old ones go only once the new one is on the disk, so at any moment there are as many whole ones as before.

        Args:
            state: what to save.
            best_step: step of the best checkpoint, which is kept and linked.
            abandoned: steps whose checkpoints the run has gone back behind: they get the ending ``.abandoned``, and
                are no longer counted.

        Raises:
            InputError: ``state`` has a value that could not be read again.
            OSError: it could not be written; all earlier ones are still there.
        """
        state = {key: plain(value, key) for key, value in state.items()}
        self.folder.mkdir(parents=True, exist_ok=True)
        for left in self.folder.glob(".*.pt.*.part"):  # by a kill: as large as a checkpoint, each
            left.unlink(missing_ok=True)
        path = self.path(int(state["step"]))
        try:
            write_atomically(path, lambda file: torch.save(state, file))
        except RuntimeError as error:  # torch's writer on a full disk; its message is about offsets in the file
            raise OSError(
                f"{path} could not be written (a full disk, or a limit on the size of files): {error}"
            ) from error
        for step in abandoned:
            if step != state["step"] and self.path(step).exists():
                self.path(step).rename(self.path(step).with_suffix(".pt.abandoned"))
        steps = self.steps()
        self._link_best(best_step if best_step in steps else None)
        for step in steps:
            if step not in {*steps[-self.keep :], best_step, int(state["step"])}:
                self.path(step).unlink(missing_ok=True)
        return path

    def latest(self) -> tuple[Path, dict[str, Any]] | None:
        """The newest checkpoint that can be read, None where there is none at all.

        Those that cannot be read are passed over, each with a warning that says why.

        Raises:
            InputError: there are checkpoints, and none can be read.
        """
        refusal: InputError | None = None
        for step in reversed(self.steps()):
            try:
                return self.path(step), load_checkpoint(self.path(step))
            except InputError as error:
                warnings.warn(f"{error}. The checkpoint before it is tried.", RuntimeWarning, stacklevel=2)
                refusal = error
        if refusal is not None:
            raise bad_input(
                f"checkpoints in {self.folder}",
                expected="at least one that can be read",
                found=f"none of {len(self.steps())}",
                remedy="take them away to begin again, or begin in another folder",
            ) from refusal
        return None

    def _link_best(self, step: int | None) -> None:
        """Point ``best.pt`` at the best checkpoint; None removes a link that leads nowhere."""
        link = self.folder / "best.pt"
        if step is None:
            if link.is_symlink() and not link.exists():
                link.unlink()
            return
        temporary = self.folder / f".best.pt.{os.getpid()}.part"
        try:
            temporary.unlink(missing_ok=True)
            temporary.symlink_to(self.path(step).name)
            os.replace(temporary, link)
        except OSError as error:  # a file system without links: the checkpoint itself is there and kept
            warnings.warn(f"{link} could not be made: {error}", RuntimeWarning, stacklevel=4)
