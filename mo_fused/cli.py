"""The command ``mo-fused``. Each subcommand loads what it needs when it runs, so that help is quick."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from mo_fused.plan import MASTER_BYTES, MOMENTS, STATE_DTYPES, PlanConfig, report
from mo_fused.planned_model import DTYPES
from mo_fused.training.config import OPTIMIZERS, OPTIONS, PRECISIONS, TASK_DEFAULTS, TASKS, TrainConfig
from mo_fused.training.config_file import load_config, load_run_config
from mo_fused.training.errors import InputError, bad_input

FAILED = 1
BAD_USAGE = 2
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand. Returns the exit status: 0, 1 failed, 2 bad usage or input, 130 stopped by Ctrl-C."""
    parser = build_parser()
    arguments = parser.parse_args(argv)
    if arguments.handler == _run:
        return _run(arguments)  # what comes out of a script is for Python to report
    try:
        status: int = arguments.handler(arguments)
        sys.stdout.flush()
        return status
    except InputError as error:
        print(f"{arguments.program}: error: {error}", file=sys.stderr)
        return BAD_USAGE
    except KeyboardInterrupt:
        print(f"{arguments.program}: stopped by Ctrl-C", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader went away (`mo-fused doctor | head`); without this, Python complains once more when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except OSError as error:
        print(f"{arguments.program}: error: {error}", file=sys.stderr)
        return FAILED


def build_parser() -> argparse.ArgumentParser:
    """The parser of ``mo-fused`` with all its subcommands."""
    about = "Fused optimizers for PyTorch and training on top of them."
    parser = argparse.ArgumentParser(prog="mo-fused", description=about)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_doctor(commands)
    _add_plan(commands)
    _add_train(commands)
    _add_report(commands)
    _add_diagnose(commands)
    _add_bench(commands)
    _add_run(commands)
    return parser


def _add_doctor(commands: Any) -> None:
    text = "say what is installed, what each device would use and why, and what to do about what is missing"
    doctor = commands.add_parser("doctor", help=text, description=f"{text[0].upper()}{text[1:]}.")
    doctor.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    doctor.set_defaults(handler=_doctor, program=doctor.prog)


def _add_plan(commands: Any) -> None:
    text = "estimate the memory that training takes, and which GPUs it fits"
    plan = commands.add_parser("plan", help=text, description=f"{text[0].upper()}{text[1:]}. Nothing is allocated.")

    def add(option: str, help_text: str, **how: Any) -> None:
        default = getattr(PlanConfig, how.get("dest", option.removeprefix("--").replace("-", "_")))
        shown = f"{help_text} (default: {default})" if isinstance(default, str) else help_text
        plan.add_argument(option, default=default, help=shown, **how)

    add("--params", "number of parameters, such as 3e9, 3B or 124M", metavar="N")
    add("--model", "callable without arguments that returns the model, instead of --params", metavar="MODULE:FACTORY")
    add("--optimizer", "what is to step them", choices=tuple(MOMENTS))
    add("--dtype", "of the parameters (default: bf16, or the model's own dtypes)", choices=tuple(DTYPES))
    add("--grad-dtype", "of the gradients (default: the parameter's)", choices=tuple(DTYPES))
    add("--state-dtype", "of the moments; none: the parameter's", choices=STATE_DTYPES)
    add("--master-weights", "what is kept of 16-bit parameters beside themselves", choices=tuple(MASTER_BYTES))
    add("--release", "each gradient is freed as soon as its parameter is stepped", action="store_true")
    add("--batch", "sequences a forward pass; with --length, activations are counted", type=int, metavar="N")
    add("--length", "tokens in a sequence", type=int, metavar="N")
    add("--hidden", "width of the model (default: the model's)", type=int, metavar="N")
    add("--layers", "depth of the model (default: the model's)", type=int, metavar="N")
    add("--heads", "attention heads, for --no-flash (default: the model's)", type=int, metavar="N")
    add("--no-flash", "attention keeps its matrix, not computed in tiles", action="store_false", dest="flash")
    add("--recompute", "activations of each layer are computed again in the backward pass", action="store_true")
    plan.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    plan.set_defaults(handler=_plan, program=plan.prog)


def _add_train(commands: Any) -> None:
    train = commands.add_parser(
        "train",
        help="train a small model: a byte-level GPT on text, a ResNet on digits, a click predictor",
        description="Train a small model, in less than two minutes on two cores: --task lm is a byte-level GPT on "
        "text, vision a ResNet on handwritten digits, ctr a predictor of clicks. An option wins over CONFIG, and "
        "CONFIG over the task's default.",
    )
    train.add_argument(
        "config",
        nargs="?",
        metavar="CONFIG",
        help="YAML file of settings, a line each, such as `batch_size: 16`; that of an earlier run "
        "(its config.yaml) gives a new run its settings",
    )
    settings = {field.name: field for field in fields(TrainConfig)}

    def add(option: str, help_text: str, to: Any = train, **how: Any) -> None:
        name = option.removeprefix("--").replace("-", "_")
        default = _default_by_task(name) or settings[name].default
        shown = help_text if default is None else f"{help_text} (default: {default})"
        # Only what is given gets through, so that it can win over the file.
        to.add_argument(option, default=argparse.SUPPRESS, help=shown, **how)

    add("--task", "what to train", choices=TASKS)
    add("--text", "lm: UTF-8 text to train on (default: the prose that comes with Python, 370 kB)", metavar="FILE")
    add("--optimizer", "torch: the same run with torch.optim and clip_grad_norm_", choices=OPTIMIZERS)
    add("--steps", "optimizer steps", type=int, metavar="N")
    add("--seed", "seed of the weights and of the batches drawn", type=int, metavar="N")
    add("--device", "such as cpu or cuda:0 (default: cuda where it works, else cpu)")
    folder = train.add_mutually_exclusive_group()
    about = "folder of the run: new, empty, or that of an earlier run of the same settings, which is gone on with"
    add("--run-dir", f"{about} (default: runs/TASK-TIME)", folder, metavar="DIR")
    about = "go on with the run in this folder, with its own settings; options such as --steps win over them"
    folder.add_argument("--resume", default=argparse.SUPPRESS, help=about, metavar="DIR")
    add("--lr", "peak learning rate", type=float)
    add("--warmup-steps", "steps in which the rate rises to its peak", type=int, metavar="N")
    add("--batch-size", "samples of a batch", type=int, metavar="N")
    add("--accumulate", "batches whose gradients make a step", type=int, metavar="N")
    add("--precision", "bf16, fp16: autocast, with a loss scale for fp16", choices=PRECISIONS)
    add("--checkpoint-every", "steps between two checkpoints; 0: one at the end only", type=int, metavar="N")
    add("--profile", "steps to profile", type=int, metavar="N")
    train.set_defaults(handler=_train, program=train.prog)


def _add_report(commands: Any) -> None:
    text = "make a page of what a run did, or of several runs drawn over each other"
    about = f"{text[0].upper()}{text[1:]}. It is one HTML file that needs no network."
    report_parser = commands.add_parser("report", help=text, description=about)
    report_parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run")
    report_parser.add_argument("--output", metavar="FILE", help="the page (default: report.html in the first RUN)")
    report_parser.add_argument("--png", metavar="FILE", help="also make a picture")
    report_parser.set_defaults(handler=_report, program=report_parser.prog)


def _add_diagnose(commands: Any) -> None:
    text = "look for what went wrong in a run, and say what to change first"
    about = (
        f"{text[0].upper()}{text[1:]}. In this order: first loss, gradient norms, loss after the warm-up, late spikes, "
        "train/validation gap, lost updates. The exit status is 0 whether or not something is found."
    )
    parser = commands.add_parser("diagnose", help=text, description=about)
    parser.add_argument("run", metavar="RUN", help="folder of a run")
    about = "number of classes, for the first loss expected of a mean cross-entropy (default: from the run's config)"
    parser.add_argument("--classes", type=int, metavar="N", help=about)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.set_defaults(handler=_diagnose, program=parser.prog)


def _add_bench(commands: Any) -> None:
    text = "measure optimizer steps on this machine, beside torch's and every other optimizer that is installed"
    parser = commands.add_parser(
        "bench",
        help=text,
        description=f"{text[0].upper()}{text[1:]}. All take turns in one run; shown are medians, quartiles, GB/s by "
        "counted bytes and their share of a copy's. The exit status is 3 where the machine was too noisy to tell.",
    )
    suites = "step, clip, amp, adafactor, memory, overhead, offload, scaling, threads (default: step and clip)"
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=suites)
    parser.add_argument("--device", metavar="DEVICE", help="cpu or cuda:N (default: a GPU where there is one)")
    parser.add_argument(
        "--peers", metavar="LIST", help="parts of names, such as fused,deepspeed; or none (default: all)"
    )
    parser.add_argument("--quick", action="store_true", help="tiny sizes, two rounds: does it run, not how fast is it")
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="only cases whose name contains TEXT, such as gpt2-fp32"
    )
    parser.add_argument("--rounds", type=int, metavar="N", help="rounds of a race (default: 9 to 40)")
    parser.add_argument(
        "--threads", type=int, metavar="N", help="threads of torch and of the kernels (default: torch's)"
    )
    parser.add_argument("--cold", action="store_true", help="empty the caches before each step")
    parser.add_argument("--output", metavar="FILE", help="append the results to FILE, a CSV file")
    parser.add_argument("--plot", metavar="FILE", help="draw the races, as a PNG file")
    about = "spread of the middle half of the rounds, as a share of the median, above which there is no verdict"
    parser.add_argument("--max-spread", type=float, default=0.25, metavar="SHARE", help=f"{about} (default: 0.25)")
    about = "two contenders, such as mo_fused 'torch fused': only they race; or two files of --output: no measurement"
    parser.add_argument("--compare", nargs=2, metavar=("A", "B"), help=about)
    parser.set_defaults(handler=_bench, program=parser.prog)


def _add_run(commands: Any) -> None:
    text = "run a script as it is, with torch.optim's classes and clip_grad_norm_ made those of this package"
    run = commands.add_parser(
        "run",
        help=text,
        usage="mo-fused run [-h] SCRIPT [ARGUMENT ...]\n       mo-fused run [-h] -m MODULE [ARGUMENT ...]",
        description=f"{text[0].upper()}{text[1:]}.",
    )
    run.add_argument("-m", action="store_true", dest="module", help="a module by its name, as python -m")
    about = "path of the script, or name of the module, and its arguments, which are passed on as they are"
    run.add_argument("command", nargs=argparse.REMAINDER, metavar="SCRIPT [ARGUMENT ...]", help=about)
    run.set_defaults(handler=_run, program="mo-fused run")


def _default_by_task(name: str) -> str:
    """The tasks' defaults of a setting in words, "" if the setting has one default, or none, for all."""
    given = {task: defaults[name] for task, defaults in TASK_DEFAULTS.items() if name in defaults}
    if name == "warmup_steps":
        given = {task: "1 %% of the steps" if steps is None else steps for task, steps in given.items()}
    if set(given.values()) <= {None}:
        return ""
    return ", ".join(f"{task} {value}" for task, value in given.items())


def _bench(arguments: argparse.Namespace) -> int:
    from mo_fused.bench.command import Options, bench

    return bench(Options(**{field.name: getattr(arguments, field.name) for field in fields(Options)}))


def _doctor(arguments: argparse.Namespace) -> int:
    from mo_fused.doctor import report

    print(report(as_json=arguments.json))
    return 0


def _plan(arguments: argparse.Namespace) -> int:
    config = PlanConfig(**{f.name: getattr(arguments, f.name) for f in fields(PlanConfig)})
    print(report(config, as_json=arguments.json))
    return 0


def _report(arguments: argparse.Namespace) -> int:
    from mo_fused.training.report import write_report

    files, runs = write_report(arguments.runs, arguments.output, arguments.png)
    for run in runs:
        print("\n".join([f"{run.path}: {len(run.steps)} steps read", *(f"  {note}" for note in run.notes)]))
    print("\n".join(f"report {file}" for file in files))
    return 0


def _diagnose(arguments: argparse.Namespace) -> int:
    from mo_fused.training.diagnose import diagnose

    found = diagnose(arguments.run, arguments.classes)
    print(found.as_json() if arguments.json else found)
    return 0


def _run(arguments: argparse.Namespace) -> int:
    from mo_fused import running

    prepare = running.module if arguments.module else running.script
    try:
        if not arguments.command:
            raise bad_input("SCRIPT", expected="what to run", found="nothing", remedy="see mo-fused run --help")
        run = prepare(arguments.command[0], arguments.command[1:])
    except InputError as error:
        print(f"{arguments.program}: error: {error}", file=sys.stderr)
        return BAD_USAGE
    run()
    return 0


def _train(arguments: argparse.Namespace) -> int:
    config = TrainConfig(**_train_settings(arguments))

    from mo_fused.training.train import run

    return run(config).status


def _train_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """What the user gave: options over the file, or over the config of the run to be resumed."""
    given = {name: getattr(arguments, name) for name in OPTIONS if hasattr(arguments, name)}
    resumed: str | None = getattr(arguments, "resume", None)
    if resumed is not None and arguments.config is not None:
        raise bad_input(
            f"--resume {resumed}",
            expected="no CONFIG, since the run in this folder has its own",
            found=arguments.config,
            remedy=f"leave one of them out (to go on with settings from a file: --run-dir {resumed})",
        )
    if resumed is not None:
        return {**load_run_config(resumed), **given}
    return {**(load_config(arguments.config) if arguments.config is not None else {}), **given}


if __name__ == "__main__":
    sys.exit(main())
