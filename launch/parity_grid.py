"""Parity of every layout that fits eight ranks, one after another: `make parity`, or

python -m counterflow.launch.parity_grid [overrides]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from counterflow.framework.errors import RunFailedError, RunInterruptedError
from counterflow.launch.command import LaunchOptions
from counterflow.launch.commands.parity import check, run
from counterflow.launch.compose import compose_config
from counterflow.launch.printing import say
from counterflow.launch.runs import layout_text, make_run_dir

_MAX_RANKS = 8


def grid(*, has_experts: bool = False) -> Iterator[list[str]]:
    """The overrides of every layout that fits eight ranks, for a model with experts or without."""
    for layout in _expert_grid() if has_experts else _dense_grid():
        ranks = layout["pipeline"] * layout["data"] * layout["tensor"]
        if ranks <= _MAX_RANKS and not (layout["schedule"] == "dualpipe" and layout["pipeline"] == 1):
            axes = [name for name in ("expert", "tensor", "pipeline", "data") if name in layout]
            yield [
                *(f"parallel.{name}_parallel_size={layout[name]}" for name in axes),
                f"zero.stage={layout['stage']}",
                f"schedule={layout['schedule']}",
                *([f"model.num_layers={max(4, 2 * layout['pipeline'])}"] * has_experts),
            ]


def _dense_grid() -> Iterator[dict[str, Any]]:
    names = ("tensor", "pipeline", "data", "stage", "schedule")
    for values in product((1, 2), (1, 2, 4), (1, 2), (0, 1, 2, 3), ("gpipe", "1f1b", "dualpipe")):
        yield dict(zip(names, values, strict=True))


def _expert_grid() -> Iterator[dict[str, Any]]:
    """As many data-parallel ranks as share the experts out with the tensor-parallel ones, or twice as many."""
    names = ("expert", "pipeline", "tensor", "copies", "stage", "schedule")
    schedules = ("1f1b", "dualpipe", "dualpipe_v", "zbv")
    for values in product((2, 4), (1, 2, 4), (1, 2), (1, 2), (0, 1, 3), schedules):
        layout: dict[str, Any] = dict(zip(names, values, strict=True))
        yield layout | {
            "data": layout["copies"] * max(layout["expert"], layout["tensor"]) // layout["tensor"]
        }


def main() -> int:
    """Run the whole grid, with the overrides of the command line on top; 0 where every layout holds."""
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
        say(f"error: {error}")
        return 2
    except RunInterruptedError as error:
        say(str(error))
        return 128 + error.signal_number
    print(
        f"{len(layouts) - len(missed)} of {len(layouts)} layouts hold"
        + (f"; not: {missed}" if missed else "")
    )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
