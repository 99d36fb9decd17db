"""The parameters of one pipeline stage as flat units (unit.py), and the sum of the two copies of a tied one."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from counterflow.parallel.collectives import Axis, all_reduce
from counterflow.parallel.compress.config import CompressionConfig
from counterflow.parallel.compress.weights import is_quantised, weight_codec_of
from counterflow.parallel.parameters import placement_of
from counterflow.parallel.zero.config import ZeroConfig
from counterflow.parallel.zero.unit import FlatUnit, PersistentBytes


class ShardedStage:
    """The parameters of one stage (the runtime's `StageParameters`), replaced in `module` by views of units.

    module: its parameters may be on the meta device. replica: the ranks that hold a copy of this stage.
    expert_replica: those that hold the same experts of it; needed where it has experts. expert: the axis over which
    copies of experts are spread; needed where there are some. compression: how gradients and
    parameters travel; None: as they are. host_masters: see `FlatUnit`.
    """

    def __init__(
        self,
        module: nn.Module,
        config: ZeroConfig,
        *,
        replica: Axis,
        tensor: Axis,
        expert_replica: Axis | None = None,
        expert: Axis | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        seed: int = 0,
        is_tied: bool = False,
        compression: CompressionConfig | None = None,
        reduce_dtype: torch.dtype = torch.float32,
        host_masters: bool = False,
    ) -> None:
        named = list(module.named_parameters())
        tied = [item for item in named if is_tied and _is_end_of_tie(*item)]
        experts = [item for item in named if placement_of(item[1]).experts is not None]
        apart = {name for name, _ in (*tied, *experts)}
        rest = [item for item in named if item[0] not in apart]
        codec = weight_codec_of(compression or CompressionConfig())
        # Apart from what is gathered as it is (see Note [One set of values] of parallel/compress/weights.py).
        exact = [item for item in rest if codec is not None and not is_quantised(item[1])]
        rest = [item for item in rest if codec is None or is_quantised(item[1])]
        assert expert_replica is not None or not experts, "a stage with experts needs their replicas"
        has_copies = any(placement_of(parameter).copies is not None for _, parameter in experts)
        assert expert is not None or not has_copies, "copies need the axis that they are spread over"
        self.units = tuple(
            FlatUnit(
                members,
                zero_stage=config.stage,
                replica=axis,
                tensor=tensor,
                dtype=dtype,
                device=device or torch.device("cpu"),
                compression=compression,
                weight_codec=weight_codec,
                reduce_dtype=reduce_dtype,
                expert=expert if members is experts and has_copies else None,
                host_masters=host_masters,
                host_shards=config.offload_parameters,
            )
            for members, axis, weight_codec in (
                (tied, replica, codec),
                (rest, replica, codec),
                (experts, expert_replica or replica, codec),
                (exact, replica, None),
            )
            if members
        )
        self.tied_unit = self.units[0] if tied else None
        replaced = {old: new for unit in self.units for old, new in unit.parameters.items()}
        for submodule in module.modules():
            for name, parameter in list(submodule.named_parameters(recurse=False)):
                setattr(submodule, name, replaced[id(parameter)])
        for unit in self.units:
            unit.initialize(seed)

    def gradient_buffer(self, parameter: nn.Parameter) -> Tensor:
        for unit in self.units:
            if unit.holds(parameter):
                return unit.gradient_buffer(parameter)
        raise AssertionError("a parameter of another stage")

    def is_watched(self, parameter: nn.Parameter) -> bool:
        # The hooks that its units set, no others.
        return False

    def begin_step(self) -> None:
        for unit in self.units:
            unit.begin_step()

    def unshard(self) -> None:
        for unit in self.units:
            unit.unshard()

    def wait_unshard(self) -> bool:
        waited = [unit.wait_unshard() for unit in self.units]
        return any(waited)

    def reshard(self) -> None:
        for unit in self.units:
            unit.reshard()

    def reduce_grad(self) -> None:
        for unit in self.units:
            unit.reduce_grad()

    def finish_step(self) -> None:
        for unit in self.units:
            unit.advance_reduction()
        for unit in self.units:
            unit.wait_reduction()

    def sync_parameters(self) -> None:
        """Bring updated masters to the parameters the module sees."""
        for unit in self.units:
            unit.sync_parameters()

    def persistent_bytes(self) -> PersistentBytes:
        """Parameters and gradients that stay between steps on this rank."""
        return sum(
            (unit.persistent_bytes() for unit in self.units), PersistentBytes(parameters=0, gradients=0)
        )


def _is_end_of_tie(name: str, parameter: nn.Parameter) -> bool:
    return name == "embedding.weight" or placement_of(parameter).tied_to is not None


@torch.no_grad()
def add_tied_gradients(stages: Iterable[ShardedStage], embedding: Axis) -> None:
    """Sum the gradients of a tied parameter over its two copies, the first stage's and the last's.

    embedding: the two pipeline ranks that hold them (size 1 where one rank holds both, or there is no tie).
    """
    tied = [stage.tied_unit for stage in stages if stage.tied_unit is not None]
    if not tied:
        return
    total = tied[0].grad if len(tied) == 1 else tied[0].grad + tied[1].grad
    if len(tied) == 1:
        all_reduce(total, embedding)
    else:
        for unit in tied:
            unit.grad.copy_(total)
