"""What ``mo-fused bench`` and the scripts under ``bench/`` measure with.

``race`` takes the times, ``workloads`` is what is stepped and ``peers`` by whom; ``case`` puts them together,
``results`` keeps what was measured, ``verdict`` says what it means. Not part of the stable interface.
"""
