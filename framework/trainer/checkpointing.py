"""Checkpoints of a run: which tensors, under which names, and when.

The storage is imported where it is used: with torch.distributed.checkpoint comes DTensor, and with that sympy, which
cost a rank that saves nothing more than torch itself does.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch.distributed as dist

from counterflow.framework.checkpoint.manifest import CheckpointError, prune, step_folder, step_of
from counterflow.framework.checkpoint.rng import rng_state, set_rng_state
from counterflow.framework.checkpoint.shard import TensorShard, tensor_shards
from counterflow.framework.config.mapping import to_mapping
from counterflow.framework.config.tree import TrainConfig
from counterflow.framework.errors import ConfigError
from counterflow.framework.experts.routing import routing_state
from counterflow.framework.trainer.assembly import Assembly
from counterflow.framework.trainer.resume import resume_notes, resume_problems
from counterflow.framework.trainer.resume_settings import settings_of
from counterflow.framework.trainer.resume_source import agreed_checkpoint, checkpoints_of, clean_leftovers
from counterflow.framework.trainer.run import RunContext
from counterflow.parallel.collectives import set_timeout
from counterflow.parallel.groups import timeout_of

logger = logging.getLogger(__name__)
_COMPRESSION = "compression."


def state_shards(assembly: Assembly, *, every_copy: bool = True) -> Iterator[TensorShard]:
    """Masters and optimizer state of this rank under their global names.

    `model.<parameter>` and `optimizer.<state>.<parameter>`; both copies of a tied parameter have one name. What
    routers keep between steps is `routing.<layer and value>`, the same on every rank that has the layer.
    every_copy: of an expert that has several; they are equal, and only one of them is saved.
    """
    for name, tensor in routing_state(assembly.modules).items():
        yield TensorShard(
            name=f"routing.{name}",
            global_shape=tuple(tensor.shape),
            offsets=(0,) * tensor.dim(),
            tensor=tensor,
        )
    for owned in assembly.optimizer.owned:
        fragment = owned.fragment
        slot = fragment.slot
        name = slot.placement.tied_to or slot.name
        tensors = {f"model.{name}": fragment.master}
        tensors |= {f"optimizer.{state}.{name}": tensor for state, tensor in owned.state.items()}
        for key, tensor in tensors.items():
            yield from tensor_shards(
                key, tensor, fragment.start, slot.shape, slot.placement, every_copy=every_copy
            )


def compression_shards(assembly: Assembly) -> Iterator[TensorShard]:
    """What compressed reductions keep on this rank: `compression.rank_<r>.stage_<s>.unit_<u>.<name>`, whole."""
    for index, stage in assembly.stages.items():
        for number, unit in enumerate(stage.units):
            for name, tensor in unit.reduction.state().items():
                yield TensorShard(
                    name=f"{_COMPRESSION}rank_{assembly.mesh.rank}.stage_{index}.unit_{number}.{name}",
                    global_shape=tuple(tensor.shape),
                    offsets=(0,) * tensor.dim(),
                    tensor=tensor,
                )


def compression_layout(assembly: Assembly) -> dict[str, Any]:
    """What has to be the same for the state of compressed reductions to mean the same: plain values by name.

    That is how the model is cut into stages, units and slots, and whose experts are in them.
    """
    config = assembly.config
    compression, mesh = config.compression, to_mapping(config.parallel)
    return {
        "compression.method": compression.method,
        "compression.error_feedback": compression.error_feedback,
        "compression.rank": compression.rank,
        "compression.weights": compression.weights != "none",
        "zero.stage": config.zero.stage,
        "zero.units": config.zero.units,
        "zero.shard_size": config.zero.shard_size,
        "schedule.name": config.schedule.name,
        "schedule placement": [list(stages) for stages in assembly.schedule.placement],
        "data.seq_length": config.data.seq_length,
        "vocab_size": assembly.vocab_size,
        "model": to_mapping(config.model),
        "experts' places": {} if assembly.balancer is None else assembly.balancer.state()["placements"],
        **{f"parallel.{name}": value for name, value in mesh.items()},
    }


@contextmanager
def patient(assembly: Assembly, doing: str) -> Iterator[None]:
    """Collectives over all ranks wait by checkpoint.timeout_s within, and an error says what they were `doing`.

    What is within ends in a collective of all ranks, so that none waits for a slow one by the time-out before, which
    holds again after it.
    """
    config, group = assembly.config, assembly.mesh.world
    before = None if group is None else timeout_of(group)
    try:
        set_timeout(group, config.checkpoint.timeout_s)
        yield
    except (CheckpointError, ValueError):
        raise  # they say what they are about, and nobody waited
    except Exception as error:
        error.add_note(
            f"{doing}; ranks waited for each other by checkpoint.timeout_s={config.checkpoint.timeout_s:g}"
        )
        raise
    finally:
        if before is not None:
            set_timeout(group, before.total_seconds())


def save_state(assembly: Assembly, run: RunContext, num_steps: int) -> None:
    """Write the checkpoint after `num_steps` steps and prune older ones."""
    assert not assembly.optimizer.is_ahead, "the parameters are not validated yet"
    folder = step_folder(checkpoints_of(run.run_dir), num_steps)
    metadata: dict[str, Any] = {
        "num_steps": num_steps,
        "num_updates": assembly.optimizer.num_steps,
        "guard": assembly.guard.state(),
        "num_samples": assembly.train.samples_before(num_steps),
        "global_batch_size": assembly.config.global_batch_size,
        "seed": assembly.config.seed,
        "seq_length": assembly.config.data.seq_length,
        "batching": assembly.config.data.batching,
        "tokens_per_step": assembly.config.data.tokens_per_step,
        "num_experts": assembly.config.model.moe.num_experts,
        "settings": settings_of(assembly.config),
        "config": dict(run.config_values),  # for who reads it alone: nothing is compared with it
        "config_hash": run.config_hash,
        "data_hash": run.data.content_hash,
    }
    from counterflow.framework.checkpoint.storage import save

    shards = list(state_shards(assembly, every_copy=False))
    if assembly.config.compression.method != "none":
        metadata["compression"] = compression_layout(assembly)
        shards += compression_shards(assembly)
    if assembly.balancer is not None:
        metadata["balance"] = assembly.balancer.state()
    with patient(assembly, f"while the checkpoint of step {num_steps} was saved"):
        save(folder, shards, metadata, group=assembly.mesh.world, rank_state=rng_state())
        if assembly.mesh.rank == 0:
            prune(folder.parent, assembly.config.checkpoint.keep)
        dist.barrier(group=assembly.mesh.world)


def is_due(config: TrainConfig, num_steps: int) -> bool:
    """Whether the interval or the end of the run says to save after `num_steps` steps."""
    interval = config.checkpoint.interval_steps
    is_last = num_steps == config.training.num_steps
    return config.checkpoint.enabled and (is_last or (interval > 0 and num_steps % interval == 0))


def save_if_due(assembly: Assembly, run: RunContext, num_steps: int) -> None:
    """Save after `num_steps` steps where it is due."""
    if is_due(assembly.config, num_steps):
        save_state(assembly, run, num_steps)


def goes_on_compressed(assembly: Assembly, saved: Mapping[str, Any]) -> bool:
    """Whether what compressed reductions kept is to be loaded; else they start anew, and the log says why."""
    if assembly.config.compression.method == "none":
        return False
    # As JSON, which is what the saved one has been through: it knows no tuples.
    before, now = saved.get("compression", {}), json.loads(json.dumps(compression_layout(assembly)))
    changed = [name for name, value in now.items() if before.get(name) != value]
    if changed:
        logger.warning(
            "compressed reductions start anew: what they had left out was kept for another layout; changed: %s",
            ", ".join(changed) if before else "gradients were not compressed",
        )
    return not changed


def resume(assembly: Assembly, run: RunContext) -> int:
    """`_resume`, with the checkpoint held meanwhile: the run that it is of may live and prune."""
    with ExitStack() as holding:
        return _resume(assembly, run, holding)


def _resume(assembly: Assembly, run: RunContext, holding: ExitStack) -> int:
    """Load the checkpoint to go on from, which rank 0 chooses; the first step to do.

    Raises ValueError: where there is none, it was trained with another model, other data or another global batch, or
    it has no steps left to do. CheckpointError: where it is damaged, or ranks see different ones.
    """
    source = assembly.config.checkpoint.resume
    if source is None:
        return 0
    from counterflow.framework.checkpoint.storage import load, read_rank_state

    config, world = assembly.config, assembly.mesh.world
    with patient(assembly, f"while the checkpoints of {source} were read"):
        folder, manifest = agreed_checkpoint(
            source, world, verify_checksums=config.checkpoint.verify_checksums, holding=holding
        )
    saved = manifest.metadata
    problems = resume_problems(config, folder, saved, run.data.content_hash)
    if problems:
        raise ConfigError(problems)
    if assembly.mesh.rank == 0:
        clean_leftovers(source)
        for note in resume_notes(config, folder, saved):
            logger.warning("%s", note)
    if assembly.balancer is not None and "balance" in saved:
        # Before anything is loaded: what goes into a slot depends on whose it is.
        assembly.balancer.restore(saved["balance"], assembly)
    shards = list(state_shards(assembly))
    if goes_on_compressed(assembly, saved):
        shards += compression_shards(assembly)
    with patient(assembly, f"while {folder} was loaded"):
        metadata = load(
            folder,
            shards,
            group=world,
            verify_checksums=False,  # every file has been read
            optional=(_COMPRESSION,),
            digest=manifest.digest,
        )
        dist.barrier(group=world)
    num_updates = metadata.get("num_updates", metadata["num_steps"])
    assembly.optimizer.restore(num_updates)
    if "guard" in metadata:
        assembly.guard.restore(metadata["guard"])
    for unit in (unit for stage in assembly.stages.values() for unit in stage.units):
        unit.reduction.num_steps = num_updates
    state = read_rank_state(folder, assembly.mesh.rank, assembly.axes.world.size)
    if state is None:
        logger.warning(
            "%s was written by another number of ranks: random generators start from the seed", folder
        )
    else:
        set_rng_state(state)
    return step_of(folder)
