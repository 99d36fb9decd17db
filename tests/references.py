"""What one process trains, kept for all tests and workers of a session: many layouts have the same reference."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from safetensors import safe_open
from safetensors.torch import save_file

from counterflow.framework.checks.parity import (
    Parity,
    Reference,
    StepTrail,
    compare,
    reference_config,
    train_and_save,
    train_reference,
)
from counterflow.framework.config.mapping import config_hash
from counterflow.framework.config.tree import TrainConfig
from counterflow.framework.data.prepare import PreparedData
from tests.rank_pool import RankPool
from tests.tiny import run_context

CPU = torch.device("cpu")
_BOUND = "bound."


def session_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all workers of this session."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


def once(path: Path, make: Callable[[Path], None]) -> Path:
    """`path`, made by the first worker that asks for it while the others wait."""
    with FileLock(f"{path}.lock"):
        if not path.exists():
            unfinished = path.with_name(f"{path.name}.unfinished")
            make(unfinished)
            unfinished.rename(path)
    return path


@dataclass(frozen=True, slots=True, kw_only=True)
class References:
    """Layouts beside one process; the file of each reference is named by its config and its data."""

    folder: Path
    ranks: RankPool
    data: PreparedData

    def of(self, config: TrainConfig) -> Reference:
        """The reference of `config`, trained by whoever needs it first."""
        key = f"{config_hash(reference_config(config))[:16]}-{self.data.content_hash[:16]}"

        def train(path: Path) -> None:
            self.ranks.run(_train_to_file, 1, config, self.data, path)

        return _read(once(self.folder / f"reference-{key}.safetensors", train))

    def parity(self, config: TrainConfig, folder: Path) -> Parity:
        """Train the layout in `folder`, and hold it against the reference."""
        checkpoint = folder / "step-00000005"
        trail = self.ranks.run(
            train_and_save,
            config.parallel.world_size,
            config,
            run_context(self.data, folder),
            checkpoint,
            CPU,
        )[0]
        return compare(self.of(config), checkpoint, trail)


def _train_to_file(config: TrainConfig, data: PreparedData, path: Path) -> None:
    reference = train_reference(config, run_context(data, path.parent), CPU)
    tensors = reference.gradients | reference.parameters
    tensors |= {f"{_BOUND}{name}": tensor for name, tensor in reference.bounds.items()}
    told = {"trail": [asdict(step) for step in reference.trail], "has_mtp": reference.has_mtp}
    # A tensor may be a view of a larger one, which this format does not take.
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, path, {"told": json.dumps(told)})


def _read(path: Path) -> Reference:
    with safe_open(path, framework="pt") as file:
        told = json.loads((file.metadata() or {})["told"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)

    def named(prefix: str) -> dict[str, torch.Tensor]:
        return {name: tensor for name, tensor in tensors.items() if name.startswith(prefix)}

    trail = [
        StepTrail(**step | {"loads": {int(layer): tuple(load) for layer, load in step["loads"].items()}})
        for step in told["trail"]
    ]
    return Reference(
        trail=trail,
        gradients=named("gradient."),
        parameters=named("model."),
        bounds={name.removeprefix(_BOUND): tensor for name, tensor in named(_BOUND).items()},
        has_mtp=told["has_mtp"],
    )
