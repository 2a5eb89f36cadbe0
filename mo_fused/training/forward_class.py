"""Changes a module's forward by giving the module a subclass of its class.

Unlike a wrapper module this keeps the names in the state_dict, and unlike a replaced ``module.forward`` it holds no
reference to the module: a deep copy, a pickle or a replica runs its own weights.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any, TypeAlias

from torch import nn

from mo_fused.errors import bad_option, message
from mo_fused.training.name_patterns import nearest


class ForwardMixin(nn.Module):
    """Base of what is put in front of a module's class; its subclasses define ``forward`` around ``super()``'s."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """For pickle, to which a class made at run time cannot be named: the plain class, and what is in front."""
        made = super().__reduce_ex__(protocol)
        plain, mixins = _taken_apart(type(self))
        if isinstance(made, str) or made[1][:1] != (type(self),):
            return made  # the class has a way of its own
        return (_new, (plain, mixins), *made[2:])


_Mixin: TypeAlias = type[ForwardMixin]


def add_forward(module: nn.Module, mixin: _Mixin) -> None:
    """Puts ``mixin`` in front of the module's class; nothing changes where it is there already."""
    if not isinstance(module, mixin):
        module.__class__ = _subclass(type(module), mixin)


def remove_forward(model: nn.Module, mixin: _Mixin) -> list[str]:
    """Takes ``mixin`` from every module inside ``model``, itself included; the names of those that had it.

    Raises:
        ValueError: another library has changed a module's class since; nothing is changed then.
    """
    found: list[tuple[str, nn.Module]] = [(n, m) for n, m in model.named_modules() if isinstance(m, mixin)]
    classes = []
    for name, module in found:
        plain, mixins = _taken_apart(type(module))
        if mixin not in mixins:
            expected = f"the class of {name or 'the model'} as this package left it"
            raise ValueError(message(expected, type(module).__name__, "undo the later change of the module first"))
        classes.append(_put_together(plain, tuple(m for m in mixins if m is not mixin)))
    for (_, module), cls in zip(found, classes):
        module.__class__ = cls
    return [name for name, _ in found]


def modules_named(model: nn.Module, pattern: str) -> dict[str, nn.Module]:
    """The outermost modules inside ``model`` whose names match, each once: ``blocks.*`` is the blocks alone.

    Raises:
        ValueError: no module matches, or only such that are never called (``nn.ModuleList``).
    """
    everything = [(name, module) for name, module in model.named_modules(remove_duplicate=False) if name]
    matching = {name: module for name, module in everything if fnmatchcase(name, pattern)}
    called = {name: module for name, module in matching.items() if has_forward(module)}
    if not called:
        if matching:
            raise bad_option("pattern", "the name of a module with a forward", pattern, f"name its parts: {pattern}.*")
        remedy = f"mend it; of modules' names {nearest(pattern, [name for name, _ in everything])}"
        raise bad_option("pattern", "a pattern that a module's name matches", pattern, remedy)
    chosen: dict[str, nn.Module] = {}
    for name, module in called.items():
        inside = any(outer in called for outer in _parents(name))
        if not inside and not any(module is other for other in chosen.values()):
            chosen[name] = module
    return chosen


def has_forward(module: nn.Module) -> bool:
    """Whether the module can be called: a list or dictionary of modules cannot."""
    return type(module).forward is not nn.Module.forward


def _parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts))]


_SUBCLASSES: dict[tuple[type[nn.Module], _Mixin], type[nn.Module]] = {}


def _subclass(base: type[nn.Module], mixin: _Mixin) -> type[nn.Module]:
    """The one class with ``mixin`` in front of ``base``."""
    if (base, mixin) in _SUBCLASSES:
        return _SUBCLASSES[base, mixin]
    # The base's name, so that what prints the model or looks for a class by its name goes on as before.
    attributes = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    made = type(base.__name__, (mixin, base), {**attributes, "_mo_made_of": (base, mixin)})
    _SUBCLASSES[base, mixin] = made
    return made


def _taken_apart(cls: type) -> tuple[type[nn.Module], tuple[_Mixin, ...]]:
    """The plain class and what was put in front of it, innermost first."""
    mixins: list[_Mixin] = []
    while "_mo_made_of" in vars(cls):
        cls, mixin = vars(cls)["_mo_made_of"]
        mixins.insert(0, mixin)
    return cls, tuple(mixins)


def _put_together(plain: type[nn.Module], mixins: tuple[_Mixin, ...]) -> type[nn.Module]:
    for mixin in mixins:
        plain = _subclass(plain, mixin)
    return plain


def _new(plain: type[nn.Module], mixins: tuple[_Mixin, ...]) -> nn.Module:
    """An empty module of such a class, for pickle and copy to fill."""
    cls = _put_together(plain, mixins)
    return cls.__new__(cls)
