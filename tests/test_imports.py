"""Imports go one way: launch -> framework -> models -> parallel -> torch; and Hydra stays in launch/."""

from __future__ import annotations

import ast
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
