"""TrainConfig: the whole configuration, composed of its owners' dataclasses, and the rules that cross them.

A config comes in as a plain mapping (`from_mapping`: names and types), each dataclass holds its own rules, and
`check` holds those that need more than one of them. Every mistake is a ValueError: value, rule, remedy.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from framework.balance_config import BalanceConfig
from framework.checkpoint.config import CheckpointConfig
from framework.compositions import refused
from framework.data.batch_plan import BatchPlan, BatchRampConfig
from framework.data.config import DataConfig, TokenizerConfig
from framework.errors import ConfigError
from framework.metrics.config import LoggerConfig
from framework.optimizer_config import OptimizerConfig, PrecisionConfig
from framework.recompute import recompute_plan
from models.config import ModelConfig
from models.recompute import RecomputeConfig
from parallel.compress_config import CompressionConfig
from parallel.mesh import MeshConfig
from parallel.pipeline.action import Schedule
from parallel.pipeline.config import ScheduleConfig
from parallel.pipeline.costs import costs_from
from parallel.pipeline.source import schedule_from
from parallel.zero_config import ZeroConfig

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfig:
    """Length of a run. eval_interval_steps: 0 measures the validation loss at the end only.

    batch_ramp: a batch that grows at the start.
    """

    num_steps: int = 100
    eval_interval_steps: int = 50
    log_interval_steps: int = 10
    batch_ramp: BatchRampConfig = field(default_factory=BatchRampConfig)

    def __post_init__(self) -> None:
        if self.num_steps < 1:
            raise ValueError(
                f"training.num_steps={self.num_steps}: a run has at least one step; set it to 1 or more"
            )
        if self.eval_interval_steps < 0:
            raise ValueError(
                f"training.eval_interval_steps={self.eval_interval_steps}: a number of steps; set it to 1 or more, "
                "or to 0 for the end only"
            )
        if self.log_interval_steps < 1:
            raise ValueError(
                f"training.log_interval_steps={self.log_interval_steps}: a number of steps; set it to 1 or more"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class CommConfig:
    """timeout_s: a collective or receive that waits longer ends the run.

    p2p_chunk_bytes: larger activations and gradients travel between stages in chunks of at most this; null: whole.
    expert_payload: in what precision hidden states go to experts: that of the computation, or rounded to bf16 or to
        fp8 (e4m3, with a scale for each 128 numbers).
    """

    timeout_s: float = 60.0
    p2p_chunk_bytes: int | None = None
    expert_payload: Literal["compute", "bf16", "fp8"] = "compute"

    def __post_init__(self) -> None:
        if not 1 <= self.timeout_s <= 604800:
            raise ValueError(
                f"comm.timeout_s={self.timeout_s}: from 1 second to a week (604800); 60 is the default"
            )
        if self.p2p_chunk_bytes is not None and not 1 << 12 <= self.p2p_chunk_bytes <= 1 << 30:
            raise ValueError(
                f"comm.p2p_chunk_bytes={self.p2p_chunk_bytes}: from 4096 to 1073741824 bytes; 262144 to 1048576 are "
                "usual, null sends every tensor whole"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherConfig:
    """How local ranks are started.

    runs_dir: folder that holds the runs' folders. threads_per_rank: compute threads of a rank; null shares the
    cores out. grace_s: time a rank has to stop by itself before it is killed.
    """

    runs_dir: str = "runs"
    threads_per_rank: int | None = None
    grace_s: float = 5.0

    def __post_init__(self) -> None:
        if self.threads_per_rank is not None and not 1 <= self.threads_per_rank <= 1024:
            raise ValueError(
                f"launcher.threads_per_rank={self.threads_per_rank}: a rank has from 1 to 1024 threads; set it so, "
                "or to null to share the cores out"
            )
        if not 0 <= self.grace_s <= 10:
            raise ValueError(
                f"launcher.grace_s={self.grace_s}: seconds from 0 to 10, so that a failed run ends promptly"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """Everything a run depends on. The nodes are the names of the command line (`parallel.tensor_parallel_size=8`)."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: MeshConfig = field(default_factory=MeshConfig)
    zero: ZeroConfig = field(default_factory=ZeroConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    balance: BalanceConfig = field(default_factory=BalanceConfig)
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    data: DataConfig = field(default_factory=DataConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    comm: CommConfig = field(default_factory=CommConfig)
    compression: CompressionConfig = field(default_factory=CompressionConfig)
    launcher: LauncherConfig = field(default_factory=LauncherConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    seed: int = 0
    deterministic: bool = True

    @property
    def expected_vocab_size(self) -> int:
        """The model's or, before the data is prepared, what the tokenizer is asked for."""
        return self.model.vocab_size or self.tokenizer.vocab_size

    @property
    def global_batch_size(self) -> int:
        """Samples of one step over all data-parallel ranks, once the batch has its full size."""
        return self.data.micro_batch_size * self.schedule.num_microbatches * self.parallel.data_parallel_size

    @property
    def overlaps_experts(self) -> bool:
        """Whether tokens travel between ranks, and the halves of a pair are to hide that."""
        return (
            self.schedule.overlap
            and self.model.moe.num_experts > 0
            and self.parallel.expert_parallel_size > 1
        )

    @property
    def batch_plan(self) -> BatchPlan:
        """The batch of every step.

        Raises ValueError: where the ramp does not lead to schedule.num_microbatches.
        """
        return BatchPlan(
            num_microbatches=self.schedule.num_microbatches,
            samples_per_microbatch=self.data.micro_batch_size * self.parallel.data_parallel_size,
            ramp=self.training.batch_ramp,
        )


def check(config: TrainConfig) -> None:
    """Hold `config` against the rules that cross its nodes.

    Raises ConfigError: naming every rule broken, with the values and a remedy.
    """
    problems = refused(config)
    problems += _tensor_problems(config)
    problems += _expert_problems(config)
    problems += _balance_problems(config)
    if not 0 <= config.seed < 1 << 63:
        problems.append(f"seed={config.seed}: a whole number from 0 to 2^63 - 1")
    try:
        schedule = build_schedule(config.schedule, config.parallel)
    except ValueError as error:
        problems.append(str(error))
    else:
        problems += _placement_problems(config, schedule)
        problems += _ramp_problems(config)
        if config.model.num_layers < schedule.num_stages:
            problems.append(
                f"model.num_layers={config.model.num_layers}: schedule={config.schedule.name} with "
                f"parallel.pipeline_parallel_size={config.parallel.pipeline_parallel_size} has "
                f"{schedule.num_stages} stages and each needs a layer; set model.num_layers to "
                f"{schedule.num_stages} or more, or lower parallel.pipeline_parallel_size"
            )
        else:
            problems += _recompute_problems(config, schedule)
    if config.model.position == "learned" and config.data.seq_length > config.model.max_seq_length:
        problems.append(
            f"data.seq_length={config.data.seq_length}: model.position=learned has a row for each of "
            f"model.max_seq_length={config.model.max_seq_length} positions; raise that, lower data.seq_length, or set "
            "model.position=rope"
        )
    vocab_size = config.model.vocab_size
    if vocab_size is not None and config.tokenizer.kind == "bpe" and vocab_size < config.tokenizer.vocab_size:
        problems.append(
            f"model.vocab_size={vocab_size}: smaller than tokenizer.vocab_size={config.tokenizer.vocab_size}, so "
            "some tokens would have no embedding; set model.vocab_size=null to take the tokenizer's size"
        )
    if problems:
        raise ConfigError(problems)


def _recompute_problems(config: TrainConfig, schedule: Schedule) -> list[str]:
    try:
        recompute_plan(config, schedule, vocab_size=config.expected_vocab_size)
    except ValueError as error:
        return [str(error)]
    return []


def _placement_problems(config: TrainConfig, schedule: Schedule) -> list[str]:
    """A user's own schedule may place stages where the mesh has no groups for them."""
    problems: list[str] = []
    try:
        costs_from(config.schedule.costs, schedule.num_stages)
    except ValueError as error:
        problems.append(str(error))
    last = schedule.num_ranks - 1
    if schedule.num_directions > 1 and any(
        schedule.replicas_of(stage) != tuple(sorted({rank, last - rank}))
        for stage, rank in enumerate(schedule.placement[0])
    ):
        problems.append(
            f"schedule.path={config.schedule.path}: the two copies of a stage must be on the ranks r and "
            f"{last} - r; reorder the rows of the file"
        )
    ends = (schedule.placement[0][0], schedule.placement[0][-1])
    if (
        (config.model.tie_embeddings or config.model.mtp.num_modules)
        and schedule.num_directions == 1
        and ends[0] != ends[1]
        and ends != (0, last)
    ):
        problems.append(
            f"{_tie_of(config.model)}: the first stage must be on pipeline rank 0 and the last on {last}, or both "
            f"on one, and schedule={config.schedule.name} has them on {ends[0]} and {ends[1]}; reorder the rows of "
            "the file, or set model.tie_embeddings=false and model.mtp.num_modules=0"
        )
    return problems


def _tie_of(model: ModelConfig) -> str:
    """What makes the last stage hold a copy of the first stage's embedding."""
    return (
        "model.tie_embeddings=true"
        if model.tie_embeddings
        else f"model.mtp.num_modules={model.mtp.num_modules}"
    )


def _ramp_problems(config: TrainConfig) -> list[str]:
    """Every size of the batch within the run must be one that the schedule takes."""
    try:
        plan = config.batch_plan
    except ValueError as error:
        return [str(error)]
    for phase in plan.phases[:-1]:
        try:
            if phase.first_step < config.training.num_steps:
                counted = replace(config.schedule, num_microbatches=phase.num_microbatches)
                build_schedule(counted, config.parallel)
        except ValueError as error:
            ramp = config.training.batch_ramp
            rule = str(error).partition(";")[0]  # its remedy is for the number of all steps
            return [
                f"training.batch_ramp.start_num_microbatches={ramp.start_num_microbatches}: with increment="
                f"{ramp.increment} step {phase.first_step} has {phase.num_microbatches} micro-batches, and "
                f"schedule={config.schedule.name} does not take them: {rule} (steps count from 0); choose "
                "start_num_microbatches and increment so that it takes every size"
            ]
    return []


def build_schedule(schedule: ScheduleConfig, parallel: MeshConfig) -> Schedule:
    """The schedule that `schedule` names, for this many pipeline ranks.

    Raises ValueError: for a name that there is none of, or (ranks, micro-batches, costs, file) that its rule refuses.
    """
    return schedule_from(schedule, parallel.pipeline_parallel_size).schedule


def _tensor_problems(config: TrainConfig) -> list[str]:
    tensor_parallel_size, model = config.parallel.tensor_parallel_size, config.model
    divisible = {"model.num_heads": (model.num_heads, "attention heads are shared out")}
    if not model.uses_mla:
        divisible["model.num_kv_heads"] = (model.num_kv_heads, "key/value heads are shared out")
    if not model.is_moe_layer(0):
        divisible["model.intermediate_size"] = (model.intermediate_size, "the MLP's columns are shared out")
    if model.moe.num_experts and model.moe.num_shared_experts:
        divisible["model.moe.expert_intermediate_size"] = (
            model.expert_intermediate_size,
            "the columns of shared experts are shared out",
        )
    if config.parallel.sequence_parallel:
        divisible["data.seq_length"] = (
            config.data.seq_length,
            "sequence parallelism cuts each sample into equal parts",
        )
    elif model.moe.num_experts:
        divisible["data.seq_length"] = (
            config.data.seq_length,
            "each sample's tokens are shared out before they go to experts, so that none goes twice",
        )
    problems: list[str] = []
    for name, (value, why) in divisible.items():
        if value % tensor_parallel_size:
            multiple = -(-value // tensor_parallel_size) * tensor_parallel_size
            problems.append(
                f"{name}={value}: must be a multiple of parallel.tensor_parallel_size={tensor_parallel_size}, over "
                f"which {why}; try {name}={multiple}, or parallel.tensor_parallel_size="
                f"{_largest_divisor(value, tensor_parallel_size)}"
                + (
                    ", or parallel.sequence_parallel=false"
                    if name == "data.seq_length" and tensor_parallel_size > 1 and not model.moe.num_experts
                    else ""
                )
            )
    return problems


def _balance_problems(config: TrainConfig) -> list[str]:
    interval_steps, num_nodes = config.balance.interval_steps, config.balance.num_nodes
    size = config.parallel.expert_parallel_size
    if interval_steps == 0:
        return []
    if size == 1:
        return [
            f"balance.interval_steps={interval_steps}: experts move between the ranks of the expert axis, and "
            "parallel.expert_parallel_size=1; set that to 2 or more, or balance.interval_steps=0"
        ]
    if size % num_nodes:
        return [
            f"balance.num_nodes={num_nodes}: must divide parallel.expert_parallel_size={size}, whose ranks are shared "
            f"out to nodes; try balance.num_nodes={_largest_divisor(size, num_nodes)}"
        ]
    return []


def _expert_problems(config: TrainConfig) -> list[str]:
    size, num_experts = config.parallel.expert_parallel_size, config.model.moe.num_experts
    problems: list[str] = []
    if size > 1 and num_experts == 0:
        problems.append(
            f"parallel.expert_parallel_size={size}: the model has no experts to share out "
            "(model.moe.num_experts=0); set parallel.expert_parallel_size=1, or choose a model that has"
        )
    elif num_experts % size:
        problems.append(
            f"model.moe.num_experts={num_experts}: must be a multiple of parallel.expert_parallel_size={size}, over "
            f"which experts are shared out; try parallel.expert_parallel_size={_largest_divisor(num_experts, size)}"
        )
    if config.model.mtp.num_modules >= config.data.seq_length:
        problems.append(
            f"model.mtp.num_modules={config.model.mtp.num_modules}: predicts so many tokens further, and a sample "
            f"has data.seq_length={config.data.seq_length}; lower it below that"
        )
    return problems


def _largest_divisor(value: int, at_most: int) -> int:
    return next(size for size in range(at_most, 0, -1) if value % size == 0)


def from_mapping(cls: type[T], mapping: Mapping[str, Any]) -> T:
    """`mapping` (nested, plain values, lists for tuples) as the dataclass `cls`; missing keys keep their defaults.

    Raises ConfigError: naming every unknown key, wrong type and broken rule of a node, by its full dotted name.
    """
    problems: list[str] = []
    known = dotted_names(cls)
    result = _read(cls, mapping, "", known, problems)
    if problems:
        raise ConfigError(problems)
    return cast(T, result)


def to_mapping(config: Any) -> dict[str, Any]:
    """A config dataclass as nested plain values (dicts, lists, str, int, float, bool, None): what YAML holds."""
    return {item.name: _plain(getattr(config, item.name)) for item in fields(config)}


def config_hash(config: Any) -> str:
    """64 hex digits that are equal for equal configs, whatever wrote them."""
    text = json.dumps(to_mapping(config), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def dotted_names(cls: type[Any], prefix: str = "") -> tuple[str, ...]:
    """The full dotted name of every node and value of the dataclass `cls`."""
    names: list[str] = []
    for name, hint in get_type_hints(cls).items():
        names.append(prefix + name)
        if is_dataclass(hint):
            names.extend(dotted_names(cast(type[Any], hint), f"{prefix}{name}."))
    return tuple(names)


def unknown_key(dotted: str, known: Sequence[str]) -> str:
    """The message for a key that the config does not have, with the nearest names it does have."""
    node, _, leaf = dotted.rpartition(".")
    siblings = [name for name in known if name.rpartition(".")[0] == node]
    same_leaf = [name for name in known if name.rpartition(".")[2] == leaf]
    near = [f"{node}." * bool(node) + name for name in _close(leaf, [_leaf(name) for name in siblings])]
    # Else the right name in another node, as in num_microbatches for schedule.num_microbatches, or a slip in both.
    near = near or same_leaf or difflib.get_close_matches(dotted, known, n=1, cutoff=0.7)
    if near:
        remedy = f"did you mean {' or '.join(near[:3])}?"
    elif node and siblings:
        remedy = f"{node} has {', '.join(_leaf(name) for name in siblings)}"
    else:
        remedy = "`counterflow train --cfg job` prints every key"
    return f"{dotted}: the config has no such key; {remedy}"


def _leaf(dotted: str) -> str:
    return dotted.rpartition(".")[2]


def _close(word: str, names: Sequence[str]) -> list[str]:
    """The names that look like `word`, else those it is a part of (`lr` for `base_lr`)."""
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.7)
    return close or [name for name in names if f"_{word}" in f"_{name}" and name.endswith(word)]


def _did_you_mean(value: str, known: Sequence[str] | Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(value, list(known), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return to_mapping(value)
    if isinstance(value, tuple):
        return [_plain(item) for item in cast(tuple[Any, ...], value)]
    return value


def _read(
    cls: type[Any], mapping: Mapping[str, Any], prefix: str, known: Sequence[str], problems: list[str]
) -> Any:
    """One dataclass of the tree, or None once `problems` has something to say about it."""
    hints = get_type_hints(cls)
    before = len(problems)
    values: dict[str, Any] = {}
    for key, value in mapping.items():
        dotted = f"{prefix}{key}"
        if key not in hints:
            problems.append(unknown_key(dotted, known))
        elif is_dataclass(hints[key]):
            if isinstance(value, Mapping):
                node = cast(Mapping[str, Any], value)
                values[key] = _read(cast(type[Any], hints[key]), node, f"{dotted}.", known, problems)
            else:
                node_names = [name for name in known if name.startswith(f"{dotted}.")]
                problems.append(
                    f"{dotted}={value!r}: a group of values; set {', '.join(node_names[:3])}, ..."
                )
        else:
            values[key] = _read_value(hints[key], value, dotted, _default(cls, key), problems)
    if len(problems) > before:
        return None
    try:
        return cls(**values)
    except ValueError as error:
        problems.append(str(error))
        return None


def _default(cls: type[Any], key: str) -> Any:
    return next(item.default for item in fields(cls) if item.name == key)


def _read_value(hint: Any, value: Any, dotted: str, default: Any, problems: list[str]) -> Any:
    from pydantic import TypeAdapter, ValidationError

    if isinstance(value, list) and any(get_origin(arm) is tuple for arm in (hint, *get_args(hint))):
        value = tuple(cast(list[Any], value))
    # pydantic takes True for Literal[1] and 1.0 as well, for they compare equal.
    same_type = get_origin(hint) is not Literal or any(type(value) is type(item) for item in get_args(hint))
    try:
        if same_type:
            return TypeAdapter(hint).validate_python(value, strict=True)
    except ValidationError:
        pass
    options = [str(item) for item in get_args(hint)] if get_origin(hint) is Literal else []
    near = _did_you_mean(value, options) if isinstance(value, str) else ""
    usual = "" if default is MISSING else f"; the default is {dotted}={_as_text(default)}"
    problems.append(f"{dotted}={_as_text(value)}: must be {_describe(hint)}{near}{usual}")
    return None


def _as_text(value: Any) -> str:
    """A value as it stands on the command line; text is quoted, so that '8' and 8 are told apart."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(list(cast(tuple[Any, ...], value))) if isinstance(value, tuple) else repr(value)


def _describe(hint: Any) -> str:
    """A type as a newcomer reads it."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        return f"one of {', '.join(map(str, args))}"
    if origin in (Union, UnionType):
        return " or ".join(_describe(arg) for arg in args)
    if origin is tuple:
        return "a list, as in [a,b]"
    plain = {int: "a whole number", float: "a number", str: "text", bool: "true or false", NoneType: "null"}
    return plain.get(hint, str(hint))
