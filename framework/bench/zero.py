"""`counterflow bench zero`: ZeRO-3 by blocks beside torch's fully_shard and DeepSpeed's: peak, step time, bytes."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from counterflow.framework.checks.dry_run import held_by
from counterflow.framework.config.tree import TrainConfig
from counterflow.framework.data.loader import Batch
from counterflow.framework.data.prepare import PreparedData
from counterflow.framework.memory.live import LiveBytes, alive_tensors
from counterflow.framework.planning.workload import Workload
from counterflow.framework.trainer.assembly import Assembly
from counterflow.framework.trainer.build import batches_of, build
from counterflow.framework.trainer.loop import seed_everything
from counterflow.framework.trainer.step import train_step
from counterflow.models.transformer import TransformerStage, materialize
from counterflow.parallel.collectives import Axis
from counterflow.parallel.mesh import build_mesh
from counterflow.parallel.ops.loss import vocab_parallel_cross_entropy

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroRow:
    """One way to gather and reduce, at one number of replicas. Peaks: the largest of any rank.

    step_ratio_*: the other's step time over ours, the median over rounds; above 1 where ours is faster. None: not run.
    sent_bytes: of one rank in a step. lower_bound_bytes: see `lower_bound`.
    """

    dp: int
    units: str
    reduce: str
    peak_bytes: int
    fully_shard_peak_bytes: int
    step_s: float
    step_ratio_fully_shard: float
    step_ratio_deepspeed: float | None
    sent_bytes: int
    lower_bound_bytes: int
    loss_difference: float

    @property
    def peak_ratio(self) -> float:
        return self.peak_bytes / self.fully_shard_peak_bytes


class FullyShardPeer:
    """The same model under torch's fully_shard: embedding, each layer, and norm with head; fused AdamW."""

    def __init__(self, config: TrainConfig, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        model = TransformerStage(
            config.model,
            range(config.model.num_layers),
            first=True,
            last=True,
            tensor=Axis(),
            sequence_parallel=False,
            vocab_size=vocab_size,
        )
        materialize(model, device=_CPU, seed=config.seed)
        for block in model.blocks():
            fully_shard(list(block.modules))
        fully_shard(model)
        self._model, self._max_norm = model, config.optimizer.max_grad_norm
        optimizer = config.optimizer
        self._optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=optimizer.base_lr,
            betas=(optimizer.beta1, optimizer.beta2),
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
            fused=True,
        )

    def step(self, batch: Batch) -> float:
        """One step over this rank's micro-batches; its part of the loss."""
        total = 0.0
        for tokens, targets in zip(batch.tokens, batch.targets, strict=True):
            losses = vocab_parallel_cross_entropy(
                self._model(tokens), targets, Axis(), vocab_size=self._vocab_size
            )
            # Gradients are averaged over ranks.
            loss = losses.sum() / batch.num_valid_tokens * dist.get_world_size()
            loss.backward()
            total += float(loss.detach()) / dist.get_world_size()
        if self._max_norm is not None:
            nn.utils.clip_grad_norm_(self._model.parameters(), self._max_norm)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return total


def measure_zero(
    config: TrainConfig,
    data: PreparedData,
    ways: Sequence[tuple[str, str]],
    repeats: int,
    deepspeed: bool,
) -> list[ZeroRow]:
    """Each of `ways` (zero.units, zero.reduce) beside its peers; every rank calls this, all get the rows.

    config: of ZeRO-3 on one pipeline rank. deepspeed: whether its engine trains as well.
    """
    configs = [
        replace(config, zero=replace(config.zero, units=units, reduce=reduce)) for units, reduce in ways
    ]
    # Before the peer is there: it would be in their peaks.
    alone = [_ours_alone(each, data) for each in configs]
    peer, theirs = _fully_shard_alone(config, data)
    return [
        _row(each, ours, theirs, _turns(each, data, peer, repeats=repeats, deepspeed=deepspeed))
        for each, ours in zip(configs, alone, strict=True)
    ]


def _row(
    config: TrainConfig, ours: _Alone, theirs: _Alone, seconds: Mapping[str, Sequence[float]]
) -> ZeroRow:
    has_deepspeed = "deepspeed" in seconds
    return ZeroRow(
        dp=config.parallel.data_parallel_size,
        units=config.zero.units,
        reduce=config.zero.reduce,
        peak_bytes=ours.peak_bytes,
        fully_shard_peak_bytes=theirs.peak_bytes,
        step_s=statistics.median(seconds["ours"]),
        step_ratio_fully_shard=_ratio(seconds["fully_shard"], seconds["ours"]),
        step_ratio_deepspeed=_ratio(seconds["deepspeed"], seconds["ours"]) if has_deepspeed else None,
        sent_bytes=ours.sent_bytes,
        lower_bound_bytes=ours.lower_bound_bytes,
        loss_difference=abs(ours.loss - theirs.loss),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Alone:
    """A step while nothing else is in memory. loss: of the first step, before any update."""

    peak_bytes: int
    loss: float
    sent_bytes: int = 0
    lower_bound_bytes: int = 0


def _ours_alone(config: TrainConfig, data: PreparedData) -> _Alone:
    seed_everything(config.seed, deterministic=config.is_deterministic("cpu"))
    with build(config, data, _CPU) as assembly:
        loss = sum(rank.loss for rank in train_step(assembly, 0).ranks)
        return _Alone(
            peak_bytes=_peak(lambda: train_step(assembly, 1), held_by(assembly)),
            loss=loss,
            sent_bytes=sum(assembly.axes.meter.sent_bytes().values()),
            lower_bound_bytes=lower_bound(assembly),
        )


def _fully_shard_alone(config: TrainConfig, data: PreparedData) -> tuple[FullyShardPeer, _Alone]:
    workload = Workload.of(config, data_vocab_size=data.vocab_size, device_type="cpu")
    mesh = build_mesh(config.parallel)
    batches = batches_of(workload, mesh, data).train
    mesh.close()
    peer = FullyShardPeer(config, workload.vocab_size)
    loss = torch.tensor(peer.step(batches.batch(0)), dtype=torch.float64)
    dist.all_reduce(loss)
    second = batches.batch(1)
    return peer, _Alone(peak_bytes=_peak(lambda: peer.step(second)), loss=float(loss))


def lower_bound(assembly: Assembly) -> int:
    """The least bytes that a rank sends in a step that keeps 1 + zero.prefetch_units blocks whole at a time.

    Each micro-batch gathers every block for its forward and, but for an embedding, which needs no weights there, for
    its backward; what is whole where the direction turns is not gathered again. Gradients are reduced once, in fp32.
    """
    (stage,) = assembly.stages.values()
    module = assembly.modules[0]
    assert isinstance(module, TransformerStage)
    forward = [sum(each.numel() for each in block.parameters()) for block in module.blocks()]
    backward = [size for size, block in zip(forward, module.blocks(), strict=True) if block.reads_in_backward]
    kept, count = 1 + assembly.config.zero.prefetch_units, assembly.schedule.num_microbatches
    gathered = count * (sum(forward) + sum(backward[:-kept])) - (count - 1) * sum(backward[:kept])
    element = next(module.parameters()).element_size()
    reduced = sum(unit.grad.numel() for unit in stage.units) * dist.get_world_size() * 4
    return (gathered * element + reduced) * (dist.get_world_size() - 1) // dist.get_world_size()


def _peak(run: Callable[[], object], held: dict[str, list[torch.Tensor]] | None = None) -> int:
    """The most bytes alive while `run` runs, over all ranks; held: what is known to be there before, by its part."""
    gc.collect()
    with LiveBytes({**(held or {}), "other": alive_tensors(_CPU)}) as live:
        run()
    peak = torch.tensor(live.peak.num_bytes, dtype=torch.int64)
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    return int(peak)


def _turns(
    config: TrainConfig, data: PreparedData, peer: FullyShardPeer, *, repeats: int, deepspeed: bool
) -> dict[str, list[float]]:
    """Seconds of the slowest rank in each step of each, in turns."""
    assemblies: dict[str, Assembly] = {"ours": build(config, data, _CPU)}
    if deepspeed:
        other = replace(config.zero, engine="deepspeed", units="block", reduce="step")
        assemblies["deepspeed"] = build(replace(config, zero=other), data, _CPU)
    seconds: dict[str, list[float]] = {name: [] for name in (*assemblies, "fully_shard")}
    batches = assemblies["ours"].train
    for step in range(repeats + 1):
        batch = batches.batch(step)
        for name in seconds:
            dist.barrier()
            begin = time.perf_counter()
            if name == "fully_shard":
                peer.step(batch)
            else:
                train_step(assemblies[name], step)
            elapsed = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
            dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
            seconds[name].append(float(elapsed))
    for assembly in assemblies.values():
        assembly.close()
    return {name: each[1:] for name, each in seconds.items()}


def _ratio(theirs: Sequence[float], ours: Sequence[float]) -> float:
    return statistics.median(their / our for their, our in zip(theirs, ours, strict=True))
