"""Checkpoints of a run: which tensors, under which names, and when."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from framework.build import Assembly
from framework.checkpoint.box import TensorBox, shard_boxes
from framework.checkpoint.manifest import prune, read_metadata, step_folder, step_of
from framework.checkpoint.rng import rng_state, set_rng_state
from framework.checkpoint.storage import load, read_rank_state, save
from framework.errors import ConfigError
from framework.resume import checkpoint_to_resume, checkpoints_of, resume_problems
from framework.run import RunContext

logger = logging.getLogger(__name__)


def state_boxes(assembly: Assembly) -> Iterator[TensorBox]:
    """Masters and optimizer state of this rank under their global names.

    `model.<parameter>` and `optimizer.<state>.<parameter>`; both copies of a tied parameter have one name.
    """
    for owned in assembly.optimizer.owned:
        fragment = owned.fragment
        slot = fragment.slot
        name = slot.placement.tied_to or slot.name
        tensors = {f"model.{name}": fragment.master}
        tensors |= {f"optimizer.{state}.{name}": tensor for state, tensor in owned.state.items()}
        for key, tensor in tensors.items():
            yield from shard_boxes(key, tensor, fragment.start, slot.shape, slot.placement)


def save_state(assembly: Assembly, run: RunContext, num_steps: int) -> None:
    """Write the checkpoint after `num_steps` steps and prune older ones."""
    folder = step_folder(checkpoints_of(run.run_dir), num_steps)
    metadata: dict[str, Any] = {
        "num_steps": num_steps,
        "num_samples": num_steps * assembly.train.global_batch_size,
        "global_batch_size": assembly.train.global_batch_size,
        "seed": assembly.config.seed,
        "config_hash": run.config_hash,
        "data_hash": run.data.content_hash,
    }
    save(folder, list(state_boxes(assembly)), metadata, group=assembly.mesh.world, rank_state=rng_state())
    if assembly.mesh.rank == 0:
        prune(folder.parent, assembly.config.checkpoint.keep)
    dist.barrier(group=assembly.mesh.world)


def save_if_due(assembly: Assembly, run: RunContext, num_steps: int) -> None:
    """Save after `num_steps` steps where the interval or the end of the run says so."""
    config = assembly.config.checkpoint
    is_due = config.interval_steps > 0 and num_steps % config.interval_steps == 0
    is_last = num_steps == assembly.config.training.num_steps
    if config.enabled and (is_due or is_last):
        save_state(assembly, run, num_steps)


def resume(assembly: Assembly, run: RunContext) -> int:
    """Load the newest whole checkpoint of the run to go on from; the first step to do.

    Raises ValueError: where that run has no checkpoint, trained on other data or another global batch, or has
    no steps left to do.
    """
    source = assembly.config.checkpoint.resume
    if source is None:
        return 0
    folder = checkpoint_to_resume(source)
    problems = resume_problems(assembly.config, folder, read_metadata(folder), run.data.content_hash)
    if problems:
        raise ConfigError(problems)
    metadata = load(
        folder,
        list(state_boxes(assembly)),
        group=assembly.mesh.world,
        verify_checksums=assembly.config.checkpoint.verify_checksums,
    )
    assembly.optimizer.restore(metadata["num_steps"])
    state = read_rank_state(folder, assembly.mesh.rank, assembly.axes.world.size)
    if state is None:
        logger.warning(
            "%s was written by another number of ranks: random generators start from the seed", folder
        )
    else:
        set_rng_state(state)
    return step_of(folder)
