"""A run that is stopped or killed anywhere and goes on ends with the same bits as one that was not disturbed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader
from trainer_cases import Log, Samples, assert_same, class_loss, frozen, model_of, simple

import mo_fused
from mo_fused.training import warmup_cosine
from mo_fused.training.checkpoints import Checkpoints, load_checkpoint
from mo_fused.training.trainer import Trainer

pytestmark = pytest.mark.cpu_only(reason="the loop around the step, on the host alone")

STEPS = 9
CASES: dict[str, dict[str, Any]] = {
    "AdamW": {"make": lambda p: mo_fused.AdamW(p, lr=0.02, max_grad_norm=0.5)},
    "SGD": {"make": lambda p: mo_fused.SGD(p, lr=0.1, momentum=0.9, nesterov=True)},
    "Adafactor": {"make": lambda p: mo_fused.Adafactor(p, lr=0.02)},
    "torch.optim.AdamW": {"make": lambda p: torch.optim.AdamW(p, lr=0.02), "max_grad_norm": 0.5},
    "torch.optim.SGD": {"make": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)},
    "int8": {"make": lambda p: mo_fused.AdamW(p, lr=0.02, state_dtype="int8", seed=5)},
    "int4 SGD": {"make": lambda p: mo_fused.SGD(p, lr=0.1, momentum=0.9, state_dtype="int4")},
    "split": {"make": lambda p: mo_fused.AdamW(p, lr=0.02, master_weights="split", state_dtype="fp32"), "half": True},
    "split8 and int8": {
        "make": lambda p: mo_fused.AdamW(p, lr=0.02, master_weights="split8", state_dtype="int8"),
        "half": True,
    },
    "stochastic": {"make": lambda p: mo_fused.AdamW(p, lr=0.02, master_weights="stochastic", seed=3), "half": True},
    "kahan": {"make": lambda p: mo_fused.SGD(p, lr=0.05, momentum=0.9, master_weights="kahan"), "half": True},
    "fp16": {"make": lambda p: mo_fused.AdamW(p, lr=0.02), "precision": "fp16"},
    "fp16 of torch": {"make": lambda p: torch.optim.AdamW(p, lr=0.02), "precision": "fp16", "max_grad_norm": 0.5},
    "fp16, unscaled by torch": {"make": lambda p: mo_fused.AdamW(p, lr=0.02, amp="torch"), "precision": "fp16"},
    "bf16": {"make": lambda p: torch.optim.AdamW(p, lr=0.02), "precision": "bf16"},
    "skips": {"make": lambda p: mo_fused.AdamW(p, lr=0.02, skip_nonfinite=True), "bad": True},
    "validation": {"make": lambda p: mo_fused.AdamW(p, lr=0.02), "validate": True},
    "batch norm": {"make": lambda p: mo_fused.SGD(p, lr=0.05, momentum=0.9), "norm": True},
}


def bad_batches(model: Any, batch: Any) -> torch.Tensor:
    """A loss that is not finite for the batches with sample 0: once an epoch."""
    first = Samples(22).inputs[0]
    found = (batch[0] - first).abs().amax(dim=-1).amin() < 1e-6
    return class_loss(model, batch) * torch.where(found, float("nan"), 1.0)


def build(case: dict[str, Any], folder: Path | None, accumulate: int, seed: int = 0) -> tuple[Trainer, Any, Log]:
    """Fresh objects, as a new process has them; ``seed`` is another one in each."""
    model = model_of(seed, dropout=0.2, norm=case.get("norm", False))
    if case.get("half"):
        model = model.bfloat16()
    optimizer = case["make"](model.parameters())
    options = {key: case[key] for key in ("precision", "max_grad_norm") if key in case}
    if options.get("precision") == "fp16":
        kind: Any = mo_fused.GradScaler if isinstance(optimizer, mo_fused.AdamW) else torch.amp.GradScaler
        # Overflows in the first steps, and grows every third step after that.
        options["scaler"] = kind("cpu", init_scale=2.0**22, growth_interval=3)
    if case.get("validate"):
        fixed = DataLoader(Samples(8), batch_size=4, shuffle=True)
        options["validate"] = lambda: {"val_loss": float(sum(class_loss(model, b).detach() for b in fixed))}
        options["validate_every"] = 2
    log = Log()
    trainer = Trainer(
        model,
        optimizer,
        bad_batches if case.get("bad") else class_loss,
        schedule=warmup_cosine(optimizer, STEPS + seed, 3),
        accumulate=accumulate,
        monitor=log,
        checkpoints=None if folder is None else Checkpoints(folder, keep=STEPS),
        **options,
    )
    noise = 0.0 if case.get("bad") else 0.1
    loader = DataLoader(Samples(22, noise=noise), batch_size=4, shuffle=True)
    for seeded in (torch.manual_seed, np.random.seed, random.seed):
        seeded(seed)
    return trainer, loader, log


def told(log: Log) -> list[Any]:
    """What was told of each step, but for times."""
    return [{key: row[key] for key in row if "seconds" not in key} for row in log.rows]


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_going_on_is_exact(tmp_path: Path, name: str, accumulate: int) -> None:
    case = CASES[name]
    whole, loader, log = build(case, tmp_path / "whole", accumulate)
    whole.fit(loader, STEPS)
    want = load_checkpoint(tmp_path / "whole" / f"step-{STEPS:08d}.pt")
    if "fp16" in name:
        assert 0 < sum(row["skipped"] for row in log.of("measured")) < STEPS - 3
    if case.get("bad"):
        assert any(row["skipped"] for row in log.of("measured"))

    folder = tmp_path / "pieces"
    trainer, loader, first = build(case, folder, accumulate)
    first.then = lambda step: trainer.save()  # in every step
    trainer.fit(loader, STEPS)
    if case.get("validate"):  # a save before the step is validated knows of no best
        want["trainer"] = {"skipped": want["trainer"]["skipped"]}
    assert trainer.checkpoints is not None
    for stop in range(1, STEPS):
        again, loader, rest = build(case, None, accumulate, seed=1 + stop)
        again.resume(trainer.checkpoints.path(stop))
        again.fit(loader, STEPS)
        got = again.state_dict()
        for key in ("best_step", "best_value"):
            if case.get("validate"):
                del got["trainer"][key]
        assert_same({**got, "config": want["config"]}, want, f"stopped at {stop}")
        assert_same(told(rest), told(log)[stop:], f"told after {stop}")


@pytest.mark.parametrize("stops", [[1, 2, 3, 4, 5, 6, 7, 8], [4, 7], [5]])
def test_many_pieces(tmp_path: Path, stops: list[int]) -> None:
    """By way of stop(), with the folder's newest checkpoint."""
    case = CASES["validation"]
    whole, loader, _ = build(case, tmp_path / "whole", 2)
    whole.fit(loader, STEPS)

    def piece(seed: int, stop: int) -> None:
        trainer, loader, log = build(case, tmp_path / "pieces", 2, seed=seed)
        trainer.resume()
        log.then = lambda step: trainer.stop() if step == stop else None
        assert trainer.fit(loader, STEPS) == stop

    for seed, stop in enumerate([*stops, STEPS]):
        piece(seed, stop)
    names = [folder / f"step-{STEPS:08d}.pt" for folder in (tmp_path / "pieces", tmp_path / "whole")]
    got, want = map(load_checkpoint, names)
    for state in (got, want):
        del state["trainer"]  # a step that ends with stop() is not validated
    assert_same(got, want)


def test_shorter_runs_first(tmp_path: Path) -> None:
    """More steps than a run was begun with: the validation after its last step leaves no trace."""
    case = CASES["validation"]
    whole, loader, _ = build(case, None, 1)
    whole.fit(loader, STEPS)
    for steps in (3, STEPS):
        trainer, loader, _ = build(case, tmp_path, 1)
        trainer.resume()
        trainer.fit(loader, steps)
    assert_same(trainer.model.state_dict(), whole.model.state_dict())
    assert_same(trainer.optimizer.state_dict(), whole.optimizer.state_dict())


def test_back_in_the_same_process(tmp_path: Path) -> None:
    """After steps that went wrong, with the objects that are there."""
    trainer, loader, log = build(CASES["AdamW"], tmp_path, 2)
    trainer.fit(loader, 4)
    trainer.checkpoints = None
    trainer.fit(loader, STEPS)
    want = (trainer.model.state_dict(), trainer.optimizer.state_dict(), torch.get_rng_state())
    want = torch.utils._pytree.tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, want)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.fill_(float("nan"))
    trainer.resume(tmp_path / "step-00000004.pt")
    assert trainer.step == 4 and trainer.epoch == 1
    trainer.fit(loader, STEPS)
    assert_same((trainer.model.state_dict(), trainer.optimizer.state_dict(), torch.get_rng_state()), want)
    assert_same(told(log)[-5:], told(log)[4:9])


def test_a_resumed_run_can_be_saved_before_it_goes_on(tmp_path: Path) -> None:
    trainer, loader = simple(tmp_path / "a")
    trainer.fit(loader, 3)
    want = load_checkpoint(tmp_path / "a" / "step-00000003.pt")
    again, _ = simple(tmp_path / "b", seed=3)
    again.resume(tmp_path / "a" / "step-00000003.pt")
    assert_same(load_checkpoint(again.save()), want)


def test_nothing_more_to_do(tmp_path: Path) -> None:
    trainer, loader = simple(tmp_path)
    trainer.fit(loader, 3)
    before = (tmp_path / "step-00000003.pt").stat().st_mtime_ns
    again, loader = simple(tmp_path, seed=1)
    assert again.resume() == tmp_path / "step-00000003.pt"
    assert again.fit(loader, 3) == 3
    assert (tmp_path / "step-00000003.pt").stat().st_mtime_ns == before


KILLS = 24


def test_killed_at_any_moment(tmp_path: Path, run_python: Callable[..., Any]) -> None:
    """SIGKILL while training and in each part of a save; started again with the same command until it is done."""
    script = Path(__file__).with_name("kill_cases.py")
    done = run_python(str(script), str(tmp_path), "20", str(KILLS))
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["undisturbed"] == 0 and seen["faults"] == 0, done.stderr
    assert sum(seen["kills"].values()) == KILLS
    assert all(seen["kills"].values()), f"each place at least once: {seen}"
    assert seen["left"] > 0, "some left a file half written"
    newest = sorted(path.name for path in (tmp_path / "whole").iterdir())
    want = load_checkpoint(tmp_path / "whole" / newest[-1])
    assert want["step"] == 24
    for run in range(1, seen["runs"] + 1):
        folder = tmp_path / f"run{run}"
        assert_same(load_checkpoint(folder / newest[-1]), want, f"{folder.name}")
        names = {path.name for path in folder.iterdir()}
        assert names >= set(newest), "the last ones and the best"
        assert len(names - set(newest)) <= 1, "what the last save, killed, had left to do"
        assert (folder / "best.pt").exists(), "a link to a file that is there"


def test_further_parts_are_kept(tmp_path: Path) -> None:
    """Averaged weights go on from where they were; a file without them says so."""

    def build() -> tuple[Trainer, Any, AveragedModel]:
        trainer, loader = simple(tmp_path)
        average = AveragedModel(trainer.model, avg_fn=lambda old, new, _: 0.9 * old + 0.1 * new)
        trainer.monitor = Log(lambda _: average.update_parameters(trainer.model))
        trainer.extra = {"average": average}
        return trainer, loader, average

    trainer, loader, whole = build()
    trainer.fit(loader, 6)
    want = frozen(whole.state_dict())
    for path in tmp_path.iterdir():
        path.unlink()
    trainer, loader, _ = build()
    trainer.fit(loader, 3)
    trainer, loader, again = build()
    trainer.resume()
    trainer.fit(loader, 6)
    assert_same(again.state_dict(), want)
    bare = load_checkpoint(tmp_path / "step-00000006.pt")
    del bare["extra"]
    with pytest.warns(RuntimeWarning, match="the checkpoint has no extra 'average': it stays as it is"):
        build()[0].load_state_dict(bare)
    with pytest.raises(ValueError, match="extra to be objects with state_dict.*found 'a: int'"):
        Trainer(trainer.model, trainer.optimizer, class_loss, extra={"a": 1})
