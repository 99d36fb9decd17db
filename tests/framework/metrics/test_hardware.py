"""Peaks of devices by the names their drivers report."""

from __future__ import annotations

import pytest
import torch

from counterflow.framework.metrics.hardware import device_name, peak_flops


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A800-SXM4-80GB", 312),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.4),
        ("NVIDIA H800", 989.4),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("NVIDIA H20", None),
        ("NVIDIA GeForce RTX 4090", None),
        ("cpu", None),
    ],
)
def test_bf16(name: str, tflops: float | None) -> None:
    expected = None if tflops is None else pytest.approx(tflops * 1e12)
    assert peak_flops(name, torch.bfloat16) == expected


def test_other_dtypes() -> None:
    assert peak_flops("Tesla V100-SXM2-32GB", torch.float16) == 125e12
    assert peak_flops("Tesla V100-SXM2-32GB", torch.bfloat16) is None
    assert peak_flops("NVIDIA H100 80GB HBM3", torch.float32) is None


def test_the_name_of_a_cpu_has_no_peak() -> None:
    assert device_name(torch.device("cpu")) == "cpu"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_name_of_a_gpu_comes_from_its_driver() -> None:
    assert device_name(torch.device("cuda")) == torch.cuda.get_device_name()
