"""Files of results: CSV, a line for each contender of each race, that only ever grow."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mo_fused.training.errors import bad_input

Record = dict[str, Any]

MEASURED = (
    "bench",
    "case",
    "contender",
    "version",
    "quick",
    "median_ms",
    "low_ms",
    "high_ms",
    "host_ms",
    "device_ms",
    "rounds",
    "calls_a_round",
    "bytes",
    "gb_per_s",
    "share_of_copy",
    "error",
)
FACTS = (
    "time",
    "processor",
    "cores",
    "threads",
    "memory_gb",
    "gpu",
    "load",
    "instruction_set",
    "native_problem",
    "torch",
    "mo_fused",
    "python",
    "commit",
)
MORE = "more"
"""Column of everything that has none of its own: a JSON object."""
COLUMNS = (*MEASURED, *FACTS, MORE)


def append(path: str | Path | None, records: Iterable[Record], facts: Mapping[str, Any]) -> None:
    """Adds one line for each record; what is in the file stays.

    Raises:
        InputError: the file begins with other columns than :data:`COLUMNS`.
    """
    if path is None:
        return
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    file = Path(path)
    if not file.exists() or file.stat().st_size == 0:
        writer.writerow(COLUMNS)
    else:
        _check_columns(file)
    for record in records:
        row = {**record, **facts}
        more = {key: value for key, value in row.items() if key not in COLUMNS}
        writer.writerow([_cell(row.get(name)) for name in COLUMNS[:-1]] + [json.dumps(more) if more else ""])
    # One write: lines of two processes that append at a time do not mix.
    with open(file, "ab") as out:
        out.write(text.getvalue().encode())
        out.flush()
        os.fsync(out.fileno())


def check(path: str | Path) -> None:
    """That records can be appended.

    Raises:
        InputError: the folder is not there, or the file begins with other columns than :data:`COLUMNS`.
    """
    file = Path(path)
    if not file.absolute().parent.is_dir():
        raise bad_input(
            str(path),
            expected="a file in a folder that is there",
            found=f"no folder {file.absolute().parent}",
            remedy="make the folder, or give another path",
        )
    if file.exists() and file.stat().st_size:
        _check_columns(file)


def read(path: str | Path) -> list[Record]:
    """The records of a file, numbers as numbers; what was not measured is None, and ``more`` is spread out.

    Raises:
        InputError: there is no such file, or it is not a file of results.
    """
    file = Path(path)
    if not file.is_file():
        raise bad_input(
            str(path),
            expected="a file of results, as `mo-fused bench --output` writes it",
            found="no such file",
            remedy="give the path of one",
        )
    _check_columns(file)
    out = []
    with open(file, encoding="utf-8", newline="") as lines:
        for row in csv.DictReader(lines):
            record: Record = {name: _value(row[name]) for name in COLUMNS[:-1]}
            record.update(json.loads(row[MORE]) if row[MORE] else {})
            out.append(record)
    return out


def _check_columns(file: Path) -> None:
    with open(file, encoding="utf-8", newline="", errors="replace") as lines:
        found = next(csv.reader(lines), [])
    if tuple(found) != COLUMNS:
        raise bad_input(
            str(file),
            expected=f"a CSV file of results with the columns {', '.join(COLUMNS[:3])}, ...",
            found=f"a file that begins with {', '.join(found)[:60]!r}",
            remedy="give another file; it is made where there is none",
        )


def _cell(value: Any) -> str:
    """Text that :func:`_value` reads back; text that looks like something else is put in quotes, as in JSON."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value if _value(value) == value and value else json.dumps(value)
    return json.dumps(value)


def _value(text: str) -> Any:
    if text == "":
        return None
    try:
        return json.loads(text)
    except ValueError:
        return text
