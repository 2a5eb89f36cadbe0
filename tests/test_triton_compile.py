"""What the compiler makes of the Triton kernels, on GPUs that are not here: wide accesses, nothing fused, no spills.

`python -m bench.triton_report` prints the same figures as a table, for every kernel and GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from triton_compile import Figures, compile_variant, compiling, count_inexact_ptx, problems
from triton_variants import TARGETS, variants

import mo_fused

if find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

SM_90 = TARGETS["sm_90"]
# On the other GPUs: each kernel, and what is most likely to differ.
SOME = (
    "adamw fp32 sums=0 aligned",
    "adamw fp32 sums=2 aligned",
    "adamw fp32 sums=0 strided",
    "adamw bf16 sums=0 aligned",
    "adamw bf16 sums=2 aligned",
    "adamw bf16 sums=0 unaligned",
    "adamw fp16 sums=0 aligned",
    "adamw bf16/fp32 sums=0 aligned",
    "adamw bf16 amsgrad sums=0 aligned",
    "adamw fp64 sums=0 aligned",
    "sgd fp32 momentum sums=0 aligned",
    "sgd bf16 sums=0 aligned",
    "grad_stats fp32 aligned",
    "grad_stats bf16 aligned",
    "scale_grad fp32 aligned",
    "finish adam measured from-tensors",
    "finish sgd measured",
    "partial",
    "update_norms gradients",
    "factor_sums fp32 aligned",
    "factor_sums bf16 aligned",
    "factor_sums bf16 vector aligned",
    "finish adafactor measured",
    "factors fp32",
    "factored_rms bf16 aligned",
    "factored_rms fp32 vector aligned",
    "sizes",
    "adafactor fp32 sums=0 aligned",
    "adafactor bf16 sums=1 aligned",
    "adafactor fp32 momentum vector sums=1 aligned",
    "adamw int8 bf16 split8 sums=0 aligned",
    "adamw int8 fp32 sums=1 aligned",
    "adamw int4 bf16 sums=0 aligned",
    "sgd int8 bf16 sums=0 aligned",
)
# Adafactor's passes: what is not aligned, and float64, only here.
ADAFACTOR_SOME = (
    "factor_sums fp32 strided",
    "factor_sums bf16 unaligned",
    "factored_rms bf16 unaligned",
    "factored_rms fp32 strided",
    "adafactor bf16 sums=0 unaligned",
    "adafactor fp32 momentum sums=1 strided",
    "adafactor fp32 momentum vector sums=0 unaligned",
)
# Quantised moments that are not aligned.
QUANTISED_SOME = (
    "adamw int8 bf16 split8 sums=0 strided",
    "adamw int8 fp32 sums=1 unaligned",
    "adamw int4 bf16 sums=0 unaligned",
    "adamw int4 bf16 sums=0 strided",
    "sgd int8 bf16 sums=0 strided",
)


def is_checked(name: str) -> bool:
    """Everything on sm_90, but for what a variant with more sums or another kernel shows as well."""
    if name.startswith(("adafactor", "factor")) and not name.endswith(" aligned"):
        return name in ADAFACTOR_SOME or name.startswith("factors")
    if name.startswith(("factor_sums", "factored_rms")) and "momentum" in name:  # the first moment is no matter to them
        return False
    if name.endswith(" aligned"):
        return True
    if " int" in name:
        return name in QUANTISED_SOME
    return "sums=1" not in name and not (name.startswith("sgd") and "sums=2" in name)


CASES = [(SM_90.name, name) for name in variants(SM_90) if is_checked(name)]
CASES += [(target, name) for target in TARGETS if target != SM_90.name for name in SOME]

BROKEN: dict[str, tuple[str, str, Mapping[str, Any], str]] = {
    "fusion": ("sm_90", "adamw fp32 sums=0 aligned", {"enable_fp_fusion": True}, "fused multiply-adds"),
    "fusion on AMD": ("gfx942", "adamw fp32 sums=0 aligned", {"enable_fp_fusion": True}, "fused multiply-adds"),
    "no alignment": ("sm_90", "adamw bf16 sums=0 aligned", {"ALIGNED": False}, "0 global stores of 128 bits"),
    "no alignment on AMD": ("gfx942", "adamw bf16 sums=0 aligned", {"ALIGNED": False}, "0 global loads of 128 bits"),
    "few elements": ("sm_100", "sgd bf16 sums=0 aligned", {"WIDTH": 4, "BLOCK": 512}, "0 global loads of 128 bits"),
    "few registers": ("sm_90", "adamw fp32 sums=0 aligned", {"maxnreg": 24}, "bytes spilled"),
    "many registers": ("sm_90", "adamw bf16 sums=0 aligned", {"BLOCK": 2048, "maxnreg": 255}, "registers, expected"),
    "codes one by one": ("sm_90", "adamw int8 bf16 sums=0 aligned", {"ALIGNED": False}, "an access of 8 bits"),
    "codes through memory": ("sm_90", "adamw int4 bf16 sums=0 aligned", {"ALIGNED": False}, "bytes of shared memory"),
    "flushing on AMD": ("gfx942", "scale_grad fp32 aligned", {"allow_flush_denorm": True}, "flushing instructions"),
}


@pytest.fixture(scope="module")
def compiled(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Mapping[tuple[str, str], Future[Figures]]]:
    """Compilations of all selected tests by (GPU, variant), or (the name in BROKEN, "broken")."""
    selected: list[dict[str, Any]] = [i.callspec.params for i in request.session.items if hasattr(i, "callspec")]
    with compiling(tmp_path_factory.mktemp("triton_cache")) as pool:
        begun = {}
        for params in selected:
            if "compiled_case" in params:
                target, name = params["compiled_case"]
                begun[target, name] = pool.submit(compile_variant, TARGETS[target], variants(TARGETS[target])[name])
            elif "broken_case" in params:
                target, name, changed, _ = BROKEN[params["broken_case"]]
                begun[params["broken_case"], "broken"] = pool.submit(
                    compile_variant, TARGETS[target], variants(TARGETS[target])[name], changed
                )
        yield begun


@pytest.mark.parametrize("compiled_case", CASES, ids=lambda case: "-".join(case).replace(" ", "-"))
def test_kernel_compiles_as_promised(
    compiled_case: tuple[str, str], compiled: Mapping[tuple[str, str], Future[Figures]]
) -> None:
    target, name = compiled_case
    figures = compiled[compiled_case].result()
    assert not problems(TARGETS[target], variants(TARGETS[target])[name], figures), figures


@pytest.mark.parametrize("broken_case", BROKEN)
def test_what_is_broken_on_purpose_is_found(
    broken_case: str, compiled: Mapping[tuple[str, str], Future[Figures]]
) -> None:
    target, name, _, complaint = BROKEN[broken_case]
    figures = compiled[broken_case, "broken"].result()
    found = problems(TARGETS[target], variants(TARGETS[target])[name], figures)
    assert any(complaint in one for one in found), (found, figures)


@pytest.mark.parametrize(
    "line", ["sqrt.approx.f32 %f1, %f2;", "div.full.f32 %f1, %f2, %f3;", "mul.ftz.f32 %f1, %f2, %f3;"]
)
def test_inexact_ptx_is_found(line: str) -> None:
    assert count_inexact_ptx(line) == 1
    assert count_inexact_ptx("sqrt.rn.f32 %f1, %f2;\n div.rn.f32 %f1, %f2, %f3;\n mul.f32 %f1, %f2, %f3;") == 0


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_widths_that_are_asked_for(target: Any) -> None:
    """16 bytes a thread of the widest operand; with sums, 16-bit tensors go by 8 bytes."""
    every = variants(target)
    for dtypes in ("fp32", "bf16", "fp16", "fp64"):
        # Conversions of fp16 take registers: eight elements of four operands do not fit.
        wide = 64 if dtypes == "fp16" else 128
        assert every[f"adamw {dtypes} sums=0 aligned"].loads == (wide,) * 4
        assert every[f"adamw {dtypes} sums=0 aligned"].stores == (wide,) * 3
        assert every[f"grad_stats {dtypes} aligned"].loads == (128,)
        assert every[f"scale_grad {dtypes} aligned"].stores == (128,)
    assert every["adamw bf16 amsgrad sums=0 aligned"].loads == (64,) * 5
    assert every["adamw fp32 amsgrad sums=0 aligned"].loads == (128,) * 5
    assert every["adamw bf16/fp32 sums=0 aligned"].loads == (64, 64, 128, 128)
    assert every["adamw bf16/fp32 sums=2 aligned"].stores == (64, 128, 128)
    assert every["adamw fp32 sums=2 aligned"].loads == (128,) * 4
    assert every["adamw bf16 sums=2 aligned"].loads == (64,) * 4
    assert every["sgd bf16 sums=0 aligned"].stores == (128,)
    assert every["adamw int8 bf16 split8 sums=0 aligned"].loads == (64, 32, 64, 32, 32)
    assert every["adamw int4 bf16 sums=1 aligned"].stores == (64, 16, 16)
    assert every["sgd int8 fp32 sums=0 aligned"].loads == (128, 128, 32)
    assert every["factor_sums bf16 aligned"].loads == (128,)
    assert every["factored_rms bf16 vector aligned"].loads == (64, 128)
    assert every["adafactor bf16 sums=1 aligned"].loads == (128,) * 2
    assert every["adafactor bf16 vector sums=0 aligned"].loads == (64, 64, 128)
    assert every["adafactor fp32 momentum sums=1 aligned"].stores == (128,) * 2


def test_every_kernel_is_compiled_as_it_is_launched() -> None:
    folder = Path(mo_fused.__file__).parent / "triton_kernels"
    spec = find_spec("mo_fused.triton_kernels")
    assert spec is not None and spec.submodule_search_locations, folder
    files = {path.stem for place in spec.submodule_search_locations for path in Path(place).glob("*_kernel.py")}
    for target in TARGETS.values():
        assert {f"{v.kernel}_kernel" for v in variants(target).values()} == files
        for variant in variants(target).values():
            threads = 512 if variant.kernel == "factors" else 128
            assert variant.keywords["num_warps"] * target.warp_size == threads
            assert variant.keywords["enable_fp_fusion"] is False
            assert target.nvidia or "maxnreg" not in variant.keywords
