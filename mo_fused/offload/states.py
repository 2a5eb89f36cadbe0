"""Makes the state of an offloaded parameter what the options ask for, and brings states back to their parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import masters, quantised, state
from ..layout import dense_in_one_order
from .files import OnDisk
from .homes import Home, on_host, row_major

if TYPE_CHECKING:
    from ..optim.formats import Formats
    from ..optim.rules import Rule

Entry = dict[str, Any]
_BESIDE_MOMENTS = (*quantised.ALL_SLOTS, *masters.ALL_SLOTS)


def settle(
    home: Home, entry: Entry, p: Tensor, order: tuple[int, ...], rule: Rule, formats: Formats, group: dict[str, Any]
) -> bool:
    """Makes what is missing, converts what is in another format, moves what is elsewhere; True when a moment was made.

    ``order``: strides of slots that have an element for each of the parameter's.
    """
    needed = formats.needed(rule, group, p)
    stale = any(key in entry and key not in needed for key in masters.ALL_SLOTS)  # would be taken for the truth later
    if not stale and home.holds(entry, needed, order):
        return False
    known = (*rule.all_slots, *_BESIDE_MOMENTS)
    if not any(key in entry for key in known):
        try:
            for key, slot in needed.items():
                home.zeros(entry, key, slot, order)
            if "master" in needed:  # of the other rests there is nothing yet
                home.fill(entry, "master", p)
        except OSError:  # half a state is none
            for key in needed:
                entry.pop(key, None)
            raise
        return any(key not in masters.ALL_SLOTS for key in needed)
    # The ordinary conversions, on a copy on the host.
    beside = on_host(p, p.stride() if _dense(p) else row_major(tuple(p.shape)))
    there = {key: _copied(entry[key]) for key in known if key in entry}
    made = formats.ensure_moments(rule, there, beside, rule.slots(group, p))
    formats.ensure(there, beside)
    for key in dict.fromkeys((*needed, *known)):
        if key in there and key in needed:
            value = there[key]
            home.put(entry, key, value, order if needed[key].like_param else row_major(tuple(value.shape)))
        elif key not in needed and key not in there:
            entry.pop(key, None)
    return made


def bring_back(entry: Entry | None, p: Tensor) -> None:
    """A state that was offloaded and is not any more goes to the parameter's device."""
    for key, value in list(entry.items()) if entry else ():
        if isinstance(value, Tensor) and isinstance(entry, OnDisk) and key in entry.extents:
            entry[key] = value.to(p.device, copy=True)
        elif isinstance(value, Tensor) and value.device != p.device:
            assert entry is not None
            entry[key] = value.to(p.device)


def taken_over(home: Home, saved: Entry, p: Tensor) -> Entry:
    """Copies of the values of a checkpoint as an entry of this home."""
    entry = home.new_entry()
    for key, value in saved.items():
        if home.on_disk and type(value) is Tensor and key != "step":
            like = value.shape == p.shape and key not in quantised.ALL_SLOTS and _dense(p)
            home.put(entry, key, value, p.stride() if like else row_major(tuple(value.shape)))
        else:
            entry[key] = state.own_copy(value, p, key, torch.device("cpu"))
    return entry


def _dense(p: Tensor) -> bool:
    return dense_in_one_order([p])


def _copied(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
