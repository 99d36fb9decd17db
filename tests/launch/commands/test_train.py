"""`counterflow train`: the run's folder, and whole runs of a tiny model, started here and joined."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path

import pytest
import yaml

from counterflow.framework.config.mapping import config_hash
from counterflow.framework.errors import ConfigError
from counterflow.framework.trainer.run_lock import LOCK_FILE, RunLock
from counterflow.launch.cli import main
from counterflow.launch.compose import compose_config
from counterflow.launch.ranks.rounds import agent_of, keep_agents
from counterflow.launch.runs import make_run_dir
from tests.commands import Started, free_port, run_command

_ROOT = Path(__file__).parents[3]
_TINY = [
    "experiment=smoke",
    "model.num_layers=2",
    "model.hidden_size=32",
    "model.intermediate_size=48",
    "data.seq_length=16",
    "data.micro_batch_size=1",
    "schedule.num_microbatches=2",
    "data.max_bytes=400000",
    "tokenizer.vocab_size=300",
    "training.num_steps=2",
    "data.validation_batches=1",
]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"data.cache_dir={tmp_path_factory.mktemp('cache')}"


def test_run_folders_never_collide(tmp_path: Path) -> None:
    now = datetime(2026, 1, 31, 12)
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: make_run_dir(tmp_path / "runs", "1a2b3c4d", now=now), range(16)))
    assert len(set(made)) == 16
    assert {path.name for path in made} >= {"20260131-120000-1a2b3c4d", "20260131-120000-1a2b3c4d-2"}


def test_a_named_folder_is_taken_when_new_or_empty(tmp_path: Path) -> None:
    out = tmp_path / "a" / "b"
    assert make_run_dir(tmp_path, "x", out) == out
    assert make_run_dir(tmp_path, "x", out) == out
    (out / "file").touch()
    with pytest.raises(ConfigError, match="not empty"):
        make_run_dir(tmp_path, "x", out)
    with pytest.raises(ConfigError, match="no folder can be made there"):
        make_run_dir(out / "file", "x")


@pytest.mark.parametrize(
    ("key", "others"),
    [
        ("offload", ["offload.policy=lru", "offload.tier=disk", "offload.budget_bytes=100000000"]),
        ("optimizer.offload", ["optimizer=adamw_disk"]),
    ],
)
def test_a_folder_that_ranks_cannot_write_to_is_refused(
    tmp_path: Path, key: str, others: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    setting = f"{key}.folder={tmp_path / 'file' / 'below'}"
    assert main(["train", *_TINY, *others, setting, "--out", str(tmp_path / "run")]) == 2
    assert f"{setting}: no file can be made there" in capfd.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_run_of_two_ranks(tmp_path: Path, cache: str) -> None:
    overrides = [*_TINY, cache, "parallel.data_parallel_size=2", "checkpoint.enabled=true"]
    done = run_command(["train", "--json", "--out", str(tmp_path / "run"), *overrides], tmp_path)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    result = json.loads(line)
    assert result["run_dir"] == str(tmp_path / "run")
    assert set(result["bubble"]) == {"measured", "simulated", "formula"}
    assert 0 < result["final_loss"] < 10
    assert result["validation_loss"] > 0
    assert result["tokens_per_s"] > 0
    config = compose_config(overrides)
    text = (tmp_path / "run" / "config.yaml").read_text()
    assert result["config_hash"] == config_hash(config)
    assert text.startswith(f"# config hash {config_hash(config)}\n# counterflow train --json --out ")
    written = yaml.safe_load(text)
    assert written["parallel"]["data_parallel_size"] == 2
    (manifest,) = (tmp_path / "run" / "checkpoints").glob("step-*/metadata.json")
    assert json.loads(manifest.read_text())["metadata"]["config"] == written
    assert not [
        path.name
        for path in (tmp_path / "run").iterdir()
        if path.name.startswith((".ranks", "rank-", LOCK_FILE))
    ]


def test_a_folder_has_one_run_at_a_time(
    tmp_path: Path, cache: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    command = ["train", *_TINY, cache, "--out", str(out)]

    def second_start(entry: object, args: object, **_: object) -> list[None]:
        """In place of the first one's ranks."""
        before = (out / "config.yaml").read_text()
        assert main([*command, "seed=1"]) == 2
        (out / "config.yaml").unlink()  # as if the first had not come so far
        assert main([*command, "seed=1"]) == 2
        assert sorted(path.name for path in out.iterdir()) == [LOCK_FILE]
        (out / "config.yaml").write_text(before)
        return [None]

    monkeypatch.setattr("counterflow.launch.ranks.elastic.run_local", second_start)
    assert main(command) == 0
    err = capfd.readouterr().err
    holder = f"process {os.getpid()} on host {socket.gethostname()}"
    assert err.count(f"error: --out {out}: {holder} writes a run there; name a new folder") == 2
    assert [path.name for path in out.iterdir()] == ["config.yaml"]


def test_a_folder_that_is_taken_is_refused_before_the_data(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr("counterflow.launch.runs.prepare_data", lambda *_, **__: pytest.fail("prepared"))
    assert main(["train", *_TINY, "--out", str(tmp_path)]) == 2
    assert f"error: --out {tmp_path}: it is there already and not empty" in capfd.readouterr().err


def test_a_file_of_a_checkpoint_is_no_checkpoint(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "checkpoints" / "step-00000002"
    folder.mkdir(parents=True)
    (folder / "metadata.json").touch()
    assert main(["train", *_TINY, f"checkpoint.resume={folder / 'metadata.json'}"]) == 2
    told = f"it is a file, and a checkpoint is a folder; name the folder that it is in, checkpoint.resume={folder}"
    assert told in capfd.readouterr().err


def test_the_folder_of_a_run_that_died_at_its_start_is_taken_over(
    tmp_path: Path, cache: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("counterflow.launch.ranks.elastic.run_local", lambda *_, **__: [None])
    died = subprocess.run(
        [
            sys.executable,
            "-c",
            "import os, pathlib, counterflow.framework.trainer.run_lock as it\n"
            f"lock = it.RunLock(pathlib.Path({str(tmp_path)!r}))\nos.kill(os.getpid(), 9)",
        ],
        cwd=_ROOT,
        check=False,
    )
    assert died.returncode == -9
    assert main(["train", *_TINY, cache, "--out", str(tmp_path)]) == 0
    assert f"{tmp_path}: taken over from process" in capfd.readouterr().err
    assert main(["train", *_TINY, cache, "--out", str(tmp_path)]) == 2
    assert f"goes on in another one with checkpoint.resume={tmp_path}" in capfd.readouterr().err


def _environments(started_by: str, num_ranks: int) -> list[dict[str, str]]:
    """What torchrun or srun says to each rank."""
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    if started_by == "srun":
        step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": str(num_ranks)}
        return [
            {**meeting, **step, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}
            for rank in range(num_ranks)
        ]
    return [
        {**meeting, "WORLD_SIZE": str(num_ranks), "RANK": str(rank), "LOCAL_RANK": str(rank)}
        for rank in range(num_ranks)
    ]


def _joined(
    overrides: list[str],
    tmp_path: Path,
    *,
    started_by: str = "torchrun",
    of_rank: tuple[str, ...] = ("seed=0", "seed=0"),
) -> list[tuple[int, str, str]]:
    """Start the command once for each rank, each with an override of its own."""
    words = ["train", "--json", f"launcher.runs_dir={tmp_path}", *overrides]
    ranks = [
        Started(main, [*words, own], environment=environment)
        for own, environment in zip(of_rank, _environments(started_by, len(of_rank)), strict=True)
    ]
    try:
        return [rank.finish() for rank in ranks]
    finally:
        for rank in ranks:
            rank.close()


def _joined_as_modules(overrides: list[str], tmp_path: Path) -> list[tuple[int, str, str]]:
    """The same as a user's torchrun does it: a new Python for each rank."""
    ranks = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "counterflow",
                "train",
                "--json",
                f"launcher.runs_dir={tmp_path}",
                *overrides,
            ],
            cwd=_ROOT,
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for environment in _environments("torchrun", 2)
    ]
    outputs = [rank.communicate(timeout=120) for rank in ranks]
    return [(rank.returncode, out, err) for rank, (out, err) in zip(ranks, outputs, strict=True)]


def test_joining_ranks_that_somebody_else_started(tmp_path: Path, cache: str) -> None:
    overrides = [*_TINY, cache, "parallel.data_parallel_size=2"]
    first, second = _joined_as_modules(overrides, tmp_path)
    assert (first[0], second[0]) == (0, 0), first[2] + second[2]
    (run_dir,) = tmp_path.iterdir()
    assert json.loads(first[1])["run_dir"] == str(run_dir)
    assert second[1] == ""


def test_a_world_of_another_size_is_refused_by_each_rank_that_has_it(tmp_path: Path, cache: str) -> None:
    first, second = _joined([*_TINY, cache], tmp_path)
    assert (first[0], second[0]) == (2, 2)
    for rank, (_, _, told) in enumerate((first, second)):
        assert f"error: rank {rank}: WORLD_SIZE=2 in the environment: this layout has 1 rank(s)" in told
    assert list(tmp_path.iterdir()) == []


def test_joined_ranks_do_not_share_a_folder_with_another_run(tmp_path: Path) -> None:
    """Two jobs of torchrun with one --out: the one that has the folder goes on, every rank of the other ends."""
    out = tmp_path / "run"
    out.mkdir()
    with RunLock(out):
        first, second = _joined([*_TINY, "parallel.data_parallel_size=2", "--out", str(out)], tmp_path)
    assert (first[0], second[0]) == (2, 2)
    assert f"error: --out {out}: process {os.getpid()} on host" in first[2]
    assert "error:" not in second[2]
    assert list(out.iterdir()) == []


def test_a_mistake_that_rank_0_finds_ends_the_others(tmp_path: Path) -> None:
    overrides = [*_TINY, "parallel.data_parallel_size=2", "data.sources=[/nowhere]"]
    first, second = _joined(overrides, tmp_path)
    assert (first[0], second[0]) == (2, 2)
    assert "/nowhere" in first[2]
    assert second[2] == ""


def test_another_text_on_one_rank_is_named_and_leaves_no_run(tmp_path: Path, cache: str) -> None:
    """Under srun, whose tasks join as ranks of torchrun do."""
    sources: list[str] = []
    for name in ("red", "blue"):
        path = tmp_path / name / "text.txt"
        path.parent.mkdir()
        path.write_text("\n\n".join(f"{name} {number}" for number in range(2000)))
        sources.append(f"data.sources=[{path}]")
    runs = tmp_path / "runs"
    overrides = [*_TINY, cache, "parallel.data_parallel_size=2", "data.validation_fraction=0.0"]
    first, second = _joined(overrides, runs, started_by="srun", of_rank=(sources[0], sources[1]))
    assert (first[0], second[0]) == (2, 2), first[2] + second[2]
    assert re.search(r'hash of the tokens: "\w+" on rank 0, but "\w+" on rank 1; ', first[2]), first[2]
    assert second[2] == ""
    assert not runs.exists()


def test_a_rank_of_a_half_said_environment_is_refused(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    assert main(["train", *_TINY]) == 2
    assert (
        "RANK=1 in the environment without WORLD_SIZE and MASTER_ADDR and MASTER_PORT"
        in capfd.readouterr().err
    )


def test_more_ranks_than_gpus_are_refused_before_they_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert main(["train", *_TINY, "parallel.data_parallel_size=2", "--out", str(tmp_path / "run")]) == 2
    assert "device=auto: 2 ranks on this node and 1 GPU" in capfd.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_restarted_job_is_refused_and_its_run_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    overrides = [*_TINY, f"launcher.runs_dir={tmp_path}"]
    digest = config_hash(compose_config(overrides))[:8]
    for name in (f"20260131-120000-{digest}", f"20260131-130000-{digest}", "20260131-140000-1a2b3c4d"):
        (tmp_path / name).mkdir()
    kept = f"20260131-120000-{digest}"  # the only one of this config with a whole checkpoint

    monkeypatch.setattr("counterflow.launch.preflight._has_checkpoint", lambda run: run.name == kept)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert main(["train", *overrides]) == 2
    error = capfd.readouterr().err
    assert "TORCHELASTIC_RESTART_COUNT=1" in error
    assert f"checkpoint.resume={tmp_path / kept}" in error
    assert len(list(tmp_path.iterdir())) == 3


def test_a_round_that_torchrun_does_not_count_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A node left and another joined: TORCHELASTIC_RESTART_COUNT stays 0, and the store may be a new one."""
    overrides = [*_TINY, f"launcher.runs_dir={tmp_path}"]
    for name, value in {**_environments("torchrun", 1)[0], "TORCHELASTIC_RUN_ID": "job"}.items():
        monkeypatch.setenv(name, value)
    run_dir = tmp_path / f"20260131-120000-{config_hash(compose_config(overrides))[:8]}"
    run_dir.mkdir()
    keep_agents(run_dir, [agent_of(os.environ)])
    assert main(["train", *overrides]) == 2
    error = capfd.readouterr().err
    assert f"has started these ranks before, in {run_dir}" in error
    assert list(tmp_path.iterdir()) == [run_dir]
