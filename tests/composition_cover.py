"""A pairwise cover of the features that compose: few configs, each pair of features together in one of them.

Greedy and deterministic: the first pair that no case has yet begins a case, and every other feature is added to it
that keeps what is there, passes the check, and brings a pair that is missing. That takes many checks of a config, so
the cases are kept in a file. `python -m tests.composition_cover` writes it anew, for a pair that no case has.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import combinations
from pathlib import Path
from typing import Any

from counterflow.framework.checks.rules import check
from counterflow.framework.checks.rules.compositions import REFUSALS
from counterflow.framework.checks.rules.rule import merged
from counterflow.framework.config.features import FEATURES, Feature, active_features
from counterflow.framework.config.mapping import from_mapping
from counterflow.framework.config.tree import TrainConfig
from counterflow.parallel.pipeline.schedules.registry import all_schedules
from tests.tiny import MIXTURES, TINY, layers_for

Pair = frozenset[str]
NUM_STEPS = 2
FILE = Path(__file__).parent / "golden" / "composition_cover.txt"

CSV = Path(__file__).parent / "golden" / "schedule_1f1b_p2_m4.csv"

_TWO_STAGES = {"parallel": {"pipeline_parallel_size": 2}}
_FEATURES = {feature.key: feature for feature in FEATURES}
_EXPERTS = {"model": MIXTURES["mixtral"]}
_EXPERT_RANKS = merged(_EXPERTS, {"parallel": {"data_parallel_size": 2, "expert_parallel_size": 2}})

# Features that are in no case, and why.
ELSEWHERE = {
    "context_parallel": "is refused altogether",
    "onebit_adam": "is refused altogether",
    "auto": "takes a second of search a case: tests/framework/checks/test_parity.py",
    "fp8": "takes wider layers than the tiny model's: tests/framework/test_precision.py",
    "documents": "takes batches of another kind: tests/framework/test_document_batches.py",
    "deepspeed_engine": "takes the package's own loop: tests/framework/deepspeed",
    "cpu_adam": "is compiled at its first use: tests/framework/optim/updaters/test_host_states.py",
}

# What switches a feature on in the tiny model, where that is not what the feature's own example says.
_OTHERWISE: dict[str, dict[str, Any]] = {
    "1f1b": {"schedule": {"name": "1f1b"}},
    "csv": merged(_TWO_STAGES, {"schedule": {"name": "csv", "path": str(CSV)}}),
    "pipeline_parallel": _TWO_STAGES,
    "pipeline_payload": merged(_TWO_STAGES, {"comm": {"pipeline_payload": "fp8"}}),
    "experts": _EXPERTS,
    "expert_parallel": _EXPERT_RANKS,
    "balance": merged(_EXPERT_RANKS, {"balance": {"interval_steps": 1}}),
    "copies": merged(_EXPERT_RANKS, {"balance": {"policy": "pack", "num_redundant_experts": 1}}),
    "mla": {"model": {"mla": MIXTURES["deepseek_v3"]["mla"]}},
    "offload": merged(_TWO_STAGES, _FEATURES["offload"].example),
    # From 4, which every schedule of two ranks takes, to 6.
    "batch_ramp": merged(_FEATURES["batch_ramp"].example, {"schedule": {"num_microbatches": 6}}),
}


def _switch(feature: Feature) -> Mapping[str, Any]:
    if feature.key in _OTHERWISE:
        return _OTHERWISE[feature.key]
    if feature.key in all_schedules():
        return merged(_TWO_STAGES, feature.example)
    return feature.example


# What switches each feature on, with what it needs beside it.
SWITCHES: dict[str, Mapping[str, Any]] = {
    feature.key: _switch(feature) for feature in FEATURES if feature.key not in ELSEWHERE
}

# What a feature needs where no other says more.
NEEDS: dict[str, dict[str, Any]] = {"quantised_weights": {"zero": {"stage": 1}}}

# Alternatives: values of one setting, or of two of which the one says what the other is.
ALTERNATIVES = (
    SWITCHES.keys() & all_schedules().keys(),
    {"zero_1", "zero_2", "zero_3"},
    {"bf16", "fp16"},
    {"host_states", "disk_states"},
    {"host_parameters", "disk_states"},  # the masters on the host are the parameters
    {"host_parameters", "zero_1"},  # only stage 3 has shards of parameters
    {"host_parameters", "zero_2"},
    {"naive", "offload"},  # one micro-batch is under way at a time, so nothing can leave
)


def config_of(features: Iterable[str]) -> TrainConfig | None:
    """The tiny config with these features on; None where they need different values, or the check refuses them."""
    wanted = set(features)
    nodes: Mapping[str, Any] = {"training": {"num_steps": NUM_STEPS}, "schedule": {"num_microbatches": 4}}
    for key in wanted & NEEDS.keys():
        nodes = merged(nodes, NEEDS[key])
    for key in SWITCHES:  # in one order, whatever the order of `features`
        if key in wanted:
            nodes = merged(nodes, SWITCHES[key])
    schedule = nodes["schedule"].get("name", "1f1b")
    num_ranks = nodes.get("parallel", {}).get("pipeline_parallel_size", 1)
    try:
        # A file names its stages, and of two layers a rank holds too little for any of it to leave.
        few = 4 if schedule == "csv" or "offload" in wanted else layers_for(schedule, num_ranks)
        small = {"model": {"num_layers": few}, "data": {"validation_batches": 1}}
        config = from_mapping(TrainConfig, merged(TINY, merged(nodes, small)))
        check(config)
    except ValueError:
        return None
    return config if wanted <= {feature.key for feature in active_features(config)} else None


def refused_pairs() -> set[Pair]:
    """The pairs that the table of compositions refuses."""
    return {
        frozenset((row.first, row.second)) for row in REFUSALS if row.second is not None and row.where is None
    }


def alternatives(pair: Pair) -> bool:
    """Whether the two are values of one setting."""
    return any(pair <= group for group in ALTERNATIVES)


def composing_pairs() -> list[Pair]:
    """Every pair of features that has to be in a case."""
    refused = refused_pairs()
    return [
        pair
        for pair in map(frozenset, combinations(SWITCHES, 2))
        if pair not in refused and not alternatives(pair)
    ]


def pairs_in(config: TrainConfig) -> set[Pair]:
    """The pairs of features that `config` uses."""
    return {frozenset(pair) for pair in combinations((each.key for each in active_features(config)), 2)}


def cover() -> list[tuple[str, ...]]:
    """The cases: features by name. A pair that no config can have is left out, and shows as missing."""
    missing = dict.fromkeys(composing_pairs())
    cases: list[tuple[str, ...]] = []
    while missing:
        first = next(iter(missing))
        chosen = [key for key in SWITCHES if key in first]
        config = config_of(chosen)
        if config is None:
            del missing[first]
            continue
        for key in SWITCHES:
            brings = any(frozenset((key, other)) in missing for other in chosen)
            if key in chosen or not brings:
                continue
            more = config_of([*chosen, key])
            if more is not None:
                chosen, config = [*chosen, key], more
        for pair in pairs_in(config):
            missing.pop(pair, None)
        cases.append(tuple(chosen))
    return cases


def feature_keys() -> set[str]:
    """The names of all features there are."""
    return {feature.key for feature in FEATURES}


def kept_cases() -> list[tuple[str, ...]]:
    """The cases of the file."""
    return [tuple(line.split()) for line in FILE.read_text().splitlines()]


if __name__ == "__main__":
    FILE.write_text("".join(" ".join(case) + "\n" for case in cover()))
