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
    if file.exists() and not _ends_a_line(file):
        text = io.StringIO(
            "\n" + text.getvalue()
        )  # a disk was full, or a process killed: that line is lost, not this one
    # One write: lines of two processes that append at a time do not mix.
    with open(file, "ab") as out:
        out.write(text.getvalue().encode())
        out.flush()
        os.fsync(out.fileno())


def check_folder(path: str | Path) -> None:
    """That there is a folder for a file.

    Raises:
        InputError: there is none.
    """
    folder = Path(path).absolute().parent
    if not folder.is_dir():
        raise bad_input(
            str(path),
            expected="a file in a folder that is there",
            found=f"no folder {folder}",
            remedy="make the folder, or give another path",
        )


def check(path: str | Path) -> None:
    """That records can be appended.

    Raises:
        InputError: the folder is not there, or the file begins with other columns than :data:`COLUMNS`.
    """
    file = Path(path)
    check_folder(path)
    if file.is_file() and file.stat().st_size:
        _check_columns(file)
    # Measured first and refused then would be lost.
    if file.is_dir() or not os.access(file if file.exists() else file.absolute().parent, os.W_OK):
        raise bad_input(
            str(path),
            expected="a file that can be written",
            found="a folder" if file.is_dir() else "no permission to write it",
            remedy="give another path",
        )


def read(path: str | Path) -> list[Record]:
    """The records of a file, numbers as numbers; what was not measured is None, and ``more`` is spread out. A line that
    was cut off is left out.

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
    _check_columns(file, exactly=False)
    out = []
    with open(file, encoding="utf-8", newline="") as lines:
        rows: Iterable[dict[Any, Any]] = csv.DictReader(lines)
        for row in rows:
            # Of a line that was cut off nothing is used. Columns that a file of an earlier version lacks are None.
            if None in row or None in row.values():
                continue
            record: Record = {name: _value(row.get(name) or "") for name in COLUMNS[:-1]}
            try:
                record.update(json.loads(row[MORE]) if row[MORE] else {})
            except ValueError:
                continue
            out.append(record)
    return out


def _ends_a_line(file: Path) -> bool:
    with open(file, "rb") as lines:
        lines.seek(max(0, file.stat().st_size - 1))
        return lines.read() in (b"", b"\n")


def _check_columns(file: Path, exactly: bool = True) -> None:
    with open(file, encoding="utf-8", newline="", errors="replace") as lines:
        found = next(csv.reader(lines), [])
    known = set(found) <= set(COLUMNS) and {"bench", "case", "contender", MORE} <= set(found)
    if not known or (exactly and tuple(found) != COLUMNS):
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
