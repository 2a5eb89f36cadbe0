"""``mo-fused run``: what a script sees and leaves behind is what python would give it, but for its optimizers."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]

# What every script prints. Without torch, so that python by itself is quick.
SEES = """
import atexit, pickle, sys
class Mine: pass
print(sys.argv, sys.path[0], __file__, __name__, __spec__ and __spec__.name, __package__)
atexit.register(lambda: print("exit", pickle.loads(pickle.dumps(Mine())).__class__ is Mine))
sys.exit(7)
"""
FAILS = """
import sys
def fall(how):
    if how == "interrupt":
        raise KeyboardInterrupt
    if how == "hook":
        sys.excepthook = lambda kind, value, trace: print("the script's own hook:", value, file=sys.stderr)
    try:
        1 / 0
    except ZeroDivisionError as error:
        raise FileNotFoundError(2, "gone", "some file") from error
fall(sys.argv[1])
"""
# torch is imported once; what each child then does with the exception that comes out of main is the interpreter's own.
MANY = """
import json, os, sys
from mo_fused.cli import main
children = []
for i, words in enumerate(json.loads(sys.argv[1])):
    children.append(os.fork())
    if children[-1] == 0:
        for fd, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{i}.{name}", os.O_CREAT | os.O_WRONLY), fd)
        break
else:
    for i, child in enumerate(children):
        with open(f"{i}.status", "w") as file:
            file.write(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))
    sys.exit()
sys.exit(main(["run", *words]))
"""


class Ended(NamedTuple):
    status: int
    out: str
    err: str


CASES: dict[str, list[str]] = {
    "script": ["link.py", "-m", "other", "--", "--json", "-h", "a b"],
    "module": ["-m", "package.inner", "--help", "-m", "--"],
    "interrupt": ["fails.py", "interrupt"],
    "os": ["fails.py", "os"],
    "hook": ["fails.py", "hook"],
    "broken": ["broken.py"],
    "zip": ["all.zip", "x"],
    "like ours": ["ours.py"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("scripts")
    (path / "package" / "inner").mkdir(parents=True)
    (path / "package" / "__init__.py").touch()
    (path / "package" / "inner" / "__main__.py").write_text("from . import other\n" + SEES.split("atexit.register")[0])
    (path / "package" / "inner" / "other.py").touch()
    (path / "elsewhere").mkdir()
    (path / "elsewhere" / "script.py").write_text(SEES)
    (path / "link.py").symlink_to(path / "elsewhere" / "script.py")
    (path / "fails.py").write_text(FAILS)
    (path / "broken.py").write_text("def :\n")
    (path / "ours.py").write_text("from mo_fused.training.errors import InputError\nraise InputError('its own')\n")
    with zipfile.ZipFile(path / "all.zip", "w") as file:
        file.writestr("__main__.py", "import sys\nprint(sys.argv, __name__)")
    return path


@pytest.fixture(scope="module")
def ended(folder: Path) -> dict[str, Ended]:
    """How the command ended, in each case."""
    (folder / "many.py").write_text(MANY)
    words = [sys.executable, "many.py", json.dumps(list(CASES.values()))]
    subprocess.run(words, cwd=folder, check=True, timeout=120)
    return {
        name: Ended(*(kind((folder / f"{i}.{part}").read_text()) for kind, part in zip((int, str, str), Ended._fields)))  # type: ignore[operator]
        for i, name in enumerate(CASES)
    }


@pytest.mark.parametrize("case", [name for name in CASES if name != "like ours"])
def test_as_python(case: str, ended: dict[str, Ended], folder: Path) -> None:
    """Status, output, traceback: all of it."""
    words = [sys.executable, *CASES[case]]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    assert ended[case] == (done.returncode, done.stdout, done.stderr)


def test_what_that_was(ended: dict[str, Ended], folder: Path) -> None:
    """The comparison is not of two failures for another reason."""
    assert ended["script"].out.startswith("['link.py', '-m', 'other', '--', '--json', '-h', 'a b'] ")
    assert f" {(folder / 'elsewhere').resolve()} " in ended["script"].out and "exit True" in ended["script"].out
    assert ", '--help', '-m', '--'] " in ended["module"].out and "package.inner.__main__ package" in ended["module"].out
    assert [ended[name].status for name in ("script", "module", "interrupt", "os", "hook")] == [7, 0, -2, 1, 1]
    assert ended["os"].err.count("  File ") == 3, "frames of this package are no part of the script's traceback"
    assert "ZeroDivisionError" in ended["os"].err and "SyntaxError" in ended["broken"].err
    assert ended["hook"].err == "the script's own hook: [Errno 2] gone: 'some file'\n"
    assert ended["zip"].out == "['all.zip', 'x'] __main__\n"


def test_errors_that_look_like_the_commands_own_are_the_scripts(ended: dict[str, Ended]) -> None:
    assert ended["like ours"].status == 1 and ended["like ours"].err.startswith("Traceback (most recent call last):\n")
    assert ended["like ours"].err.endswith("InputError: its own\n")


@pytest.mark.parametrize(
    "words, said",
    [
        (["nothing.py", "--x"], "nothing.py: expected a Python script"),
        (["."], r"found a folder without one"),
        (["-m", "package"], "-m package: expected the name of a module, or of a package with a __main__"),
        (["-m", "no.such.module"], "-m no.such.module: expected the name of a module"),
        ([], "SCRIPT: expected what to run; found nothing"),
    ],
)
def test_what_is_not_there(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from mo_fused.cli import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "package").mkdir()
    assert main(["run", *words]) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("mo-fused run: error: ") and said in err and err.count("\n") == 1


def test_optimizers_are_ours_here_and_in_forks_but_not_in_spawned_processes(tmp_path: Path, run_python: Run) -> None:
    (tmp_path / "script.py").write_text(
        "import multiprocessing\n"
        "import torch\n"
        "from torch.optim import AdamW\n"
        "from torch.nn.utils import clip_grad_norm_\n"
        "def made(opt=None):\n"
        "    opt = opt or AdamW([torch.nn.Parameter(torch.ones(2))])\n"
        "    print(type(opt).__mro__[1].__module__, clip_grad_norm_.__module__, flush=True)\n"
        "if __name__ == '__main__':\n"
        "    mine = AdamW([torch.nn.Parameter(torch.ones(2))])\n"
        "    made()\n"
        "    for way, arguments in (('fork', ()), ('spawn', (mine,))):\n"
        "        child = multiprocessing.get_context(way).Process(target=made, args=arguments)\n"
        "        child.start()\n"
        "        child.join()\n"
    )
    done = run_python("-m", "mo_fused.cli", "run", "script.py")
    ours = "mo_fused.optim.adamw mo_fused.grad\n"
    theirs = "torch.optim.adam torch.nn.utils.clip_grad\n"
    assert done.stdout.replace("torch.optim.optimizer ", "torch.optim.adam ") == ours + ours + theirs, done.stderr


def test_a_package_is_imported_under_the_patch_and_a_spawned_process_sends_our_classes_back(
    tmp_path: Path, run_python: Run
) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").write_text("import sys\nfrom torch.optim import SGD\nargv = list(sys.argv)\n")
    script = (
        "import multiprocessing, sys\n"
        "class Mine: pass\n"
        "def put(queue): queue.put(Mine())\n"
        "if __name__ == '__main__':\n"
        "    from . import SGD, argv\n"
        "    assert SGD.__mro__[1].__module__ == 'mo_fused.optim.sgd' and argv == ['-m', 'x'], argv\n"
        "    context = multiprocessing.get_context('spawn')\n"
        "    queue = context.Queue()\n"
        "    process = context.Process(target=put, args=(queue,))\n"
        "    process.start()\n"
        "    process.join()\n"
        "    print(type(queue.get(timeout=60)) is Mine)\n"
    )
    (tmp_path / "pkg" / "work.py").write_text(script)
    ended = run_python("-m", "mo_fused.cli", "run", "-m", "pkg.work", "x")
    assert (ended.returncode, ended.stdout) == (0, "True\n"), ended.stderr
