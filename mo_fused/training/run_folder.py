"""The folder a run leaves behind.

It holds ``config.yaml``, ``metrics.jsonl``, ``changes.jsonl``, ``checkpoints/`` and ``profile/``.

``metrics.jsonl`` holds one JSON object a line and a line a step, always with the keys of :data:`METRICS` in that order.
``null`` means not measured; a number that is not finite is ``null`` too, with ``"<key>_nonfinite": true`` beside it, so
that every line is JSON for every reader.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import sys
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from mo_fused.training.atomic import write_all, write_atomically
from mo_fused.training.config_file import read_yaml
from mo_fused.training.errors import InputError, bad_input
from mo_fused.training.record import RECORD

METRICS = RECORD
"""Keys of a line, and what they mean."""
_FILES = ("config.yaml", "metrics.jsonl", "changes.jsonl", "details.jsonl", "events.jsonl", "report.html")
_FOLDERS = ("checkpoints", "profile")


def metrics_line(values: Mapping[str, Any]) -> str:
    """One line of ``metrics.jsonl`` (no line end) from the values that were measured.

    Raises:
        KeyError: a key that :data:`METRICS` doesn't have.
    """
    unknown = values.keys() - METRICS.keys()
    if unknown:
        raise KeyError(f"no such metric: {', '.join(sorted(unknown))}; METRICS lists the {len(METRICS)} there are")
    row: dict[str, Any] = {}
    for key in METRICS:
        value = values.get(key)
        if isinstance(value, float) and not math.isfinite(value):
            row[key] = None
            row[f"{key}_nonfinite"] = True
        elif isinstance(value, (list, tuple)):  # the groups' rates
            row[key] = [one if math.isfinite(one) else None for one in value]
        else:
            row[key] = value
    return json.dumps(row, allow_nan=False)


class RunFolder:
    """A run's folder, new or, with ``resume``, that of an earlier run to go on with.

    While it is open, ``metrics.jsonl`` is locked, so that no second process works in the folder. The kernel frees the
    lock when the process ends, however it ends; where the file system has no locks, there is none.

    Args:
        task: names the default folder, ``runs/<task>-<time>``.
        path: the folder to use; ``None`` makes the default one. It may exist if it is empty.
        resume: it may also hold an earlier run, however that ended. What a killed process has left unfinished (hidden
            ``.part`` files) is removed then.

    Attributes:
        path: the folder.
        resumed: it held an earlier run.

    Raises:
        InputError: the folder has other contents or is in use, is a file, or cannot be made.
    """

    def __init__(self, task: str, path: str | Path | None = None, *, resume: bool = False) -> None:
        try:
            self._made = path is None or not Path(path).exists()
            self.path = _default_folder(task) if path is None else _named_folder(Path(path), resume)
            self._metrics, self.resumed = _open_locked(self.path / "metrics.jsonl", resume)
        except OSError as error:
            raise bad_input(
                "--run-dir",
                expected="a folder that can be made and written to",
                found=f"{error.filename or path}: {error.strerror}",
                remedy="name another folder with --run-dir",
            ) from error
        # A run that was killed may have left half a line, which must not run into the next one.
        self._torn = self.resumed and not _ends_a_line(self.path / "metrics.jsonl")
        _OPEN.add(self)
        if self.resumed:
            for folder in (self.path, *(self.path / name for name in _FOLDERS)):
                for part in folder.glob(".*.part"):
                    part.unlink(missing_ok=True)

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints, made if there is none."""
        path = self.path / "checkpoints"
        path.mkdir(exist_ok=True)
        return path

    def read_config(self) -> dict[str, Any] | None:
        """What ``config.yaml`` holds, settings and facts; ``None`` if a run was killed before it was written.

        Raises:
            InputError: somebody has changed the file into something else.
        """
        path = self.path / "config.yaml"
        return read_yaml(path) if path.exists() else None

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Write ``config.yaml`` (plain values, order kept), all or nothing."""
        import yaml

        text = yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True)
        write_atomically(self.path / "config.yaml", text.encode())

    def write_metrics(self, values: Mapping[str, float | bool | None]) -> None:
        """Append one line to ``metrics.jsonl``; a reader sees it as soon as this returns."""
        line = metrics_line(values)
        if self._torn:
            self.cut_metrics(sys.maxsize)
        write_all(self._metrics, f"{line}\n".encode())

    def read_metrics(self) -> list[dict[str, Any]]:
        """The lines of ``metrics.jsonl`` as dictionaries; those that are no JSON (cut by a crash) are left out."""
        rows = []
        for line in (self.path / "metrics.jsonl").read_bytes().splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict):
                rows.append(row)
        return rows

    def cut_metrics(self, step: int) -> int:
        """Keep the lines up to ``step``, and drop what follows: later steps, or a line cut by a crash.

        The file is cut at one place, by one call of the operating system: whenever the process is killed, it is the old
        file or the new one. So the first line that cannot be kept ends it.

        Returns:
            The number of lines dropped, one that was cut included.
        """
        lines = (self.path / "metrics.jsonl").read_bytes().splitlines(keepends=True)
        kept = 0
        while kept < len(lines) and _keeps(lines[kept], step):
            kept += 1
        if kept < len(lines):
            os.ftruncate(self._metrics.fileno(), sum(len(line) for line in lines[:kept]))
            os.fsync(self._metrics.fileno())
        self._torn = False
        return len(lines) - kept

    def discard(self) -> None:
        """Take a new folder away again if no step was written: the same command can then be given once more.

        A folder that was resumed stays as it is.
        """
        if not self.resumed and not self._metrics.closed and os.fstat(self._metrics.fileno()).st_size == 0:
            for folder in _FOLDERS:
                if (self.path / folder).is_dir() and not any((self.path / folder).iterdir()):
                    (self.path / folder).rmdir()
            for name in reversed(_FILES):
                (self.path / name).unlink(missing_ok=True)
            if self._made and not any(self.path.iterdir()):
                self.path.rmdir()
        self.close()

    def close(self) -> None:
        """Close ``metrics.jsonl`` and give up the lock; further calls do nothing."""
        self._metrics.close()


# Forked children, such as the workers of a DataLoader, would hold the lock on after the run was killed.
_OPEN: weakref.WeakSet[RunFolder] = weakref.WeakSet()


def _close_all() -> None:
    for folder in list(_OPEN):
        folder.close()


os.register_at_fork(after_in_child=_close_all)


def _default_folder(task: str) -> Path:
    stem = f"{task}-{time.strftime('%Y%m%d-%H%M%S')}"
    number = 1
    while True:
        path = Path("runs") / (stem if number == 1 else f"{stem}-{number}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            number += 1
        else:
            return path


def _named_folder(path: Path, resume: bool) -> Path:
    if not path.exists():
        path.mkdir(parents=True, exist_ok=resume)
        return path
    remedy = "name another folder, or remove this one if nothing in it is wanted"
    if not path.is_dir():
        found = "a file"
    else:
        names = {entry.name for entry in path.iterdir()}
        run = {"config.yaml", "metrics.jsonl"} & names
        others = sorted(name for name in names - {*_FILES, *_FOLDERS} if not _is_part(name))
        # Half a run (killed as it began) could also be somebody's own config: only with nothing else around it.
        if not names or (resume and (len(run) == 2 or (run and not others))):
            return path
        if run and not resume:
            found = "an earlier run"
        else:
            found = f"a folder with other contents ({', '.join((others or sorted(names))[:3])})"
            remedy = "name another folder, or move what does not belong to a run out of this one"
    expected = "a new or empty folder" + (", or that of an earlier run" if resume else "")
    raise bad_input(f"--run-dir {path}", expected=expected, found=found, remedy=remedy)


def _is_part(name: str) -> bool:
    return name.startswith(".") and name.endswith(".part")


def _open_locked(path: Path, resume: bool) -> tuple[BinaryIO, bool]:
    """``metrics.jsonl``, open to append to and locked, and whether there was a run before.

    A new run's must not exist: of two runs started at once in one folder, one gets it and the other gets the error.
    """
    for _ in range(10):
        existed = path.exists()
        exclusive = 0 if resume else os.O_EXCL
        # Unbuffered: after an error (a full disk) nothing is left that closing would try to write once more.
        file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | exclusive, 0o666), "ab", buffering=0)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise _in_use(path.parent) from None
        except OSError:
            pass  # a file system without locks
        if path.exists() and os.path.samestat(os.stat(path), os.fstat(file.fileno())):
            existed = existed or os.fstat(file.fileno()).st_size > 0 or path.with_name("config.yaml").exists()
            return file, existed
        file.close()  # the run that had the lock has taken its folder away meanwhile
        path.parent.mkdir(parents=True, exist_ok=True)
    raise _in_use(path.parent)


def _in_use(folder: Path) -> InputError:
    return bad_input(
        f"--run-dir {folder}",
        expected="a folder that no other process works in",
        found="one in which a run is going on",
        remedy="wait for its end, stop it, or name another folder",
    )


def _ends_a_line(path: Path) -> bool:
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        if size == 0:
            return True
        file.seek(-1, os.SEEK_END)
        return file.read() == b"\n"


def _keeps(line: bytes, step: int) -> bool:
    try:
        found = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return False
    return line.endswith(b"\n") and isinstance(found, int) and found <= step
