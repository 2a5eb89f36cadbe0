"""Text as bytes: where it comes from, how it is split, how windows are drawn from it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mo_fused.training.errors import bad_input

BUILT_IN = "pydoc_data.topics"
_REMEDY = "give --text a plain text file in UTF-8, or leave it out for the text that comes with Python"


@dataclass(frozen=True)
class TextData:
    """A text split by position: the first 90 % are trained on, the rest is for validation.

    ``train`` and ``validation`` are 1-D uint8 tensors on the CPU; ``source`` names where the text came from.
    """

    source: str
    train: Tensor
    validation: Tensor
    sha256: str

    @property
    def size(self) -> int:
        """Bytes in all."""
        return self.train.numel() + self.validation.numel()

    def draw(self, batch: int, context: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Random windows of the training part: inputs and targets, each int64 of shape (batch, context).

        The generator lives on the CPU, so that a seed means the same windows on every device.
        """
        starts = torch.randint(0, self.train.numel() - context, (batch,), generator=generator)
        return _windows(self.train, starts, context)

    def validation_windows(self, context: int, limit: int = 256) -> tuple[Tensor, Tensor]:
        """At most ``limit`` windows that don't overlap, evenly spaced over the validation part; always the same ones.

        Returns inputs and targets, each int64 of shape (windows, context).
        """
        fit = (self.validation.numel() - 1) // context
        count = min(fit, limit)
        starts = torch.arange(count) * fit // count * context
        return _windows(self.validation, starts, context)


def load_text(path: str | None, context: int) -> TextData:
    """The user's text file, or with ``None`` the English prose inside every Python.

    The file is read whole. A window needs ``context + 1`` bytes, and both parts must hold one.

    Raises:
        InputError: the file is missing, cannot be read, is no regular file, is not UTF-8 text, or is too short.
    """
    content = _built_in() if path is None else _file(path)
    source = BUILT_IN if path is None else path
    cut = len(content) * 9 // 10
    if len(content) - cut < context + 1:
        least = 10 * context + 1
        raise bad_input(
            f"--text {source}",
            expected=f"a text of at least {least} bytes (a tenth is kept for validation)",
            found="an empty file" if not content else f"{len(content)} bytes",
            remedy="give --text a longer file, or leave it out for the text that comes with Python",
        )
    whole = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    return TextData(source, whole[:cut], whole[cut:], hashlib.sha256(content).hexdigest())


def _windows(part: Tensor, starts: Tensor, context: int) -> tuple[Tensor, Tensor]:
    window = part[starts[:, None] + torch.arange(context + 1)].long()
    return window[:, :-1], window[:, 1:]


def _built_in() -> bytes:
    """All help topics of this Python in sorted order, each paragraph once.

    Topics quote each other: about a fifth of the text stands in it twice. Repeats are dropped, or text that is
    trained on would come back in the validation part and make its loss look better than it is.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise bad_input(
            "the default text",
            expected=f"the module {BUILT_IN} that comes with Python",
            found=str(error),
            remedy="give a text file with --text FILE",
        ) from error
    paragraphs = "\n\n".join(topics[name] for name in sorted(topics)).split("\n\n")
    once: dict[str, str] = {}
    for paragraph in paragraphs:
        once.setdefault(" ".join(paragraph.split()), paragraph)
    return "\n\n".join(once.values()).encode()


def _file(path: str) -> bytes:
    file = Path(path)
    expected = "a text file in UTF-8"
    if not file.is_file():
        found = "no such file" if not file.exists() else "a folder" if file.is_dir() else "no regular file"
        raise bad_input(f"--text {path}", expected=expected, found=found, remedy=_REMEDY)
    try:
        content = file.read_bytes()
    except OSError as error:
        found = f"a file that cannot be read ({error.strerror})"
        raise bad_input(f"--text {path}", expected=expected, found=found, remedy=_REMEDY) from error
    nul = content.find(b"\0")
    if nul >= 0:
        found = f"a NUL byte at offset {nul}, so this is no text or another encoding such as UTF-16"
        raise bad_input(f"--text {path}", expected=expected, found=found, remedy=_REMEDY)
    try:
        content.decode("utf-8")
    except UnicodeDecodeError as error:
        found = f"byte 0x{content[error.start]:02x} at offset {error.start}, which is not UTF-8"
        raise bad_input(f"--text {path}", expected=expected, found=found, remedy=_REMEDY) from error
    return content
