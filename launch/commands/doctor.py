"""Says what works on this machine: devices, versions, backends, the link between two local ranks, kernels,
and the disk that runs are written to. Each kernel is tried on the device, in ranks of its own. With the
KEY=VALUE of a run it says what that run needs and this machine does not have; the exit code is then 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from counterflow.launch.command import Command, Help, LaunchOptions
from counterflow.launch.printing import new_table, print_lines, readable_bytes, say

if TYPE_CHECKING:
    from counterflow.framework.config.tree import TrainConfig

_HELP = Help(
    about=__doc__ or "",
    keys="""
        device=cuda  auto, cpu or cuda: where ranks would compute
        precision.linear=fp8  and any other value of a run whose needs are to be looked at
        launcher.runs_dir=/data/runs  the folder whose disk is tried""",
    examples="""
        counterflow doctor  what works here
        counterflow doctor --json device=cuda  the same as JSON; exit 1 without a GPU
        counterflow doctor model=mixtral_8x7b precision.linear=fp8  what that run lacks here""",
    output="""
        Nothing is left behind. --json: versions, devices, backends, kernels [{name, works, what}], link
        {backend, p2p_bytes_per_s, all_reduce_bytes_per_s, latency_s}, disk {folder, bytes_per_s, free_bytes},
        missing [what the config needs], holds.""",
)


def run(config: TrainConfig, options: LaunchOptions) -> dict[str, Any]:
    """Try everything; what `--json` prints. `holds` is whether nothing is missing that `config` needs.

    Raises ConfigError: for a config that no machine can run. Raises RunFailedError: where the ranks that try fail.
    """
    from dataclasses import asdict, replace
    from pathlib import Path
    from tempfile import TemporaryDirectory

    from counterflow.framework.checks import doctor
    from counterflow.framework.checks.rules import check
    from counterflow.framework.devices import devices_here
    from counterflow.launch.runs import hidden_in, start_ranks

    check(config)
    devices = devices_here()
    wanted = devices.kind(config.device)
    # Where the GPUs that are asked for are not there, the rest is tried on the CPU.
    device_type = wanted if devices.num_gpus else "cpu"
    num_ranks = doctor.num_probe_ranks(device_type, devices)
    say(f"trying what works on {num_ranks} local rank{'s' * (num_ranks > 1)}")
    with TemporaryDirectory(prefix="counterflow-doctor-") as folder:
        threads = replace(config.launcher, threads_per_rank=config.launcher.threads_per_rank or 1)
        probe, *_ = start_ranks(
            replace(doctor.probe_config(config, device_type), launcher=threads),
            Path(folder),
            doctor.probe_rank,
            doctor.probe_config(config, device_type),
            hidden=hidden_in(config, options),
            num_ranks=num_ranks,
        )
    disk, disk_problems = None, list[str]()
    try:
        disk = doctor.disk_speed(Path(config.launcher.runs_dir).expanduser())
    except OSError as error:
        disk_problems.append(
            f"launcher.runs_dir={config.launcher.runs_dir}: {error}; name one that you may write to"
        )
    backends = doctor.backends()
    missing = doctor.missing(
        config, wanted, devices=probe.devices, backends=backends, kernels=probe.kernels, disk=disk
    )
    missing += disk_problems
    return {
        "device": device_type,
        "versions": [asdict(each) for each in doctor.versions()],
        "devices": [asdict(each) for each in probe.devices],
        "backends": [asdict(each) for each in backends],
        "kernels": [asdict(each) for each in probe.kernels],
        "link": None if probe.link is None else asdict(probe.link),
        "disk": None if disk is None else asdict(disk),
        "missing": missing,
        "holds": not missing,
    }


def print_result(result: dict[str, Any]) -> None:
    """A table of what was looked for, the speeds, and what is missing."""
    from rich.console import Console

    console = Console()
    table = new_table(f"on {result['device']}", ("", "works", "what"), left=("", "what"))
    for part in ("versions", "devices", "backends", "kernels"):
        for each in result[part]:
            table.add_row(each["name"], "yes" if each["works"] else "no", each["what"])
        table.add_section()
    console.print(table)
    lines: list[str] = []
    if link := result["link"]:
        lines.append(
            f"two local ranks ({link['backend']}): {readable_bytes(link['p2p_bytes_per_s'])}/s from one to the other, "
            f"{readable_bytes(link['all_reduce_bytes_per_s'])}/s all-reduced, {link['latency_s'] * 1e6:.0f} us latency"
        )
    if disk := result["disk"]:
        lines.append(
            f"disk of {disk['folder']}: {readable_bytes(disk['bytes_per_s'])}/s written, "
            f"{readable_bytes(disk['free_bytes'])} free"
        )
    lacks = [f"missing: {each}" for each in result["missing"]]
    print_lines(console, *lines, *(lacks or ["nothing is missing that this config needs"]))


COMMAND = Command(
    name="doctor",
    summary="say what works on this machine, and what a config lacks here",
    help=_HELP,
    run=run,
    print_result=print_result,
    columns=("holds", "device", "link.p2p_bytes_per_s", "disk.bytes_per_s", "disk.free_bytes"),
    takes_out=False,
)
