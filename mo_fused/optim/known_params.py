"""Of which parameters Adafactor knows the sum of squares that its last step has left: nobody else has written them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from ..table import PARAM_UNKNOWN

NO_VERSION = -2


class KnownParams:
    """Addresses and versions of the parameters of some rows when their sums were taken.

    Args:
        rows: the records, shape ``(n,)``.
        params: their parameters.
    """

    def __init__(self, rows: np.ndarray[Any, Any], params: Sequence[Tensor]) -> None:
        self._rows, self._params = rows, params
        self.seen = np.full((2, len(rows)), -1, dtype=np.int64)

    def mark(self) -> None:
        """Asks for the sum of squares of parameters that somebody else may have written since the last step.

        A write through ``p.data`` leaves no trace: one step goes on with the sum of before, the one after it is right.
        """
        now = self._now()
        # A tensor of inference mode has no version, and is looked at every time.
        unknown = (now != self.seen).any(axis=0) | (now[1] == NO_VERSION)
        self._rows["flags"] |= np.where(unknown, PARAM_UNKNOWN, 0).astype(self._rows["flags"].dtype)

    def learn(self, which: np.ndarray[Any, Any]) -> None:
        """The sums of these rows (shape ``(n,)``, bool) are those of what their parameters hold now."""
        self.seen = np.where(which, self._now(), self.seen)

    def _now(self) -> np.ndarray[Any, Any]:
        return np.stack([self._rows["param"].astype(np.int64), _versions(self._params)])


def _versions(params: Sequence[Tensor]) -> np.ndarray[Any, Any]:
    try:
        return np.fromiter((p._version for p in params), dtype=np.int64, count=len(params))
    except RuntimeError:  # a tensor of inference mode has none, and is looked at every time
        return np.full(len(params), NO_VERSION, dtype=np.int64)
