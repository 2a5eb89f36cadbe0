"""Checkpoints for torch and from bitsandbytes and apex."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from cases import drive, gradients, noise, parameters, states, weights
from oracle import assert_close, assert_same_bits

import mo_fused
from mo_fused import masters

SHAPES = [(40, 24), (7,), (), (300,)]


def trained(kind: Any, dtype: torch.dtype, **options: Any) -> tuple[list[Any], Any]:
    params = parameters(weights(SHAPES, dtype))
    opt = kind(params, lr=1e-2, **options)
    drive(opt, params, gradients(SHAPES, 3, dtype))
    return params, opt


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("AdamW", {"master_weights": "split8", "state_dtype": "fp32"}),
        ("Adam", {"master_weights": "fp32", "amsgrad": True}),
        ("SGD", {"momentum": 0.9, "master_weights": "stochastic"}),
        ("SGD", {"master_weights": "kahan"}),
        ("Adafactor", {}),
    ],
)
def test_a_checkpoint_for_torch(kind: str, options: dict[str, Any]) -> None:
    params, opt = trained(getattr(mo_fused, kind), torch.bfloat16, **options)
    opt.param_groups[0]["clip"] = False
    found = mo_fused.to_torch_state_dict(opt)
    plain = {k: v for k, v in options.items() if k not in ("master_weights", "state_dtype")}
    theirs = getattr(torch.optim, kind)(params, lr=1e-2, **plain)
    drive(theirs, params, gradients(SHAPES, 1, torch.bfloat16))
    fresh = theirs.state_dict()
    assert [list(e) for e in found["state"].values()] == [list(e) for e in fresh["state"].values()]
    assert [set(g) for g in found["param_groups"]] == [set(g) for g in fresh["param_groups"]]
    theirs.load_state_dict(found)
    for key, entry in found["state"].items():
        for name, value in entry.items():
            if name != "step":
                assert_close(theirs.state[params[key]][name].float(), value.float().bfloat16().float(), 1, name)


def test_what_torch_has_no_place_for_is_refused() -> None:
    p = torch.nn.Parameter(torch.ones(3))
    for options in ({"relative_step": True}, {"beta1": 0.9}):
        opt = mo_fused.Adafactor([p], **options)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="expected groups in torch's form of Adafactor"):
            mo_fused.to_torch_state_dict(opt)
    with pytest.raises(ValueError, match="expected an optimizer of mo_fused"):
        mo_fused.to_torch_state_dict(torch.optim.AdamW([p]))  # type: ignore[arg-type]


def bitsandbytes_state(m: torch.Tensor, v: torch.Tensor, step: int, eight_bits: bool, wrapped: bool) -> dict[str, Any]:
    """What bitsandbytes' two-state optimizers keep (its code book is part of the state, so any will do)."""
    if not eight_bits:
        return {"step": step, "state1": m, "state2": v}
    out: dict[str, Any] = {"step": step}
    quantised: dict[str, Any] = {}
    for which, x in (("1", m), ("2", v)):
        book = torch.linspace(-1, 1, 255).sort().values if which == "1" else torch.linspace(0, 1, 256)
        flat = torch.nn.functional.pad(x.reshape(-1), (0, -x.numel() % 256)).reshape(-1, 256)
        scale = flat.abs().amax(1)
        codes = ((flat / scale.clamp_min(1e-30)[:, None])[..., None] - book).abs().argmin(-1).to(torch.uint8)
        quantised[f"state{which}"] = codes.reshape(-1)[: x.numel()].reshape(x.shape)
        quantised[f"qmap{which}"], quantised[f"absmax{which}"] = book, scale
    return {**out, "__bnb_optimizer_quant_state__": quantised} if wrapped else {**out, **quantised}


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("eight_bits", [False, True])
def test_from_bitsandbytes(eight_bits: bool, wrapped: bool) -> None:
    moments = [(noise(s, 1), noise(s, 2).square()) for s in SHAPES]
    state = {
        i: bitsandbytes_state(m, v, 7, eight_bits and m.numel() > 256, wrapped) for i, (m, v) in enumerate(moments)
    }
    group = {"lr": 3e-4, "betas": (0.8, 0.95, 0.0), "eps": 1e-6, "weight_decay": 0.2, "alpha": 0.0}
    params = parameters(weights(SHAPES))
    opt = mo_fused.AdamW(params, lr=1.0)
    mo_fused.from_state_dict(
        opt, {"state": state, "param_groups": [{**group, "params": [0, 1, 2, 3]}]}, source="bitsandbytes"
    )
    own = opt.param_groups[0]
    assert (own["lr"], own["betas"], own["eps"], own["weight_decay"]) == (3e-4, (0.8, 0.95), 1e-6, 0.2)
    for p, (m, v) in zip(params, moments, strict=True):
        entry = opt.state[p]
        assert float(entry["step"]) == 7 and entry["exp_avg"].dtype == torch.float32
        spacing = 1 / 254 if eight_bits and p.numel() > 256 else 0.0
        assert float((entry["exp_avg"] - m).abs().max()) <= spacing * float(m.abs().max()) * 1.01
        assert float((entry["exp_avg_sq"] - v).abs().max()) <= spacing * float(v.max()) * 1.01
    drive(opt, params, gradients(SHAPES, 1))
    assert all(float(opt.state[p]["step"]) == 8 for p in params)


def test_from_apex() -> None:
    params, reference = trained(torch.optim.AdamW, torch.float32, weight_decay=0.1)
    saved = reference.state_dict()
    groups = [{**g, "step": 3, "bias_correction": True} for g in saved["param_groups"]]
    state = {k: {n: v for n, v in e.items() if n != "step"} for k, e in saved["state"].items()}
    again = parameters([p.detach() for p in params])
    opt = mo_fused.AdamW(again)
    mo_fused.from_state_dict(opt, {"state": state, "param_groups": groups}, source="apex")
    grads = gradients(SHAPES, 2, seed=9)
    drive(reference, params, grads)
    drive(opt, again, grads)
    for p, q in zip(params, again, strict=True):
        assert_close(q.detach(), p.detach(), 3)


def test_what_is_refused_changes_nothing() -> None:
    params, opt = trained(mo_fused.AdamW, torch.float32)
    before = states(opt, params)
    good = {"params": [0, 1, 2, 3], "lr": 1.0, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0}
    for saved, source, text in (
        ({"state": {}, "param_groups": [good]}, "deepspeed", "expected source to be"),
        ({"state": {}, "param_groups": [{**good, "params": [0]}]}, "apex", "expected a checkpoint of 4 parameters"),
        ({"state": {0: {"exp_avg": 1}}, "param_groups": [good]}, "bitsandbytes", "without state1 and state2"),
        ({"state": {0: {"state1": 1}}, "param_groups": [good]}, "apex", "without exp_avg and exp_avg_sq"),
    ):
        with pytest.raises(ValueError, match=text):
            mo_fused.from_state_dict(opt, saved, source=source)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected opt to be mo_fused.AdamW or mo_fused.Adam"):
        mo_fused.from_state_dict(mo_fused.SGD(params), {"state": {}, "param_groups": [good]}, source="apex")
    assert_same_bits(states(opt, params), before, "state")


def test_loading_says_what_changes() -> None:
    params, opt = trained(mo_fused.AdamW, torch.bfloat16, master_weights="fp32", state_dtype="fp32")
    other = mo_fused.AdamW(params, master_weights="split", state_dtype="bf16")
    with pytest.warns(UserWarning, match=r"exp_avg from fp32 to bf16 \(4 parameters\).*master weights from fp32 to"):
        other.load_state_dict(opt.state_dict())
    plain = torch.optim.AdamW(params)
    drive(plain, params, gradients(SHAPES, 1, torch.bfloat16))
    with pytest.warns(UserWarning, match="master weights from none to split"):
        other.load_state_dict(plain.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same = mo_fused.AdamW(params, master_weights="fp32", state_dtype="fp32")
        same.load_state_dict(opt.state_dict())
        mo_fused.AdamW(params).load_state_dict(plain.state_dict())
    assert set(masters.ALL_SLOTS) & set(same.state[params[0]])
