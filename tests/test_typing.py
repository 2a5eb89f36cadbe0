"""The public API as its users' tools see it: annotations, docstrings, and the listing in docs/api.md.

What a type checker makes of it is seen by tests/typed_consumer.py."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType
from typing import Any, get_origin, is_typeddict

import pytest

import mo_fused
import mo_fused.training

pytestmark = pytest.mark.cpu_only(reason="the subject is the Python API, whatever the backend")
API = Path(__file__).resolve().parent.parent / "docs" / "api.md"
MODULES = (mo_fused, mo_fused.training)
NAMES = [(module.__name__, name) for module in MODULES for name in module.__all__]
STABILITY = {"stable", "provisional", "experimental"}
LINE = re.compile(
    r"^\| `(?P<name>\w+)(?P<arguments>\(.*\))?` \| `(?P<home>[\w.]+)` \| (?P<stability>\w+) \| (?P<what>.+) \|$"
)


def public(module: str, name: str) -> Any:
    return getattr(sys.modules[module], name)


def functions_of(name: str, value: Any) -> Iterator[tuple[str, FunctionType]]:
    """A function, or the constructor, methods and properties of a class, inherited ones of this package too."""
    if isinstance(value, FunctionType):
        yield name, value
    elif inspect.isclass(value):
        for key in dir(value):
            if key == "__init__" or not key.startswith("_"):
                found = inspect.getattr_static(value, key)
                found = found.fget if isinstance(found, property) else getattr(found, "__func__", found)
                if isinstance(found, FunctionType) and found.__module__.startswith("mo_fused"):
                    yield f"{name}.{key}", found


FUNCTIONS = {
    f"{module}.{called}": (function, value)
    for module, name in NAMES
    for value in [public(module, name)]
    for called, function in functions_of(name, value)
}


def callable_by_users(value: Any) -> bool:
    """Whether it has a signature of its own: not a constant, a type of dictionaries, an alias of a type or an error."""
    if isinstance(value, FunctionType):
        return True
    if is_typeddict(value):
        return False
    return get_origin(value) is None and isinstance(value, type) and not issubclass(value, BaseException)


def made_by_dataclass(function: FunctionType) -> bool:
    return function.__code__.co_filename == "<string>"


def own_docs(function: FunctionType, owner: Any) -> str:
    """The docstring; of a constructor that of the class; of an overriding method also that of what it overrides."""
    docs = [function.__doc__ or ""]
    if inspect.isclass(owner):
        if function.__name__ == "__init__":
            docs.append(owner.__doc__ or "")
        docs += [getattr(getattr(base, function.__name__, None), "__doc__", None) or "" for base in owner.__mro__[:-1]]
    return "\n".join(docs)


def test_every_parameter_and_result_is_annotated() -> None:
    assert len(FUNCTIONS) > 150
    missing = []
    for called, (function, _) in FUNCTIONS.items():
        signature = inspect.signature(function)
        for position, parameter in enumerate(signature.parameters.values()):
            first = position == 0 and parameter.name in ("self", "cls")
            if not first and parameter.annotation is parameter.empty:
                missing.append(f"{called}: {parameter.name}")
        if signature.return_annotation is signature.empty and not made_by_dataclass(function):
            missing.append(f"{called}: the result")
    assert missing == []


def test_everything_public_says_what_it_is() -> None:
    silent = [name for module, name in NAMES if inspect.isclass(v := public(module, name)) and not v.__doc__]
    silent += [called for called, (function, owner) in FUNCTIONS.items() if not own_docs(function, owner).strip()]
    assert silent == []


def test_documented_arguments_exist() -> None:
    """Every name under "Args:" is a parameter, or a field of a dataclass."""
    wrong, seen = [], 0
    owners = {f"{module}.{name}": public(module, name) for module, name in NAMES}
    for called, value in {**owners, **{called: function for called, (function, _) in FUNCTIONS.items()}}.items():
        if not callable_by_users(value):
            continue
        found = re.search(r"^Args:\n((?:[ ]+.*\n?|\n)+)", inspect.getdoc(value) or "", re.MULTILINE)
        documented = re.findall(r"^    (\**\w+(?:, \**\w+)*):", found[1], re.MULTILINE) if found else []
        names = [name.strip(" *") for text in documented for name in text.split(",")]
        known = set(inspect.signature(value).parameters)
        if dataclasses.is_dataclass(value):
            known |= {field.name for field in dataclasses.fields(value)}
        wrong += [f"{called}: {name}" for name in names if name not in known]
        seen += len(names)
    assert seen > 150
    assert wrong == []


def raises(function: FunctionType) -> bool:
    """Whether an error stands in its own body. NotImplementedError and re-raising say nothing to a caller."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    errors = [node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise) and node.exc is not None]
    return any("NotImplementedError" not in ast.dump(error) for error in errors)


def test_what_raises_says_so() -> None:
    quiet = [
        called
        for called, (function, owner) in FUNCTIONS.items()
        if not made_by_dataclass(function) and raises(function) and "Raises:" not in own_docs(function, owner)
    ]
    assert quiet == []


def shown(default: object) -> str:
    """A default as docs/api.md shows it; objects that have no short literal are an ellipsis."""
    text = repr(default)
    return text if isinstance(default, (bool, int, float, str, tuple, type(None))) and "<" not in text else "..."


def signature_of(name: str, value: Any) -> str:
    """``name(a, b=1, *, c=None)``: without annotations, which stand in the code; of other values the name alone."""
    if not callable_by_users(value):
        return name
    parts, star = [], False
    for parameter in inspect.signature(value).parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            star = True
        elif parameter.kind is parameter.KEYWORD_ONLY and not star:
            parts.append("*")
            star = True
        prefix = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        default = "" if parameter.default is parameter.empty else f"={shown(parameter.default)}"
        parts.append(f"{prefix}{parameter.name}{default}")
    return f"{name}({', '.join(parts)})"


def listed() -> list[tuple[str, re.Match[str]]]:
    """(module of its heading, the line) for everything that docs/api.md lists."""
    out, module = [], ""
    for line in API.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            module = line.removeprefix("## ").strip("`")
        elif line.startswith("| `") and module in sys.modules:
            found = LINE.match(line)
            assert found is not None, f"docs/api.md: not of the form of the other lines: {line}"
            out.append((module, found))
    return out


def test_the_listing_is_the_api() -> None:
    assert sorted((module, line["name"]) for module, line in listed()) == sorted(NAMES)


def test_the_listing_tells_the_truth() -> None:
    wrong = []
    for module, line in listed():
        name = line["name"]
        value = public(module, name)
        expected = signature_of(name, value)
        # A class without parentheses is one that the package makes, and a user does not.
        if name + (line["arguments"] or "") != expected and not (inspect.isclass(value) and not line["arguments"]):
            wrong.append(f"expected `{expected}`")
        home = sys.modules.get(line["home"])
        if home is None or getattr(home, name, None) is not value:
            wrong.append(f"{name} is not in {line['home']}")
        if line["stability"] not in STABILITY:
            wrong.append(f"{name}: {line['stability']} is none of {sorted(STABILITY)}")
    assert wrong == []
