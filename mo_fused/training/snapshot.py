"""All that a trial run changes, kept beside it and put back afterwards."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from mo_fused.distributed import shards
from mo_fused.optim.base import FusedOptimizer
from mo_fused.training.errors import bad_input
from mo_fused.training.feed import Feed, is_stateful
from mo_fused.training.rng import kept_rng

if TYPE_CHECKING:
    from mo_fused.training.trainer import Trainer


@contextmanager
def kept_state(trainer: Trainer, *loaders: Iterable[Any]) -> Iterator[None]:
    """What happens to ``trainer`` inside leaves no trace, also when it raises.

    Put back are: parameters, buffers and gradients (the same tensors, at the same addresses), the modules' modes,
    the optimizer's state and groups, schedule, scaler, every attribute of the trainer, the places of ``loaders`` and
    of the trainer's own, and the random numbers of Python, NumPy and torch. The copy lies in the host's memory: it
    needs as much as model, gradients and optimizer state together.

    A loader keeps its place by its own ``state_dict``, else by its generators (those of loader, samplers and dataset).
    In the middle of an epoch the batches drawn so far are drawn once more, as after a resume. What a dataset or a
    loss function keeps to itself is out of reach.

    Raises:
        InputError: a loader is an iterator, which could not be iterated again.
    """
    for loader in loaders:
        if isinstance(loader, Iterator) and not is_stateful(loader):
            raise bad_input(
                "loader",
                expected="one that can be iterated again: a trial run must not use up the real one's batches",
                found=f"an iterator ({type(loader).__name__})",
                remedy="give a DataLoader, a list, or an object whose __iter__ begins an epoch",
            )
    attributes = dict(vars(trainer))
    with ExitStack() as stack:  # undone in the reverse order: random numbers last, since loaders draw some
        stack.enter_context(kept_rng())
        stack.callback(_put_attributes, trainer, attributes)
        # Reads what is put back above, so that a place behind a resume that has not gone on yet is kept too.
        stack.callback(_loaders_kept(trainer, loaders))
        stack.callback(_scaler_kept(trainer.precision.scaler))
        if trainer.schedule is not None:
            stack.callback(trainer.schedule.load_state_dict, copy.deepcopy(trainer.schedule.state_dict()))
        stack.callback(_optimizer_kept(trainer.optimizer))
        stack.callback(_tensors_kept(trainer.model, trainer.optimizer))
        yield


def _put_attributes(trainer: Trainer, attributes: dict[str, Any]) -> None:
    feed = trainer.__dict__.get("_feed")
    trainer.__dict__.clear()
    trainer.__dict__.update(attributes)
    if attributes["_feed"] is not None:
        trainer._feed = feed  # the one that has been put back


# --- tensors


def _on_host(tensor: Tensor) -> Tensor:
    local: Tensor = shards.local(tensor.detach())
    return local.to("cpu", copy=True)


@torch.no_grad()
def _put(tensor: Tensor, value: Tensor) -> None:
    shards.local(tensor.detach()).copy_(value)


def _tensors_kept(model: nn.Module, optimizer: Optimizer) -> Callable[[], None]:
    """Parameters (those of the optimizer too), their gradients, buffers, and whether modules are in training mode."""
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    parameters = list({id(one): one for one in [*model.parameters(), *held]}.values())
    values = [_on_host(parameter) for parameter in parameters]
    gradients = [(one.grad, None if one.grad is None else _on_host(one.grad)) for one in parameters]
    modules = [(module, module.training, dict(module._buffers)) for module in model.modules()]
    buffers = {id(one): (one, _on_host(one)) for *_, own in modules for one in own.values() if one is not None}

    def put_back() -> None:
        for parameter, value, (gradient, kept) in zip(parameters, values, gradients, strict=True):
            _put(parameter, value)
            if gradient is not None and kept is not None:
                _put(gradient, kept)
            parameter.grad = gradient
        for buffer, value in buffers.values():
            _put(buffer, value)
        for module, training, own in modules:
            module.training = training
            module._buffers.clear()
            module._buffers.update(own)

    return put_back


# --- optimizer and scaler

_PASSING = ("_last_step", "grad_scale", "found_inf")
"""Of the last step; the latter two stay where a step under a scaler raised."""


def _optimizer_kept(optimizer: Optimizer) -> Callable[[], None]:
    put_groups = _groups_kept(optimizer)
    ours = isinstance(optimizer, FusedOptimizer)
    put_state = _state_by_dictionary(optimizer) if ours else _state_in_place(optimizer)
    passing = {name: vars(optimizer)[name] for name in _PASSING if name in vars(optimizer)}

    def put_back() -> None:
        put_state()
        put_groups()
        for name in _PASSING:
            vars(optimizer).pop(name, None)
        vars(optimizer).update(passing)

    return put_back


def _groups_kept(optimizer: Optimizer) -> Callable[[], None]:
    """The groups with their values; a rate that is a tensor stays the same tensor."""
    groups = [dict(group) for group in optimizer.param_groups]
    values = [{key: _on_host(value) for key, value in group.items() if isinstance(value, Tensor)} for group in groups]

    def put_back() -> None:
        del optimizer.param_groups[len(groups) :]
        for own, group, tensors in zip(optimizer.param_groups, groups, values, strict=True):
            own.clear()
            own.update(group)
            for key, value in tensors.items():
                _put(own[key], value)

    return put_back


def _state_by_dictionary(optimizer: Optimizer) -> Callable[[], None]:
    """Ours load exactly what they have saved, wherever the state lies (offloaded, quantised, in parts)."""
    saved = _copied(optimizer.state_dict())
    return lambda: optimizer.load_state_dict(saved)


def _state_in_place(optimizer: Optimizer) -> Callable[[], None]:
    """torch's load_state_dict casts moments to the parameter's type, which need not be theirs."""
    state = [(key, dict(entry), _copied(dict(entry))) for key, entry in optimizer.state.items()]

    def put_back() -> None:
        optimizer.state.clear()
        for key, entry, values in state:
            for name, value in values.items():
                if isinstance(entry[name], Tensor):
                    _put(entry[name], value)
                else:
                    entry[name] = value
            optimizer.state[key] = entry

    return put_back


def _copied(value: Any) -> Any:
    """Copies without shared memory; tensors on the host."""
    if isinstance(value, Tensor):
        # A DTensor stays one: its place in the mesh is part of what an optimizer loads.
        return value.detach().clone() if shards.is_dtensor(value) else value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _copied(one) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copied(one) for one in value)
    return copy.deepcopy(value)


def _scaler_kept(scaler: torch.amp.GradScaler | None) -> Callable[[], None]:
    if scaler is None or not scaler.is_enabled():
        return lambda: None
    saved = scaler.state_dict()

    def put_back() -> None:
        scaler.load_state_dict(saved)
        scaler._per_optimizer_states.clear()  # a step that raised before update() would forbid the next one

    return put_back


# --- loaders


def _loaders_kept(trainer: Trainer, loaders: Iterable[Iterable[Any]]) -> Callable[[], None]:
    """Where each loader stands. The trainer's own is put back by a new feed at the place of the old one."""
    own = trainer._feed
    others = {id(loader): loader for loader in loaders if own is None or loader is not own.loader}
    feeds = [Feed(loader) for loader in others.values()] + ([] if own is None else [own])
    places = [(feed.loader, copy.deepcopy(feed.state_dict())) for feed in feeds]

    def put_back() -> None:
        for loader, place in places:
            if isinstance(loader, DataLoader) and loader.persistent_workers:
                loader._iterator = None  # whose workers have drawn random numbers
            feed = Feed(loader)
            feed.load_state_dict(place)
            trainer._feed = None if own is None else feed  # in the end that of its own loader

    return put_back
