"""``mo-fused report``: what one or more runs did, as one page that opens from the file system, and as a picture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from mo_fused.training.atomic import write_atomically
from mo_fused.training.errors import bad_input
from mo_fused.training.report.reading import Run, printable, read_run

__all__ = ["Run", "read_run", "write_report"]


def write_report(
    folders: Sequence[str | Path], output: str | Path | None = None, png: str | Path | None = None
) -> tuple[list[Path], list[Run]]:
    """Write the page of the runs in ``folders``, drawn over each other, and with ``png`` a picture of it.

    Args:
        folders: of the runs, one or more.
        output: the page, an ``.html`` file; ``report.html`` in the first run's folder if ``None``.
        png: the picture, a ``.png`` file.

    Returns:
        The files written, and the runs; their ``notes`` say what was not read.

    Raises:
        InputError: a folder holds no run, a file cannot be written there, or a package is missing. Nothing has been
            written then.
    """
    from mo_fused.training.report.page import page

    unique = list({Path(folder).resolve(): Path(folder) for folder in folders}.values())
    if not unique:
        raise bad_input("mo-fused report", expected="a run's folder", found="none", remedy="name one")
    runs = [read_run(folder) for folder in unique]
    files = [_target("--output", output or unique[0] / "report.html", (".html", ".htm"))]
    if png is not None:
        files.append(_target("--png", png, (".png",)))
    names = _names(runs)
    contents = [page(runs, names).encode()]
    if png is not None:
        from mo_fused.training.report.png import picture

        contents.append(picture(runs, names))
    for file, content in zip(files, contents, strict=True):
        try:
            write_atomically(file, content)
        except OSError as error:
            remedy = "name a file elsewhere with --output or --png"
            raise bad_input(
                f"{file}", expected="a file that can be written", found=f"{error.strerror}", remedy=remedy
            ) from error
    return files, runs


def _target(option: str, path: str | Path, endings: tuple[str, ...]) -> Path:
    """The file to write: never one of a run, of which none ends like this."""
    path = Path(path)
    expected = f"a {endings[0]} file in a folder that exists"
    if path.suffix.lower() not in endings:
        raise bad_input(f"{option} {path}", expected=expected, found="another ending", remedy=f"end it in {endings[0]}")
    if path.is_dir() or not path.parent.is_dir():
        found = "a folder" if path.is_dir() else f"no folder {path.parent}"
        raise bad_input(
            f"{option} {path}", expected=expected, found=found, remedy="name another file, or make the folder"
        )
    return path


def _names(runs: Sequence[Run]) -> list[str]:
    """What the runs are called: the folder's name, or its path where two have the same name."""
    count = Counter(run.name for run in runs)
    return [run.name if count[run.name] == 1 else printable(run.path) for run in runs]
