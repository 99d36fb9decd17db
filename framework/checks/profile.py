"""Measure what a pipeline's stages cost on this machine: F, I, W and B of each, and the link between two ranks.

Stages of the same layers cost the same, so each shape is built and timed once, all of them in turn, round by round:
a disturbance of the machine then hits all alike, and the median leaves it out. Experts are all here: a rank that
holds a part of them computes as much, for the tokens of others; what the exchange costs is not in the profile.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from counterflow.framework.config.tree import TrainConfig
from counterflow.framework.metrics.hardware import device_name
from counterflow.framework.planning.workload import Workload
from counterflow.framework.trainer.build import COMPUTE_DTYPES
from counterflow.framework.trainer.loop import seed_everything
from counterflow.framework.trainer.process_group import process_group
from counterflow.models.partition import StageSlice, partition
from counterflow.models.recompute import NOTHING, Parts, Plan
from counterflow.models.transformer import TransformerStage
from counterflow.parallel.collectives import Axis
from counterflow.parallel.groups import new_group
from counterflow.parallel.ops.loss import vocab_parallel_cross_entropy
from counterflow.parallel.pipeline.analysis.cost_profile import CostProfile, Link, StageCost
from counterflow.parallel.pipeline.runtime.stage import Stage
from counterflow.parallel.zero.config import ZeroConfig
from counterflow.parallel.zero.context import ReplicaAxes, ZeroContext
from counterflow.parallel.zero.stage import ShardedStage

# Whether each of its layers has experts and what it recomputes, and whether it is the first and the last stage.
StageShape = tuple[tuple[tuple[bool, Parts], ...], bool, bool]

_WARM_UP = 2
_ROUNDS = (7, 40)  # at least, at most
_SECONDS = 6.0
_PINGS = 30


def run_profile_rank(
    config: TrainConfig, num_stages: int, vocab_size: int, local_rank: int
) -> CostProfile | None:
    """Entry of each rank: the first tensor_parallel_size ranks run the stages together, ranks 0 and 1 the link.

    The environment describes the process group. The profile, on rank 0.
    """
    with process_group(config, local_rank) as device:
        seed_everything(config.seed, deterministic=config.is_deterministic(device.type))
        return measure(config, num_stages, vocab_size, device)


def measure(
    config: TrainConfig, num_stages: int, vocab_size: int, device: torch.device
) -> CostProfile | None:
    """The profile of the model cut into `num_stages`, on rank 0; every rank of the world calls this."""
    tensor_size, rank = config.parallel.tensor_parallel_size, dist.get_rank()
    group = new_group(range(tensor_size), "tensor") if tensor_size > 1 else None
    slices = partition(config.model, num_stages, seq_length=config.data.seq_length, vocab_size=vocab_size)
    # I and B are measured with what they run again.
    plan = Workload(
        config=config, vocab_size=vocab_size, device_type="cpu" if device.type == "cpu" else "cuda"
    ).recompute_plan
    shapes: list[StageShape] = [
        (
            tuple((config.model.is_moe_layer(index), plan.get(index, NOTHING)) for index in cut.layers),
            cut.first,
            cut.last,
        )
        for cut in slices
    ]
    probes: dict[StageShape, _Probe] = {}
    if rank < tensor_size:
        tensor = Axis(group=group)
        for shape, cut in zip(shapes, slices, strict=True):
            if shape not in probes:
                probes[shape] = _Probe(config, cut, tensor, vocab_size, device, plan)
    costs = _stage_costs(probes, rank, device)
    sizes = [probes[shape].output_bytes for shape in shapes[:-1]] if probes else []
    link = _measure_link(max(sizes, default=0), rank, device)
    if rank > 0:
        return None
    return CostProfile(
        stages=tuple(costs[shape] for shape in shapes),
        activation_bytes=tuple(sizes),
        link=link,
        provenance=_provenance(config, slices, vocab_size, device),
    )


class _Probe:
    """One stage with a micro-batch to run it on."""

    def __init__(
        self,
        config: TrainConfig,
        cut: StageSlice,
        tensor: Axis,
        vocab_size: int,
        device: torch.device,
        plan: Plan,
    ) -> None:
        dtype = COMPUTE_DTYPES[config.precision.compute]
        module = TransformerStage(
            config.model,
            cut.layers,
            first=cut.first,
            last=cut.last,
            tensor=tensor,
            sequence_parallel=config.parallel.sequence_parallel,
            vocab_size=vocab_size,
            recomputed=plan,
            loss_chunk_tokens=config.loss.chunk_tokens,
            dtype=dtype,
        )
        parameters = ShardedStage(
            module,
            ZeroContext(
                config=ZeroConfig(),
                replica=ReplicaAxes.of(Axis()),
                tensor=tensor,
                expert_replica=ReplicaAxes.of(Axis()),
                dtype=dtype,
                device=device,
            ),
            seed=config.seed,
        )
        self._module = module
        # The number decides whether an input gradient is computed: the first stage computes none.
        self._stage = Stage(0 if cut.first else 1, module, parameters)
        self.parameter_bytes = sum(parameter.nbytes for parameter in module.parameters())
        batch, length = config.data.micro_batch_size, config.data.seq_length
        self._is_last, self._tensor, self._vocab_size, self._device = cut.last, tensor, vocab_size, device
        here = length // (tensor.size if config.parallel.sequence_parallel else 1)
        tokens = torch.randint(vocab_size, (batch, length), device=device)
        hidden = torch.randn(batch, here, config.model.hidden_size, device=device, dtype=dtype)
        self._input = tokens if cut.first else hidden
        self._target = tokens
        self._grads = None if cut.last else (torch.randn_like(hidden),)
        self.output_bytes = 0 if cut.last else hidden.nbytes
        self.times: dict[str, list[float]] = {name: [] for name in ("forward", "input", "weight", "backward")}

    def round(self) -> None:
        """Time F, I and W of one micro-batch and F and B of another."""
        self._stage.parameters.begin_step()
        self._timed("forward", lambda: self._forward(0))
        self._timed("input", lambda: self._stage.backward(0, self._grads, defer=True))
        self._timed("weight", lambda: self._stage.weight_backward(0))
        self._timed("forward", lambda: self._forward(1))
        self._timed("backward", lambda: self._stage.backward(1, self._grads, defer=False))

    def _forward(self, microbatch: int) -> None:
        outputs = self._stage.forward(microbatch, (self._input,))
        if self._is_last:
            losses = torch.stack(self._losses(outputs))
            self._stage.set_loss(microbatch, losses.sum() / self._target.numel())

    def _losses(self, outputs: tuple[Tensor, ...]) -> list[Tensor]:
        """That of the model and of its MTP modules."""
        module = self._module
        if module.has_chunked_loss:
            states = [(outputs[0], self._target)]
            if module.mtp is not None:
                states += module.further_states(outputs[0], self._target)
            return [module.token_loss(*each) for each in states]
        predictions = [(outputs[0], self._target)]
        if module.mtp is not None:
            predictions += module.mtp_predictions(outputs[1], self._target)
        return [
            vocab_parallel_cross_entropy(logits, target, self._tensor, vocab_size=self._vocab_size).sum()
            for logits, target in predictions
        ]

    def _timed(self, name: str, action: Callable[[], object]) -> None:
        _synchronize(self._device)
        start = time.perf_counter()
        action()
        _synchronize(self._device)
        self.times[name].append(time.perf_counter() - start)

    def cost(self) -> StageCost:
        median = {name: statistics.median(times) for name, times in self.times.items()}
        return StageCost(
            forward_s=median["forward"],
            input_gradient_s=median["input"],
            weight_gradient_s=median["weight"],
            backward_s=median["backward"],
            parameter_bytes=self.parameter_bytes,
        )


def _stage_costs(
    probes: dict[StageShape, _Probe], rank: int, device: torch.device
) -> dict[StageShape, StageCost]:
    """Median times of every shape; all ranks agree on the number of rounds."""
    start = time.perf_counter()
    for _ in range(_WARM_UP):
        for probe in probes.values():
            probe.round()
    seconds = (time.perf_counter() - start) / _WARM_UP
    least, most = _ROUNDS
    count = min(most, max(least, round(_SECONDS / max(seconds, 1e-9))))
    shared = torch.tensor([count], device=device)
    dist.broadcast(shared, 0)
    for probe in probes.values():
        for times in probe.times.values():
            times.clear()
    for _ in range(int(shared)):
        for probe in probes.values():
            probe.round()
    dist.barrier()
    return {shape: probe.cost() for shape, probe in probes.items()}


def _measure_link(num_bytes: int, rank: int, device: torch.device) -> Link:
    """From ping-pongs between ranks 0 and 1: of four bytes the latency, of an activation the bandwidth.

    One rank alone, or one stage, has no link: it takes no time.
    """
    if dist.get_world_size() == 1:
        return Link()
    length = torch.tensor([num_bytes], device=device)
    dist.broadcast(length, 0)
    num_bytes = int(length)
    if num_bytes == 0:
        return Link()
    latency_s = _ping(4, rank, device)
    transfer_s = _ping(num_bytes, rank, device)
    # Where the noise of the latency is all there is, the whole transfer counts as transmission.
    sending_s = transfer_s - latency_s if transfer_s > latency_s else transfer_s
    return Link(latency_s=latency_s, bandwidth_bytes_per_s=num_bytes / sending_s)


def _ping(num_bytes: int, rank: int, device: torch.device) -> float:
    """Seconds of one way."""
    times: list[float] = []
    message = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    for turn in range(_PINGS if rank < 2 else 0):
        start = time.perf_counter()
        for sender in (0, 1):
            work = dist.isend(message, 1 - rank) if rank == sender else dist.irecv(message, 1 - rank)
            assert work is not None
            work.wait()
        _synchronize(device)
        if turn >= _WARM_UP:
            times.append((time.perf_counter() - start) / 2)
    dist.barrier()
    return statistics.median(times) if times else 0.0


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _provenance(
    config: TrainConfig, slices: Sequence[StageSlice], vocab_size: int, device: torch.device
) -> dict[str, Any]:
    model = config.model
    return {
        "model": f"{model.name}, {model.num_layers} layers, hidden {model.hidden_size}, intermediate "
        f"{model.intermediate_size}, vocabulary {vocab_size}",
        "machine": f"{platform.machine()}, {device_name(device)}, torch {torch.__version__}, "
        f"{torch.get_num_threads()} threads a rank",
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "layers": [len(cut.layers) for cut in slices],
        "precision": config.precision.compute,
        "micro_batch_size": config.data.micro_batch_size,
        "seq_length": config.data.seq_length,
        "tensor_parallel_size": config.parallel.tensor_parallel_size,
    }
