"""What the docs show works: every command is checked, one of each kind run; links lead somewhere; tables are true."""

from __future__ import annotations

import os
import pkgutil
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from counterflow.framework.checks.rules.markdown import to_markdown
from counterflow.launch.arguments import command_help, parse
from counterflow.launch.commands.table import COMMANDS as COMMAND_TABLE
from counterflow.launch.compose import compose_config, expand_sweep, find_choices
from tests.commands import ROOT, run_command

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FOLDERS = "framework|models|parallel|launch|conf|tests"
BIN = Path(sys.executable).parent
# What makes a training command of the docs a matter of seconds; it changes no value the command sets itself.
SMALL = {
    "training.num_steps": "2",
    "data.validation_batches": "1",
    "data.seq_length": "32",
    "data.micro_batch_size": "1",
    "model.hidden_size": "32",
    "model.intermediate_size": "64",
    "logger": "jsonl",
    "launcher.threads_per_rank": "1",
}
# The same for the benches, each of which has values of its own.
COMPUTE_BENCH = ["schedules=[1f1b]", "repeats=1"]
BENCH = {
    "schedules": ["mode=sleep", "repeats=1", "action_ms=1", "num_ranks=2", "num_microbatches=[4]"],
    "overlap": ["mode=sleep", "schedules=[dualpipe]", "repeats=1", "phase_ms=2", "num_microbatches=4"],
    "optimizer": ["schedules=[1f1b]", "repeats=1", "action_ms=1", "num_ranks=2", "num_steps=2"],
    "p2p": [
        "repeats=1",
        "tensor_mib=[0.25]",
        "chunk_kib=[64]",
        "mbit_per_s=[]",
        "num_ranks=2",
        "action_ms=1",
    ],
    "compression": ["repeats=1", "methods=[onebit]", "mbit_per_s=null", "compute_ms=1"],
    "memory": ["repeats=1", "budgets=[0.5]", "hidden_size=32", "tokens=128", "num_microbatches=6"],
    "zero": ["data_parallel_sizes=[2]", "repeats=1", "deepspeed=false", "hidden_size=32", "num_layers=2"],
    "deepspeed": ["stages=[2]", "num_steps=2", "num_microbatches=1", "data_parallel_size=1"],
}


def commands() -> list[str]:
    """The lines of every console block, each once."""
    found: dict[str, None] = {}
    for page in PAGES:
        for block in re.findall(r"```console\n(.*?)```", page.read_text(), flags=re.DOTALL):
            found |= dict.fromkeys(line for line in block.splitlines() if line.strip())
    return list(found)


def is_importable(name: str) -> bool:
    """Whether `name` is a module, or something that a module has."""
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


def run(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / ".src")}
    return subprocess.run(
        words, cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False
    )


COMMANDS = [line for line in commands() if line.startswith("counterflow")]


def kind(line: str) -> tuple[str, ...]:
    """What is alike in the commands of which one is run: the command, a bench's name, options, what it reads."""
    words = shlex.split(line)[1:]
    name = words[1:2] if words[0] == "bench" else []
    options = sorted(word for word in words if word.startswith("-"))
    reads = ["a run"] if "runs/" in line else []
    return (*words[:1], *name, *options, *reads)


def one_of_each_kind(lines: Sequence[str]) -> list[str]:
    """The first line of each kind."""
    found: dict[tuple[str, ...], str] = {}
    for line in lines:
        found.setdefault(kind(line), line)
    return list(found.values())


@pytest.mark.parametrize("line", COMMANDS)
def test_command_of_the_docs_is_composed_and_checked(line: str) -> None:
    """All that a command does before its first rank starts; the words of a bench and of a run's folder are read."""
    words = shlex.split(line)[1:]
    arguments = parse(words)
    assert arguments.command is not None
    assert command_help(arguments.command, arguments.words)
    command = COMMAND_TABLE[arguments.command]
    if command.read is not None:
        command.read(arguments.words)
        return
    combinations = expand_sweep(arguments.words, find_choices())
    assert len(combinations) > 1 or not arguments.multirun
    for overrides in combinations:
        command.check(compose_config(overrides))


@pytest.mark.parametrize(
    "line",
    [
        line if line in one_of_each_kind(COMMANDS) else pytest.param(line, marks=pytest.mark.slow)
        for line in COMMANDS
    ],
)
def test_command_of_the_docs_runs(line: str, tmp_path: Path) -> None:
    """One of each kind; `pytest -m slow` runs the others."""
    text = tmp_path / "doc"
    text.mkdir()
    (text / "text.md").write_text((ROOT / "docs" / "concepts.md").read_text() * 20)
    words = shlex.split(line.replace("/usr/share/doc", str(text)))[1:]
    small = {
        key: value for key, value in SMALL.items() if not any(word.startswith(f"{key}=") for word in words)
    }
    if not any(word.startswith("parallel") for word in words):
        small["parallel.tensor_parallel_size"] = "1"  # four ranks in place of eight
    if name := re.search("runs/(RUN|EXPERTS)", line):
        if name[1] == "EXPERTS":
            small |= {"model": "tiny_mixtral", "parallel": "pp2_dp2_ep2"}
        first = ["train", *(f"{key}={value}" for key, value in small.items())]
        done = run_command([*first, "training.num_steps=1", "--out", name[0]], tmp_path)
        assert done.returncode == 0, done.stderr
        words = ["training.num_steps=2" if word.startswith("training.num_steps") else word for word in words]
    if words[0] in ("train", "parity", "memory", "profile") and "--cfg" not in words:
        words += [f"{key}={value}" for key, value in small.items()]
        words = ["training.num_steps=2" if word.startswith("training.num_steps") else word for word in words]
    if words[0] == "bench":
        words += COMPUTE_BENCH if "mode=compute" in words else BENCH[words[1]]
    done = run_command(words, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_console_script_is_the_command() -> None:
    """The other commands here are started from Python, by the function that this script calls."""
    done = run([str(BIN / "counterflow"), "--version"], ROOT)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("line", [line for line in commands() if line.startswith("make")])
def test_make_target_of_the_docs_exists(line: str) -> None:
    done = run(["make", "--dry-run", *shlex.split(line)[1:]], ROOT)
    assert done.returncode == 0, done.stderr


def test_every_other_command_of_the_docs_is_known() -> None:
    """torchrun lines: one node's is run by tests of the library and the launcher, two nodes' cannot be here."""
    others = [line for line in commands() if not line.startswith(("counterflow", "make"))]
    assert all("docs/examples/own_loop.py" in line or "-m counterflow train" in line for line in others), (
        others
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert target.startswith("http") or (page.parent / target).exists(), target


def test_the_table_of_compositions_is_the_codes() -> None:
    text = (ROOT / "docs" / "compositions.md").read_text()
    table = text.split("<!-- compositions -->\n")[1].split("<!-- /compositions -->")[0]
    assert table == to_markdown()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_known_paths_are_named(page: Path) -> None:
    """Files, folders and dotted names of the code; paths are relative to the repository."""
    text = page.read_text()
    paths = re.findall(rf"(?<![\w./-])(?:{FOLDERS})/[\w./-]*\w/?", text)
    missing = [path for path in paths if not (ROOT / path).exists()]
    missing += [name for name in re.findall(r"\bcounterflow(?:\.\w+)+", text) if not is_importable(name)]
    assert not missing


def test_unknown_paths_are_found() -> None:
    assert is_importable("counterflow.parallel.pipeline.api.build_pipeline")
    assert not is_importable("counterflow.parallel.pipeline.api.no_such_function")
    assert not is_importable("counterflow.parallel.no_such_module")
