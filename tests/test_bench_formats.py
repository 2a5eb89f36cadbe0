"""The benchmarks of what formats cost in quality, bench/train_formats.py and bench/state_formats.py, in small."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from mo_fused.bench import results

BENCH = Path(__file__).resolve().parent.parent / "bench"


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCH)
    return importlib.import_module("train_formats")


@pytest.fixture
def storing(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCH)
    return importlib.import_module("state_formats")


@pytest.fixture(autouse=True, scope="module")
def threads() -> Iterator[None]:
    """The scripts set torch's number of threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


# -- training ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Every combination, two seeds, six steps of the tiny model; as they are in the file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCH)
        script = importlib.import_module("train_formats")
        file = tmp_path_factory.mktemp("bench") / "results.csv"
        # A rate at which six steps of a warm-up of 100 are seen in bf16.
        script.main(["--quick", "--steps", "6", "--seeds", "0,1", "--lr", "0.03", "--output", str(file)])
    found = results.read(file)
    assert [r["contender"] for r in found] == [c.name for c in script.COMBINATIONS]
    return {r["contender"]: r for r in found}


# Parameter, gradient, rest of the weights, two moments. Codes and scales of a matrix with rows of 64: 1 + 4 / 64 each
# in 8 bits, half a byte + 4 / 64 in 4 bits. Vectors keep fp32 moments.
BYTES = {
    "fp32-none-fp32": 4 + 4 + 8,
    "bf16-none-bf16": 2 + 2 + 4,
    "bf16-none-fp32": 2 + 2 + 8,
    "bf16-fp32-bf16": 2 + 2 + 4 + 4,
    "bf16-split-fp32": 2 + 2 + 2 + 8,
    "bf16-split8-bf16": 2 + 2 + 1 + 4,
    "bf16-kahan-bf16": 2 + 2 + 2 + 4,
    "bf16-stochastic-bf16": 2 + 2 + 4,
}


@pytest.mark.parametrize("name", BYTES)
def test_bytes_of_a_combination(records: dict[str, dict[str, Any]], name: str) -> None:
    assert records[name]["bytes"] == records[name]["bytes_of_matrices"] == BYTES[name]


def test_bytes_of_quantised_states(records: dict[str, dict[str, Any]]) -> None:
    of = {name: records[name]["bytes_of_matrices"] for name in records}
    # Rows of 64 but for one matrix of 64 x 256: blocks of 256 (int8) and 128 (int4) there. The position's table, of
    # 16 x 64, is too small to be quantised.
    rows, wide, small = 256 * 64 + 192 * 64 + 64 * 64 + 256 * 64, 64 * 256, 16 * 64
    int8 = (rows * 2 * (1 + 4 / 64) + wide * 2 * (1 + 4 / 256) + small * 8) / (rows + wide + small)
    int4 = (rows * 2 * (0.5 + 4 / 64) + wide * 2 * (0.5 + 4 / 128) + small * 8) / (rows + wide + small)
    assert of["fp32-none-int8"] == pytest.approx(8 + int8) and of["fp32-none-int4"] == pytest.approx(8 + int4)
    assert of["bf16-split-int8"] == pytest.approx(6 + int8) and of["bf16-stochastic-int4"] == pytest.approx(4 + int4)
    assert records["bf16-split-int8"]["bytes"] > of["bf16-split-int8"]


def test_runs_of_a_seed_are_paired(records: dict[str, dict[str, Any]]) -> None:
    """Differences are those seed by seed, and what must be equal bit for bit is: same first weights, same batches."""
    base = records["fp32-none-fp32"]
    assert base["differences"] == [0.0, 0.0] and base["val_losses"][0] != base["val_losses"][1]
    assert base["backends"] == ["cpu"]
    for states in ("fp32", "bf16", "int8", "int4"):
        split, master = (records[f"bf16-{mode}-{states}"] for mode in ("split", "fp32"))
        assert split["val_losses"] == master["val_losses"]
    found = records["bf16-none-bf16"]
    for loss, other, difference in zip(found["val_losses"], base["val_losses"], found["differences"], strict=True):
        assert difference == pytest.approx(100 * (loss / other - 1)) and difference != 0
    assert found["difference"] == pytest.approx(sum(found["differences"]) / 2)
    assert found["difference_sd"] == pytest.approx(abs(found["differences"][0] - found["differences"][1]) / 2**0.5)
    # Every other one trains too: none is left at the first weights, and none is another one under a wrong name.
    losses = [tuple(r["val_losses"]) for name, r in records.items() if not name.startswith("bf16-split-")]
    assert len(set(losses)) == len(losses) and all(max(each) < 5.55 for each in losses)


def test_bounds(records: dict[str, dict[str, Any]]) -> None:
    bounds = {name: record["bound"] for name, record in records.items()}
    assert bounds["bf16-none-bf16"] is None and bounds["bf16-none-fp32"] is None
    assert bounds["fp32-none-int8"] == bounds["bf16-kahan-bf16"] == 0.5
    assert {bound for name, bound in bounds.items() if name.endswith("int4")} == {1.5}


def test_what_a_line_says(training: ModuleType) -> None:
    settings = training.arguments(["--seeds", "0,1", "--only", "split8-int4"])
    assert [c.name for c in settings.combinations] == ["fp32-none-fp32", "bf16-split8-int4"]
    base = [training.Run(2.0, 16.0, 16.0, ("cpu",)), training.Run(2.5, 16.0, 16.0, ("cpu",))]
    runs = [training.Run(2.04, 6.2, 6.09375, ("cpu",)), training.Run(2.54, 6.2, 6.09375, ("cpu",))]
    found = training.record(settings.combinations[1], runs, base, settings)
    assert found["reached"] is False
    words = " ".join(training.line(found).split())
    assert words == "bf16-split8-int4 6.20 6.094 2.2900 +2.00% +1.60% +1.80% 0.28% beyond 1.5%"
    within = training.record(settings.combinations[1], base, base, settings)
    assert within["reached"] is True and "beyond" not in training.line(within)


@pytest.mark.parametrize(("loses", "said"), [(15.0, ", more than the seeds' own spread of 14.14%"), (14.0, "NOT more")])
def test_whether_the_rate_shows_the_difference(training: ModuleType, loses: float, said: str) -> None:
    base = {"contender": "fp32-none-fp32", "val_loss": 2.5, "val_loss_sd": 0.353553}
    assert said in training.sensitivity([base, {"contender": "bf16-none-bf16", "difference": loses}])
    assert training.sensitivity([base]) == ""


def test_several_processes_find_the_same(training: ModuleType, records: dict[str, dict[str, Any]]) -> None:
    options = ["--quick", "--steps", "6", "--seeds", "0,1", "--lr", "0.03", "--only", "split8-int8"]
    found = training.main([*options, "--processes", "2"])
    names = ("fp32-none-fp32", "bf16-split8-int8")
    assert [r["contender"] for r in found] == list(names)
    for mine, name in zip(found, names, strict=True):
        assert mine["val_losses"] == records[name]["val_losses"]


# -- storing ----------------------------------------------------------------------------------------------------------


def test_dynamic_books(storing: ModuleType) -> None:
    signed, unsigned = storing.dynamic_book(True, 8, 7), storing.dynamic_book(False, 8, 7)
    assert len(signed) == len(unsigned) == 256
    assert bool((signed.diff() > 0).all()) and bool((unsigned.diff() > 0).all())
    assert torch.equal(signed[:127], -signed[128:255].flip(0)) and signed[127] == 0 and signed[255] == 1
    # The smallest: the middle of a decade's only part (signed), of its lower half (unsigned); the largest but 1.
    torch.testing.assert_close(signed[[128, 129, 254]], torch.tensor([0.55e-6, 3.25e-6, 1.0 - 0.45 / 64]))
    torch.testing.assert_close(unsigned[[1, 2, 254]], torch.tensor([0.325e-6, 0.775e-6, 1.0 - 0.45 / 128]))
    positive = [0.0, 0.0055, 0.0325, 0.0775, 0.2125, 0.4375, 0.6625, 0.8875, 1.0]
    small = storing.dynamic_book(True, 4, 3)
    torch.testing.assert_close(small, torch.tensor([-x for x in positive[-2:0:-1]] + positive))


def test_nearest_point_of_a_book(storing: ModuleType) -> None:
    book = torch.tensor([-0.5, 0.0, 0.25, 1.0])
    x = torch.tensor([[8.0, 1.01, 0.99, -2.01, -1.99, -8.0, 5.01, 4.99], [0.0] * 8])
    expected = torch.tensor([[8.0, 2.0, 0.0, -4.0, 0.0, -4.0, 8.0, 2.0], [0.0] * 8])
    assert torch.equal(storing.through_book(x, book, 8), expected)


def test_errors_of_moments(storing: ModuleType) -> None:
    config = storing.TrainConfig(beta1=0.5, beta2=0.75, eps=1e-8)
    true = [(torch.tensor([3.0, 4.0]), torch.tensor([4.0, 0.0])), (torch.tensor([0.0]), torch.tensor([1.0]))]
    kept = [(torch.tensor([3.0, 4.5]), torch.tensor([9.0, 0.0])), (torch.tensor([0.0]), torch.tensor([1.0]))]
    found = storing.errors(true, kept, config, 1)
    assert found.m == pytest.approx(0.1)  # 0.5 over 5
    assert found.v == pytest.approx(5 / 17**0.5)
    assert found.root == pytest.approx((0.5**2 / 2) ** 0.5)  # of the two that are not zero
    # m / 0.5 / (sqrt(v / 0.25) + eps): 1.5 and 8e8 against 1.0 and 9e8
    assert found.update == pytest.approx(1 / 8, rel=1e-6)


def test_ours_are_those_of_the_optimizer(storing: ModuleType) -> None:
    """A matrix that lives in a format here has the moments that it has in an optimizer, bit for bit."""
    import mo_fused
    from mo_fused import masters, quantised

    config = storing.TrainConfig(beta2=0.999)
    for state_dtype in ("int8", "int4"):
        p = torch.nn.Parameter(torch.zeros(64, 64))
        optimizer = mo_fused.AdamW([p], betas=(0.9, 0.999), state_dtype=state_dtype, seed=7)
        moments = (torch.zeros(64, 64), torch.zeros(64, 64))
        for step in range(1, 4):
            p.grad = torch.randn(64, 64, generator=torch.Generator().manual_seed(step))
            optimizer.step()
            key = masters.step_key(masters.stream(7, 0), step, quantised.STATE_SLOT)
            moments = storing.ours(state_dtype).store(storing.updated(moments, p.grad, config), key)
        for slot, mine in zip(("exp_avg", "exp_avg_sq"), moments, strict=True):
            code = quantised.code_of(slot, state_dtype)
            kept = quantised.load(optimizer.state[p], slot, code, p.shape)
            # A sum that is rounded otherwise than in the kernels may cross to the next code, now and then.
            assert float((kept == mine).float().mean()) > 0.99


def test_the_table_of_formats(storing: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "results.csv"
    storing.main(["--quick", "--steps", "2,4", "--threads", "1", "--output", str(file)])
    found = results.read(file)
    names = ["int8", "int8, nearest", "int4", "int4, nearest", "bitsandbytes, torchao 8 bits", "torchao 4 bits"]
    assert [r["contender"] for r in found] == names * 2
    later = {r["contender"]: r for r in found if r["case"].endswith("step 4")}
    assert later["torchao 4 bits"]["bytes"] == 2 * (0.5 + 4 / 128)
    for when in ("stored_once", "lived"):
        of = {name: record[when] for name, record in later.items()}
        # Steps of an eighth of a bit and of one, and what they make of m and of each sqrt(v).
        assert 0.001 < of["int8"]["m"] < 0.03 and 0.05 < of["int4"]["m"] < 0.4
        assert of["int8, nearest"]["v"] < of["int8"]["v"] < of["int4"]["v"] < of["torchao 4 bits"]["v"]
    assert later["int4"]["lived"]["m"] > later["int4"]["stored_once"]["m"]
    printed = capsys.readouterr().out
    assert f"{later['int8']['stored_once']['update']:.2%}" in printed and "after 4 steps in the format" in printed
