"""What a step and a run report: plain values, written as JSON lines and handed to every sink."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from counterflow.parallel.pipeline.ir.host_lead import HOST_BOUND_SHARE


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingRecord:
    """What one layer's router did in a step, over the global batch.

    layer: its index in the model. load: each expert's share of all choices, dropped ones included; empty where the
    loads of this step were not kept.
    imbalance: the largest load over the mean. entropy: of the router's distribution, in nats, the mean over tokens.
    num_dropped: choices that found no room. sent_bytes: by all ranks in dispatch and combine, forward and backward.
    rank_load: each expert rank's share of the choices that experts were applied to; None where no expert has copies, as
    it then follows from `load`.
    load_balance_loss, sequence_balance_loss, z_loss: without their weights; None where off.
    """

    layer: int
    load: tuple[float, ...]
    imbalance: float
    entropy: float
    num_dropped: int
    sent_bytes: int
    rank_load: tuple[float, ...] | None = None
    load_balance_loss: float | None = None
    sequence_balance_loss: float | None = None
    z_loss: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MoERecord:
    """The mixture-of-experts layers of a step.

    link_bytes: [i][j], sent from expert rank i to j, by all layers; empty where the loads were not kept.
    """

    layers: tuple[RoutingRecord, ...]
    link_bytes: tuple[tuple[int, ...], ...]

    def scalars(self) -> dict[str, float]:
        """Flat numbers, the loads left out: `imbalance` (of the worst layer), `num_dropped`, `layer_3/entropy`."""
        flat: dict[str, float] = {}
        if self.layers:
            flat["imbalance"] = max(each.imbalance for each in self.layers)
            flat["num_dropped"] = sum(each.num_dropped for each in self.layers)
        for each in self.layers:
            for field in dataclasses.fields(each):
                value = getattr(each, field.name)
                if field.name not in ("layer", "load", "rank_load") and value is not None:
                    flat[f"layer_{each.layer}/{field.name}"] = value
        return flat

    def without_loads(self) -> MoERecord:
        """The same without what grows with the number of experts and of ranks."""
        layers = tuple(dataclasses.replace(each, load=(), rank_load=None) for each in self.layers)
        return MoERecord(layers=layers, link_bytes=())

    @staticmethod
    def from_values(values: dict[str, Any]) -> MoERecord:
        """The inverse of dataclasses.asdict."""
        layers = tuple(RoutingRecord(**each) for each in values["layers"])
        return MoERecord(layers=layers, link_bytes=values["link_bytes"])


@dataclass(frozen=True, slots=True, kw_only=True)
class BalanceRecord:
    """How evenly the ranks of the expert axis are loaded, and what was moved after the step.

    rank_imbalance: of this step, for each layer of experts the largest load of a rank over the mean.
    The rest is None or 0 unless experts were to move after it: interval_before, interval_after: the same, the mean over
    layers, of all loads since the last time, under the old and under the new placement; num_moved: experts that
    changed rank; moved_bytes: masters and moments sent between ranks, copies of a layer counted each; move_s.
    """

    rank_imbalance: tuple[float, ...]
    interval_before: float | None = None
    interval_after: float | None = None
    num_moved: int = 0
    moved_bytes: int = 0
    move_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadRecord:
    """Activations that were moved out and back in a step, by all ranks.

    hit_rate: backwards that found everything there, of all. num_unplanned: moves that the schedule did not have, where
    more was kept than was planned with. One value for each pipeline rank: stall_s, time that forwards waited for room
    and backwards for what they use (`offload_wait` in `time_s`), the mean of its replicas; peak_bytes, the most that
    was kept for backwards at once, the largest of its replicas.
    """

    out_bytes: int
    back_bytes: int
    hit_rate: float
    num_unplanned: int
    stall_s: tuple[float, ...]
    peak_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One optimizer step, over all ranks.

    step: its index, from 0. loss: mean over the valid tokens of the global batch. step_s: wall time.
    model_tflops_per_rank: model FLOPs, recomputation not counted, over step_s and the world size.
    mfu: over the device's peak; None where no peak is known.
    busy_s, idle_s: one value for each pipeline rank, the mean of its replicas (the ranks that differ in other axes).
    time_s: the account of the step: for each category of counterflow.parallel.pipeline.ir.trace.CATEGORIES one value
    for each
    pipeline rank, the mean of its replicas. Over the categories they add up to step_s; `other` includes what a
    rank's own step is shorter than that of the slowest rank.
    bubble_measured: idle / (busy + idle) over all pipeline ranks; bubble_simulated: the simulator's makespan
    bubble; bubble_formula: the published closed form, None where the schedule has none.
    bubble_measured_span, bubble_simulated_span: 1 - mean busy / longest span of a rank, from the start of its first
    action to the end of its last: the zero-bubble papers' definition (Qi et al., arXiv 2401.10241, section 5).
    work_inflation: (I + W) / B, the mean times of input and weight gradient over that of a whole backward,
    summed over the stages on which this step ran all three; None where none did.
    rank_busy_s: of every rank. slowest_rank: the one that took longest beside the ranks that do the same work, those of
    its pipeline rank, and slowest_over_peers its busy time over their median; None where no rank has such peers, and
    then it is the rank with most.
    host_lead_s: on GPUs, how far each pipeline rank's host ran ahead of its device, the least of its replicas; and
    host_starved, the share of its compute time in which the device had nothing in store, the largest of them: such
    waits count as busy (counterflow.parallel.pipeline.ir.host_lead). None on a CPU.
    num_microbatches: of each data-parallel rank. padding_share: of the positions computed; None where samples are
    windows of one length.
    bytes_by_axis: bytes sent over each mesh axis by all ranks. peak_memory_bytes: the largest of any rank, by the
    allocator of a GPU, or what the process has held at most on a CPU.
    pipeline_peak_memory_bytes: the same; peak_live_activations: micro-batches alive at once;
    peak_held_weight_grad_bytes: kept for deferred weight gradients; one value for each pipeline rank, the largest of
    its replicas.
    compression_ratio: bytes that the reductions of gradients would have sent in fp32, over those they sent, of all
    ranks. compression_error: the norm of what their messages left out, over that of what they were to say. None where
    gradients are not compressed.
    mtp_loss: of the further predictions of MTP modules, the mean over the modules, not weighted and not in `loss`;
    None in a model without.
    moe: the routers' part; None in a model without experts. balance: None where experts never move. offload: None
    where activations have no budget.
    skipped: why the optimizer step was not made; None: it was. loss_scale: of this step; None without fp16.
    validation_loss: None where this step did not evaluate.
    """

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    step_s: float
    num_tokens: int
    tokens_per_s: float
    samples_per_s: float
    model_tflops_per_rank: float
    mfu: float | None
    busy_s: tuple[float, ...]
    idle_s: tuple[float, ...]
    time_s: dict[str, tuple[float, ...]]
    bubble_measured: float
    bubble_measured_span: float
    bubble_simulated: float
    bubble_simulated_span: float
    bubble_formula: float | None
    work_inflation: float | None
    bytes_by_axis: dict[str, int]
    peak_memory_bytes: int
    peak_live_activations: tuple[int, ...]
    peak_held_weight_grad_bytes: tuple[int, ...]
    pipeline_peak_memory_bytes: tuple[int, ...] = ()
    rank_busy_s: tuple[float, ...] | None = None
    slowest_rank: int | None = None
    slowest_over_peers: float | None = None
    host_lead_s: tuple[float, ...] | None = None
    host_starved: tuple[float, ...] | None = None
    num_microbatches: int | None = None
    padding_share: float | None = None
    compression_ratio: float | None = None
    compression_error: float | None = None
    mtp_loss: float | None = None
    moe: MoERecord | None = None
    balance: BalanceRecord | None = None
    offload: OffloadRecord | None = None
    skipped: str | None = None
    loss_scale: float | None = None
    validation_loss: float | None = None

    def to_json(self) -> str:
        """One line of JSON; values that are not finite are written as strings, which `from_json` reads back."""
        return _dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(line: str) -> StepRecord:
        """The inverse of `to_json`.

        Raises ValueError: where the line is not a step record, for example cut off in the middle.
        """
        try:
            values = json.loads(line)
            for name, value in values.items():
                values[name] = value if name == "skipped" else _read(value)
            if values.get("moe") is not None:
                values["moe"] = MoERecord.from_values(values["moe"])
            if values.get("balance") is not None:
                values["balance"] = BalanceRecord(**values["balance"])
            if values.get("offload") is not None:
                values["offload"] = OffloadRecord(**values["offload"])
            return StepRecord(**values)
        except (TypeError, AttributeError, KeyError, ValueError) as error:
            raise ValueError(f"not a step record ({error}): {line[:80]!r}") from None

    @property
    def is_host_bound(self) -> bool:
        """Whether a GPU waited for its host for most of its compute time: its bubble is larger than was measured."""
        return self.host_starved is not None and max(self.host_starved) > HOST_BOUND_SHARE

    def scalars(self) -> dict[str, float]:
        """The record as flat numbers: `idle_s/rank_2`, `time_s/optimizer/rank_0`; what is None is left out.

        `time_share/<category>` is the share of all ranks' time, so that one chart shows where a step goes; `skipped`
        is 1 for a step that was skipped.
        """
        flat: dict[str, float] = {}
        for field in dataclasses.fields(self):
            # One number for each rank of a large job is too much for a chart.
            if field.name not in ("step", "moe", "balance", "offload", "skipped", "rank_busy_s"):
                flat |= dict(_flat(field.name, getattr(self, field.name)))
        if self.skipped is not None:
            flat["skipped"] = 1.0
        for category, seconds in self.time_s.items():
            flat[f"time_share/{category}"] = sum(seconds) / (len(seconds) * self.step_s)
        if self.moe is not None:
            flat |= {f"moe/{name}": value for name, value in self.moe.scalars().items()}
        for name, part in (("balance", self.balance), ("offload", self.offload)):
            for field in dataclasses.fields(part) if part is not None else ():
                flat |= dict(_flat(f"{name}/{field.name}", getattr(part, field.name)))
        return flat


@dataclass(frozen=True, slots=True, kw_only=True)
class Bubbles:
    """Share of the pipeline's time without work: as it was, as simulated, and by the published formula."""

    measured: float
    simulated: float
    formula: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """The outcome of a run. seconds: wall time of its steps; wandb_dir: the offline folder, None without W&B.

    num_skipped: steps of it that were skipped. kernels: what computed updates and norms, by use. deterministic: whether
    all kernels were such that give the same result every time. sink_failures: why a sink stopped taking records, by its
    name; empty where all took them to the end.
    """

    run_dir: str
    final_loss: float
    validation_loss: float | None
    tokens_per_s: float
    bubble: Bubbles
    wandb_dir: str | None
    steps: int
    seconds: float
    num_skipped: int = 0
    kernels: dict[str, str] = dataclasses.field(default_factory=dict)
    deterministic: bool = True
    sink_failures: dict[str, str] = dataclasses.field(default_factory=dict)

    def to_json(self) -> str:
        """One line of JSON."""
        return _dumps(dataclasses.asdict(self))


def _dumps(values: dict[str, Any]) -> str:
    return json.dumps({name: _plain(value) for name, value in values.items()}, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return value


def _read(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(map(_read, value))
    if isinstance(value, dict):
        return {key: _read(each) for key, each in value.items()}
    return float(value) if isinstance(value, str) else value


def _flat(name: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, tuple):
        value = {f"rank_{rank}": each for rank, each in enumerate(value)}
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _flat(f"{name}/{key}", each)
    elif value is not None:
        yield name, value
