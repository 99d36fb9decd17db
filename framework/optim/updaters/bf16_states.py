"""AdamW with its moments in bf16, rounded at random so that small changes are not lost: half the optimizer's memory.

Note [Why at random]
A moment changes by a few per cent of the gradient's share in each step; bf16 has 8 bits, so rounding to the nearest
would drop most changes of exp_avg_sq (beta2 = 0.95 or more) for good. Rounded up with a probability that is the
distance from below, the expectation is the exact value (Gupta et al., arXiv 1502.02551, section 3). The noise is drawn
from the seed, the number of the update and the place of the moments in the whole model, so a step that is undone and
done again, a run that is resumed and every replica draw the same.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from counterflow.framework.optim.config import OptimizerConfig
from counterflow.framework.optim.updaters.updater import STATE_NAMES, Part, Updater

_LOW_BITS = 16  # of fp32 that bf16 does not have


class StochasticBf16AdamW(Updater):
    """The update is computed in fp32 from bf16 moments; what is kept of the new ones is rounded."""

    name = "AdamW with bf16 moments, rounded stochastically"

    def __init__(self, config: OptimizerConfig, seed: int) -> None:
        self._config, self._seed = config, seed

    def new_state(self, master: Tensor) -> dict[str, Tensor]:
        return {name: torch.zeros_like(master, dtype=torch.bfloat16) for name in STATE_NAMES}

    @torch.no_grad()
    def update(self, parts: Sequence[Part], *, step: int, learning_rate: float) -> None:
        config = self._config
        correction1, correction2 = 1 - config.beta1**step, 1 - config.beta2**step
        for part in parts:
            mean = part.state["exp_avg"].float().lerp_(part.grad, 1 - config.beta1)
            square = part.state["exp_avg_sq"].float().mul_(config.beta2)
            square.addcmul_(part.grad, part.grad, value=1 - config.beta2)
            part.master.mul_(1 - learning_rate * part.weight_decay)
            scale = (square.sqrt() / math.sqrt(correction2)).add_(config.eps)
            part.master.addcdiv_(mean, scale, value=-learning_rate / correction1)
            generator = torch.Generator(device=mean.device)
            # The CPU generator reads 32 bits of its seed.
            generator.manual_seed(zlib.crc32(f"{self._seed}/{step}/{part.key}".encode()))
            for name, exact in zip(STATE_NAMES, (mean, square), strict=True):
                part.state[name].copy_(rounded_to_bf16(exact, generator))


def rounded_to_bf16(values: Tensor, generator: torch.Generator) -> Tensor:
    """fp32 -> bf16, up or down at random, in the mean exact; what bf16 holds and what is not finite stays as it is."""
    noise = torch.randint(
        1 << _LOW_BITS, values.shape, dtype=torch.int32, device=values.device, generator=generator
    )
    # Fp32 is sign and magnitude: a carry out of the low bits is the next bf16 away from zero.
    bits = (values.view(torch.int32) + noise) & -(1 << _LOW_BITS)
    return torch.where(values.isfinite(), bits.view(torch.float32), values).bfloat16()
