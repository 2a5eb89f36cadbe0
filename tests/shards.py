"""The modules that hold for any backend of the optimizers: run by default on the CPU, and here listed for the others.

With MO_FUSED_TEST_BACKEND=triton or cuda tests/conftest.py runs these and nothing else (on a GPU machine together with
MO_FUSED_TEST_DEVICE=cuda). tests/test_triton_suite.py does so in Triton's interpreter, tests/test_cuda_suite.py with
the CUDA kernels compiled for the CPU, one process for each shard. What is not here has the host or one of its backends
as its subject: threads, the command line, packaging, documents. Within these modules, tests that do not belong are
marked ``cpu_only``, ``triton_only`` or ``not_interpreted``, with the reason.
"""

from __future__ import annotations

# Cut so that both take about as long in the interpreter.
SHARDS: tuple[tuple[str, ...], ...] = (
    ("test_numerics", "test_bits", "test_torch_suite", "test_grad_utilities", "test_adafactor_peers")
    + ("test_offload", "test_offload_gradients", "test_offload_state", "test_offload_hazards"),
    ("test_clip", "test_layouts", "test_triton", "test_device_step", "test_device_memory", "test_both_sides")
    + ("test_state", "test_changes", "test_amp", "test_step_protocol", "test_corner_cases", "test_release")
    + ("test_adafactor_numerics", "test_adafactor_rms", "test_adafactor_state", "test_adafactor_step")
    + ("test_adafactor_errors", "test_adafactor_extremes", "test_factored_parts", "test_master_weights")
    + ("test_quantised", "test_random_offset", "test_distributed_devices", "test_profiler"),
)
