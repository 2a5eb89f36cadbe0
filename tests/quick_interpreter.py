"""Triton's interpreter without its costliest habit: patching the whole language before each launch and back after.

Here the patch is applied once for each set of language modules that kernels name, and stays. Results are the same; a
launch of a small kernel takes a third of the time. Where Triton's internals are others than expected, nothing changes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


class _Lasting:
    """What a launch gets to undo the patch with: it stays."""

    @staticmethod
    def restore() -> None:
        pass


def speed_up() -> bool:
    """Makes launches in the interpreter cheaper; False when this Triton is not built as expected."""
    try:
        import triton.language as tl
        from triton.runtime import interpreter

        patch: Callable[..., Any] = interpreter._patch_lang
        expected = list(inspect.signature(patch).parameters) == ["fn"] and callable(interpreter._LangPatchScope.restore)
        modules = (tl, tl.core)
    except (ImportError, AttributeError):
        return False
    if not expected:
        return False
    patched: set[frozenset[int]] = set()
    seen: dict[int, Any] = {}  # the globals of kernels, kept so that no other dictionary gets their id

    def patch_once(fn: Any) -> type[_Lasting]:
        names = fn.__globals__
        if id(names) not in seen:
            seen[id(names)] = names
            named = frozenset(id(v) for v in names.values() if inspect.ismodule(v) and v in modules)
            if named not in patched:
                patch(fn)
                # Triton 3.6 converts an array of one element, which NumPy 2.4 refuses.
                tl.core.tensor.__index__ = lambda self: int(self.handle.data.squeeze())
                patched.add(named)
        return _Lasting

    interpreter._patch_lang = patch_once
    return True
