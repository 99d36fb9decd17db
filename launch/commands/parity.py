"""Trains the same model, data and seed for five steps in the configured layout and once more in one
process, and prints the largest relative difference of loss, gradients and parameters. In fp32, losses
and the first step's gradients are held to 1e-5, parameters to what Adam may make of rounding; the exit
code is 1 where they miss it.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from counterflow.launch.command import LAYOUT_KEYS, Command, Help, LaunchOptions
from counterflow.launch.printing import say

if TYPE_CHECKING:
    from counterflow.framework.config.tree import TrainConfig

_HELP = Help(
    about=__doc__ or "",
    keys=LAYOUT_KEYS
    + """
    zero.stage=3  0, 1, 2, 3
    model.tie_embeddings=true  tied embeddings""",
    examples="""
        counterflow parity  the main job's layout
        counterflow parity schedule=1f1b zero.stage=2 parallel.tensor_parallel_size=1  another
        counterflow parity --multirun zero.stage=0,1,2,3  every ZeRO stage""",
    output="""
        runs/<date-time>-parity-<config hash>/config.yaml (or --out).
        --json: loss_rel, grad_rel, param_rel, holds. `make parity` runs the whole grid.""",
)


def check(config: TrainConfig) -> None:
    """Raises ConfigError: for what cannot run, and for what five steps beside one process cannot judge."""
    from counterflow.framework.checks import rules

    rules.check(config, "parity")


def run(config: TrainConfig, options: LaunchOptions) -> dict[str, Any]:
    """Train both and return the largest relative differences: loss_rel, grad_rel, param_rel, and whether they hold.

    Raises ConfigError: before any rank starts. Raises RunFailedError, RunInterruptedError: see `run_local`.
    """
    import tempfile
    from pathlib import Path

    from counterflow.framework.checkpoint.manifest import step_folder
    from counterflow.framework.checks.parity import (
        NUM_STEPS,
        reference_config,
        run_layout_rank,
        run_reference_rank,
        to_mapping,
    )
    from counterflow.framework.devices import check_devices
    from counterflow.launch.runs import layout_text, prepare_run, short_path, start_ranks, without_records

    config = without_records(config)
    check(config)
    check_devices(config, config.parallel.world_size)
    reference = reference_config(config)
    context = prepare_run(config, options, time.time(), kind="parity")
    say(f"parity of {layout_text(config)} with one process, in {short_path(context.run_dir)}")
    with tempfile.TemporaryDirectory(prefix=".parity-", dir=context.run_dir) as name:
        folder = step_folder(Path(name), NUM_STEPS)
        say(f"training on {config.parallel.world_size} ranks")
        of_layout = (config, context, folder)
        trail, *_ = start_ranks(config, context.run_dir, run_layout_rank, *of_layout, hidden=context.hidden)
        say(f"training on one rank, {reference.schedule.num_microbatches} micro-batches a step")
        of_one = (config, context, folder, trail)
        (parity,) = start_ranks(
            config, context.run_dir, run_reference_rank, *of_one, hidden=context.hidden, num_ranks=1
        )
    return {"layout": layout_text(config), "run_dir": str(context.run_dir), **to_mapping(parity)}


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


COMMAND = Command(
    name="parity",
    summary="check a layout against one process: loss, gradients, parameters",
    help=_HELP,
    run=run,
    print_result=print_result,
    check=check,
    columns=("loss_rel", "grad_rel", "param_rel", "holds"),
)
