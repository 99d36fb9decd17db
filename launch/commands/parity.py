"""`counterflow parity`: train the same model, data and seed in a layout and in one process, and compare."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from counterflow.launch.command import LAYOUT_KEYS, Command, Help, LaunchOptions
from counterflow.launch.printing import say

if TYPE_CHECKING:
    from pathlib import Path

    from counterflow.framework.config.tree import TrainConfig
    from counterflow.framework.trainer.run import RunContext

_HELP = Help(
    about="""
        Trains the same model, data and seed for five steps in the configured layout and once more in one
        process, and prints the largest relative difference of loss, gradients and parameters. In fp32, losses
        and the first step's gradients are held to 1e-5, parameters to what Adam may make of rounding; the exit
        code is 1 where they miss it.""",
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


def run(config: TrainConfig, options: LaunchOptions) -> dict[str, Any]:
    """Train both and return the largest relative differences: loss_rel, grad_rel, param_rel, and whether they hold.

    Raises ConfigError: before any rank starts. Raises RunFailedError, RunInterruptedError: see `run_local`.
    """
    import tempfile
    from pathlib import Path

    from counterflow.framework.checkpoint.manifest import step_folder
    from counterflow.framework.checks.parity import NUM_STEPS, reference_config, to_mapping
    from counterflow.framework.checks.rules import check
    from counterflow.framework.devices import check_devices
    from counterflow.framework.errors import ConfigError
    from counterflow.launch.ranks.elastic import run_local
    from counterflow.launch.runs import layout_text, prepare_run, short_path, without_records

    config = without_records(config)
    check(config)
    if problems := _refused(config):
        raise ConfigError(problems)
    check_devices(config, config.parallel.world_size)
    reference = reference_config(config)
    context = prepare_run(config, options, time.time(), kind="parity")
    say(f"parity of {layout_text(config)} with one process, in {short_path(context.run_dir)}")
    with tempfile.TemporaryDirectory(prefix=".parity-", dir=context.run_dir) as name:
        folder = step_folder(Path(name), NUM_STEPS)
        say(f"training on {config.parallel.world_size} ranks")
        trail = run_local(
            _layout_rank,
            (config, context, folder),
            num_ranks=config.parallel.world_size,
            run_dir=context.run_dir,
            threads_per_rank=config.launcher.threads_per_rank,
            grace_s=config.launcher.grace_s,
        )[0]
        say(f"training on one rank, {reference.schedule.num_microbatches} micro-batches a step")
        (parity,) = run_local(
            _reference_rank,
            (config, context, folder, trail),
            num_ranks=1,
            run_dir=context.run_dir,
            threads_per_rank=config.launcher.threads_per_rank,
            grace_s=config.launcher.grace_s,
        )
    return {"layout": layout_text(config), "run_dir": str(context.run_dir), **to_mapping(parity)}


def _refused(config: TrainConfig) -> list[str]:
    """What parity, five plain steps of a layout beside one process, cannot judge."""
    problems: list[str] = []
    if config.zero.engine != "native":
        problems.append(
            f"zero.engine={config.zero.engine}: its gradients are its own business; `counterflow bench deepspeed` "
            "compares its losses and norms with ours"
        )
    if config.compression.method != "none":
        problems.append(
            f"compression.method={config.compression.method}: compressed gradients are not those of one process, "
            "and parity is to 1e-5; set compression=none"
        )
    if config.compression.weights != "none":
        problems.append(
            f"compression.weights={config.compression.weights}: rounded weights are not those of one process, and "
            "parity is to 1e-5; set compression.weights=none"
        )
    if config.comm.pipeline_payload != "compute":
        problems.append(
            f"comm.pipeline_payload={config.comm.pipeline_payload}: activations are rounded on their way, and parity "
            "is to 1e-5; set comm.pipeline_payload=compute"
        )
    precision = config.precision
    if precision.compute == "fp16":
        problems.append(
            "precision.compute=fp16: a step whose gradients overflow is skipped, and parity compares every step; set "
            "precision=fp32 or precision=bf16"
        )
    for name, plain in (("reduce", "fp32"), ("optimizer_states", "fp32"), ("linear", "compute")):
        if getattr(precision, name) != plain:
            problems.append(
                f"precision.{name}={getattr(precision, name)}: what is rounded differs from one process, and parity is "
                f"to 1e-5; set precision.{name}={plain}"
            )
    from counterflow.framework.checks.parity import NUM_STEPS

    if config.balance.interval_steps >= NUM_STEPS:
        problems.append(
            f"balance.interval_steps={config.balance.interval_steps}: no expert moves in the {NUM_STEPS} steps that "
            f"parity compares; set balance.interval_steps to less than {NUM_STEPS}, or to 0"
        )
    if config.comm.expert_payload != "compute" and config.parallel.expert_parallel_size > 1:
        problems.append(
            f"comm.expert_payload={config.comm.expert_payload}: hidden states are rounded on their way, and parity is "
            "to 1e-5; set comm.expert_payload=compute"
        )
    return problems


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


COMMAND = Command(
    name="parity",
    summary="check a layout against one process: loss, gradients, parameters",
    help=_HELP,
    run=run,
    print_result=print_result,
    columns=("loss_rel", "grad_rel", "param_rel", "holds"),
)
