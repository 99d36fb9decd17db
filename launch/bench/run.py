"""`counterflow bench`: the project's own measurements, for anyone to run again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from importlib import import_module
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
    # Not above: each imports what it measures.
    module = import_module(f"counterflow.launch.bench.{words[0]}")
    measure = getattr(module, f"bench_{words[0]}")
    folder = out or Path("runs") / f"bench-{words[0]}-{datetime.now():%Y%m%d-%H%M%S}"
    folder.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {
        "bench": words[0],
        "run_dir": str(folder),
        **measure(config, folder, console),
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


def values_of(words: Sequence[str]) -> dict[str, Any]:
    """KEY=VALUE in Hydra's grammar, as for a run."""
    from omegaconf import OmegaConf

    for word in words:
        if "=" not in word:
            raise ValueError(f"{word}: expected KEY=VALUE, as in repeats=3")
    values = OmegaConf.to_container(OmegaConf.from_dotlist(list(words)))
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}
