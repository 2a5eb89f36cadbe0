"""The report as a picture, drawn by Matplotlib."""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from mo_fused.training.report.heat_map import NORM_TITLES, columns_of, heat
from mo_fused.training.report.packages import package
from mo_fused.training.report.panels import COLOURS, KINDS, Panel, keys_of, marks_of, panels_of
from mo_fused.training.report.reading import Run
from mo_fused.training.report.series import thin

_LINES = ("-", ":", "--", "-.")
_SYMBOLS = {"spike": "^", "event": "D", "skipped": "x", "nonfinite": "*"}
_MAX_NAMES = 40


def picture(runs: Sequence[Run], names: Sequence[str]) -> bytes:
    """The same charts as on the page, two beside each other, as a PNG file.

    Raises:
        InputError: Matplotlib is missing.
    """
    matplotlib, figures = package("matplotlib"), package("matplotlib.figure")
    panels = panels_of(runs)
    layered = [(run, name) for run, name in zip(runs, names, strict=True) if len(run.layers.steps) and run.layers.names]
    rows = (len(panels) + 1) // 2 + len(layered)
    with matplotlib.rc_context({"font.size": 8}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        figure = figures.Figure(figsize=(13, 2.6 * max(1, rows) + 0.5), layout="constrained")
        axes = figure.subplots(max(1, rows), 2, squeeze=False)
        for axis in axes.flat[len(panels) : 2 * (rows - len(layered))]:
            axis.set_axis_off()
        if not rows:
            for axis in axes.flat:
                axis.set_axis_off()
            axes[0, 0].text(0, 0.5, "No numbers were recorded.")
        for axis, panel in zip(axes.flat, panels):
            _draw(axis, panel, runs)
        for (left, right), (run, name) in zip(axes[rows - len(layered) :], layered):
            for axis, key in ((left, "grad_norm"), (right, "update_norm")):
                _heat_map(figure, axis, run, key, name)
        handles = [
            package("matplotlib.lines").Line2D([], [], color=COLOURS[number % len(COLOURS)])
            for number in range(len(runs))
        ]
        figure.legend(handles, [_plain(name) for name in names], loc="outside upper left", ncols=min(4, len(runs)))
        file = io.BytesIO()
        figure.savefig(file, format="png", dpi=100)
    return file.getvalue()


def _draw(axis: Any, panel: Panel, runs: Sequence[Run]) -> None:
    kinds: dict[str, Any] = {}
    for number, run in enumerate(runs):
        colour = COLOURS[number % len(COLOURS)]
        for style, key in enumerate(keys_of(panel, runs)):
            if key in run.numbers:
                steps, values = thin(run.steps, run.numbers[key])
                point = "." if len(steps) <= 60 else ""
                line = _LINES[style % len(_LINES)]
                axis.plot(steps, values * panel.factor, line, color=colour, linewidth=0.8, marker=point, markersize=3)
        for kind, found in marks_of(run, panel).items():
            kinds[kind] = axis.scatter(
                [mark.step for mark in found],
                [mark.value for mark in found],
                marker=_SYMBOLS[kind],
                color=colour if kind == "skipped" else "#b00020",
                s=22,
                linewidths=0.8,
                zorder=3,
            )
    if panel.log and any((run.numbers[key] > 0).any() for run in runs for key in panel.keys if key in run.numbers):
        axis.set_yscale("log")
    elif panel.from_zero:
        axis.set_ylim(bottom=0)
    if kinds:
        axis.legend(list(kinds.values()), [KINDS[kind] for kind in kinds], fontsize=7)
    axis.set_title(panel.title, fontsize=9)
    axis.grid(alpha=0.3)


def _heat_map(figure: Any, axis: Any, run: Run, key: str, name: str) -> None:
    colors = package("matplotlib.colors")
    values = heat(run, key)
    found = values[np.isfinite(values) & (values > 0)]
    low, high = (found.min(), found.max()) if len(found) else (0.1, 1.0)
    scale = package("matplotlib").colormaps["viridis"].with_extremes(under="black", over="red", bad="white")
    # LogNorm masks zero; a number below the scale is drawn in the colour of "under".
    shown = np.where(values == 0, low * 1e-3, np.where(np.isinf(values), high * 1e3, values))
    norm = colors.LogNorm(low * 0.99, high * 1.01)
    image = axis.imshow(shown, aspect="auto", interpolation="nearest", cmap=scale, norm=norm)
    steps = [int(run.layers.steps[part[0]]) for part in columns_of(run)]
    ticks = np.unique(np.linspace(0, len(steps) - 1, min(6, len(steps))).astype(int))
    axis.set_xticks(ticks, [f"{steps[tick]:,}" for tick in ticks])
    if len(run.layers.names) <= _MAX_NAMES:
        axis.set_yticks(range(len(run.layers.names)), [_plain(name) for name in run.layers.names], fontsize=5)
    axis.set_title(f"{NORM_TITLES[key]} of every parameter, {_plain(name)}", fontsize=9)
    figure.colorbar(image, ax=axis, extend="both")


def _plain(name: str) -> str:
    """``$x$`` is a name here, no formula."""
    return name.replace("$", r"\$")
