"""A pipeline over your own modules, in your own loop: torchrun --nproc-per-node 4 docs/examples/own_loop.py

Four ranks, DualPipe with two copies of each stage, eight micro-batches; any schedule name works in its place.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from counterflow.parallel.pipeline.api import build_pipeline

WIDTH, NUM_MICROBATCHES = 32, 8


def make_stage(index: int) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    pipeline = build_pipeline(make_stage, "dualpipe", num_microbatches=NUM_MICROBATCHES)
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=3e-3)
    inputs = torch.randn(64, WIDTH)
    targets = inputs.roll(1, dims=1)
    for step in range(30):
        optimizer.zero_grad()
        losses = pipeline.step(inputs, targets, nn.functional.mse_loss).losses
        optimizer.step()
        if dist.get_rank() == 0 and step % 10 in (0, 9):
            print(f"step {step:2}  loss {losses.mean():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
