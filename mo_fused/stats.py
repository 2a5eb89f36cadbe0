"""Results of a step and of a measurement: buffers on the optimizer's device, read when a field is asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from . import errors

# Columns of the float64 buffers, as in csrc/abi.h (Result, RowStats).
RESULT = (
    "grad_norm",
    "clip_coef",
    "skipped",
    "nonfinite",
    "zeros",
    "grad_amax",
    "update_norm",
    "stored_update_norm",
    "param_norm",
    "found_inf",
    "measured",
    "updated",
    "grad_scale",
)
RESULT_WIDTH = 16
ROW = ("grad_norm", "grad_amax", "nonfinite", "zeros", "update_norm", "stored_update_norm", "param_norm", "active")
ROW_WIDTH = 8
RESULT_AT = {name: i for i, name in enumerate(RESULT)}
_ROW_AT = {name: i for i, name in enumerate(ROW)}

RING = 4
"""How many steps a StepStats stays readable: its own and the three after it."""


def whole_number(count: Tensor) -> Tensor:
    """A count, which over replicas of a DTensor is a mean: one bad element of one replica alone is one, not half."""
    return torch.ceil(count - 1e-6).abs()  # and not -0.0


class Pieces(NamedTuple):
    """What a step knows of its rows where the numbers are: nothing is copied and nothing waits.

    Values are never negative, and a row's value is 0 if and only if all of its pieces' are.
    """

    values: Tensor
    """Shape ``(k, m)``, float64: a view of a buffer that is written again four steps later."""
    at: tuple[int, int, int]
    """Which of the k lines are ``grad_amax``, ``update_norm`` and ``stored_update_norm`` (up to a factor)."""
    row: np.ndarray[Any, Any]
    """The row of each of the m pieces."""
    active: np.ndarray[Any, Any]
    """Of each row, whether it had a gradient; values of the others mean nothing."""


class StatsBuffer:
    """One slot of the ring: a Result and the RowStats of every parameter in the table, as one float64 array."""

    def __init__(self, rows: int) -> None:
        self.array = np.zeros(RESULT_WIDTH + rows * ROW_WIDTH, dtype=np.float64)
        self.tensor = torch.from_numpy(self.array)
        self.result = self.array[:RESULT_WIDTH]
        self.rows = self.array[RESULT_WIDTH:].reshape(rows, ROW_WIDTH)
        self.result_address: int = self.array.ctypes.data
        self.rows_address: int = self.array.ctypes.data + 8 * RESULT_WIDTH
        self.generation = 0

    def claim(self) -> int:
        """Empties the slot for a new step; statistics of the step that had this slot become stale."""
        self.generation += 1
        self.array.fill(0.0)
        return self.generation

    def __getitem__(self, field: str) -> float:
        return float(self.result[RESULT_AT[field]])

    def __setitem__(self, field: str, value: float) -> None:
        self.result[RESULT_AT[field]] = value

    @property
    def measured(self) -> bool:
        return bool(self["measured"])

    @property
    def updated(self) -> bool:
        return bool(self["updated"])

    def field(self, name: str) -> Tensor:
        """A 0-dim float64; a copy, because the slot is written again four steps later."""
        return self.tensor[RESULT_AT[name]].clone()

    def per_row(self) -> np.ndarray[Any, Any]:
        """The RowStats of every row, shape ``(n, 8)``."""
        return self.rows

    def pieces(self) -> Pieces:
        at = (_ROW_AT["grad_amax"], _ROW_AT["update_norm"], _ROW_AT["stored_update_norm"])
        values = self.tensor[RESULT_WIDTH:].view(-1, ROW_WIDTH).T
        return Pieces(values, at, np.arange(len(self.rows)), self.rows[:, _ROW_AT["active"]] != 0.0)

    def keep_param_norms(self, earlier: StatsBuffer) -> None:
        """For a skipped step: the update is zero and the parameters are those of ``earlier``, if it measured them."""
        known = earlier["updated"] != 0.0
        self["param_norm"] = earlier["param_norm"] if known else float("nan")
        at = _ROW_AT["param_norm"]
        self.rows[:, at] = earlier.rows[:, at] if known else float("nan")
        self["updated"] = 1.0

    def per_row_later(self) -> Callable[[], np.ndarray[Any, Any]]:
        """What :meth:`per_row` gives now, whenever the result is called."""
        rows = self.rows.copy()
        return lambda: rows

    def row(self, row: int, name: str) -> float:
        """A field of one row."""
        return float(self.rows[row, _ROW_AT[name]])

    def set_row(self, row: int, **fields: float) -> None:
        for name, value in fields.items():
            self.rows[row, _ROW_AT[name]] = value


class Buffer(Protocol):
    """Statistics of some rows in one step: :class:`StatsBuffer` or a device's (``device_part.DeviceStats``)."""

    generation: int

    def pieces(self) -> Pieces: ...

    @property
    def measured(self) -> bool: ...

    @property
    def updated(self) -> bool: ...

    def field(self, name: str) -> Tensor: ...

    def per_row(self) -> np.ndarray[Any, Any]: ...

    def per_row_later(self) -> Callable[[], np.ndarray[Any, Any]]: ...


@dataclass(frozen=True)
class ParamStats:
    """One parameter in one step. Fields that were not measured are None."""

    grad_norm: float | None
    """L2 norm of the unscaled gradient, before clipping."""
    grad_amax: float | None
    """Largest magnitude of the unscaled gradient (inf or NaN when an element is)."""
    update_norm: float | None
    """L2 norm of what the rule asked for, before rounding to the parameter's dtype."""
    stored_update_norm: float | None
    """L2 norm of the change that rounding left (with master weights: that parameter and rest kept together)."""
    param_norm: float | None
    """L2 norm of the parameter (with master weights: of the weights) after the step."""
    all_zero: bool | None
    """Every element of the gradient is exactly zero."""
    nonfinite: int | None
    """Elements of the gradient that are inf or NaN."""


class StepStats:
    """What the last step measured (``opt.last_step``).

    Every field is a 0-dim tensor on the optimizer's device, so reading it into Python (``float``, ``.item()``) is the
    only moment that waits for the device. A field that this step did not measure is None: ``update_norm``,
    ``stored_update_norm`` and ``param_norm`` need ``stats=True``; the gradient's fields need ``stats=True`` or
    something that gates the update (``max_grad_norm``, ``skip_nonfinite``, :class:`mo_fused.GradScaler`). Values stay
    readable for three further steps; later they raise :class:`mo_fused.errors.StaleStatsError`.
    """

    def __init__(self, buffers: Sequence[Buffer], names: Callable[[], Sequence[Any]], rows: object = None) -> None:
        """``rows``: the same object as long as the buffers' rows stay the same; None where they are another's."""
        self._buffers = buffers
        self._rows = rows
        self._generations = [b.generation for b in buffers]
        self._names = names
        self._measured = buffers[0].measured
        self._updated = buffers[0].updated

    def _stale(self) -> bool:
        return any(b.generation != g for b, g in zip(self._buffers, self._generations, strict=True))

    def _fresh(self) -> Sequence[Buffer]:
        if self._stale():
            raise errors.stale_stats()
        return self._buffers

    def on_host(self) -> dict[str, float | None] | None:
        """Norms, ``clip_coef`` and ``skipped`` (0 or 1) as Python numbers, where they are in the host's memory already.

        A tenth of what reading the fields one by one takes. None where a device has them, which would be waited for.
        """
        buffers = self._fresh()
        if len(buffers) != 1 or not isinstance(one := buffers[0], StatsBuffer):
            return None
        known = {"grad_norm": self._measured, "update_norm": self._updated, "param_norm": self._updated}
        return {name: one[name] if known.get(name, True) else None for name in (*known, "clip_coef", "skipped")}

    def _field(self, name: str, known: bool = True) -> Tensor | None:
        # Whoever finished the step knew the gradients of all devices.
        return self._fresh()[0].field(name) if known else None

    def _norm(self, name: str) -> Tensor | None:
        """A norm that every device knows of its own rows alone."""
        if not self._updated:
            return None
        parts = [b.field(name) for b in self._fresh()]
        if len(parts) == 1:
            return parts[0]
        return torch.stack([p.to(parts[0].device) for p in parts]).square().sum().sqrt()

    @property
    def grad_norm(self) -> Tensor | None:
        """Global L2 norm of the unscaled gradients before clipping (float64; inf or NaN on a skipped step)."""
        return self._field("grad_norm", self._measured)

    @property
    def clip_coef(self) -> Tensor:
        """What the gradients were multiplied by to clip them, in [0, 1]; 1 without clipping (float64)."""
        value = self._field("clip_coef")
        assert value is not None
        return value

    @property
    def skipped(self) -> Tensor:
        """True when the step changed nothing because of a non-finite gradient (bool)."""
        value = self._field("skipped")
        assert value is not None
        return value != 0

    @property
    def nonfinite(self) -> Tensor | None:
        """Number of gradient elements that are inf or NaN, over all groups (float64, a whole number).

        On a device, NaN like the gradient's norm when nothing but ``stats=True`` asked for it and torch's scaler made
        the step a skipped one: the gradients were not read then.
        """
        value = self._field("nonfinite", self._measured)
        return None if value is None else whole_number(value)

    @property
    def grad_amax(self) -> Tensor | None:
        """Largest magnitude of the unscaled gradients (float64)."""
        return self._field("grad_amax", self._measured)

    @property
    def update_norm(self) -> Tensor | None:
        """L2 norm of what the rule subtracted from the parameters, decay included; 0 on a skipped step (float64)."""
        return self._norm("update_norm")

    @property
    def stored_update_norm(self) -> Tensor | None:
        """L2 norm of the change that the parameters' dtype kept; far below ``update_norm`` means a stall (float64).

        With master weights, of what parameter and rest kept together.
        """
        return self._norm("stored_update_norm")

    @property
    def param_norm(self) -> Tensor | None:
        """L2 norm of the parameters after the step (float64); on a skipped step the last one measured, or NaN.

        With master weights, of the weights.
        """
        return self._norm("param_norm")

    def per_param(self) -> dict[Any, ParamStats]:
        """The same for each parameter that had a gradient, by name (optimizers over named parameters) or position.

        Of a DTensor, whole parameters' values, which ranks tell each other with ``stats=True`` alone: without it the
        gradient's fields of a sharded parameter are None.

        Returns Python numbers: this reads the whole buffer and therefore waits for the device once.
        """
        return self._by_key([b.per_row() for b in self._fresh()], self._names())

    def per_param_later(self) -> Callable[[], dict[Any, ParamStats]]:
        """What :meth:`per_param` gives for this step, without waiting: a copy to the host is queued.

        Returns:
            A function that waits for the copy alone, at any time: it does not become stale.
        """
        later, names = [b.per_row_later() for b in self._fresh()], list(self._names())
        return lambda: self._by_key([rows() for rows in later], names)

    def _by_key(self, parts: Sequence[np.ndarray[Any, Any]], names: Sequence[Any]) -> dict[Any, ParamStats]:
        rows = np.concatenate(parts)
        measured, updated = self._measured, self._updated
        out: dict[Any, ParamStats] = {}
        for key, row, whole in names:
            values = dict(zip(ROW, rows[row].tolist(), strict=True))
            if not values["active"]:
                continue
            out[key] = ParamStats(
                grad_norm=values["grad_norm"] if measured and whole else None,
                grad_amax=values["grad_amax"] if measured and whole else None,
                update_norm=values["update_norm"] if updated else None,
                stored_update_norm=values["stored_update_norm"] if updated else None,
                param_norm=values["param_norm"] if updated else None,
                all_zero=values["grad_amax"] == 0.0 if measured and whole else None,
                nonfinite=int(whole_number(torch.tensor(values["nonfinite"]))) if measured and whole else None,
            )
        return out

    def __repr__(self) -> str:
        if self._stale():
            return "StepStats(stale)"
        parts = []
        for name in (*RESULT[:4], *RESULT[6:9]):
            value = getattr(self, name)
            if value is not None:
                parts.append(f"{name}={value.item():.6g}" if value.dtype != torch.bool else f"{name}={bool(value)}")
        return f"StepStats({', '.join(parts)})"


@dataclass(frozen=True)
class GradStats:
    """Result of :func:`mo_fused.grad_stats`. 0-dim tensors over everything, 1-D tensors with one value a tensor."""

    total_norm: Tensor
    """L2 norm over all tensors (float64, 0-dim)."""
    amax: Tensor
    """Largest magnitude (float64, 0-dim); inf or NaN when an element is."""
    nonfinite: Tensor
    """Elements that are inf or NaN (int64, 0-dim)."""
    zeros: Tensor
    """Elements that are exactly zero (int64, 0-dim)."""
    norms: Tensor
    """L2 norm of each tensor (float64, shape ``(n,)``; 0 where a parameter has no gradient)."""
    amaxes: Tensor
    """Largest magnitude of each tensor (float64, ``(n,)``)."""
    nonfinites: Tensor
    """Non-finite elements of each tensor (int64, ``(n,)``)."""
    zero_counts: Tensor
    """Zero elements of each tensor (int64, ``(n,)``)."""
