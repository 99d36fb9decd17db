"""`counterflow parity` and `counterflow memory` as commands; their numbers are tested in tests/framework."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from counterflow.framework.checks.parity import Parity, to_mapping
from counterflow.framework.checks.rules import check
from counterflow.launch.commands.parity import print_result
from counterflow.launch.compose import compose_config
from counterflow.launch.parity_grid import grid
from counterflow.launch.runs import layout_text
from tests.commands import run_command

_TINY = [
    "model.num_layers=2",
    "model.hidden_size=32",
    "model.intermediate_size=48",
    "parallel.tensor_parallel_size=1",
    "parallel.data_parallel_size=1",
    "schedule.num_microbatches=4",
    "data.seq_length=16",
    "data.micro_batch_size=1",
    "data.max_bytes=400000",
    "tokenizer.vocab_size=300",
]


def _json(command: str, tmp_path: Path, *words: str) -> Any:
    # The folder of this session's test folders: tests with the same text have it prepared once.
    overrides = [
        *_TINY,
        f"data.cache_dir={tmp_path.parent / 'cache'}",
        f"launcher.runs_dir={tmp_path / 'runs'}",
    ]
    done = run_command([command, "--json", *words, *overrides], tmp_path)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    return json.loads(line)


def test_the_grid_is_every_layout_that_fits_eight_ranks() -> None:
    layouts = list(grid())
    # 11 meshes of at most 8 ranks, 4 of them with one stage, which dualpipe does not fit; 4 stages of ZeRO.
    assert len(layouts) == (7 * 3 + 4 * 2) * 4
    assert len(set(map(tuple, layouts))) == len(layouts)
    for overrides in (layouts[0], layouts[-1]):
        check(compose_config(overrides))
    assert layout_text(compose_config(layouts[-1])) == "tp2 pp4 dp1 zero3 dualpipe"


def test_the_grid_of_a_model_with_experts() -> None:
    layouts = list(grid(has_experts=True))
    # Expert x tensor x copies in as many stages as eight ranks hold: 8 meshes of one stage, which dualpipe does not
    # fit, 6 of two and 2 of four; 3 stages of ZeRO.
    assert len(layouts) == (8 * 3 + 8 * 4) * 3
    assert len(set(map(tuple, layouts))) == len(layouts)
    for overrides in (layouts[0], layouts[-1]):
        check(compose_config([*overrides, "model=tiny_deepseek_v3"]))
    last = compose_config([*layouts[-1], "model=tiny_mixtral"])
    assert layout_text(last) == "tp2 pp2 dp2 ep4 zero3 zbv"


@pytest.mark.parametrize("different", [None, "step 3, layer 1"])
def test_what_is_said_of_routing(capsys: pytest.CaptureFixture[str], different: str | None) -> None:
    parity = Parity(
        loss_rel=1e-8,
        mtp_loss_rel=2e-8,
        first_norm_rel=0.0,
        norm_rel=0.0,
        grad_rel=3e-7,
        param_rel=4e-7,
        param_of_bound=0.01,
        worst_grad="a",
        worst_param="b",
        num_steps=5,
        num_routed_layers=4,
        different_routing=different,
    )
    print_result({"layout": "ep2", **to_mapping(parity)})
    said = capsys.readouterr().out
    assert "MTP loss    2.00e-08" in said
    if different is None:
        assert "the loads of all experts are equal in 4 layers and 5 steps" in said
        assert "routing hold the fp32 bound" in said
    else:
        assert "the loads of experts DIFFER, first in step 3, layer 1" in said
        assert "routing DO NOT HOLD" in said


def test_parity_of_two_stages_holds(tmp_path: Path) -> None:
    result = _json("parity", tmp_path)
    assert result["layout"] == "tp1 pp2 dp1 zero3 dualpipe"
    assert result["holds"] is True
    assert 0 <= result["loss_rel"] <= 1e-5
    assert 0 <= result["grad_rel"] <= 1e-5
    assert result["param_rel"] < 1e-3
    # The tensors that were compared are gone, the config stays.
    assert [path.name for path in Path(result["run_dir"]).iterdir()] == ["config.yaml"]


def test_memory_of_a_sweep(tmp_path: Path) -> None:
    sharded, whole = _json("memory", tmp_path, "--measure", "--multirun", "zero.stage=3,0")
    assert len(sharded["ranks"]) == 2
    for rank in sharded["ranks"]:
        assert rank["measured_peak"] == pytest.approx(rank["predicted_peak"], rel=0.03)
        assert sum(rank["parts"].values()) == rank["measured_peak"]
    # Two copies of each stage: sharded over the pair they cost half of two whole ones.
    assert sharded["persistent_mean"] / whole["persistent_mean"] == pytest.approx(0.5, rel=0.02)


def test_memory_is_predicted_without_a_rank(tmp_path: Path) -> None:
    result = _json("memory", tmp_path)
    assert [rank["pipeline"] for rank in result["ranks"]] == [0, 1]
    assert result["predicted_max"] == max(rank["predicted_peak"] for rank in result["ranks"])
    assert all(rank["measured_peak"] is None and rank["peak_action"] for rank in result["ranks"])
    assert "run_dir" not in result


def test_memory_as_another_program(tmp_path: Path) -> None:
    result = _json("memory", tmp_path, "--as", "megatron", "schedule=1f1b")
    assert result["as"] == "megatron"
    for rank in result["ranks"]:
        assert sum(rank["parts"].values()) == rank["predicted_peak"]
