"""DeepSpeed's CPUAdam as an updater: AdamW for masters and moments on the host (Ren et al., arXiv 2101.06840)."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from counterflow.framework.deepspeed.start import import_deepspeed, logger, why_not
from counterflow.framework.optim.config import OptimizerConfig
from counterflow.framework.optim.updaters.updater import STATE_NAMES, Part, Updater


def is_built() -> bool:
    """Whether the operator has been compiled here before, where torch keeps what it compiles."""
    import torch.utils.cpp_extension as extension

    root = os.environ.get("TORCH_EXTENSIONS_DIR") or extension.get_default_build_root()
    python = f"py{sys.version_info.major}{sys.version_info.minor}"
    flavour = "cpu" if torch.version.cuda is None else f"cu{torch.version.cuda.replace('.', '')}"
    return any(
        (Path(each) / "cpu_adam" / "cpu_adam.so").exists() for each in (root, f"{root}/{python}_{flavour}")
    )


def why_no_cpu_adam() -> str | None:
    """Why the operator cannot be compiled here; None: it can, or has been. Imports nothing of DeepSpeed."""
    if (reason := why_not()) is not None:
        return reason
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None and not is_built():
        return f"it is compiled at first use, and there is no C++ compiler ({compiler}); install one, as g++"
    return None


class CpuAdam(Updater):
    """The operator on parts whose tensors are on the host, moments in fp32.

    The first use on a machine compiles it: a minute or a few.

    Raises RuntimeError: where it cannot be had, with the reason.
    """

    name = "DeepSpeed CPUAdam"

    def __init__(self, config: OptimizerConfig) -> None:
        if (reason := why_no_cpu_adam()) is not None:
            raise RuntimeError(f"optimizer.kernel=cpu_adam: {reason}; or set optimizer=adamw")
        self._config = config
        import_deepspeed()
        if not is_built():
            logger.warning("compiling DeepSpeed's CPUAdam, once on this machine: a minute or a few")
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        make: Any = DeepSpeedCPUAdam
        # It wants a parameter of its own; ours are handed to its operator.
        self._adam: Any = make(
            [torch.nn.Parameter(torch.zeros(1))],
            lr=config.base_lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            weight_decay=config.weight_decay,
            adamw_mode=True,
        )

    def new_state(self, master: Tensor) -> dict[str, Tensor]:
        return {name: torch.zeros_like(master) for name in STATE_NAMES}

    @torch.no_grad()
    def update(self, parts: Sequence[Part], *, step: int, learning_rate: float) -> None:
        config = self._config
        for part in parts:
            self._adam.ds_opt_adam.adam_update(
                self._adam.opt_id,
                step,
                learning_rate,
                config.beta1,
                config.beta2,
                config.eps,
                part.weight_decay,
                True,  # corrects the bias
                part.master,
                part.grad,
                part.state["exp_avg"],
                part.state["exp_avg_sq"],
            )
