"""Settings from a YAML file: one file describes a run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from mo_fused.training.config import ALLOWED
from mo_fused.training.errors import InputError, bad_input

FACTS = ("data", "environment")
"""What a run writes into its config besides settings."""

_KINDS: dict[type, str] = {
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "a truth value",
    list: "a list",
    dict: "a mapping",
}
# YAML 1.1 reads 1e-3, without a point, as a text; so does PyYAML.
_NUMBER = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?")


def load_config(path: str | Path) -> dict[str, Any]:
    """The settings in a YAML file, each of a kind and range that is allowed; null is a setting that is not given.

    The ``config.yaml`` of a run is such a file, too: its facts are ignored, and so is its ``run_dir``, so that it
    describes a new run of the same settings.

    Raises:
        InputError: the file is missing, no UTF-8, no YAML mapping of settings or empty; or a key is unknown or stands
            there twice, or a value cannot be what it is.
    """
    content = read_yaml(path)
    unknown = [str(key) for key in content if key not in (*ALLOWED, *FACTS)]
    if unknown:
        near = [get_close_matches(key, ALLOWED, n=1) for key in unknown]
        meant = [f"{match[0]} for {key}" for key, match in zip(unknown, near, strict=True) if match]
        remedy = f"write {', '.join(meant)}" if meant else f"take it out; the settings are {', '.join(sorted(ALLOWED))}"
        raise bad_input(f"{path}", expected="settings of a run", found=f"unknown: {', '.join(unknown)}", remedy=remedy)
    recorded = any(key in content for key in FACTS)
    settings: dict[str, Any] = {}
    for key, value in content.items():
        if key in FACTS or value is None or (key == "run_dir" and recorded):
            continue
        allowed = ALLOWED[key]
        if allowed.kind is float and isinstance(value, str) and _NUMBER.fullmatch(value):
            value = float(value)
        if not allowed.test(value):
            shown = f"{value!r} ({_KINDS.get(type(value), type(value).__name__)})"
            remedy = "put it in quotes" if allowed.kind is str and not isinstance(value, str) else f"correct {key}"
            raise bad_input(f"{path}: {key}", expected=allowed.expected, found=shown, remedy=remedy)
        settings[key] = float(value) if allowed.kind is float else value
    return settings


def load_run_config(folder: str | Path) -> dict[str, Any]:
    """The settings of the run in ``folder``, ``run_dir`` naming the folder: they describe going on with it.

    Raises:
        InputError: the folder holds no run, or one whose config cannot be used.
    """
    folder = Path(folder)
    if not (folder / "config.yaml").is_file():
        found = "no such folder" if not folder.exists() else "a file"
        raise bad_input(
            f"--resume {folder}",
            expected="the folder of an earlier run",
            found="a folder without config.yaml" if folder.is_dir() else found,
            remedy="name the folder of a run, or start one there with --run-dir",
        )
    return {**load_config(folder / "config.yaml"), "run_dir": str(folder)}


def read_yaml(path: str | Path) -> dict[Any, Any]:
    """The mapping in a YAML file, as ``yaml.safe_load`` reads it, except that no key may stand there twice.

    Raises:
        InputError: the file cannot be read, or holds no mapping.
    """
    try:
        import yaml
    except ImportError as error:
        remedy = 'run: pip install "mo_fused[train]"'
        raise bad_input(f"{path}", expected="the package PyYAML", found="no PyYAML", remedy=remedy) from error

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            seen: set[str] = set()
            keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
            for key in keys:
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"{key.value} twice", key.start_mark)
                seen.add(key.value)
            mapping: dict[Any, Any] = super().construct_mapping(node, deep)
            return mapping

    def refuse(found: str, remedy: str = "give one with a setting a line, such as `steps: 100`") -> InputError:
        return bad_input(f"{path}", expected="a YAML file of settings", found=found, remedy=remedy)

    path = Path(path)
    if not path.is_file():
        if path.is_dir():
            raise refuse("a folder", "give a file (a run's folder: with --resume, or its config.yaml)")
        raise refuse("no regular file" if path.exists() else "no such file")
    try:
        content = yaml.load(path.read_bytes().decode("utf-8-sig"), Loader)
    except OSError as error:
        raise refuse(f"{error.strerror}") from error
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise refuse(f"byte 0x{byte:02x} at offset {error.start}, which is not UTF-8") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a date such as 2024-13-99
        mark = getattr(error, "problem_mark", None)
        line = f" in line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or " ".join(str(error).split())
        problem = re.sub("^(but )?found ", "", problem)  # the message has that word already
        raise refuse(f"{problem}{line}", "correct the file") from error
    if content is None:
        raise refuse("an empty file")
    if not isinstance(content, Mapping):
        raise refuse(_KINDS.get(type(content), type(content).__name__))
    return dict(content)
