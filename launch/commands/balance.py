"""`counterflow balance RUN`: how evenly a run's experts were loaded, and what other placements would make of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from counterflow.framework.config.mapping import from_mapping
from counterflow.framework.metrics.sinks import METRICS_FILE, iterate_records
from counterflow.parallel.expert.exchange import even_placement
from counterflow.parallel.expert.placement import (
    ExpertLayout,
    ExpertsByRank,
    imbalance,
    place_experts,
    rank_loads,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BalancePlan:
    """`counterflow balance`: the ranks to place a run's experts on.

    num_ranks: of the expert axis. num_redundant_experts: for replicas on each rank, one placement for each number.
    num_nodes, num_groups: see `ExpertLayout`. last_steps: whose loads are summed; 0: of every step.
    """

    num_ranks: int = 4
    num_redundant_experts: tuple[int, ...] = (0, 1, 2)
    num_nodes: int = 1
    num_groups: int = 1
    last_steps: int = 0

    def __post_init__(self) -> None:
        if self.num_ranks < 2:
            raise ValueError(f"num_ranks={self.num_ranks}: experts are shared out to 2 ranks or more")
        if not self.num_redundant_experts or min(self.num_redundant_experts) < 0:
            raise ValueError(
                f"num_redundant_experts={list(self.num_redundant_experts)}: one number or more, each 0 or more"
            )
        if self.last_steps < 0:
            raise ValueError(f"last_steps={self.last_steps}: a number of steps, or 0 for all")


def run(run_dir: Path, plan: BalancePlan, out: Path, *, console: Console | None = None) -> dict[str, Any]:
    """Place the experts of the run in `run_dir` by its recorded loads; a table, and a picture under `out`.

    Returns what `--json` prints: layers, num_steps, before and after {spare slots: [imbalance of each layer]},
    placements {spare slots: [layer][rank][slot]} and the path of the picture.

    Raises ValueError: where the run recorded no loads, or the sizes do not fit them.
    """
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
    picture = _draw(loads, even, placements, out / "balance.png")
    if console is not None:
        _print(console, list(loads), before, after, f"{num_steps} steps, {plan.num_ranks} ranks")
        console.print(f"{picture}  (loads of ranks)", soft_wrap=True, highlight=False, markup=False)
    return {
        "run_dir": str(run_dir),
        "num_steps": num_steps,
        "layers": list(loads),
        "before": before,
        "after": after,
        "placements": placements,
        "png": str(picture),
    }


def plan_from(words: Sequence[str]) -> BalancePlan:
    """KEY=VALUE words as a plan.

    Raises ValueError: for an unknown key or a value that does not fit.
    """
    from counterflow.launch.compose import values_of

    return from_mapping(BalancePlan, values_of(words))


def recorded_loads(run_dir: Path, last_steps: int = 0) -> tuple[dict[int, list[float]], int]:
    """The loads of each layer of experts, summed over those of the last steps (0: all) of a run that have them in
    their records, and over how many.

    Raises ValueError: where there are none.
    """
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
    table = Table(title=f"largest load of a rank over the mean ({of})", title_justify="left")
    table.add_column("layer", justify="right")
    table.add_column("in order", justify="right")
    for spare in after:
        table.add_column(f"+{spare} a rank" if spare else "packed", justify="right")
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
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = {"in order": (even,) * len(loads)}
    panels |= {f"+{spare} a rank" if spare else "packed": layers for spare, layers in placements.items()}
    shares = {
        name: [
            [load * len(placed) / sum(values) for load in rank_loads(values, placed)]
            for values, placed in zip(loads.values(), layers, strict=True)
        ]
        for name, layers in panels.items()
    }
    largest = max(max(map(max, rows)) for rows in shares.values())
    size = (1.2 + 2.2 * len(shares), 1.4 + 0.22 * len(loads))
    figure, axes = pyplot.subplots(1, len(shares), figsize=size, layout="constrained", squeeze=False)
    image = None
    for panel, (name, rows) in zip(axes[0], shares.items(), strict=True):
        image = panel.imshow(rows, aspect="auto", cmap="RdBu_r", vmin=2 - largest, vmax=largest)
        panel.set_title(f"{name}: {max(map(max, rows)):.2f}", loc="left", fontsize=9)
        panel.set_xlabel("rank")
        panel.set_yticks(range(len(loads)), list(loads) if panel is axes[0][0] else [])
    axes[0][0].set_ylabel("layer")
    if image is not None:
        figure.colorbar(image, ax=axes, label="load over the mean")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return path
