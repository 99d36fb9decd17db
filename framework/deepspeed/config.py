"""DeepSpeed's JSON config, derived from ours, and what its engine cannot be asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from counterflow.framework.config.tree import TrainConfig

# It prints a line of its own each so many steps; the trainer has records of every step.
_NEVER = 1 << 31


def deepspeed_config(config: TrainConfig) -> dict[str, Any]:
    """The dict for `deepspeed.initialize` that makes its engine do what `config` says.

    The optimizer and the learning rate are not in it: the trainer hands in torch's AdamW and sets the rate of every
    step. Gradients are accumulated until `step` (`managed_gradient_accumulation`), so a step may have any number
    of micro-batches. At stage 0 it clips nothing: it does not tell the norm there, so the trainer clips.
    """
    micro_batch_size, num_microbatches = config.data.micro_batch_size, config.schedule.num_microbatches
    clips = config.zero.stage > 0 and config.optimizer.max_grad_norm is not None
    return {
        "train_micro_batch_size_per_gpu": micro_batch_size,
        "gradient_accumulation_steps": num_microbatches,
        "train_batch_size": config.global_batch_size,
        "managed_gradient_accumulation": False,
        "gradient_clipping": config.optimizer.max_grad_norm if clips else 0.0,
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": config.precision.compute == "bf16"},
        # Sums over data-parallel ranks in fp32, as ours.
        "communication_data_type": "fp32",
        "steps_per_print": _NEVER,
        "wall_clock_breakdown": False,
        "zero_optimization": {
            "stage": config.zero.stage,
            # It would run reductions on a stream of its own, which a CPU has not.
            "overlap_comm": False,
            "contiguous_gradients": True,
            "reduce_scatter": True,
            # Every parameter is sharded, however small, as ours are.
            "stage3_param_persistence_threshold": 0,
        },
    }
