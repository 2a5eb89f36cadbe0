"""Monitor: what a record holds, that nothing waits, detailed records, histograms, watchers, a trainer's monitor."""

from __future__ import annotations

import gc
import math
import time
import warnings
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from trainer_cases import class_loss, falling, model_of, padded_batches

import mo_fused
from mo_fused.host_copy import HostCopy
from mo_fused.training.errors import InputError
from mo_fused.training.histograms import EDGES, magnitude_counts
from mo_fused.training.monitor import Monitor
from mo_fused.training.record import RECORD
from mo_fused.training.sinks import Sink
from mo_fused.training.trainer import Trainer
from mo_fused.training.watchers import NonFinite


class Kept(Sink):
    """Keeps everything in the order in which it comes."""

    def __init__(self) -> None:
        self.told: list[tuple[str, Any]] = []

    def write(self, record: dict[str, Any]) -> None:
        self.told.append(("write", record))

    def detail(self, record: dict[str, Any]) -> None:
        self.told.append(("detail", record))

    def event(self, event: dict[str, Any]) -> None:
        self.told.append(("event", event))

    def flush(self) -> None:
        self.told.append(("flush", None))

    def close(self) -> None:
        self.told.append(("close", None))

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [value for what, value in self.told if what == kind]

    @property
    def records(self) -> list[dict[str, Any]]:
        return self.of("write")


class Finder:
    """A watcher that says something in every step, on the device's side and on the host's."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []
        self.closed = False

    def attach(self, monitor: Monitor) -> None:
        self.monitor = monitor

    def on_step(self, monitor: Monitor, loss: Tensor | float, batch_info: Mapping[str, Any]) -> None:
        assert monitor is self.monitor
        self.seen.append(("step", batch_info["step"]))
        monitor.emit({"step": batch_info["step"], "watcher": "Finder", "message": "now"})

    def on_record(self, record: Mapping[str, Any]) -> None:
        self.seen.append(("record", record["step"]))
        self.monitor.emit({"step": record["step"], "watcher": "Finder", "message": "later"})

    def close(self) -> None:
        self.closed = True


def gradients(model: nn.Module, seed: int = 0) -> Tensor:
    """Puts a gradient of random numbers on every parameter; returns a loss."""
    generator = torch.Generator().manual_seed(seed)
    for one in model.parameters():
        one.grad = torch.randn(one.shape, generator=generator)
    return torch.tensor(1.5 + seed)


def total_norm(tensors: Any) -> float:
    return math.sqrt(sum(float(one.double().square().sum()) for one in tensors))


def test_a_record_holds_what_the_step_measured() -> None:
    model, sink = model_of(), Kept()
    opt = mo_fused.AdamW(model.parameters(), lr=0.5, max_grad_norm=1.0, stats=True)
    with Monitor(opt, [sink]) as monitor:
        for step in range(3):
            loss = gradients(model, step)
            want = total_norm(one.grad for one in model.parameters())
            old = [one.detach().clone() for one in model.parameters()]
            opt.step()
            update = total_norm(new.detach() - was for new, was in zip(model.parameters(), old))
            size = total_norm(one.detach() for one in model.parameters())
            opt.zero_grad()
            opt.param_groups[0]["lr"] = 0.25  # as a schedule does
            monitor.step(loss, {"samples": 8, "lengths": [3, 5], "data_seconds": 0.5, "seconds": 2.0, "epoch": 4})
            assert len(sink.records) == step, "a record comes one step late"
        assert monitor.last is sink.records[-1]
    assert [record["step"] for record in sink.records] == [1, 2, 3]
    assert [record["loss"] for record in sink.records] == [1.5, 2.5, 3.5]
    assert [record["lr"] for record in sink.records] == [0.5, 0.25, 0.25], "the rate that the step was made with"
    last = sink.records[-1]
    assert list(last) == list(RECORD)
    assert last["grad_norm"] == pytest.approx(want, rel=1e-6)
    assert last["clip_coef"] == pytest.approx(1.0 / want, rel=1e-4)
    assert last["update_norm"] == pytest.approx(update, rel=1e-4)
    assert last["param_norm"] == pytest.approx(size, rel=1e-6)
    assert last["update_ratio"] == pytest.approx(update / size, rel=1e-4)
    assert (last["samples_per_second"], last["tokens_per_second"]) == pytest.approx((4.0, 4.0), rel=0.01)
    assert (last["mean_length"], last["epoch"], last["skipped"], last["skipped_steps"]) == (1.0, 4, False, 0)
    assert last["data_share"] == pytest.approx(0.25, rel=0.01)
    assert last["memory_host"] > 1e7
    unknown = [key for key, value in last.items() if value is None]
    assert unknown == ["lrs", "loss_scale", "memory_device", "val_loss", "val_metric"]
    assert [kind for kind, _ in sink.told] == ["write"] * 3 + ["close"]


@pytest.mark.parametrize(
    ("info", "length", "tokens"),
    [
        ({"samples": 4, "targets": 40}, 10.0, 80.0),
        ({"samples": 4, "targets": 4}, None, None),
        ({"samples": 4, "targets": 40, "tokens": 60}, 15.0, 120.0),
        ({"lengths": torch.tensor([1, 2, 9])}, 4.0, 24.0),
        ({"samples": 2, "lengths": np.array([7, 8])}, 7.5, 30.0),
        ({}, None, None),
    ],
)
def test_the_length_of_the_samples(info: dict[str, Any], length: float | None, tokens: float | None) -> None:
    sink = Kept()
    with Monitor(torch.optim.SGD(model_of().parameters(), lr=0.1), [sink]) as monitor:
        monitor.step(1.0, {**info, "seconds": 0.5})
    assert sink.records[0]["mean_length"] == length
    assert sink.records[0]["tokens_per_second"] == tokens


def test_groups_with_rates_of_their_own() -> None:
    model, sink = model_of(), Kept()
    first, *others = model.parameters()
    rate = torch.tensor(0.5)
    opt = torch.optim.AdamW([{"params": [first], "lr": rate}, {"params": others, "lr": 0.25}])
    with Monitor(opt, [sink]) as monitor:
        for _ in range(2):
            loss = gradients(model)
            opt.step()
            rate.mul_(0.5)  # a schedule over a tensor works in place
            monitor.step(loss)
    assert [record["lrs"] for record in sink.records] == [[0.5, 0.25], None]
    assert [record["lr"] for record in sink.records] == [0.5, 0.25]
    assert [record["skipped"] for record in sink.records] == [False, False]


def test_times_of_a_loop_of_ones_own() -> None:
    model, sink = model_of(), Kept()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def slow() -> Any:
        for batch in range(3):
            time.sleep(0.04)
            yield batch

    begun = time.perf_counter()
    with Monitor(opt, [sink]) as monitor:
        for batch in monitor.timed(slow()):
            if batch == 1:
                began = time.perf_counter() - begun
            time.sleep(0.04)
            opt.step()
            monitor.step(1.0)
        taken = time.perf_counter() - begun
    first, *others = sink.records
    assert first["step_seconds"] is None and first["data_share"] is None
    assert 0.16 <= sum(record["step_seconds"] for record in others) <= taken - began + 0.06
    assert all(0.0 < record["data_share"] <= 1.0 for record in others)
    assert sum(record["data_share"] * record["step_seconds"] for record in others) >= 0.08


def test_nothing_but_copies_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of these methods would wait for a device."""
    arrived: list[Tensor] = []
    read = HostCopy.read

    def watched(self: HostCopy) -> Tensor:
        arrived.append(read(self))
        return arrived[-1]

    def guarded(name: str) -> Any:
        original = getattr(Tensor, name)

        def call(self: Tensor, *args: Any, **options: Any) -> Any:
            assert any(self is one for one in arrived), f"Tensor.{name} of something that is not on the host yet"
            return original(self, *args, **options)

        return call

    model, sink = model_of(), Kept()
    opt = mo_fused.AdamW(model.parameters(), max_grad_norm=1.0, skip_nonfinite=True, stats=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    opt.param_groups[0]["params"][0].grad = torch.ones(16, 6)
    opt.step()  # what the optimizer itself reads to set itself up
    monitor = Monitor(opt, [sink], detail_every=1, histograms="*", model=model, scaler=scaler)
    monkeypatch.setattr(HostCopy, "read", watched)
    for step in range(3):
        loss = gradients(model, step)
        with monkeypatch.context() as patch:
            for name in ("item", "tolist", "__float__", "__bool__", "numpy"):
                patch.setattr(Tensor, name, guarded(name))
            opt.step()
            monitor.step(loss, {"lengths": torch.tensor([3, 4])})
    assert arrived and len(sink.records) == len(sink.of("detail")) == 2
    monitor.close()


def test_each_copy_is_read_in_a_later_step(monkeypatch: pytest.MonkeyPatch) -> None:
    step, made, late = [0], {}, []
    begin, read = HostCopy.__init__, HostCopy.read

    def counted(self: HostCopy, tensor: Tensor) -> None:
        made[id(self)] = (step[0], self)
        begin(self, tensor)

    def watched(self: HostCopy) -> Tensor:
        late.append(step[0] - made[id(self)][0])
        return read(self)

    monkeypatch.setattr(HostCopy, "__init__", counted)
    monkeypatch.setattr(HostCopy, "read", watched)
    model = model_of()
    opt = mo_fused.AdamW(model.parameters(), stats=True)
    monitor = Monitor(opt, [Kept()], detail_every=2, histograms="*")
    for number in range(1, 8):
        step[0] = number
        loss = gradients(model)
        opt.step()
        monitor.step(loss)
    assert len(late) > 6 and set(late) == {1}
    monitor.close()


@pytest.mark.parametrize("ours", [True, False])
def test_a_scaler_and_a_skipped_step(ours: bool) -> None:
    model, sink = model_of(), Kept()
    opt: Any = (mo_fused.AdamW if ours else torch.optim.AdamW)(model.parameters(), lr=0.1)
    scaler = (mo_fused.GradScaler if ours else torch.amp.GradScaler)("cpu", init_scale=8.0, growth_interval=2)
    with Monitor(opt, [sink], scaler=scaler) as monitor:
        for step in range(5):
            loss = gradients(model, step)
            scaler.scale(loss)
            if step in (1, 2):
                next(model.parameters()).grad[0] = math.inf
            scaler.step(opt)
            scaler.update()
            monitor.step(loss)
    assert [record["skipped"] for record in sink.records] == [False, True, True, False, False]
    assert [record["skipped_steps"] for record in sink.records] == [0, 1, 2, 2, 2]
    assert [record["loss_scale"] for record in sink.records] == [8.0, 8.0, 4.0, 2.0, 2.0]


def test_a_fused_optimizer_of_torchs_that_skips_by_itself() -> None:
    model, sink = model_of(), Kept()
    opt = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with Monitor(opt, [sink], scaler=scaler, detail_every=1) as monitor:
        for step in range(3):
            loss = gradients(model, step)
            want = [float(one.grad.norm()) / 8.0 for one in model.parameters()]
            scaler.scale(loss)
            if step == 1:
                next(model.parameters()).grad[0] = math.inf
            scaler.step(opt)
            scaler.update()
            if step == 1:
                want_scale = scaler.get_scale()
            monitor.step(loss)
    assert [record["skipped"] for record in sink.records] == [False, True, False]
    assert [record["loss_scale"] for record in sink.records] == [8.0, 8.0, want_scale] and want_scale == 4.0
    found = sink.of("detail")[2]["parameters"]
    assert [one["grad_norm"] for one in found.values()] == pytest.approx([2 * norm for norm in want], rel=1e-5)


@pytest.mark.parametrize("ours", [True, False])
def test_detailed_records_by_parameter(ours: bool) -> None:
    model, sink = model_of(), Kept()
    opt: Any = (mo_fused.SGD if ours else torch.optim.SGD)(
        model.parameters(), lr=0.5, **({"stats": True} if ours else {})
    )
    with Monitor(opt, [sink], detail_every=3, model=model) as monitor:
        for step in range(1, 8):
            loss = gradients(model, step)
            model[0].bias.grad.zero_()
            norms = {name: float(one.grad.norm()) for name, one in model.named_parameters()}
            opt.step()
            sizes = {name: float(one.detach().norm()) for name, one in model.named_parameters()}
            opt.zero_grad()
            if step == 3:
                wanted = norms, sizes
            if step == 4:
                monitor.request_detail()
            monitor.step(loss)
    details = sink.of("detail")
    assert [record["step"] for record in details] == [3, 5, 6]
    assert [value["step"] for _, value in sink.told[:-1]] == [1, 2, 3, 3, 4, 5, 5, 6, 6, 7]
    assert "histograms" not in details[0]
    found = details[0]["parameters"]
    assert list(found) == [name for name, _ in model.named_parameters()]
    for name, one in found.items():
        assert one["grad_norm"] == pytest.approx(wanted[0][name], rel=1e-5)
        assert one["param_norm"] == pytest.approx(wanted[1][name], rel=1e-5)
        assert one["zero_grad"] is (name == "0.bias")
        if ours:
            assert one["update_norm"] == pytest.approx(0.5 * wanted[0][name], rel=1e-5)
            assert one["nonfinite"] == 0 and "all_zero" not in one


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_magnitudes_are_counted_as_numpy_counts_them(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    values = (torch.randn(200, 50) * torch.exp2(torch.randint(-50, 20, (200, 50)).double())).to(dtype)
    values[0, :8] = torch.tensor([0.0, -0.0, 1.0, -1.0, 2.0**-40, -(2.0**16), 2.0**15, 1.5], dtype=dtype)
    want, _ = np.histogram(values.double().abs().numpy(), np.array([*EDGES[:-1], np.inf]))
    assert magnitude_counts(values).tolist() == want.tolist()
    assert want[0] > 100 and want[-1] > 100
    bad = torch.tensor([math.nan, math.inf, -math.inf, 3.0], dtype=dtype)
    assert magnitude_counts(bad)[-1] == 3 and magnitude_counts(bad).sum() == 4
    assert magnitude_counts(torch.empty(0)).sum() == 0


def test_histograms_of_gradient_and_update() -> None:
    model, sink = model_of(), Kept()
    opt = mo_fused.SGD(model.named_parameters(), lr=0.25)
    with Monitor(opt, [sink], detail_every=2, histograms=["0.*"]) as monitor:
        for step in range(3):
            loss = gradients(model, step)
            if step == 1:
                kept = {name: one.grad.clone() for name, one in model.named_parameters()}
                kept_old = {name: one.detach().clone() for name, one in model.named_parameters()}
            opt.step()
            if step == 1:
                updates = {name: one.detach() - kept_old[name] for name, one in model.named_parameters()}
            opt.zero_grad()
            monitor.step(loss)
    (detail,) = sink.of("detail")
    assert list(detail["histograms"]) == ["0.weight", "0.bias"]
    for name, one in detail["histograms"].items():
        assert one["grad"] == magnitude_counts(kept[name]).tolist()
        assert one["update"] == magnitude_counts(updates[name]).tolist()
        assert one["edges"] == list(EDGES) and len(one["edges"]) == len(one["grad"]) + 1
        # The update is the gradient times 2**-2: two bins further down, up to rounding.
        shifted = [*one["grad"][2:], 0, 0]
        assert sum(abs(a - b) for a, b in zip(shifted, one["update"])) <= 4


def test_a_scaled_gradient_is_counted_unscaled() -> None:
    model, sink = model_of(), Kept()
    opt = mo_fused.SGD(model.parameters(), lr=0.25)
    scaler = mo_fused.GradScaler("cpu", init_scale=1024.0)
    with Monitor(opt, [sink], detail_every=1, histograms="*", model=model, scaler=scaler) as monitor:
        loss = gradients(model)
        scaler.scale(loss)
        want = magnitude_counts(model[0].weight.grad / 1024.0).tolist()
        scaler.step(opt)
        scaler.update()
        monitor.step(loss)
    (detail,) = sink.of("detail")
    assert detail["histograms"]["0.weight"]["grad"] == want


def test_gradients_that_are_gone_before_the_step_have_no_histogram() -> None:
    model, sink = model_of(), Kept()
    opt = mo_fused.SGD(model.parameters(), lr=0.25, stats=True)
    with (
        mo_fused.gradient_release(model, opt),
        Monitor(opt, [sink], detail_every=1, histograms="*", model=model) as monitor,
    ):
        for _ in range(6):  # more than a buffer of statistics stays as it is
            loss = model(torch.ones(2, 6)).square().mean()
            loss.backward()
            opt.step()
            monitor.step(loss)
            want = opt.last_step.per_param()
    detail = sink.of("detail")[-1]
    assert "histograms" not in detail
    assert [one["update_norm"] for one in detail["parameters"].values()] == [one.update_norm for one in want.values()]


def test_what_per_param_says_later_is_of_that_step() -> None:
    model = model_of()
    opt = mo_fused.AdamW(model.parameters(), stats=True)
    gradients(model, 1)
    opt.step()
    assert opt.last_step is not None
    want, later = opt.last_step.per_param(), opt.last_step.per_param_later()
    for seed in range(2, 9):
        gradients(model, seed)
        opt.step()
    assert later() == want and opt.last_step.per_param() != want


def test_events_come_after_the_records_of_the_steps_before() -> None:
    model, sink, finder = model_of(), Kept(), Finder()
    opt = mo_fused.AdamW(model.parameters())
    monitor = Monitor(opt, [sink], [finder])
    for step in range(3):
        loss = gradients(model, step)
        opt.step()
        monitor.step(loss)
    monitor.close()
    assert finder.seen == [("step", 1), ("step", 2), ("record", 1), ("step", 3), ("record", 2), ("record", 3)]
    assert finder.closed
    order = [(kind, value["step"], value.get("message")) for kind, value in sink.told if value]
    assert order == [
        ("event", 1, "now"),
        ("write", 1, None),
        ("event", 2, "now"),
        ("event", 1, "later"),
        ("write", 2, None),
        ("event", 3, "now"),
        ("event", 2, "later"),
        ("write", 3, None),
        ("event", 3, "later"),
    ]


def test_a_sink_or_watcher_that_fails_warns_once_and_is_left_out() -> None:
    class Broken(Kept):
        def write(self, record: dict[str, Any]) -> None:
            super().write(record)
            raise OSError("no space left")

    class BrokenWatcher(Finder):
        def on_record(self, record: Mapping[str, Any]) -> None:
            raise KeyError("loss")

    model, sink, broken, watcher = model_of(), Kept(), Broken(), BrokenWatcher()
    opt = mo_fused.AdamW(model.parameters())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        monitor = Monitor(opt, [broken, sink, object()], [watcher])  # a sink without any method too
        for step in range(4):
            loss = gradients(model, step)
            opt.step()
            monitor.step(loss)
        monitor.flush()
        monitor.close()
    assert [str(one.message) for one in caught] == [
        "Broken.write failed and is left out from now on: OSError: no space left; training goes on",
        "BrokenWatcher.on_record failed and is left out from now on: KeyError: 'loss'; training goes on",
    ]
    assert [record["step"] for record in sink.records] == [1, 2, 3, 4]
    assert [kind for kind, _ in broken.told] == ["event", "write"], "the event of step 1, then its record"
    assert watcher.seen == [("step", 1), ("step", 2)]


def test_no_memory_for_details_ends_the_details_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_little(values: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("mo_fused.training.details.magnitude_counts", too_little)
    model, sink = model_of(), Kept()
    opt = mo_fused.AdamW(model.parameters())
    with Monitor(opt, [sink], detail_every=1, histograms="*") as monitor:
        with pytest.warns(RuntimeWarning, match="no detailed records from now on: OutOfMemoryError: CUDA"):
            loss = gradients(model)
            opt.step()
        monitor.step(loss)
        for _ in range(2):
            opt.step()
            monitor.step(loss)
    assert len(sink.records) == 3 and not sink.of("detail")


def test_stop_and_close() -> None:
    model, called = model_of(), []
    opt = mo_fused.AdamW(model.parameters())
    sink = Kept()
    monitor = Monitor(opt, [sink])
    monitor.on_stop.append(lambda: called.append(1))
    assert not monitor.stopped
    monitor.stop()
    assert monitor.stopped and called == [1]
    gradients(model)
    opt.step()
    monitor.step(2.0)
    monitor.flush()
    assert [kind for kind, _ in sink.told] == ["write", "flush"]
    monitor.close()
    monitor.close()
    monitor.step(3.0)
    monitor.flush()
    assert [kind for kind, _ in sink.told] == ["write", "flush", "close"]
    assert not opt._optimizer_step_pre_hooks and not opt._optimizer_step_post_hooks


@pytest.mark.parametrize("watched", [False, True])
def test_a_monitor_that_nobody_holds_writes_its_last_step(watched: bool) -> None:
    sink = Kept()

    def loop() -> None:
        model = model_of()
        opt = mo_fused.AdamW(model.parameters())
        monitor = Monitor(opt, [sink], [NonFinite()] if watched else [])
        for step in range(3):
            loss = gradients(model, step)
            opt.step()
            monitor.step(loss)

    loop()
    gc.collect()  # a watcher and its monitor hold each other
    assert [record["step"] for record in sink.records] == [1, 2, 3]
    assert sink.told[-1][0] == "close"


def test_the_optimizer_does_not_keep_a_monitor_alive() -> None:
    opt = mo_fused.AdamW(model_of().parameters())
    monitor = Monitor(opt)
    gone = weakref.ref(monitor.for_trial())
    gc.collect()
    assert gone() is None and len(opt._optimizer_step_pre_hooks) == 1
    monitor.close()


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"detail_every": -1}, ValueError, "detail_every to be a whole number, 0 or more; found -1"),
        ({"detail_every": 2.5}, ValueError, "detail_every to be a whole number"),
        ({"histograms": "0.wieght"}, InputError, "found '0.wieght', which matches none; near it are"),
    ],
)
def test_bad_options(options: dict[str, Any], error: type[Exception], words: str) -> None:
    model = model_of()
    opt = mo_fused.AdamW(model.parameters())
    with pytest.raises(error, match=words):
        Monitor(opt, model=model, **options)
    assert not opt._optimizer_step_pre_hooks


def test_bad_arguments() -> None:
    with pytest.raises(TypeError, match="expected a torch optimizer; found Sequential"):
        Monitor(model_of())  # type: ignore[arg-type]
    with (
        Monitor(mo_fused.AdamW(model_of().parameters())) as monitor,
        pytest.raises(TypeError, match=r"one element; found a tensor of shape \(2,\)"),
    ):
        monitor.step(torch.ones(2))


def test_in_a_trainer_and_its_trial() -> None:
    model, sink = model_of(), Kept()
    opt = mo_fused.AdamW(model.parameters(), lr=0.1, max_grad_norm=1.0, stats=True)
    batches = padded_batches([7, 20, 13, 9, 5], length=5)
    monitor = Monitor(opt, [sink], detail_every=2, model=model)
    trainer = Trainer(
        model,
        opt,
        class_loss,
        schedule=falling(opt),
        monitor=monitor,
        validate=lambda: {"val_loss": 3.0, "val_metric": 0.5},
        validate_every=2,
    )
    report = trainer.preflight(batches, steps=3)
    logging = next(one for one in report.findings if one.check == "logging")
    assert logging.level == "ok" and "Monitor took 3 of 3 steps" in logging.seen
    assert not sink.told, "a trial tells nobody"
    trainer.fit(batches, 5)
    monitor.close()
    assert [record["step"] for record in sink.records] == [1, 2, 3, 4, 5]
    assert [record["lr"] for record in sink.records] == pytest.approx([0.1 / n for n in range(1, 6)])
    assert [record["val_loss"] for record in sink.records] == [None, 3.0, None, 3.0, 3.0]
    assert [record["mean_length"] for record in sink.records] == [3.5, 5.0, 13 / 3, 4.5, 2.5]
    assert [record["step"] for record in sink.of("detail")] == [2, 4]
    for record in sink.records:
        assert record["param_norm"] > 0.0 and record["update_norm"] > 0.0 and 0.0 <= record["data_share"] <= 1.0


def test_a_watcher_stops_a_trainer() -> None:
    model, sink = model_of(), Kept()
    opt = mo_fused.AdamW(model.parameters(), lr=0.1, stats=True)
    monitor = Monitor(opt, [sink], [NonFinite(action="stop")])
    calls: list[int] = []

    def bad_in_step_3(model: nn.Module, batch: Any) -> Tensor:
        calls.append(1)
        return class_loss(model, batch) * (math.inf if len(calls) == 3 else 1.0)

    trainer = Trainer(model, opt, bad_in_step_3, monitor=monitor)
    with pytest.warns(RuntimeWarning, match="NonFinite, step 3"):
        trainer.fit(padded_batches([7, 20, 13, 9, 5], length=5), 20)
    assert trainer.step == 4 and monitor.stopped, "step 3 is read with step 4"
    trainer.fit(padded_batches([7], length=5), 4)
    assert monitor.on_stop == [trainer.stop]
    monitor.close()


def test_a_trainers_scale_is_recorded() -> None:
    model, sink = model_of(), Kept()
    opt = mo_fused.AdamW(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    monitor = Monitor(opt, [sink])
    Trainer(model, opt, class_loss, precision="fp16", scaler=scaler, monitor=monitor).fit(
        padded_batches([7, 20], length=5), 2
    )
    monitor.close()
    assert [(record["loss_scale"], record["skipped"]) for record in sink.records] == [(256.0, False)] * 2


@pytest.mark.parametrize("options", [{"stats": True, "max_grad_norm": 0.5}, {"skip_nonfinite": True}, {}])
def test_numbers_on_the_host_are_those_of_the_fields(options: dict[str, Any]) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = mo_fused.AdamW([weight], lr=0.1, **options)
    weight.grad = torch.tensor([3.0, 4.0, 0.0])
    optimizer.step()
    last = optimizer.last_step
    assert last is not None
    numbers = last.on_host()
    assert numbers is not None and numbers["clip_coef"] == (pytest.approx(0.1) if "max_grad_norm" in options else 1.0)
    for name, value in numbers.items():
        field = getattr(last, name)
        assert value == (None if field is None else float(field)), name


def test_a_trainers_numbers_are_copied_once() -> None:
    """On the host the optimizer tells them as numbers: only the loss is a tensor on its way."""
    model = model_of()
    optimizer = mo_fused.AdamW(model.parameters(), lr=0.01, max_grad_norm=0.1, stats=True)
    monitor = Monitor(optimizer)
    Trainer(model, optimizer, class_loss, monitor=monitor).fit(padded_batches([4, 5]), 2)
    (waiting,) = monitor._waiting
    assert [list(values.read()) for values in waiting.values] == [["loss"]]
    monitor.flush()
    last = optimizer.last_step
    assert last is not None and monitor.last is not None
    assert monitor.last["grad_norm"] == float(last.grad_norm) and monitor.last["skipped"] is False
