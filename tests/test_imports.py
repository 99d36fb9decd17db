"""Imports go one way: launch -> framework -> models -> parallel -> torch; and Hydra stays in launch/."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[1]
_LAYERS = ("parallel", "models", "framework", "launch")
_MODULES = sorted(path for layer in _LAYERS for path in (_ROOT / layer).rglob("*.py"))


def imported(source: str) -> set[str]:
    """Full dotted names of what a module imports, at its top, inside functions and for type checking alike."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide which layer they reach"
            assert node.module is not None
            names.add(node.module)
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "import_module"
            and isinstance(node.args[0], ast.Constant)
        ):
            names.add(str(node.args[0].value))
    return names


def wrong_arrows(layer: str, source: str) -> set[str]:
    """Imports that a module of `layer` may not have."""
    above = set(_LAYERS[_LAYERS.index(layer) + 1 :])
    forbidden = above | {"tests"} | (set() if layer == "launch" else {"conf", "hydra", "omegaconf"})
    return {
        name for name in imported(source) if name.removeprefix("counterflow.").partition(".")[0] in forbidden
    }


def test_there_are_modules_to_read() -> None:
    assert {path.relative_to(_ROOT).parts[0] for path in _MODULES} == set(_LAYERS)


@pytest.mark.parametrize("path", _MODULES, ids=lambda path: str(path.relative_to(_ROOT)))
def test_no_arrow_runs_back(path: Path) -> None:
    layer = path.relative_to(_ROOT).parts[0]
    assert wrong_arrows(layer, path.read_text()) == set()


@pytest.mark.parametrize(
    ("layer", "source", "wrong"),
    [
        ("parallel", "from counterflow.models.config import ModelConfig", {"counterflow.models.config"}),
        (
            "parallel",
            "def f():\n    import counterflow.framework.trainer.build",
            {"counterflow.framework.trainer.build"},
        ),
        ("models", "if TYPE_CHECKING:\n    from counterflow.launch import cli", {"counterflow.launch"}),
        ("framework", "from omegaconf import OmegaConf", {"omegaconf"}),
        ("framework", "import importlib\nimportlib.import_module('hydra')", {"hydra"}),
        ("framework", "from counterflow.models.config import ModelConfig\nimport torch", set()),
        ("launch", "import hydra\nfrom counterflow.framework import trainer", set()),
        ("launch", "from tests import rank_pool", {"tests"}),
    ],
)
def test_the_reader_sees_wrong_arrows(layer: str, source: str, wrong: set[str]) -> None:
    assert wrong_arrows(layer, source) == wrong


_WITH_ROOMS = ("launch", "framework", "framework.optim", "models", "parallel", "parallel.pipeline")


def room_of(module: str) -> str:
    """What a module belongs to: its package or, where that has packages in it, the module itself."""
    is_package = (_ROOT / module.replace(".", "/") / "__init__.py").exists()
    package = module if is_package else module.rpartition(".")[0]
    return module if package in _WITH_ROOMS else package


def imported_modules(source: str) -> set[str]:
    """What `imported` says, and the modules that are imported out of their package, without the root."""
    names = imported(source)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name.removeprefix("counterflow.") for name in names}


def arrows_between_rooms() -> dict[tuple[str, str], list[str]]:
    """(from, to) of every import that leaves a room, with the modules that have it."""
    names = {
        ".".join(path.relative_to(_ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in _MODULES
    }
    found: dict[tuple[str, str], list[str]] = {}
    for name, path in names.items():
        for target in imported_modules(path.read_text()):
            if target in names and room_of(name) != room_of(target):
                found.setdefault((room_of(name), room_of(target)), []).append(name)
    return found


def test_no_two_rooms_import_each_other() -> None:
    arrows = arrows_between_rooms()
    both_ways = {(one, other) for one, other in arrows if one < other and (other, one) in arrows}
    assert not both_ways, {pair: (arrows[pair], arrows[pair[::-1]]) for pair in both_ways}


def test_no_import_lacks_the_root() -> None:
    """A bare `models` would be whatever package of that name comes first."""
    bare = {*_LAYERS, "conf"}
    found = {
        str(path.relative_to(_ROOT)): names
        for path in _MODULES
        if (names := {name for name in imported(path.read_text()) if name.partition(".")[0] in bare})
    }
    assert not found


def test_the_command_works_beside_other_packages_of_the_same_names(tmp_path: Path) -> None:
    for name in (*_LAYERS, "conf"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise ImportError('the wrong one')\n")
    words = [sys.executable, "-m", "counterflow", "train", "--cfg", "job"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "pipeline_parallel_size" in done.stdout
