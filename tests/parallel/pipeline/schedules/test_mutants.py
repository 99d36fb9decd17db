"""Mutants of the multi-stage schedules: the verifier rejects each one that the executable model cannot run."""

from __future__ import annotations

import pytest

from tests.parallel.pipeline.test_mutation import judge_mutants

NAMES = ["interleaved_1f1b", "zb1p", "zb_h2", "zbv", "v_half", "v_min", "dualpipe_v"]


@pytest.mark.parametrize("name", NAMES)
def test_mutants_of_every_kind_on_two_ranks(name: str) -> None:
    judge_mutants(name, 2, 4, range(2), each=3)


@pytest.mark.parametrize("name", NAMES)
def test_mutants_of_every_kind_on_four_ranks(name: str) -> None:
    # An outer rank and the last, where a V turns; the slow tests take all of them.
    judge_mutants(name, 4, 8 if name == "dualpipe_v" else 4, (0, 3), each=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_mutant_on_two_ranks(name: str) -> None:
    judge_mutants(name, 2, 4, range(2))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_mutant_on_four_ranks(name: str) -> None:
    judge_mutants(name, 4, 8 if name == "dualpipe_v" else 4, range(4))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_mutant_of_every_rank(name: str) -> None:
    judge_mutants(name, 4, 8, range(4))
