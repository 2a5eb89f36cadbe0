"""The norms of every parameter against the step, drawn by Plotly."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mo_fused.training.report.charts import label
from mo_fused.training.report.packages import package
from mo_fused.training.report.reading import Run

NORM_TITLES = {"grad_norm": "Gradient norm", "update_norm": "Update norm"}
CELLS = 200_000
"""Cells of a heat map, above which columns are put together."""
_ROW_HEIGHT = 15
_SCALE = [
    [0.0, "#000000"],
    [0.03, "#000000"],
    [0.03, "#440154"],
    [0.25, "#3b528b"],
    [0.5, "#21918c"],
    [0.75, "#5ec962"],
    [0.97, "#fde725"],
    [0.97, "#e00000"],
    [1.0, "#e00000"],
]
"""Viridis; black is exactly zero, red not finite."""


def heat_maps(runs: Sequence[Run]) -> list[Any | None]:
    """For each run the norms of gradient and update of every parameter against the step; ``None`` where there are none.

    The colours mean the same in all of them.

    Raises:
        InputError: Plotly is missing.
    """
    ranges = {key: _range([run.layers.norms[key] for run in runs if key in run.layers.norms]) for key in NORM_TITLES}
    return [_heat_map(run, ranges) if len(run.layers.steps) and run.layers.names else None for run in runs]


def columns_of(run: Run, cells: int = CELLS) -> list[npt.NDArray[np.int64]]:
    """The detailed records (their indices) that make each column of the heat map."""
    count = len(run.layers.steps)
    columns = min(count, max(20, cells // max(1, len(run.layers.names))))
    return np.array_split(np.arange(count), columns)


def heat(run: Run, key: str) -> npt.NDArray[np.float64]:
    """``(parameters, columns)``: the largest norm of each column's records; nan: none, inf: not finite."""
    columns = columns_of(run)
    values = run.layers.norms[key]
    if len(columns) == values.shape[1]:
        return values
    return np.stack([np.fmax.reduce(values[:, part], axis=1) for part in columns], axis=1)


def _range(norms: Sequence[npt.NDArray[np.float64]]) -> tuple[float, float]:
    """The powers of ten that the colours span."""
    found = np.concatenate([values[np.isfinite(values) & (values > 0)] for values in norms] or [np.ones(1)])
    if not len(found):
        return -1.0, 1.0
    low, high = math.log10(found.min()), math.log10(found.max())
    return (low, high) if high - low > 0.1 else (low - 0.5, high + 0.5)


def _heat_map(run: Run, ranges: dict[str, tuple[float, float]]) -> Any:
    go, subplots = package("plotly.graph_objects"), package("plotly.subplots")
    titles = [f"{title}, log10" for title in NORM_TITLES.values()]
    figure = subplots.make_subplots(rows=1, cols=2, shared_yaxes=True, horizontal_spacing=0.09, subplot_titles=titles)
    names = [label(name) for name in run.layers.names]
    parts = columns_of(run)
    steps = [int(run.layers.steps[part[0]]) for part in parts]
    for column, key in enumerate(NORM_TITLES, 1):
        values = heat(run, key)
        low, high = ranges[key]
        margin = (high - low) * 0.06
        with np.errstate(divide="ignore"):
            powers = np.log10(values)
        # Exactly zero and not finite have colours of their own beside the scale.
        powers[values == 0] = low - margin
        powers[np.isinf(values)] = high + margin
        figure.add_trace(
            go.Heatmap(
                x=steps,
                y=names,
                z=powers.astype(np.float32),
                zmin=low - margin,
                zmax=high + margin,
                colorscale=_SCALE,
                text=[[_in_words(value) for value in row] for row in values.tolist()],
                hovertemplate="%{y}<br>step %{x:,}: %{text}<extra></extra>",
                hoverongaps=False,
                colorbar={"x": 0.455 if column == 1 else 1.0, "thickness": 10, "xpad": 4},
            ),
            row=1,
            col=column,
        )
    figure.update_yaxes(autorange="reversed", automargin=True, tickfont_size=10, type="category")
    figure.update_xaxes(title_text="step")
    figure.update_xaxes(matches="x", row=1, col=2)
    if len(names) <= 100:
        figure.update_yaxes(dtick=1)
    height = min(max(len(names) * _ROW_HEIGHT, 120), 1500) + 110
    figure.update_layout(height=height, template="plotly_white", margin={"l": 20, "r": 20, "t": 50, "b": 50})
    return figure


def _in_words(value: float) -> str:
    if math.isnan(value):
        return "none"
    return "not finite" if math.isinf(value) else f"{value:.4g}"
