"""Schedule generators: pure functions from sizes to a `Schedule` of compute actions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from parallel.pipeline.action import Schedule
from parallel.pipeline.generate.dualpipe import dualpipe, validate_dualpipe
from parallel.pipeline.generate.gpipe import gpipe
from parallel.pipeline.generate.naive import naive
from parallel.pipeline.generate.one_f_one_b import one_f_one_b


@dataclass(frozen=True, slots=True, kw_only=True)
class Generator:
    """A schedule by name.

    generate: (num_ranks, num_microbatches) -> Schedule, for sizes that `validate` accepts.
    validate: (num_ranks, num_microbatches) -> None; raises ValueError where the schedule does not fit them.
    mirrored: whether a stage has copies on the ranks r and p-1-r.
    """

    generate: Callable[[int, int], Schedule]
    validate: Callable[[int, int], None]
    mirrored: bool = False


def _any_size(num_ranks: int, num_microbatches: int) -> None:
    """Every number of ranks and of micro-batches will do."""


GENERATORS: dict[str, Generator] = {
    "naive": Generator(generate=naive, validate=_any_size),
    "gpipe": Generator(generate=gpipe, validate=_any_size),
    "1f1b": Generator(generate=one_f_one_b, validate=_any_size),
    "dualpipe": Generator(generate=dualpipe, validate=validate_dualpipe, mirrored=True),
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


def generate(name: str, num_ranks: int, num_microbatches: int) -> Schedule:
    """The schedule called `name`, of compute actions only.

    Raises ValueError: an unknown name, sizes below 1, or sizes the schedule does not fit.
    """
    generator = generator_of(name)
    for key, value in (
        ("parallel.pipeline_parallel_size", num_ranks),
        ("schedule.num_microbatches", num_microbatches),
    ):
        if value < 1:
            raise ValueError(f"{key}={value}: a schedule has at least one; set it to 1 or more")
    generator.validate(num_ranks, num_microbatches)
    return generator.generate(num_ranks, num_microbatches)
