"""States in a file, one for each optimizer: memory-mapped for whoever looks at a state, read and written by a step.

A step does not work on the mapping: a full disk or a file that was cut short would kill the process there (SIGBUS),
while a read or write says what is wrong. Space is allocated before a state is there, so that a full disk is noticed
before anything has changed.
"""

from __future__ import annotations

import contextlib
import errno
import math
import mmap
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import errors

_PAGE = mmap.ALLOCATIONGRANULARITY
_ZEROS = 1 << 20
"""Bytes that are written at once to space that is used again."""
IO_BYTES = 1 << 24
"""Of one read or write: far more than a call costs, and few enough to show an error early."""


class StateFile:
    """A file in ``folder`` whose extents hold states; it is removed with this object, or when the process exits.

    A process that is killed leaves it behind. Errors are OSErrors of ``mo_fused.errors``.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder = os.path.abspath(os.path.expanduser(folder))
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            descriptor, name = tempfile.mkstemp(prefix="mo_fused-", suffix=".states", dir=folder)
        except OSError as error:
            raise errors.offload_folder(folder, str(error)) from error
        self._descriptor = descriptor
        self.path = name
        self._end = 0
        self._free: dict[int, list[int]] = {}
        self._held: dict[int, int] = {}  # room by offset of what was released while it was mapped
        self._process = os.getpid()
        self._maps: dict[int, list[weakref.ref[mmap.mmap]]] = {}  # by offset
        self._close = weakref.finalize(self, _remove, descriptor, name, os.getpid())

    def check(self) -> None:
        """Raises when the file has gone or was cut short, or is another process's."""
        if self._process != os.getpid():
            raise errors.offload_forked(self.path)
        try:
            there, own = os.stat(self.path), os.fstat(self._descriptor)
        except OSError as error:
            raise errors.offload_lost(self.path, str(error)) from error
        if (there.st_dev, there.st_ino) != (own.st_dev, own.st_ino):
            raise errors.offload_lost(self.path, "another file in its place")
        if own.st_size < self._end:
            raise errors.offload_lost(self.path, f"{own.st_size} of its {self._end} bytes")

    def allocate(self, size: int) -> int:
        """Space of so many bytes, all zero; where it begins. OSError where there is none."""
        room = -(-size // _PAGE) * _PAGE
        if not room:
            return 0
        for offset in [o for o in self._held if not self._mapped(o)]:
            self._free.setdefault(self._held.pop(offset), []).append(offset)
        if free := self._free.get(room):
            offset = free.pop()
            zeros = np.zeros(min(room, _ZEROS), dtype=np.uint8)
            for at in range(0, room, _ZEROS):
                self.write(zeros[: room - at], offset + at)
            return offset
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self._descriptor, self._end, room)
            else:  # macOS: a full disk is then noticed when the pages are written
                os.ftruncate(self._descriptor, self._end + room)
        except OSError as error:
            os.ftruncate(self._descriptor, self._end)
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                left = shutil.disk_usage(self.folder).free
                raise errors.offload_full(self.folder, room, left, str(error.strerror)) from error
            raise errors.offload_failed(self.path, "write", str(error)) from error
        self._end += room
        return self._end - room

    def release(self, offset: int, size: int) -> None:
        """Space that is not needed any more. It stays as it is while somebody holds a tensor that is mapped there."""
        if room := -(-size // _PAGE) * _PAGE:
            self._held[offset] = room

    def _mapped(self, offset: int) -> bool:
        alive = [m for m in self._maps.pop(offset, ()) if m() is not None]
        if alive:
            self._maps[offset] = alive
        return bool(alive)

    def read(self, into: np.ndarray[Any, Any], offset: int) -> None:
        """Fills the bytes ``into`` from ``offset`` on. OSError when they cannot be read."""
        done = 0
        while done < into.size:
            try:
                count = os.preadv(self._descriptor, [into[done : done + IO_BYTES].data], offset + done)
            except OSError as error:
                raise errors.offload_failed(self.path, "read", str(error)) from error
            if not count:
                raise errors.offload_lost(self.path, f"{offset + done} bytes of at least {offset + into.size}")
            done += count

    def write(self, data: np.ndarray[Any, Any], offset: int) -> None:
        """Writes bytes at ``offset``. OSError when they cannot be written."""
        done = 0
        while done < data.size:
            try:
                done += os.pwritev(self._descriptor, [data[done : done + IO_BYTES].data], offset + done)
            except OSError as error:
                raise errors.offload_failed(self.path, "write", str(error)) from error

    def map(self, offset: int, size: int) -> mmap.mmap:
        """The bytes as memory, shared with the file."""
        try:
            found = mmap.mmap(self._descriptor, size, offset=offset)
        except (OSError, ValueError) as error:
            raise errors.offload_failed(self.path, "map", str(error)) from error
        self.note(offset, found)
        return found

    def map_all(self) -> mmap.mmap | None:
        """The whole file as memory; None where there are not enough addresses for it."""
        try:
            return mmap.mmap(self._descriptor, self._end) if self._end else None
        except (OSError, ValueError):
            return None

    def note(self, offset: int, mapping: mmap.mmap) -> None:
        """Somebody holds what is at ``offset`` for as long as the mapping lives."""
        alive = [m for m in self._maps.get(offset, ()) if m() is not None]
        self._maps[offset] = [*alive, weakref.ref(mapping)]


def _remove(descriptor: int, path: str, process: int) -> None:
    with contextlib.suppress(OSError):  # it has gone, or is somebody else's
        there, own = os.stat(path), os.fstat(descriptor)
        if process == os.getpid() and (there.st_dev, there.st_ino) == (own.st_dev, own.st_ino):  # a child leaves it
            os.unlink(path)
    os.close(descriptor)


@dataclass(frozen=True)
class Extent:
    """A tensor in a file."""

    file: StateFile
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def mapped(self, whole: mmap.mmap | None = None) -> Tensor:
        """The tensor; what is written to it is written to the file. ``whole``: a mapping of all of the file."""
        if not self.size:
            return torch.empty_strided(self.shape, self.strides, dtype=self.dtype)
        if whole is None:
            flat = torch.frombuffer(self.file.map(self.offset, self.size), dtype=self.dtype)
        else:
            self.file.note(self.offset, whole)
            flat = torch.frombuffer(whole, dtype=self.dtype, count=math.prod(self.shape), offset=self.offset)
        return flat.as_strided(self.shape, self.strides)

    def store(self, value: Tensor) -> None:
        """Writes a tensor of the host with these strides."""
        flat = value.detach().as_strided((value.numel(),), (1,)).view(torch.uint8)
        self.file.write(flat.numpy(), self.offset)


class OnDisk(dict[str, Any]):
    """A parameter's entry in ``opt.state`` whose moments and master weights are in a file.

    It looks like every other entry. A tensor is mapped when it is asked for; one that is put in is kept in memory until
    the next step, which moves it to the file.
    """

    def __init__(self, plain: dict[str, Any]) -> None:
        super().__init__(plain)
        self.extents: dict[str, Extent] = {}

    def holds(self, slots: Iterable[str]) -> bool:
        """Whether all of these are in the file."""
        return all(key in self.extents for key in slots)

    def in_memory(self) -> dict[str, Any]:
        """What is not in the file."""
        return {key: dict.__getitem__(self, key) for key in dict.__iter__(self)}

    def put(self, key: str, extent: Extent) -> None:
        """Makes the entry one in the file."""
        self.drop(key)
        self.extents[key] = extent

    def drop(self, key: str) -> None:
        """Takes an entry out without a look at it."""
        dict.pop(self, key, None)
        old = self.extents.pop(key, None)
        if old is not None:
            old.file.release(old.offset, old.size)

    def __getitem__(self, key: str) -> Any:
        extent = self.extents.get(key)
        return dict.__getitem__(self, key) if extent is None else extent.mapped()

    def __setitem__(self, key: str, value: Any) -> None:
        self.drop(key)
        dict.__setitem__(self, key, value)

    def __delitem__(self, key: str) -> None:
        if key not in self:
            raise KeyError(key)
        self.drop(key)

    def __contains__(self, key: object) -> bool:
        return key in self.extents or dict.__contains__(self, key)

    def __iter__(self) -> Iterator[str]:
        # A loop may put tensors in the place of those in the file.
        yield from [*dict.__iter__(self), *self.extents]

    def __len__(self) -> int:
        return dict.__len__(self) + len(self.extents)

    def __bool__(self) -> bool:
        return len(self) > 0

    def keys(self) -> Any:
        return list(self)

    def values(self) -> Any:
        return [self[key] for key in self]

    def items(self) -> Any:
        return [(key, self[key]) for key in self]

    def get(self, key: str, default: Any = None) -> Any:
        try:
            return self[key]
        except KeyError:
            return default

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def update(self, *others: Any, **more: Any) -> None:
        for key, value in dict(*others, **more).items():
            self[key] = value

    def pop(self, key: str, *default: Any) -> Any:
        if key not in self:
            if default:
                return default[0]
            raise KeyError(key)
        value = self[key]
        self.drop(key)
        return value

    def clear(self) -> None:
        for key in list(self):
            self.drop(key)

    def __del__(self) -> None:
        self.clear()

    def copy(self) -> dict[str, Any]:
        return dict(self.items())

    def __repr__(self) -> str:
        return repr(dict(self.items()))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (self.items(),)


def mapped(state: dict[Any, Any]) -> dict[Any, Any]:
    """A state whose entries are plain dictionaries.

    Each mapping takes an open file, so one serves all of a file where there are addresses for it.
    """
    files = {e.file for v in state.values() if isinstance(v, OnDisk) for e in v.extents.values()}
    whole = {file: file.map_all() for file in files}

    def plain(entry: OnDisk) -> dict[str, Any]:
        found = entry.extents
        return {k: found[k].mapped(whole[found[k].file]) if k in found else entry[k] for k in entry}

    return {key: plain(entry) if isinstance(entry, OnDisk) else entry for key, entry in state.items()}
