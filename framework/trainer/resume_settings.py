"""What a checkpoint was trained with, field by field, beside what a run would go on with.

Fields of the model decide what its weights mean, many of them without a shape that would tell: they must be equal
unless the user names them. What trains the weights may change and is told. How a run is laid out over ranks and
memory is neither kept nor compared, nor is any path.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from counterflow.framework.config.mapping import to_mapping
from counterflow.framework.config.tree import TrainConfig
from counterflow.framework.devices import device_kind

_MODEL = "model."
_TRAINS = (
    "optimizer.",
    "training.num_steps",
    "training.batch_ramp.",
    "precision.",
    "skip_step.",
    "compression.",
    "balance.",
    "comm.expert_payload",
    "comm.pipeline_payload",
    "deterministic",
)
_LAYOUT = ("optimizer.offload.",)
# Of the start, of reports, or told by shapes: the vocabulary's size, where it is null, is the tokenizer's.
_WITHOUT_EFFECT = ("model.name", "model.init_std", "model.vocab_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One field that is not what it was."""

    key: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.key}: {self.old} -> {self.new}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """model: fields that must be equal and are not. trains: fields that may differ and do.

    unknown: fields of a model that only the checkpoint has. not_compared: fields that it does not say.
    """

    model: tuple[Change, ...]
    trains: tuple[Change, ...]
    unknown: tuple[str, ...]
    not_compared: tuple[str, ...]


def settings_of(config: TrainConfig) -> dict[str, Any]:
    """What a checkpoint keeps of its run's config: plain values by dotted name, with what auto stood for."""
    taken = replace(config, deterministic=config.is_deterministic(device_kind(config.device)))
    return {
        key: value
        for key, value in _flat(to_mapping(taken), "")
        if key.startswith((_MODEL, *_TRAINS)) and not key.startswith(_LAYOUT)
    }


def compare(saved: Mapping[str, Any], now: Mapping[str, Any]) -> Comparison:
    """`saved` of a checkpoint beside `now`, both from `settings_of`, perhaps of another version of this program."""
    old, new = _in_force(saved), _in_force(now)
    return Comparison(
        model=_changes(old, new),
        trains=_changes(
            *({k: v for k, v in each.items() if not k.startswith(_MODEL)} for each in (saved, now))
        ),
        unknown=tuple(f"{key}={saved[key]}" for key in sorted(saved) if key in old and key not in now),
        not_compared=tuple(key for key in now if key not in saved and key not in _WITHOUT_EFFECT),
    )


def is_allowed(allowed: Sequence[str], *keys: str) -> bool:
    """Whether one of `keys`, or a node that one is in, is among `allowed`."""
    return any(key == name or key.startswith(f"{name}.") for name in allowed for key in keys)


def _changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[Change, ...]:
    return tuple(
        Change(key=key, old=old[key], new=new[key]) for key in new if key in old and old[key] != new[key]
    )


def _in_force(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a model that have an effect, with what null stands for; a switch stays where it is off."""
    model = {key: value for key, value in settings.items() if key.startswith(_MODEL)}
    get = model.get
    idle: list[str] = [*_WITHOUT_EFFECT]
    if get("model.position") == "learned":
        idle += ["model.rope_theta", "model.yarn."]
    else:
        idle += ["model.max_seq_length"]
    if get("model.mla.kv_lora_rank"):
        idle += ["model.head_dim", "model.num_kv_heads"]
    for node, switch, off in (
        ("model.mla.", "kv_lora_rank", 0),
        ("model.yarn.", "factor", 1),
        ("model.moe.", "num_experts", 0),
        ("model.mtp.", "num_modules", 0),
    ):
        if get(node + switch, off) == off:
            idle += [key for key in model if key.startswith(node) and key != node + switch]
    if get("model.head_dim", 0) is None and get("model.hidden_size") and get("model.num_heads"):
        model["model.head_dim"] = model["model.hidden_size"] // model["model.num_heads"]
    if get("model.moe.expert_intermediate_size", 0) is None:
        model["model.moe.expert_intermediate_size"] = get("model.intermediate_size")
    return {key: value for key, value in model.items() if not key.startswith(tuple(idle))}


def _flat(mapping: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in mapping.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
