"""What a parameter is in the whole model, whatever the layout: the record that layers attach and others read.

A layer knows which slice of the whole parameter it holds; ZeRO, initialisation, the clip norm and checkpoints
each need that knowledge. It is written once, where the parameter is made, and read by `placement_of`.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn

from counterflow.parallel.dry import is_dry
from counterflow.parallel.expert.copies import ExpertCopies

_ATTRIBUTE = "counterflow_placement"
# Rows are drawn in blocks of about this many elements, each from its own seed, so that any slice of any
# parameter can be drawn without drawing the rest.
_BLOCK_ELEMENTS = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterPlacement:
    """The place of a local parameter in the whole model.

    global_shape: shape over the whole model, without padding.
    tensor_dim: dim cut over the tensor axis; None where every tensor-parallel rank holds all of it.
    tensor_start: first index along `tensor_dim` held here (in the padded range).
    partial_over_tensor: this rank's gradient is one term of a sum over the tensor axis (norm weights under
        sequence parallelism); False: the gradient is complete here.
    tied_to: global name of the parameter this one is a second copy of (the output head of a tied embedding
        that lives on another stage).
    experts: global indices of the experts that are held here along dim 0, in order, of a stack of one slice an
        expert; None: not a parameter of experts. Such a parameter is not cut over the tensor axis.
    copies: where experts are in several slots; None: each is in one. Sums over all parameters count the first of them,
        and checkpoints hold it alone.
    """

    global_shape: tuple[int, ...]
    tensor_dim: int | None = None
    tensor_start: int = 0
    partial_over_tensor: bool = False
    weight_decay: bool = True
    init: Literal["normal", "ones", "zeros"] = "normal"
    init_std: float = 0.02
    tied_to: str | None = None
    experts: tuple[int, ...] | None = None
    copies: ExpertCopies | None = None

    def __post_init__(self) -> None:
        assert self.experts is None or self.tensor_dim is None, "experts are not cut over the tensor axis"

    @property
    def counted_experts(self) -> tuple[bool, ...]:
        """For each of `experts` whether this copy of it is the one that counts."""
        assert self.experts is not None
        return (True,) * len(self.experts) if self.copies is None else self.copies.is_first


def place(parameter: nn.Parameter, placement: ParameterPlacement) -> nn.Parameter:
    """Attach `placement` to `parameter` and return the parameter."""
    setattr(parameter, _ATTRIBUTE, placement)
    return parameter


def placement_of(parameter: nn.Parameter) -> ParameterPlacement:
    """The placement attached by the layer, or that of a plain parameter: all of it, here."""
    found = getattr(parameter, _ATTRIBUTE, None)
    if isinstance(found, ParameterPlacement):
        return found
    return ParameterPlacement(global_shape=tuple(parameter.shape), weight_decay=parameter.dim() > 1)


def expert_runs(experts: Sequence[int], counted: Sequence[bool] | None = None) -> list[tuple[int, int]]:
    """The ranges [begin, end) of slots, in order and as long as can be, whose experts' indices go up one by one.

    counted: for each slot whether it is to be in one of them; None: all are.
    """
    if not experts:
        return []
    counted = (True,) * len(experts) if counted is None else counted
    breaks = [
        slot
        for slot in range(1, len(experts))
        if experts[slot] != experts[slot - 1] + 1 or counted[slot] != counted[slot - 1]
    ]
    return [run for run in pairwise([0, *breaks, len(experts)]) if counted[run[0]]]


def initialize(out: Tensor, name: str, placement: ParameterPlacement, seed: int) -> None:
    """Fill `out` (local shape, any float dtype) with the initial values of its slice of parameter `name`.

    The value of an element depends on `seed`, the global name and the element's global index only, never on
    the layout, so every layout starts from the same model. Padding is zero. A tensor without values (a dry run) gets
    none.
    """
    if is_dry(out):
        return
    if placement.experts is not None:
        for begin, end in expert_runs(placement.experts):
            run = replace(placement, experts=None, tensor_dim=0, tensor_start=placement.experts[begin])
            initialize(out[begin:end], name, run, seed)
        return
    with torch.no_grad():
        if placement.init == "ones":
            out.fill_(1)
            return
        out.zero_()
        if placement.init == "zeros":
            return
        shape, dim, start = placement.global_shape, placement.tensor_dim, placement.tensor_start
        row_elements = 1
        for size in shape[1:]:
            row_elements *= size
        block_rows = max(1, _BLOCK_ELEMENTS // row_elements)
        first = start if dim == 0 else 0
        last = min(first + out.shape[0], shape[0])
        source = placement.tied_to or name
        generator = torch.Generator(device="cpu")
        for block in range(first // block_rows, -(-last // block_rows)):
            # The CPU generator reads 32 bits of its seed.
            generator.manual_seed(zlib.crc32(f"{seed}/{source}/{block}".encode()))
            block_start = block * block_rows
            rows = torch.empty(min(block_rows, shape[0] - block_start), *shape[1:])
            rows.normal_(0.0, placement.init_std, generator=generator)
            begin, end = max(first, block_start), min(last, block_start + rows.shape[0])
            if begin >= end:
                continue
            rows = rows[begin - block_start : end - block_start]
            if dim is not None and dim > 0:
                rows = rows.narrow(dim, start, min(out.shape[dim], shape[dim] - start))
                target = out[begin - first : end - first].narrow(dim, 0, rows.shape[dim])
            else:
                target = out[begin - first : end - first]
            target.copy_(rows)
