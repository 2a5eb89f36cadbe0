"""Every message of the package: what was expected, what was found, what to do."""

from __future__ import annotations


class MissingBackendError(RuntimeError):
    """A backend that was asked for explicitly cannot be used here."""


class StaleStatsError(RuntimeError):
    """Statistics were read after their buffer had been used for a later step."""


def message(expected: str, found: str, remedy: str) -> str:
    """One line in the form that all errors of this package have."""
    return f"expected {expected}; found {found}; {remedy}"


def unknown_backend(name: object, known: tuple[str, ...]) -> ValueError:
    return ValueError(
        message(
            f"backend to be one of {', '.join(known)} or None",
            repr(name),
            "leave it out to get the best one (`mo-fused doctor` lists what this machine has)",
        )
    )


def missing_backend(name: str, reason: str, remedy: str) -> MissingBackendError:
    return MissingBackendError(message(f"the backend {name!r} to be usable", reason, remedy))


def master_of_fp16(name: str, mode: str) -> ValueError:
    return ValueError(
        message(
            f"bf16 parameters with master_weights={mode!r}",
            f"float16 in {name}",
            "use 'fp32', 'kahan' or 'stochastic' for fp16 parameters",
        )
    )


def bad_option(name: str, expected: str, found: object, remedy: str) -> ValueError:
    return ValueError(message(f"{name} to be {expected}", repr(found), remedy))


def grad_mismatch(what: str, name: str, param: object, grad: object) -> RuntimeError:
    return RuntimeError(
        message(
            f"the gradient of {name} to have its parameter's {what} ({param})",
            str(grad),
            "set .grad again after changing the parameter, or move both together",
        )
    )


def state_mismatch(what: str, name: str, key: str, expected: object, found: object) -> ValueError:
    return ValueError(
        message(
            f"state {key!r} of {name} to have {what} {expected}",
            str(found),
            "load a checkpoint of the same model, or construct the optimizer over the parameters it was saved from",
        )
    )


def reordered_names(saved: list[str], own: list[str]) -> ValueError:
    first = next((s, o) for s, o in zip(saved, own, strict=False) if s != o)
    return ValueError(
        message(
            "the checkpoint's parameters in this optimizer's order",
            f"{first[0]!r} where this optimizer has {first[1]!r}",
            "state is attached by position, so construct the optimizer with the parameters in the saved order",
        )
    )


def overlapping_tensor() -> RuntimeError:
    # torch's own text for a write to an expanded tensor.
    return RuntimeError(
        "unsupported operation: more than one element of the written-to tensor refers to a single memory location. "
        "Please clone() the tensor before performing the operation."
    )


def changed_meanwhile() -> RuntimeError:
    return RuntimeError(
        message(
            "parameters, gradients and state to stay as they are during a step",
            "one that changed while the step was being prepared",
            "let no other thread write to them until step() has returned",
        )
    )


def captured_twice() -> RuntimeError:
    return RuntimeError(
        message(
            "a step outside of a capture before each captured one",
            "a second captured step, whose memory could not be prepared",
            "call step() once between two captures",
        )
    )


def release_optimizer(found: str) -> TypeError:
    return TypeError(
        message(
            "gradient_release to get an optimizer of this package",
            found,
            "use mo_fused.AdamW, Adam, SGD or Adafactor",
        )
    )


def release_model(found: str) -> TypeError:
    return TypeError(message("gradient_release to get a torch.nn.Module", found, "pass the model itself"))


def release_ddp() -> ValueError:
    return ValueError(
        message(
            "a model whose gradients are complete when the backward has computed them",
            "a DistributedDataParallel, which averages them over the processes after that",
            "train without gradient_release, or without DistributedDataParallel",
        )
    )


def release_distributed(what: str) -> ValueError:
    return ValueError(
        message(
            "parameters that this process has as a whole, and alone",
            what,
            "train without gradient_release: their gradients are complete when all ranks have reduced them",
        )
    )


def partition_optimizer(found: str) -> TypeError:
    return TypeError(
        message("partitioned to get an optimizer of this package", found, "use mo_fused.AdamW, Adam, SGD or Adafactor")
    )


def hook_model(found: str) -> TypeError:
    return TypeError(
        message("norm_hook to get a DistributedDataParallel", found, "pass DistributedDataParallel(model)")
    )


def hook_optimizer(found: str) -> TypeError:
    return TypeError(message("norm_hook to get an optimizer of this package", found, "use mo_fused.AdamW, Adam or SGD"))


def hook_factored() -> ValueError:
    return ValueError(
        message(
            "an optimizer whose first pass is for the norm alone",
            "Adafactor, whose pass also takes sums of rows and columns",
            "leave the hook out",
        )
    )


def not_a_member() -> ValueError:
    return ValueError(
        message("a process group that this process is in", "one of others", "pass the group of this process's ranks")
    )


def no_process_group() -> RuntimeError:
    return RuntimeError(
        message(
            "torch.distributed to be initialized",
            "no process group",
            "call torch.distributed.init_process_group() first (torchrun sets what it needs)",
        )
    )


def not_ours(found: str) -> ValueError:
    return ValueError(message("an optimizer of mo_fused", found, "other optimizers' state_dict() is torch's already"))


def not_in_torch(found: str) -> ValueError:
    return ValueError(
        message(
            "groups in torch's form of Adafactor",
            found,
            "torch's class has no such option: keep the checkpoint of opt.state_dict()",
        )
    )


def not_a_checkpoint_of(source: str, found: str) -> ValueError:
    return ValueError(message(f"a checkpoint of {source}'s AdamW", found, "name the library that has written it"))


def another_model(expected: int, found: int) -> ValueError:
    return ValueError(
        message(
            f"a checkpoint of {expected} parameters in the same groups",
            f"one of {found}",
            "construct the optimizer over the parameters it was saved from, in the same groups",
        )
    )


def release_of_nothing() -> ValueError:
    return ValueError(
        message(
            "a model and an optimizer that share parameters",
            "none that both have",
            "construct the optimizer over this model's parameters",
        )
    )


def release_twice() -> ValueError:
    return ValueError(
        message(
            "an optimizer without a gradient release",
            "one that has one",
            "call .remove() of the earlier handle first",
        )
    )


def release_option(name: str, reason: str, remedy: str) -> ValueError:
    return ValueError(message(f"{name}=False with gradient_release", f"{name}=True, but {reason}", remedy))


def release_with_scaler(found: str) -> RuntimeError:
    return RuntimeError(
        message(
            "no loss scaling with gradient_release, which steps parameters before the scaler could look for an inf",
            found,
            "train without a GradScaler (bf16 needs none), or call .remove() of the handle",
        )
    )


def release_second_gradient(name: str, accumulation_steps: int) -> RuntimeError:
    return RuntimeError(
        message(
            f"{accumulation_steps} gradient(s) of {name} between two calls of opt.step() (accumulation_steps)",
            "one more after the parameter was stepped",
            "call opt.step() after each step's last backward, or give gradient_release the number of backward passes",
        )
    )


def sparse_adam() -> RuntimeError:
    return RuntimeError("Adam does not support sparse gradients, please consider SparseAdam instead")


def stale_stats() -> StaleStatsError:
    return StaleStatsError(
        message(
            "statistics to be read within three steps of their own",
            "a buffer that a later step has written",
            "read the fields earlier, or keep a copy of the values",
        )
    )


def native_layout(found: str) -> ImportError:
    return ImportError(
        message(
            "the native library to match this version of mo_fused",
            found,
            "install again with `pip install --force-reinstall mo_fused` (or `pip install .`)",
        )
    )


def offload_folder(folder: str, found: str) -> OSError:
    return OSError(
        message(f"offload='disk:{folder}' to name a folder that can be written", found, "name another folder")
    )


def offload_pinned(size: int, status: int) -> RuntimeError:
    return RuntimeError(
        message(
            f"{size:,} bytes of the host's memory to be pinned for copies",
            f"CUDA error {status}",
            "free memory of the host, or offload less (offload_fraction)",
        )
    )


def offload_full(folder: str, needed: int, free: int, found: str) -> OSError:
    return OSError(
        message(
            f"{needed:,} bytes for a state under {folder}",
            f"{found}; {free:,} bytes are free",
            "make room or name another folder; parameters and states are as before the step",
        )
    )


def offload_lost(path: str, found: str) -> OSError:
    return OSError(
        message(
            f"the file of states {path} to stay while the optimizer lives",
            found,
            "load the last checkpoint into a new optimizer; the model's parameters are intact",
        )
    )


def offload_failed(path: str, what: str, found: str) -> OSError:
    return OSError(
        message(
            f"to {what} the file of states {path}",
            found,
            "load the last checkpoint into a new optimizer; the model's parameters are intact",
        )
    )


def offload_broken(found: str) -> RuntimeError:
    return RuntimeError(
        message(
            "states that all belong to the same step",
            f"a step that failed halfway ({found})",
            "load a checkpoint into a new optimizer; every parameter has its value of before or of after that step",
        )
    )


def offload_scaler(found: str) -> RuntimeError:
    return RuntimeError(
        message(
            "mo_fused.GradScaler, without unscale_, where offload_gradients has taken the gradients",
            found,
            "use mo_fused.GradScaler and max_grad_norm, or leave offload_gradients out",
        )
    )


def offload_captured() -> RuntimeError:
    return RuntimeError(
        message(
            "a step with offload outside of a CUDA graph",
            "one that is being captured, although the host takes part in it",
            "capture forward and backward, and call step() after the replay",
        )
    )


def offload_forked(path: str) -> RuntimeError:
    return RuntimeError(
        message(
            f"the file of states {path} to be used by the process that made it",
            "a step in a forked child",
            "construct an optimizer in the child, and load a state_dict of the parent's",
        )
    )
