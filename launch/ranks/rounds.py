"""Whether torchrun has started these ranks before: a node joined or left, which it does not count as a restart.

In each round the agent of a node, the process of torchrun, is the same. A run's folder names the agents that it was
started by, so that a later round finds them there, whatever torch's store keeps.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from counterflow.framework.trainer.run_lock import Holder

AGENTS_FILE = "torchrun.json"


def agent_of(environment: Mapping[str, str]) -> dict[str, Any] | None:
    """The process of torchrun that started this one; None: another or nobody did."""
    if "TORCHELASTIC_RUN_ID" not in environment:
        return None
    return asdict(Holder.of(os.getppid()))


def keep_agents(run_dir: Path, agents: Iterable[Mapping[str, Any] | None]) -> None:
    """Write who started the run of `run_dir`, where torchrun did."""
    known: list[Mapping[str, Any]] = []
    for agent in agents:
        if agent is not None and agent not in known:
            known.append(agent)
    if known:
        (run_dir / AGENTS_FILE).write_text(json.dumps(known))


def earlier_round(
    run_dirs: Iterable[Path], agents: Sequence[Mapping[str, Any] | None]
) -> tuple[Path, Holder] | None:
    """The first of `run_dirs` that one of `agents` started, and that agent."""
    for run_dir in run_dirs:
        try:
            before = json.loads((run_dir / AGENTS_FILE).read_text())
        except (OSError, ValueError):
            continue
        for agent in agents:
            if agent is not None and isinstance(before, list) and agent in before:
                return run_dir, Holder(**agent)
    return None


def round_problem(agent: Holder, run_dir: str, *, resume: str | None) -> str:
    """Why a later round is not begun. resume: the folder to go on from, where it has a whole checkpoint."""
    way_on = f"with checkpoint.resume={resume}" if resume else "as its first round has saved nothing yet"
    return (
        f"torchrun, {agent}, has started these ranks before, in {run_dir}, and starts them again because a node left "
        "or joined: a restarted job does not go on by itself, it would begin at step 0 in a new folder; start the job "
        f"anew {way_on}"
    )
