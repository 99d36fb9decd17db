"""Schedule generators: pure functions from sizes to a `Schedule` of compute actions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from parallel.pipeline.action import Schedule
from parallel.pipeline.generate.dualpipe import dualpipe, validate_dualpipe
from parallel.pipeline.generate.dualpipe_v import dualpipe_v, validate_dualpipe_v
from parallel.pipeline.generate.gpipe import gpipe
from parallel.pipeline.generate.interleaved_1f1b import interleaved_1f1b
from parallel.pipeline.generate.naive import naive
from parallel.pipeline.generate.one_f_one_b import one_f_one_b
from parallel.pipeline.generate.v_shape import v_half, v_min, zbv
from parallel.pipeline.generate.zero_bubble import zb1p, zb_h2


def _any_size(num_ranks: int, num_microbatches: int) -> None:
    """Every number of ranks and of micro-batches will do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generator:
    """A schedule by name.

    generate: (num_ranks, num_microbatches) -> Schedule, for sizes that `validate` accepts; where `any_chunks`,
        the number of chunks comes third.
    validate: (num_ranks, num_microbatches) -> None; raises ValueError where the schedule does not fit them.
    num_chunks: stages that a rank holds for micro-batches of one direction, unless asked otherwise.
    any_chunks: whether it may be asked otherwise.
    mirrored: whether a stage has copies on the ranks r and p-1-r.
    """

    generate: Callable[..., Schedule]
    validate: Callable[[int, int], None] = _any_size
    num_chunks: int = 1
    any_chunks: bool = False
    mirrored: bool = False


GENERATORS: dict[str, Generator] = {
    "naive": Generator(generate=naive),
    "gpipe": Generator(generate=gpipe),
    "1f1b": Generator(generate=one_f_one_b),
    "interleaved_1f1b": Generator(generate=interleaved_1f1b, num_chunks=2, any_chunks=True),
    "zb1p": Generator(generate=zb1p),
    "zb_h2": Generator(generate=zb_h2),
    "zbv": Generator(generate=zbv, num_chunks=2),
    "v_half": Generator(generate=v_half, num_chunks=2),
    "v_min": Generator(generate=v_min, num_chunks=2),
    "dualpipe": Generator(generate=dualpipe, validate=validate_dualpipe, mirrored=True),
    "dualpipe_v": Generator(generate=dualpipe_v, validate=validate_dualpipe_v, num_chunks=2),
}


def generator_of(name: str) -> Generator:
    """The generator called `name`.

    Raises ValueError: an unknown name.
    """
    if name not in GENERATORS:
        raise ValueError(
            f"schedule.name={name}: no such schedule; choose one of {', '.join(sorted(GENERATORS))}"
        )
    return GENERATORS[name]


def generate(name: str, num_ranks: int, num_microbatches: int, *, num_chunks: int | None = None) -> Schedule:
    """The schedule called `name`, of compute actions only.

    num_chunks: stages that a rank holds for micro-batches of one direction; None: the schedule's own number.

    Raises ValueError: an unknown name, sizes below 1, or sizes the schedule does not fit.
    """
    generator = generator_of(name)
    num_chunks = generator.num_chunks if num_chunks is None else num_chunks
    for key, value in (
        ("parallel.pipeline_parallel_size", num_ranks),
        ("schedule.num_microbatches", num_microbatches),
        ("schedule.num_chunks", num_chunks),
    ):
        if value < 1:
            raise ValueError(f"{key}={value}: a schedule has at least one; set it to 1 or more")
    generator.validate(num_ranks, num_microbatches)
    if generator.any_chunks:
        return generator.generate(num_ranks, num_microbatches, num_chunks)
    if num_chunks != generator.num_chunks:
        several = [name for name, other in GENERATORS.items() if other.any_chunks]
        raise ValueError(
            f"schedule.num_chunks={num_chunks}: {name} has {generator.num_chunks} to a rank; set "
            f"schedule.num_chunks=null, or choose schedule={' or '.join(several)}"
        )
    return generator.generate(num_ranks, num_microbatches)
