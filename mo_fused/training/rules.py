"""Rate, weight decay and clipping of each parameter by rules on its name, its module and its dimensions."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, MISSING, dataclass, fields
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from mo_fused.errors import bad_option, message
from mo_fused.training.name_patterns import nearest
from mo_fused.training.param_table import ParamGroups

_NORM_NAME = re.compile(r"Norm(\dd)?$")


def _not_negative(name: str, value: Any) -> None:
    if isinstance(value, str) or value is None or not 0.0 <= value < math.inf:
        raise bad_option(name, "a finite number of 0 or more", value, f"give {name} such a value")


@dataclass(frozen=True, repr=False)
class Rule:
    """What holds for the parameters that it matches: all conditions given must be met.

    Args:
        pattern: shell pattern on the parameter's full name (``fnmatch``; ``*`` matches dots too).
        types: modules that own the parameter directly: classes, or names of classes where they can't be imported;
            subclasses count. ``"norm"`` is every normalisation layer: torch's, and any class called ...Norm.
        min_dims, max_dims: least and largest number of dimensions of the parameter.
        lr_factor: multiplies the group's rate; the factors of all rules that match are multiplied.
        weight_decay: weight decay, instead of the one for all; of several rules the last one that says it.
        clip: False leaves the parameter out of the norm and of clipping (by this package's optimizers or
            :class:`Trainer`; others ignore it); of several rules the last one that says it.
        optional: True allows the rule to match nothing.

    Raises:
        ValueError: a value outside its range.
    """

    pattern: str = "*"
    types: tuple[type | str, ...] = ()
    _: KW_ONLY
    min_dims: int | None = None
    max_dims: int | None = None
    lr_factor: float = 1.0
    weight_decay: float | None = None
    clip: bool | None = None
    optional: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.types, tuple) or not all(isinstance(t, (type, str)) for t in self.types):
            raise bad_option("types", "a tuple of classes or class names", self.types, "write types=(nn.Embedding,)")
        if not isinstance(self.pattern, str):
            raise bad_option("pattern", "a shell pattern on names", self.pattern, 'write a text such as "blocks.*"')
        for name in ("min_dims", "max_dims"):
            value = getattr(self, name)
            if value is not None and type(value) is not int:
                raise bad_option(name, "a whole number or None", value, "give a number of dimensions")
        if self.clip not in (True, False, None):
            raise bad_option("clip", "True, False or None", self.clip, "write clip=False to leave out of the clipping")
        _not_negative("lr_factor", self.lr_factor)
        if self.weight_decay is not None:
            _not_negative("weight_decay", self.weight_decay)

    def __repr__(self) -> str:
        said = []
        for field in fields(self):
            value = getattr(self, field.name)
            if field.default is not MISSING and value != field.default:
                said.append(f"{field.name}={_type_names(value) if field.name == 'types' else repr(value)}")
        return f"Rule({', '.join(said)})"

    def matches(self, name: str, owner: nn.Module, parameter: Tensor) -> bool:
        """Whether the rule holds for ``parameter``, called ``name`` in the model and held by the module ``owner``."""
        return (
            fnmatchcase(name, self.pattern)
            and (not self.types or any(_is_a(owner, wanted) for wanted in self.types))
            and (self.min_dims is None or parameter.dim() >= self.min_dims)
            and (self.max_dims is None or parameter.dim() <= self.max_dims)
        )


NO_DECAY = (
    Rule(max_dims=1, weight_decay=0.0, optional=True),
    Rule(types=("norm",), weight_decay=0.0, optional=True),
)
"""No weight decay for biases, norm gains and all else below two dimensions, and in normalisation layers."""


def embedding_rule(lr_factor: float = 0.3, clip: bool | None = False) -> Rule:
    """Embedding tables at ``lr_factor`` times the rate; ``clip=False``: out of the norm and of clipping.

    Most rows of a large table have no gradient in a step, so its norm says little about the rest of the model.
    """
    return Rule(types=(nn.Embedding, nn.EmbeddingBag), lr_factor=lr_factor, clip=clip)


def param_groups(
    model: nn.Module, rules: Iterable[Rule], *, lr: float | Tensor, weight_decay: float = 0.0
) -> ParamGroups:
    """Groups for any torch optimizer from ``rules``, applied in order; ``print(groups)`` shows what fell where.

    Parameters that need no gradient are left out. A tied parameter appears once, under its first name, and the rules
    for any of its names apply to it. Group order: those at ``lr`` itself first, then by falling rate and falling decay.

    Args:
        model: the module whose parameters are to be trained.
        rules: every one must match a parameter (trained or not), unless it is ``optional``.
        lr: rate of parameters without an ``lr_factor``; a 0-dim tensor gives each group a tensor of its own.
        weight_decay: decay of parameters for which no rule says one.

    Returns:
        A list of dictionaries with "params" as (name, parameter) pairs, "lr", "weight_decay" and, where a rule asks for
        it, "clip".

    Raises:
        ValueError: a rule that matches nothing, nothing to train, ``lr`` or ``weight_decay`` negative or not finite.
    """
    rules = list(rules)
    for rule in rules:
        if not isinstance(rule, Rule):
            raise bad_option("rules", "Rule objects", rule, "write [*NO_DECAY, Rule(...)], lists of rules unpacked")
    _not_negative("lr", lr)
    _not_negative("weight_decay", weight_decay)

    parts: dict[tuple[float, float, bool | None], list[tuple[str, Tensor]]] = {}
    left_out: list[str] = []
    used: set[int] = set()
    everything = owners_of(model)
    for parameter, owners in everything:
        factor, decay, clip = 1.0, weight_decay, None
        for i, rule in enumerate(rules):
            if any(rule.matches(name, owner, parameter) for name, owner in owners):
                used.add(i)
                factor *= rule.lr_factor
                decay = decay if rule.weight_decay is None else rule.weight_decay
                clip = clip if rule.clip is None else rule.clip
        if parameter.requires_grad:
            # "clip" is written down where it is False only: True is what its absence means.
            parts.setdefault((factor, decay, None if clip else clip), []).append((owners[0][0], parameter))
        else:
            left_out.append(owners[0][0])
    for i, rule in enumerate(rules):
        if i not in used and not rule.optional:
            raise _unmatched(rule, everything)
    if not parts:
        found = f"{len(left_out)} of which none does"
        raise ValueError(message("parameters that need a gradient", found, "train some of them: requires_grad_(True)"))

    groups: list[dict[str, Any]] = []
    for factor, decay, clip in sorted(parts, key=lambda key: (key[0] != 1.0, -key[0], -key[1])):
        group: dict[str, Any] = {"params": parts[factor, decay, clip], "lr": lr * factor, "weight_decay": decay}
        groups.append(group if clip is None else {**group, "clip": clip})
    return ParamGroups(groups, left_out)


def owners_of(model: nn.Module) -> list[tuple[Tensor, list[tuple[str, nn.Module]]]]:
    """Each parameter once, with all its names and the modules that hold it; order of ``named_parameters``."""
    found: dict[int, tuple[Tensor, list[tuple[str, nn.Module]]]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = model.get_submodule(name.rpartition(".")[0])
        found.setdefault(id(parameter), (parameter, []))[1].append((name, owner))
    return list(found.values())


def _is_a(module: nn.Module, wanted: type | str) -> bool:
    if not isinstance(wanted, str):
        return isinstance(module, wanted)
    names = [cls.__name__ for cls in type(module).__mro__]
    if wanted == "norm":
        return any(_NORM_NAME.search(name) for name in names)
    return wanted in names


def _unmatched(rule: Rule, everything: Sequence[tuple[Tensor, list[tuple[str, nn.Module]]]]) -> ValueError:
    pairs = [pair for _, owners in everything for pair in owners]
    if any(fnmatchcase(name, rule.pattern) for name, _ in pairs) and rule.types:
        holders = dict.fromkeys(type(owner).__name__ for _, owner in pairs)
        found = f"none; parameters are held by modules of type {', '.join(holders)}"
    elif any(fnmatchcase(name, rule.pattern) for name, _ in pairs):
        found = "none of such dimensions"
    else:
        found = f"none; of parameters' names {nearest(rule.pattern, [name for name, _ in pairs])}"
    return ValueError(
        message(f"a parameter of the model that {rule} matches", found, "mend the rule, or give it optional=True")
    )


def _type_names(types: tuple[type | str, ...]) -> str:
    shown = [repr(t) if isinstance(t, str) else t.__name__ for t in types]
    return f"({', '.join(shown)}{',' if len(shown) == 1 else ''})"
