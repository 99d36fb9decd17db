"""Records for the tests of this folder."""

from __future__ import annotations

from dataclasses import replace

from counterflow.framework.metrics.record import Bubbles, RunSummary, StepRecord

RECORD = StepRecord(
    step=0,
    loss=4.5,
    grad_norm=1.25,
    learning_rate=3e-3,
    step_s=0.5,
    num_tokens=1024,
    tokens_per_s=2048.0,
    samples_per_s=16.0,
    model_tflops_per_rank=0.125,
    mfu=None,
    busy_s=(0.4, 0.3),
    idle_s=(0.1, 0.2),
    time_s={
        "forward": (0.2, 0.15),
        "backward": (0.2, 0.15),
        "receive_wait": (0.05, 0.1),
        "other": (0.05, 0.1),
    },
    bubble_measured=0.3,
    bubble_measured_span=0.28,
    bubble_simulated=0.25,
    bubble_simulated_span=0.2,
    bubble_formula=None,
    work_inflation=None,
    bytes_by_axis={"tensor": 100, "pipeline": 20},
    peak_memory_bytes=4096,
    peak_live_activations=(2, 1),
    peak_held_weight_grad_bytes=(512, 0),
)
SUMMARY = RunSummary(
    run_dir="/runs/one",
    final_loss=2.5,
    validation_loss=2.75,
    tokens_per_s=2048.0,
    bubble=Bubbles(measured=0.3, simulated=0.25, formula=None),
    wandb_dir="/runs/one/wandb/offline-run-1",
    steps=30,
    seconds=75.0,
)


def record(step: int, **values: object) -> StepRecord:
    return replace(RECORD, step=step, **{"loss": 5.0 - step / 10, **values})  # type: ignore[arg-type]
