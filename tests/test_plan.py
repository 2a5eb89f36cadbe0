"""``mo-fused plan``: known sums, models on the meta device, the activation estimate, and clear refusals."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import mo_fused
from mo_fused import cli, masters, plan, planned_model, quantised
from mo_fused.activations import activation_bytes
from mo_fused.optim.formats import Formats
from mo_fused.plan import PlanConfig, collect, report
from mo_fused.planned_model import dimensions, parse_count
from mo_fused.state import STATE_DTYPES
from mo_fused.training.errors import InputError

ROOT = Path(__file__).resolve().parent.parent
GB = 10**9


def memory(**settings: Any) -> dict[str, int]:
    found: dict[str, int] = collect(PlanConfig(**settings))["bytes"]
    return found


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes the body of a factory to a module in the current directory and returns the name to give as --model."""
    monkeypatch.chdir(tmp_path)
    name = f"planned_{tmp_path.name}"  # a module is imported once a process

    def write(body: str) -> str:
        lines = "".join(f"    {line}\n" for line in body.splitlines())
        (tmp_path / f"{name}.py").write_text(f"import torch\nfrom torch import nn\n\ndef build():\n{lines}")
        return f"{name}:build"

    return write


# --- counts


@pytest.mark.parametrize(
    ("text", "count"),
    [("3e9", 3 * GB), ("3B", 3 * GB), ("1.5b", 1_500_000_000), ("124M", 124_000_000), (" 7 k", 7000), ("1,024", 1024)],
)
def test_counts(text: str, count: int) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize("text", ["", "B", "three", "0", "-3", "1.5", "nan", "inf", "1e999999999", "2000T", "3BB"])
def test_what_is_no_count_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="--params: expected a whole number from 1 to 1e15.*; found "):
        parse_count(text)


def test_three_billion_in_bf16_with_fp32_moments() -> None:
    found = memory(params="3B", dtype="bf16", state_dtype="fp32")
    assert found == {
        "parameters": 6 * GB,
        "gradients": 6 * GB,
        "first moment": 12 * GB,
        "second moment": 12 * GB,
    }


def test_readme_shows_what_is_printed() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8").split("\n## mo-fused plan\n")[1]
    command, shown = text.split("```sh\n")[1].split("```")[0], text.split("```text\n")[1].split("```")[0]
    arguments = cli.build_parser().parse_args(shlex.split(command)[1:])
    settings = {name: getattr(arguments, name) for name in PlanConfig.__dataclass_fields__}
    assert report(PlanConfig(**settings)) + "\n" == shown


@pytest.mark.parametrize(
    ("settings", "moments"),
    [
        (dict(optimizer="adamw"), [2, 2]),
        (dict(optimizer="adam", dtype="fp32"), [4, 4]),
        (dict(optimizer="adamw", dtype="fp32", state_dtype="bf16"), [2, 2]),
        (dict(optimizer="sgd"), [2]),
        (dict(optimizer="sgd", state_dtype="int4"), [0.5 + 4 / 128]),
        (dict(optimizer="sgd-no-momentum", state_dtype="int8"), []),
        (dict(optimizer="adamw", state_dtype="int8"), [1 + 4 / 256, 1 + 4 / 256]),
        (dict(optimizer="adamw", state_dtype="int4"), [0.5 + 4 / 128, 0.5 + 4 / 128]),
        (dict(optimizer="adafactor"), [0]),
    ],
)
def test_moments_of_a_count(settings: dict[str, Any], moments: list[float]) -> None:
    found = memory(params="1e6", **settings)
    del found["parameters"], found["gradients"]
    assert list(found.values()) == [1e6 * item for item in moments]


@pytest.mark.parametrize(
    ("kind", "dtype", "item"),
    [("fp32", "bf16", 4), ("fp32", "fp16", 4), ("split", "bf16", 2), ("split8", "bf16", 1), ("kahan", "bf16", 2)]
    + [("kahan", "fp16", 2), ("stochastic", "bf16", 0), ("stochastic", "fp16", 0)],
)
def test_master_weights(kind: str, dtype: str, item: int) -> None:
    found = memory(params="1M", dtype=dtype, master_weights=kind, state_dtype="fp32")
    assert found[f"master weights ({kind})"] == item * 10**6


@pytest.mark.parametrize("kind", ["fp32", "split", "split8", "kahan", "stochastic"])
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_master_weights_of_other_dtypes_are_refused(kind: str, dtype: str) -> None:
    if dtype == "fp16" and not kind.startswith("split"):
        assert memory(params="1M", dtype=dtype, master_weights=kind)
        return
    with pytest.raises(InputError, match=rf"expected parameters in bf16.*; found {dtype} with .*{kind}; give --dtype"):
        collect(PlanConfig(params="1M", dtype=dtype, master_weights=kind))


def test_gradients_in_a_dtype_of_their_own() -> None:
    assert memory(params="1M", grad_dtype="fp32")["gradients"] == 4 * 10**6


def test_what_a_count_cannot_tell_is_said() -> None:
    quantised = collect(PlanConfig(params="1M", state_dtype="int8"))
    assert any("all parameters count as matrices" in note for note in quantised["notes"])
    factored = collect(PlanConfig(params="1M", optimizer="adafactor"))
    with pytest.raises(InputError, match="expected none with adafactor"):
        collect(PlanConfig(params="1M", optimizer="adafactor", master_weights="split"))
    assert any("less than 0.3 %" in note for note in factored["notes"])
    released = collect(PlanConfig(params="1M", release=True))
    assert released["bytes"]["gradients"] == 0
    assert any("gradient of the largest parameter" in line for line in released["not_counted"])


def test_modes_and_dtypes_are_those_of_the_optimizers() -> None:
    """The plan's tables against what the optimizers know of each mode: dtypes that it is for, bytes of its rest."""
    names = {"bf16": torch.bfloat16, "fp16": torch.float16}
    assert set(plan.MASTER_BYTES) == {"none", *masters.MODES}
    assert set(plan.MASTER_DTYPES) == set(masters.MODES)
    assert {"none", *STATE_DTYPES, *quantised.QUANTISED} == set(plan.STATE_DTYPES)
    for mode, allowed in plan.MASTER_DTYPES.items():
        assert set(allowed) == {"bf16"} if mode in masters.BF16_ONLY else {"bf16", "fp16"}
        for name in allowed:
            p = nn.Parameter(torch.ones(8, dtype=names[name]))
            entry: dict[str, Any] = {}
            Formats({"master_weights": mode}).ensure(entry, p)
            assert [*entry] == [*filter(None, [masters.SLOTS.get(mode)])]
            assert sum(rest.element_size() for rest in entry.values()) == plan.MASTER_BYTES[mode], mode


@pytest.mark.parametrize(
    ("settings", "said"),
    [({}, "adamw, state in the parameters' dtype"), (dict(state_dtype="int8"), "adamw, state in int8")]
    + [(dict(optimizer="sgd-no-momentum"), "sgd-no-momentum"), (dict(optimizer="adafactor"), "adafactor")],
)
def test_the_first_line_says_what_the_state_is_in(settings: dict[str, Any], said: str) -> None:
    text = report(PlanConfig(params="1M", **settings))
    assert text.splitlines()[0] == f"1,000,000 parameters in bf16; {said}"


# --- models


def test_a_model_is_built_without_memory(build: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """2 x 10^12 bytes of fp32: an attempt to allocate them would fail."""
    spec = build("print('built')\nreturn nn.Linear(10**6, 5 * 10**5, bias=False)")
    assert cli.main(["plan", "--model", spec, "--json"]) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert found["bytes"]["parameters"] == 2 * 10**12
    assert found["dtypes"] == ["fp32"]
    assert not any(gpu["fits"] for gpu in found["gpus"])
    assert printed.err == "built\n", "the factory's own output must not get into the JSON"


def test_tied_weights_count_once_and_buffers_apart(build: Any) -> None:
    spec = build(
        "m = nn.Module()\n"
        "m.a, m.b = nn.Embedding(100, 64), nn.Linear(64, 100, bias=False)\n"
        "m.b.weight = m.a.weight\n"
        "m.register_buffer('mask', torch.zeros(10))\n"
        "m.register_buffer('index', torch.zeros(10, dtype=torch.int64))\n"
        "return m"
    )
    assert memory(model=spec, dtype="bf16") == {
        "parameters": 12800,
        "gradients": 12800,
        "first moment": 12800,
        "second moment": 12800,
        "buffers": 10 * 2 + 10 * 8,
    }
    assert collect(PlanConfig(model=spec, dtype="bf16"))["bytes_per_parameter"] == 8


def test_frozen_parameters_have_no_state(build: Any) -> None:
    spec = build("m = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))\nm[0].requires_grad_(False)\nreturn m")
    found = memory(model=spec, master_weights="fp32", dtype="bf16")
    assert found["parameters"] == 2 * (72 + 36)
    assert found["gradients"] == found["first moment"] == 2 * 36
    assert found["master weights (fp32)"] == 4 * 36


def test_small_tensors_and_vectors_keep_fp32_state(build: Any) -> None:
    spec = build(
        "return nn.ParameterList([torch.empty(64, 64), torch.empty(63, 65), torch.empty(8192), torch.empty(2, 64, 32)])"
    )
    found = collect(PlanConfig(model=spec, dtype="bf16", state_dtype="int4"))
    expected = 4096 * (0.5 + 4 / 64) + 4096 * (0.5 + 4 / 128) + 4 * (63 * 65 + 8192)
    assert found["bytes"]["first moment"] == found["bytes"]["second moment"] == expected
    assert any(note.startswith("2 of 4 tensors keep fp32 state") for note in found["notes"])


def test_release_leaves_the_largest_gradient(build: Any) -> None:
    spec = build("return nn.ParameterList([torch.empty(100), torch.empty(300, dtype=torch.float64), torch.empty(500)])")
    assert memory(model=spec, release=True)["gradients"] == 2400
    assert memory(model=spec, release=True, dtype="bf16")["gradients"] == 1000


def test_a_model_keeps_its_dtypes(build: Any) -> None:
    spec = build(
        "return nn.ParameterList([torch.empty(10, dtype=torch.bfloat16), torch.empty(20), "
        "torch.empty(5, dtype=torch.complex64)])"
    )
    found = memory(model=spec, master_weights="split")
    assert found["parameters"] == found["first moment"] == 20 + 80 + 40
    assert found["master weights (split)"] == 20, "what is fp32 already has no master"
    assert memory(model=spec, state_dtype="fp32")["first moment"] == 4 * (10 + 20 + 2 * 5)
    with pytest.raises(InputError, match="found complex64, fp16 with"):
        collect(PlanConfig(model=spec, dtype="fp16", master_weights="split8"))


def test_mixed_halves_refuse_what_one_of_them_does_not_allow(build: Any) -> None:
    spec = build("return nn.ParameterList([torch.empty(9, dtype=d) for d in (torch.bfloat16, torch.float16)])")
    assert memory(model=spec, master_weights="kahan")["master weights (kahan)"] == 36
    with pytest.raises(InputError, match="expected parameters in bf16; found bf16, fp16"):
        collect(PlanConfig(model=spec, master_weights="split"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_is_what_the_optimizers_have(build: Any, dtype: torch.dtype) -> None:
    """The plan against real optimizers, of everything but the step counters."""
    body = "return nn.Sequential(nn.Conv2d(3, 8, 5), nn.Linear(30, 70), nn.LayerNorm(70))"
    spec = build(body)
    model = nn.Sequential(nn.Conv2d(3, 8, 5), nn.Linear(30, 70), nn.LayerNorm(70)).to(dtype)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    name = "fp32" if dtype == torch.float32 else "bf16"
    for optimizer in ("adamw", "adam", "sgd", "adafactor"):
        ours: Any = {
            "adamw": mo_fused.AdamW,
            "adam": mo_fused.Adam,
            "sgd": lambda params: mo_fused.SGD(params, momentum=0.9),
            "adafactor": mo_fused.Adafactor,
        }[optimizer](model.parameters())
        ours.step()
        state = [t for s in ours.state.values() for key, t in s.items() if key != "step" and torch.is_tensor(t)]
        found = memory(model=spec, optimizer=optimizer, dtype=name)
        planned = sum(found[moment] for moment in plan.MOMENTS[optimizer].values())
        assert planned == sum(t.numel() * t.element_size() for t in state) > 0, optimizer


@pytest.mark.parametrize("state_dtype", ["none", "fp32", "bf16", "int8", "int4"])
@pytest.mark.parametrize("kind", ["none", *masters.MODES])
def test_formats_are_what_the_optimizers_have(build: Any, kind: str, state_dtype: str) -> None:
    spec = build("return nn.Sequential(nn.Linear(30, 150), nn.Linear(96, 64), nn.LayerNorm(70))")
    model = nn.Sequential(nn.Linear(30, 150), nn.Linear(96, 64), nn.LayerNorm(70)).to(torch.bfloat16)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    settings = {
        "master_weights": None if kind == "none" else kind,
        "state_dtype": None if state_dtype == "none" else state_dtype,
    }
    for optimizer, ours in (
        ("adamw", mo_fused.AdamW(model.parameters(), **settings)),
        ("sgd", mo_fused.SGD(model.parameters(), momentum=0.9, **settings)),
    ):
        ours.step()
        state = [t for s in ours.state.values() for key, t in s.items() if key != "step"]
        found = memory(model=spec, optimizer=optimizer, dtype="bf16", master_weights=kind, state_dtype=state_dtype)
        planned = sum(size for name, size in found.items() if name not in ("parameters", "gradients"))
        assert planned == sum(t.numel() * t.element_size() for t in state) > 0, optimizer


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("raise ValueError('not\\ntoday')", "found ValueError: not today; name one"),
        ("raise SystemExit(3)", "found SystemExit: 3; name one"),
        ("return nn.Linear(2, 2, bias=torch.zeros(1).item())", "found RuntimeError: Tensor.item"),
        ("return [nn.Linear(2, 2)]", "to return a torch.nn.Module; found list; return the model"),
        ("return nn.LazyLinear(3)", "expected parameters of known shapes; found lazy ones"),
        ("return nn.ReLU()", "expected parameters to train; found none that requires a gradient"),
        ("return nn.Linear(2, 2).requires_grad_(False)", "expected parameters to train"),
    ],
)
def test_a_factory_that_makes_no_model(build: Any, capsys: pytest.CaptureFixture[str], body: str, said: str) -> None:
    assert cli.main(["plan", "--model", build(body)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("mo-fused plan: error: --model: expected ") and error.count("\n") == 1
    assert said in error


@pytest.mark.parametrize("spec", ["", "torch", ":build", "torch:", "no_such_module_here:build", "torch:no_such_name"])
def test_a_model_that_cannot_be_found(spec: str) -> None:
    with pytest.raises(InputError, match="^--model: expected .*; found .*; "):
        planned_model.load_model(spec)


# --- activations

GPT3 = dict(batch=1, length=2048, hidden=12288, layers=96, heads=96)


def test_activations_are_those_of_the_source() -> None:
    """s*b*h*(34 + 5*a*s/h) bytes a layer; 5*a*s/h is 80 for GPT-3, as the paper says."""
    sbh = 2048 * 12288
    assert activation_bytes(**GPT3, flash=False) == 96 * sbh * (34 + 80)
    assert activation_bytes(**GPT3) == 96 * sbh * 34
    assert activation_bytes(**GPT3, recompute=True) == 96 * 2 * sbh + 34 * sbh
    assert activation_bytes(**GPT3, flash=False, recompute=True) == 96 * 2 * sbh + 114 * sbh
    assert activation_bytes(**GPT3, item=4) == 96 * sbh * 66
    with pytest.raises(ValueError, match="expected heads"):
        activation_bytes(**{**GPT3, "heads": None}, flash=False)


def test_activations_join_the_sum() -> None:
    settings: dict[str, Any] = dict(params="175e9", **GPT3)
    found = collect(PlanConfig(**settings))
    assert found["bytes"]["activations"] == activation_bytes(**GPT3)
    assert found["total_bytes"] == 175 * GB * 8 + activation_bytes(**GPT3)
    assert found["bytes_per_parameter"] == 8
    text = report(PlanConfig(**settings))
    assert "Korthikanti et al. 2022, arXiv:2205.05198" in text and "without activations" not in text
    assert memory(**settings, dtype="fp32")["activations"] == activation_bytes(**GPT3, item=4)


@pytest.mark.parametrize(
    "config",
    [dict(n_embd=8, n_layer=3, n_head=2), SimpleNamespace(hidden_size=8, num_hidden_layers=3, num_attention_heads=2)],
)
def test_sizes_from_a_config(config: Any) -> None:
    model = nn.Linear(1, 1)
    model.config = config
    assert dimensions(model) == {"hidden": 8, "layers": 3, "heads": 2}


def test_sizes_from_attention_modules() -> None:
    model = nn.Transformer(d_model=16, nhead=4, num_encoder_layers=2, num_decoder_layers=3, batch_first=True)
    assert dimensions(model) == {"hidden": 16, "layers": 5, "heads": 4}, "a decoder layer has two attentions"
    both = nn.ModuleList([nn.MultiheadAttention(8, 2), nn.MultiheadAttention(16, 2)])
    assert dimensions(both) == {}, "two widths are no answer"


def test_options_win_over_the_model(build: Any) -> None:
    spec = build("return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, batch_first=True), 2)")
    taken = collect(PlanConfig(model=spec, batch=2, length=8, flash=False))
    assert taken["activation_sizes"] == {"batch": 2, "length": 8, "hidden": 16, "layers": 2, "heads": 4}
    assert any("(hidden, layers, heads from the model)" in note for note in taken["notes"])
    given = collect(PlanConfig(model=spec, batch=2, length=8, layers=5))
    assert given["activation_sizes"] == {"batch": 2, "length": 8, "hidden": 16, "layers": 5}
    assert any("(hidden from the model)" in note for note in given["notes"])


# --- GPUs


def test_a_gpu_fits_up_to_its_reserve() -> None:
    """At 8 bytes a parameter, what is left of 24 GB is 24 * 0.95 - 1 = 21.8 GB."""
    last, first_over = (collect(PlanConfig(params=str(n))) for n in (21_800_000_000 // 8, 21_800_000_000 // 8 + 1))
    assert last["gpus"][0] == {"name": "RTX 3090 24 GB", "usable_bytes": 21_800_000_000, "fits": True}
    assert not first_over["gpus"][0]["fits"]
    assert {gpu["name"]: gpu["fits"] for gpu in first_over["gpus"]}["RTX 5090 32 GB"]


def test_a_small_model_is_shown_in_megabytes() -> None:
    assert "parameters     2.00 MB\n" in report(PlanConfig(params="1M"))


# --- bad input: one clear error, exit status 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "--params: expected either --params or --model; found neither; give"),
        (["--params", "3B", "--model", "a:b"], "found both"),
        (["--params", "much"], "--params: expected a whole number"),
        (["--params", "3B", "--dtype", "int8"], "invalid choice: 'int8'"),
        (["--params", "3B", "--batch", "0", "--length", "8"], "--batch: expected a whole number from 1"),
        (["--params", "3B", "--hidden", "8"], "--hidden: expected --batch and --length with it; found --hidden;"),
        (["--params", "3B", "--recompute"], "--recompute: expected --batch and --length"),
        (["--params", "3B", "--no-flash", "--batch", "8"], "found --batch --no-flash;"),
        (["--params", "3B", "--batch", "8", "--length", "8"], "expected --hidden and --layers for activations;"),
        (
            ["--params", "3B", "--batch", "8", "--length", "8", "--hidden", "8", "--layers", "8", "--no-flash"],
            "--heads: expected --heads for activations; found none in the options; give them",
        ),
    ],
)
def test_bad_input(capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    try:
        status = cli.main(["plan", *arguments])
    except SystemExit as stop:
        status = int(stop.code or 0)
    assert status == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("mo-fused plan: error: ")
    assert said in error


@pytest.mark.parametrize("name", ["optimizer", "dtype", "grad_dtype", "state_dtype", "master_weights"])
def test_choices_hold_without_the_command_line(name: str) -> None:
    settings: dict[str, Any] = {name: "fp7"}
    with pytest.raises(InputError, match=f"--{name.replace('_', '-')}: expected one of .*; found 'fp7'; give"):
        PlanConfig(params="3B", **settings)
