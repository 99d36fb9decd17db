"""Whether a layout fits `memory_limit_bytes`, what would make it fit, and what `zero.reshard_after=auto` is.

The decisions are pure functions of the peaks that a config has; `within_memory` asks the dry run for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from counterflow.framework.checks.dry_run import dry_run
from counterflow.framework.checks.rules import check
from counterflow.framework.config.tree import TrainConfig
from counterflow.framework.errors import ConfigError
from counterflow.framework.memory.live import Peak
from counterflow.framework.planning.workload import Workload
from counterflow.models.recompute import RecomputeConfig
from counterflow.parallel.zero.config import ReshardAfter

PeaksOf = Callable[[TrainConfig], Sequence[Peak]]
"""The peak of each pipeline rank under a config."""

_LONGEST_FIRST: tuple[ReshardAfter, ...] = ("step", "backward", "use")


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One setting that saves memory. text: as it is written on the command line."""

    text: str
    config: TrainConfig


def within_memory(config: TrainConfig, *, say: Callable[[str], None]) -> TrainConfig:
    """`config` with `zero.reshard_after=auto` decided; itself where nothing limits memory. say: told what was found.

    It starts no rank, and takes a step's time on tensors without values.
    Raises ConfigError: where a pipeline rank's peak is above the limit, naming what would make it fit.
    """
    limit = config.memory_limit_bytes
    if limit is None:
        return config

    def peaks_of(each: TrainConfig) -> list[Peak]:
        return [rank.peak for rank in dry_run(each)]

    if config.zero.reshard_after == "auto":
        config = with_reshard_after(config, limit, peaks_of)
        say(f"zero.reshard_after=auto: [{','.join(config.zero.reshard_after)}], by pipeline rank")
    peaks = peaks_of(config)
    worst = max(range(len(peaks)), key=lambda rank: peaks[rank].num_bytes)
    if peaks[worst].num_bytes <= limit:
        say(f"the peak of a step is predicted to be {_mib(peaks[worst].num_bytes)} of {_mib(limit)}")
        return config
    raise ConfigError([_refusal(config, limit, worst, peaks[worst], fitting(config, limit, peaks_of))])


def with_reshard_after(config: TrainConfig, limit: int, peaks_of: PeaksOf) -> TrainConfig:
    """For each pipeline rank what keeps whole parameters the longest and fits; `use` where nothing does.

    Mirrored ranks of a schedule with two copies gather together, so they have the same.
    """
    size = config.parallel.pipeline_parallel_size
    workload = Workload.of(config)
    is_mirrored = workload.named(workload.full_size).num_directions > 1
    chosen: list[ReshardAfter | None] = [None] * size
    for each in _LONGEST_FIRST[:-1]:
        peaks = peaks_of(replace(config, zero=replace(config.zero, reshard_after=each)))
        fits = [peak.num_bytes <= limit for peak in peaks]
        for rank in range(size):
            if chosen[rank] is None and fits[rank] and (fits[size - 1 - rank] or not is_mirrored):
                chosen[rank] = each
        if None not in chosen:
            break
    return replace(config, zero=replace(config.zero, reshard_after=tuple(each or "use" for each in chosen)))


def fitting(config: TrainConfig, limit: int, peaks_of: PeaksOf) -> Change | None:
    """The first of the changes that fits by itself, else all of them together if that does; None: not even that."""
    together, texts = config, list[str]()
    for change in changes(config):
        if _fits(change.config, limit, peaks_of):
            return change
    for change_of in _CHANGES:
        change = change_of(together)
        if change is not None and _is_allowed(change.config):
            together, texts = change.config, [*texts, change.text]
    if len(texts) > 1 and _fits(together, limit, peaks_of):
        return Change(text=" ".join(texts), config=together)
    return None


def changes(config: TrainConfig) -> Iterator[Change]:
    """What saves memory, in the order of what it costs, each by itself and allowed."""
    for change_of in _CHANGES:
        change = change_of(config)
        if change is not None and _is_allowed(change.config):
            yield change


def _fits(config: TrainConfig, limit: int, peaks_of: PeaksOf) -> bool:
    return all(peak.num_bytes <= limit for peak in peaks_of(config))


def _is_allowed(config: TrainConfig) -> bool:
    try:
        check(config)
    except ConfigError:
        return False
    return True


def _frees(config: TrainConfig) -> Change | None:
    after = {config.zero.reshard_after_of(rank) for rank in range(config.parallel.pipeline_parallel_size)}
    if config.zero.stage != 3 or after == {"use"}:
        return None
    return Change(
        text="zero.reshard_after=use",
        config=replace(config, zero=replace(config.zero, reshard_after="use")),
    )


def _reduces_early(config: TrainConfig) -> Change | None:
    if config.zero.stage < 2 or config.zero.reduce == "microbatch":
        return None
    return Change(
        text="zero.reduce=microbatch",
        config=replace(config, zero=replace(config.zero, reduce="microbatch")),
    )


def _chunks_loss(config: TrainConfig) -> Change | None:
    if config.loss.chunk_tokens is not None:
        return None
    chunk = min(1024, config.data.seq_length)
    return Change(
        text=f"loss.chunk_tokens={chunk}",
        config=replace(config, loss=replace(config.loss, chunk_tokens=chunk)),
    )


def _shards(config: TrainConfig) -> Change | None:
    if config.zero.stage == 3 or config.parallel.data_parallel_size == 1:
        return None
    return Change(text="zero.stage=3", config=replace(config, zero=replace(config.zero, stage=3)))


def _recomputes(config: TrainConfig) -> Change | None:
    if config.recompute.mode == "full":
        return None
    return Change(text="recompute.mode=full", config=replace(config, recompute=RecomputeConfig(mode="full")))


def _halves_batch(config: TrainConfig) -> Change | None:
    if config.data.micro_batch_size % 2:
        return None
    size, count = config.data.micro_batch_size // 2, 2 * config.schedule.num_microbatches
    return Change(
        text=f"data.micro_batch_size={size} schedule.num_microbatches={count}",
        config=replace(
            config,
            data=replace(config.data, micro_batch_size=size),
            schedule=replace(config.schedule, num_microbatches=count),
        ),
    )


_CHANGES: tuple[Callable[[TrainConfig], Change | None], ...] = (
    _frees,
    _chunks_loss,
    _reduces_early,
    _shards,
    _recomputes,
    _halves_batch,
)


def _refusal(config: TrainConfig, limit: int, rank: int, peak: Peak, change: Change | None) -> str:
    largest = sorted(peak.parts.items(), key=lambda part: -part[1])[:3]
    parts = ", ".join(f"{name.replace('_', ' ')} {_mib(size)}" for name, size in largest if size)
    remedy = (
        f"it would fit with {change.text}"
        if change is not None
        else "nothing that was tried makes it fit; take more ranks, or a larger memory_limit_bytes"
    )
    return (
        f"memory_limit_bytes={limit}: pipeline rank {rank} is predicted to hold {peak.num_bytes} bytes at "
        f"{peak.action} ({parts}); {remedy}"
    )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"
