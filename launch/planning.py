"""`counterflow plan cluster=...`: the search of a layout, with progress, a table, and a config that train takes."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from counterflow.framework.checks.rules import check
from counterflow.framework.errors import ConfigError
from counterflow.framework.planning.cluster import load_cluster
from counterflow.framework.planning.search import Plan, Request, Search, overrides_of, search
from counterflow.launch.command import LaunchOptions, UsageError
from counterflow.launch.compose import compose_config
from counterflow.launch.printing import new_table, print_lines, readable_bytes, say

if TYPE_CHECKING:
    from rich.console import Console

    from counterflow.framework.config.tree import TrainConfig

SEQUENCES_PER_DEVICE = 8
PROGRESS_EVERY = 50


def plan_layouts(config: TrainConfig, options: LaunchOptions, *, console: Console) -> dict[str, Any]:
    """The layouts in order, printed. Returns what `--json` prints.

    Raises UsageError: a number of tokens or sequences that is none. ValueError: no layout fits.
    """
    cluster = load_cluster(options.own["cluster"])
    tokens = _number("tokens", options.own["tokens"], 1e12)
    batch = _number("global_batch", options.own["global_batch"], SEQUENCES_PER_DEVICE * cluster.num_gpus)
    if batch != int(batch):
        raise UsageError(f"global_batch={batch:g}: sequences of a step; write a whole number")
    request = Request(
        model=config.model,
        cluster=cluster,
        seq_length=config.model.max_seq_length,
        vocab_size=config.expected_vocab_size,
        global_batch=int(batch),
    )
    found = search(request, progress=_say_progress)
    model_words = [word for text in options.command for word in shlex.split(text) if word.startswith("model")]
    runs: list[tuple[Plan, tuple[str, ...]]] = []
    refused: list[dict[str, Any]] = []
    for plan in found.plans:
        words = (*model_words, *overrides_of(plan.layout))
        try:
            check(compose_config(words))
        except ConfigError as error:
            refused.append({"words": list(words), "why": str(error)})
        else:
            runs.append((plan, words))
    if not runs:
        raise ConfigError([f"no layout of the search can be trained: {refused[0]['why']}"])
    best = runs[0][0]
    _print(console, request, found, [plan for plan, _ in runs], tokens, runs[0][1])
    return {
        "model": config.model.name,
        "cluster": cluster.name,
        "num_gpus": cluster.num_gpus,
        "global_batch": request.global_batch,
        "tokens": tokens,
        "layouts": [
            {**_record(plan, tokens), "why": _why(best, plan), "config": list(words)} for plan, words in runs
        ],
        "nearly": [{**asdict(layout), "memory_bytes": needed} for layout, needed in found.nearly],
        "refused": refused,
        "config": list(runs[0][1]),
        "num_candidates": found.num_candidates,
        "num_simulated": found.num_simulated,
    }


def _number(name: str, text: str | None, default: float) -> float:
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise UsageError(f"{name}={text}: a number above 0, as in {name}={default:g}")
    return value


def _say_progress(done: int, most: int) -> None:
    if done % PROGRESS_EVERY == 0:
        say(f"simulated {done} of at most {most} layouts")


def _record(plan: Plan, tokens: float) -> dict[str, Any]:
    step = plan.step
    return {
        **asdict(plan.layout),
        "seconds": step.seconds,
        "tokens_per_s": step.tokens_per_s,
        "mfu": step.mfu,
        "bubble": step.bubble_makespan,
        "pipeline_s": step.pipeline_s,
        "reduction_s": step.reduction_s,
        "gather_s": step.gather_s,
        "optimizer_s": step.optimizer_s,
        "memory_bytes": plan.memory.peak,
        "gpu_hours": step.gpu_hours(tokens),
        "dollars": step.dollars(tokens),
    }


def _why(best: Plan, plan: Plan) -> str:
    """Where `plan` is slower than the best, by the parts of its step."""
    if plan is best:
        return "the fastest that fits"
    mine, its = plan.step, best.step
    idle = mine.bubble_makespan * mine.pipeline_s - its.bubble_makespan * its.pipeline_s
    parts = {
        "waiting in the pipeline": idle,
        "work and its communication": mine.pipeline_s - its.pipeline_s - idle,
        "data ranks": mine.reduction_s + mine.gather_s - its.reduction_s - its.gather_s,
        "optimizer": mine.optimizer_s - its.optimizer_s,
    }
    slower = mine.seconds / its.seconds - 1
    largest = sorted(parts.items(), key=lambda part: -part[1])[:2]
    said = ", ".join(f"{name} {seconds / its.seconds:+.1%}" for name, seconds in largest if seconds > 0)
    return f"{slower:+.1%}{': ' + said if said else ''}"


def _print(
    console: Console,
    request: Request,
    found: Search,
    plans: list[Plan],
    tokens: float,
    words: tuple[str, ...],
) -> None:
    cluster = request.cluster
    table = new_table(
        f"{request.model.name} on {cluster.num_gpus:,} x {cluster.device.name}, {request.global_batch:,} sequences of "
        f"{request.seq_length:,}",
        (
            "tp",
            "pp",
            "dp",
            "ep",
            "mb",
            "schedule",
            "recompute",
            "step",
            "tokens/s",
            "MFU",
            "bubble",
            "memory",
            "why",
        ),
        left=("schedule", "recompute", "why"),
    )
    for plan in plans:
        layout, step = plan.layout, plan.step
        table.add_row(
            *map(str, (layout.tensor, layout.pipeline, layout.data, layout.expert, layout.micro_batch_size)),
            layout.schedule,
            layout.recompute,
            f"{step.seconds:.2f} s",
            f"{step.tokens_per_s:,.0f}",
            f"{step.mfu:.1%}",
            f"{step.bubble_makespan:.1%}",
            readable_bytes(plan.memory.peak),
            _why(plans[0], plan),
        )
    console.print(table)
    step = plans[0].step
    hours = step.gpu_hours(tokens)
    usable = readable_bytes(cluster.device.memory_bytes)
    print_lines(
        console,
        f"{tokens:.3g} tokens  {hours / 1e3:,.0f} K GPU-hours, {hours / step.num_gpus / 24:,.1f} days, "
        f"{step.dollars(tokens) / 1e6:,.2f} M dollars at {cluster.dollars_per_gpu_hour:g} a GPU-hour",
        f"searched    {found.num_candidates:,} layouts within the rules, {found.num_simulated:,} looked at in full",
        *(
            f"nearly      tp {layout.tensor}, pp {layout.pipeline}, ep {layout.expert}, {layout.schedule}, recompute "
            f"{layout.recompute} needs {readable_bytes(needed)} of {usable}"
            for layout, needed in found.nearly[:3]
        ),
        f"config      counterflow train {' '.join(words)}",
    )
