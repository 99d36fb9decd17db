"""Where a run goes on from: one checkpoint for all ranks, sound, of the same model, or a refusal by name."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from counterflow.framework.checkpoint.manifest import CheckpointError, prune, read_metadata, step_folder
from counterflow.framework.checkpoint.shard import TensorShard
from counterflow.framework.checkpoint.storage import load, save
from counterflow.framework.config.tree import TrainConfig
from counterflow.framework.data.prepare import PreparedData
from counterflow.framework.trainer.resume import resume_notes, resume_problems
from counterflow.framework.trainer.resume_source import (
    agreed_checkpoint,
    checkpoint_to_resume,
    checkpoints_of,
    clean_leftovers,
)
from counterflow.launch.cli import main
from tests.rank_pool import RankError, RankPool
from tests.runs import run_steps
from tests.tiny import merged, run_context, tiny_config

_CONFIG: dict[str, Any] = {
    "training": {"num_steps": 4, "eval_interval_steps": 0},
    "data": {"validation_batches": 0},
    "checkpoint": {"enabled": True, "interval_steps": 1, "keep": 9},
}


def _shard(value: float) -> TensorShard:
    return TensorShard(name="w", global_shape=(8,), offsets=(0,), tensor=torch.full((8,), value))


def _run_of(run_dir: Path, *steps: int, offset: float = 0.0) -> Path:
    """A run's folder with checkpoints of one tensor, which has the step as its value."""
    for step in steps:
        save(step_folder(checkpoints_of(run_dir), step), [_shard(step + offset)], {}, group=None)
    return run_dir


def _flip(folder: Path) -> None:
    path = folder / "rank-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


def _losses(config: TrainConfig, run: Any, stop_after: int | None = None) -> list[float]:
    return [record.loss for record in run_steps(config, run, stop_after)]


@pytest.fixture(scope="module")
def saved(ranks: RankPool, tiny_data: PreparedData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps with a checkpoint after each, and its losses."""
    run_dir = tmp_path_factory.mktemp("saved")
    (losses,) = ranks.run(_losses, 1, tiny_config(**_CONFIG), run_context(tiny_data, run_dir))
    (run_dir / "losses.json").write_text(json.dumps(losses))
    return run_dir


def _resuming(source: Path, **nodes: Any) -> TrainConfig:
    return tiny_config(**merged(merged(_CONFIG, {"checkpoint": {"resume": str(source)}}), nodes))


def test_another_function_of_the_weights_is_refused_unless_it_is_named(
    ranks: RankPool, tiny_data: PreparedData, saved: Path, tmp_path: Path
) -> None:
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    shutil.rmtree(step_folder(checkpoints_of(tmp_path), 4))
    folder = step_folder(checkpoints_of(tmp_path), 3)
    model = {"rope_theta": 500000.0, "norm_eps": 0.1}
    refused = resume_problems(_resuming(tmp_path, model=model), folder, read_metadata(folder))
    assert len(refused) == 2
    assert f"model.rope_theta=500000.0: {folder} was trained with 10000.0" in refused[0]
    assert "checkpoint.allow_changes=[model.rope_theta]" in refused[0]
    assert "model.norm_eps=0.1" in refused[1]

    config = _resuming(
        tmp_path, model=model, checkpoint={"allow_changes": ["model.rope_theta", "model.norm_eps"]}
    )
    (after,) = ranks.run(_losses, 1, config, run_context(tiny_data, tmp_path / "after"))
    undisturbed = json.loads((saved / "losses.json").read_text())[3]
    assert len(after) == 1
    assert abs(after[0] - undisturbed) > 1e-4
    with pytest.raises(RankError, match=r"model\.rope_theta=500000\.0: .* was trained with 10000\.0"):
        ranks.run(_losses, 1, _resuming(tmp_path, model=model), run_context(tiny_data, tmp_path / "after"))


def test_the_remedy_says_one_and_zero_as_numbers(saved: Path) -> None:
    folder = step_folder(checkpoints_of(saved), 3)
    metadata = read_metadata(folder)
    (number,) = resume_problems(_resuming(saved, model={"yarn": {"factor": 2.0}}), folder, metadata)
    assert "model.yarn.factor=2.0:" in number
    assert "set model.yarn.factor=1.0, or" in number
    (switch,) = resume_problems(_resuming(saved, model={"qk_norm": True}), folder, metadata)
    assert "model.qk_norm=true:" in switch
    assert "set model.qk_norm=false, or" in switch


def test_a_rotten_newest_checkpoint_is_passed_over_and_the_run_repeats_itself(
    ranks: RankPool, tiny_data: PreparedData, saved: Path, tmp_path: Path
) -> None:
    shutil.copytree(saved, tmp_path / "run")
    _flip(step_folder(checkpoints_of(tmp_path / "run"), 4))
    (checkpoints_of(tmp_path / "run") / "step-00000004.tmp-0123abcd").mkdir()
    undisturbed = json.loads((saved / "losses.json").read_text())
    for source in (tmp_path / "run", checkpoints_of(tmp_path / "run") / "step-00000003"):
        run = run_context(tiny_data, tmp_path / "after")
        (after,) = ranks.run(_losses, 1, _resuming(source), run)
        assert after == undisturbed[3:]
    assert not list(checkpoints_of(tmp_path / "run").glob("*.tmp-*"))


def test_the_optimizer_may_change_and_what_is_not_known_is_said(saved: Path) -> None:
    folder = step_folder(checkpoints_of(saved), 3)
    metadata = read_metadata(folder)
    assert resume_notes(_resuming(saved), folder, metadata) == []
    config = _resuming(saved, optimizer={"base_lr": 0.5})
    assert resume_problems(config, folder, metadata) == []
    assert resume_notes(config, folder, metadata) == [
        f"{folder} goes on with other settings: optimizer.base_lr: 0.003 -> 0.5"
    ]
    # What was written before settings were kept still loads.
    del metadata["settings"]
    config = _resuming(saved, model={"rope_theta": 5.0})
    assert resume_problems(config, folder, metadata) == []
    (note,) = resume_notes(config, folder, metadata)
    assert "does not say what it was trained with in model.hidden_size" in note
    assert "model.rope_theta" in note


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"seed": 1}, "seed"),
        ({"data": {"seq_length": 8}}, "data.seq_length"),
        ({"num_microbatches": 8}, "schedule.num_microbatches"),
    ],
)
def test_other_data_is_refused_unless_it_is_named(saved: Path, change: dict[str, Any], key: str) -> None:
    folder = step_folder(checkpoints_of(saved), 3)
    metadata = read_metadata(folder)
    config = _resuming(saved, **change)
    (problem,) = resume_problems(config, folder, metadata)
    assert "so samples would be repeated or left out" in problem
    config = replace(config, checkpoint=replace(config.checkpoint, allow_changes=(key,)))
    assert resume_problems(config, folder, metadata) == []


def test_other_tokens_are_refused_unless_it_is_said_what_makes_them(saved: Path) -> None:
    folder = step_folder(checkpoints_of(saved), 3)
    metadata = read_metadata(folder)
    (problem,) = resume_problems(_resuming(saved), folder, metadata, "0" * 64)
    assert "checkpoint.allow_changes=[data.sources]" in problem
    allowing = _resuming(saved, checkpoint={"allow_changes": ["data.max_bytes"]})
    assert resume_problems(allowing, folder, metadata, "0" * 64) == []


def test_an_allowed_change_names_a_key() -> None:
    with pytest.raises(
        ValueError, match=r"checkpoint\.allow_changes: model\.rope_thta: .*did you mean model\.rope"
    ):
        tiny_config(checkpoint={"allow_changes": ["model.rope_thta"]})


def test_a_checkpoint_that_is_no_run_s_is_refused(tmp_path: Path) -> None:
    folder = step_folder(checkpoints_of(_run_of(tmp_path, 3)), 3)
    (problem,) = resume_problems(_resuming(tmp_path), folder, read_metadata(folder))
    assert f"{folder} is no checkpoint of a run, for it does not say num_steps" in problem


def _agreed(sources: tuple[Path, ...]) -> tuple[str, float]:
    """The step's folder, and the value that this rank loads from it; each rank has a source of its own."""
    folder, manifest = agreed_checkpoint(
        str(sources[dist.get_rank()]), dist.group.WORLD, verify_checksums=True
    )
    shard = _shard(0.0)
    load(folder, [shard], group=dist.group.WORLD, digest=manifest.digest)
    return folder.name, float(shard.tensor[0])


def _refused_alike(sources: tuple[Path, ...]) -> str:
    with pytest.raises((CheckpointError, ValueError)) as told:
        _agreed(sources)
    return str(told.value)


def _refusal(ranks: RankPool, *sources: Path) -> str:
    (message,) = set(ranks.run(_refused_alike, len(sources), sources))
    return message


def test_rank_0_chooses_for_all(ranks: RankPool, tmp_path: Path) -> None:
    first = _run_of(tmp_path / "first", 4)
    shutil.copytree(first, tmp_path / "second")
    second = _run_of(tmp_path / "second", 8)  # what one rank sees first of a save that others do not see yet
    assert ranks.run(_agreed, 2, (first, second)) == [("step-00000004", 4.0)] * 2
    assert ranks.run(_agreed, 2, (second, first)) == [("step-00000004", 4.0)] * 2
    shutil.rmtree(step_folder(checkpoints_of(first), 4))
    missing = f"rank 1: '{checkpoints_of(first)}/step-00000004/metadata.json' is missing"
    assert missing in _refusal(ranks, second, first)


def test_checkpoints_of_one_step_that_differ_are_refused(ranks: RankPool, tmp_path: Path) -> None:
    first, second = _run_of(tmp_path / "first", 4), _run_of(tmp_path / "second", 4, offset=0.5)
    message = _refusal(ranks, first, second)
    assert "ranks see different checkpoints of step 4: that of rank 0 has sha256" in message
    assert "on storage that all ranks share" in message


def _truncate(folder: Path) -> None:
    (folder / "rank-00000.safetensors").write_bytes(b"short")


def _lose_a_shard(folder: Path) -> None:
    (folder / "rank-00000.safetensors").unlink()


def _empty(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def _rename(folder: Path) -> None:
    folder.rename(step_folder(folder.parent, 9))


def _reseal_another_dtype(folder: Path) -> None:
    index = json.loads((folder / "index.json").read_text())
    index["tensors"]["w"]["dtype"] = "F16"
    data = json.dumps(index).encode()
    (folder / "index.json").write_bytes(data)
    manifest = json.loads((folder / "metadata.json").read_text())
    manifest["files"]["index.json"] = {"bytes": len(data), "crc32": zlib.crc32(data)}
    del manifest["crc32"]
    manifest["crc32"] = zlib.crc32(json.dumps(manifest, sort_keys=True).encode())
    (folder / "metadata.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (_flip, "is corrupt: its crc32"),
        (_truncate, "is truncated"),
        (_lose_a_shard, "rank-00000.safetensors' is missing"),
        (_empty, "metadata.json' is missing"),
        (_rename, "holds step 8 and was renamed"),
        (_reseal_another_dtype, "index.json says F16"),
    ],
)
def test_damage_is_passed_over_by_name_and_refused_where_it_was_asked_for(
    ranks: RankPool, tmp_path: Path, damage: Callable[[Path], None], reason: str
) -> None:
    run_dir = _run_of(tmp_path, 4, 8)
    newest = step_folder(checkpoints_of(run_dir), 8)
    damage(newest)
    assert ranks.run(_agreed, 2, (run_dir, run_dir)) == [("step-00000004", 4.0)] * 2
    named = newest if newest.exists() else step_folder(newest.parent, 9)
    message = _refusal(ranks, named, named)
    older = step_folder(checkpoints_of(run_dir), 4)
    assert reason in message
    assert f"go on from the older checkpoint '{older}', which is whole (checkpoint.resume={older})" in message
    assert ranks.run(_agreed, 2, (older, older)) == [("step-00000004", 4.0)] * 2  # as it was told
    shutil.rmtree(older)
    message = _refusal(ranks, run_dir, run_dir)
    assert "there is no whole checkpoint under" in message
    assert reason in message


def test_what_was_passed_over_is_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run_dir = _run_of(tmp_path, 2, 4, 8)
    _flip(step_folder(checkpoints_of(run_dir), 8))
    _truncate(step_folder(checkpoints_of(run_dir), 4))
    folder, _ = agreed_checkpoint(str(run_dir), None, verify_checksums=True)
    assert folder == step_folder(checkpoints_of(run_dir), 2)
    assert "step-00000008/rank-00000.safetensors' is corrupt" in caplog.text
    assert "step-00000004/rank-00000.safetensors' is truncated" in caplog.text
    assert f"going on from {folder}" in caplog.text


def test_a_newer_format_is_refused_not_passed_over(ranks: RankPool, tmp_path: Path) -> None:
    run_dir = _run_of(tmp_path, 4, 8)
    path = step_folder(checkpoints_of(run_dir), 8) / "metadata.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format_version": 2}))
    assert "has checkpoint format version 2, and this program reads version 1" in _refusal(
        ranks, *[run_dir] * 2
    )


def test_what_checkpoint_resume_may_name(tmp_path: Path) -> None:
    run_dir = _run_of(tmp_path / "run", 4, 8)
    folder = step_folder(checkpoints_of(run_dir), 4)
    (tmp_path / "link").symlink_to(folder)
    shutil.copytree(folder, tmp_path / "copied" / folder.name)
    assert checkpoint_to_resume(str(run_dir)) == step_folder(checkpoints_of(run_dir), 8)
    assert checkpoint_to_resume(str(checkpoints_of(run_dir))) == step_folder(checkpoints_of(run_dir), 8)
    assert checkpoint_to_resume(str(folder)) == folder
    assert checkpoint_to_resume(str(tmp_path / "link")) == folder
    assert checkpoint_to_resume(str(tmp_path / "copied")) == tmp_path / "copied" / folder.name
    shutil.copytree(folder, tmp_path / "best")
    with pytest.raises(ValueError, match=r"'.*/best' is not the name of a checkpoint"):
        checkpoint_to_resume(str(tmp_path / "best"))
    with pytest.raises(ValueError, match="there is no whole checkpoint under"):
        checkpoint_to_resume(str(tmp_path / "nothing"))


@contextlib.contextmanager
def locked_by_another_run(run_dir: Path) -> Iterator[None]:
    """The lock of a process of its own: what this one or its launcher holds is this run's."""
    code = (
        "import sys; from pathlib import Path; from counterflow.framework.trainer.run_lock import RunLock\n"
        "lock = RunLock(Path(sys.argv[1])); print('locked', flush=True); sys.stdin.read(); lock.release()"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", code, str(run_dir)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"locked\n"
        try:
            yield
        finally:
            other.communicate()


def test_a_run_that_still_writes_is_gone_on_from_at_a_named_step_only(
    ranks: RankPool, tmp_path: Path
) -> None:
    run_dir = _run_of(tmp_path, 4)
    folder = step_folder(checkpoints_of(run_dir), 4)
    half = checkpoints_of(run_dir) / "step-00000008.tmp-0123abcd"
    half.mkdir()
    with locked_by_another_run(run_dir):
        message = _refusal(ranks, run_dir, run_dir)
        assert "still writes there, so its newest checkpoint is not settled" in message
        assert ranks.run(_agreed, 2, (folder, folder)) == [("step-00000004", 4.0)] * 2
        clean_leftovers(str(run_dir))
        assert half.exists()
    clean_leftovers(str(folder))
    assert sorted(path.name for path in run_dir.iterdir()) == ["checkpoints"]
    assert [path.name for path in checkpoints_of(run_dir).iterdir()] == [folder.name]


def test_the_command_line_refuses_before_a_rank_starts(
    saved: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    command = ["train", f"checkpoint.resume={saved}", f"launcher.runs_dir={tmp_path}", "model.hidden_size=64"]
    assert main(command) == 2
    assert "model.hidden_size=64:" in capfd.readouterr().err
    assert main([*command, "checkpoint.allow_changes=[model.nothing]"]) == 2
    assert "model.nothing: the config has no such key" in capfd.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_that_is_read_is_not_pruned(tmp_path: Path) -> None:
    run = _run_of(tmp_path / "run", 2, 4, 6)
    root = run / "checkpoints"
    with contextlib.ExitStack() as holding:
        folder, _ = agreed_checkpoint(str(step_folder(root, 2)), None, verify_checksums=True, holding=holding)
        prune(root, keep=1)
        assert sorted(path.name for path in root.iterdir()) == ["step-00000002", "step-00000006"]
        load(folder, [_shard(0.0)], group=None)
    prune(root, keep=1)
    assert [path.name for path in root.iterdir()] == ["step-00000006"]
