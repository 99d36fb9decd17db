"""`counterflow doctor`: what it tries, and what it says of a config that lacks something."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from counterflow.framework.checks.doctor import (
    DiskSpeed,
    Finding,
    checkpoint_bytes,
    disk_speed,
    kernels,
    missing,
    num_probe_ranks,
    tried,
)
from counterflow.framework.config.tree import TrainConfig
from counterflow.framework.devices import Devices
from counterflow.launch.cli import main
from tests.models.shapes import shape
from tests.tiny import tiny_config

DISK = DiskSpeed(folder="/runs", bytes_per_s=1e9, free_bytes=1 << 40)


def lacks(config: TrainConfig, *findings: Finding, device_type: str = "cpu", disk: DiskSpeed = DISK) -> str:
    return "\n".join(missing(config, device_type, devices=(), backends=(), kernels=findings, disk=disk))


def test_what_a_config_needs_is_named_with_its_setting() -> None:
    broken = Finding(name="grouped_mm", works=False, what="no such kernel")
    mixture = tiny_config(model={"moe": {"num_experts": 4, "expert_intermediate_size": 24}})
    assert lacks(mixture, broken) == "model.moe.num_experts=4 needs grouped_mm: no such kernel"
    assert lacks(tiny_config(), broken) == "", "a dense model needs none"
    assert lacks(mixture, Finding(name="grouped_mm", works=True)) == ""
    nccl = Finding(name="nccl", works=False)
    assert "device=cuda needs nccl" in lacks(tiny_config(), nccl, device_type="cuda")


def test_a_disk_that_is_too_small_for_a_checkpoint() -> None:
    config = TrainConfig(model=shape("deepseek_v3_671b"))
    assert checkpoint_bytes(config) == pytest.approx(12 * 671e9, rel=0.03)
    assert "a checkpoint takes 7" in lacks(config)
    assert lacks(config, disk=DiskSpeed(folder="/runs", bytes_per_s=1e9, free_bytes=1 << 50)) == ""


def test_a_kernel_that_raises_does_not_work() -> None:
    def fails() -> str:
        raise RuntimeError("no kernel image\nand more")

    assert tried("x", fails) == Finding(name="x", works=False, what="no kernel image")
    assert tried("x", lambda: None) == Finding(name="x", works=True)


def test_kernels_are_tried_on_the_device() -> None:
    found = {each.name: each for each in kernels(torch.device("cpu"))}
    assert found["grouped_mm"].works
    assert found["_scaled_mm"] == Finding(name="_scaled_mm", works=True, what="emulated")
    assert found["cuDNN attention"] == Finding(name="cuDNN attention", works=False, what="it is for GPUs")


def test_ranks_that_try_have_a_device_each() -> None:
    assert num_probe_ranks("cpu", Devices(num_gpus=0)) == 2
    assert num_probe_ranks("cuda", Devices(num_gpus=1)) == 1
    assert num_probe_ranks("cuda", Devices(num_gpus=8)) == 2


def test_the_disk_is_tried_where_runs_would_be(tmp_path: Path) -> None:
    found = disk_speed(tmp_path / "not" / "there")
    assert found.folder == str(tmp_path)
    assert found.bytes_per_s > 0
    assert not list(tmp_path.iterdir()), "nothing is left behind"


def test_the_command(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["doctor", "--json", f"launcher.runs_dir={tmp_path}", "checkpoint.enabled=false"]
    assert main(words) == 0
    result = json.loads(capfd.readouterr().out)
    assert result["holds"]
    assert result["link"]["p2p_bytes_per_s"] > 0
    assert {each["name"] for each in result["kernels"]} >= {"flash attention", "grouped_mm", "inductor"}
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_run_that_needs_a_gpu_lacks_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["device=cuda", "precision.linear=fp8", f"launcher.runs_dir={tmp_path}"]
    assert main(["doctor", "--json", *words]) == 1
    result = json.loads(capfd.readouterr().out)
    assert [each.split(":")[0] for each in result["missing"]][:2] == ["device=cuda", "precision.linear=fp8"]
    assert main(["doctor", *words]) == 1
    assert "missing: precision.linear=fp8" in capfd.readouterr().out
