"""The kernels in Triton, installed as ``mo_fused.triton_kernels``: one kernel a file, launched by backends/triton.py.

The map: ``_rules.py`` is the twin of ``csrc/rules``; ``_chunk.py`` mirrors the records and turns a program id into
chunks and typed pointers; ``_masters.py`` has weights finer than their parameter, ``_quantised.py`` moments in 8 or 4
bits; ``_totals.py`` adds up the statistics, ``_update_sums.py`` has the sums of an update.
"""

if __name__ != "mo_fused.triton_kernels":
    raise ImportError(
        f"expected these kernels to be imported as mo_fused.triton_kernels; found {__name__!r}; "
        "install mo_fused (pip install -e . in a checkout) and take the checkout off sys.path"
    )
