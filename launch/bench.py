"""`counterflow bench`: the project's own measurements, for anyone to run again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from framework.bench.config import (
    CompressionBenchConfig,
    DeepSpeedBenchConfig,
    MemoryBenchConfig,
    OptimizerBenchConfig,
    OverlapBenchConfig,
    P2PBenchConfig,
    ScheduleBenchConfig,
)
from framework.config_mapping import from_mapping

_CONFIGS: dict[str, type[Any]] = {
    "schedules": ScheduleBenchConfig,
    "p2p": P2PBenchConfig,
    "optimizer": OptimizerBenchConfig,
    "overlap": OverlapBenchConfig,
    "compression": CompressionBenchConfig,
    "deepspeed": DeepSpeedBenchConfig,
    "memory": MemoryBenchConfig,
}
BENCHES = tuple(_CONFIGS)


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
        **_measure(config, folder, console),
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
    return from_mapping(_CONFIGS[words[0]], values_of(words[1:]))


def _measure(config: Any, folder: Path, console: Console) -> dict[str, Any]:
    if isinstance(config, P2PBenchConfig):
        from launch.bench_p2p import bench_p2p

        return bench_p2p(config, folder, console)
    if isinstance(config, OptimizerBenchConfig):
        from launch.bench_optimizer import bench_optimizer

        return bench_optimizer(config, folder, console)
    if isinstance(config, OverlapBenchConfig):
        from launch.bench_overlap import bench_overlap

        return bench_overlap(config, folder, console)
    if isinstance(config, DeepSpeedBenchConfig):
        from launch.bench_deepspeed import bench_deepspeed

        return bench_deepspeed(config, folder, console)
    if isinstance(config, CompressionBenchConfig):
        from launch.bench_compression import bench_compression

        return bench_compression(config, folder, console)
    if isinstance(config, MemoryBenchConfig):
        from launch.bench_memory import bench_memory

        return bench_memory(config, folder, console)
    from launch.bench_schedules import bench_schedules

    return bench_schedules(config, folder, console)


def values_of(words: Sequence[str]) -> dict[str, Any]:
    """KEY=VALUE in Hydra's grammar, as for a run."""
    from omegaconf import OmegaConf

    for word in words:
        if "=" not in word:
            raise ValueError(f"{word}: expected KEY=VALUE, as in repeats=3")
    values = OmegaConf.to_container(OmegaConf.from_dotlist(list(words)))
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}
