"""A pairwise cover of the features that compose: few configs, each pair of features together in one of them.

Greedy and deterministic: the first pair that no case has yet begins a case, and every other feature is added to it
that keeps what is there, passes the check, and brings a pair that is missing. That takes many checks of a config, so
the cases are kept in a file. `python -m tests.composition_cover` writes it anew, for a pair that no case has.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations
from pathlib import Path
from typing import Any

from counterflow.framework.config.compositions import REFUSALS
from counterflow.framework.config.features import FEATURES, active_features
from counterflow.framework.config.tree import TrainConfig
from tests.tiny import MIXTURES, merged, tiny_config

Pair = frozenset[str]
NUM_STEPS = 2
FILE = Path(__file__).parent / "golden" / "composition_cover.txt"

_TWO_STAGES = {"parallel": {"pipeline_parallel_size": 2}}
_EXPERTS = {"model": MIXTURES["mixtral"]}
_EXPERT_RANKS = merged(_EXPERTS, {"parallel": {"data_parallel_size": 2, "expert_parallel_size": 2}})


def _schedule(name: str) -> dict[str, Any]:
    return merged(_TWO_STAGES, {"schedule": {"name": name, "num_microbatches": 4}})


# What switches each feature on, with what it needs beside it.
SWITCHES: dict[str, dict[str, Any]] = {
    "tensor_parallel": {"parallel": {"tensor_parallel_size": 2}},
    "sequence_parallel": {"parallel": {"tensor_parallel_size": 2, "sequence_parallel": True}},
    "pipeline_parallel": _TWO_STAGES,
    "data_parallel": {"parallel": {"data_parallel_size": 2}},
    "expert_parallel": _EXPERT_RANKS,
    "1f1b": {"schedule": {"name": "1f1b", "num_microbatches": 4}},
    **{
        name: _schedule(name)
        for name in (
            "naive", "gpipe", "interleaved_1f1b", "zb1p", "zb_h2", "zbv", "v_half", "v_min", "dualpipe", "dualpipe_v"
        )
    },
    **{f"zero_{stage}": {"zero": {"stage": stage}} for stage in (1, 2, 3)},
    "bf16": {"precision": {"compute": "bf16"}},
    "fp16": {"precision": {"compute": "fp16"}},
    "bf16_reduce": {"precision": {"reduce": "bf16"}},
    "bf16_states": {"precision": {"optimizer_states": "bf16"}},
    "skip_step": {"skip_step": {"skip_non_finite": True}},
    "compression": {"compression": {"method": "int8"}},
    "quantised_weights": {"compression": {"weights": "int8"}},
    "pipeline_payload": merged(_TWO_STAGES, {"comm": {"pipeline_payload": "fp8"}}),
    "chunked_loss": {"loss": {"chunk_tokens": 5}},
    "recomputation": {"recompute": {"mode": "full"}},
    "experts": _EXPERTS,
    "balance": merged(_EXPERT_RANKS, {"balance": {"interval_steps": 1}}),
    "copies": merged(_EXPERT_RANKS, {"balance": {"policy": "pack", "num_redundant_experts": 1}}),
    "mtp": {"model": {"mtp": {"num_modules": 1}}},
    "mla": {"model": {"mla": MIXTURES["deepseek_v3"]["mla"]}},
    "post_validation": {"optimizer": {"post_validation": True}},
    "tied_embeddings": {"model": {"tie_embeddings": True}},
    "checkpoints": {"checkpoint": {"enabled": True}},
    "host_parameters": {
        "zero": {"stage": 3, "offload_parameters": True},
        "optimizer": {"offload": {"tier": "host"}},
    },
    "host_states": {"optimizer": {"offload": {"tier": "host"}}},
    "disk_states": {"optimizer": {"offload": {"tier": "disk"}}},
}  # fmt: skip

# What a feature needs where no other says more.
NEEDS: dict[str, dict[str, Any]] = {"quantised_weights": {"zero": {"stage": 1}}}

# Features that are in no case, and why.
ELSEWHERE = {
    "context_parallel": "is refused altogether",
    "onebit_adam": "is refused altogether",
    "not_1f1b": "is what every schedule but one is",
    "auto": "takes a second of search a case: tests/framework/checks/test_parity.py",
    "csv": "takes a file: tests/framework/checks/test_parity.py",
    "fp8": "takes wider layers than the tiny model's: tests/framework/test_precision.py",
    "offload": "takes a budget that follows the schedule: tests/framework/memory/test_offload.py",
    "batch_ramp": "takes several steps: tests/framework/test_batch_ramp.py",
    "documents": "takes batches of another kind: tests/framework/test_document_batches.py",
    "deepspeed_engine": "takes the package's own loop: tests/framework/deepspeed",
    "cpu_adam": "is compiled at its first use: tests/framework/optim/updaters/test_host_states.py",
}

# Alternatives: values of one setting, or of two of which the one says what the other is.
ALTERNATIVES = (
    {name for name in SWITCHES if name in {"1f1b"} or "schedule" in SWITCHES[name]},
    {"zero_1", "zero_2", "zero_3"},
    {"bf16", "fp16"},
    {"host_states", "disk_states"},
    {"host_parameters", "disk_states"},  # the masters on the host are the parameters
    {"host_parameters", "zero_1"},  # only stage 3 has shards of parameters
    {"host_parameters", "zero_2"},
)


def config_of(features: Iterable[str]) -> TrainConfig | None:
    """The tiny config with these features on; None where they need different values, or the check refuses them."""
    wanted = set(features)
    nodes: dict[str, Any] = {"training": {"num_steps": NUM_STEPS}}
    for key in wanted & NEEDS.keys():
        nodes = merged(nodes, NEEDS[key])
    for key in SWITCHES:  # in one order, whatever the order of `features`
        if key in wanted:
            nodes = merged(nodes, SWITCHES[key])
    try:
        config = tiny_config(**_without_layout(nodes), **_layout(nodes))
    except ValueError:
        return None
    return config if wanted <= {feature.key for feature in active_features(config)} else None


def _layout(nodes: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `tiny_config` that are not nodes."""
    parallel, schedule = nodes.get("parallel", {}), nodes.get("schedule", {})
    return {
        "pp": parallel.get("pipeline_parallel_size", 1),
        "dp": parallel.get("data_parallel_size", 1),
        "tp": parallel.get("tensor_parallel_size", 1),
        "schedule": schedule.get("name", "1f1b"),
        "zero": nodes.get("zero", {"stage": 0}),
    }


def _without_layout(nodes: dict[str, Any]) -> dict[str, Any]:
    return {name: node for name, node in nodes.items() if name not in ("schedule", "zero")}


def refused_pairs() -> set[Pair]:
    """The pairs that the table of compositions refuses."""
    return {frozenset((row.first, row.second)) for row in REFUSALS}


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
