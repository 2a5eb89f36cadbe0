"""Names of parameters and modules by pattern: what matches, and what a user may have meant when nothing does."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from itertools import accumulate


def abbreviated(names: Iterable[str]) -> list[str]:
    """Names that differ in their numbers alone become one: ``blocks.*.attn.weight x 12``. Order of appearance."""
    families: dict[str, list[str]] = {}
    for name in names:
        families.setdefault(_family(name), []).append(name)
    return [f"{_common(found)} x {len(found)}" if len(found) > 1 else found[0] for found in families.values()]


def nearest(pattern: str, names: Iterable[str]) -> str:
    """What to tell the author of a pattern that matches none of ``names``: the nearest ones, else the first ones."""
    families = list(dict.fromkeys(_family(name) for name in names))
    if not families:
        return "there are none"
    paths = [path for family in families for path in accumulate(family.split("."), lambda a, b: f"{a}.{b}")]
    candidates = dict.fromkeys([*paths, *(f"{path}.*" for path in paths if path not in families)])
    near = difflib.get_close_matches(pattern, list(candidates), n=3)
    if near:
        return f"near it are {', '.join(near)}"
    more = ", ..." if len(families) > 5 else ""
    return f"there are {', '.join(families[:5])}{more}"


def _common(family: list[str]) -> str:
    """The name that all have, with a star for each number in which they differ."""
    columns = zip(*(re.split(r"(\d+)", name) for name in family))
    return "".join(column[0] if len(set(column)) == 1 else "*" for column in columns)


def _family(name: str) -> str:
    return re.sub(r"\d+", "*", name)
