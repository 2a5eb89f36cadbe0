"""What an optimizer with ``offload=`` holds: which parameters are offloaded and where to, their gradients, the ring."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import dispatch, errors
from ..distributed import shards
from .gradients import HostGradient
from .homes import DiskHome, Home, HostHome
from .pipeline import Part, Parts, Pipeline
from .ring import Ring
from .streams import STEPS, HostStream, Lanes, Mark

if TYPE_CHECKING:
    from ..optim.base import FusedOptimizer

DISK = "disk:"
MOST_WAITING = 8
"""Parts that a backward may be ahead of a file."""


def check_offload(options: dict[str, Any]) -> None:
    """Raises for options of offloading that are not what they have to be, or that contradict each other."""
    where, fraction = options["offload"], options["offload_fraction"]
    known = "'cpu', 'disk:PATH' or None"
    on_disk = isinstance(where, str) and where.startswith(DISK) and where != DISK
    if where not in (None, "cpu") and not on_disk:
        raise errors.bad_option("offload", known, where, "use None to keep states beside the parameters")
    if not isinstance(options["offload_gradients"], bool):
        raise errors.bad_option("offload_gradients", "True or False", options["offload_gradients"], "pass a bool")
    if isinstance(fraction, bool) or not isinstance(fraction, (int, float)) or not 0.0 <= fraction <= 1.0:
        raise errors.bad_option("offload_fraction", "a number from 0 to 1", fraction, "1 offloads every state")
    if where is None and options["offload_gradients"]:
        raise errors.bad_option("offload_gradients", "False without offload", True, "pass offload='cpu' too")
    if options["offload_gradients"] and options["clip_in_place"]:
        remedy = "leave one of them out: there is no gradient left to write to"
        raise errors.bad_option("clip_in_place", "False with offload_gradients", True, remedy)


class Offload:
    """Made with the optimizer, and kept over its steps, loads and new groups."""

    def __init__(self, opt: FusedOptimizer) -> None:
        options = opt.defaults
        where: str = options["offload"]
        self.home: Home = HostHome() if where == "cpu" else DiskHome(where.removeprefix(DISK))
        if isinstance(self.home, DiskHome):  # a copy of this optimizer means the same folder from anywhere
            options["offload"] = DISK + self.home.file.folder
        self.takes_gradients: bool = options["offload_gradients"]
        self._fraction = float(options["offload_fraction"])
        self._opt = weakref.ref(opt)
        self._known: list[Tensor] = []
        self._homes: dict[int, Home] = {}
        self._hooks: dict[int, Any] = {}
        self._gradients: dict[int, HostGradient] = {}
        self._left: set[int] = set()  # parameters that torch steps
        self._lanes: dict[torch.device, Lanes] = {}
        self._adder = HostStream("add")
        self._staging = Ring(pinned=dispatch.has_gpu())  # of further micro-batches on their way to be added
        self._lock = threading.Lock()  # each device has a thread of its own in the backward
        self._background = HostStream(STEPS)
        self._waiting = Parts()
        self._working = False
        self._handed_over: Mark | None = None
        self._failure: BaseException | None = None
        self.pipeline = Pipeline()
        self.largest_piece = 0
        """Bytes that every slot of the ring has."""
        self.in_background = False
        """Steps are handed over and go on beside the backward, until :meth:`join`."""
        weakref.finalize(self, _remove_hooks, self._hooks)
        self.attach(opt)

    # -- which parameters ---------------------------------------------------------------------------------------------

    def home_of(self, p: Tensor) -> Home | None:
        """Where the state of a parameter lives; None: beside the parameter."""
        if id(p) not in self._homes:
            self.look_again()
        return self._homes.get(id(p))

    def attach(self, opt: FusedOptimizer) -> None:
        """Decides for all parameters of the groups, and puts a hook on each that is offloaded."""
        from ..optim.formats import Formats

        # Parts of a DTensor stay where they are.
        entries = [(g, p) for g in opt.param_groups for p in g["params"] if not shards.is_dtensor(p)]
        params = [p for _, p in entries]
        if len(params) == len(self._known) and all(a is b for a, b in zip(params, self._known, strict=True)):
            return
        self._known = params
        formats = Formats(opt.defaults)
        sizes = [formats.state_bytes(opt._rule, g, p) for g, p in entries]
        limit, taken = self._fraction * sum(sizes), 0.0
        self._homes = {}
        for i in sorted(range(len(params)), key=lambda i: (-sizes[i], i)):
            if id(params[i]) in self._homes:
                continue
            if taken >= limit and self._fraction < 1.0:
                break
            taken += sizes[i]
            self._homes[id(params[i])] = self.home
        here = {id(p) for p in params}
        for gone in self._hooks.keys() - here:
            self._hooks.pop(gone).remove()
            self._gradients.pop(gone, None)
            self._left.discard(gone)
        for p in params:
            # Others are looked at in the step alone.
            can_have = p.is_floating_point() and p.is_leaf and not p.is_inference()
            if id(p) in self._homes and id(p) not in self._hooks and can_have:
                self._hooks[id(p)] = _put_hook(p, self)

    def look_again(self) -> None:
        """The groups may have changed: see :meth:`attach`."""
        opt = self._opt()
        if opt is not None:
            self.attach(opt)

    def lanes(self, device: torch.device) -> Lanes:
        """The copies from and to a device."""
        found = self._lanes.get(device)
        if found is None:
            found = self._lanes[device] = Lanes(device)
        return found

    def stages(self, p: Tensor) -> bool:
        """Whether the parameter passes through the ring: all do whose memory is a device's, or plays its part."""
        return not (self.home.on_disk and dispatch.is_cpu(p))

    # -- gradients ----------------------------------------------------------------------------------------------------

    def complete(self, p: Tensor) -> None:
        """A gradient has been added to ``p.grad``: starts its copy to the host, if the step will find it so."""
        opt = self._opt()
        # Other processes have a say in what becomes of the gradient. So has a scaler that unscales before the step,
        # which no version counter tells. With gradient release it is known here alone whether the gradient is used.
        if opt is None or _is_distributed() or not opt._step_supports_amp_scaling or opt._release() is not None:
            return
        if self.takes_gradients and self._is_ours(p):
            assert p.grad is not None
            with self._lock:
                self._take(p, p.grad)
        else:
            self.copy(p)

    def copy(self, p: Tensor) -> None:
        """Starts to copy the parameter's gradient to the host, where that makes sense."""
        if self.home.on_disk or not self._is_ours(p) or not self.stages(p):
            return
        assert p.grad is not None
        if not dispatch.is_capturing(p.grad.device):  # replays of a graph call no hook
            with self._lock:
                self._of(p).copy(p.grad, self.lanes(p.grad.device))

    def _is_ours(self, p: Tensor) -> bool:
        """Whether the parameter is offloaded and has a gradient that kernels take."""
        if p.grad is None or id(p) not in self._homes or id(p) in self._left or p.grad.is_inference():
            return False
        return _is_plain(p.grad) and _is_plain(p)

    def leave(self, p: Tensor) -> None:
        """torch steps this parameter: its gradient stays, or comes back."""
        self._left.add(id(p))
        found = self._gradients.get(id(p))
        if found is not None and found.taken and p.grad is None:
            for mark in found.marks:
                mark.wait()
            assert found.value is not None
            p.grad = found.value.to(p.device)
            found.forget()

    def serve(self, p: Tensor) -> None:
        """The opposite of :meth:`leave`."""
        self._left.discard(id(p))

    def forget_copies(self) -> None:
        """Gradients have been edited where no version counter tells."""
        for found in self._gradients.values():
            found.free_source()

    def _take(self, p: Tensor, grad: Tensor) -> None:
        self._of(p).take(grad, self.lanes(grad.device), self._adder, self._staging, keep=not self.stages(p))
        p.grad = None

    def _of(self, p: Tensor) -> HostGradient:
        found = self._gradients.get(id(p))
        if found is None:
            found = self._gradients[id(p)] = HostGradient()
        return found

    def take_the_rest(self, params: list[Tensor]) -> None:
        """With ``offload_gradients``, gradients that no hook has taken are taken before the step."""
        opt = self._opt()
        if not self.takes_gradients or opt is None or opt._release() is not None:
            return
        for p in params:
            if self._is_ours(p):
                assert p.grad is not None
                self._of(p).discard()  # somebody has set another one in its place
                self._take(p, p.grad)

    def gradient(self, p: Tensor) -> Tensor | None:
        """The gradient of a step: the parameter's, or the one that was taken from it."""
        if p.grad is not None:
            return p.grad
        found = self._gradients.get(id(p))
        return found.value if found is not None and found.taken else None

    def copied(self, p: Tensor, grad: Tensor | None) -> HostGradient | None:
        """The copy of this gradient on the host, if there is one that is up to date."""
        found = self._gradients.get(id(p))
        if found is None:
            return None
        return found if found.taken or found.is_of(grad) else None

    def settle_gradients(self) -> None:
        """After a step: no gradient that was copied before it will be used again."""
        for found in self._gradients.values():
            found.done()

    def discard_gradients(self) -> None:
        """What ``zero_grad`` means for gradients that are on the host."""
        for found in self._gradients.values():
            found.discard()

    # -- steps --------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises when a step of before has failed halfway, or when the file has gone."""
        if self._failure is not None:
            found = f"{type(self._failure).__name__}: {self._failure}"
            raise errors.offload_broken(found) from self._failure
        if isinstance(self.home, DiskHome):
            self.home.file.check()
        if dispatch.is_capturing_anything():
            raise errors.offload_captured()

    def work(self, work: Sequence[Part]) -> None:
        """Does these parts of a step, now or beside the backward."""
        if self.in_background:
            with self._lock:
                self._waiting.add(work)
                if not self._working:
                    self._handed_over = self._background.run(self._work_off)
                    self._working = True
            if self.home.on_disk:  # gradients that no copy was made of wait too, and memory is scarce
                self._waiting.wait(MOST_WAITING)
        else:
            self._run(Parts(work))
            self.join()

    def _work_off(self) -> None:
        """Works until nothing waits: nobody may ever call ``join``."""
        while True:
            try:
                self._run(self._waiting)
            except BaseException:
                with self._lock:
                    self._waiting.clear()
                    self._working = False
                raise
            with self._lock:
                if not self._waiting:
                    self._working = False
                    return

    def _run(self, parts: Parts) -> None:
        try:
            self.pipeline.run(parts)
        except BaseException as error:
            self._failure = error
            raise

    def join(self) -> None:
        """Waits for what was handed over; raises what has gone wrong there."""
        handed_over = self._handed_over
        if handed_over is not None:
            error = handed_over.failed()  # an interrupted wait has to be made again
            with self._lock:
                if self._handed_over is handed_over:
                    self._handed_over = None
            if error is not None:
                raise error
        try:
            self.pipeline.hold()
        except BaseException as error:
            self._failure = error
            raise
        for lanes in self._lanes.values():
            lanes.hold()


def _remove_hooks(hooks: dict[int, Any]) -> None:
    for handle in hooks.values():
        handle.remove()


def _is_distributed() -> bool:
    """DistributedDataParallel averages gradients after their hooks, and not always so that their versions tell."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def _is_plain(t: Tensor) -> bool:
    return (
        t.layout is torch.strided and t.dtype in dispatch.FLOATS and type(t) in (Tensor, torch.nn.Parameter)
    ) and not t.is_neg()


def _put_hook(p: Tensor, offload: Offload) -> Any:
    held = weakref.ref(offload)

    def hook(p: Tensor) -> None:
        offload = held()
        if offload is not None:
            offload.complete(p)

    return on_complete_gradient(p, hook)


def on_complete_gradient(p: Tensor, hook: Callable[[Tensor], None]) -> Any:
    """Calls ``hook`` whenever a gradient has been added to ``p.grad``; the handle.

    torch takes hooks of tensors alone that require a gradient, and a frozen one may be thawed later.
    """
    frozen = not p.requires_grad
    if frozen:
        p.requires_grad_(True)
    register: Any = p.register_post_accumulate_grad_hook
    handle = register(hook)
    if frozen:
        p.requires_grad_(False)
    return handle
