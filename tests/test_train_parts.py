"""The parts that a training run is made of, each alone: run folder, text, model, parameter groups."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from mo_fused.training import decay_groups
from mo_fused.training.errors import InputError
from mo_fused.training.model import ByteGPT
from mo_fused.training.run_folder import METRICS, RunFolder, metrics_line
from mo_fused.training.text import load_text

# --- run folder


@given(st.dictionaries(st.sampled_from(sorted(METRICS)), st.one_of(st.none(), st.booleans(), st.floats())))
def test_every_line_is_json(values: dict[str, float | bool | None]) -> None:
    row = json.loads(metrics_line(values), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    for key in METRICS:
        value = values.get(key)
        lost = isinstance(value, float) and not math.isfinite(value)
        assert row[key] == (None if lost else value)
        assert row.get(f"{key}_nonfinite", False) is lost


def test_an_unknown_metric_is_refused() -> None:
    with pytest.raises(KeyError, match="grad_nrom"):
        metrics_line({"grad_nrom": 1.0})


def test_lines_are_there_at_once(tmp_path: Path) -> None:
    folder = RunFolder("lm", tmp_path / "r")
    for step in (1, 2):
        folder.write_metrics({"step": step, "loss": 1.0})
        lines = (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == list(range(1, step + 1))
    folder.close()
    with pytest.raises(InputError, match="an earlier run"):
        RunFolder("lm", tmp_path / "r")


# --- text, model, groups


def test_text_is_split_by_position_and_windows_are_shifted_by_one(tmp_path: Path) -> None:
    content = bytes(33 + i % 90 for i in range(2000))
    (tmp_path / "t").write_bytes(content)
    text = load_text(str(tmp_path / "t"), context=8)
    assert bytes(text.train.tolist()) == content[:1800]
    assert bytes(text.validation.tolist()) == content[1800:]
    inputs, targets = text.draw(5, 8, torch.Generator().manual_seed(0))
    assert inputs.shape == targets.shape == (5, 8) and inputs.dtype == torch.int64
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert all(bytes(row.tolist()) in content[:1800] for row in inputs)
    kept, _ = text.validation_windows(8)
    assert bytes(kept.flatten().tolist()) == content[1800 : 1800 + 24 * 8]
    few, _ = text.validation_windows(8, limit=3)
    assert torch.equal(few, kept[[0, 8, 16]])


def test_the_shortest_text(tmp_path: Path) -> None:
    for size in (80, 81):
        (tmp_path / f"{size}").write_bytes(b"x" * size)
    with pytest.raises(InputError, match="at least 81 bytes .* found 80 bytes"):
        load_text(str(tmp_path / "80"), context=8)
    assert load_text(str(tmp_path / "81"), context=8).validation_windows(8)[0].shape == (1, 8)


def test_the_last_window_is_drawn_too(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(b"a" * 89 + b"bz" + b"c" * 9)
    text = load_text(str(tmp_path / "t"), context=8)
    _, targets = text.draw(4000, 8, torch.Generator().manual_seed(0))
    assert (targets[:, -1] == ord("b")).any(), "the training part's last byte is a target"
    assert not (targets == ord("z")).any(), "the validation part is never drawn"


def test_nothing_in_the_built_in_validation_text_was_trained_on() -> None:
    text = load_text(None, context=128)
    parts = [bytes(part.tolist()).decode("utf-8", "ignore").split("\n\n") for part in (text.train, text.validation)]
    train, validation = ({" ".join(p.split()) for p in part} for part in parts)
    assert not train & validation
    assert text.size > 300_000


def test_model_is_causal_and_starts_at_chance() -> None:
    torch.manual_seed(0)
    model = ByteGPT(context=32, layers=2, heads=4, width=32)
    tokens = torch.randint(0, 256, (3, 32))
    changed = tokens.clone()
    changed[:, 20] = (changed[:, 20] + 1) % 256
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :20], after[:, :20], rtol=0, atol=1e-6)
    assert (before[:, 20:] - after[:, 20:]).abs().amax(dim=(0, 2)).min() > 1e-4, "every later byte sees the change"
    loss = nn.functional.cross_entropy(before.flatten(0, 1), torch.randint(0, 256, (96,)))
    assert loss.item() == pytest.approx(math.log(256), abs=0.1)


def test_only_matrices_decay() -> None:
    model = ByteGPT(context=8, layers=1, heads=2, width=8)
    model.position.weight.requires_grad_(False)
    decayed, plain = decay_groups(model, 0.1)
    names = [name for name, _ in decayed["params"] + plain["params"]]
    assert decayed["weight_decay"] == 0.1 and plain["weight_decay"] == 0.0
    assert all(p.dim() >= 2 for _, p in decayed["params"]) and all(p.dim() < 2 for _, p in plain["params"])
    assert sorted(names) == sorted(n for n, _ in model.named_parameters() if n != "position.weight")
    assert torch.optim.AdamW(decay_groups(model, 0.1)).param_groups[1]["param_names"][0] == plain["params"][0][0]
    assert len(decay_groups(nn.LayerNorm(4), 0.1)) == 1
