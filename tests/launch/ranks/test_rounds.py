"""A later round of torchrun is told from the first by the processes that started both."""

from __future__ import annotations

import os
from pathlib import Path

from counterflow.framework.trainer.run_lock import Holder
from counterflow.launch.ranks.rounds import agent_of, earlier_round, keep_agents, round_problem


def test_the_run_that_the_same_agent_started_is_found(tmp_path: Path) -> None:
    own = agent_of({"TORCHELASTIC_RUN_ID": "none"})
    assert own is not None
    assert own["pid"] == os.getppid()
    other = {**own, "process_started": (own["process_started"] or 0) + 1}  # its number was given out again
    first, second = tmp_path / "first", tmp_path / "second"
    for folder, agents in ((first, [other, None]), (second, [other, own, own])):
        folder.mkdir()
        keep_agents(folder, agents)
    runs = [tmp_path / "absent", first, second]
    assert earlier_round(runs, [None, own]) == (second, Holder(**own))
    assert earlier_round(runs[:2], [own]) is None
    told = round_problem(Holder(**own), "runs/a", resume="runs/a")
    assert f"torchrun, process {os.getppid()} on host" in told
    assert told.endswith("start the job anew with checkpoint.resume=runs/a")


def test_without_torchrun_nothing_is_kept(tmp_path: Path) -> None:
    assert agent_of({"RANK": "0"}) is None
    keep_agents(tmp_path, [None, None])
    assert list(tmp_path.iterdir()) == []
