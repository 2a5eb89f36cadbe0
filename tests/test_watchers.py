"""Watchers find the fault that was planted, at its step, and nothing in what is healthy."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from watcher_loop import Loop, feed, set_gradients, three_layers
from watcher_loop import reads as reads

import mo_fused
from mo_fused.training.watchers import (
    DeadGradient,
    LossSpike,
    NonFinite,
    NormOutlier,
    Plateau,
    ScaleCollapse,
    Watcher,
)

# -- what all have -----------------------------------------------------------------------------------------------------


def test_actions() -> None:
    loop = Loop(torch.optim.SGD([nn.Parameter(torch.ones(1))]))
    log, warn, stop = (Watcher(action=action) for action in ("log", "warn", "stop"))
    called: list[Any] = []
    calling = Watcher(action=called.append)
    for watcher in (log, warn, stop, calling):
        watcher.attach(loop)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        log.emit(1, "a", value=3)
        calling.emit(2, "b")
        warn.emit(3, "c", quiet=True)
    with pytest.warns(RuntimeWarning, match="Watcher, step 4: d"):
        warn.emit(4, "d")
    assert loop.stopped == 0
    with pytest.warns(RuntimeWarning, match="step 5: e"):
        stop.emit(5, "e")
    assert loop.stopped == 1 and stop.stop_asked and not warn.stop_asked
    assert loop.events[0] == {"step": 1, "watcher": "Watcher", "message": "a", "value": 3}
    assert [event["step"] for event in loop.events] == [1, 2, 3, 4, 5]
    assert [event["step"] for event in called] == [2] and list(log.events) == loop.events[:1]


def test_without_a_monitor(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="mo_fused.training"):
        Watcher(action="log").emit(7, "seen")
    assert caplog.messages == ["Watcher, step 7: seen"]
    stop = Watcher(action="stop")
    with pytest.warns(RuntimeWarning):
        stop.emit(8, "over")
    assert stop.stop_asked


@pytest.mark.parametrize(
    "build",
    [
        lambda: Watcher(action="mail"),
        lambda: LossSpike(1.0),
        lambda: LossSpike(window=1),
        lambda: DeadGradient(0),
        lambda: NormOutlier(0),
        lambda: NormOutlier(window=True),
        lambda: Plateau(min_improvement=0.0),
        lambda: ScaleCollapse(halvings=0),
        lambda: ScaleCollapse(floor=math.inf),
    ],
)
def test_bad_options(build: Any) -> None:
    with pytest.raises(ValueError, match=r"expected .*; found .*; give"):
        build()


# -- loss spikes -------------------------------------------------------------------------------------------------------


def test_loss_spike_needs_a_full_window_and_a_factor() -> None:
    assert feed(LossSpike(action="log"), "loss", [1.0] * 99 + [50.0]) == []
    assert feed(LossSpike(action="log"), "loss", [1.0] * 100 + [2.0, 2.5]) == [
        102
    ]  # 2.0 is not above, the mean is 1.01
    spike = LossSpike(3.0, window=4, action="log")
    assert feed(spike, "loss", [1.0, 1.0, 1.0, 1.0, 2.9, 4.6, 1.0]) == [6]  # against 3 * (3 + 2.9) / 4 = 4.425
    (event,) = spike.events
    assert event["mean"] == pytest.approx(1.475) and event["ratio"] == pytest.approx(4.6 / 1.475)


def test_loss_spike_leaves_out_what_is_no_loss() -> None:
    spike = LossSpike(window=4, action="log")
    values = [1.0, 1.0, math.nan, 1.0, math.inf, 1.0]
    for step, loss in enumerate(values, 1):
        spike.on_record({"step": step, "loss": loss})
    spike.on_record({"step": 7, "loss": None})
    spike.on_record({"step": 8, "loss": 1.9, "skipped": True})  # does not enter the mean
    spike.on_record({"step": 9, "loss": 2.1})
    spike.on_record({"step": 10, "loss": None, "loss_nonfinite": True})
    assert [event["step"] for event in spike.events] == [9]
    negative = LossSpike(window=2, action="log")
    assert feed(negative, "loss", [-1.0, -1.0, 5.0]) == []


def test_loss_spike_tells_samples_and_parameters() -> None:
    model = three_layers()
    optimizer = mo_fused.AdamW(model.named_parameters(), lr=0.25, stats=True, max_grad_norm=1.0)
    spike = LossSpike(window=5, samples=2)
    loop = Loop(optimizer, spike)
    norms = {}
    for step in range(1, 12):
        set_gradients(model, 0.1 * step)
        optimizer.step()
        assert optimizer.last_step is not None
        norms[step] = optimizer.last_step.per_param()["1.weight"].grad_norm
        losses = torch.tensor([1.0, 9.0 if step == 8 else 1.0, 1.0, 7.0 if step == 8 else 1.0])
        info = {"sample_losses": losses, "sample_ids": [f"s{step}-{i}" for i in range(4)]}
        if step == 9:  # a step later the spike is read
            with pytest.warns(RuntimeWarning, match=r"step 8: loss 4\.5 is 4\.50 times .* s8-1 \(9\), s8-3 \(7\)"):
                loop.step(losses.mean(), info)
        else:
            loop.step(losses.mean(), info)
    (event,) = loop.events
    assert (event["step"], event["lr"], event["worst_samples"]) == (8, 0.25, ["s8-1", "s8-3"])
    assert event["worst_losses"] == [9.0, 7.0]
    assert event["parameters"]["1.weight"]["grad_norm"] == norms[8] == pytest.approx(0.8 * 8)
    assert list(event["parameters"]) == [name for name, _ in model.named_parameters()]
    assert event["grad_norm"] == pytest.approx(0.8 * math.sqrt(sum(p.numel() for p in model.parameters())))


def test_loss_spike_three_steps_late_and_too_late() -> None:
    for late, known in ((3, True), (4, False)):
        model = three_layers()
        optimizer = mo_fused.SGD(model.named_parameters(), lr=0.1, stats=True)
        spike = LossSpike(window=2, action="log")
        loop = Loop(optimizer, spike, late=late)
        for step in range(1, 12):
            set_gradients(model, float(step))
            optimizer.step()
            loop.step(5.0 if step == 5 else 1.0, {"sample_losses": torch.tensor([math.nan, 1.0])})
        (event,) = spike.events
        assert ("parameters" in event) is known and event["worst_samples"][0] == 0  # NaN is the worst
        if known:
            assert event["parameters"]["0.bias"]["grad_amax"] == 5.0


def test_consecutive_spikes_warn_once() -> None:
    spike = LossSpike(window=3)
    with pytest.warns(RuntimeWarning) as caught:
        assert feed(spike, "loss", [1, 1, 1, 9, 99, 999, 1, 1, 1, 9]) == [4, 5, 6, 10]
    assert [str(one.message).split(":")[0] for one in caught] == ["LossSpike, step 4", "LossSpike, step 10"]


def test_no_spike_in_a_healthy_loss() -> None:
    """A falling loss with noise of 10 %: no finding in 20 000 steps."""
    noise = np.exp(0.1 * np.random.default_rng(0).standard_normal(20_000))
    assert feed(LossSpike(action="log"), "loss", (1.5 + 4.0 * np.exp(-np.arange(20_000) / 500)) * noise) == []


# -- non-finite values -------------------------------------------------------------------------------------------------


def test_nonfinite_names_the_first_parameter() -> None:
    model = three_layers()
    optimizer = mo_fused.AdamW(model.named_parameters(), skip_nonfinite=True)
    loop = Loop(optimizer, NonFinite())
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="NonFinite")  # not those of an interpreter
        for step in range(1, 6):
            set_gradients(model)
            if step == 4:
                assert model[1].weight.grad is not None and model[2].bias.grad is not None
                model[1].weight.grad[0, :3] = math.nan
                model[2].bias.grad[1] = math.inf
            optimizer.step()
            loop.step()
            if step == 4:
                break
        with pytest.warns(RuntimeWarning, match=r"step 4: 3 elements of the gradient of 1\.weight are not finite; "):
            loop.flush()
    (event,) = loop.events
    assert event["parameter"] == "1.weight" and event["nonfinite"] == 3 and event["skipped"] is True
    assert (event["nonfinite_total"], event["nonfinite_parameters"]) == (4, 2)


def test_nonfinite_names_by_the_model_or_by_position() -> None:
    for given, name in ((True, "2.weight"), (False, "parameter 4 (group 0)")):
        model = three_layers()
        optimizer = mo_fused.SGD(model.parameters(), lr=0.1, stats=True)
        loop = Loop(optimizer, NonFinite(action="log"), model=model if given else None)
        set_gradients(model)
        assert model[2].weight.grad is not None
        model[2].weight.grad[0, 0] = -math.inf
        optimizer.step()
        loop.step(math.nan)
        loop.flush()
        (event,) = loop.events
        assert event["parameter"] == name and event["message"].startswith("the loss is nan; 1 elements")


def test_nonfinite_reports_a_run_of_them_once_and_no_other_skip() -> None:
    watcher = NonFinite(action="log")
    assert feed(watcher, "loss", [1.0, math.nan, math.nan, 1.0, math.inf]) == [2, 5]
    watcher.on_record({"step": 6, "loss": 1.0, "grad_norm": 3.0})
    watcher.on_record({"step": 7, "loss": 1.0, "grad_norm": 3.0, "skipped": True})  # by an outlier's gate
    assert len(watcher.events) == 2
    watcher.on_record({"step": 8, "loss": 1.0, "grad_norm": None, "grad_norm_nonfinite": True})
    assert watcher.events[-1]["step"] == 8 and "which parameter's" in watcher.events[-1]["message"]


def test_overflow_of_a_scaled_gradient_is_no_alarm() -> None:
    watcher = NonFinite()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        watcher.on_record({"step": 1, "loss": 1.0, "grad_norm": math.inf, "skipped": True, "loss_scale": 65536.0})
    assert watcher.events[0]["overflow"] is True
    watcher.on_record({"step": 2, "loss": 1.0, "grad_norm": 1.0, "skipped": False, "loss_scale": 1.0})
    with pytest.warns(RuntimeWarning):  # nothing is left to scale down
        watcher.on_record({"step": 3, "loss": 1.0, "grad_norm": math.inf, "skipped": True, "loss_scale": 1.0})


# -- outlying norms ----------------------------------------------------------------------------------------------------


def test_norm_outlier_against_median_and_mad() -> None:
    rng = np.random.default_rng(1)
    norms = np.exp(0.2 * rng.standard_normal(300))
    norms[250] = 20.0
    watcher = NormOutlier(action="log")
    assert feed(watcher, "grad_norm", norms) == [251]
    (event,) = watcher.events
    logs = np.log(norms[150:250])
    spread = 1.4826 * np.median(np.abs(logs - np.median(logs)))
    assert event["median"] == pytest.approx(np.median(norms[150:250]), rel=1e-2)
    assert event["limit"] == pytest.approx(np.exp(np.median(logs) + 6 * spread), rel=1e-9)
    assert event["deviations"] == pytest.approx((math.log(20.0) - np.median(logs)) / spread)


def test_norm_outlier_with_constant_norms_and_a_lasting_change() -> None:
    limit = math.exp(6 * 0.02)
    assert feed(NormOutlier(action="log"), "grad_norm", [1.0] * 100 + [limit * 0.999, limit * 1.001]) == [102]
    steps = feed(NormOutlier(action="log"), "grad_norm", [1.0] * 100 + [3.0] * 100)
    assert steps == list(range(101, 151))  # half of a window later it is usual
    strange = [0.0, math.inf, math.nan] * 100
    assert feed(NormOutlier(action="log"), "grad_norm", strange) == []


def test_rate_of_false_alarms_of_norm_outlier() -> None:
    """Log-normal norms with a spread of 0.3, falling by a half: no finding in 10 000 steps."""
    noise = np.exp(0.3 * np.random.default_rng(2).standard_normal(10_000))
    assert feed(NormOutlier(action="log"), "grad_norm", noise * (1 + np.exp(-np.arange(10_000) / 1000))) == []


# -- plateaus and loss scales ------------------------------------------------------------------------------------------


def test_plateau() -> None:
    rng = np.random.default_rng(3)
    steps = np.arange(6000)
    noise = np.exp(0.1 * rng.standard_normal(6000))
    falling = 4.0 * (steps + 100.0) ** -0.2
    assert feed(Plateau(500, 0.01, action="log"), "loss", falling * noise) == []
    stuck = np.maximum(falling, falling[2000])
    found = feed(Plateau(500, 0.01, action="log"), "loss", stuck * noise)
    # The halves lie within the flat part at 3000, and a finding is followed by none for a window.
    assert 2700 <= found[0] <= 3500 and len(found) >= 4 and min(np.diff(found)) >= 500
    # Noise of 20 % hides an improvement of 2 % in halves of 50: it is no finding.
    slow = 0.98 ** (steps / 50) * np.exp(0.2 * rng.standard_normal(6000))
    assert len(feed(Plateau(50, 1e-4, action="log"), "loss", slow)) <= 10  # of 1181 looks
    short = Plateau(5, 0.001, key="val_metric", higher_is_better=True, action="log")
    rising = [0.5 + 0.01 * i for i in range(10)]
    assert feed(short, "val_metric", rising) == [] and feed(short, "val_metric", [0.6] * 10) == [10]
    assert short.events[-1]["improvement"] == pytest.approx(0.0, abs=1e-12)


def test_scale_collapse() -> None:
    settling = [2.0**16] * 3 + [2.0**k for k in range(15, 8, -1)] + [2.0**9] * 2000 + [2.0**10] * 50 + [2.0**9] * 50
    assert feed(ScaleCollapse(action="log"), "loss_scale", settling) == []
    falling = [2.0**16] * 50 + [2.0 ** (16 - k // 10) for k in range(150)]
    watcher = ScaleCollapse(action="log")
    assert feed(watcher, "loss_scale", falling) == [131]  # 2**8, after 8 halvings, and not again on the way down
    assert watcher.events[0]["halvings"] == 8.0 and watcher.events[0]["highest"] == 2.0**16
    slow = [2.0 ** (3 - k // 300) for k in range(1500)]  # too slow for the first rule; below 1 from step 1201
    assert feed(ScaleCollapse(action="log"), "loss_scale", slow) == [1201]
    low = ScaleCollapse(action="log")
    assert feed(low, "loss_scale", [1, 0.5, 0.25, 0.5, 2, 0.5]) == [2, 6]
    again = ScaleCollapse(3, 10, action="log")
    assert feed(again, "loss_scale", [8, 4, 2, 1, 1, 2, 4, 8, 4, 2, 1]) == [4, 11]


# -- what a step costs -------------------------------------------------------------------------------------------------


def test_no_step_reads_a_tensor(reads: list[str]) -> None:
    model = three_layers()
    optimizer = mo_fused.AdamW(model.named_parameters(), stats=True, max_grad_norm=1.0)
    watchers = [DeadGradient(100), LossSpike(), NonFinite(), NormOutlier(), Plateau(window=20), ScaleCollapse()]
    loop = Loop(optimizer, *watchers)
    info = {"sample_losses": torch.ones(4), "sample_ids": torch.arange(4)}
    counts = []
    for step in range(1, 101):
        set_gradients(model)
        optimizer.step()
        reads.clear()
        for watcher in watchers:
            watcher.on_step(loop, torch.ones(()), {"step": step, **info})
        for watcher in watchers:
            loss = 2.0 - 0.01 * step
            watcher.on_record({"step": step, "loss": loss, "grad_norm": 1.0, "lr": 0.1, "loss_scale": 4.0})
        counts.append(len(reads))
    assert not loop.events
    # What DeadGradient has counted is copied in every tenth step; that copy on the host is read in the next.
    assert {step for step, count in enumerate(counts, 1) if count} == {*range(11, 101, 10)}
