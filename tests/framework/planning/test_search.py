"""The search of a layout: rules, bounds, memory, and a config that composes."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from counterflow.framework.checks.rules import check
from counterflow.framework.planning.cluster import load_cluster
from counterflow.framework.planning.search import Request, evaluate, layouts, overrides_of, search
from counterflow.framework.planning.step import estimate_step
from counterflow.launch.compose import compose_config
from tests.models.shapes import shape

MODEL = shape("llama3_8b")
assert MODEL.vocab_size is not None
REQUEST = Request(
    model=MODEL,
    cluster=load_cluster("a100").of_size(16),
    seq_length=4096,
    vocab_size=MODEL.vocab_size,
    global_batch=64,
)


def test_layouts_keep_to_the_rules() -> None:
    for layout in layouts(REQUEST):
        assert layout.num_gpus == 16
        assert layout.tensor <= 8  # within a node
        assert MODEL.num_kv_heads % layout.tensor == 0
        assert layout.micro_batch_size * layout.num_microbatches * layout.data == 64
        assert sum(layout.layers_per_stage) == MODEL.num_layers


def test_the_best_layouts_fit_and_compose() -> None:
    found = search(REQUEST, keep=3)
    seconds = [plan.step.seconds for plan in found.plans]
    assert seconds == sorted(seconds)
    assert all(plan.memory.peak < 80e9 for plan in found.plans)
    for plan in found.plans:
        config = compose_config(["model=llama3_8b", *overrides_of(plan.layout)])
        check(config)
        assert config.global_batch_size == 64
        assert config.parallel.world_size == 16


def test_no_layout_beats_the_first_of_a_whole_search() -> None:
    small = replace(REQUEST, cluster=REQUEST.cluster.of_size(8), global_batch=16)
    best = search(small, keep=1).plans[0].step.seconds
    every = [evaluate(small, layout, 73.6e9) for layout in layouts(small)]
    assert min(plan.step.seconds for plan in every if not isinstance(plan, float)) == pytest.approx(best)


def test_a_long_step_goes_on_as_the_simulated_part_did() -> None:
    layout = next(
        each
        for each in layouts(replace(REQUEST, global_batch=512))
        if each.pipeline == 4 and each.schedule == "1f1b" and each.micro_batch_size == 1
    )
    assert layout.num_microbatches > 24
    plan = evaluate(replace(REQUEST, global_batch=512), layout, 1e15)
    assert not isinstance(plan, float)
    whole = estimate_step(MODEL, layout, REQUEST.cluster)
    assert plan.step.seconds == pytest.approx(whole.seconds, rel=1e-3)
    assert plan.step.bubble_makespan == pytest.approx(whole.bubble_makespan, abs=2e-3)


def test_what_fits_nowhere_is_refused_with_a_remedy() -> None:
    with pytest.raises(ValueError, match="take more devices"):
        search(
            replace(REQUEST, model=shape("llama3_405b"), cluster=REQUEST.cluster.of_size(8), global_batch=8)
        )


@pytest.mark.slow
def test_deepseek_v3_is_planned_for_2048_devices_within_a_minute() -> None:
    model = shape("deepseek_v3_671b")
    assert model.vocab_size is not None
    request = Request(
        model=model,
        cluster=load_cluster("h800_2048"),
        seq_length=4096,
        vocab_size=model.vocab_size,
        global_batch=15360,
    )
    start = time.process_time()
    found = search(request)
    assert time.process_time() - start < 60
    check(compose_config(["model=deepseek_v3_671b", *overrides_of(found.plans[0].layout)]))
