"""``mo-fused run``: a script or module as ``python`` runs it, but with torch's optimizers made ours before."""

from __future__ import annotations

import importlib.util
import io
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pkgutil import get_importer
from types import ModuleType, TracebackType
from typing import Any

from .patching import patch
from .training.errors import bad_input

_NOT_SHOWN = {__file__, SourceFileLoader.get_code.__code__.co_filename}


def script(path: str, arguments: Sequence[str]) -> Callable[[], None]:
    """What runs a file as ``__main__``, with ``sys.argv``, ``sys.path[0]`` and ``__file__`` as python has them.

    Folders and zip files with a ``__main__.py`` run too. What the script raises comes through; its traceback begins
    with the script when the interpreter prints it.

    Raises:
        InputError: there is no such file.
    """
    holds = get_importer(path) is not None  # a folder or a zip file
    spec = PathFinder.find_spec("__main__", [os.path.abspath(path)]) if holds else None
    if not os.path.exists(path) or (holds and (spec is None or spec.loader is None)):
        raise bad_input(
            path,
            expected="a Python script, or a folder or zip file with a __main__.py",
            found="a folder without one" if os.path.isdir(path) else "a file without one" if holds else "no such file",
            remedy="give the path of a script (a module goes by its name: mo-fused run -m NAME)",
        )
    sys.argv[:] = [path, *arguments]
    if spec is not None:
        _first_place(os.path.abspath(path))
        return partial(_as_python, partial(_exec_spec, spec))
    _first_place(os.path.dirname(os.path.realpath(path)))
    return partial(_as_python, partial(_exec_file, os.path.abspath(path)))


def module(name: str, arguments: Sequence[str]) -> Callable[[], None]:
    """What runs a module, or the ``__main__`` of a package, as ``python -m name`` does.

    Raises:
        InputError: there is no such module.
    """
    _first_place(os.getcwd())
    sys.argv[:] = ["-m", *arguments]
    with patch():  # the packages that it is in are imported to find it
        spec = _found(name)
    if spec is None:
        raise bad_input(
            f"-m {name}",
            expected="the name of a module, or of a package with a __main__",
            found="none of this name in sys.path, which begins with the current directory",
            remedy="check the name, or give the path of a script without -m",
        )
    sys.argv[0] = str(spec.origin)
    return partial(_as_python, partial(_exec_spec, spec))


def _first_place(folder: str) -> None:
    if not getattr(sys.flags, "safe_path", False):  # python -P puts nothing there
        sys.path[0] = folder


def _found(name: str) -> ModuleSpec | None:
    if name.startswith("."):  # which would be relative to some package
        return None
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:  # a package
            spec = importlib.util.find_spec(f"{name}.__main__")
        return spec
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        return None


def _exec_file(path: str) -> None:
    with io.open_code(path) as file:
        source = file.read()
    main = _new_main(path, None, SourceFileLoader("__main__", path))
    exec(compile(source, path, "exec", dont_inherit=True), main.__dict__)


def _exec_spec(spec: ModuleSpec) -> None:
    loader: Any = spec.loader
    code = loader.get_code(spec.name)
    main = _new_main(spec.origin, spec.cached, loader)
    main.__spec__, main.__package__ = spec, spec.parent
    exec(code, main.__dict__)


def _new_main(path: str | None, cached: str | None, loader: Any) -> Any:
    """Not runpy's: that puts ``__main__`` back at the end, where threads and atexit functions still look for it."""
    main: Any = ModuleType("__main__")
    main.__file__, main.__cached__, main.__loader__ = path, cached, loader
    main.__builtins__ = sys.modules["builtins"]
    # What a spawned process sends back is of __mp_main__, which multiprocessing took from us when it was imported.
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main
    return main


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
