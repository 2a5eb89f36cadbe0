"""Processes with a gloo group, kept between tests: ``pool(n).run(function, *args)`` calls it in each of n."""

from __future__ import annotations

import atexit
import datetime
import importlib
import multiprocessing
import os
import sys
import tempfile
import traceback
import types
from collections.abc import Callable
from typing import Any

TIMEOUT = 60.0
"""Seconds after which a rank that waits for others gives up; nothing here takes a tenth of it."""


class Pool:
    """``size`` processes in one world. A failure in one of them ends all; the next run starts new ones."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._children: list[tuple[Any, Any]] = []

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Calls ``function(rank, *args)`` everywhere; what each returned, by rank."""
        if not self._children:
            self._start()
        for _, pipe in self._children:
            pipe.send((function, args))
        results, failures = [], []
        for rank, (child, pipe) in enumerate(self._children):
            if not pipe.poll(2 * TIMEOUT if not failures else 10.0):
                failures.append(f"rank {rank} of {self.size}: no answer")
                continue
            try:
                failed, value = pipe.recv()
            except EOFError:
                failed, value = True, f"ended with {child.exitcode}"
            failures.append(f"rank {rank} of {self.size}:\n{value}") if failed else results.append(value)
        if failures:
            self.stop()
            raise AssertionError("\n".join(failures))
        return results

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        handle, store = tempfile.mkstemp(prefix="mo_fused_store_")
        os.close(handle)
        os.unlink(store)
        for rank in range(self.size):
            own, theirs = context.Pipe()
            child = context.Process(target=_serve, args=(rank, self.size, store, theirs), daemon=True)
            child.start()
            theirs.close()
            self._children.append((child, own))

    def stop(self) -> None:
        """Ends all processes."""
        for child, pipe in self._children:
            pipe.close()
            child.kill()
            child.join()
        self._children = []


def _serve(rank: int, size: int, store: str, pipe: Any) -> None:
    import torch
    import torch.distributed as dist

    # pytest's importlib mode names test modules so; nothing here puts the checkout itself on sys.path.
    tests = sys.modules["tests"] = types.ModuleType("tests")
    tests.__path__ = [os.path.dirname(__file__)]
    torch.set_num_threads(1)
    if library := os.environ.get("MO_FUSED_TEST_NATIVE"):  # as conftest.py does for the process of the tests
        importlib.import_module("cuda_shim_library").use(library)
    if os.environ.get("TRITON_INTERPRET") == "1":
        importlib.import_module("quick_interpreter").speed_up()
    wait = datetime.timedelta(seconds=TIMEOUT)
    dist.init_process_group("gloo", rank=rank, world_size=size, init_method=f"file://{store}", timeout=wait)
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            pipe.send((False, function(rank, *args)))
        except BaseException:
            pipe.send((True, traceback.format_exc()))


_pools: dict[int, Pool] = {}


def pool(size: int) -> Pool:
    """The processes of a size; they end with this one."""
    if size not in _pools:
        _pools[size] = Pool(size)
        atexit.register(_pools[size].stop)
    return _pools[size]
