"""What a child process runs: in a module of its own, because a spawned interpreter has to import it by name."""

from __future__ import annotations

from typing import Any

import torch
from cases import ADAMW, assert_backend, drive, gradients, parameters, weights
from torch.nn import Parameter

from mo_fused import team

# Work for three threads, where one is woken for as little as here; in tensors small enough that torch's own copies and
# comparisons stay on one thread: its thread pool does not survive a fork, ours must.
SHAPES = [*[(30_000,)] * 9, (7,), (120, 200)]


def teams_as_asked() -> None:
    """As the fixture of this name, for the rest of the process."""
    team.allowed_cores = lambda: 64
    team.ELEMENTS_PER_THREAD = 1 << 14


def trained(steps: int) -> tuple[Any, list[Parameter]]:
    """An optimizer and its parameters after this many steps; the same numbers in every process."""
    params = parameters(weights(SHAPES))
    opt = ADAMW.ours(params, backend="cpu", max_grad_norm=1.0)
    drive(opt, params, gradients(SHAPES, steps))
    assert_backend(opt, "cpu")
    return opt, params


def put_trained(queue: Any) -> None:
    """Trains five steps on three threads and reports the parameters as bytes."""
    torch.set_num_threads(3)
    teams_as_asked()
    _, params = trained(5)
    queue.put(b"".join(p.detach().numpy().tobytes() for p in params))


def put_continued(queue: Any, opt: Any) -> None:
    """Three more steps of an optimizer that another process has begun, and what became of its parameters."""
    torch.set_num_threads(3)
    params = opt.param_groups[0]["params"]
    drive(opt, params, gradients(SHAPES, 5)[2:])
    queue.put((b"".join(p.detach().numpy().tobytes() for p in params), float(opt.state[params[0]]["step"])))
