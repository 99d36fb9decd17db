from __future__ import annotations

import pytest
import torch

from counterflow.parallel.expert.packing import RowPacking


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("width", "num_choices"), [(5, 3), (8, 1)])
def test_rows_come_out_as_they_went_in(dtype: torch.dtype, width: int, num_choices: int) -> None:
    packing = RowPacking(
        width=width, dtype=dtype, num_choices=num_choices, weights_dtype=torch.float32, has_slots=True
    )
    torch.manual_seed(0)
    x, weights = torch.randn(6, width, dtype=dtype), torch.randn(6, num_choices)
    tokens = torch.tensor([4, 0, 4])
    slots = torch.randint(-1, 4, (3, num_choices), dtype=torch.int32)
    buffer = packing.empty(3, x.device)
    packing.write(buffer, x, weights, slots, tokens)
    # Bytes are all that a transfer keeps.
    hidden, found_weights, found_slots = packing.read(buffer.clone(), dtype)
    assert torch.equal(hidden, x[tokens])
    assert torch.equal(found_weights, weights[tokens])
    assert torch.equal(found_slots, slots)
    assert packing.row_bytes % 16 == 0


def test_fp8_has_a_scale_for_each_block_of_128() -> None:
    packing = RowPacking(
        width=200, dtype=torch.float8_e4m3fn, num_choices=2, weights_dtype=torch.float32, has_slots=False
    )
    assert packing.row_bytes == 208 + 16 + 16  # 200 bytes, two scales, two weights, each rounded up
    torch.manual_seed(0)
    x = torch.randn(4, 200)
    x[:, 128:] *= 1e-4
    x[0] = 0
    buffer = packing.empty(4, x.device)
    packing.write(buffer, x, torch.zeros(4, 2))
    hidden, _, _ = packing.read(buffer, torch.float32)
    # Three bits of mantissa: half a step is 2^-4 of the value, and 2^-10 of the smallest normal below 2^-6.
    for block in (slice(0, 128), slice(128, 200)):
        scale = x[:, block].abs().amax(1, keepdim=True) / 448
        assert ((hidden - x)[:, block].abs() <= x[:, block].abs() / 16 + scale * 2**-10).all()
    assert not hidden[0].any()
