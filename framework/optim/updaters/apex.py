"""AdamW, sums of squares and norms by NVIDIA's apex (see ../apex.py). Nothing here has run on a GPU yet."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from counterflow.framework.optim.config import OptimizerConfig
from counterflow.framework.optim.updaters.updater import STATE_NAMES, Part, Updater
from counterflow.models.norm import LayerNorm, RMSNorm


class ApexAdamW(Updater):
    """apex's FusedAdam with decoupled weight decay: all parts in a few launches; moments in fp32."""

    name = "apex FusedAdam"

    def __init__(self, config: OptimizerConfig, fused_adam: Any = None) -> None:
        """fused_adam: the class; None: that of apex."""
        if fused_adam is None:
            fused_adam = importlib.import_module("apex.optimizers").FusedAdam
        self._config, self._fused_adam = config, fused_adam

    def new_state(self, master: Tensor) -> dict[str, Tensor]:
        return {name: master.new_zeros(master.shape) for name in STATE_NAMES}

    def update(self, parts: Sequence[Part], *, step: int, learning_rate: float) -> None:
        decays = dict.fromkeys(part.weight_decay for part in parts)
        if not decays:
            return
        for part in parts:
            part.master.grad = part.grad
        groups = [
            {
                "params": [part.master for part in parts if part.weight_decay == decay],
                "weight_decay": decay,
                "step": step - 1,
            }
            for decay in decays
        ]
        config = self._config
        adam = self._fused_adam(
            groups,
            lr=learning_rate,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            adam_w_mode=True,
            bias_correction=True,
        )
        for part in parts:
            adam.state[part.master] = {name: part.state[name] for name in STATE_NAMES}
        adam.step()
        for part in parts:
            part.master.grad = None

    @staticmethod
    def squares(tensors: Sequence[Tensor]) -> Tensor:
        """The sum of squares of all of `tensors`, fp64, added up in fp32 in one launch (apex's multi_tensor_l2norm)."""
        applier = importlib.import_module("apex.multi_tensor_apply").multi_tensor_applier
        extension: Any = importlib.import_module("amp_C")
        overflow = tensors[0].new_zeros(1).int()
        norm, _ = applier(extension.multi_tensor_l2norm, overflow, [list(tensors)], False)
        return norm.double().square().sum()


def use_apex_norms(module: nn.Module) -> None:
    """Make every norm in `module` apex's fused one."""
    fused: Any = importlib.import_module("apex.normalization.fused_layer_norm")

    def rms(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        return fused.fused_rms_norm_affine(x, weight, weight.shape, eps)

    def layer(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        return fused.fused_layer_norm_affine(x, weight, bias, weight.shape, eps)

    for norm in module.modules():
        if isinstance(norm, RMSNorm):
            norm.kernel = rms
        elif isinstance(norm, LayerNorm):
            norm.kernel = layer
