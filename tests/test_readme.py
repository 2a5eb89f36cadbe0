"""README.md is true: its commands are the ones that run elsewhere, its code runs, its tables name what there is."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from code_blocks import ENVIRONMENT, ROOT, Block, blocks, pages

from mo_fused.cli import build_parser
from mo_fused.optim.base import OPTIONS
from mo_fused.training import TrainConfig, load_config

README = (ROOT / "README.md").read_text(encoding="utf-8")
NOT_RUN = "<!-- not run -->"
RUN = 'pip install ".[train]" && mo-fused train'
TEST = 'pip install ".[test]" && pytest tests'
DOCUMENTS = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "csrc/README.md"]
DOCUMENTS += [page.relative_to(ROOT).as_posix() for page in pages()]

BLOCKS = blocks(README)
TWO_PROCESSES = "<!-- two processes: "
PYTHON = [b for b in BLOCKS if b.language == "python" and b.before != NOT_RUN and TWO_PROCESSES not in b.before]
SCRIPTS = [b for b in BLOCKS if b.before.startswith(TWO_PROCESSES)]
SHELL = [line for b in BLOCKS if b.language == "sh" for line in b.code.splitlines()]


def test_every_block_is_of_a_known_kind() -> None:
    """A block in another language, or ``text`` that belongs to no code, would be checked by nothing."""
    assert {b.language for b in BLOCKS} == {"sh", "python", "yaml"}
    assert len(PYTHON) >= 3, "one for each of the three doors at least"
    assert sum(b.prints is not None for b in PYTHON) >= 1


@pytest.mark.parametrize("block", SCRIPTS, ids=str)
def test_script_runs_in_processes(
    block: Block, tmp_path: Path, run_python: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    """As README.md says; then once more from its checkpoint, in one process."""
    name = block.before.removeprefix(TWO_PROCESSES).removesuffix(" -->")
    (tmp_path / name).write_text(block.code, encoding="utf-8")
    (line,) = [line for line in SHELL if line.endswith(f" {name}")]
    command = shlex.split(line)[1:]
    assert command[:4] == ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    for command[3] in ("2", "1"):
        found = run_python(*command, env={"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""})
        # gloo's threads have been seen to abort an orderly end, also with torch's optimizers.
        assert found.returncode == 0 or "terminate called without" in found.stderr, found.stderr[-3000:]
        assert len(found.stdout.splitlines()) == 3
    assert len(list(tmp_path.glob("checkpoint-*"))) == 2


@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_code_runs(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)  # a block may write a run folder
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    block.run(ROOT / "README.md", {"__name__": "readme"})
    printed = capsys.readouterr().out
    assert printed.strip()
    if block.prints is not None:
        assert printed == block.prints


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "yaml"], ids=str)
def test_settings_are_those_of_a_run(block: Block, tmp_path: Path) -> None:
    """A whole config: it loads, and its values are the run's."""
    (tmp_path / "run.yaml").write_text(block.code, encoding="utf-8")
    settings = load_config(str(tmp_path / "run.yaml"))
    config = TrainConfig(**settings)
    assert len(settings) > 2 and all(getattr(config, name) == value for name, value in settings.items())


def test_names_the_two_commands() -> None:
    """.ci/run runs the second; the first is the main job."""
    assert SHELL[:2] == [RUN, TEST]
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    (command,) = re.findall(r"^test_command='(.+)'$", script, re.MULTILINE)
    assert TEST.endswith(f"&& {command}")


@pytest.mark.parametrize("line", [line for line in SHELL if "mo-fused" in line])
def test_shell_lines_are_valid_commands(line: str) -> None:
    words = shlex.split(line)
    arguments = words[words.index("mo-fused") + 1 :]
    if "--help" in arguments:
        with pytest.raises(SystemExit) as left:
            build_parser().parse_args(arguments)
        assert left.value.code == 0
    else:
        assert build_parser().parse_args(arguments).program == f"mo-fused {arguments[0]}"


def table(heading: str) -> list[list[str]]:
    """The rows below the head of the first table after a heading, as lists of cells."""
    rest = README.split(f"\n{heading}\n", 1)[1].splitlines()
    first = next(i for i, line in enumerate(rest) if line.startswith("|"))
    rows = []
    for line in rest[first + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split(" | ")])
    return rows


def test_options_table_is_complete() -> None:
    said = {row[0].strip("` "): row[1].strip("` ") for row in table("### Options")}
    assert said == {name: repr(default).replace("'", '"') for name, default in OPTIONS.items()}


def test_environment_table_is_complete() -> None:
    """Every variable of ours that the sources read, and none that they do not."""
    first_cells = "\n".join(row[0] for row in table("## Environment variables"))
    said = set(re.findall(r"`(MO_FUSED_[A-Z_]+|MAX_JOBS)`", first_cells))
    sources = [*(ROOT / "mo_fused").rglob("*.py"), *(ROOT / "csrc").rglob("*.cpp"), ROOT / "setup.py"]
    read = re.compile(r"(?:environ\.get|getenv)\(\"(MO_FUSED_[A-Z_]+|MAX_JOBS)\"")
    assert said == {name for source in sources for name in read.findall(source.read_text(encoding="utf-8"))}


def test_figures_have_their_place() -> None:
    """The tables of the last section are made by bench/report.py; tests/test_figures.py has the rest."""
    section = README.split("\n## Measured figures\n")[1].split("\n## ")[0]
    inside = re.findall(r"<!-- figures:(\w+) -->\n(.*?)<!-- figures:end -->", section, re.DOTALL)
    assert {"steps", "adafactor", "formats", "offload", "distributed"} <= {name for name, _ in inside}
    assert sum(text.count("\n|") for _, text in inside) == section.count("\n|") > 20


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_somewhere(name: str) -> None:
    file = ROOT / name
    for target in re.findall(r"\]\(([^)#]+)\)", file.read_text(encoding="utf-8")):
        assert target.startswith("https://") or (file.parent / target).is_file(), target


def test_files_named_by_kernels_exist() -> None:
    """Formula and reference at the head of a kernel file name files of this repository, or of the file's own folder."""
    kernels = [*(ROOT / "csrc").glob("c*/*_kernel.c*"), *(ROOT / "triton_kernels").glob("*_kernel.py")]
    assert len(kernels) >= 30
    for kernel in kernels:
        head = re.split(r"\n#include|\nfrom __future__", kernel.read_text(encoding="utf-8"))[0]
        for target in re.findall(r"[\w/]+\.(?:py|h|cuh|cpp|cu)\b", head):
            assert any((folder / target).is_file() for folder in (ROOT, ROOT / "csrc", kernel.parent)), (kernel, target)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_named_files_exist(name: str) -> None:
    """A path in code marks, with a folder of this repository in front, names a file or folder."""
    file = ROOT / name
    tops = r"(?:mo_fused|csrc|cpu|rules|tests|docs|\.ci)/[\w./]*\w"
    for target in re.findall(rf"`({tops})`", file.read_text(encoding="utf-8")):
        assert (ROOT / target).exists() or (file.parent / target).exists(), target
