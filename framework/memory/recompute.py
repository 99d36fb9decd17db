"""What a run recomputes: the config's choice, or what keeps every rank within a budget of activation bytes.

Note [Activations of a rank]
What autograd keeps for backwards, as models/cost.py counts it, over the micro-batches that are alive together in the
schedule. While a part is run again its own activations live too; the later parts of that micro-batch are gone by then.
So do the logits of a chunk where the loss is computed in chunks (loss.chunk_tokens), in the backward of the last stage.
Not counted are what W of a split backward still needs, messages under way, and the one output of each micro-batch
that a stage hands on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from counterflow.framework.devices import device_kind
from counterflow.models.config import ModelConfig
from counterflow.models.cost import (
    activation_bytes_of_ends,
    activation_bytes_per_layer,
    head_forward_flops,
    layer_forward_flops,
    loss_chunk_bytes,
    recomputed_flops,
)
from counterflow.models.partition import StageSlice, partition
from counterflow.models.recompute import NOTHING, Parts, Plan, options, plan_of
from counterflow.parallel.offload.plan import without_offload
from counterflow.parallel.pipeline.ir.action import Kind, Schedule
from counterflow.parallel.pipeline.ir.offload_sizes import UnitBytes

if TYPE_CHECKING:
    from counterflow.framework.config.tree import TrainConfig

BYTES_PER_ELEMENT = {"fp32": 4, "bf16": 2, "fp16": 2}


def recompute_plan(
    config: TrainConfig,
    schedule: Schedule,
    *,
    vocab_size: int,
    on_cpu: bool | None = None,
    others: Sequence[Schedule] = (),
) -> dict[int, Parts]:
    """What each layer recomputes. schedule: compute actions, or what the ranks execute.

    others: schedules of other steps, with the same stages, that keep within the budget as well.

    on_cpu: whether the ranks compute on a CPU; None: as config.device says. Before ranks start and in them
    the plan is the same.

    Raises ValueError: where the budget of `auto` is less than recomputing everything needs.
    """
    if config.recompute.mode != "auto":
        return plan_of(config.recompute, config.model)
    if on_cpu is None:
        on_cpu = device_kind(config.device) == "cpu"
    # What is recomputed is chosen first, and what is then left is offloaded.
    executed = [without_offload(as_executed(config, each)) for each in (schedule, *others)]
    return _Search(config, executed, vocab_size, on_cpu).plan()


def as_executed(config: TrainConfig, schedule: Schedule) -> Schedule:
    """`schedule` as the ranks execute it: pairs and early sends change how many micro-batches live at once."""
    from counterflow.parallel.pipeline.analysis.passes import lower

    if any(action.kind is Kind.REDUCE_GRAD for actions in schedule.actions for action in actions):
        return schedule
    return lower(
        schedule,
        zero_stage=config.zero.stage,
        reshard_after=[config.zero.reshard_after_of(rank) for rank in range(schedule.num_ranks)],
        early_sends=config.schedule.early_sends,
        overlap=config.overlaps_experts,
    )


def peak_activation_bytes(
    config: TrainConfig, schedule: Schedule, plan: Plan, *, vocab_size: int, on_cpu: bool = False
) -> tuple[int, ...]:
    """The most activation bytes of each pipeline rank in a step, see Note [Activations of a rank].

    schedule: where it has OFFLOAD and RELOAD, as if they took no time.
    """
    return _Search(config, [schedule], vocab_size, on_cpu).peaks(plan)


def unit_bytes(
    config: TrainConfig, schedule: Schedule, plan: Plan, *, vocab_size: int, on_cpu: bool = False
) -> tuple[UnitBytes, ...]:
    """Of each stage, the activation bytes of one micro-batch."""
    return _Search(config, [schedule], vocab_size, on_cpu).stages(plan)


def recompute_shares(
    config: TrainConfig, num_stages: int, plan: Plan, *, vocab_size: int
) -> tuple[float, ...]:
    """Of each stage, the part of its forward that its backward runs again, by FLOPs."""
    seq_length, model = config.data.seq_length, config.model
    shares: list[float] = []
    for cut in partition(model, num_stages, seq_length=seq_length, vocab_size=vocab_size):
        layers = _layers_of(model, cut)
        # Head and loss in chunks are part of the backward.
        heads = (1 + model.mtp.num_modules) * cut.last * (config.loss.chunk_tokens is None)
        whole = heads * head_forward_flops(model, vocab_size=vocab_size)
        whole += sum(layer_forward_flops(model, layer, seq_length=seq_length) for layer in layers)
        again = sum(
            recomputed_flops(model, layer, plan.get(layer, NOTHING), seq_length=seq_length)
            for layer in layers
        )
        shares.append(again / whole if whole else 0.0)
    return tuple(shares)


def _layers_of(model: ModelConfig, cut: StageSlice) -> tuple[int, ...]:
    modules = range(model.num_layers, model.num_layers + model.mtp.num_modules) if cut.last else ()
    return (*cut.layers, *modules)


class _Search:
    """The bytes of every plan, and the plan that fits a budget."""

    def __init__(
        self, config: TrainConfig, schedules: Sequence[Schedule], vocab_size: int, on_cpu: bool
    ) -> None:
        """schedules: of one placement; a plan is for what is alive together in any of them."""
        self._config, self._on_cpu, schedule = config, on_cpu, schedules[0]
        self._slices = partition(
            config.model, schedule.num_stages, seq_length=config.data.seq_length, vocab_size=vocab_size
        )
        self._begin, self._end = (
            activation_bytes_of_ends(
                config.model,
                num_tokens=self._num_tokens,
                first=not is_last,
                last=is_last,
                vocab_size=vocab_size,
                tensor_parallel_size=config.parallel.tensor_parallel_size,
                sequence_parallel=config.parallel.sequence_parallel,
                bytes_per_element=BYTES_PER_ELEMENT[config.precision.compute],
                on_cpu=on_cpu,
                is_loss_chunked=config.loss.chunk_tokens is not None,
            )
            for is_last in (False, True)
        )
        self._chunk = 0
        if config.loss.chunk_tokens is not None:
            self._chunk = loss_chunk_bytes(
                config.model,
                config.loss.chunk_tokens,
                num_tokens=self._num_tokens,
                vocab_size=vocab_size,
                tensor_parallel_size=config.parallel.tensor_parallel_size,
                sequence_parallel=config.parallel.sequence_parallel,
                bytes_per_element=BYTES_PER_ELEMENT[config.precision.compute],
            )
        self._moments = [
            tuple(dict.fromkeys(moment for each in schedules for moment in moments(each, rank)))
            for rank in range(schedule.num_ranks)
        ]
        self._layer_bytes: dict[tuple[bool, Parts], int] = {}

    @property
    def _num_tokens(self) -> int:
        return self._config.data.micro_batch_size * self._config.data.seq_length

    def peaks(self, plan: Plan) -> tuple[int, ...]:
        stages = self.stages(plan)
        return tuple(
            max((_bytes_at(moment, stages) for moment in of_rank), default=0) for of_rank in self._moments
        )

    def stages(self, plan: Plan) -> tuple[UnitBytes, ...]:
        return tuple(self._stage_bytes(stage, plan) for stage in range(len(self._slices)))

    def plan(self) -> dict[int, Parts]:
        """Where a rank is above the budget, what saves it the most bytes for each FLOP; until none is."""
        budget_bytes = self._config.recompute.budget_bytes
        assert budget_bytes is not None
        plan: dict[int, Parts] = {}
        while True:
            stages = [self._stage_bytes(stage, plan) for stage in range(len(self._slices))]
            worst = max(
                (
                    (_bytes_at(moment, stages), rank, moment)
                    for rank, of in enumerate(self._moments)
                    for moment in of
                ),
                key=lambda entry: (entry[0], -entry[1]),
            )
            if worst[0] <= budget_bytes:
                return self._trimmed(plan, budget_bytes)
            change = self._best_change(plan, worst[2])
            if change is None:
                raise ValueError(
                    f"recompute.budget_bytes={budget_bytes}: pipeline rank {worst[1]} holds {worst[0]} bytes of "
                    "activations at once though it recomputes all it can; set it to that or more, or lower "
                    f"data.micro_batch_size={self._config.data.micro_batch_size} or data.seq_length="
                    f"{self._config.data.seq_length}, or take a schedule with fewer live micro-batches"
                )
            plan[change[0]] = change[1]

    def _trimmed(self, plan: dict[int, Parts], budget_bytes: int) -> dict[int, Parts]:
        """No layer recomputes more than the rest of the plan lets it: the last change may have saved too much."""
        for layer in sorted(plan, reverse=True):
            for option in sorted(
                options(self._config.model, layer), key=lambda parts: (self._flops(layer, parts), len(parts))
            ):
                if self._flops(layer, option) >= self._flops(layer, plan[layer]):
                    break
                if max(self.peaks({**plan, layer: option})) <= budget_bytes:
                    plan[layer] = option
                    break
        return {layer: parts for layer, parts in plan.items() if parts}

    def _best_change(self, plan: Plan, moment: Moment) -> tuple[int, Parts] | None:
        """The layer and what it is to recompute from now on; None: nothing makes `moment` smaller."""
        best: tuple[float, int, Parts] | None = None
        seen: set[tuple[int, bool, Parts]] = set()
        for stage, _ in moment.live:
            for layer in _layers_of(self._config.model, self._slices[stage]):
                parts = plan.get(layer, NOTHING)
                key = (stage, self._config.model.is_moe_layer(layer), parts)
                if key in seen:  # of equal layers the first
                    continue
                seen.add(key)
                for option in options(self._config.model, layer):
                    saved = self._saved(plan, moment, stage, layer, option)
                    more = self._flops(layer, option) - self._flops(layer, parts)
                    less = self._bytes(layer, option) < self._bytes(layer, parts)
                    if saved > 0 and (more > 0 or (more == 0 and less)):  # so it ends
                        value = saved / (more + 1)
                        if best is None or value > best[0]:
                            best = (value, layer, option)
        return None if best is None else best[1:]

    def _saved(self, plan: Plan, moment: Moment, stage: int, layer: int, option: Parts) -> int:
        before, after = (self._stage_bytes(stage, each) for each in (plan, {**plan, layer: option}))
        count = dict(moment.live)[stage]
        saved = count * (before.kept - after.kept)
        if moment.backward == stage:
            saved += (before.most - before.kept) - (after.most - after.kept)
        return saved

    def _flops(self, layer: int, parts: Parts) -> int:
        return recomputed_flops(self._config.model, layer, parts, seq_length=self._config.data.seq_length)

    def _stage_bytes(self, stage: int, plan: Plan) -> UnitBytes:
        """The parts of a stage go in turn, from the last, each with what is kept of those before it."""
        cut = self._slices[stage]
        kept = most = self._begin if cut.first else 0
        for layer in _layers_of(self._config.model, cut):
            parts = plan.get(layer, NOTHING)
            own = self._bytes(layer, parts)
            kept += own
            units: list[Parts] = [frozenset({part}) for part in parts]
            again = max((self._bytes(layer, parts - unit) - own for unit in units), default=0)
            most = max(most, kept + max(again, 0))
        if cut.last:
            kept += self._end
            most = max(most, kept + self._chunk)
        return UnitBytes(kept=kept, most=max(most, kept))

    def _bytes(self, layer: int, parts: Parts) -> int:
        config = self._config
        key = (config.model.is_moe_layer(layer), parts)
        if key not in self._layer_bytes:
            self._layer_bytes[key] = activation_bytes_per_layer(
                config.model,
                num_tokens=self._num_tokens,
                layer=layer,
                tensor_parallel_size=config.parallel.tensor_parallel_size,
                sequence_parallel=config.parallel.sequence_parallel,
                expert_parallel_size=config.parallel.expert_parallel_size,
                bytes_per_element=BYTES_PER_ELEMENT[config.precision.compute],
                recomputed=parts,
                on_cpu=self._on_cpu,
            )
        return self._layer_bytes[key]


@dataclass(frozen=True, slots=True)
class Moment:
    """live: (stage, micro-batches whose activations it holds). backward: the stage that runs one; None: a forward."""

    live: tuple[tuple[int, int], ...]
    backward: int | None


def moments(schedule: Schedule, rank: int) -> tuple[Moment, ...]:
    """What a rank holds during each of its forwards and backwards, every different one once.

    An activation lives from its F to its I or B; in a pair the forward stores before the backward frees. One that is
    moved out is gone at once, and there again at once.
    """
    live: dict[int, int] = {}
    found: dict[Moment, None] = {}
    for action in schedule.actions[rank]:
        for leaf in action.leaves:
            if leaf.kind is Kind.F:
                live[leaf.stage] = live.get(leaf.stage, 0) + 1
                found[Moment(tuple(sorted(live.items())), None)] = None
            elif leaf.kind in (Kind.B, Kind.I):
                found[Moment(tuple(sorted(live.items())), leaf.stage)] = None
                live[leaf.stage] -= 1
            elif leaf.kind in (Kind.OFFLOAD, Kind.RELOAD):
                live[leaf.stage] += 1 if leaf.kind is Kind.RELOAD else -1
    return tuple(found)


def _bytes_at(moment: Moment, stages: Sequence[UnitBytes]) -> int:
    total = sum(count * stages[stage].kept for stage, count in moment.live)
    if moment.backward is not None:
        total += stages[moment.backward].most - stages[moment.backward].kept
    return total


def as_text(plan: Mapping[int, Parts]) -> list[str]:
    """As `layers 0-3: attention, mlp`."""
    runs: list[tuple[int, int, Parts]] = []
    for layer, parts in sorted(plan.items()):
        if not parts:
            continue
        if runs and runs[-1][1] == layer - 1 and runs[-1][2] == parts:
            runs[-1] = (runs[-1][0], layer, parts)
        else:
            runs.append((layer, layer, parts))
    return [
        f"{f'layers {first}-{last}' if last > first else f'layer {first}'}: {', '.join(sorted(parts))}"
        for first, last, parts in runs
    ]
