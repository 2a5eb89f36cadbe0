"""The drawing libraries, which are no dependency of mo_fused itself."""

from __future__ import annotations

import importlib
from typing import Any

from mo_fused.training.errors import bad_input


def package(module: str) -> Any:
    """A module of Plotly or Matplotlib.

    Raises:
        InputError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = module.partition(".")[0]
        raise bad_input(
            "mo-fused report",
            expected=f"the package {name}",
            found=f"no {name}",
            remedy='run: pip install "mo_fused[report]"',
        ) from error
