"""``mo-fused run``: a script or module as ``python`` runs it, but with torch's optimizers made ours before."""

from __future__ import annotations

import importlib.util
import io
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.machinery import SourceFileLoader
from pkgutil import get_importer
from types import ModuleType, TracebackType
from typing import Any

from .patching import patch
from .training.errors import bad_input

_NOT_SHOWN = {__file__, runpy.run_path.__code__.co_filename}


def script(path: str, arguments: Sequence[str]) -> Callable[[], None]:
    """What runs a file as ``__main__``, with ``sys.argv``, ``sys.path[0]`` and ``__file__`` as python has them.

    Folders and zip files with a ``__main__.py`` run too. What the script raises comes through; its traceback begins
    with the script when the interpreter prints it.

    Raises:
        InputError: there is no such file.
    """
    folder = os.path.isdir(path)
    if not os.path.exists(path) or (folder and not os.path.isfile(os.path.join(path, "__main__.py"))):
        raise bad_input(
            path,
            expected="a Python script, or a folder or zip file with a __main__.py",
            found="a folder without one" if folder else "no such file",
            remedy="give the path of a script (a module goes by its name: mo-fused run -m NAME)",
        )
    sys.argv[:] = [path, *arguments]
    if get_importer(path) is not None:
        _first_place(os.path.abspath(path))
        return partial(_as_python, lambda: runpy.run_path(path, run_name="__main__"))
    _first_place(os.path.dirname(os.path.realpath(path)))
    return partial(_as_python, partial(_exec, os.path.abspath(path)))


def module(name: str, arguments: Sequence[str]) -> Callable[[], None]:
    """What runs a module, or the ``__main__`` of a package, as ``python -m name`` does.

    Raises:
        InputError: there is no such module.
    """
    _first_place(os.getcwd())
    if not _exists(name):
        raise bad_input(
            f"-m {name}",
            expected="the name of a module, or of a package with a __main__",
            found="none of this name in sys.path, which begins with the current directory",
            remedy="check the name, or give the path of a script without -m",
        )
    sys.argv[:] = ["-m", *arguments]  # the first becomes the module's file
    return partial(_as_python, lambda: runpy.run_module(name, run_name="__main__", alter_sys=True))


def _first_place(folder: str) -> None:
    if not getattr(sys.flags, "safe_path", False):  # python -P puts nothing there
        sys.path[0] = folder


def _exists(name: str) -> bool:
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:  # a package
            spec = importlib.util.find_spec(f"{name}.__main__")
        return spec is not None
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        return False


def _exec(path: str) -> None:
    """Not runpy's: that puts ``__main__`` back at the end, where threads and atexit functions still look for it."""
    main: Any = ModuleType("__main__")
    main.__file__, main.__cached__, main.__loader__ = path, None, SourceFileLoader("__main__", path)
    main.__builtins__ = sys.modules["builtins"]
    sys.modules["__main__"] = main
    with io.open_code(path) as file:
        source = file.read()
    exec(compile(source, path, "exec", dont_inherit=True), main.__dict__)


def _as_python(work: Callable[[], object]) -> None:
    patch()
    try:
        work()
    except SystemExit:
        raise
    except BaseException as error:
        _show_from(error, error.__traceback__)
        raise


def _show_from(error: BaseException, trace: TracebackType | None) -> None:
    """The interpreter's report of this error leaves out what called the script."""
    while trace is not None and trace.tb_frame.f_code.co_filename in _NOT_SHOWN:
        trace = trace.tb_next
    show = sys.excepthook

    def excepthook(kind: type[BaseException], value: BaseException, found: TracebackType | None) -> None:
        if value is error:
            value, found = value.with_traceback(trace), trace
        show(kind, value, found)

    sys.excepthook = excepthook
