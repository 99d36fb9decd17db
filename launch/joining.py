"""One rank of a job that torchrun, srun or another started: it meets the others, then trains as one of them."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from counterflow.framework.config.mapping import config_hash
from counterflow.framework.config.tree import TrainConfig
from counterflow.framework.devices import device_identity, device_kind, shared_devices
from counterflow.framework.errors import ConfigError, RunFailedError, RunInterruptedError, StoppedError
from counterflow.framework.trainer.run import RunContext
from counterflow.launch.command import LaunchOptions
from counterflow.launch.preflight import refuse_later_round
from counterflow.launch.printing import say
from counterflow.launch.ranks.agreement import Council, differences, facts_of, open_store
from counterflow.launch.ranks.environment import (
    JoinedRank,
    cuda_environment,
    flight_recorder_environment,
    socket_environment,
)
from counterflow.launch.ranks.failure import describe, error_path, keep
from counterflow.launch.ranks.rounds import agent_of, keep_agents
from counterflow.launch.runs import check_out, hidden_in, new_run, prepare_data, summary

if TYPE_CHECKING:
    from counterflow.framework.data.prepare import PreparedData

_HOLD_SECONDARY_S = 2.0
# Preparing a large corpus on rank 0 takes a while, and the other ranks wait for it.
_PREPARE_TIMEOUT = timedelta(hours=4)


def join(
    config: TrainConfig, options: LaunchOptions, joined: JoinedRank, started_at: float, held: ExitStack
) -> dict[str, Any] | None:
    """Be one rank of an environment that somebody else started; rank 0 makes, locks and shares the run's folder."""
    rank = joined.rank
    if joined.world_size != config.parallel.world_size:
        problem = (
            f"{joined.size_name}={joined.world_size} in the environment: this layout has "
            f"{config.parallel.world_size} rank(s) (pipeline x data x context x tensor); start that many, or change "
            "the parallel.*_size values"
        )
        if rank:
            # Where rank 0 finds the same, it tells, and who started the ranks ends this one meanwhile.
            time.sleep(_HOLD_SECONDARY_S)
        raise ConfigError([f"rank {rank}: {problem}"])
    import torch

    is_on_gpu = device_kind(config.device) == "cuda"
    os.environ.update(joined.variables)
    if is_on_gpu:
        deterministic = config.is_deterministic("cuda")
        os.environ.update(cuda_environment(os.environ, deterministic=deterministic))
    if joined.is_on_loopback:
        os.environ.update(socket_environment())
    if rank == 0 and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0" and not options.may_go_on:
        say(
            "a job that torchrun restarts is not resumed: its second round is refused (see checkpoint.resume)"
        )
    # Kept until the ranks are done: without torchrun's own store, rank 0 serves it from this process.
    store = open_store(joined, config.comm.timeout_s)
    council = Council(store, rank=rank, world_size=joined.world_size, where=joined.meeting)
    if rank == 0:
        context = _lead(config, options, council, joined, started_at, held)
    else:
        context = _follow(config, options, council, joined, started_at)
    from counterflow.framework.trainer.loop import run_rank

    if config.launcher.threads_per_rank is not None:
        torch.set_num_threads(config.launcher.threads_per_rank)
    if is_on_gpu:
        os.environ.update(flight_recorder_environment(os.environ, context.run_dir))
    try:
        result = run_rank(config, context)
    except StoppedError as error:
        raise RunInterruptedError(str(error), signal_number=signal.SIGTERM) from error
    except Exception as error:
        raise _rank_failure(rank, error, context) from error
    return summary(result, context) if rank == 0 else None


def _lead(
    config: TrainConfig,
    options: LaunchOptions,
    council: Council,
    joined: JoinedRank,
    started_at: float,
    held: ExitStack,
) -> RunContext:
    """Rank 0: compare what all ranks say, first their configs and then their data, and make the run's folder."""
    try:
        council.arrive(facts_of(config, hidden_in(config, options)))
        council.agree("configs", timedelta(seconds=config.comm.timeout_s), differences)
        council.say("agents", {"agent": agent_of(os.environ)})
        agents = [said["agent"] for said in council.hear("agents", timedelta(seconds=config.comm.timeout_s))]
        if not options.may_go_on:
            refuse_later_round(config, options.out, agents)
        check_out(options.out, may_go_on=options.may_go_on)
        data = prepare_data(config, show=True)
        council.answer("prepared", {})
        council.say("data", _data_facts(config, data, joined))
        council.agree("data", _PREPARE_TIMEOUT, _data_problems)
        context = new_run(config, options, data, started_at, held=held)
        keep_agents(context.run_dir, agents)
    except BaseException as error:
        council.dismiss(error, ("prepared", "run"))
        raise
    council.answer("run", {"run_dir": str(context.run_dir)})
    return context


def _follow(
    config: TrainConfig, options: LaunchOptions, council: Council, joined: JoinedRank, started_at: float
) -> RunContext:
    """Any other rank. Exits with 2 where rank 0 ends the run; it tells why."""
    council.arrive(facts_of(config, hidden_in(config, options)))
    council.say("agents", {"agent": agent_of(os.environ)})
    if council.wait_for("prepared", _PREPARE_TIMEOUT) is None:
        sys.exit(2)
    data: PreparedData | None = None
    try:
        data = prepare_data(config, show=False)
        council.say("data", _data_facts(config, data, joined))
    except Exception as error:
        council.say("data", {"problem": str(error)})
    told = council.wait_for("run", _PREPARE_TIMEOUT)
    if told is None or data is None:
        sys.exit(2)
    return RunContext(
        run_dir=Path(told["run_dir"]),
        data=data,
        config_hash=config_hash(config),
        started_at=started_at,
        show_progress=False,
        json_output=options.json_output,
        hidden=hidden_in(config, options),
    )


def _data_facts(config: TrainConfig, data: PreparedData, joined: JoinedRank) -> dict[str, Any]:
    tokens = {"data: hash of the tokens": data.content_hash, "data: size of the vocabulary": data.vocab_size}
    return {"tokens": tokens, "device": device_identity(config.device, joined.local_rank)}


def _data_problems(said: list[Mapping[str, Any]]) -> list[str]:
    return differences([rank["tokens"] for rank in said]) + shared_devices([rank["device"] for rank in said])


def _rank_failure(rank: int, error: Exception, context: RunContext) -> RunFailedError:
    record = describe(rank, error, context.hidden)
    path = error_path(context.run_dir, rank)
    not_kept = keep(path, record.traceback)
    if record.secondary:
        time.sleep(
            _HOLD_SECONDARY_S
        )  # so that whoever started the ranks sees first the one that failed first
    kept = f"is in {path}" if not_kept is None else f"could not be written to {path} ({not_kept})"
    message = f"rank {rank} failed: {record.kind}: {record.message}; its traceback {kept}"
    return RunFailedError(message, rank=rank, details=record.traceback)
