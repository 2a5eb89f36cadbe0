"""Values that ``torch.load(weights_only=True)`` reads: a checkpoint of others could be written and never read again."""

from __future__ import annotations

import io
from collections import OrderedDict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mo_fused.training.errors import bad_input

_PLAIN = (type(None), bool, int, float, complex, str, bytes)


def plain(value: Any, where: str) -> Any:
    """``value`` with NumPy's scalars as Python's; parts in which there is none are the same objects.

    Args:
        value: tensors and plain values in dicts, lists and tuples.
        where: what to call it in an error.

    Raises:
        InputError: something in it would not load.
    """
    if type(value) in _PLAIN or isinstance(value, Tensor):
        return value
    if isinstance(value, np.generic):
        return plain(value.item(), where)
    if type(value) in (dict, OrderedDict):
        pairs = {plain(key, f"a key of {where}"): plain(item, f"{where}[{key!r}]") for key, item in value.items()}
        same = all(new is old for new, old in zip(pairs.values(), value.values(), strict=True))
        return value if same and all(map(_is_plain, value)) else type(value)(pairs)
    if type(value) in (list, tuple):
        items = [plain(item, f"{where}[{i}]") for i, item in enumerate(value)]
        return value if all(new is old for new, old in zip(items, value, strict=True)) else type(value)(items)
    try:
        file = io.BytesIO()
        torch.save(value, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except Exception as error:  # pickle has no error of its own
        raise bad_input(
            where,
            expected="a value that torch.load reads with weights_only=True",
            found=f"a {type(value).__module__}.{type(value).__qualname__}",
            remedy="give numbers, strings, tensors, and lists and dicts of them",
        ) from error
    return value


def _is_plain(value: Any) -> bool:
    return type(value) in _PLAIN
