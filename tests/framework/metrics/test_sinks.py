"""Sinks against what stands in their files afterwards, and W&B under kills."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto import wandb_internal_pb2

from counterflow.framework.metrics import sinks
from counterflow.framework.metrics.config import LoggerConfig
from counterflow.framework.metrics.guarded import BackgroundSink
from counterflow.framework.metrics.sinks import (
    JsonlSink,
    WandbSink,
    _home_for_wandb,  # pyright: ignore[reportPrivateUsage]
    failures_of,
    log_picture,
    open_sinks,
    read_records,
    wandb_dir,
)
from tests.framework.metrics.records import SUMMARY, record

ROOT = Path(__file__).parents[3]
# One white pixel.
PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de0000000c49444154789c63f8ffff3f0005"
    "fe02fe0def46b80000000049454e44ae426082"
)


def wandb_records(folder: Path) -> Iterator[wandb_internal_pb2.Record]:
    """The records of an offline run: a LevelDB log (blocks of 32 KiB, records of checksum, length and type)."""
    (path,) = folder.glob("*.wandb")
    data = path.read_bytes()
    position, message = 7, b""  # after the file header
    while position + 7 <= len(data):
        if 32768 - position % 32768 < 7:
            position += 32768 - position % 32768
            continue
        length = int.from_bytes(data[position + 4 : position + 6], "little")
        kind = data[position + 6]
        message += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield wandb_internal_pb2.Record.FromString(message)
            message = b""


def await_exit(folder: Path) -> None:
    """W&B's service may write the last of its file a little after `finish` has returned."""
    deadline = time.monotonic() + 60
    while not any(each.WhichOneof("record_type") == "exit" for each in wandb_records(folder)):
        assert time.monotonic() < deadline, "W&B never wrote the end of the run"
        time.sleep(0.05)


def history(folder: Path) -> dict[int, dict[str, object]]:
    found: dict[int, dict[str, object]] = {}
    for each in wandb_records(folder):
        if each.WhichOneof("record_type") == "history":
            items = {
                "/".join(item.nested_key) or item.key: json.loads(item.value_json)
                for item in each.history.item
            }
            found[each.history.step.num] = items
    return found


def test_none_writes_nothing(tmp_path: Path) -> None:
    assert open_sinks(LoggerConfig(name="none"), tmp_path / "run", {}) == []
    assert not (tmp_path / "run").exists()


def test_jsonl_has_every_step_at_once(tmp_path: Path) -> None:
    (sink,) = open_sinks(LoggerConfig(name="jsonl"), tmp_path / "run", {})
    for step in range(3):
        sink.log(record(step))
        assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == step + 1
    sink.summary(SUMMARY)
    sink.close("finished")
    assert read_records(tmp_path / "run" / "metrics.jsonl") == [record(step) for step in range(3)]
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["final_loss"] == 2.5
    assert sink.folder == tmp_path / "run"


def test_a_resumed_run_has_no_step_twice(tmp_path: Path) -> None:
    first = JsonlSink(tmp_path)
    for step in range(6):
        first.log(record(step))
    # Killed while it wrote a line; its last checkpoint was after four steps.
    with (tmp_path / "metrics.jsonl").open("a") as stream:
        stream.write(record(6).to_json()[:50])
    second = JsonlSink(tmp_path, resume_step=4)
    for step in range(4, 8):
        second.log(record(step, loss=1.0))
    second.close("finished")
    found = read_records(tmp_path / "metrics.jsonl")
    assert [each.step for each in found] == list(range(8))
    assert [each.loss for each in found[3:5]] == [record(3).loss, 1.0]


def test_a_damaged_line_in_the_middle_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f"{record(0).to_json()}\nbroken\n{record(1).to_json()}\n")
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2: not a step record .*remove the line"):
        read_records(path)


def test_wandb_offline_holds_history_config_and_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    config = {"seed": 3, "data": {"hub_token": "hunter2", "seq_length": 128}, "sizes": (1, 2)}
    opened = open_sinks(LoggerConfig(name="wandb", project="p"), tmp_path / "run", config)
    folder = wandb_dir(opened)
    assert folder is not None
    assert Path(folder).parent == tmp_path / "run" / "wandb"
    (tmp_path / "picture.png").write_bytes(PNG)
    for step in range(4):
        if step == 3:
            log_picture(opened, "timeline", tmp_path / "picture.png", 3)
        for sink in opened:
            sink.log(record(step))
    for sink in opened:
        sink.summary(SUMMARY)
        sink.close("finished")

    await_exit(Path(folder))
    found = history(Path(folder))
    assert sorted(found) == [0, 1, 2, 3]
    assert found[2]["loss"] == record(2).loss
    assert found[2]["idle_s/rank_1"] == 0.2
    assert found[2]["time_s/forward/rank_0"] == 0.2
    # The picture came before the values of its step, and stands beside them.
    assert found[3]["loss"] == record(3).loss
    picture = Path(folder) / "files" / str(found[3]["timeline/path"])
    assert picture.read_bytes() == PNG
    assert "timeline/path" not in found[2]
    (run,) = [each.run for each in wandb_records(Path(folder)) if each.WhichOneof("record_type") == "run"]
    stored = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert stored["data"] == {"hub_token": "***", "seq_length": 128}
    assert stored["seed"] == 3
    assert run.project == "p"
    exits = [each.exit for each in wandb_records(Path(folder)) if each.WhichOneof("record_type") == "exit"]
    assert [each.exit_code for each in exits] == [0]
    assert not any(
        b"hunter2" in path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()
    )
    assert len(read_records(tmp_path / "run" / "metrics.jsonl")) == 4
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")


def test_a_resumed_wandb_run_keeps_its_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    ids: list[str] = []
    for _ in range(2):
        sink = WandbSink(LoggerConfig(), tmp_path, {})
        assert sink.folder is not None
        ids.append(sink.folder.name.rpartition("-")[2])
        sink.close("finished")
        time.sleep(1.1)  # its folders are named by the second
    assert ids[0] == ids[1]
    assert len(list((tmp_path / "wandb").glob("offline-run-*"))) == 2


def test_the_environment_decides_the_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    opened = open_sinks(LoggerConfig(name="wandb", mode="online"), tmp_path / "run", {})
    for sink in opened:
        sink.log(record(0))
        sink.close("finished")
    assert wandb_dir(opened) is None
    monkeypatch.setenv("WANDB_MODE", "sometimes")
    with pytest.raises(ValueError, match=r"WANDB_MODE=sometimes: W&B knows online, offline and disabled"):
        sinks.check_logger(LoggerConfig(name="wandb"))


def test_what_cannot_work_is_refused_before_the_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "tensorboard" else find_spec(name)
    )
    with pytest.raises(ValueError, match=r"package tensorboard is not installed; pip install 'counterflow\["):
        sinks.check_logger(LoggerConfig(name="tensorboard"))
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_IDENTITY_TOKEN_FILE", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    with pytest.raises(ValueError, match=r"W&B has no API key here; run `wandb login`"):
        sinks.check_logger(LoggerConfig(name="wandb", mode="online"))
    monkeypatch.setenv("WANDB_API_KEY", "x")
    sinks.check_logger(LoggerConfig(name="wandb", mode="online"))
    monkeypatch.delenv("WANDB_API_KEY")
    sinks.check_logger(LoggerConfig(name="wandb"))
    sinks.check_logger(LoggerConfig(name="jsonl"))


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    opened = open_sinks(LoggerConfig(name="tensorboard"), tmp_path, {})
    (tmp_path / "picture.png").write_bytes(PNG)
    for step in range(3):
        for sink in opened:
            sink.log(record(step))
    log_picture(opened, "timeline", tmp_path / "picture.png", 2)
    for sink in opened:
        sink.summary(SUMMARY)
        sink.close("finished")
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    found = [(event.step, event.value) for event in events.Scalars("loss")]
    assert found == [(step, pytest.approx(record(step).loss)) for step in range(3)]
    assert events.Scalars("bytes_by_axis/tensor")[0].value == 100
    (image,) = events.Images("timeline")
    assert (image.step, image.width, image.height) == (2, 1, 1)
    assert len(read_records(tmp_path / "metrics.jsonl")) == 3


OWNER = """
import sys, time
from pathlib import Path
from counterflow.framework.metrics.config import LoggerConfig
from counterflow.framework.metrics.sinks import open_sinks, wandb_dir
from tests.framework.metrics.records import record
opened = open_sinks(LoggerConfig(name="wandb"), Path(sys.argv[1]), {})
wandb_dir(opened)  # W&B has started
for step in range(50):
    for sink in opened:
        sink.log(record(step))
print("ready", flush=True)
if sys.argv[2] == "sleep":
    time.sleep(60)
"""


def own(run_dir: Path, what: str) -> subprocess.Popen[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("WANDB")}
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(run_dir), what],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def descendants(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            found += [child, *descendants(child)]
    return found


def alive(pid: int) -> bool:
    """Whether `pid` runs; a process that has ended but is not yet reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_owner_leaves_no_process_of_wandb(tmp_path: Path, number: signal.Signals) -> None:
    process = own(tmp_path, "sleep")
    time.sleep(2)  # whatever W&B starts late has started
    service = descendants(process.pid)
    names = [Path(f"/proc/{pid}/cmdline").read_text().split("\0")[0].rpartition("/")[2] for pid in service]
    assert names == ["wandb-core"] or torch.cuda.is_available()
    process.send_signal(number)
    process.communicate(timeout=10)
    deadline = time.monotonic() + 60
    while any(map(alive, service)):
        assert time.monotonic() < deadline, f"{list(filter(alive, service))} outlived the owner"
        time.sleep(0.05)
    assert len(read_records(tmp_path / "metrics.jsonl")) == 50


def test_an_owner_that_forgets_to_close_still_ends(tmp_path: Path) -> None:
    process = own(tmp_path, "leave")
    process.communicate(timeout=15)
    assert process.returncode == 0
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    assert len(history(folder)) == 50


def test_a_lost_wandb_service_does_not_stop_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    made: list[WandbSink] = []

    def make() -> WandbSink:
        made.append(WandbSink(LoggerConfig(), tmp_path, {}))
        return made[0]

    guarded = BackgroundSink("W&B", make, timeout_s=60)
    assert guarded.folder is not None
    sink = made[0]

    def lost(*_: object, **__: object) -> None:
        raise ConnectionResetError("Connection lost")

    monkeypatch.setattr(sink._run, "log", lost)
    finish = sink._run.finish
    with caplog.at_level(logging.WARNING):
        for step in range(3):
            guarded.log(record(step))
        guarded.close("finished")
    assert len(re.findall("W&B stopped taking records", caplog.text)) == 1
    assert failures_of([guarded]) == {"W&B": "ConnectionResetError: Connection lost"}
    finish()


def test_an_upload_that_does_not_end_is_left_to_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setattr(sinks, "_FINISH_TIMEOUT_S", 0.2)
    sink = WandbSink(LoggerConfig(), tmp_path, {})
    finish = sink._run.finish
    closed = threading.Event()
    monkeypatch.setattr(sink._run, "finish", lambda **_: closed.wait(60))
    with caplog.at_level(logging.WARNING):
        sink.close("finished")
    closed.set()
    assert f"wandb sync {sink.folder}" in caplog.text
    finish()


def test_the_service_of_wandb_is_told_a_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks at HOME alone; without one it prints its log behind everything else."""
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.delenv("WANDB_CACHE_DIR", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    assert _home_for_wandb(tmp_path / "run") == {"HOME": str(tmp_path)}
    monkeypatch.setenv("HOME", str(tmp_path))
    assert _home_for_wandb(tmp_path / "run") == {}
    for home in ("", "/nowhere"):
        monkeypatch.setenv("HOME", home)
        monkeypatch.setattr(Path, "home", lambda: Path("/nowhere"))
        assert _home_for_wandb(tmp_path / "run")["WANDB_CACHE_DIR"] == str(
            tmp_path / "run" / "wandb" / "cache"
        )
