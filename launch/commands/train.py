"""Prepares the text, starts one process for each rank of the layout on this machine (or joins the ranks
that torchrun started), trains, and logs loss, speed and the pipeline's measured bubble. Without any
override it trains a small model on the sources of your Python, on 2 x 2 x 2 ranks with DualPipe and
ZeRO-3: a few minutes on two cores.
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from counterflow.launch.command import LAYOUT_KEYS, Command, Help, LaunchOptions

if TYPE_CHECKING:
    from counterflow.framework.config.tree import TrainConfig

_HELP = Help(
    about=__doc__ or "",
    keys=LAYOUT_KEYS
    + """
    zero.stage=3  0, 1, 2, 3: what is sharded over the copies
    model=tiny  the model's shape; or model.num_layers=8 and so on
    data.sources=[/my/texts]  folders or files: .txt .md .py .rst .jsonl
    training.num_steps=100  optimizer steps
    precision=bf16  fp32, bf16 or fp16, master weights in fp32; precision.optimizer_states=bf16
    skip_step=skip  skip steps that are not finite or far outside of the last ones, in bounds
    recompute.mode=full  full, selective (recompute.modules=[attention]), auto; recompute.every=2
    compression=onebit  gradients on the wire: none, onebit, int8, int4, fp8, topk, powersgd
    compression.weights=int8  gathers of weights: none, int8, int4, fp8
    comm.pipeline_payload=fp8  between stages: compute (as they are), bf16, fp8
    logger=jsonl  none, jsonl, wandb (offline) or tensorboard
    checkpoint.resume=runs/...  go on from a run's last checkpoint; auto: from that in --out, if any
    launcher.max_restarts=3  start local ranks again after one was lost""",
    examples="""
        counterflow train  the main job
        counterflow train parallel.pipeline_parallel_size=4 parallel.data_parallel_size=1  four stages of two ranks
        counterflow train checkpoint.resume=auto checkpoint.interval_steps=20 --out runs/mine  \
begins, and goes on when it is started again
        counterflow train --multirun schedule=gpipe,1f1b,dualpipe training.num_steps=20  three runs and a table
        torchrun --nnodes=2 --nproc-per-node=8 ... -m counterflow train parallel.data_parallel_size=4  \
join torchrun's ranks: 2 x 2 x 4""",
    output="""
        runs/<date-time>-<config hash>/ (launcher.runs_dir, or --out): config.yaml, metrics.jsonl, the loss
        curve, checkpoints, W&B's offline folder; rank-<n>-error.txt where a rank failed.
        --json: run_dir, final_loss, validation_loss, tokens_per_s, bubble {measured, simulated, formula}.""",
)


def run(config: TrainConfig, options: LaunchOptions) -> dict[str, Any] | None:
    """Train; the summary of rank 0, or None on the other ranks of an environment that was joined.

    Raises ConfigError: for a mistake in the config, before any rank starts.
    Raises RunFailedError, RunInterruptedError: see `counterflow.launch.ranks.elastic.run_local`.
    """
    from counterflow.framework.checks.rules import check, warnings_of
    from counterflow.launch.continuing import AUTO, finished, goes_on_in, with_restarts
    from counterflow.launch.joining import join
    from counterflow.launch.preflight import check_environment, refuse_restart
    from counterflow.launch.printing import say
    from counterflow.launch.ranks.environment import joined_rank
    from counterflow.launch.runs import environment_of_ranks, prepare_run, short_path, summary

    started_at = time.time()
    joined = joined_rank(os.environ)
    is_continued = config.checkpoint.resume == AUTO
    if not is_continued:
        refuse_restart(config, options.out, joined)
    check(config)
    config = goes_on_in(config, options.out)
    if is_continued:
        folder = options.out
        assert folder is not None
        options = options._replace(may_go_on=True)
        if (done := finished(config, folder)) is not None:
            say(f"{short_path(folder.resolve())} has done its {config.training.num_steps} steps")
            return done if joined is None or joined.rank == 0 else None
    if joined is None or joined.rank == 0:
        for sentence in warnings_of(config):
            say(f"warning: {sentence}")
    check_environment(config, joined)
    if config.memory_limit_bytes is not None:
        config, options = _within_memory(config, options, is_first=joined is None or joined.rank == 0)
    with ExitStack() as held:
        if joined is not None:
            return join(config, options, joined, started_at, held)
        from counterflow.launch.ranks.elastic import run_local

        context = prepare_run(config, options, started_at, held=held)
        num_ranks = config.parallel.world_size
        say(f"run folder {short_path(context.run_dir)}, {num_ranks} local rank{'s' * (num_ranks > 1)}")
        # What the ranks need is imported once, before they are forked.
        from counterflow.framework.trainer.loop import run_rank

        _import_what_ends_a_run(config)

        def start(config: TrainConfig) -> dict[str, Any]:
            return run_local(
                run_rank,
                (config, context),
                num_ranks=num_ranks,
                run_dir=context.run_dir,
                hidden=context.hidden,
                threads_per_rank=config.launcher.threads_per_rank,
                grace_s=config.launcher.grace_s,
                environment=environment_of_ranks(config, context.run_dir),
            )[0]

        result, restarts = with_restarts(config, context.run_dir, start, say=say)
        return summary(result, context) | {"num_restarts": len(restarts)}


def _within_memory(
    config: TrainConfig, options: LaunchOptions, *, is_first: bool
) -> tuple[TrainConfig, LaunchOptions]:
    """Both with what memory decides, so that it is in the run's record. Every rank of a joined run comes to the same.

    is_first: says it.
    """
    # It imports torch, which nobody else here needs yet.
    from counterflow.framework.checks.memory_limit import within_memory
    from counterflow.launch.printing import say

    decided = within_memory(config, say=say if is_first else lambda _: None)
    values = options.config_values
    if decided is not config and values is not None:
        zero = {**values.get("zero", {}), "reshard_after": list(decided.zero.reshard_after)}
        options = options._replace(config_values={**values, "zero": zero})
    return decided, options


def _import_what_ends_a_run(config: TrainConfig) -> None:
    """What ranks import only where they save or draw; the time to end in order is too short for it."""
    from importlib import import_module

    if config.checkpoint.enabled or config.checkpoint.resume is not None:
        import_module("counterflow.framework.checkpoint.storage")
    if config.logger.name != "none":
        import_module("matplotlib.backends.backend_agg")


COMMAND = Command(
    name="train",
    summary="train a model in the configured layout",
    help=_HELP,
    run=run,
    columns=("final_loss", "validation_loss", "tokens_per_s", "bubble.measured", "bubble.simulated"),
)
