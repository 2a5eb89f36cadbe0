"""The kernels in Triton, installed as ``mo_fused.triton_kernels``: one kernel and one launcher a file.

The map: ``_rules.py`` is the twin of ``csrc/rules``; ``_table.py`` mirrors the records of ``csrc/abi.h`` and
``mo_fused/device_table.py``; ``_chunk.py`` turns a program id into chunks and typed pointers.
"""

if __name__ != "mo_fused.triton_kernels":
    raise ImportError(
        f"expected these kernels to be imported as mo_fused.triton_kernels; found {__name__!r}; "
        "install mo_fused (pip install -e . in a checkout) and take the checkout off sys.path"
    )
