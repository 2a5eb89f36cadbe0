"""What ``mo-fused plan`` is about: a bare count of parameters, or a model built on the meta device."""

from __future__ import annotations

import contextlib
import os
import sys
from dataclasses import dataclass
from decimal import Decimal
from importlib import import_module
from typing import Any, NoReturn

import torch
from torch import nn

from mo_fused.training.errors import bad_input

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

_LARGEST_COUNT = 10**15
_SUFFIXES = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_NAMES = {
    "hidden": ("hidden_size", "n_embd", "d_model", "embed_dim"),
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
}


@dataclass(frozen=True)
class Weight:
    """One parameter: numbers in it (a complex element is two), bytes of each. ``shape=None``: a bare count."""

    shape: tuple[int, ...] | None
    count: int
    item: int
    dtype: str
    trained: bool = True


def parse_count(text: str) -> int:
    """A number of parameters from such as ``3e9``, ``3B``, ``124M`` (K, M, B and T are powers of 1000).

    Raises:
        InputError: it is not a whole number from 1 to 10**15.
    """
    digits = text.strip().replace(",", "")
    factor = _SUFFIXES.get(digits[-1:].upper(), 1)
    try:
        count = Decimal(digits[:-1] if factor > 1 else digits) * factor
        if 1 <= count <= _LARGEST_COUNT and count == count.to_integral_value():
            return int(count)
    except ArithmeticError:  # no number, or NaN
        pass
    raise bad_input(
        "--params",
        expected="a whole number from 1 to 1e15, such as 3e9, 3B or 124M",
        found=repr(text),
        remedy="give --params such a number",
    )


def load_model(spec: str) -> nn.Module:
    """The model that ``module:factory`` makes on the meta device; the current directory is searched first.

    What the factory prints goes to standard error.

    Raises:
        InputError: the factory cannot be imported or called, or makes no module with parameters of known shapes.
    """
    name, _, attribute = spec.partition(":")
    if not name or not attribute:
        refuse("--model", "module:factory", repr(spec), "give it as in --model my_models:build")
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            factory = getattr(import_module(name), attribute)
            with torch.device("meta"):
                model = factory()
    except (Exception, SystemExit) as error:  # whatever the user's code raises, or a script that ends by itself
        found = f"{type(error).__name__}: {' '.join(str(error).split())}"
        remedy = "name one that can be imported from here and needs no values of tensors, or give --params"
        expected = f"{spec!r} to be a callable without arguments that builds a model on the meta device"
        raise bad_input("--model", expected=expected, found=found, remedy=remedy) from error
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(here)
    if not isinstance(model, nn.Module):
        refuse("--model", f"{spec!r} to return a torch.nn.Module", f"{type(model).__name__}", "return the model")
    tensors = [*model.parameters(), *model.buffers()]
    if any(nn.parameter.is_lazy(t) for t in tensors):
        refuse("--model", "parameters of known shapes", "lazy ones", "give the sizes to the modules that are lazy")
    if not any(p.requires_grad and p.numel() for p in model.parameters()):
        refuse("--model", "parameters to train", "none that requires a gradient", "check the factory")
    return model


def weight_of(tensor: torch.Tensor, dtype: str | None) -> Weight:
    """A parameter or buffer, in ``dtype`` (a key of ``DTYPES``) if it is a floating-point tensor; None is its own."""
    own = DTYPES[dtype] if dtype is not None and tensor.is_floating_point() else tensor.dtype
    numbers = 2 if own.is_complex else 1
    name = {v: k for k, v in DTYPES.items()}.get(own, str(own).removeprefix("torch."))
    trained = tensor.requires_grad
    return Weight(tuple(tensor.shape), tensor.numel() * numbers, own.itemsize // numbers, name, trained)


def dimensions(model: nn.Module) -> dict[str, int]:
    """``hidden``, ``layers`` and ``heads`` as far as the model tells.

    It tells by ``model.config`` (an object or a dict) in the names that model libraries use, or by blocks around
    :class:`torch.nn.MultiheadAttention` that agree on their width and heads.
    """
    found: dict[str, int] = {}
    config = getattr(model, "config", None)
    for what, names in _NAMES.items():
        values = [_value(config, name) for name in names]
        if known := [value for value in values if type(value) is int and value > 0]:
            found[what] = known[0]
    blocks = [[c for c in m.children() if isinstance(c, nn.MultiheadAttention)] for m in model.modules()]
    kinds = {(c.embed_dim, c.num_heads) for block in blocks for c in block}
    if len(kinds) == 1:
        ((hidden, heads),) = kinds
        found = {"hidden": hidden, "layers": sum(map(bool, blocks)), "heads": heads} | found
    return found


def _value(config: Any, name: str) -> Any:
    return config.get(name) if isinstance(config, dict) else getattr(config, name, None)


def option_of(name: str) -> str:
    """How the command line spells a setting."""
    return "--" + name.replace("_", "-")


def refuse(option: str, expected: str, found: str, remedy: str | None = None) -> NoReturn:
    """Raises the InputError for an option; the remedy is to give it another value unless one is named."""
    raise bad_input(option, expected=expected, found=found, remedy=remedy or f"give {option} such a value")
