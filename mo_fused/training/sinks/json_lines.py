"""Everything as JSON lines in a run's folder, on the disk within seconds."""

from __future__ import annotations

import json
import math
import os
import threading
import weakref
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any, BinaryIO

from mo_fused.errors import bad_option
from mo_fused.training.atomic import write_all
from mo_fused.training.errors import bad_input
from mo_fused.training.run_folder import METRICS, RunFolder, metrics_line
from mo_fused.training.sinks.base import Sink

METRICS_FILE, DETAILS_FILE, EVENTS_FILE = "metrics.jsonl", "details.jsonl", "events.jsonl"


class JsonLines(Sink):
    """Writes ``metrics.jsonl`` (a line a step), ``details.jsonl`` (the detailed records) and ``events.jsonl``.

    A line goes to the operating system at once, so that a process that is killed loses none. A thread forces the files
    to the disk (fsync) every ``every`` seconds, beside the training, and fetches what the monitor still waits with. So
    what is older than ``every`` seconds plus the time of an fsync survives whatever happens.

    ``metrics.jsonl`` has the keys of :data:`mo_fused.training.run_folder.METRICS`. In every file a number that is not
    finite is ``null`` with ``"<key>_nonfinite": true`` beside it.

    Args:
        folder: a run's folder, or any folder, made if there is none. Lines are appended to what is there; a last line
            that a crash has cut is dropped.
        every: seconds.

    Raises:
        InputError: a file cannot be opened.
        ValueError: ``every`` not above 0.
    """

    def __init__(self, folder: RunFolder | str | Path, every: float = 2.0) -> None:
        if not every > 0:
            raise bad_option("every", "seconds above 0", every, "leave it out for 2 seconds")
        self.path = folder.path if isinstance(folder, RunFolder) else Path(folder)
        self._run = folder if isinstance(folder, RunFolder) else None
        own = (DETAILS_FILE, EVENTS_FILE) if self._run is not None else (METRICS_FILE, DETAILS_FILE, EVENTS_FILE)
        self._files: dict[str, BinaryIO] = {}
        # Of the files, which the thread must not find closed under its hands. It may be the thread in which the garbage
        # collector closes a monitor, and with it this.
        self._lock = threading.RLock()
        self._error: OSError | None = None
        self._stopped = threading.Event()
        self._dirty = False
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            for name in own:
                _drop_cut_line(self.path / name)
                self._files[name] = open(self.path / name, "ab", buffering=0)  # noqa: SIM115
            _sync_folder(self.path)
        except OSError as error:
            self._close_files()
            raise bad_input(
                f"JsonLines {self.path}",
                expected="a folder that can be written to",
                found=f"{error.filename or self.path}: {error.strerror}",
                remedy="name another folder",
            ) from error
        threading.Thread(
            target=_keep_on_disk, args=(weakref.ref(self), self._stopped, every), name="JsonLines", daemon=True
        ).start()

    def write(self, record: dict[str, Any]) -> None:
        """A line of ``metrics.jsonl``."""
        known = {key: value for key, value in record.items() if key in METRICS}
        with self._lock:
            self._raise_error()
            if self._run is not None:
                self._run.write_metrics(known)
                self._dirty = True
            else:
                self._append(METRICS_FILE, metrics_line(known))

    def detail(self, record: dict[str, Any]) -> None:
        """A line of ``details.jsonl``."""
        with self._lock:
            self._append(DETAILS_FILE, json_line(record))

    def event(self, event: dict[str, Any]) -> None:
        """A line of ``events.jsonl``."""
        with self._lock:
            self._append(EVENTS_FILE, json_line(event))

    def cut(self, step: int) -> None:
        """Drop what details and events say of later steps: of a run that goes on from a checkpoint.

        In a folder without :class:`RunFolder` (which cuts its ``metrics.jsonl`` itself) the metrics too.
        """
        with self._lock:
            for name, file in self._files.items():
                lines = (self.path / name).read_bytes().splitlines(keepends=True)
                kept = list(takewhile(lambda line: _is_until(line, step), lines))
                if len(kept) < len(
                    lines
                ):  # at one place, by one call: killed at any moment, it is the old or the new file
                    os.ftruncate(file.fileno(), sum(map(len, kept)))
                    os.fsync(file.fileno())

    def flush(self) -> None:
        """Force everything to the disk now, and wait for it."""
        with self._lock:
            self._raise_error()
            self._dirty = False
        _sync([self.path / name for name in (METRICS_FILE, DETAILS_FILE, EVENTS_FILE)])

    def close(self) -> None:
        """Force everything to the disk and close the files (that of a :class:`RunFolder` is closed by itself)."""
        if self._stopped.is_set():
            return
        self._stopped.set()
        try:
            self.flush()
        finally:
            self._close_files()

    def _append(self, name: str, line: str) -> None:
        self._raise_error()
        write_all(self._files[name], f"{line}\n".encode())
        self._dirty = True

    def _raise_error(self) -> None:
        """What the thread could not do."""
        if self._error is not None:
            raise self._error

    def _close_files(self) -> None:
        with self._lock:
            for file in self._files.values():
                file.close()

    def _sync_now(self) -> None:
        """In the thread: the training is not held up, only the files' descriptors are shared with it."""
        with self._lock:
            dirty, self._dirty = self._dirty, False
        if dirty:
            try:
                _sync([self.path / name for name in (METRICS_FILE, DETAILS_FILE, EVENTS_FILE)])
            except OSError as error:
                self._error = error


def json_line(values: Mapping[str, Any]) -> str:
    """One line of JSON (no line end) from values to any depth, with what :class:`JsonLines` says of non-finite ones."""
    return json.dumps(_finite(values), allow_nan=False, default=_plain)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        out: dict[str, Any] = {}
        for key, one in value.items():
            if isinstance(one, float) and not math.isfinite(one):
                out[str(key)], out[f"{key}_nonfinite"] = None, True
            else:
                out[str(key)] = _finite(one)
        return out
    if isinstance(value, (list, tuple)):
        return [None if isinstance(one, float) and not math.isfinite(one) else _finite(one) for one in value]
    return value


def _plain(value: Any) -> Any:
    """A watcher of the user's own may put tensors and NumPy numbers into its events."""
    return _finite(value.tolist()) if hasattr(value, "tolist") else str(value)


def _keep_on_disk(sink: weakref.ref[JsonLines], stopped: threading.Event, every: float) -> None:
    while not stopped.wait(every):
        found = sink()
        if found is None:
            return
        if found.ask is not None:
            found.ask()
        found._sync_now()
        del found  # or it would live as long as the thread waits


def _sync(paths: list[Path]) -> None:
    """By descriptors of its own: those of the files may be closed meanwhile."""
    for path in paths:
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            continue
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _sync_folder(path: Path) -> None:
    _sync([path])


def _drop_cut_line(path: Path) -> None:
    if path.exists():
        data = path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            os.truncate(path, whole)


def _is_until(line: bytes, step: int) -> bool:
    try:
        return line.endswith(b"\n") and bool(json.loads(line)["step"] <= step)
    except (ValueError, KeyError, TypeError):
        return False
