"""torch.compile around a training step: the graph breaks at the optimizer, once, and nothing is compiled again."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from cases import noise
from torch import Tensor

import mo_fused

pytestmark = pytest.mark.cpu_only(reason="the compiler and what surrounds the step are the same for every backend")

STEPS = 6
BATCHES = [noise((16, 8), 50 + i) for i in range(STEPS)]
Loop = Callable[[Tensor], Tensor]

# (name, options of both, a tensor as rate)
KINDS: list[tuple[str, dict[str, Any]]] = [
    ("AdamW", dict(lr=0.05)),
    ("AdamW", dict(lr=torch.tensor(0.05))),
    ("SGD", dict(lr=0.05, momentum=0.9)),
    ("Adafactor", dict(lr=0.05)),
]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch.compiler.set_stance("default")
    torch._dynamo.reset()


def model() -> torch.nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))


def frames() -> int:
    """How many functions the compiler has looked at."""
    return int(torch._dynamo.utils.counters["frames"]["total"])


def losses(net: torch.nn.Module, opt: Any, compile_step: Callable[[Loop], Loop], clip: Callable[..., Any]) -> Tensor:
    """Each step's loss, with a rate that a schedule changes; ours may not be compiled again after the second."""
    schedule = torch.optim.lr_scheduler.StepLR(opt, 1, 0.7)

    def train(x: Tensor) -> Tensor:
        opt.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        clip(net.parameters(), 0.5)
        opt.step()
        return loss.detach()

    step = compile_step(train)
    found = []
    for i, x in enumerate(BATCHES):
        if i == 2 and isinstance(opt, mo_fused.optim.FusedOptimizer):
            torch.compiler.set_stance("fail_on_recompile")
        found.append(float(step(x)))
        schedule.step()
    torch.compiler.set_stance("default")
    return torch.tensor(found)


def by_torch(name: str, options: dict[str, Any], compiled: bool = False) -> Tensor:
    """What torch's class gives in the same loop; not compiled unless that is the comparison."""
    net = model()
    opt = getattr(torch.optim, name)(
        net.parameters(), **{k: v.clone() if isinstance(v, Tensor) else v for k, v in options.items()}
    )
    wrap = (lambda f: torch.compile(f, backend="eager")) if compiled else (lambda f: f)
    return losses(net, opt, wrap, torch.nn.utils.clip_grad_norm_)


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: f"{k[0]}-{type(k[1]['lr']).__name__}")
def test_the_whole_step_is_compiled(kind: tuple[str, dict[str, Any]]) -> None:
    name, options = kind
    net = model()
    opt = getattr(mo_fused, name)(net.parameters(), **options, stats=True)
    before = frames()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"torch\.")
        found = losses(net, opt, lambda f: torch.compile(f, backend="eager"), mo_fused.clip_grad_norm_)
    assert frames() - before >= 2, "nothing was compiled"
    want = by_torch(name, {**options, "lr": 0.05})
    torch.testing.assert_close(found, want, rtol=2e-5, atol=1e-7)
    assert float(found[-1]) < 0.8 * float(found[0]), "nothing was trained"
    assert opt.last_step.grad_norm is not None and opt.explain()[0].backend == "cpu"


def test_it_agrees_with_torchs_optimizer_compiled() -> None:
    net = model()
    opt = mo_fused.AdamW(net.parameters(), lr=0.05)
    found = losses(net, opt, lambda f: torch.compile(f, backend="eager"), mo_fused.clip_grad_norm_)
    torch._dynamo.reset()
    torch.testing.assert_close(found, by_torch("AdamW", {"lr": 0.05}, compiled=True), rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_model_and_an_ordinary_step(backend: str) -> None:
    net = model()
    opt = mo_fused.AdamW(net.parameters(), lr=0.05, max_grad_norm=0.5)
    compiled = torch.compile(net, backend=backend, fullgraph=True)
    found = losses(compiled, opt, lambda f: f, lambda *_: None)  # type: ignore[arg-type]
    torch.testing.assert_close(found, by_torch("AdamW", {"lr": 0.05}), rtol=2e-5, atol=1e-7)


def test_a_compiled_step_alone_and_one_under_the_patch() -> None:
    with mo_fused.patch():
        net = model()
        opt = torch.optim.AdamW(net.parameters(), lr=0.05, fused=True)
        found = losses(net, opt, lambda f: torch.compile(f, backend="eager"), torch.nn.utils.clip_grad_norm_)
    torch.testing.assert_close(found, by_torch("AdamW", {"lr": 0.05}), rtol=2e-5, atol=1e-7)
    p = torch.nn.Parameter(torch.ones(3))
    p.grad = torch.tensor([1.0, -1.0, 0.0])
    sgd = mo_fused.SGD([p], lr=0.25)
    step = torch.compile(sgd.step, backend="eager")
    for _ in range(2):
        step()
    assert p.tolist() == [0.5, 1.5, 1.0]


def test_what_a_step_tells_is_read_inside() -> None:
    net = model()
    opt = mo_fused.AdamW(net.parameters(), lr=0.05, max_grad_norm=0.1)

    def train(x: Tensor) -> Tensor:
        net(x).square().mean().backward()
        opt.step()
        health = mo_fused.grad_stats(net.parameters())
        told = opt.last_step.grad_norm * 1.0
        opt.zero_grad()
        return torch.stack([told.double(), health.total_norm])

    compiled = torch.compile(train, backend="eager")
    for i, x in enumerate(BATCHES[:4]):
        if i == 2:
            torch.compiler.set_stance("fail_on_recompile")
        told, measured = compiled(x).tolist()
        assert told == pytest.approx(measured, rel=1e-6) and told > 0.01


def test_a_graph_without_breaks_is_refused_by_the_compiler() -> None:
    p = torch.nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    opt = mo_fused.SGD([p], lr=0.25)

    def step() -> None:
        opt.step()

    with pytest.raises(torch._dynamo.exc.Unsupported, match="FusedOptimizer.step"):
        torch.compile(step, backend="eager", fullgraph=True)()
    assert p.tolist() == [1.0, 1.0, 1.0]
