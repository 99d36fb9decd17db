"""Mutants of the multi-stage schedules: the verifier rejects each one that the executable model cannot run."""

from __future__ import annotations

import pytest

from tests.parallel.pipeline.test_mutation import judge_mutants

NAMES = ["interleaved_1f1b", "zb1p", "zb_h2", "zbv", "v_half", "v_min", "dualpipe_v"]


@pytest.mark.parametrize("name", NAMES)
def test_every_mutant_on_two_ranks(name: str) -> None:
    judge_mutants(name, 2, 4, range(2))


@pytest.mark.parametrize("name", NAMES)
def test_every_mutant_on_four_ranks(name: str) -> None:
    # An outer rank and the last, where a V turns; the slow test takes all of them.
    judge_mutants(name, 4, 8 if name == "dualpipe_v" else 4, (0, 3))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_mutant_of_every_rank(name: str) -> None:
    judge_mutants(name, 4, 8, range(4))
