"""The list of parameter groups that shows what fell where."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from mo_fused.training.name_patterns import abbreviated

_HEAD = ("lr", "weight decay", "clip", "tensors", "elements", "parameters")


class ParamGroups(list[dict[str, Any]]):
    """Parameter groups as every torch optimizer takes them; ``str(groups)`` is a table of them.

    Args:
        groups: dictionaries with "params" as (name, parameter) pairs, "lr", "weight_decay" and perhaps "clip".
        left_out: names of parameters that need no gradient and are in no group.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], left_out: Sequence[str] = ()) -> None:
        super().__init__(groups)
        # Taken down now: an optimizer writes into the dictionaries that it is given, and a schedule into their rates.
        self._rows = [_row(group) for group in self]
        self._left_out = list(left_out)

    def table(self) -> str:
        """A line a group (more where the names take them): rate, weight decay, clipping, tensors, elements, names."""
        widths = [max(map(len, column)) for column in zip(_HEAD[:-1], *(row[:-1] for row in self._rows))]
        lines = [_line(_HEAD, widths)]
        for row in self._rows:
            names = _wrapped(row[-1])
            lines.append(_line((*row[:-1], names[0]), widths))
            lines += [_line(("",) * (len(_HEAD) - 1) + (name,), widths) for name in names[1:]]
        if self._left_out:
            names = _wrapped(", ".join(abbreviated(self._left_out)))
            lines += ["not trained (no gradient needed):", *(f"  {name}" for name in names)]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.table()


def _row(group: dict[str, Any]) -> tuple[str, ...]:
    return (
        f"{float(group['lr']):.4g}",
        f"{group['weight_decay']:.4g}",
        "yes" if group.get("clip", True) else "no",
        f"{len(group['params'])}",
        f"{sum(parameter.numel() for _, parameter in group['params']):,}",
        ", ".join(abbreviated(name for name, _ in group["params"])),
    )


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join([*(cell.rjust(width) for cell, width in zip(cells, widths)), cells[-1]])


def _wrapped(names: str) -> list[str]:
    """Broken after commas alone, not inside "blocks.*.weight x 12"."""
    lines = textwrap.wrap(names.replace(" x ", "\0x\0"), 64, break_long_words=False, break_on_hyphens=False)
    return [line.replace("\0", " ") for line in lines]
