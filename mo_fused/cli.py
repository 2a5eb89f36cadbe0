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
from mo_fused.training.config import OPTIMIZERS, TASKS, TrainConfig
from mo_fused.training.errors import InputError

FAILED = 1
BAD_USAGE = 2
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand. Returns the exit status: 0, 1 failed, 2 bad usage or input, 130 stopped by Ctrl-C."""
    parser = build_parser()
    arguments = parser.parse_args(argv)
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
    text = "train a small byte-level GPT on text"
    train = commands.add_parser(
        "train",
        help=text,
        description=f"{text[0].upper()}{text[1:]}, in less than two minutes on two cores.",
    )

    def add(option: str, help_text: str, **how: Any) -> None:
        name = option.removeprefix("--").replace("-", "_")
        default = getattr(TrainConfig, name)
        shown = help_text if default is None else f"{help_text} (default: {default})"
        train.add_argument(option, default=default, help=shown, **how)

    add("--task", "what to train", choices=TASKS)
    add("--text", "UTF-8 text to train on (default: the prose that comes with Python, 370 kB)", metavar="FILE")
    add("--optimizer", "torch: the same run with torch.optim.AdamW and clip_grad_norm_", choices=OPTIMIZERS)
    add("--steps", "optimizer steps", type=int, metavar="N")
    add("--seed", "seed of the weights and of the windows drawn", type=int, metavar="N")
    add("--device", "such as cpu or cuda:0 (default: cuda where it works, else cpu)")
    add("--run-dir", "folder for config and metrics, new or empty (default: runs/TASK-TIME)", metavar="DIR")
    add("--lr", "peak learning rate", type=float)
    add("--batch-size", "windows a step", type=int, metavar="N")
    train.set_defaults(handler=_train, program=train.prog)


def _doctor(arguments: argparse.Namespace) -> int:
    from mo_fused.doctor import report

    print(report(as_json=arguments.json))
    return 0


def _plan(arguments: argparse.Namespace) -> int:
    config = PlanConfig(**{f.name: getattr(arguments, f.name) for f in fields(PlanConfig)})
    print(report(config, as_json=arguments.json))
    return 0


def _train(arguments: argparse.Namespace) -> int:
    given = {f.name: getattr(arguments, f.name) for f in fields(TrainConfig) if hasattr(arguments, f.name)}
    config = TrainConfig(**given)

    from mo_fused.training.train import run

    return run(config).status


if __name__ == "__main__":
    sys.exit(main())
