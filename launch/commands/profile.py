"""Cuts the model into the schedule's stages, times F, I, W and B of each on one rank (or on the ranks of
its tensor axis), and the link between two local ranks with messages of the real size. Writes a file
that schedule.costs.profile reads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from counterflow.launch.command import Command, Help, LaunchOptions
from counterflow.launch.printing import new_table, print_lines, readable_bytes, say

if TYPE_CHECKING:
    from pathlib import Path

    from counterflow.framework.config.tree import TrainConfig
    from counterflow.parallel.pipeline.analysis.cost_profile import CostProfile

_HELP = Help(
    about=__doc__ or "",
    keys="""
        model=tiny  the model's shape
        parallel.pipeline_parallel_size=4  pipeline ranks
        schedule=zbv  whose stages: two a rank for the V-shaped ones, else one
        data.micro_batch_size=2  samples of a micro-batch
        precision=bf16  fp32, bf16 or fp16""",
    examples="""
        counterflow profile parallel.pipeline_parallel_size=4  the stages of the default schedule
        counterflow profile schedule=zbv --out mine.json  two stages a rank, into a file of your own
        counterflow profile --multirun data.micro_batch_size=1,2,4  a table of three sizes""",
    output="""
        runs/profile-s<stages>-<hash>.json (or --out FILE.json, or --out DIR for DIR/profile.json).
        Use it: counterflow simulate schedule=auto schedule.costs.profile=FILE ...
        --json: path, num_stages, stages [{forward_s, ...}], activation_bytes, link, inflation.""",
)


def run(config: TrainConfig, options: LaunchOptions) -> dict[str, Any]:
    """Measure and write the profile; what `--json` prints: path, num_stages, stages, activation_bytes, link, inflation.

    Raises ConfigError: before any rank starts. Raises RunFailedError, RunInterruptedError: see `run_local`.
    """
    import tempfile
    from dataclasses import asdict, replace
    from pathlib import Path

    from counterflow.framework.checks.profile import run_profile_rank
    from counterflow.framework.checks.rules import build_schedule, check
    from counterflow.framework.devices import check_devices
    from counterflow.launch.runs import hidden_in, short_path, start_ranks, without_records
    from counterflow.parallel.pipeline.analysis.cost_profile import CostProfile, save_profile

    config = without_records(config)
    check(config)
    num_stages = build_schedule(config.schedule, config.parallel).num_stages
    check_devices(config, _num_ranks(config))
    path = _path(config, options, num_stages)
    vocab_size = config.model.vocab_size or _tokenizer_size(config)
    say(f"measuring {num_stages} stages and the link between two ranks, one stage at a time")
    with tempfile.TemporaryDirectory(
        prefix=".profile-", dir=path.parent, ignore_cleanup_errors=True
    ) as folder:
        # One thread each, as the ranks of a run: its processes share the cores out.
        threads = replace(config.launcher, threads_per_rank=config.launcher.threads_per_rank or 1)
        profile, *_ = start_ranks(
            replace(config, launcher=threads),
            Path(folder),
            run_profile_rank,
            *(config, num_stages, vocab_size),
            hidden=hidden_in(config, options),
            num_ranks=_num_ranks(config),
        )
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

    times = ("F ms", "I ms", "W ms", "B ms", "(I+W)/B")
    columns = ("stage", "layers", *times, "parameters", "activation out")
    table = new_table(result["provenance"]["model"], columns)
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
    print_lines(
        console,
        f"link               latency {1e6 * link['latency_s']:.1f} us, bandwidth {rate}",
        f"machine            {result['provenance']['machine']}",
        f"{result['path']}  (use it: schedule.costs.profile={result['path']})",
    )


def _path(config: TrainConfig, options: LaunchOptions, num_stages: int) -> Path:
    """Where the profile goes; its folder is made.

    Raises ConfigError: where it cannot be.
    """
    from dataclasses import replace
    from pathlib import Path

    from counterflow.framework.config.mapping import config_hash
    from counterflow.framework.config.tree import TrainConfig
    from counterflow.framework.errors import ConfigError

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
    from counterflow.framework.devices import devices_here

    wanted = max(2, config.parallel.tensor_parallel_size)
    devices = devices_here()
    at_least = config.parallel.tensor_parallel_size
    return max(at_least, min(wanted, devices.num_gpus)) if devices.kind(config.device) == "cuda" else wanted


def _inflation(profile: CostProfile) -> float:
    """(I + W) / B over all stages."""
    split = sum(stage.input_gradient_s + stage.weight_gradient_s for stage in profile.stages)
    return split / sum(stage.backward_s for stage in profile.stages)


COMMAND = Command(
    name="profile",
    summary="measure what each pipeline stage costs here, for simulate and schedule=auto",
    help=_HELP,
    run=run,
    print_result=print_result,
    columns=("num_stages", "inflation", "link.latency_s", "link.bandwidth_bytes_per_s"),
)
