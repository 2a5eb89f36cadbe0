"""Optimizer states away from the parameters: in the host's memory or in files, stepped there by the CPU kernels.

``streams.py``: copies in the background and their order; ``files.py``: states in a file; ``homes.py``: where the state
of a parameter lives; ``ring.py``: the bounded buffers that everything passes through; ``gradients.py``: gradients that
are copied as the backward makes them; ``pieces.py``: the parts of a step; ``pipeline.py``: one part after the other;
``engine.py``: what an optimizer holds of all this; ``states.py``: makes, converts and moves states; ``step.py``: the
step of the rows that are offloaded.
"""
