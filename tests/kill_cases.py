"""Runs that are killed: a script that imports torch once and forks a child for each piece of a run.

``python kill_cases.py FOLDER SEED KILLS`` trains once undisturbed and then again and again "with the same command" in
another folder, KILLS times killed by SIGKILL on the way, and prints a JSON line with what was seen. Forking before any
operation of torch ran, with one thread, is safe, and spares each child the import.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # which an optimizer imports when it is made: most of the time of a child, were it left to them
from trainer_cases import Log, Samples, class_loss, falling, model_of

import mo_fused
from mo_fused.training import atomic, checkpoints
from mo_fused.training.checkpoints import Checkpoints
from mo_fused.training.trainer import Trainer

STEPS = 24
PLACES = ("anywhere", "while writing", "before fsync", "before replace", "after replace", "while pruning")


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


class DyingFile:
    """A file that ends the process after some bytes."""

    def __init__(self, file: Any, left: int) -> None:
        self.file, self.left = file, left

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if len(view) >= self.left:
            self.file.write(view[: self.left])
            self.file.flush()
            die()
        self.left -= len(view)
        return int(self.file.write(data))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


def die_at(place: str, rng: random.Random, seconds: float) -> None:
    """Lets the save of a later step end this process at ``place``; or any moment of a step."""
    after = rng.randrange(1, 4)
    saves = [0]

    def from_then_on(then: Callable[..., Any], otherwise: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **options: (then if saves[0] == after else otherwise)(*args, **options)

    save = torch.save

    def counted_save(state: Any, file: Any) -> None:
        saves[0] += 1
        if place == "while writing" and saves[0] == after:
            file = DyingFile(file, rng.randrange(1, 16_000))
        save(state, file)

    checkpoints.torch.save = counted_save
    if place == "before fsync":
        atomic.os.fsync = from_then_on(die, os.fsync)
    elif place == "before replace":
        atomic.os.replace = from_then_on(die, os.replace)
    elif place == "after replace":
        replace = os.replace
        atomic.os.replace = lambda *paths: (replace(*paths), saves[0] == after and die())
    elif place == "while pruning":
        Path.unlink = from_then_on(die, Path.unlink)
    elif place == "anywhere":
        watch(os.getpid(), rng.uniform(0.0, seconds))


def watch(pid: int, seconds: float) -> None:
    """A process that kills ``pid`` later."""
    if os.fork() == 0:
        time.sleep(seconds)
        if os.getppid() == pid:
            os.kill(pid, signal.SIGKILL)
        os._exit(0)


def train(folder: Path) -> None:
    """The command: begins or goes on, and writes its last state."""
    torch.set_num_threads(1)
    torch.manual_seed(11)
    random.seed(11)
    model = model_of(4, dropout=0.2)
    optimizer = mo_fused.AdamW(model.parameters(), lr=0.02, max_grad_norm=1.0, state_dtype="int8")
    loader = torch.utils.data.DataLoader(Samples(22, noise=0.1), batch_size=3, shuffle=True)
    best = [1.0 + (step * 7 % 11) for step in range(STEPS + 1)]
    trainer = Trainer(
        model,
        optimizer,
        class_loss,
        schedule=falling(optimizer),
        accumulate=2,
        monitor=Log(),
        checkpoints=Checkpoints(folder, every=2, keep=2),
        validate=lambda: {"val_loss": best[trainer.step]},
        validate_every=3,
    )
    trainer.resume()
    trainer.fit(loader, STEPS)


def forked(folder: Path, place: str | None, seed: int, seconds: float) -> int:
    """Runs the command in a child, which takes ``seconds``; its exit status, negative for a signal."""
    pid = os.fork()
    if pid == 0:
        try:
            if place is not None:
                die_at(place, random.Random(seed), seconds)
            train(folder)
            os._exit(0)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            sys.stderr.flush()
            os._exit(3)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main(folder: Path, seed: int, kills: int) -> None:
    begun = time.perf_counter()
    undisturbed = forked(folder / "whole", None, 0, 0.0)
    seconds = 0.8 * (time.perf_counter() - begun)
    rng = random.Random(seed)
    seen: dict[str, int] = dict.fromkeys(PLACES, 0)
    runs = starts = faults = left = 0
    while sum(seen.values()) < kills:
        runs += 1
        disturbed = folder / f"run{runs}"
        while True:
            place = PLACES[starts % len(PLACES)] if sum(seen.values()) < kills else None
            starts += 1
            status = forked(disturbed, place, rng.randrange(2**32), seconds)
            left += sum(".part" in entry.name for entry in disturbed.iterdir()) if disturbed.is_dir() else 0
            if status == 0:
                break
            if status != -signal.SIGKILL:
                faults += 1
                break
            assert place is not None
            seen[place] += 1
    print(json.dumps({"undisturbed": undisturbed, "kills": seen, "runs": runs, "faults": faults, "left": left}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
