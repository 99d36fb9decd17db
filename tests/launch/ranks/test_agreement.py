"""Ranks that were started differently are told so before they train: what differs, both values, both ranks."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]

from counterflow.framework.config.mapping import dotted_names
from counterflow.framework.config.tree import TrainConfig
from counterflow.framework.errors import RunFailedError
from counterflow.launch.ranks import agreement
from counterflow.launch.ranks.agreement import (
    MAY_DIFFER,
    Council,
    RanksDifferError,
    differences,
    facts_of,
    open_store,
)
from counterflow.launch.ranks.environment import JoinedRank
from tests.tiny import tiny_config

_SOON = timedelta(seconds=20)


@pytest.mark.parametrize(
    ("nodes", "said"),
    [
        ({"optimizer": {"base_lr": 0.5}}, "optimizer.base_lr: 0.003 on ranks 0 to 2, but 0.5 on rank 3"),
        ({"seed": 7}, "seed: 0 on ranks 0 to 2, but 7 on rank 3"),
        (
            {"optimizer": {"max_grad_norm": 9.0}},
            "optimizer.max_grad_norm: 1.0 on ranks 0 to 2, but 9.0 on rank 3",
        ),
        ({"comm": {"timeout_s": 9.0}}, "comm.timeout_s: 60.0 on ranks 0 to 2, but 9.0 on rank 3"),
        ({"zero": {"stage": 2}}, "zero.stage: 0 on ranks 0 to 2, but 2 on rank 3"),
    ],
)
def test_the_key_that_differs_is_named_with_values_and_ranks(nodes: dict[str, Any], said: str) -> None:
    usual, other = facts_of(tiny_config()), facts_of(tiny_config(**nodes))
    (problem,) = differences([usual, usual, usual, other])
    assert problem.startswith(f"{said}; ")


def test_versions_and_code_are_compared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    usual = facts_of(tiny_config())
    for name in ("version of torch", "version of Python", "code of counterflow", "computes on"):
        (problem,) = differences([usual, {**usual, name: "other"}])
        assert problem.startswith(f'{name}: "{usual[name]}" on rank 0, but "other" on rank 1; ')
    monkeypatch.setattr(agreement, "__file__", str(tmp_path / "launch" / "agreement.py"))
    (tmp_path / "launch").mkdir()
    digests: set[str] = set()
    for name, text in (("a.py", ""), ("a.py", "1"), ("b.py", "1")):
        (tmp_path / "launch" / name).write_text(text)
        digests.add(agreement.code_digest())
    assert len(digests) == 3


def test_places_on_a_node_may_differ() -> None:
    assert set(MAY_DIFFER) <= set(dotted_names(TrainConfig))
    other = tiny_config(
        launcher={"runs_dir": "/scratch/runs", "threads_per_rank": 3},
        data={"cache_dir": "/scratch/cache", "sources": ["/scratch/text"]},
    )
    assert differences([facts_of(tiny_config()), facts_of(other)]) == []


def test_a_file_of_the_same_name_may_hold_another_schedule(tmp_path: Path) -> None:
    golden = Path(__file__).parents[2] / "golden"
    path = tmp_path / "schedule.csv"
    config = tiny_config(pp=2, num_microbatches=2)
    facts: list[dict[str, Any]] = []
    for name in ("1f1b", "gpipe"):
        path.write_text((golden / f"{name}_p2_m2.csv").read_text())
        facts.append(facts_of(replace(config, schedule=replace(config.schedule, name="csv", path=str(path)))))
    (problem,) = differences(facts)
    assert problem.startswith("actions of the schedule: ")


def test_many_differences_are_cut_short_and_groups_of_ranks_are_short() -> None:
    problems = differences([{f"key{index}": rank % 2 for index in range(20)} for rank in range(40)])
    assert len(problems) == 9
    assert problems[-1] == "and 12 more that differ between ranks"
    assert "0 on ranks 0, 2, 4, 6, 8, 10, 12, 14 and 12 more, but 1 on ranks 1," in problems[0]


def _together(*ranks: Callable[[], None]) -> None:
    threads = [threading.Thread(target=rank) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _councils(folder: Path, world_size: int) -> list[Council]:
    """Ranks that speak through a store: torch's file store in place of one with a port."""
    return [
        Council(
            FileStore(str(folder / "store"), world_size),
            rank=rank,
            world_size=world_size,
            where="MASTER_PORT=5",
        )
        for rank in range(world_size)
    ]


def test_the_others_end_when_rank_0_finds_a_difference(tmp_path: Path) -> None:
    first, second = _councils(tmp_path, 2)
    told: list[object] = []

    def lead() -> None:
        first.arrive({"seed": 0})
        with pytest.raises(RanksDifferError, match="seed: 0 on rank 0, but 1 on rank 1") as caught:
            first.agree("configs", _SOON, differences)
        first.dismiss(caught.value, ("prepared", "run"))

    def follow() -> None:
        second.arrive({"seed": 1})
        told.append(second.wait_for("prepared", _SOON))

    _together(lead, follow)
    assert told == [None]


def test_what_another_rank_could_not_read_is_told_by_rank_0(tmp_path: Path) -> None:
    first, second = _councils(tmp_path, 2)
    first.say("data", {"tokens": {}, "device": {}})
    second.say("data", {"problem": "data.sources=/nowhere: no such file"})
    with pytest.raises(RanksDifferError, match=r"rank 1: data\.sources=/nowhere: no such file"):
        first.agree("data", _SOON, lambda _: [])


def test_ranks_that_do_not_come_or_come_twice_are_named(tmp_path: Path) -> None:
    first, second, _ = _councils(tmp_path, 3)
    first.arrive({})
    second.arrive({})
    with pytest.raises(RanksDifferError, match="RANK=1: another process of this job has been this rank"):
        second.arrive({})
    told = "rank 2 did not come to compare the configs within 0 s of .* of which rank 0 waits at MASTER_PORT=5; see"
    with pytest.raises(RanksDifferError, match=told):
        first.agree("configs", timedelta(seconds=0.2), differences)


def test_a_store_that_is_not_there_is_named() -> None:
    # Bound, so that no other takes it, but not listening.
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        joined = JoinedRank(
            rank=1, world_size=2, local_rank=1, ranks_on_node=2, master_addr="127.0.0.1", master_port=port
        )
        with pytest.raises(RunFailedError, match=f"MASTER_PORT={port}: not reached within 1 s"):
            open_store(joined, 1.0)
        with pytest.raises(RunFailedError, match=f"MASTER_PORT={port}: no port can be opened there"):
            open_store(replace(joined, rank=0), 1.0)


def test_secrets_are_compared_by_hash() -> None:
    field = "https://user:{}@host/field"
    usual, other = (
        facts_of(
            tiny_config(logger={"project": "hush-hush"}, data={"text_field": field.format(word)}),
            {"hush-hush": "${oc.env:PROJECT}"},
        )
        for word in ("password1", "password2")
    )
    assert not {"hush-hush", "password1", "password2"} & set(re.findall(r"[\w-]+", str([usual, other])))
    assert usual["logger.project"] == other["logger.project"] != "${oc.env:PROJECT}"
    (problem,) = differences([usual, other])
    assert problem.startswith('data.text_field: "https://user:***@host/field (sha256 ')
