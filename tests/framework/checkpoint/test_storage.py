from __future__ import annotations

import json
import math
import pickle
import random
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open

from counterflow.framework.checkpoint.manifest import CheckpointError, latest, read_metadata, step_folder
from counterflow.framework.checkpoint.shard import TensorShard, tensor_shards
from counterflow.framework.checkpoint.storage import load, read_rank_state, save
from counterflow.parallel.parameters import ParameterPlacement
from tests.rank_pool import RankError, RankPool

SHAPES: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "model.embedding.weight": ((10, 6), torch.float32),
    "model.layers.0.qkv": ((3, 4, 5), torch.bfloat16),
    "model.norm.weight": ((7,), torch.float32),
    "optimizer.exp_avg.norm.weight": ((7,), torch.float32),
    "data.order": ((5, 3), torch.int64),
    "optimizer.step": ((), torch.float32),
}


def _world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _whole(name: str) -> torch.Tensor:
    shape, dtype = SHAPES[name]
    generator = torch.Generator().manual_seed(len(name))
    if dtype == torch.int64:
        return torch.randint(-(2**60), 2**60, shape, generator=generator)
    return torch.randn(shape, generator=generator).to(dtype)


def _flat_shards(seed: int, *, filled: bool) -> tuple[list[TensorShard], list[tuple[str, int, torch.Tensor]]]:
    """This rank's random flat range of every tensor; the same cuts are drawn on every rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    source = random.Random(seed)
    shards: list[TensorShard] = []
    flats: list[tuple[str, int, torch.Tensor]] = []
    for name, (shape, dtype) in SHAPES.items():
        numel = math.prod(shape)
        cuts = [0, *sorted(source.randint(0, numel) for _ in range(size - 1)), numel]
        start, stop = cuts[rank], cuts[rank + 1]
        flat = _whole(name).reshape(-1)[start:stop].clone()
        if not filled:
            flat = torch.zeros(stop - start, dtype=dtype)
        flats.append((name, start, flat))
        shards += tensor_shards(name, flat, start, shape, ParameterPlacement(global_shape=shape))
    return shards, flats


def _save_shards(folder: Path, seed: int) -> int:
    shards, _ = _flat_shards(seed, filled=True)
    rank_state = {"rank": dist.get_rank()}
    save(
        folder,
        shards,
        {"config_hash": "abc", "from": dist.get_rank()},
        group=_world(),
        rank_state=rank_state,
    )
    return max(Counter(shard.name for shard in shards).values(), default=0)


def _load_shards(folder: Path, seed: int) -> dict[str, Any]:
    shards, flats = _flat_shards(seed, filled=False)
    metadata = load(folder, shards, group=_world())
    for name, start, flat in flats:
        assert torch.equal(flat, _whole(name).reshape(-1)[start : start + flat.numel()]), name
    metadata["state"] = read_rank_state(folder, dist.get_rank(), dist.get_world_size())
    return metadata


@pytest.mark.parametrize("seed", range(3))
def test_any_flat_sharding_loads_what_any_other_saved(ranks: RankPool, tmp_path: Path, seed: int) -> None:
    folder = step_folder(tmp_path, 12)
    boxes_per_tensor = ranks.run(_save_shards, 4, folder, seed)
    assert max(boxes_per_tensor) > 1
    for size in (1, 2, 3, 4):
        results = ranks.run(_load_shards, size, folder, seed + 100)
        for rank, result in enumerate(results):
            state = result.pop("state")
            assert state == ({"rank": rank} if size == 4 else None)
            assert result == {"step": 12, "config_hash": "abc", "from": 0}
    assert latest(tmp_path) == folder
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]


def _read_chunks(folder: Path) -> dict[str, list[tuple[str, torch.Tensor]]]:
    """Key -> tensor of each file, by the safetensors library."""
    found: dict[str, list[tuple[str, torch.Tensor]]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found[path.name] = [(key, file.get_tensor(key)) for key in file.keys()]  # noqa: SIM118
    return found


def test_files_are_plain_safetensors_and_json(ranks: RankPool, tmp_path: Path) -> None:
    folder = step_folder(tmp_path, 1)
    ranks.run(_save_shards, 3, folder, 5)
    assert sorted(path.name for path in folder.iterdir()) == [
        "index.json",
        "metadata.json",
        "rank-00000.safetensors",
        "rank-00001.safetensors",
        "rank-00002.safetensors",
    ]
    rebuilt = {name: torch.zeros_like(_whole(name)) for name in SHAPES}
    for chunks in _read_chunks(folder).values():
        for key, tensor in chunks:
            name, _, ranges = key.removesuffix("]").partition("[")
            part = tuple(slice(*map(int, text.split(":"))) for text in ranges.split(",") if text)
            rebuilt[name][part] = tensor
    for name, tensor in rebuilt.items():
        assert torch.equal(tensor, _whole(name)), name


def test_nothing_is_a_pickle(ranks: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = step_folder(tmp_path, 1)
    ranks.run(_save_shards, 2, folder, 5)
    for path in folder.rglob("*"):
        data = path.read_bytes()
        assert not zipfile.is_zipfile(path)
        assert path.name != ".metadata"
        # A pickle of protocol 2 or later starts with PROTO and ends with STOP.
        assert data[:1] != b"\x80"
        if path.suffix == ".json":
            json.loads(data)
        else:
            header_bytes = int.from_bytes(data[:8], "little")
            header = json.loads(data[8 : 8 + header_bytes])
            ends = [entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"]
            assert len(data) == 8 + header_bytes + max(ends)  # nothing beside the tensors

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("pickle was used")

    for function in ("dump", "dumps", "load", "loads", "Pickler", "Unpickler"):
        monkeypatch.setattr(pickle, function, refuse)
    monkeypatch.setattr(torch, "save", refuse)
    monkeypatch.setattr(torch, "load", refuse)
    tensor = torch.arange(6.0)
    shard = TensorShard(name="w", global_shape=(6,), offsets=(0,), tensor=tensor)
    save(step_folder(tmp_path, 2), [shard], {}, group=None)
    tensor.zero_()
    load(step_folder(tmp_path, 2), [shard], group=None)
    assert tensor.tolist() == [0, 1, 2, 3, 4, 5]


def _replicated(folder: Path) -> None:
    tensors = {f"layer.{i}": torch.full((64, 8), float(i)) for i in range(8)}
    own = torch.full((1, 4), float(dist.get_rank()))
    shards = [
        TensorShard(name=name, global_shape=(64, 8), offsets=(0, 0), tensor=tensor)
        for name, tensor in tensors.items()
    ]
    shards.append(
        TensorShard(name="own", global_shape=(4, 4), offsets=(dist.get_rank(), 0), tensor=own),
    )
    save(folder, shards, {}, group=_world())
    for shard in shards:
        shard.tensor.zero_()
    load(folder, shards, group=_world())
    assert torch.equal(own, torch.full((1, 4), float(dist.get_rank())))
    for i, tensor in enumerate(tensors.values()):
        assert torch.equal(tensor, torch.full((64, 8), float(i)))


def test_copies_are_written_once_and_evenly(ranks: RankPool, tmp_path: Path) -> None:
    folder = step_folder(tmp_path, 1)
    ranks.run(_replicated, 4, folder)
    chunks = _read_chunks(folder)
    keys = [key for rank_chunks in chunks.values() for key, _ in rank_chunks]
    assert len(keys) == len(set(keys)) == 12
    assert [sum(tensor.nbytes for _, tensor in rank_chunks) for rank_chunks in chunks.values()] == [
        2 * 64 * 8 * 4 + 16
    ] * 4


def _padded(folder: Path, tensor_ranks: int, *, saving: bool) -> None:
    """10 rows padded to the tensor axis, then cut flat over the replica axis."""
    rank, size = dist.get_rank(), dist.get_world_size()
    replica_ranks = size // tensor_ranks
    replica_rank, tensor_rank = divmod(rank, tensor_ranks)
    width = 4 * -(-10 // (4 * tensor_ranks))
    whole = torch.arange(10.0 * 3).view(10, 3)
    padded = torch.cat([whole, torch.full((width * tensor_ranks - 10, 3), -1.0)])
    local = padded[tensor_rank * width : (tensor_rank + 1) * width].reshape(-1)
    share = -(-local.numel() // replica_ranks)
    start = replica_rank * share
    flat = local[start : start + share].clone() if saving else torch.full((share,), -1.0)
    placement = ParameterPlacement(global_shape=(10, 3), tensor_dim=0, tensor_start=tensor_rank * width)
    shards = tensor_shards("head.weight", flat, start, (width, 3), placement)
    if saving:
        save(folder, shards, {}, group=_world())
        return
    load(folder, shards, group=_world())
    expected = local[start : start + share]
    assert torch.equal(flat[: expected.numel()], expected)


def test_padding_is_neither_saved_nor_loaded(ranks: RankPool, tmp_path: Path) -> None:
    folder = step_folder(tmp_path, 1)
    ranks.run(_padded_save, 4, folder, 2)
    assert json.loads((folder / "index.json").read_text())["tensors"]["head.weight"]["shape"] == [10, 3]
    for size, tensor_ranks in ((1, 1), (2, 2), (4, 4), (3, 1)):
        ranks.run(_padded_load, size, folder, tensor_ranks)


def _padded_save(folder: Path, tensor_ranks: int) -> None:
    _padded(folder, tensor_ranks, saving=True)


def _padded_load(folder: Path, tensor_ranks: int) -> None:
    _padded(folder, tensor_ranks, saving=False)


def _shard(name: str, tensor: torch.Tensor, shape: tuple[int, ...] | None = None, at: int = 0) -> TensorShard:
    offsets = (at,) + (0,) * (tensor.dim() - 1)
    return TensorShard(name=name, global_shape=shape or tuple(tensor.shape), offsets=offsets, tensor=tensor)


def test_equal_boxes_on_one_rank_are_all_filled(tmp_path: Path) -> None:
    folder = step_folder(tmp_path, 1)
    save(folder, [_shard("w", torch.arange(4.0))] * 2, {}, group=None)
    first, second, part = torch.zeros(4), torch.zeros(4, dtype=torch.bfloat16), torch.zeros(2)
    load(folder, [_shard("w", first), _shard("w", second), _shard("w", part, (4,), 1)], group=None)
    assert first.tolist() == second.tolist() == [0, 1, 2, 3]
    assert part.tolist() == [1, 2]


def test_strided_and_gradient_tensors_are_filled_in_place(tmp_path: Path) -> None:
    folder = step_folder(tmp_path, 1)
    source = torch.arange(12.0).view(3, 4)
    save(folder, [_shard("w", source.t())], {}, group=None)
    parameter = torch.nn.Parameter(torch.zeros(3, 4))
    load(folder, [_shard("w", parameter.t())], group=None)
    assert torch.equal(parameter.detach(), source)


def test_a_model_that_is_not_the_saved_one_is_refused(tmp_path: Path) -> None:
    folder = step_folder(tmp_path, 1)
    weight = _shard("model.layers.0.weight", torch.zeros(4, 3))
    save(folder, [weight, _shard("count", torch.zeros(2, dtype=torch.int64))], {}, group=None)

    def refused(*shards: TensorShard, match: str) -> None:
        with pytest.raises(ValueError, match=match):
            load(folder, shards, group=None)

    count = _shard("count", torch.zeros(2, dtype=torch.int64))
    refused(
        weight,
        count,
        _shard("model.layers.1.weight", torch.zeros(4, 3)),
        match=r"has no tensor 'model.layers.1.weight' \(it has 'model.layers.0.weight'\)",
    )
    refused(
        _shard("model.layers.0.weight", torch.zeros(4, 5)),
        count,
        match=r"'model.layers.0.weight' has shape \(4, 3\) in .* and shape \(4, 5\) here",
    )
    refused(weight, _shard("count", torch.zeros(2)), match=r"'count' has dtype torch.int64 in .*float32 here")
    refused(weight, match=r"holds 1 tensors that no rank has a place for, such as 'count'.*partial=True")
    assert load(folder, [weight], group=None, partial=True) == {"step": 1}
    with pytest.raises(CheckpointError, match=r"step-00000002/metadata.json' is missing"):
        load(step_folder(tmp_path, 2), [weight], group=None)


def test_boxes_that_are_no_tiling_are_refused(tmp_path: Path) -> None:
    folder = step_folder(tmp_path, 1)
    for shards, match in (
        ([_shard("w", torch.zeros(4), (8,))], "hold 4 of its 8 elements"),
        ([_shard("w", torch.zeros(4), (6,)), _shard("w", torch.zeros(4), (6,), 2)], "shards overlap"),
        (
            [_shard("w", torch.zeros(3), (6,)), _shard("w", torch.zeros(4), (7,), 3)],
            r"shape \(6,\) on one rank",
        ),
        ([_shard("w", torch.zeros(2, dtype=torch.complex64))], "has dtype torch.complex64"),
    ):
        with pytest.raises(ValueError, match=match):
            save(folder, shards, {}, group=None)
    with pytest.raises(ValueError, match="metadata of a checkpoint is JSON"):
        save(folder, [_shard("w", torch.zeros(2))], {"x": torch.zeros(1)}, group=None)
    assert list(tmp_path.iterdir()) == []


def test_the_same_step_is_saved_again(tmp_path: Path) -> None:
    folder = step_folder(tmp_path, 1)
    for value in (1.0, 2.0):
        save(folder, [_shard("w", torch.full((3,), value))], {"value": value}, group=None)
    tensor = torch.zeros(3)
    assert load(folder, [_shard("w", tensor)], group=None)["value"] == 2.0
    assert tensor.tolist() == [2, 2, 2]
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]
    assert read_metadata(folder) == {"step": 1, "value": 2.0}


def _missing_on_one_rank(folder: Path) -> str:
    shards = [_shard("w", torch.zeros(4))]
    save(folder, shards, {}, group=_world())
    if dist.get_rank() == 2:
        shards.append(_shard("v", torch.zeros(4)))
    with pytest.raises(ValueError, match=r"rank 2: .* has no tensor 'v'") as caught:
        load(folder, shards, group=_world())
    return str(caught.value)


def test_one_rank_s_mistake_is_every_rank_s_error(ranks: RankPool, tmp_path: Path) -> None:
    try:
        messages = ranks.run(_missing_on_one_rank, 3, step_folder(tmp_path, 1))
    except RankError as failure:
        pytest.fail(str(failure))
    assert len(set(messages)) == 1
