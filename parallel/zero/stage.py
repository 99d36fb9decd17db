"""The parameters of one pipeline stage as flat units (unit.py), and the sum of the two copies of a tied one."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from counterflow.parallel.collectives import Axis, all_reduce
from counterflow.parallel.compress.weights import is_quantised, weight_codec_of
from counterflow.parallel.parameters import placement_of
from counterflow.parallel.pipeline.ir.action import Kind
from counterflow.parallel.pipeline.ir.trace import Recorder
from counterflow.parallel.zero.blocks import Block
from counterflow.parallel.zero.buffers import Buffers
from counterflow.parallel.zero.context import ZeroContext
from counterflow.parallel.zero.gathering import BlockGathers, Direction
from counterflow.parallel.zero.layout import PersistentBytes
from counterflow.parallel.zero.reducing import BlockReductions
from counterflow.parallel.zero.unit import FlatUnit

NamedParameters = list[tuple[str, nn.Parameter]]


class ShardedStage:
    """The parameters of one stage (the runtime's `StageParameters`), replaced in `module` by views of units.

    module: its parameters may be on the meta device. blocks: what of it comes and goes together where units are
    blocks; all its parameters are in them. None: all of it. is_tied: whether it has one end of a tied embedding.
    """

    def __init__(
        self,
        module: nn.Module,
        context: ZeroContext,
        *,
        blocks: Sequence[Block] | None = None,
        seed: int = 0,
        is_tied: bool = False,
    ) -> None:
        config = context.config
        has_blocks = blocks is not None and config.has_block_units
        if blocks is None or not has_blocks:
            blocks = (Block(name="stage", modules=(module,)),)
        self._buffers = Buffers(context.device)
        self._is_whole = False  # all of it at once, though it may come by blocks
        self.tied_unit: FlatUnit | None = None
        units: list[FlatUnit] = []
        for members in _by_block(module, blocks):
            tied, rest = _split(members, lambda item: is_tied and _is_end_of_tie(*item))
            if tied:
                self.tied_unit = self._unit(tied, context)
                units.append(self.tied_unit)
            units += self._units_of(rest, context)
        self.units = tuple(units)
        self._unit_of = {id(new): unit for unit in self.units for new in unit.parameters.values()}
        replaced = {old: new for unit in self.units for old, new in unit.parameters.items()}
        for submodule in module.modules():
            for name, parameter in list(submodule.named_parameters(recurse=False)):
                setattr(submodule, name, replaced[id(parameter)])
        for unit in self.units:
            unit.initialize(seed)
        units_of = [
            list(
                {id(unit): unit for unit in (self._unit_of[id(each)] for each in block.parameters())}.values()
            )
            for block in blocks
        ]
        self._reductions: BlockReductions | None = None
        if config.reduce == "microbatch" and config.stage >= 2:
            self._reductions = BlockReductions(blocks, units_of)
        self._gathers: BlockGathers | None = None
        if config.stage == 3 and has_blocks:
            self._gathers = BlockGathers(
                blocks,
                units_of,
                prefetch=config.prefetch_units,
                reshard_after=config.reshard_after_of(context.pipeline),
                # What is left of the backward before has had half a forward to hide behind.
                half_way=None if self._reductions is None else self._reductions.finish,
            )

    def _units_of(self, members: NamedParameters, context: ZeroContext) -> list[FlatUnit]:
        """What is replicated alike and travels alike is in one unit."""
        experts, rest = _split(members, lambda item: placement_of(item[1]).experts is not None)
        # Apart from what is gathered as it is (see Note [One set of values] of parallel/compress/weights.py).
        is_coded = weight_codec_of(context.compression) is not None
        exact, rest = _split(rest, lambda item: is_coded and not is_quantised(item[1]))
        return [
            self._unit(each, context, has_experts=each is experts, is_exact=each is exact)
            for each in (rest, experts, exact)
            if each
        ]

    def _unit(
        self,
        members: NamedParameters,
        context: ZeroContext,
        *,
        has_experts: bool = False,
        is_exact: bool = False,
    ) -> FlatUnit:
        assert context.expert_replica is not None or not has_experts, (
            "a stage with experts needs their replicas"
        )
        has_copies = any(placement_of(parameter).copies is not None for _, parameter in members)
        assert context.expert is not None or not has_copies, "copies need the axis that they are spread over"
        return FlatUnit(
            members,
            context,
            replica=context.expert_replica if has_experts and context.expert_replica else context.replica,
            weight_codec=None if is_exact else weight_codec_of(context.compression),
            expert=context.expert if has_copies else None,
            buffers=self._buffers,
        )

    def gradient_buffer(self, parameter: nn.Parameter) -> Tensor:
        unit = self._unit_of.get(id(parameter))
        assert unit is not None, "a parameter of another stage"
        if self._reductions is not None:
            self._reductions.touch(unit)
        return unit.gradient_buffer(parameter)

    def is_watched(self, parameter: nn.Parameter) -> bool:
        # The hooks that its units set, no others.
        return False

    def begin_step(self) -> None:
        for unit in self.units:
            unit.begin_step()

    def running(
        self, kind: Kind, stage: int, microbatch: int, recorder: Recorder
    ) -> AbstractContextManager[None]:
        if self._gathers is None and self._reductions is None:
            return nullcontext()
        return self._by_block(kind, stage, microbatch, recorder)

    @contextmanager
    def _by_block(self, kind: Kind, stage: int, microbatch: int, recorder: Recorder) -> Generator[None]:
        with ExitStack() as stack:
            if self._gathers is not None and kind is not Kind.W:
                direction: Direction = "forward" if kind is Kind.F else "backward"
                stack.enter_context(self._gathers.running(direction, stage, microbatch, recorder))
            if self._reductions is not None and kind is not Kind.F:
                stack.enter_context(self._reductions.running(kind, stage, microbatch, recorder))
            yield
        if self._reductions is not None and kind is Kind.F:
            self._reductions.finish()

    def unshard(self, passes: Sequence[Kind] = ()) -> None:
        if self._gathers is not None and passes:
            self._gathers.unshard(["forward" if kind is Kind.F else "backward" for kind in passes])
            return
        # For somebody who reads all of it.
        self._is_whole = True
        for unit in self.units:
            unit.unshard()

    def wait_unshard(self) -> bool:
        if self._gathers is not None and not self._is_whole:
            return False
        waited = [unit.wait_unshard() for unit in self.units]
        return any(waited)

    def reshard(self) -> None:
        self._is_whole = False
        if self._gathers is not None:
            self._gathers.reshard()
            return
        for unit in self.units:
            unit.reshard()

    def reduce_grad(self) -> None:
        if self._reductions is not None:
            return
        for unit in self.units:
            unit.reduce_grad()

    def finish_step(self) -> None:
        if self._reductions is not None:
            self._reductions.finish()
        for unit in self.units:
            unit.advance_reduction()
        for unit in self.units:
            unit.finish_step()
        self._buffers.clear()

    def discard(self) -> None:
        if self._gathers is not None:
            self._gathers.discard()
        if self._reductions is not None:
            self._reductions.discard()

    def close(self) -> None:
        if self._gathers is not None:
            self._gathers.close()

    def sync_parameters(self) -> None:
        """Bring updated masters to the parameters the module sees."""
        for unit in self.units:
            unit.start_sync()
        for unit in self.units:
            unit.finish_sync()

    def persistent_bytes(self) -> PersistentBytes:
        """Parameters and gradients that stay between steps on this rank."""
        return sum(
            (unit.persistent_bytes() for unit in self.units), PersistentBytes(parameters=0, gradients=0)
        )


def _by_block(module: nn.Module, blocks: Sequence[Block]) -> list[NamedParameters]:
    """The parameters of `module`, by the first of `blocks` that has them, in their order in the module."""
    block_of: dict[int, int] = {}
    for index, block in enumerate(blocks):
        for parameter in block.parameters():
            block_of.setdefault(id(parameter), index)
    found: list[NamedParameters] = [[] for _ in blocks]
    for name, parameter in module.named_parameters():
        assert id(parameter) in block_of, f"{name} is in no block"
        found[block_of[id(parameter)]].append((name, parameter))
    return found


def _split(
    members: NamedParameters, is_first: Callable[[tuple[str, nn.Parameter]], bool]
) -> tuple[NamedParameters, NamedParameters]:
    """Those that `is_first` says, and the others."""
    first = [item for item in members if is_first(item)]
    return first, [item for item in members if not is_first(item)]


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
