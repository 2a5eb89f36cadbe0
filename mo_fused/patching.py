"""torch's names made ours, for code that cannot be changed: torch.optim's classes and clip_grad_norm_."""

from __future__ import annotations

import copyreg
import functools
import importlib
import pkgutil
import sys
import threading
from abc import ABCMeta
from functools import partial
from types import ModuleType, TracebackType
from typing import Any, cast

import torch

from .grad import clip_grad_norm_
from .optim import SGD, Adafactor, Adam, AdamW, FusedOptimizer


class _StandInType(ABCMeta):  # as torch's classes, these may be mixed with abstract ones and protocols
    """The type of the classes that stand in torch's place, and of what is derived from them.

    A stand-in takes for its instances and subclasses what torch's class does, so that an optimizer that was made
    before the patch is still one. It equals torch's class and has its hash: tables of optimizer classes that were
    filled before are still right.
    """

    def __new__(mcls, name: str, bases: tuple[type, ...], body: dict[str, Any], **options: Any) -> Any:
        # type(name, bases, {}) says the module that calls it, which with ABCMeta would be abc.
        module = {"__module__": sys._getframe(1).f_globals.get("__name__")}
        return super().__new__(mcls, name, bases, {**module, **body}, **options)

    def __instancecheck__(cls, instance: Any) -> bool:
        return type.__instancecheck__(_torchs(cls), instance)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return type.__subclasscheck__(_torchs(cls), subclass)

    def __eq__(cls, other: object) -> bool:
        return isinstance(other, type) and _torchs(cls) is _torchs(other)

    def __hash__(cls) -> int:
        return type.__hash__(_torchs(cls))


def _reduce_class(cls: type) -> Any:
    """A stand-in is pickled as what torch.optim's name stands for at loading; a class derived from one by its name."""
    name = cls.__qualname__
    return (pkgutil.resolve_name, (f"torch.optim:{name}",)) if "_stands_for" in cls.__dict__ else name


copyreg.pickle(_StandInType, _reduce_class)


def _torchs(cls: type) -> type:
    """torch's class in the place of a stand-in; any other class as it is."""
    found: type = cls.__dict__.get("_stands_for", cls)
    return found


class _Maker:
    """Makes an object without its constructor. Pickled, it makes one of what torch.optim's name stands for at loading.

    A class is pickled by its name, and refused when another one has that name: torch's under the patch, a stand-in
    after it.
    """

    def __init__(self, cls: type[torch.optim.Optimizer]) -> None:
        self.cls = cls

    def __call__(self) -> Any:
        return self.cls.__new__(self.cls)

    def __reduce__(self) -> Any:
        return partial, (copyreg.__newobj__, getattr(torch.optim, self.cls.__name__))  # type: ignore[attr-defined]


def _reduce(optimizer: torch.optim.Optimizer) -> tuple[Any, ...]:
    return _Maker(type(optimizer)), (), optimizer.__getstate__()


def _stand_in(ours: type[FusedOptimizer], torchs: type[torch.optim.Optimizer]) -> type[FusedOptimizer]:
    @functools.wraps(torchs.__init__)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if not isinstance(self, FusedOptimizer):  # of a class derived from torch's, which calls its base by this name
            torchs.__init__(self, *args, **kwargs)
            return
        # A scaler unscales .grad where it would with torch's class: some code looks at it, or refuses to clip.
        kwargs.setdefault("amp", "fused" if kwargs.get("fused") else "torch")
        ours.__init__(self, *args, **kwargs)

    def reduce(self: Any, protocol: Any) -> Any:
        return _reduce(self) if type(self) is made else super(made, self).__reduce_ex__(protocol)

    body = {
        "__init__": init,
        "__reduce_ex__": reduce,
        "__module__": torchs.__module__,
        "__qualname__": torchs.__qualname__,
        "__doc__": torchs.__doc__,
        "_stands_for": torchs,
        "_options": {**ours._options, "amp": "torch"},
    }
    made = cast(type[FusedOptimizer], _StandInType(torchs.__name__, (ours,), body))
    return made


_STAND_INS = [
    _stand_in(ours, torchs)
    for ours, torchs in (
        (AdamW, torch.optim.AdamW),
        (Adam, torch.optim.Adam),
        (SGD, torch.optim.SGD),
        (Adafactor, torch.optim.Adafactor),
    )
]


def _places() -> list[tuple[ModuleType, str, Any]]:
    """(module, name, what it is under the patch)."""
    found: list[tuple[ModuleType, str, Any]] = []
    for stand_in in _STAND_INS:
        # Adafactor says that it is torch.optim's own.
        for module in (torch.optim, importlib.import_module(_torchs(stand_in).__dict__["__init__"].__module__)):
            found.append((module, stand_in.__name__, stand_in))
    for name in ("torch.nn.utils", "torch.nn.utils.clip_grad"):
        found.append((importlib.import_module(name), "clip_grad_norm_", clip_grad_norm_))
    return found


_LOCK = threading.RLock()
_HOLDERS: set[Patch] = set()
_BEFORE: list[tuple[ModuleType, str, Any, Any]] = []


class Patch:
    """What :func:`patch` returns: leaving its ``with`` block takes the patch away, unless somebody else holds it."""

    def __enter__(self) -> Patch:
        with _LOCK:
            _HOLDERS.add(self)
            _install()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with _LOCK:
            _HOLDERS.discard(self)
            if not _HOLDERS:
                _restore()


def patch() -> Patch:
    """Makes torch's optimizers and ``clip_grad_norm_`` those of this package, for the whole process.

    ``torch.optim.AdamW``, ``Adam``, ``SGD`` and ``Adafactor``, ``torch.nn.utils.clip_grad_norm_``, and the same names
    in the modules that define them, until :func:`unpatch`, or to the end of a ``with mo_fused.patch():`` block. Patches
    may be nested and repeated. Names that code has imported from there before (``from torch.optim import AdamW``) stay
    torch's; those imported meanwhile stay ours.

    ``isinstance(opt, torch.optim.AdamW)`` holds for optimizers of torch's and of ours, made before, meanwhile and
    later. What is kept by default is torch's behaviour in everything that other code can see: with a GradScaler
    gradients are unscaled in ``.grad`` before the step, unless ``fused=True`` asks otherwise.
    """
    return Patch().__enter__()


def unpatch() -> None:
    """Gives torch's names back what they were before :func:`patch`, however often that was called.

    Optimizers that were made meanwhile go on as they are. A name that somebody else has changed since stays changed.
    """
    with _LOCK:
        _HOLDERS.clear()
        _restore()


def _install() -> None:
    if _BEFORE:
        return
    for module, name, new in _places():
        _BEFORE.append((module, name, getattr(module, name), new))
        setattr(module, name, new)
    for stand_in in _STAND_INS:
        copyreg.pickle(_torchs(stand_in), _reduce)


def _restore() -> None:
    for module, name, before, new in _BEFORE:
        if getattr(module, name) is new:
            setattr(module, name, before)
    if _BEFORE:
        for stand_in in _STAND_INS:
            copyreg.dispatch_table.pop(_torchs(stand_in), None)
    _BEFORE.clear()
