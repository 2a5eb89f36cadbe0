"""What torch's tools see of this package: named phases in a profile, one call that torch.compile leaves alone."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar, cast

from torch._compile import _disable_dynamo
from torch.autograd import profiler

F = TypeVar("F", bound=Callable[..., Any])

_NOTHING: AbstractContextManager[Any] = nullcontext()


def phase(name: str) -> AbstractContextManager[Any]:
    """A range ``mo_fused::name`` in the profile that is being taken; nothing where none is."""
    # A range costs 10 us also without a profiler, and a small step has several.
    return profiler.record_function(f"mo_fused::{name}") if profiler._is_profiler_enabled else _NOTHING


def not_compiled(function: F) -> F:
    """A function that torch.compile does not look into: the graph ends before it, and another begins after it.

    Addresses and records of NumPy mean nothing in a graph of tensors.
    """
    # torch.compiler.disable would import the compiler, a second's work, when this package is imported.
    disabled: Any = _disable_dynamo(function)
    return cast(F, disabled)
