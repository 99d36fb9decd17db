"""The command line: parsing, help, exit codes, one message for each mistake, JSON on stdout."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from inspect import cleandoc
from pathlib import Path

import pytest

from counterflow.launch.arguments import command_help, options_of, parse
from counterflow.launch.bench.table import BENCHES
from counterflow.launch.cli import main
from counterflow.launch.command import Help, UsageError
from counterflow.launch.commands import bench
from counterflow.launch.commands.table import COMMANDS
from counterflow.launch.compose import compose_config, compose_mapping, expand_sweep, find_choices

_ROOT = Path(__file__).parents[2]
_FOUR_STAGES = ["parallel.pipeline_parallel_size=4", "schedule.num_microbatches=8"]


def _fails(argv: list[str], capfd: pytest.CaptureFixture[str]) -> str:
    assert main(argv) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert "Traceback" not in err
    return err


def test_options_may_stand_anywhere() -> None:
    arguments = parse(["--json", "train", "seed=1", "--out", "a", "-m", "zero.stage=0,1", "--config-dir=b"])
    assert (arguments.command, arguments.words) == ("train", ("seed=1", "zero.stage=0,1"))
    assert (arguments.out, arguments.config_dir) == (Path("a"), Path("b"))
    assert arguments.json
    assert arguments.multirun


def test_a_command_may_be_a_value_or_a_word_too() -> None:
    assert parse(["--out", "plan", "train", "train"])[:2] == ("train", ("train",))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["trian"], "trian: no such command (did you mean train?)"),
        (["schedule=1f1b"], "the command comes first, as in counterflow train schedule=1f1b"),
        (["train", "--jsn"], "--jsn: no such option (did you mean --json?)"),
        (["train", "--out"], "--out: needs a value"),
        (["train", "--json=yes"], "--json takes no value"),
        (["train", "--cfg", "hydra"], "only the job's config can be printed"),
        (["timeline", "runs/a", "--multirun"], "--multirun: no option of timeline"),
        (["train", "--step", "3"], "--step: no option of train"),
        (["timeline", "runs/a", "--step", "last"], "--step last: must be a whole number"),
    ],
)
def test_a_slip_on_the_command_line(argv: list[str], message: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError):
        parse(argv)
    assert message in _fails(argv, capfd)


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_help_teaches(command: str | None, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*([command] if command else []), "--help"]) == 0
    out, err = capfd.readouterr()
    assert err == ""
    assert "exit codes: 0 done" in out
    assert out.count("\n  counterflow ") >= 3 or command == "train"
    assert "--json" in out
    assert max(map(len, out.splitlines())) <= 120


def _told(rows: str) -> list[str]:
    """The keys or examples of a help, without what they mean."""
    return [line.partition("  ")[0] for line in cleandoc(rows).splitlines() if line]


def _check_examples(command: str, text: Help) -> None:
    """All that a command does before its first rank starts."""
    for words in map(str.split, _told(text.examples)):
        if words[0] != "counterflow":
            continue
        arguments = parse(words[1:])
        assert arguments.command == command
        read = COMMANDS[command].read
        if read is not None:
            read(arguments.words)
            continue
        for overrides in expand_sweep(arguments.words, find_choices()):
            COMMANDS[command].check(compose_config(overrides))


@pytest.mark.parametrize("name", COMMANDS)
def test_every_example_and_key_in_the_help_is_valid(name: str) -> None:
    text = COMMANDS[name].help_on()
    assert len(_told(text.examples)) >= 3
    _check_examples(name, text)
    if COMMANDS[name].read is None:
        compose_mapping(_told(text.keys))


@pytest.mark.parametrize("name", sorted(BENCHES))
def test_a_benchs_help_tells_its_keys_and_their_defaults(
    name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", name, "--help"]) == 0
    assert capfd.readouterr().out.startswith(f"counterflow bench {name} ")
    assert bench.read([name, *_told(BENCHES[name].help.keys)]) == bench.read([name])
    _check_examples("bench", BENCHES[name].help)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["overlp"], "overlp: no such bench (did you mean overlap?)"),
        (["p2p", "repeat=3"], "repeat: the config has no such key; did you mean repeats?"),
        (["p2p", "repeats=0"], "repeats=0: must be at least 1"),
        (["p2p", "action_ms=0"], "action_ms=0: must be above 0; the default is 30"),
        (["p2p", "chunk_kib=[64,1]"], "chunk_kib=[64,1]: must be at least 4"),
    ],
)
def test_a_slip_in_the_words_of_a_bench(
    words: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert message in _fails(["bench", *words], capfd)


def test_no_command_shows_the_way(capfd: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "commands:" in capfd.readouterr().err


def test_version(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capfd.readouterr().out.startswith("counterflow ")


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from counterflow.launch.cli import main; main(['train', '--help']); print(*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=_ROOT / ".src", capture_output=True, text=True, check=True
    )
    assert not {"torch", "hydra", "numpy", "rich"} & set(done.stdout.split())


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["parallel.pipeline_parallel_size=3"], "error: parallel.pipeline_parallel_size=3: dualpipe"),
        (["schedule.num_microbatches=2"], "error: schedule.num_microbatches=2: dualpipe"),
        (
            ["model.num_heads=6", "model.hidden_size=96", "parallel.tensor_parallel_size=4"],
            "model.num_heads=6",
        ),
        (["zero.stge=3"], "error: zero.stge: the config has no such key; did you mean zero.stage?"),
        (["data.seq_length=long"], "error: data.seq_length='long': must be a whole number"),
        (["data.sources=[/nowhere/at/all]"], "/nowhere/at/all"),
        (["checkpoint.resume=/nowhere/at/all"], "checkpoint.resume=/nowhere/at/all: no such folder"),
        (
            [f"checkpoint.resume={__file__}"],
            "it is a file, and a checkpoint is a folder; name the folder of a run",
        ),
    ],
)
def test_a_mistake_ends_before_any_rank_starts(
    overrides: list[str], message: str, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    err = _fails(["train", f"launcher.runs_dir={tmp_path}", *overrides], capfd)
    assert message in err
    assert list(tmp_path.iterdir()) == []


def test_traceback_is_there_for_who_asks(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "zero.stage=9", "--traceback"]) == 2
    err = capfd.readouterr().err
    assert err.startswith("error: zero.stage=9")
    assert "Traceback" in err


def test_the_error_is_json_too(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "zero.stage=9", "--json"]) == 2
    out, err = capfd.readouterr()
    result = json.loads(out)
    assert result["exit_code"] == 2
    assert result["error"] in err


def test_cfg_job_prints_every_key(capfd: pytest.CaptureFixture[str]) -> None:
    import yaml

    from counterflow.framework.config.mapping import from_mapping
    from counterflow.framework.config.tree import TrainConfig

    assert main(["train", "--cfg", "job", "seed=5"]) == 0
    printed = yaml.safe_load(capfd.readouterr().out)
    printed["optimizer"]["eps"] = float(printed["optimizer"]["eps"])
    assert from_mapping(TrainConfig, printed) == compose_config(["seed=5"])


def test_an_out_folder_in_use_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "old").touch()
    argv = [
        "train",
        "experiment=smoke",
        "data.max_bytes=400000",
        f"data.cache_dir={tmp_path}",
        "--out",
        str(tmp_path),
    ]
    assert main(argv) == 2
    assert f"error: --out {tmp_path}: it is there already and not empty" in capfd.readouterr().err


def test_simulate_prints_json_last_and_needs_no_model_that_fits(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    overrides = ["schedule=dualpipe", "parallel.pipeline_parallel_size=8", "schedule.num_microbatches=20"]
    assert main(["simulate", "--json", "--out", str(tmp_path), *overrides]) == 0
    out, err = capfd.readouterr()
    (line,) = out.splitlines()
    result = json.loads(line)
    assert result["makespan"] == 66
    assert result["idle"] == [6] * 8
    assert result["peak_activations"] == [9] * 8
    assert "makespan" in err
    assert {path.suffix for path in tmp_path.iterdir()} >= {".svg", ".png"}


def test_a_sweep_runs_every_combination_and_ends_in_a_table(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    argv = ["simulate", "-m", "--json", "--out", str(tmp_path), "schedule=gpipe,1f1b", *_FOUR_STAGES]
    assert main(argv) == 0
    out, err = capfd.readouterr()
    results = json.loads(out)
    assert [result["schedule"] for result in results] == ["gpipe", "1f1b"]
    # GPipe keeps every micro-batch, 1F1B at most one for each stage.
    assert [max(result["peak_activations"]) for result in results] == [8, 4]
    assert "2 runs" in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


@pytest.mark.parametrize(
    ("command", "sweep", "message"),
    [
        ("simulate", "schedule.num_microbatches=8,7", "schedule.num_microbatches=7"),
        ("parity", "precision.reduce=fp32,bf16", "precision.reduce=bf16: what is rounded differs"),
    ],
)
def test_a_sweep_with_a_mistake_runs_nothing(
    command: str, sweep: str, message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    argv = [command, "--multirun", "--out", str(tmp_path), sweep, *_FOUR_STAGES[:1]]
    assert message in _fails(argv, capfd)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_a_commands_help_lists_the_options_that_it_takes(
    command: str, capfd: pytest.CaptureFixture[str]
) -> None:
    taken = {option.name for option in options_of(COMMANDS[command])}
    listed = re.findall(r"^  (--[a-z-]+)", command_help(command), flags=re.MULTILINE)
    assert set(listed) == taken
    values = {
        "--out": ["a"],
        "--cfg": ["job"],
        "--multirun": [],
        "--config-dir": ["a"],
        "--model-only": [],
        "--step": ["3"],
    }
    for option in set(values) - taken:
        for words in ([command, option, *values[option]], [option, *values[option], command]):
            assert main(words) == 2
            assert f"{option}: no option of {command}" in capfd.readouterr().err


@pytest.mark.parametrize("key", ["seed", "precision.compute"])
def test_an_error_of_types_does_not_tell_what_the_environment_said(
    key: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CF_SECRET", "hunter2secret")
    assert main(["train", f"{key}=${{oc.env:CF_SECRET}}"]) == 2
    told = capfd.readouterr().err
    assert "hunter2secret" not in told
    assert f"{key}='${{oc.env:CF_SECRET}}'" in told
