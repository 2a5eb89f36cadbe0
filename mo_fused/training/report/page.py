"""The report as one HTML page that needs nothing beside itself."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from mo_fused.training.report.charts import curves
from mo_fused.training.report.heat_map import columns_of, heat_maps
from mo_fused.training.report.lines import counted
from mo_fused.training.report.panels import COLOURS
from mo_fused.training.report.reading import Run, printable
from mo_fused.training.report.series import BUCKETS, MARKS

EVENTS = 300
_CONFIG = {
    "responsive": True,
    "displaylogo": False,
    # Plotly has a button that sends the numbers to a server of its maker.
    "showSendToCloud": False,
    "plotlyServerURL": "",
    "modeBarButtonsToRemove": ["select2d", "lasso2d"],
}
# The page may run its own scripts and load nothing from anywhere.
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; font-src data:; "
    "worker-src blob:; base-uri 'none'; form-action 'none'"
)
_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #222; margin: 1.5rem auto; padding: 0 1rem; max-width: 1280px }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2rem }
table { border-collapse: collapse; font-size: 14px }
th, td { text-align: left; padding: .2rem .8rem .2rem 0; border-bottom: 1px solid #ddd; vertical-align: top }
td { overflow-wrap: anywhere } th { white-space: nowrap } .differs { background: #fff3cd }
.key { display: inline-block; width: .8em; height: .8em; margin-right: .4em } .notes li { color: #8a4b00 }
"""


def page(runs: Sequence[Run], names: Sequence[str]) -> str:
    """The page of one or more runs, called ``names``.

    Raises:
        InputError: Plotly is missing.
    """
    title = f"Report: {', '.join(names)}"
    scalars, maps = curves(runs, names), heat_maps(runs)
    figures = _Figures()
    parts = [
        f"<h1>{_text(title)}</h1>",
        _summary(runs, names),
        _notes(runs, names),
        "<h2>Against the step</h2>",
        _thinned(runs) + figures.add(scalars, "curves") if scalars else "<p>No numbers were recorded.</p>",
        "<h2>Norms of every parameter</h2>",
        *_heat(runs, names, maps, figures),
        "<h2>What the watchers found</h2>",
        *(_events(run, name) for run, name in zip(runs, names, strict=True)),
        "<h2>Config</h2>",
        _config(runs, names),
        "<h2>Changes of the config</h2>",
        *(_changes(run, name) for run, name in zip(runs, names, strict=True)),
    ]
    head = (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" '
        f'content="{_POLICY}"><meta name="viewport" content="width=device-width"><link rel="icon" href="data:,">'
        f"<title>{_text(title)}</title><style>{_STYLE}</style></head><body>\n"
    )
    return head + "\n".join(parts) + "\n</body></html>\n"


class _Figures:
    """Plotly's figures as HTML; its script comes with the first one."""

    def __init__(self) -> None:
        self.first = True

    def add(self, figure: Any, identity: str) -> str:
        text: str = figure.to_html(full_html=False, include_plotlyjs=self.first, div_id=identity, config=_CONFIG)
        self.first = False
        return text


def _text(value: object) -> str:
    return html.escape(printable(value))


def _table(rows: Iterable[Sequence[str]], header: Sequence[str]) -> str:
    """Cells are HTML."""
    head = "".join(f"<th>{cell}</th>" for cell in header)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _summary(runs: Sequence[Run], names: Sequence[str]) -> str:
    rows = []
    for number, (run, name) in enumerate(zip(runs, names, strict=True)):
        spikes = sum(event.get("watcher") == "LossSpike" for event in run.events)
        steps = f"{run.steps[0]:,} to {run.steps[-1]:,}" if len(run.steps) else "none"
        key = f'<span class="key" style="background:{COLOURS[number % len(COLOURS)]}"></span>'
        last = [_last(run, k) for k in ("loss", "val_loss", "val_metric")]
        rows.append([key + _text(name), steps, *last, str(spikes), f"{len(run.skipped):,}"])
    return _table(rows, ["run", "steps", "last loss", "last val_loss", "last val_metric", "spikes", "skipped steps"])


def _last(run: Run, key: str) -> str:
    if key not in run.numbers:
        return "not measured"
    values = run.numbers[key]
    return f"{values[np.flatnonzero(~np.isnan(values))[-1]]:.5g}"


def _notes(runs: Sequence[Run], names: Sequence[str]) -> str:
    lists = [
        f"<p>{_text(name)}</p><ul>{''.join(f'<li>{_text(note)}</li>' for note in run.notes)}</ul>"
        for run, name in zip(runs, names, strict=True)
        if run.notes
    ]
    return f'<div class="notes"><h2>What was not read</h2>{"".join(lists)}</div>' if lists else ""


def _thinned(runs: Sequence[Run]) -> str:
    said = [
        "Drag over a part to zoom, double-click to see all; click on a run in the legend to hide it. "
        "▲ loss spike, ◇ other finding, ✕ skipped step, ✡ not finite (at the value before)."
    ]
    longest = max(len(run.steps) for run in runs)
    if longest > 2 * BUCKETS:
        said.append(
            f"Curves of more than {2 * BUCKETS:,} points are thinned out: of each of {BUCKETS:,} equal parts, here of "
            f"up to {math.ceil(longest / BUCKETS):,} points, the smallest and the largest value are drawn."
        )
    if any(max(len(run.events), len(run.skipped), *map(len, run.nonfinite.values()), 0) > MARKS for run in runs):
        said.append(f"More than {MARKS:,} marks of a kind are put together; each says how many it stands for.")
    return "".join(f"<p>{text}</p>" for text in said)


def _heat(runs: Sequence[Run], names: Sequence[str], maps: Sequence[Any | None], figures: _Figures) -> list[str]:
    parts = ["<p>A row a parameter, in the model's order. Black: exactly zero. Red: not finite. Blank: none.</p>"]
    for number, (run, name, figure) in enumerate(zip(runs, names, maps, strict=True)):
        if figure is None:
            parts.append(f"<p>{_text(name)}: no detailed record.</p>")
            continue
        columns = columns_of(run)
        thinned = ""
        if len(columns) < len(run.layers.steps):
            most = max(map(len, columns))
            thinned = f"; a column shows the largest of up to {most} records"
        parts.append(f"<h3>{_text(name)}</h3><p>{counted(len(run.layers.steps), 'record')}{thinned}.</p>")
        parts.append(figures.add(figure, f"norms{number}"))
    return parts


def _events(run: Run, name: str) -> str:
    if not run.events:
        return f"<p>{_text(name)}: nothing.</p>"
    rows = []
    for event in run.events[:EVENTS]:
        others = {k: v for k, v in event.items() if k not in ("step", "watcher", "message")}
        numbers = ", ".join(f"{k} {_short(v)}" for k, v in others.items())
        rows.append(
            [_text(event["step"]), _text(event.get("watcher", "")), _text(event.get("message", "")), _text(numbers)]
        )
    more = f"<p>The first {EVENTS} of {len(run.events):,}.</p>" if len(run.events) > EVENTS else ""
    table = _table(rows, ["step", "watcher", "finding", "numbers"])
    return f"<details><summary>{_text(name)}: {counted(len(run.events), 'finding')}</summary>{table}{more}</details>"


def _short(value: object) -> str:
    text = f"{value:.5g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 400 else f"{text[:400]}..."


def _config(runs: Sequence[Run], names: Sequence[str]) -> str:
    configs = [dict(_flat(run.config or {})) for run in runs]
    keys = dict.fromkeys(key for config in configs for key in config)
    if not keys:
        return "<p>None was recorded.</p>"
    rows = []
    for key in keys:
        values = [_text(config[key]) if key in config else "" for config in configs]
        mark = len(set(values)) > 1
        rows.append(
            [_text(key), *(f'<span class="differs">{value or "(none)"}</span>' if mark else value for value in values)]
        )
    note = "<p>Marked: what differs between the runs.</p>" if len(runs) > 1 else ""
    return note + _table(rows, ["setting", *map(_text, names)])


def _flat(config: Mapping[Any, Any], prefix: str = "") -> Iterable[tuple[str, object]]:
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _changes(run: Run, name: str) -> str:
    items = []
    for record in run.changes:
        changes = record.get("changes")
        changes = [change for change in changes if isinstance(change, Mapping)] if isinstance(changes, list) else []
        shown = "; ".join(f"{c.get('key')}: {c.get('before')} -> {c.get('after')}" for c in changes) or "nothing"
        against = record.get("against")
        compared = f"against {against}: {shown}" if against is not None else "the first run of its task"
        items.append(f"<li>{_text(record.get('time', 'no time'))}, {_text(compared)}</li>")
    return f"<p>{_text(name)}</p>" + (f"<ul>{''.join(items)}</ul>" if items else "<p>None was recorded.</p>")
