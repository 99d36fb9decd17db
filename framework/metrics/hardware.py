"""Peak arithmetic of known devices, for model FLOP/s utilisation."""

from __future__ import annotations

from types import MappingProxyType

import torch

# Dense matrix FLOP/s in bf16 and fp16 by a part of the name the driver reports; the first part found counts.
# From the vendors' datasheets, which print twice these figures "with sparsity". Cards of a lower power limit
# (PCIe, NVL) stand before the SXM modules of the same chip.
_PEAK_FLOPS = (
    ("GB200", 2500e12),
    ("B200", 2250e12),
    ("H200 NVL", 835.5e12),
    ("H200", 989.4e12),
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835.5e12),
    ("H100", 989.4e12),
    ("H800 PCIe", 756e12),
    ("H800", 989.4e12),
    ("A800", 312e12),
    ("A100", 312e12),
)
_FP16_ONLY = (("V100", 125e12),)

# A dtype's rate over the one in the table. fp32 is left out: it depends on whether TF32 is allowed.
_RELATIVE_RATE = MappingProxyType({torch.bfloat16: 1.0, torch.float16: 1.0})


def peak_flops(device_name: str, dtype: torch.dtype) -> float | None:
    """Peak FLOP/s of one device for matrix products in `dtype`; None where it is not known (every CPU is not).

    `device_name` is what torch.cuda.get_device_name gives.
    """
    relative = _RELATIVE_RATE.get(dtype)
    if relative is None:
        return None
    table = _PEAK_FLOPS + (_FP16_ONLY if dtype == torch.float16 else ())
    for part, flops in table:
        if part in device_name:
            return flops * relative
    return None


def device_name(device: torch.device) -> str:
    """The name to look up: the driver's for a CUDA device, else the device type."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
