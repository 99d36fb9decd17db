"""ZeRO by blocks: against one process in a cover of its options, against whole stages, and what is whole when."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from counterflow.framework.checks.rules import check
from counterflow.framework.config.tree import TrainConfig
from counterflow.framework.data.prepare import PreparedData
from counterflow.framework.errors import ConfigError
from counterflow.framework.trainer.build import build
from counterflow.framework.trainer.run import RunContext
from counterflow.framework.trainer.step import train_step
from counterflow.parallel.zero.unit import FlatUnit
from tests.framework.checks.test_parity import assert_parity, pairwise
from tests.rank_pool import RankPool
from tests.references import References
from tests.runs import run_steps
from tests.tiny import MIXTURES, layers_for, run_context, tiny_config

AXES: dict[str, tuple[Any, ...]] = {
    "units": ("block", "stage"),
    "reduce": ("step", "microbatch"),
    "reshard_after": ("use", "backward", "step"),
    "shard_size": (None, 1, 2),
    "prefetch_units": (0, 1, 2),
    "schedule": ("1f1b", "zb1p", "zbv", "dualpipe", "dualpipe_v", "interleaved_1f1b"),
    "tp": (1, 2),
    "model": ("dense", "tied", "mixtral", "deepseek_v3"),
    "recompute": ("none", "full"),
}
MODELS: dict[str, dict[str, Any]] = {"dense": {}, "tied": {"tie_embeddings": True}, **MIXTURES}


def config_of(point: dict[str, Any]) -> TrainConfig:
    names = ("units", "reduce", "reshard_after", "shard_size", "prefetch_units")
    has_experts = point["model"] in MIXTURES
    return tiny_config(
        pp=2,
        dp=2,
        tp=point["tp"],
        schedule=point["schedule"],
        zero={"stage": 3, **{name: point[name] for name in names}},
        model={"num_layers": layers_for(point["schedule"], 2), **MODELS[point["model"]]},
        recompute={"mode": point["recompute"]},
        parallel={"expert_parallel_size": 2 if has_experts else 1},
        # Its square root of a second moment near zero makes much of rounding.
        optimizer={"eps": 1e-6} if has_experts else {},
    )


POINTS = pairwise([dict(zip(AXES, values, strict=True)) for values in product(*AXES.values())])


@pytest.mark.parametrize(
    "point",
    [
        # Each option with each schedule is in the first few; all pairs are in the slow ones.
        pytest.param(point, marks=[] if index < 6 else pytest.mark.slow)
        for index, point in enumerate(POINTS)
    ],
    ids=lambda point: "-".join(str(value) for value in point.values()),
)
def test_every_pair_of_options_trains_like_one_process(
    references: References, tmp_path: Path, point: dict[str, Any]
) -> None:
    assert_parity(references.parity(config_of(point), tmp_path))


def losses(config: TrainConfig, run: RunContext) -> list[float]:
    return [record.loss for record in run_steps(config, run)]


@pytest.mark.parametrize("schedule", ["1f1b", "zb1p", "dualpipe"])
def test_blocks_and_stages_train_alike_and_repeat_to_the_bit(
    ranks: RankPool, tiny_data: PreparedData, tmp_path: Path, schedule: str
) -> None:
    def trained(name: str, **zero: Any) -> list[float]:
        config = tiny_config(
            pp=2,
            dp=2,
            schedule=schedule,
            zero={"stage": 3, **zero},
            model={"num_layers": 2},
            training={"num_steps": 3, "eval_interval_steps": 2},
        )
        return ranks.run(losses, 4, config, run_context(tiny_data, tmp_path / name))[0]

    stages = trained("stages", units="stage")
    assert trained("blocks") == pytest.approx(stages, rel=1e-6)
    once = trained("once", reduce="microbatch")
    assert once == pytest.approx(stages, rel=1e-6)
    assert trained("again", reduce="microbatch") == once
    if schedule == "1f1b":
        # When parameters are freed changes nothing, on one rank or on all.
        assert trained("kept", reduce="microbatch", reshard_after=("use", "step")) == once


def whole_at_once(config: TrainConfig, run: RunContext) -> list[int]:
    """The most blocks whose parameters are whole or on their way, each time that one is gathered."""
    seen: list[int] = []
    with build(config, run.data, torch.device("cpu")) as assembly:
        (stage,) = assembly.stages.values()
        gather = FlatUnit.unshard

        def watched(unit: FlatUnit) -> None:
            gather(unit)
            seen.append(sum(each._is_whole or each.is_awaited for each in stage.units))

        FlatUnit.unshard = watched  # type: ignore[method-assign]
        try:
            train_step(assembly, 0)
            train_step(assembly, 1)
        finally:
            FlatUnit.unshard = gather  # type: ignore[method-assign]
        assert not any(unit._is_whole or unit.is_awaited for unit in stage.units), "RESHARD left some"
    return seen


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_so_many_blocks_are_whole_at_once(
    ranks: RankPool, tiny_data: PreparedData, tmp_path: Path, prefetch: int
) -> None:
    zero = {"stage": 3, "prefetch_units": prefetch}
    config = tiny_config(dp=2, zero=zero, num_microbatches=2, model={"num_layers": 6})
    seen = ranks.run(whole_at_once, 2, config, run_context(tiny_data, tmp_path))[0]
    assert max(seen) == 1 + prefetch


def gathered_bytes(config: TrainConfig, run: RunContext) -> tuple[int, dict[str, int]]:
    with build(config, run.data, torch.device("cpu")) as assembly:
        train_step(assembly, 0)
        train_step(assembly, 1)  # the order of a pass is known by now
        (stage,) = assembly.stages.values()
        sizes = {
            block.name: sum(each.numel() for each in block.parameters())
            for block in assembly.modules[0].blocks()  # type: ignore[operator]
        }
        return sum(unit.gathered_bytes for unit in stage.units), sizes


def test_a_step_gathers_what_it_has_to(ranks: RankPool, tiny_data: PreparedData, tmp_path: Path) -> None:
    """Two replicas send half of each block's fp32: for every forward, and for every backward but where a block is
    still whole: the head at its beginning, and the last two blocks of a backward or forward for the pass after it."""
    config = tiny_config(dp=2, zero=3, num_microbatches=2, model={"num_layers": 4})
    found, sizes = ranks.run(gathered_bytes, 2, config, run_context(tiny_data, tmp_path))[0]
    forward, backward = sum(sizes.values()), sum(sizes.values()) - sizes["embedding"]
    kept = 2 * (sizes["head"] + sizes["layers.3"]) + sizes["layers.0"]
    expected = (2 * (forward + backward) - kept) * 4 // 2
    padding = 64 * 4 * 12 * 4
    assert abs(found - expected) <= padding


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ({"stage": 1, "reduce": "microbatch"}, "zero.reduce=microbatch with zero.stage=1"),
        ({"stage": 2, "shard_size": 2}, "zero.shard_size=2 with zero.stage=2"),
        ({"stage": 3, "shard_size": 3}, "zero.shard_size=3: must divide the 2 replicas"),
    ],
)
def test_what_does_not_go_together_is_refused(nodes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(tiny_config(dp=2, zero=nodes))


def resumed(first: TrainConfig, second: TrainConfig, run: RunContext, other: RunContext) -> list[float]:
    run_steps(first, run, stop_after=2)
    return [record.loss for record in run_steps(second, other)]


@pytest.mark.parametrize("reduce", ["step", "microbatch"])
def test_a_checkpoint_of_stages_resumes_with_blocks(
    ranks: RankPool, tiny_data: PreparedData, tmp_path: Path, reduce: str
) -> None:
    def config(resume: str | None, **zero: Any) -> TrainConfig:
        return tiny_config(
            pp=2,
            dp=2,
            zero={"stage": 3, **zero},
            model={"num_layers": 2},
            training={"num_steps": 4, "eval_interval_steps": 0},
            checkpoint={"enabled": True, "interval_steps": 2, "resume": resume},
        )

    whole = ranks.run(losses, 4, config(None, units="stage"), run_context(tiny_data, tmp_path / "whole"))[0]
    found = ranks.run(
        resumed,
        4,
        config(None, units="stage"),
        config(str(tmp_path / "first"), units="block", reduce=reduce),
        run_context(tiny_data, tmp_path / "first"),
        run_context(tiny_data, tmp_path / "second"),
    )[0]
    assert found == pytest.approx(whole[2:], rel=1e-6)
