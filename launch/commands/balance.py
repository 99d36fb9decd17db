"""Sums up how often the tokens of a run chose each expert, layer by layer, and places the experts on the
ranks of an expert axis: in order, packed by load, and with spare slots for replicas of hot experts
(groups to nodes, replicas to ranks, as DeepSeek's EPLB). Prints the largest load of a rank over the
mean. In training, balance.interval_steps=N moves experts by the same rules, and
balance.num_redundant_experts makes room for replicas.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from counterflow.launch.command import A_RUN, Command, Help, LaunchOptions, UsageError
from counterflow.launch.printing import new_table, print_paths, pyplot, save_picture

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from counterflow.framework.experts.balance_plan import BalancePlan
    from counterflow.parallel.expert.placement import ExpertsByRank


_OUTPUT = """
        RUN/balance.png and .svg (or in --out): loads of ranks by layer.
        --json: layers, before [of each layer], after {spare slots: [of each layer]}, placements {spare slots:
        [layer][rank][slot]}, png."""
_EXAMPLES = f"""
        counterflow balance {A_RUN}  on four ranks
        counterflow balance {A_RUN} num_ranks=8 num_nodes=2 num_groups=4  two nodes
        counterflow balance {A_RUN} last_steps=50 --json  the placements as JSON"""


def help_on(words: Sequence[str]) -> Help:
    """The help, with the keys of the plan."""
    from counterflow.framework.experts.balance_plan import BalancePlan
    from counterflow.framework.keys import keys_text

    return Help(
        argument="RUN [KEY=VALUE ...]",
        about=__doc__ or "",
        keys=keys_text(BalancePlan),
        keys_heading="its keys, with their defaults:",
        examples=_EXAMPLES,
        output=_OUTPUT,
    )


def read(words: Sequence[str]) -> tuple[Path, BalancePlan]:
    """The folder of the run, and the KEY=VALUE words as a plan.

    Raises UsageError: without a folder. Raises ValueError: for an unknown key or a value that does not fit.
    """
    from pathlib import Path

    from counterflow.framework.experts.balance_plan import BalancePlan
    from counterflow.launch.keys import read_keys

    if not words or "=" in words[0]:
        raise UsageError(f"balance takes the folder of a run first, as in counterflow balance {A_RUN}")
    return Path(words[0]), read_keys(BalancePlan, words[1:])


def run(run_and_plan: tuple[Path, BalancePlan], options: LaunchOptions) -> dict[str, Any]:
    """Place the experts of a run by its recorded loads; a table, and a picture under --out or in the run's folder.

    Returns what `--json` prints.
    Raises ValueError: where the run recorded no loads, or the sizes do not fit them.
    """
    from rich.console import Console

    from counterflow.parallel.expert.exchange import even_placement
    from counterflow.parallel.expert.placement import ExpertLayout, imbalance, place_experts

    run_dir, plan = run_and_plan
    loads, num_steps = recorded_loads(run_dir, plan.last_steps)
    num_experts = len(next(iter(loads.values())))
    # Refuses what does not divide, with the remedy.
    even = even_placement(num_experts, plan.num_ranks)
    placements: dict[int, tuple[ExpertsByRank, ...]] = {}
    for spare in plan.num_redundant_experts:
        layout = ExpertLayout(
            num_experts=num_experts,
            num_ranks=plan.num_ranks,
            num_slots=num_experts // plan.num_ranks + spare,
            num_nodes=plan.num_nodes,
            num_groups=plan.num_groups,
        )
        placements[spare] = place_experts(list(loads.values()), layout)
    before = [imbalance(layer, even) for layer in loads.values()]
    after = {
        spare: [imbalance(layer, placed) for layer, placed in zip(loads.values(), layers, strict=True)]
        for spare, layers in placements.items()
    }
    picture = _draw(loads, even, placements, (options.out or run_dir) / "balance.png")
    console = Console()
    _print(console, list(loads), before, after, f"{num_steps} steps, {plan.num_ranks} ranks")
    print_paths(console, [(picture, "loads of ranks")])
    return {
        "run_dir": str(run_dir),
        "num_steps": num_steps,
        "layers": list(loads),
        "before": before,
        "after": after,
        "placements": placements,
        "png": str(picture),
    }


def recorded_loads(run_dir: Path, last_steps: int = 0) -> tuple[dict[int, list[float]], int]:
    """The loads of each layer of experts, summed over those of the last steps (0: all) of a run that have them in
    their records, and over how many.

    Raises ValueError: where there are none.
    """
    from counterflow.framework.metrics.sinks import METRICS_FILE, iterate_records

    if not run_dir.is_dir():
        what = "is a file, not the folder of a run" if run_dir.exists() else "there is no such folder"
        raise ValueError(f"{run_dir}: {what}; name that of a run, as in counterflow balance runs/RUN")
    path = run_dir / METRICS_FILE
    last_step = -1
    if last_steps and path.exists():
        last_step = max((record.step for record in iterate_records(path)), default=-1)
    loads: dict[int, list[float]] = {}
    num_steps = 0
    for record in iterate_records(path) if path.exists() else ():
        if record.moe is None or (last_steps and record.step <= last_step - last_steps):
            continue
        layers = [layer for layer in record.moe.layers if layer.load]
        num_steps += bool(layers)
        for layer in layers:
            sums = loads.setdefault(layer.layer, [0.0] * len(layer.load))
            loads[layer.layer] = [a + b for a, b in zip(sums, layer.load, strict=True)]
    if not loads:
        raise ValueError(
            f"{run_dir}: no loads of experts in {METRICS_FILE}; name the folder of a run of a model that has some "
            "(model=tiny_mixtral), with logger=jsonl or another that keeps records, and with "
            "logger.expert_load_interval_steps above 0"
        )
    return loads, num_steps


def _print(
    console: Console,
    layers: Sequence[int],
    before: Sequence[float],
    after: Mapping[int, list[float]],
    of: str,
) -> None:
    titles = ("layer", "in order", *map(_placed, after))
    table = new_table(f"largest load of a rank over the mean ({of})", titles)
    columns = [before, *after.values()]
    for row, layer in enumerate(layers):
        table.add_row(str(layer), *(f"{column[row]:.3f}" for column in columns))
    table.add_section()
    table.add_row("mean", *(f"{sum(column) / len(column):.3f}" for column in columns))
    table.add_row("worst", *(f"{max(column):.3f}" for column in columns))
    table.caption = (
        "in order: equal blocks of experts; +n: with n more slots a rank for replicas of hot experts"
    )
    console.print(table)


def _draw(
    loads: Mapping[int, list[float]],
    even: ExpertsByRank,
    placements: Mapping[int, tuple[ExpertsByRank, ...]],
    path: Path,
) -> Path:
    """Layers by ranks, one panel a placement: each rank's load over the mean."""
    from counterflow.parallel.expert.placement import rank_loads

    panels = {"in order": (even,) * len(loads)}
    panels |= {_placed(spare): layers for spare, layers in placements.items()}
    shares = {
        name: [
            [load * len(placed) / sum(values) for load in rank_loads(values, placed)]
            for values, placed in zip(loads.values(), layers, strict=True)
        ]
        for name, layers in panels.items()
    }
    largest = max(max(map(max, rows)) for rows in shares.values())
    size = (1.2 + 2.2 * len(shares), 1.4 + 0.22 * len(loads))
    figure, axes = pyplot().subplots(1, len(shares), figsize=size, layout="constrained", squeeze=False)
    image = None
    for panel, (name, rows) in zip(axes[0], shares.items(), strict=True):
        image = panel.imshow(rows, aspect="auto", cmap="RdBu_r", vmin=2 - largest, vmax=largest)
        panel.set_title(f"{name}: {max(map(max, rows)):.2f}", loc="left", fontsize=9)
        panel.set_xlabel("rank")
        panel.set_yticks(range(len(loads)), list(loads) if panel is axes[0][0] else [])
    axes[0][0].set_ylabel("layer")
    if image is not None:
        figure.colorbar(image, ax=axes, label="load over the mean")
    return save_picture(figure, path)


def _placed(spare: int) -> str:
    return f"+{spare} a rank" if spare else "packed"


COMMAND = Command(
    name="balance",
    summary="place a run's experts by their recorded loads, and show what that gains",
    help=help_on,
    read=read,
    run=run,
)
