"""A smoke test of an installed wheel, a program that needs torch and the wheel alone (cibuildwheel runs it).

The native part must be the one of the wheel, and its steps must have the bits of the eager backend's.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

import mo_fused
from mo_fused import _native


def parameters(optimizer: type[torch.optim.Optimizer], dtype: torch.dtype, **options: object) -> list[torch.Tensor]:
    """Two parameters (a matrix and an odd vector) after three steps."""
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in ((33, 65), (7,))]
    opt = optimizer(params, **options)
    for _ in range(3):
        for p in params:
            p.grad = torch.randn(p.shape).to(dtype)
        opt.step()
    backends = {record.backend for record in opt.explain()}  # type: ignore[attr-defined]
    assert backends == {options["backend"]}, backends
    return [p.detach() for p in params]


def main() -> None:
    package = Path(mo_fused.__file__).parent
    built = json.loads((package / "build_info.json").read_text(encoding="utf-8"))
    assert Path(_native.__file__).parent == package, _native.__file__
    assert built["native"] is True and built["version"] == mo_fused.__version__, built
    for optimizer in (mo_fused.AdamW, mo_fused.Adam, mo_fused.SGD):
        extra = {"momentum": 0.9} if optimizer is mo_fused.SGD else {}
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            options = dict(lr=0.01, weight_decay=0.1, **extra)
            native = parameters(optimizer, dtype, backend="cpu", **options)
            eager = parameters(optimizer, dtype, backend="eager", **options)
            assert all(map(torch.equal, native, eager)), f"{optimizer.__name__}, {dtype}: other bits than eager"
    print(f"mo_fused {mo_fused.__version__}: {_native.cpu_isa()[0]} kernels, bits as eager")


if __name__ == "__main__":
    main()
