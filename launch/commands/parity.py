"""`counterflow parity`: train the same model, data and seed in a layout and in one process, and compare.

`python -m counterflow.launch.commands.parity` runs the whole grid of layouts that fit eight ranks (`make parity`).
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from counterflow.framework.checks.rules import check
from counterflow.framework.config.tree import CheckpointConfig, LoggerConfig, TrainConfig
from counterflow.framework.devices import check_devices
from counterflow.framework.errors import RunFailedError, RunInterruptedError
from counterflow.framework.trainer.run import RunContext
from counterflow.launch.commands.train import LaunchOptions, make_run_dir, prepare_run, short_path

_MAX_RANKS = 8


def run(config: TrainConfig, options: LaunchOptions) -> dict[str, Any]:
    """Train both and return the largest relative differences: loss_rel, grad_rel, param_rel, and whether they hold.

    Raises ConfigError: before any rank starts. Raises RunFailedError, RunInterruptedError: see `run_local`.
    """
    # Neither records nor checkpoints: the comparison reads its own files.
    config = replace(config, logger=LoggerConfig(name="none"), checkpoint=CheckpointConfig(enabled=False))
    check(config, "parity")
    check_devices(config, config.parallel.world_size)

    from counterflow.framework.checkpoint.manifest import step_folder
    from counterflow.framework.checks.parity import NUM_STEPS, reference_config, to_mapping
    from counterflow.launch.ranks.elastic import run_local

    reference = reference_config(config)
    context = prepare_run(config, options, time.time(), kind="parity")
    _say(f"parity of {layout_text(config)} with one process, in {short_path(context.run_dir)}")
    with tempfile.TemporaryDirectory(prefix=".parity-", dir=context.run_dir) as name:
        folder = step_folder(Path(name), NUM_STEPS)
        _say(f"training on {config.parallel.world_size} ranks")
        trail = run_local(
            _layout_rank,
            (config, context, folder),
            num_ranks=config.parallel.world_size,
            run_dir=context.run_dir,
            hidden=context.hidden,
            threads_per_rank=config.launcher.threads_per_rank,
            grace_s=config.launcher.grace_s,
        )[0]
        _say(f"training on one rank, {reference.schedule.num_microbatches} micro-batches a step")
        (parity,) = run_local(
            _reference_rank,
            (config, context, folder, trail),
            num_ranks=1,
            run_dir=context.run_dir,
            hidden=context.hidden,
            threads_per_rank=config.launcher.threads_per_rank,
            grace_s=config.launcher.grace_s,
        )
    return {"layout": layout_text(config), "run_dir": str(context.run_dir), **to_mapping(parity)}


def layout_text(config: TrainConfig) -> str:
    """A layout in a few characters, as `tp2 pp2 dp2 zero3 dualpipe`."""
    parallel = config.parallel
    experts = f"ep{parallel.expert_parallel_size} " if config.model.moe.num_experts else ""
    return (
        f"tp{parallel.tensor_parallel_size} pp{parallel.pipeline_parallel_size} dp{parallel.data_parallel_size} "
        f"{experts}zero{config.zero.stage} {config.schedule.name}"
    )


def grid(*, has_experts: bool = False) -> Iterator[list[str]]:
    """The overrides of every layout that fits eight ranks, for a model with experts or without."""
    yield from _expert_grid() if has_experts else _dense_grid()


def _expert_grid() -> Iterator[list[str]]:
    """As many data-parallel ranks as share the experts out with the tensor-parallel ones, or twice as many."""
    schedules = ("1f1b", "dualpipe", "dualpipe_v", "zbv")
    for expert, pipeline, tensor, copies, stage, schedule in product(
        (2, 4), (1, 2, 4), (1, 2), (1, 2), (0, 1, 3), schedules
    ):
        data = copies * max(expert, tensor) // tensor
        if tensor * pipeline * data > _MAX_RANKS or (schedule == "dualpipe" and pipeline == 1):
            continue
        yield [
            f"parallel.expert_parallel_size={expert}",
            f"parallel.tensor_parallel_size={tensor}",
            f"parallel.pipeline_parallel_size={pipeline}",
            f"parallel.data_parallel_size={data}",
            f"zero.stage={stage}",
            f"schedule={schedule}",
            f"model.num_layers={max(4, 2 * pipeline)}",
        ]


def _dense_grid() -> Iterator[list[str]]:
    axes = product((1, 2), (1, 2, 4), (1, 2), (0, 1, 2, 3), ("gpipe", "1f1b", "dualpipe"))
    for tensor, pipeline, data, stage, schedule in axes:
        if tensor * pipeline * data > _MAX_RANKS or (schedule == "dualpipe" and pipeline == 1):
            continue
        yield [
            f"parallel.tensor_parallel_size={tensor}",
            f"parallel.pipeline_parallel_size={pipeline}",
            f"parallel.data_parallel_size={data}",
            f"zero.stage={stage}",
            f"schedule={schedule}",
        ]


def print_result(result: dict[str, Any]) -> None:
    """The differences, each with what it is measured on, and whether experts got the same tokens."""
    steps = f"largest of {result['num_steps']} steps"
    rows = (
        ("loss", result["loss_rel"], steps),
        *([("MTP loss", result["mtp_loss_rel"], steps)] * (result["mtp_loss_rel"] is not None)),
        ("norm", result["norm_rel"], f"of all gradients, {steps}"),
        ("gradients", result["grad_rel"], f"{result['worst_grad']}, of the first step before clipping"),
        ("parameters", result["param_rel"], f"after {result['num_steps']} steps"),
    )
    print(f"largest relative difference of {result['layout']} to one process:")
    for name, value, what in rows:
        print(f"  {name:<12}{value:.2e}   {what}")
    if result["num_routed_layers"]:
        print(
            f"routing: the loads of all experts are equal in {result['num_routed_layers']} layers and "
            f"{result['num_steps']} steps"
            if result["routing_equal"]
            else f"routing: the loads of experts DIFFER, first in {result['different_routing']}"
        )
    print(
        f"parameters use {result['param_of_bound']:.2g} of what Adam may make of rounding ({result['worst_param']})"
    )
    verdict = "hold" if result["holds"] else "DO NOT HOLD"
    what = (
        "losses, norms, gradients and routing"
        if result["num_routed_layers"]
        else "losses, norms and gradients"
    )
    print(f"{what} {verdict} the fp32 bound of {result['tolerance']:g}")


def _layout_rank(config: TrainConfig, context: RunContext, folder: Path) -> Any:
    from counterflow.framework.checks.parity import run_layout_rank

    return run_layout_rank(config, context, int(os.environ["LOCAL_RANK"]), folder)


def _reference_rank(config: TrainConfig, context: RunContext, folder: Path, trail: Any) -> Any:
    from counterflow.framework.checks.parity import run_reference_rank

    return run_reference_rank(config, context, int(os.environ["LOCAL_RANK"]), folder, trail)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> int:
    """Run the whole grid, with the overrides of the command line on top; 0 where every layout holds."""
    from counterflow.launch.compose import compose_config

    extra = sys.argv[1:]
    missed: list[str] = []
    try:
        layouts = list(grid(has_experts=compose_config(extra).model.moe.num_experts > 0))
        configs = [compose_config([*overrides, *extra]) for overrides in layouts]
        for config in configs:
            check(config)
        folder = make_run_dir(Path(configs[0].launcher.runs_dir), "parity-grid")
        for number, config in enumerate(configs, start=1):
            layout = layout_text(config)
            options = LaunchOptions(
                out=folder / layout.replace(" ", "-"),
                command=("counterflow", "parity", *layouts[number - 1], *extra),
            )
            try:
                result = run(config, options)
                verdict = "holds" if result["holds"] else "FAILS"
                told = (
                    f"loss {result['loss_rel']:.1e}  gradients {result['grad_rel']:.1e}  "
                    f"parameters {result['param_rel']:.1e}  {verdict}"
                )
            except RunFailedError as error:
                verdict, told = "FAILS", str(error)
            print(f"[{number}/{len(layouts)}] {layout:<32} {told}", flush=True)
            if verdict == "FAILS":
                missed.append(layout)
    except ValueError as error:
        _say(f"error: {error}")
        return 2
    except RunInterruptedError as error:
        _say(str(error))
        return 128 + error.signal_number
    print(
        f"{len(layouts) - len(missed)} of {len(layouts)} layouts hold"
        + (f"; not: {missed}" if missed else "")
    )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
