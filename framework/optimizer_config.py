"""Config of the optimizer and of precision (config groups `optimizer` and `precision`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from framework.lr import LearningRateConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101) and the global clip norm; max_grad_norm null: no clip."""

    name: Literal["adamw"] = "adamw"
    base_lr: float = 3e-3
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    max_grad_norm: float | None = 1.0
    lr_schedule: LearningRateConfig = field(default_factory=LearningRateConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionConfig:
    """compute: dtype of parameters and activations in use. Master weights and reductions are fp32."""

    compute: Literal["fp32", "bf16"] = "fp32"
