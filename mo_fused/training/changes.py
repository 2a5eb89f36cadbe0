"""What a run changes against the one before: ``changes.jsonl`` in the run's folder, one JSON object a start."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from mo_fused.training.atomic import write_atomically
from mo_fused.training.config import TrainConfig
from mo_fused.training.config_file import read_yaml
from mo_fused.training.errors import InputError, bad_input
from mo_fused.training.run_folder import RunFolder

Change = dict[str, Any]
"""``key``, ``before``, ``after``; ``None`` where there is no such setting."""

RESUMABLE = ("steps", "device", "validate_every", "checkpoint_every", "keep_checkpoints", "profile")
"""What may change when a run is resumed: it changes no step that was done. ``steps`` may only grow."""


NEUTRAL = ("validate_every", "checkpoint_every", "keep_checkpoints", "profile")
"""Settings that change what is written and not what is trained."""
DERIVED = ("warmup_steps", "min_lr_ratio")
"""Settings whose default depends on other settings."""


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Change]:
    """The settings that differ between two configs, in the order of ``after``.

    Versions and the like (``environment.torch``) and the data's checksum count, the run's own folder does not. Data of
    one checksum are the same wherever they lie; of a text that is another file, the file is named, not the checksum.
    """
    old, new = _flat(before), _flat(after)
    keys = dict.fromkeys([*new, *old])
    if old.get("data.sha256") == new.get("data.sha256") is not None:
        keys.pop("text", None)
    elif old.get("text") != new.get("text"):
        keys.pop("data.sha256", None)
    return [{"key": k, "before": old.get(k), "after": new.get(k)} for k in keys if old.get(k) != new.get(k)]


def resume_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    """What resuming the run of config ``old`` with config ``new`` changes: :data:`RESUMABLE` and the environment.

    Raises:
        InputError: something else differs, or ``steps`` is smaller; all of it is listed.
    """
    changes = _chosen(compare(old, new), old, new)
    refused = [change for change in changes if not _may_change(change)]
    if refused:
        raise bad_input(
            f"--run-dir {new.get('run_dir') or old.get('run_dir')}",
            expected=f"the settings of the run that is resumed (but {', '.join(RESUMABLE)}; steps may only grow)",
            found="; ".join(_shown(change) for change in refused),
            remedy="give the same command again, or --resume with this folder alone, or name a new folder",
        )
    return changes


def check_changes(folder: RunFolder, settings: Mapping[str, Any]) -> None:
    """Raises InputError where :func:`record_changes` would; writes nothing."""
    own = folder.read_config() if folder.resumed else None
    if own is not None:
        resume_changes(own, settings)


def record_changes(folder: RunFolder, settings: Mapping[str, Any]) -> list[str]:
    """Append to ``changes.jsonl`` what ``settings`` change, before they are written as the folder's config.

    A new run is compared with the newest earlier one of the same task in the same parent folder (by the time its config
    was written); a resumed one with itself.

    Args:
        folder: the run's.
        settings: what is going to be its config, facts included.

    Returns:
        Lines to print: none for a task's first run.

    Raises:
        InputError: the run is resumed with settings of another run; nothing is written then.
    """
    against: str | None
    own = folder.read_config() if folder.resumed else None
    if own is not None:
        against, changes = folder.path.resolve().name, resume_changes(own, settings)
    else:
        earlier = _newest_earlier(folder.path.resolve(), settings.get("task"))
        against = earlier[0] if earlier else None
        changes = _chosen(compare(earlier[1], settings), earlier[1], settings) if earlier else []
    record = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "against": against, "changes": changes}
    path = folder.path / "changes.jsonl"
    content = path.read_bytes() if path.exists() else b""
    write_atomically(path, content + json.dumps(record, default=str).encode() + b"\n")
    return [] if against is None else _report(changes, against, resumed=own is not None)


def _report(changes: list[Change], against: str, *, resumed: bool) -> list[str]:
    if resumed:
        return [f"resumed with {_shown(change)}" for change in changes]
    counting = [change for change in changes if change["key"] not in NEUTRAL]
    others = [f"  {_shown(change)} (changes nothing in the training)" for change in changes if change not in counting]
    if not counting:
        return [f"no setting changed against {against}", *others]
    if len(counting) == 1:
        return [f"one setting changed against {against}: {_shown(counting[0])}", *others]
    return [
        f"{len(counting)} settings changed against {against}: the cause of a difference can't be told",
        *(f"  {_shown(change)}" for change in counting),
        *others,
    ]


def _shown(change: Change) -> str:
    before, after = ("none" if change[name] is None else change[name] for name in ("before", "after"))
    return f"{change['key']}: {before} -> {after}"


def _chosen(changes: list[Change], before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Change]:
    """Without what follows from the other settings on both sides: the warm-up of a run that is too short for its own,
    for instance. One that was given counts, also if it is what would have followed."""
    if len(changes) < 2:
        return changes
    return [c for c in changes if not (_follows(c["key"], before) and _follows(c["key"], after))]


def _follows(key: str, config: Mapping[str, Any]) -> bool:
    """Whether the setting is what its config would have without it, and another setting decides that."""
    names = {field.name for field in fields(TrainConfig)}
    if key not in DERIVED:
        return False
    try:
        usual = TrainConfig(**{name: value for name, value in config.items() if name in names and name != key})
    except (InputError, TypeError):
        return False
    return bool(getattr(usual, key) == config.get(key))


def _may_change(change: Change) -> bool:
    if change["key"] == "steps":
        return bool(change["after"] is not None and (change["before"] or 0) < change["after"])
    return change["key"] in RESUMABLE or str(change["key"]).startswith("environment.")


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """Settings, environment and checksum under keys of their own."""
    flat = {str(key): value for key, value in config.items() if key not in ("run_dir", "data", "environment")}
    for part, names in (("data", ("sha256",)), ("environment", None)):
        facts = config.get(part)
        if isinstance(facts, Mapping):
            flat.update({f"{part}.{key}": value for key, value in facts.items() if names is None or key in names})
    return flat


def _newest_earlier(own: Path, task: object) -> tuple[str, dict[Any, Any]] | None:
    """Name and config of the newest run of ``task`` beside the folder ``own``; what cannot be read is passed over."""
    found: list[tuple[float, Path]] = []
    try:
        for folder in own.parent.iterdir():
            config = folder / "config.yaml"
            if folder != own and config.is_file():
                found.append((config.stat().st_mtime, config))
    except OSError:
        pass
    for _, config in sorted(found, reverse=True):
        try:
            settings = read_yaml(config)
        except InputError:
            continue
        if settings.get("task") == task:
            return config.parent.name, settings
    return None
