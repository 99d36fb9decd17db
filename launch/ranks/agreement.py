"""What joined ranks must have in common, compared before they train: each says it, rank 0 names what differs.

Ranks that were started with another config, code or text would train on without a word, or end in time-outs of their
collectives. They speak through torch's store, in JSON: nothing that is read from it is ever unpickled.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from counterflow.framework.checks.rules import build_schedule
from counterflow.framework.config.mapping import to_mapping
from counterflow.framework.config.tree import TrainConfig
from counterflow.framework.devices import device_kind
from counterflow.framework.errors import ConfigError, RunFailedError
from counterflow.framework.redaction import redacted, without_secrets
from counterflow.launch.ranks.environment import JoinedRank

# Of a config, what may differ between nodes: places on their disks, and how a process uses its cores. That the text
# and the tokenizer are the same is seen by the tokens they give.
MAY_DIFFER = (
    "launcher",
    "data.sources",
    "data.cache_dir",
    "tokenizer.path",
    "offload.folder",
    "optimizer.offload.folder",
)
_PACKAGES = ("launch", "framework", "models", "parallel")
_MOST_NAMED = 8
_HOLD_S = 5.0
_ANSWER = "counterflow/answer"

Facts = Mapping[str, Any]


class RanksDifferError(ConfigError):
    """Ranks were started differently, or not all of them; told by rank 0."""


def facts_of(config: TrainConfig, hidden: Mapping[str, str] | None = None) -> dict[str, Any]:
    """What this rank computes with, by name; JSON's values.

    Who reaches the store reads them: of a value that must not be written down (`hidden`, and what looks like a
    secret) they have a hash alone.
    """
    import numpy as np
    import torch

    facts: dict[str, Any] = {
        "code of counterflow": code_digest(),
        "version of torch": torch.__version__,
        "version of numpy": np.__version__,
        "version of Python": ".".join(map(str, sys.version_info[:2])),
        "computes on": device_kind(config.device),
    }
    if config.zero.engine == "deepspeed" or config.optimizer.kernel == "cpu_adam":
        facts["version of deepspeed"] = _version("deepspeed")
    if facts["computes on"] == "cuda":
        facts["version of CUDA"] = torch.version.cuda
        facts["version of apex"] = _version("apex")
    if config.schedule.name in ("csv", "auto"):
        # A file of the same name may say something else on another node.
        schedule = build_schedule(config.schedule, config.parallel)
        facts["actions of the schedule"] = _digest(repr((schedule.placement, schedule.actions)).encode())
    values = _flat(to_mapping(config))
    shown = without_secrets(values)
    return {**{name: _shown(value, shown[name], hidden or {}) for name, value in values.items()}, **facts}


def _shown(value: Any, shown: Any, hidden: Mapping[str, str]) -> Any:
    if isinstance(shown, str):
        shown = hidden.get(str(value), redacted(shown, hidden))
    elif isinstance(shown, (list, tuple)):
        return [_shown(each, text, hidden) for each, text in zip(value, shown, strict=True)]
    if shown == value:
        return value
    return f"{shown} (sha256 {_digest(str(value).encode())})"


def differences(facts: Sequence[Facts]) -> list[str]:
    """What is not the same on all ranks, one sentence for each name; facts: by rank."""
    names = dict.fromkeys(name for of_rank in facts for name in of_rank)
    problems: list[str] = []
    for name in names:
        ranks_by_value: dict[str, list[int]] = {}
        for rank, of_rank in enumerate(facts):
            value = json.dumps(of_rank[name]) if name in of_rank else "absent"
            ranks_by_value.setdefault(value, []).append(rank)
        if len(ranks_by_value) > 1:
            said = ", but ".join(
                f"{value} on {_ranks_text(ranks)}" for value, ranks in list(ranks_by_value.items())[:4]
            )
            problems.append(f"{name}: {said}; ranks that differ do not train one model; {_remedy(name)}")
    if len(problems) > _MOST_NAMED:
        problems[_MOST_NAMED:] = [f"and {len(problems) - _MOST_NAMED} more that differ between ranks"]
    return problems


def code_digest() -> str:
    """16 hex digits of the source files that run here."""
    root = Path(__file__).parent.parent
    digest = hashlib.sha256()
    for path in sorted(path for package in _PACKAGES for path in (root / package).rglob("*.py")):
        digest.update(f"{path.relative_to(root).as_posix()}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]


def open_store(joined: JoinedRank, timeout_s: float) -> Any:
    """The store at MASTER_ADDR and MASTER_PORT: torchrun serves it, or rank 0.

    Raises RunFailedError: where it cannot be served or reached.
    """
    from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

    is_served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    is_master = joined.rank == 0 and not is_served
    try:
        # Shared with torch's own in this process (multi_tenant); who does not come is named by `Council.hear`.
        store = TCPStore(
            joined.master_addr,
            joined.master_port,
            is_master=is_master,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            multi_tenant=True,
        )
        # Torchrun's own outlives the ranks that it starts again, and what they said in it.
        return PrefixStore(f"round-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    except (RuntimeError, ValueError) as error:
        what = "no port can be opened there; is another job using it, or another RANK=0 running?"
        if not is_master:
            what = f"not reached within {timeout_s:.0f} s; do they name the host of rank 0, and is rank 0 running?"
        first_line = (str(error).splitlines() or [""])[0]
        raise RunFailedError(
            f"rank {joined.rank}: {joined.meeting}: {what} ({first_line})", rank=joined.rank
        ) from error


class Council:
    """The ranks that compare. store: torch's, which all of them reach; where: its address, for messages."""

    def __init__(self, store: Any, *, rank: int, world_size: int, where: str = "") -> None:
        self._store, self._rank, self._world_size = store, rank, world_size
        self._where = f" at {where}" if where else ""

    def arrive(self, facts: Facts) -> None:
        """Say "configs", once for each rank.

        Raises RanksDifferError: where another process has been this rank.
        """
        if self._store.add(f"counterflow/started/{self._rank}", 1) > 1:
            raise RanksDifferError(
                [
                    f"RANK={self._rank}: another process of this job has been this rank; start each RANK from 0 to "
                    f"{self._world_size - 1} once, and go on from a run that was restarted (torchrun does that where "
                    "a node leaves or joins) by checkpoint.resume"
                ]
            )
        self.say("configs", facts)

    def say(self, subject: str, facts: Facts) -> None:
        self._store.set(_key(subject, self._rank), json.dumps(facts))

    def hear(self, subject: str, timeout: timedelta) -> list[Facts]:
        """What every rank said, by rank.

        Raises RanksDifferError: where some have not said it in time, naming them.
        """
        deadline = time.monotonic() + timeout.total_seconds()
        keys = [_key(subject, rank) for rank in range(self._world_size)]
        for key in keys:
            left = max(0.001, deadline - time.monotonic())
            try:
                self._store.wait([key], timedelta(seconds=left))
            except RuntimeError as error:
                absent = [rank for rank, name in enumerate(keys) if not self._store.check([name])]
                raise RanksDifferError(
                    [
                        f"{_ranks_text(absent)} did not come to compare the {subject} within "
                        f"{timeout.total_seconds():.0f} s of WORLD_SIZE={self._world_size} ranks, of which rank "
                        f"{self._rank} waits{self._where}; see what they print and that all name this address, start "
                        "every RANK once, or raise comm.timeout_s"
                    ]
                ) from error
        return [json.loads(self._store.get(key)) for key in keys]

    def agree(self, subject: str, timeout: timedelta, find: Callable[[list[Facts]], list[str]]) -> None:
        """On rank 0: hold what every rank said against `find`.

        Raises RanksDifferError: naming all that ranks report themselves (`problem`), or that `find` finds.
        """
        facts = self.hear(subject, timeout)
        problems = [
            f"rank {rank}: {of_rank['problem']}" for rank, of_rank in enumerate(facts) if "problem" in of_rank
        ] or find(facts)
        if problems:
            raise RanksDifferError(problems[: _MOST_NAMED + 1])

    def answer(self, subject: str, value: Mapping[str, Any]) -> None:
        """What rank 0 tells the others."""
        self._store.set(f"{_ANSWER}/{subject}", json.dumps(value))

    def wait_for(self, subject: str, timeout: timedelta) -> Mapping[str, Any] | None:
        """What rank 0 has told; None: that the run ends here, for a reason that it prints.

        Raises RunFailedError: where it has not told in time, or is gone.
        """
        try:
            self._store.wait([f"{_ANSWER}/{subject}"], timeout)
        except RuntimeError as error:
            message = f"rank {self._rank}: rank 0 has ended or has not answered{self._where}; what it printed says why"
            raise RunFailedError(message, rank=self._rank) from error
        told: Mapping[str, Any] = json.loads(self._store.get(f"{_ANSWER}/{subject}"))
        if "error" not in told:
            return told
        self._store.add(f"{_ANSWER}/read", 1)
        return None

    def dismiss(self, error: BaseException, subjects: Sequence[str]) -> None:
        """On rank 0: end the others, which wait for one of `subjects`."""
        for subject in subjects:
            self.answer(subject, {"error": str(error)})
        # The store may live in this process: let the others read before it goes.
        deadline = time.monotonic() + _HOLD_S
        while self._store.add(f"{_ANSWER}/read", 0) < self._world_size - 1 and time.monotonic() < deadline:
            time.sleep(0.05)


def _key(subject: str, rank: int) -> str:
    return f"counterflow/{subject}/{rank}"


def _remedy(name: str) -> str:
    if name.startswith("version of"):
        return "install the same version on every node"
    if name.startswith("code of"):
        return "install the same version of counterflow on every node"
    if name == "computes on":
        return "set device=cpu, or use nodes that all have GPUs"
    if name.startswith("data:"):
        return "give every node the same text and tokenizer"
    return "start every rank with the same command and the same files"


def _ranks_text(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"ranks {ranks[0]} to {ranks[-1]}"
    shown = [*map(str, ranks[:8]), *([f"{len(ranks) - 8} more"] if len(ranks) > 8 else [])]
    return f"ranks {', '.join(shown[:-1])} and {shown[-1]}"


def _flat(node: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in node.items():
        name = f"{prefix}{key}"
        if name in MAY_DIFFER:
            continue
        flat.update(_flat(value, f"{name}.") if isinstance(value, Mapping) else {name: value})
    return flat


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
