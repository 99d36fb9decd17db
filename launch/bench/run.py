"""`counterflow bench`: the project's own measurements, for anyone to run again."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from counterflow.framework.bench.config import (
    CompressionBenchConfig,
    DeepSpeedBenchConfig,
    MemoryBenchConfig,
    OptimizerBenchConfig,
    OverlapBenchConfig,
    P2PBenchConfig,
    ScheduleBenchConfig,
)
from counterflow.framework.config.mapping import from_mapping
from counterflow.launch.compose import values_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """config: what the bench takes. measure: (config, folder, console) -> its part of what `--json` prints."""

    config: type[Any]
    measure: Callable[[Any, Path, Console], dict[str, Any]]


# Each imports what it measures when it is called: help and mistakes in the config need none of it.
def _schedules(config: ScheduleBenchConfig, folder: Path, console: Console) -> dict[str, Any]:
    from counterflow.launch.bench.schedules import bench_schedules

    return bench_schedules(config, folder, console)


def _p2p(config: P2PBenchConfig, folder: Path, console: Console) -> dict[str, Any]:
    from counterflow.launch.bench.p2p import bench_p2p

    return bench_p2p(config, folder, console)


def _optimizer(config: OptimizerBenchConfig, folder: Path, console: Console) -> dict[str, Any]:
    from counterflow.launch.bench.optimizer import bench_optimizer

    return bench_optimizer(config, folder, console)


def _overlap(config: OverlapBenchConfig, folder: Path, console: Console) -> dict[str, Any]:
    from counterflow.launch.bench.overlap import bench_overlap

    return bench_overlap(config, folder, console)


def _compression(config: CompressionBenchConfig, folder: Path, console: Console) -> dict[str, Any]:
    from counterflow.launch.bench.compression import bench_compression

    return bench_compression(config, folder, console)


def _deepspeed(config: DeepSpeedBenchConfig, folder: Path, console: Console) -> dict[str, Any]:
    from counterflow.launch.bench.deepspeed import bench_deepspeed

    return bench_deepspeed(config, folder, console)


def _memory(config: MemoryBenchConfig, folder: Path, console: Console) -> dict[str, Any]:
    from counterflow.launch.bench.memory import bench_memory

    return bench_memory(config, folder, console)


BENCHES: dict[str, Bench] = {
    "schedules": Bench(config=ScheduleBenchConfig, measure=_schedules),
    "p2p": Bench(config=P2PBenchConfig, measure=_p2p),
    "optimizer": Bench(config=OptimizerBenchConfig, measure=_optimizer),
    "overlap": Bench(config=OverlapBenchConfig, measure=_overlap),
    "compression": Bench(config=CompressionBenchConfig, measure=_compression),
    "deepspeed": Bench(config=DeepSpeedBenchConfig, measure=_deepspeed),
    "memory": Bench(config=MemoryBenchConfig, measure=_memory),
}


def run(words: Sequence[str], out: Path | None, *, console: Console) -> dict[str, Any]:
    """Run the bench that `words` names, with its KEY=VALUE; writes rows and picture, returns what --json prints.

    Raises ValueError: for an unknown bench or key, or a value that does not fit.
    """
    config = config_of(words)
    folder = out or Path("runs") / f"bench-{words[0]}-{datetime.now():%Y%m%d-%H%M%S}"
    folder.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {
        "bench": words[0],
        "run_dir": str(folder),
        **BENCHES[words[0]].measure(config, folder, console),
    }
    rows = folder / "rows.json"
    rows.write_text(json.dumps(result, indent=1) + "\n")
    console.print(f"{rows}  (every figure)", soft_wrap=True, highlight=False, markup=False)
    return result


def config_of(words: Sequence[str]) -> Any:
    """The config of the bench that `words` names, with its KEY=VALUE.

    Raises ValueError: for an unknown bench or key, or a value that does not fit.
    """
    if not words or words[0] not in BENCHES:
        problem = f"{words[0]}: no such bench" if words else "bench takes the name of one"
        raise ValueError(f"{problem}; choose one of {', '.join(BENCHES)}, as in counterflow bench schedules")
    return from_mapping(BENCHES[words[0]].config, values_of(words[1:]))
