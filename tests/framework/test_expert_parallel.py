"""Experts in the framework: reduced, sharded, counted and saved over the ranks that hold the same ones."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import counterflow.launch.commands.train
from counterflow.framework.checkpoint.shard import TensorShard, tensor_shards
from counterflow.framework.checkpoint.storage import load, save
from counterflow.framework.config.tree import TrainConfig
from counterflow.framework.data.prepare import PreparedData
from counterflow.framework.errors import ConfigError
from counterflow.framework.metrics.record import StepRecord
from counterflow.framework.optim.config import OptimizerConfig
from counterflow.framework.optim.optimizer import ModelOptimizer
from counterflow.launch.command import LaunchOptions
from counterflow.parallel.collectives import Axis
from counterflow.parallel.mesh import Mesh, MeshConfig, build_mesh
from counterflow.parallel.parameters import ParameterPlacement, place
from counterflow.parallel.zero.config import ZeroConfig
from counterflow.parallel.zero.context import ReplicaAxes, ZeroContext
from counterflow.parallel.zero.stage import ShardedStage
from tests.rank_pool import RankPool
from tests.runs import run_steps
from tests.tiny import MIXTURES, merged, run_context, tiny_config

NUM_EXPERTS = 4
STACK = (NUM_EXPERTS, 3, 2)


class Toy(nn.Module):
    """A weight cut over the tensor axis, a whole one, and a stack of experts, none of which computes anything."""

    def __init__(self, mesh: Mesh, experts: tuple[int, ...]) -> None:
        super().__init__()
        tensor = Axis(group=mesh.tensor)
        self.cut = place(
            nn.Parameter(torch.empty(2, 3)),
            ParameterPlacement(global_shape=(2 * tensor.size, 3), tensor_dim=0, tensor_start=2 * tensor.rank),
        )
        self.whole = nn.Parameter(torch.empty(5))
        self.experts = place(
            nn.Parameter(torch.empty(len(experts), *STACK[1:])),
            ParameterPlacement(global_shape=STACK, experts=experts),
        )


def shares(size: int) -> tuple[tuple[int, ...], ...]:
    """Experts dealt out one by one, so that neighbours in a share are no neighbours in the stack."""
    return tuple(tuple(range(rank, NUM_EXPERTS, size)) for rank in range(size))


def toy_stage(config: MeshConfig, zero: int, mirrored: bool) -> tuple[Mesh, ShardedStage, Toy]:
    mesh = build_mesh(config, mirrored=mirrored)
    module = Toy(mesh, shares(config.expert_parallel_size)[Axis(group=mesh.expert).rank])
    stage = ShardedStage(
        module,
        ZeroContext(
            config=ZeroConfig(stage=zero),  # type: ignore[arg-type]
            replica=ReplicaAxes.of(Axis(group=mesh.replica)),
            tensor=Axis(group=mesh.tensor),
            expert_replica=ReplicaAxes.of(Axis(group=mesh.expert_replica)),
        ),
    )
    return mesh, stage, module


def optimizer_of(mesh: Mesh, stage: ShardedStage) -> ModelOptimizer:
    return ModelOptimizer(
        [stage], OptimizerConfig(), tensor=Axis(group=mesh.tensor), world=Axis(group=mesh.world)
    )


def boxes_of(stage: ShardedStage, which: str) -> list[TensorShard]:
    return [
        shard
        for unit in stage.units
        for fragment in unit.fragments()
        for shard in tensor_shards(
            fragment.slot.name,
            getattr(fragment, which),
            fragment.start,
            fragment.slot.shape,
            fragment.slot.placement,
        )
    ]


def whole_tensors(shards: list[TensorShard]) -> dict[str, Tensor]:
    """Every tensor put together from the shards of all ranks; copies must be equal."""
    mine = [(shard.name, shard.global_shape, shard.offsets, shard.tensor.clone()) for shard in shards]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    found: dict[str, Tensor] = {}
    for name, shape, offsets, values in (shard for each in everyone for shard in each):
        target = found.setdefault(name, torch.full(shape, torch.nan))
        part = target[tuple(slice(o, o + s) for o, s in zip(offsets, values.shape, strict=True))]
        assert (part.isnan() | (part == values)).all(), name
        part.copy_(values)
    assert not any(tensor.isnan().any() for tensor in found.values())
    return found


def reduced(config: MeshConfig, zero: int, mirrored: bool) -> tuple[dict[str, Tensor], float]:
    """Rank r gives every element of expert e's gradient r + 1 + e, and 1 to the rest: the sums, and the norm."""
    mesh, stage, module = toy_stage(config, zero, mirrored)
    stage.begin_step()
    stage.unshard()
    stage.wait_unshard()
    for name, parameter in module.named_parameters():
        buffer = stage.gradient_buffer(parameter)
        buffer.fill_(1.0)
        if name == "experts":
            held = torch.tensor(shares(config.expert_parallel_size)[Axis(group=mesh.expert).rank])
            buffer.copy_((mesh.rank + 1.0 + held)[:, None, None].expand_as(buffer))
    stage.reduce_grad()
    stage.finish_step()
    return whole_tensors(boxes_of(stage, "grad")), optimizer_of(mesh, stage).gradient_norm()


MESHES = {
    "dp2-tp2-ep2": (MeshConfig(data_parallel_size=2, tensor_parallel_size=2, expert_parallel_size=2), False),
    "dp2-tp2-ep4": (MeshConfig(data_parallel_size=2, tensor_parallel_size=2, expert_parallel_size=4), False),
    "dp2-tp2-ep1": (MeshConfig(data_parallel_size=2, tensor_parallel_size=2), False),
    "mirror-tp2-ep2": (
        MeshConfig(pipeline_parallel_size=2, tensor_parallel_size=2, expert_parallel_size=2), True
    ),
    "mirror-dp2-tp2-ep2": (
        MeshConfig(
            pipeline_parallel_size=2, data_parallel_size=2, tensor_parallel_size=2, expert_parallel_size=2
        ),
        True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("name", MESHES)
def test_gradients_of_experts_are_summed_over_their_replicas_and_counted_once(
    ranks: RankPool, name: str, zero: int
) -> None:
    config, mirrored = MESHES[name]
    tensor_size, expert_size = config.tensor_parallel_size, config.expert_parallel_size
    num_copies = config.world_size // tensor_size
    # In the names of global ranks: those congruent to e mod the size hold expert e.
    expected = torch.stack(
        [
            torch.full(
                STACK[1:], sum(r + 1.0 + e for r in range(e % expert_size, config.world_size, expert_size))
            )
            for e in range(NUM_EXPERTS)
        ]
    )
    norm = math.sqrt(
        expected.square().sum().item() + num_copies**2 * (5 + 3 * 2 * tensor_size)
    )  # `whole` once, the tensor ranks' parts of `cut`
    for gradients, found_norm in ranks.run(reduced, config.world_size, config, zero, mirrored):
        assert torch.equal(gradients["experts"], expected)
        assert torch.equal(gradients["cut"], torch.full((2 * tensor_size, 3), float(num_copies)))
        assert found_norm == pytest.approx(norm, rel=1e-6)


def saved(config: MeshConfig, zero: int, mirrored: bool, folder: Path) -> dict[str, Tensor]:
    mesh, stage, _ = toy_stage(config, zero, mirrored)
    save(folder, boxes_of(stage, "master"), {}, group=mesh.world)
    return whole_tensors(boxes_of(stage, "master"))


def loaded(config: MeshConfig, zero: int, mirrored: bool, folder: Path) -> dict[str, Tensor]:
    mesh, stage, _ = toy_stage(config, zero, mirrored)
    shards = boxes_of(stage, "master")
    for shard in shards:
        shard.tensor.zero_()
    load(folder, shards, group=mesh.world)
    return whole_tensors(shards)


@pytest.mark.parametrize(
    ("first", "second"),
    [("dp2-tp2-ep2", "dp2-tp2-ep4"), ("dp2-tp2-ep4", "dp2-tp2-ep1"), ("mirror-dp2-tp2-ep2", "dp2-tp2-ep4")],
)
@pytest.mark.parametrize("zero", [0, 3])
def test_any_share_of_experts_loads_what_any_other_saved(
    ranks: RankPool, tmp_path: Path, first: str, second: str, zero: int
) -> None:
    folder = tmp_path / "step-00000001"
    config, mirrored = MESHES[first]
    before = ranks.run(saved, config.world_size, config, zero, mirrored, folder)[0]
    config, mirrored = MESHES[second]
    after = ranks.run(loaded, config.world_size, config, 3 - zero, mirrored, folder)[0]
    assert before["experts"].std() > 0, "all alike would be equal whatever was loaded"
    assert torch.equal(after["experts"], before["experts"])
    assert torch.equal(after["cut"], before["cut"])


# ------------------------------------------------------------------------------------------------ whole runs

LAYOUT: dict[str, Any] = {"pp": 2, "dp": 2, "schedule": "dualpipe", "zero": 3, "num_microbatches": 4}


NUM_STEPS, SAVED = 4, 2


def moe_config(name: str, ep: int, *, resume_from: Path | None = None, **layout: Any) -> TrainConfig:
    return tiny_config(
        **{**LAYOUT, **layout},
        parallel={"expert_parallel_size": ep},
        model=MIXTURES[name],
        training={"num_steps": NUM_STEPS, "eval_interval_steps": NUM_STEPS - 1},
        checkpoint={
            "enabled": True,
            "interval_steps": SAVED,
            "resume": None if resume_from is None else str(resume_from),
        },
    )


def what_is_learned(record: StepRecord) -> tuple[Any, ...]:
    assert record.moe is not None
    return record.loss, record.mtp_loss, record.grad_norm, record.validation_loss, record.moe.layers


class WholeRuns:
    """Runs that nothing disturbs, each made once; what comes after one starts from a copy of its folder."""

    def __init__(self, ranks: RankPool, data: PreparedData, folder: Path) -> None:
        self._ranks, self._data, self._folder = ranks, data, folder
        self._records: dict[TrainConfig, tuple[list[StepRecord], Path]] = {}

    def stopped(self, config: TrainConfig, folder: Path) -> list[StepRecord]:
        """The records of the whole run; in `folder` is what it had saved after `SAVED` steps."""
        if config not in self._records:
            run = run_context(self._data, self._folder / str(len(self._records)))
            records = self._ranks.run(run_steps, config.parallel.world_size, config, run, None)[0]
            self._records[config] = records, run.run_dir
        records, made = self._records[config]
        shutil.copytree(made, folder, dirs_exist_ok=True)
        shutil.rmtree(folder / "checkpoints" / f"step-{NUM_STEPS:08}")
        return records


@pytest.fixture(scope="module")
def whole_runs(
    ranks: RankPool, tiny_data: PreparedData, tmp_path_factory: pytest.TempPathFactory
) -> WholeRuns:
    return WholeRuns(ranks, tiny_data, tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_a_resumed_run_is_bitwise_the_undisturbed_one(
    ranks: RankPool, tiny_data: PreparedData, whole_runs: WholeRuns, tmp_path: Path, name: str
) -> None:
    """Biases and the fractions of the batch before go on as they were, and evaluation in between moves neither."""
    whole = whole_runs.stopped(moe_config(name, 2), tmp_path)
    resumed = moe_config(name, 2, resume_from=tmp_path)
    after = ranks.run(run_steps, 4, resumed, run_context(tiny_data, tmp_path), None)[0]
    assert whole[NUM_STEPS - 2].validation_loss is not None
    assert list(map(what_is_learned, after)) == list(map(what_is_learned, whole[SAVED:]))


ONE_PROCESS: dict[str, Any] = {
    "ep": 1, "pp": 1, "dp": 1, "schedule": "1f1b", "zero": 0, "num_microbatches": 16,
}  # fmt: skip
FOUR_SHARES: dict[str, Any] = {
    "ep": 4, "pp": 1, "dp": 4, "schedule": "1f1b", "zero": 1, "num_microbatches": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        ("deepseek_v3", {"ep": 2}, FOUR_SHARES),
        ("deepseek_v3", {"ep": 4, "dp": 4}, ONE_PROCESS),
        ("deepseek_v3", {"ep": 1}, {"ep": 2, "tp": 2, "schedule": "zbv"}),
        ("qwen3_moe", {"ep": 2}, FOUR_SHARES),
    ],
    ids=str,
)
def test_a_run_goes_on_with_its_experts_on_other_ranks(
    ranks: RankPool,
    tiny_data: PreparedData,
    whole_runs: WholeRuns,
    tmp_path: Path,
    name: str,
    first: dict[str, Any],
    second: dict[str, Any],
) -> None:
    """Every expert's weights and optimizer state find it by its index, and every layer's router its bias."""
    whole = whole_runs.stopped(moe_config(name, **first), tmp_path)
    other = moe_config(name, **second, resume_from=tmp_path)
    run = run_context(tiny_data, tmp_path)
    after = ranks.run(run_steps, other.parallel.world_size, other, run, None)[0]
    assert [record.step for record in after] == list(range(SAVED, NUM_STEPS))
    for found, expected in zip(after, whole[SAVED:], strict=True):
        assert found.loss == pytest.approx(expected.loss, rel=1e-6)
        assert found.mtp_loss == expected.mtp_loss or found.mtp_loss == pytest.approx(
            expected.mtp_loss, rel=1e-6
        )
        assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
        assert found.moe is not None
        assert expected.moe is not None
        assert [each.load for each in found.moe.layers] == [each.load for each in expected.moe.layers]


def test_another_number_of_experts_is_refused_before_a_rank_starts(
    ranks: RankPool, tiny_data: PreparedData, tmp_path: Path
) -> None:
    run = run_context(tiny_data, tmp_path)
    ranks.run(run_steps, 4, moe_config("mixtral", 2), run, SAVED)
    six = merged(MIXTURES["mixtral"], {"moe": {"num_experts": 6}})
    for model, number in ((six, 6), ({}, 0)):
        config = tiny_config(**LAYOUT, model=model, checkpoint={"enabled": True, "resume": str(tmp_path)})
        with pytest.raises(ConfigError, match=f"model.moe.num_experts={number}: .* with 4 experts") as told:
            counterflow.launch.commands.train.run(config, LaunchOptions())
        assert "set model.moe.num_experts=4" in str(told.value)


def test_records_say_what_the_routers_did(ranks: RankPool, tiny_data: PreparedData, tmp_path: Path) -> None:
    config = moe_config("deepseek_v3", 2)
    records = ranks.run(run_steps, 4, config, run_context(tiny_data, tmp_path), 2)
    first = records[0][0]
    assert first.moe is not None
    # The layers 1 to 3 have experts, and the MTP module behind them.
    assert [each.layer for each in first.moe.layers] == [1, 2, 3, 4]
    assert all(sum(each.load) == pytest.approx(1, abs=1e-5) for each in first.moe.layers)
    assert [[each.moe for each in of] for of in records] == [[each.moe for each in records[0]]] * 4
    # Without the exchange of sizes, which is counted too, the two figures are of the same bytes.
    sent = sum(each.sent_bytes for each in first.moe.layers)
    assert sent == sum(map(sum, first.moe.link_bytes))
    assert sent < first.bytes_by_axis["expert"] < 1.2 * sent
    assert first.bytes_by_axis["expert_data"] > 0, "the mirror holds the same experts"
    again = StepRecord.from_json(first.to_json())
    assert again == first
    scalars = first.scalars()
    assert scalars["mtp_loss"] == first.mtp_loss
    assert scalars["moe/layer_4/entropy"] == first.moe.layers[-1].entropy


def test_forwards_that_are_done_again_count_once(
    ranks: RankPool, tiny_data: PreparedData, tmp_path: Path
) -> None:
    """With post-validation every clipped step that was not expected throws the next one's first forwards away."""
    outcomes: list[list[tuple[Any, ...]]] = []
    for name in ("ordinary", "ahead"):
        config = moe_config("deepseek_v3", 2, schedule="1f1b", zero=1)
        config = replace(
            config,
            optimizer=replace(config.optimizer, post_validation=name == "ahead", max_grad_norm=1e-3),
            training=replace(config.training, num_steps=3, eval_interval_steps=0),
            checkpoint=replace(config.checkpoint, enabled=False),
        )
        records = ranks.run(run_steps, 4, config, run_context(tiny_data, tmp_path), None)[0]
        assert records[0].grad_norm > 1e-3
        outcomes.append(list(map(what_is_learned, records)))
    assert outcomes[0] == outcomes[1]


def test_a_smaller_payload_sends_less_and_trains_alike(
    ranks: RankPool, tiny_data: PreparedData, tmp_path: Path
) -> None:
    found: dict[str, StepRecord] = {}
    for payload in ("compute", "bf16", "fp8"):
        config = tiny_config(
            dp=2,
            parallel={"expert_parallel_size": 2},
            model=MIXTURES["mixtral"],
            comm={"expert_payload": payload},
            training={"num_steps": 2},
        )
        found[payload] = ranks.run(run_steps, 2, config, run_context(tiny_data, tmp_path), None)[0][1]
    sent = [found[payload].bytes_by_axis["expert"] for payload in found]
    assert sent[0] > sent[1] > sent[2]
    for payload in ("bf16", "fp8"):
        assert found[payload].loss != found["compute"].loss
        assert found[payload].loss == pytest.approx(found["compute"].loss, rel=1e-3)


def test_no_bytes_of_experts_where_there_are_none(
    ranks: RankPool, tiny_data: PreparedData, tmp_path: Path
) -> None:
    config = tiny_config(pp=2, training={"num_steps": 1})
    (record,) = ranks.run(run_steps, 2, config, run_context(tiny_data, tmp_path), None)[0]
    assert set(record.bytes_by_axis) == {"tensor", "data", "pipeline", "world"}
    assert record.moe is None
    assert record.mtp_loss is None
