"""TrainConfig: the whole configuration, composed of its owners' dataclasses.

A config comes in as a plain mapping (mapping.py: names and types), each dataclass holds its own rules, and the table in
framework/checks/rules holds those that need more than one of them. Every mistake is a ValueError: value, rule, remedy.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from counterflow.framework.checkpoint.config import CheckpointConfig
from counterflow.framework.data.batch_plan import BatchPlan, BatchRampConfig
from counterflow.framework.data.config import DataConfig, TokenizerConfig
from counterflow.framework.experts.config import BalanceConfig
from counterflow.framework.metrics.config import LoggerConfig
from counterflow.framework.optim.config import OptimizerConfig, PrecisionConfig
from counterflow.framework.optim.skip_step import SkipStepConfig
from counterflow.models.config import ModelConfig
from counterflow.models.recompute import RecomputeConfig
from counterflow.parallel.compress.config import CompressionConfig
from counterflow.parallel.mesh import MeshConfig
from counterflow.parallel.offload.config import OffloadConfig
from counterflow.parallel.ops.loss_config import LossConfig
from counterflow.parallel.pipeline.config import ScheduleConfig
from counterflow.parallel.zero.config import ZeroConfig

DeviceChoice = Literal["auto", "cpu", "cuda"]
_GPU_STARTUP_S = 600.0


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
    """timeout_s: a collective or receive that waits longer ends the run, in whatever group of ranks.

    startup_timeout_s: the same until the first step is done, while communicators are made and kernels loaded or
        compiled; null: timeout_s on a CPU, ten minutes at least on GPUs.

    p2p_chunk_bytes: larger activations and gradients travel between stages in chunks of at most this; null: whole.
    expert_payload: in what precision hidden states go to experts: that of the computation, or rounded to bf16 or to
        fp8 (e4m3, with a scale for each 128 numbers).
    pipeline_payload: in what precision activations and their gradients go to other ranks of the pipeline, likewise.
    """

    timeout_s: float = 60.0
    startup_timeout_s: float | None = None
    p2p_chunk_bytes: int | None = None
    expert_payload: Literal["compute", "bf16", "fp8"] = "compute"
    pipeline_payload: Literal["compute", "bf16", "fp8"] = "compute"

    def __post_init__(self) -> None:
        if not 1 <= self.timeout_s <= 604800:
            raise ValueError(
                f"comm.timeout_s={self.timeout_s}: from 1 second to a week (604800); 60 is the default"
            )
        if self.startup_timeout_s is not None and not 1 <= self.startup_timeout_s <= 604800:
            raise ValueError(
                f"comm.startup_timeout_s={self.startup_timeout_s}: from 1 second to a week (604800), or null"
            )
        if self.p2p_chunk_bytes is not None and not 1 << 12 <= self.p2p_chunk_bytes <= 1 << 30:
            raise ValueError(
                f"comm.p2p_chunk_bytes={self.p2p_chunk_bytes}: from 4096 to 1073741824 bytes; 262144 to 1048576 are "
                "usual, null sends every tensor whole"
            )

    def start_timeout_s(self, device_type: str) -> float:
        """`startup_timeout_s`, with what null stands for."""
        if self.startup_timeout_s is not None:
            return self.startup_timeout_s
        return self.timeout_s if device_type == "cpu" else max(self.timeout_s, _GPU_STARTUP_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherConfig:
    """How local ranks are started.

    runs_dir: folder that holds the runs' folders. threads_per_rank: compute threads of a rank; null shares the
    cores out. grace_s: time a rank has to stop by itself before it is killed.
    max_restarts: how often local ranks are started again after one of them failed, from the newest checkpoint;
        restart_delay_s: before the first time, and twice as long before each further one, up to a minute.
    """

    runs_dir: str = "runs"
    threads_per_rank: int | None = None
    grace_s: float = 5.0
    max_restarts: int = 0
    restart_delay_s: float = 1.0

    def __post_init__(self) -> None:
        if self.max_restarts < 0:
            raise ValueError(
                f"launcher.max_restarts={self.max_restarts}: how often ranks are started again; set it to 0 or more"
            )
        if not 0 <= self.restart_delay_s <= 3600:
            raise ValueError(
                f"launcher.restart_delay_s={self.restart_delay_s}: seconds from 0 to an hour; 1 is the default"
            )
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
    """Everything a run depends on. The nodes are the names of the command line (`parallel.tensor_parallel_size=8`).

    memory_limit_bytes: what a rank may hold at the peak of a step. A layout that is predicted to need more is refused
        before ranks start; null: nobody asks.
    device: where ranks compute; auto: on GPUs where there are some, each rank on its own, else on the CPU.
    deterministic: only kernels that give the same result every time; auto: on a CPU, where they cost nothing, and not
        on GPUs, where sums over tokens and the backward of attention are slower with them.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: MeshConfig = field(default_factory=MeshConfig)
    zero: ZeroConfig = field(default_factory=ZeroConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    balance: BalanceConfig = field(default_factory=BalanceConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    data: DataConfig = field(default_factory=DataConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    skip_step: SkipStepConfig = field(default_factory=SkipStepConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    comm: CommConfig = field(default_factory=CommConfig)
    compression: CompressionConfig = field(default_factory=CompressionConfig)
    launcher: LauncherConfig = field(default_factory=LauncherConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    seed: int = 0
    deterministic: Literal["auto"] | bool = "auto"
    memory_limit_bytes: int | None = None
    device: DeviceChoice = "auto"

    def __post_init__(self) -> None:
        if self.memory_limit_bytes is not None and self.memory_limit_bytes < 1:
            raise ValueError(
                f"memory_limit_bytes={self.memory_limit_bytes}: bytes of one rank; set it to 1 or more, or to null for "
                "no limit"
            )
        if not 0 <= self.seed < 1 << 63:
            raise ValueError(
                f"seed={self.seed}: a whole number from 0 to 2^63 - 1; set it so, 0 is the default"
            )

    def is_deterministic(self, device_type: str) -> bool:
        """`deterministic`, with what auto stands for."""
        return device_type == "cpu" if self.deterministic == "auto" else self.deterministic

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
    def never_compresses(self) -> bool:
        """Whether gradients are to be compressed, and the run ends before its first step that is."""
        return self.compression.method != "none" and self.compression.warmup_steps >= self.training.num_steps

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
