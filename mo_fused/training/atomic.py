"""Writing files: never seen half written, or as they are."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO


def write_atomically(path: Path, content: bytes | Callable[[BinaryIO], object]) -> None:
    """Write ``path`` so that at any moment, a kill included, it is either absent (or old) or complete.

    ``content``, bytes or a function that writes them, goes into a hidden file beside it, which takes the name once it
    is on the disk. A kill can leave that hidden file (``.NAME.PID.part``) behind; nothing ever reads it.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(temporary, "wb") as file:
            if isinstance(content, bytes):
                file.write(content)
            else:
                content(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_all(file: BinaryIO, data: bytes) -> None:
    """Writes ``data`` to an unbuffered file, which may take less than it is given."""
    view = memoryview(data)
    while view:
        view = view[file.write(view) or 0 :]
