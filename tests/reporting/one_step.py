"""The metrics of one step, for tests of what is written and shown."""

from megatrain.reporting.metrics import StepMetrics, StepTime

STEP = StepMetrics(
    step=1,
    loss=2.5,
    metrics={},
    aux_loss=None,
    expert_load_max=None,
    grad_norm=0.75,
    lr=1e-5,
    tokens=2000,
    target_tokens=1500,
    epoch=0.1,
    step_s=2.0,
    tokens_per_s=1000.0,
    tflops=1.6,
    mfu=None,
    gpu_peak_bytes=None,
    host_bytes=3 * 2**29,
    skipped=False,
    spike=False,
    energy_j=None,
    slowest_rank=None,
    time=StepTime(compute=1.5, wait_update=0.5),
    advice="raise the roof",
)
