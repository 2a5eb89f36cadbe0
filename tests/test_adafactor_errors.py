"""What Adafactor refuses, in whose words, and what it leaves alone then."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from adafactor_reference import MOMENTUM, TORCH
from cases import (
    Gradients,
    gradients,
    large,
    noise,
    parameters,
    weights,
)
from oracle import assert_close, wide
from torch.nn import Parameter

import mo_fused

SHAPES = [(), (7,), (5, 3), (3, 4, 5), large(130, 70)]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (dict(lr=-0.1), "Learning rate should be >= 0 but is: -0.1"),
        (dict(lr=torch.tensor([0.1, 0.2])), "Tensor lr must be 1-element"),
        (dict(beta2_decay=0.8), "beta2_decay should be <= 0 but is: 0.8"),
        (dict(eps=(-1.0, 1e-3)), "epsilon1 should be >= 0 but is: -1.0"),
        (dict(eps=(None, -1e-3)), "epsilon2 should be >= 0 but is: -0.001"),
        (dict(d=0.5), "Clipping threshold d should be >= 1 but is: 0.5"),
        (dict(weight_decay=-0.1), "weight_decay should be >= 0 but is: -0.1"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_constructor_errors_are_torchs(options: dict[str, Any], text: str) -> None:
    for make in (torch.optim.Adafactor, mo_fused.Adafactor):
        with pytest.raises(ValueError) as error:
            make([Parameter(torch.ones(2))], **options)
        assert str(error.value) == text


@pytest.mark.parametrize(
    ("options", "name"),
    [
        (dict(lr=None), "lr"),
        (dict(lr=None, relative_step=False), "lr"),
        (dict(warmup_init=True), "warmup_init"),
        (dict(relative_step="yes"), "relative_step"),
        (dict(scale_parameter=1), "scale_parameter"),
        (dict(transformers_form=None), "transformers_form"),
        (dict(beta1=1.0), "beta1"),
        (dict(beta1=-0.1), "beta1"),
        (dict(d=2.0, clip_threshold=3.0), "clip_threshold"),
        (dict(beta2_decay=-0.5, decay_rate=-0.6), "decay_rate"),
        (dict(state_dtype="fp16"), "state_dtype"),
        (dict(max_grad_norm=-1.0), "max_grad_norm"),
        (dict(stats=1), "stats"),
        (dict(amp="none"), "amp"),
        (dict(backend="nonsense"), "backend"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_bad_options_are_refused_by_name(options: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=f"expected {name} to be .*; found .*; "):
        mo_fused.Adafactor([Parameter(torch.ones(2))], **options)


def test_bad_groups_are_refused_and_change_nothing() -> None:
    params = parameters(weights(SHAPES))
    opt = TORCH.ours(params[:2])
    for options in (dict(lr=None), dict(warmup_init=True), dict(beta1=2.0), dict(stats=True), dict(relative_step="no")):
        with pytest.raises(ValueError, match="expected .*; found .*; "):
            opt.add_param_group({"params": [params[2]], **options})
        assert len(opt.param_groups) == 1
    opt.add_param_group({"params": [params[2]], "clip_threshold": 2.0, "decay_rate": -0.5, "beta1": 0.9})
    group = opt.param_groups[1]
    assert (group["d"], group["beta2_decay"], group["beta1"]) == (2.0, -0.5, 0.9)
    assert not {"clip_threshold", "decay_rate"} & set(group)


@pytest.mark.parametrize("what", ["complex", "sparse", "shape"])
def test_gradients_and_parameters_that_are_refused(what: str) -> None:
    """With torch's texts, before anything is changed: also not what was ready to step."""
    good = Parameter(torch.ones(3))
    bad = Parameter(torch.ones(4, 2, dtype=torch.complex64 if what == "complex" else torch.float32))
    opt = mo_fused.Adafactor([good, bad], max_grad_norm=1.0)
    good.grad, bad.grad = torch.ones(3), torch.ones_like(bad)
    text = {"complex": "Adafactor does not support complex parameters", "shape": "to have its parameter's shape"}.get(
        what, "Adafactor does not support sparse gradients"
    )
    if what == "sparse":
        bad.grad = torch.ones(4, 2).to_sparse(1)
    if what == "shape":
        bad.grad = None
        bad.data = torch.ones(2, 4)
        bad.grad = torch.ones(2, 4)
        bad.data = torch.ones(4, 2)
    with pytest.raises(RuntimeError, match=text):
        opt.step()
    assert torch.equal(good.detach(), torch.ones(3)) and not opt.state[good] and not opt.state[bad]


def test_what_kernels_do_not_take_is_stepped_by_the_reference() -> None:
    """Parameters that share memory, and lazily negated gradients: `torch` in explain(), the same formula."""
    rows: Gradients = gradients([(6, 5), (6, 5)], 2)
    buffer = noise((6, 5), 1)
    params = [Parameter(buffer), Parameter(buffer.view(6, 5)), Parameter(noise((5,), 2))]
    g = torch.complex(noise((5,), 3), noise((5,), 4)).conj().imag
    start, entries = [wide(p) for p in params], [{}, {}, {}]
    opt = MOMENTUM.ours(params)
    for row in rows:
        for i in (0, 1):
            (start[0],), (entries[i],) = MOMENTUM.exact([start[0].float()], [[row[i]]], states=[entries[i]])
        (start[2],), (entries[2],) = MOMENTUM.exact([start[2].float()], [[g.clone()]], states=[entries[2]])
        params[0].grad, params[1].grad, params[2].grad = row[0], row[1], g
        opt.step()
    assert [r.backend for r in opt.explain()] == ["torch"] * 3
    assert_close(params[0], start[0], 6)
    assert_close(params[2], start[2], 4)
