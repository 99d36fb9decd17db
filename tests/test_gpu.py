"""What only a GPU can show: runs on NCCL, and kernels of the device. Skipped where there is none.

`pytest -m gpu` on a machine with GPUs runs these and nothing else; with two or more, pipelines too.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from counterflow.framework.checks.doctor import kernels
from counterflow.parallel.ops.fp8 import fp8_product, why_no_fp8
from counterflow.parallel.ops.weight_grad import grouped_product, grouped_weight_gradient
from counterflow.parallel.pipeline.schedules.registry import generate, generated_schedules
from tests.commands import run_command

NUM_GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(NUM_GPUS == 0, reason="needs a CUDA device")]
several = pytest.mark.skipif(NUM_GPUS < 2, reason="needs two CUDA devices")
GPU = torch.device("cuda", 0)
SMALL = (
    "device=cuda",
    "training.num_steps=3",
    "data.validation_batches=1",
    "data.seq_length=64",
    "data.micro_batch_size=1",
    "model.hidden_size=64",
    "model.intermediate_size=128",
    "logger=jsonl",
)
ALONE = ("parallel=single", "schedule=1f1b")
OFFLOADING = (
    "parallel=single",
    "schedule=gpipe",
    "schedule.num_microbatches=8",
    "offload.policy=lru",
    "offload.budget_share=0.7",
)


def trained(folder: Path, *words: str) -> dict[str, object]:
    """The summary of a run that ended well, and whose loss is a number."""
    done = run_command(["train", "--json", *SMALL, *words], folder, timeout_s=600)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert 0 < summary["final_loss"] < 20
    assert not list((Path(summary["run_dir"])).glob("nccl-*")), "no operation waited too long"
    return summary


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", [0, 3])
def test_one_gpu_trains(tmp_path: Path, precision: str, stage: int) -> None:
    summary = trained(tmp_path, *ALONE, f"precision={precision}", f"zero.stage={stage}")
    assert summary["deterministic"] is False


def test_deterministic_kernels_give_the_same_run_twice(tmp_path: Path) -> None:
    words = (*ALONE, "deterministic=true", "precision=bf16")
    first, second = (trained(tmp_path, *words) for _ in range(2))
    assert first["final_loss"] == second["final_loss"]
    assert first["deterministic"]


@several
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", generated_schedules())
def test_every_schedule_trains_on_nccl(tmp_path: Path, name: str, stage: int) -> None:
    """On as many ranks as there are GPUs, eight at most: channels, warm-up and reductions."""
    sizes = [size for size in range(2, min(NUM_GPUS, 8) + 1) if _fits(name, size)]
    size = max(sizes)
    layout = (f"parallel.pipeline_parallel_size={size}", "parallel.data_parallel_size=1")
    layers = generate(name, size, 2 * size).num_stages
    trained(
        tmp_path,
        *layout,
        "parallel.tensor_parallel_size=1",
        f"model.num_layers={layers}",
        f"schedule={name}",
        f"schedule.num_microbatches={2 * size}",
        f"zero.stage={stage}",
    )


def _fits(name: str, size: int) -> bool:
    try:
        generate(name, size, 2 * size)
    except ValueError:
        return False
    return True


@several
def test_parity_on_gpus(tmp_path: Path) -> None:
    words = ["parity", "--json", *SMALL[:1], *SMALL[3:], "schedule=1f1b", "zero.stage=3", "precision=fp32"]
    layout = ["parallel.tensor_parallel_size=1", "parallel.data_parallel_size=1"]
    done = run_command([*words, *layout, "parallel.pipeline_parallel_size=2"], tmp_path, timeout_s=600)
    assert done.returncode == 0, done.stdout + done.stderr


def test_activations_leave_and_come_back(tmp_path: Path) -> None:
    moved = trained(tmp_path, *OFFLOADING, "deterministic=true")
    stayed = trained(tmp_path, *OFFLOADING[:-2], "deterministic=true")
    assert moved["final_loss"] == stayed["final_loss"]


def test_an_offloaded_run_passes_torchs_sanitizer(tmp_path: Path) -> None:
    words = ["train", *SMALL, *OFFLOADING]
    done = run_command(words, tmp_path, environment={"TORCH_CUDA_SANITIZER": "1"}, timeout_s=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "CSAN detected" not in done.stdout + done.stderr


def test_fp8_products_are_near(tmp_path: Path) -> None:
    if (reason := why_no_fp8(GPU)) is not None:
        pytest.skip(reason)
    x, matrix = (torch.randn(64, 64, device=GPU, dtype=torch.bfloat16) for _ in range(2))
    expected = x.float() @ matrix.float().t()
    error = torch.linalg.vector_norm(fp8_product(x, matrix).float() - expected)
    assert error < 0.1 * torch.linalg.vector_norm(expected)
    trained(tmp_path, *ALONE, "precision=bf16", "precision.linear=fp8", "tokenizer.vocab_size=512")


def test_grouped_products_are_those_of_each_group() -> None:
    sizes = [0, 24, 0, 40, 0]
    x, grad = (torch.randn(64, 64, device=GPU, dtype=torch.bfloat16) for _ in range(2))
    weight = torch.randn(5, 64, 64, device=GPU, dtype=torch.bfloat16)
    ends = torch.tensor(sizes, device=GPU).cumsum(0).int()
    parts = [rows @ matrix for rows, matrix in zip(x.split(sizes), weight, strict=True)]
    torch.testing.assert_close(grouped_product(x, weight, ends), torch.cat(parts), rtol=2e-2, atol=1e-1)
    found = grouped_weight_gradient(x, grad, ends)
    expected = [rows.t() @ inputs for rows, inputs in zip(grad.split(sizes), x.split(sizes), strict=True)]
    torch.testing.assert_close(found, torch.stack(expected), rtol=2e-2, atol=1e-1)
    assert not found[[0, 2, 4]].any(), "groups without rows"


def test_attention_of_the_device_is_the_one_of_the_host() -> None:
    q, k, v = (torch.randn(2, 4, 128, 64) for _ in range(3))
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    found = F.scaled_dot_product_attention(q.to(GPU), k.to(GPU), v.to(GPU), is_causal=True)
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-3, atol=1e-3)


def test_the_doctor_finds_the_kernels(tmp_path: Path) -> None:
    found = {each.name: each for each in kernels(GPU)}
    assert found["grouped_mm"].works, found
    assert found["flash attention"].works, found
    done = run_command(["doctor", "--json", "device=cuda"], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["devices"]
