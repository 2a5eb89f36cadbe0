"""A run's folder: opened again after a kill at any moment, locked while in use, cut back to a step."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from mo_fused.training import InputError, RunFolder
from mo_fused.training.changes import record_changes
from mo_fused.training.run_folder import METRICS

CONFIG: dict[str, Any] = {"task": "lm", "lr": 0.5}


def steps(folder: Path) -> list[int]:
    text = (folder / "metrics.jsonl").read_text()
    assert text.endswith("\n") or not text
    return [json.loads(line)["step"] for line in text.splitlines()]


def earlier_run(path: Path, count: int = 4) -> None:
    folder = RunFolder("lm", path)
    folder.write_config(CONFIG)
    for step in range(1, count + 1):
        folder.write_metrics({"step": step, "loss": 1.0 / step})
    folder.close()


def test_a_new_folder_and_an_earlier_run(tmp_path: Path) -> None:
    new = RunFolder("lm", tmp_path / "r", resume=True)
    assert not new.resumed and new.read_config() is None
    assert not (tmp_path / "r" / "checkpoints").exists()
    assert new.checkpoints == tmp_path / "r" / "checkpoints" and new.checkpoints.is_dir()
    new.write_config(CONFIG)
    new.write_metrics({"step": 1, "val_metric": 0.5, "samples_per_second": 8.0})
    new.close()

    again = RunFolder("lm", tmp_path / "r", resume=True)
    assert again.resumed and again.read_config() == CONFIG
    again.write_metrics({"step": 2})
    again.close()
    assert steps(tmp_path / "r") == [1, 2]
    first = json.loads((tmp_path / "r" / "metrics.jsonl").read_text().splitlines()[0])
    assert list(first) == list(METRICS)
    assert (first["val_metric"], first["samples_per_second"], first["tokens_per_second"]) == (0.5, 8.0, None)

    (tmp_path / "empty").mkdir()
    assert not RunFolder("lm", tmp_path / "empty", resume=True).resumed


def test_a_folder_with_other_contents_is_left_alone(tmp_path: Path) -> None:
    earlier_run(tmp_path / "r")
    with pytest.raises(InputError, match="expected a new or empty folder; found an earlier run"):
        RunFolder("lm", tmp_path / "r")
    (tmp_path / "r" / "metrics.jsonl").unlink()  # a config alone may be somebody's own
    (tmp_path / "r" / "thesis.txt").write_text("do not lose")
    (tmp_path / "r" / ".x.part").write_text("")
    (tmp_path / "other" / "checkpoints").mkdir(parents=True)
    (tmp_path / "file").write_text("")
    for name, found in (
        ("r", r"a folder with other contents \(thesis.txt\); name another folder, or move what"),
        ("other", r"a folder with other contents \(checkpoints\)"),
        ("file", "a file"),
    ):
        with pytest.raises(InputError, match=rf"empty folder, or that of an earlier run; found {found}"):
            RunFolder("lm", tmp_path / name, resume=True)
    assert sorted(p.name for p in (tmp_path / "r").iterdir()) == [
        ".x.part",
        "config.yaml",
        "thesis.txt",
    ]
    assert [p.name for p in (tmp_path / "other").iterdir()] == ["checkpoints"]


def test_other_files_beside_a_run_do_no_harm(tmp_path: Path) -> None:
    earlier_run(tmp_path)
    (tmp_path / "notes.txt").write_text("do not lose")
    folder = RunFolder("lm", tmp_path, resume=True)
    folder.close()
    assert folder.resumed and (tmp_path / "notes.txt").read_text() == "do not lose"


@pytest.mark.parametrize(
    ("kept_until", "expected", "dropped"), [(0, [], 4), (2, [1, 2], 2), (4, [1, 2, 3, 4], 0), (9, [1, 2, 3, 4], 0)]
)
def test_cutting_back_to_a_step(kept_until: int, expected: list[int], dropped: int, tmp_path: Path) -> None:
    earlier_run(tmp_path)
    whole = (tmp_path / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    folder = RunFolder("lm", tmp_path, resume=True)
    assert folder.cut_metrics(kept_until) == dropped
    assert (tmp_path / "metrics.jsonl").read_bytes() == b"".join(whole[: len(expected)])
    folder.write_metrics({"step": 77})
    assert steps(tmp_path) == [*expected, 77]
    assert folder.cut_metrics(kept_until) == 1
    folder.close()
    assert steps(tmp_path) == expected


@pytest.mark.parametrize(
    ("tail", "dropped"),
    [
        (b'{"step": 5, "lo', 1),
        (b'{"step": 5}', 1),  # whole, but its end was not written: a line may follow it only after one
        (b"\0\0\0\0\n", 1),
        (b'{"loss": 1}\n{"step": 6}\n', 2),
        (b'{"step": null}\n', 1),
        (b"[1]\n", 1),
        (b"", 0),
    ],
)
def test_a_line_cut_by_a_crash_is_dropped(tail: bytes, dropped: int, tmp_path: Path) -> None:
    earlier_run(tmp_path)
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(tail)
    folder = RunFolder("lm", tmp_path, resume=True)
    assert folder.cut_metrics(10) == dropped
    folder.write_metrics({"step": 5})
    folder.close()
    assert steps(tmp_path) == [1, 2, 3, 4, 5]


def test_writing_on_without_cutting_joins_no_lines(tmp_path: Path) -> None:
    earlier_run(tmp_path)
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 5, "lo')
    folder = RunFolder("lm", tmp_path, resume=True)
    folder.write_metrics({"step": 5})
    folder.close()
    assert steps(tmp_path) == [1, 2, 3, 4, 5]


def test_lines_of_an_older_version_are_kept(tmp_path: Path) -> None:
    old = b'{"step": 1, "loss": 5.5, "lr": 0.1, "val_loss": null}\n{"step": 2, "loss": null, "loss_nonfinite": true}\n'
    (tmp_path / "metrics.jsonl").write_bytes(old)
    folder = RunFolder("lm", tmp_path, resume=True)
    assert folder.resumed and folder.cut_metrics(2) == 0
    folder.close()
    assert (tmp_path / "metrics.jsonl").read_bytes() == old


def test_only_a_new_folder_without_a_step_is_discarded(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    for name in ("new", "there"):
        folder = RunFolder("lm", tmp_path / name, resume=True)
        record_changes(folder, CONFIG)
        folder.write_config(CONFIG)
        assert folder.checkpoints.is_dir()
        folder.discard()
        folder.discard()
    assert [p.name for p in tmp_path.iterdir()] == ["there"] and not any((tmp_path / "there").iterdir())

    earlier_run(tmp_path / "r", count=0)
    before = sorted((tmp_path / "r").iterdir())
    again = RunFolder("lm", tmp_path / "r", resume=True)
    again.discard()
    assert sorted((tmp_path / "r").iterdir()) == before

    stepped = RunFolder("lm", tmp_path / "stepped")
    stepped.write_metrics({"step": 1})
    stepped.discard()
    assert steps(tmp_path / "stepped") == [1]


# --- processes. Children are forked: they only touch files.


def test_a_full_disk_is_an_error_of_the_line_and_not_of_closing(tmp_path: Path) -> None:
    folder = RunFolder("lm", tmp_path / "r")
    folder.write_metrics({"step": 1})
    size = (tmp_path / "r" / "metrics.jsonl").stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            folder.write_metrics({"step": 2})
        folder.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    again = RunFolder("lm", tmp_path / "r", resume=True)
    again.write_metrics({"step": 2})
    again.close()
    assert steps(tmp_path / "r") == [1, 2]


def in_child(work: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return pid


def test_one_process_at_a_time_and_the_lock_dies_with_it(tmp_path: Path) -> None:
    """Also when a worker that it has forked lives on."""
    told, tell = os.pipe()

    def run() -> None:
        folder = RunFolder("lm", tmp_path / "r", resume=True)
        folder.write_metrics({"step": 1})
        if os.fork() == 0:
            os.write(tell, f"{os.getpid()}\n".encode())
        signal.pause()

    child = in_child(run)
    worker = int(os.read(told, 100))
    try:
        for path in (tmp_path / "r", tmp_path / "r" / ".." / "r"):
            with pytest.raises(InputError, match="expected a folder that no other process works in; found"):
                RunFolder("lm", path, resume=True)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        child = 0
        os.kill(worker, 0)  # it is there still
        folder = RunFolder("lm", tmp_path / "r", resume=True)
        assert folder.resumed and steps(tmp_path / "r") == [1]
        with pytest.raises(InputError, match="a run is going on"):
            RunFolder("lm", tmp_path / "r", resume=True)
        folder.close()
        RunFolder("lm", tmp_path / "r", resume=True).close()
    finally:
        for process in filter(None, (child, worker)):
            os.kill(process, signal.SIGKILL)
        os.close(told)
        os.close(tell)


def test_a_new_run_is_locked_too(tmp_path: Path) -> None:
    folder = RunFolder("lm", tmp_path / "r")
    folder.write_metrics({"step": 1})
    with pytest.raises(InputError, match="a run is going on"):
        RunFolder("lm", tmp_path / "r", resume=True)
    folder.discard()
    RunFolder("lm", tmp_path / "r", resume=True).close()


def killed_at(event: int, work: Callable[[], None]) -> bool:
    """Whether ``work`` was killed before its ``event``-th call that opens, moves, cuts, locks or removes a file."""
    kinds = {"open", "os.rename", "os.mkdir", "os.truncate", "os.remove", "os.rmdir", "fcntl.flock"}

    def child() -> None:
        count = 0

        def hook(kind: str, _arguments: Any) -> None:
            nonlocal count
            if kind in kinds:
                count += 1
                if count == event:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        work()

    _, status = os.waitpid(in_child(child), 0)
    assert status in (0, signal.SIGKILL)
    return status != 0


def test_a_kill_at_any_moment_leaves_a_folder_to_go_on_with(tmp_path: Path) -> None:
    yaml.safe_dump({})  # so that no import counts as a moment

    def run(path: Path) -> None:
        """What a command does that is given again and again: go on after step 2, its last checkpoint."""
        folder = RunFolder("lm", path, resume=True)
        record_changes(folder, CONFIG)
        folder.write_config(CONFIG)
        checkpoint = folder.checkpoints / "step-00000002.pt"
        done = 2 if checkpoint.exists() else 0
        folder.cut_metrics(done)
        for step in range(done + 1, 5):
            folder.write_metrics({"step": step})
            if step == 2:
                (folder.checkpoints / ".step-00000002.pt.7.part").write_bytes(b"half")
                os.replace(folder.checkpoints / ".step-00000002.pt.7.part", checkpoint)
        folder.close()

    moments = 0
    for event in range(1, 200):
        path = tmp_path / str(event)
        if not killed_at(event, lambda path=path: run(path)):  # type: ignore[misc]
            break
        moments += 1
        for again in range(1, 200, 5):  # and the command given again may be killed, too
            if not killed_at(again, lambda path=path: run(path)):  # type: ignore[misc]
                break
        run(path)
        assert steps(path) == [1, 2, 3, 4]
        assert yaml.safe_load((path / "config.yaml").read_text()) == CONFIG
        assert sorted(p.name for p in path.rglob("*")) == [
            *("changes.jsonl", "checkpoints", "config.yaml", "metrics.jsonl", "step-00000002.pt"),
        ]
        lines = [json.loads(line) for line in (path / "changes.jsonl").read_text().splitlines()]
        assert lines and all(line["changes"] == [] for line in lines)
    assert 10 < moments < 100, "the run that nobody killed came last"
