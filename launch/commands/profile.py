"""`counterflow profile`: measure the costs of the pipeline's stages on this machine and write them to a file."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from counterflow.framework.checks.rules import build_schedule, check
from counterflow.framework.config.mapping import config_hash
from counterflow.framework.config.tree import CheckpointConfig, LoggerConfig, TrainConfig
from counterflow.framework.devices import check_devices, devices_here
from counterflow.framework.errors import ConfigError
from counterflow.launch.commands.train import LaunchOptions, hidden_in, short_path
from counterflow.parallel.pipeline.analysis.cost_profile import CostProfile, save_profile


def run(config: TrainConfig, options: LaunchOptions) -> dict[str, Any]:
    """Measure and write the profile; what `--json` prints: path, num_stages, stages, activation_bytes, link, inflation.

    Raises ConfigError: before any rank starts. Raises RunFailedError, RunInterruptedError: see `run_local`.
    """
    # None of these has a part in what a stage costs, and they may name what is not there yet.
    config = replace(config, logger=LoggerConfig(name="none"), checkpoint=CheckpointConfig(enabled=False))
    check(config)
    num_stages = build_schedule(config.schedule, config.parallel).num_stages
    check_devices(config, _num_ranks(config))
    path = _path(config, options, num_stages)
    vocab_size = config.model.vocab_size or _tokenizer_size(config)

    from counterflow.framework.checks.profile import run_profile_rank  # before the ranks are forked
    from counterflow.launch.ranks.elastic import run_local

    print(
        f"measuring {num_stages} stages and the link between two ranks, one stage at a time",
        file=sys.stderr,
        flush=True,
    )
    folder = Path(tempfile.mkdtemp(prefix=".profile-", dir=path.parent))
    try:
        results = run_local(
            _rank,
            (run_profile_rank, config, num_stages, vocab_size),
            num_ranks=_num_ranks(config),
            run_dir=folder,
            hidden=hidden_in(config, options),
            # As the ranks of a run: its processes share the cores out.
            threads_per_rank=config.launcher.threads_per_rank or 1,
            grace_s=config.launcher.grace_s,
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    profile = results[0]
    assert isinstance(profile, CostProfile)
    save_profile(profile, path)
    return {
        "path": short_path(path),
        "num_stages": num_stages,
        "inflation": _inflation(profile),
        "stages": [asdict(stage) for stage in profile.stages],
        "activation_bytes": list(profile.activation_bytes),
        "link": asdict(profile.link),
        "provenance": dict(profile.provenance),
    }


def print_result(result: dict[str, Any]) -> None:
    """A table, one line a stage, and how to use the file."""
    from rich.console import Console
    from rich.table import Table

    from counterflow.launch.commands.simulate import readable_bytes

    table = Table(title=result["provenance"]["model"], title_justify="left")
    for column in (
        "stage",
        "layers",
        "F ms",
        "I ms",
        "W ms",
        "B ms",
        "(I+W)/B",
        "parameters",
        "activation out",
    ):
        table.add_column(column, justify="right")
    sizes = [*result["activation_bytes"], None]
    for index, (stage, size) in enumerate(zip(result["stages"], sizes, strict=True)):
        times = [stage[f"{name}_s"] for name in ("forward", "input_gradient", "weight_gradient", "backward")]
        table.add_row(
            str(index),
            str(result["provenance"]["layers"][index]),
            *(f"{1e3 * seconds:.3f}" for seconds in times),
            f"{(times[1] + times[2]) / times[3]:.2f}",
            readable_bytes(stage["parameter_bytes"]),
            "" if size is None else readable_bytes(size),
        )
    console = Console()
    console.print(table)
    link = result["link"]
    bandwidth = link["bandwidth_bytes_per_s"]
    rate = "no limit seen" if bandwidth is None else f"{readable_bytes(bandwidth)}/s"
    for line in (
        f"link               latency {1e6 * link['latency_s']:.1f} us, bandwidth {rate}",
        f"machine            {result['provenance']['machine']}",
        f"{result['path']}  (use it: schedule.costs.profile={result['path']})",
    ):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _path(config: TrainConfig, options: LaunchOptions, num_stages: int) -> Path:
    """Where the profile goes; its folder is made.

    Raises ConfigError: where it cannot be.
    """
    shaping = replace(TrainConfig(), model=config.model, parallel=config.parallel, data=config.data)
    digest = config_hash(replace(shaping, precision=config.precision))[:8]
    path = Path(config.launcher.runs_dir).expanduser() / f"profile-s{num_stages}-{digest}.json"
    if options.out is not None:
        path = options.out if options.out.suffix == ".json" else options.out / "profile.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError([f"{path.parent}: no folder can be made there: {error}; name another"]) from error
    return path.resolve()


def _tokenizer_size(config: TrainConfig) -> int:
    """The vocabulary that training would have."""
    from counterflow.framework.data.prepare import prepare

    return prepare(config.data, config.tokenizer).vocab_size


def _num_ranks(config: TrainConfig) -> int:
    """The ranks of the tensor axis, and a second one for the link where there is a device for it."""
    wanted = max(2, config.parallel.tensor_parallel_size)
    devices = devices_here()
    at_least = config.parallel.tensor_parallel_size
    return max(at_least, min(wanted, devices.num_gpus)) if devices.kind(config.device) == "cuda" else wanted


def _inflation(profile: CostProfile) -> float:
    """(I + W) / B over all stages."""
    split = sum(stage.input_gradient_s + stage.weight_gradient_s for stage in profile.stages)
    return split / sum(stage.backward_s for stage in profile.stages)


def _rank(entry: Any, config: TrainConfig, num_stages: int, vocab_size: int) -> CostProfile | None:
    return entry(config, num_stages, vocab_size, int(os.environ["LOCAL_RANK"]))
