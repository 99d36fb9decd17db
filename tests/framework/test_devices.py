"""Which device a rank gets, decided from counts that are injected: no GPU is asked."""

from __future__ import annotations

import pytest

from counterflow.framework.config.tree import DeviceChoice
from counterflow.framework.devices import Devices, count_problems, device_problems, shared_devices
from tests.tiny import tiny_config


@pytest.mark.parametrize(
    ("choice", "num_gpus", "kind"),
    [("auto", 0, "cpu"), ("auto", 8, "cuda"), ("cpu", 8, "cpu"), ("cuda", 8, "cuda")],
)
def test_the_device_is_the_chosen_one(choice: DeviceChoice, num_gpus: int, kind: str) -> None:
    assert Devices(num_gpus=num_gpus).kind(choice) == kind
    assert count_problems(choice, Devices(num_gpus=num_gpus), 8) == []


@pytest.mark.parametrize(
    ("choice", "devices", "num_ranks", "said"),
    [
        ("cuda", Devices(num_gpus=0, has_cuda=False), 1, "built without CUDA"),
        ("cuda", Devices(num_gpus=0), None, "torch finds no GPU here"),
        ("cuda", Devices(num_gpus=0, visible=""), 1, "CUDA_VISIBLE_DEVICES=''"),
        ("cuda", Devices(num_gpus=2), 4, "4 ranks on this node and 2 GPUs"),
        ("auto", Devices(num_gpus=1), 2, "2 ranks on this node and 1 GPU,"),
        ("auto", Devices(num_gpus=4, visible="0,1,2,3"), 8, "4 GPUs with CUDA_VISIBLE_DEVICES='0,1,2,3'"),
    ],
)
def test_a_device_that_is_not_there_is_refused_with_a_remedy(
    choice: DeviceChoice, devices: Devices, num_ranks: int | None, said: str
) -> None:
    (problem,) = count_problems(choice, devices, num_ranks)
    assert problem.startswith(f"device={choice}: ")
    assert said in problem
    assert problem.endswith("set device=cpu")


def test_ranks_that_each_see_one_gpu_take_it() -> None:
    one = Devices(num_gpus=1, visible="3")
    assert count_problems("auto", one, 4, joined=True) == []
    assert [one.index(rank) for rank in range(4)] == [0, 0, 0, 0]
    assert [Devices(num_gpus=4).index(rank) for rank in range(4)] == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="LOCAL_RANK=2: this process sees 2 GPUs"):
        Devices(num_gpus=2).index(2)


def test_two_ranks_on_one_gpu_are_named() -> None:
    def seen(uuid: str, visible: str = "") -> dict[str, str]:
        return {"uuid": uuid, "visible": visible}

    (problem,) = shared_devices([seen("a"), seen("b"), seen("a")])
    assert "ranks 0 and 2 would share a GPU (a)" in problem
    assert shared_devices([seen("a", "MIG-1"), seen("a", "MIG-2"), {}, {}]) == []


def test_the_cpu_is_chosen_where_there_are_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert len(device_problems(tiny_config(dp=2), 2)) == 1
    on_cpu = tiny_config(dp=2, device="cpu", recompute={"mode": "auto", "budget_bytes": 1 << 30})
    assert device_problems(on_cpu, 2) == []
    (problem,) = device_problems(
        tiny_config(device="cpu", precision={"linear": "fp8"}, model={"hidden_size": 32})
    )
    assert "device=cpu leaves them unused" in problem
