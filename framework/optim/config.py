"""Config of the optimizer and of precision (config groups `optimizer` and `precision`)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from counterflow.framework.optim.loss_scale import LossScaleConfig
from counterflow.framework.optim.lr import LearningRateConfig
from counterflow.framework.optim.offload_config import OptimizerOffloadConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101) and the global clip norm; max_grad_norm null: no clip.

    post_validation: a pipeline rank updates its stage before the norm of the others is known and goes on; where it
        then has to be clipped, the update is undone and done again (Qi et al., arXiv 2401.10241, section 4). The
        result is the same to the bit; it costs copies of master weights and moments.
    kernel: `apex` is NVIDIA's FusedAdam and multi-tensor norm; `auto` takes it where it and a GPU are there. `cpu_adam`
        is DeepSpeed's, for updates on the host.
    """

    name: Literal["adamw", "onebit_adam"] = "adamw"
    base_lr: float = 3e-3
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    max_grad_norm: float | None = 1.0
    post_validation: bool = False
    kernel: Literal["auto", "torch", "apex", "cpu_adam"] = "auto"
    offload: OptimizerOffloadConfig = field(default_factory=OptimizerOffloadConfig)
    lr_schedule: LearningRateConfig = field(default_factory=LearningRateConfig)

    def __post_init__(self) -> None:
        rules = {
            "base_lr": (0 < self.base_lr < math.inf, "above 0; 3e-3 suits small models"),
            "beta1": (0 <= self.beta1 < 1, "from 0 up to 1; 0.9 is usual"),
            "beta2": (0 <= self.beta2 < 1, "from 0 up to 1; 0.95 is usual"),
            "eps": (0 < self.eps < math.inf, "above 0; 1e-8 is usual"),
            "weight_decay": (0 <= self.weight_decay < math.inf, "0 or more; 0.1 is usual"),
            "max_grad_norm": (
                self.max_grad_norm is None or self.max_grad_norm > 0,
                "above 0, or null for no clip; 1.0 is usual",
            ),
        }
        for name, (holds, rule) in rules.items():
            if not holds:
                raise ValueError(f"optimizer.{name}={getattr(self, name)}: must be {rule}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionConfig:
    """compute: dtype of parameters and activations in use; master weights and what gradients are added up in are fp32.

    loss_scale: of fp16 alone, whose gradients would underflow without it.
    reduce: dtype in which gradients are summed over replicas; bf16 is half the bytes.
    optimizer_states: dtype of AdamW's moments; bf16 is rounded at random (framework/optim/updaters/bf16_states.py).
    linear: `fp8` multiplies in the layers' linear layers in fp8 (parallel/ops/fp8.py); `compute` in the precision
    above. norm_kernel: as optimizer.kernel, for norms.
    """

    compute: Literal["fp32", "bf16", "fp16"] = "fp32"
    loss_scale: LossScaleConfig = field(default_factory=LossScaleConfig)
    reduce: Literal["fp32", "bf16"] = "fp32"
    optimizer_states: Literal["fp32", "bf16"] = "fp32"
    linear: Literal["compute", "fp8"] = "compute"
    norm_kernel: Literal["auto", "torch", "apex"] = "auto"
