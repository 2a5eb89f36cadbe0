"""Pictures of measurements, by Matplotlib."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mo_fused.training.errors import bad_input


def new_figure(what: str, **options: Any) -> Any:
    """A figure of Matplotlib's that needs no display.

    Raises:
        InputError: Matplotlib is missing, of which ``what`` has need.
    """
    try:
        figures = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise bad_input(
            what,
            expected="the package matplotlib",
            found="no matplotlib",
            remedy='run: pip install "mo-fused[bench]"',
        ) from error
    return figures.Figure(**options)


@contextmanager
def picture(path: str | Path, charts: int) -> Iterator[list[Any]]:
    """That many axes side by side; written to ``path`` as a PNG file in the end. Needs no display.

    Raises:
        InputError: Matplotlib is missing.
    """
    figure = new_figure(f"a picture ({path})", figsize=(5.5 * charts, 4.2), layout="constrained")
    yield list(figure.subplots(1, charts, squeeze=False)[0])
    figure.savefig(path, dpi=110, format="png")
