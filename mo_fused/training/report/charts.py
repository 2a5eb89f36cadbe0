"""The charts of the page against the step, drawn by Plotly."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

import numpy as np

from mo_fused.training.report.packages import package
from mo_fused.training.report.panels import COLOURS, KINDS, Panel, keys_of, marks_of, panels_of, says
from mo_fused.training.report.reading import Run, printable
from mo_fused.training.report.series import thin

DASHES = ("solid", "dot", "dash", "dashdot", "longdash")
SYMBOLS = {"spike": "triangle-up", "event": "diamond-open", "skipped": "x-thin", "nonfinite": "star-triangle-down"}
_PANEL_HEIGHT, _GAP = 190, 46


def label(text: object) -> str:
    """Any text as Plotly has to be given it: it shows a subset of HTML."""
    return html.escape(printable(text))


def curves(runs: Sequence[Run], names: Sequence[str]) -> Any | None:
    """All numbers against the step, a chart below the other with one axis of steps, so that a zoom holds for all.

    Returns:
        A ``plotly.graph_objects.Figure``; ``None`` if no run has a number.

    Raises:
        InputError: Plotly is missing.
    """
    panels = panels_of(runs)
    if not panels:
        return None
    go, subplots = package("plotly.graph_objects"), package("plotly.subplots")
    height = len(panels) * (_PANEL_HEIGHT + _GAP) + 60
    figure = subplots.make_subplots(
        rows=len(panels),
        cols=1,
        shared_xaxes=True,
        vertical_spacing=_GAP / height,
        subplot_titles=[_title(panel, runs) for panel in panels],
    )
    for number, (run, name) in enumerate(zip(runs, names, strict=True)):
        for row, panel in enumerate(panels, 1):
            for curve in _curves(go, run, panel, runs, label(name), number):
                figure.add_trace(curve, row=row, col=1)
            for mark in _marks(go, run, panel, label(name), number):
                figure.add_trace(mark, row=row, col=1)
        # The curves' own names are for the hover; the legend has one entry a run, which shows and hides all of it.
        figure.add_trace(
            go.Scatter(
                x=[None],
                y=[None],
                mode="lines",
                name=label(name),
                legendgroup=str(number),
                line_color=COLOURS[number % len(COLOURS)],
            ),
            row=1,
            col=1,
        )
    figure.update_layout(
        height=height,
        hovermode="x unified",
        template="plotly_white",
        margin={"l": 70, "r": 20, "t": 60, "b": 40},
        legend={"orientation": "h", "y": 1, "yref": "container", "yanchor": "top", "x": 0},
        updatemenus=[_scale_buttons()] if panels[0].keys[0] == "loss" else [],
    )
    figure.update_xaxes(showticklabels=True, unifiedhovertitle_text="step %{x:,}", hoverformat=",")
    figure.update_xaxes(title_text="step", row=len(panels), col=1)
    for row, panel in enumerate(panels, 1):
        axis = (
            {"type": "log", "exponentformat": "power"}
            if panel.log
            else {"rangemode": "tozero" if panel.from_zero else "normal"}
        )
        figure.update_yaxes(**axis, row=row, col=1)
    return figure


def _title(panel: Panel, runs: Sequence[Run]) -> str:
    found = [key for key in keys_of(panel, runs) if any(key in run.numbers for run in runs)]
    if len(found) < 2:
        return panel.title
    return f"{panel.title}: {', '.join(f'{key} {_dash(panel, key, runs)}' for key in found)}"


def _dash(panel: Panel, key: str, runs: Sequence[Run]) -> str:
    return DASHES[keys_of(panel, runs).index(key) % len(DASHES)]


def _curves(go: Any, run: Run, panel: Panel, runs: Sequence[Run], name: str, number: int) -> list[Any]:
    traces = []
    for key in keys_of(panel, runs):
        if key not in run.numbers:
            continue
        steps, values = thin(run.steps, run.numbers[key])
        few = len(steps) <= 60  # such as validations; a lone point has no line
        traces.append(
            go.Scatter(
                x=steps.astype(np.float64),
                y=values * panel.factor,
                mode="lines+markers" if few else "lines",
                name=f"{name} {key}",
                legendgroup=str(number),
                showlegend=False,
                line={"color": COLOURS[number % len(COLOURS)], "width": 1.3, "dash": _dash(panel, key, runs)},
                marker={"size": 5},
                hovertemplate="%{y:.5~g}",
            )
        )
    return traces


def _marks(go: Any, run: Run, panel: Panel, name: str, number: int) -> list[Any]:
    return [
        go.Scatter(
            x=[mark.step for mark in found],
            y=[mark.value for mark in found],
            mode="markers",
            name=f"{name} {KINDS[kind]}",
            legendgroup=str(number),
            showlegend=False,
            text=[label(says(mark, kind)) for mark in found],
            marker={
                "symbol": SYMBOLS[kind],
                "size": 11,
                "color": COLOURS[number % len(COLOURS)],
                "line": {"color": "#b00020" if kind != "skipped" else "#333333", "width": 1.5},
            },
            hovertemplate="%{text}",
        )
        for kind, found in marks_of(run, panel).items()
    ]


def _scale_buttons() -> dict[str, Any]:
    buttons = [
        {"label": f"loss {text}", "method": "relayout", "args": [{"yaxis.type": kind}]}
        for text, kind in (("linear", "linear"), ("logarithmic", "log"))
    ]
    return {
        "type": "buttons",
        "direction": "right",
        "buttons": buttons,
        "x": 1,
        "xanchor": "right",
        "y": 1,
        "yanchor": "bottom",
        "pad": {"b": 6},
        "font": {"size": 11},
    }
