"""Which parts of a model's layers are recomputed (config node `recompute`); parallel/ops/recompute.py runs them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Literal

from counterflow.models.config import ModelConfig

# A part of a layer, see RecomputeConfig; `block` is all of it.
Part = Literal["block", "attention", "mlp", "moe", "experts", "shared_experts"]
Parts = frozenset[Part]
Plan = Mapping[int, Parts]
"""Parts by layer; MTP modules come after the layers. A layer that is not there recomputes nothing."""

NOTHING: Parts = frozenset()
BLOCK: Parts = frozenset({"block"})
MODULES: tuple[Part, ...] = ("attention", "mlp", "moe", "experts", "shared_experts")
# Names that others have for what is nothing to gain here, and why.
_POINTLESS = {
    "core_attention": "scores and probabilities are never kept, attention is one fused kernel that computes them "
    "again in its backward; `attention` is the whole of it, with its matrices",
    "norm": "what comes out of a norm is what the matrices after it keep; `attention`, `mlp` and `moe` include the "
    "norm before them",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputeConfig:
    """What is run again in the backward instead of being kept for it. No result changes by it.

    mode: none; full, every layer keeps its input only; selective, `modules` of a layer do; auto, for each layer as
        much as `budget_bytes` asks for and what costs least, as models/cost.py counts.
    modules: attention; mlp, where it is dense; moe, a whole mixture, whose tokens then travel once more; experts, what
        a rank computes for the tokens that have come, which then do not; shared_experts. The first three with the
        norm before them.
    every: of full and selective, only each such layer, counted from the first.
    budget_bytes: of auto, the activations that a rank may hold at once.
    """

    mode: Literal["none", "full", "selective", "auto"] = "none"
    modules: tuple[str, ...] = ()
    every: int = 1
    budget_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in self.modules:
            if name in _POINTLESS:
                raise ValueError(
                    f"recompute.modules={list(self.modules)}: {name} saves nothing here: {_POINTLESS[name]}"
                )
            if name not in MODULES:
                raise ValueError(
                    f"recompute.modules={list(self.modules)}: '{name}' is none of {', '.join(MODULES)}; set those that "
                    "are to be recomputed"
                )
        if bool(self.modules) != (self.mode == "selective"):
            raise ValueError(
                f"recompute.modules={list(self.modules)} with recompute.mode={self.mode}: selective recomputes these "
                "modules, and the other modes choose themselves; "
                + (
                    "set recompute.mode=selective"
                    if self.modules
                    else "set recompute.modules=[attention], say"
                )
            )
        inner = [name for name in ("experts", "shared_experts") if name in self.modules]
        if "moe" in self.modules and inner:
            raise ValueError(
                f"recompute.modules={list(self.modules)}: moe has the {' and '.join(inner)} in it; leave out one of "
                "both"
            )
        if self.every < 1 or (self.every > 1 and self.mode not in ("full", "selective")):
            raise ValueError(
                f"recompute.every={self.every} with recompute.mode={self.mode}: every so many layers of full or "
                "selective; set it to 1 or more, and the mode to one of these"
            )
        if (self.budget_bytes is not None) != (self.mode == "auto"):
            raise ValueError(
                f"recompute.budget_bytes={self.budget_bytes} with recompute.mode={self.mode}: auto keeps within this "
                "number of bytes, the other modes do not look at it; "
                + ("set recompute.budget_bytes" if self.mode == "auto" else "set recompute.mode=auto")
            )
        if self.budget_bytes is not None and self.budget_bytes < 1:
            raise ValueError(
                f"recompute.budget_bytes={self.budget_bytes}: a number of bytes; set it to 1 or more"
            )


def parts_of_layer(model: ModelConfig, layer: int) -> tuple[Part, ...]:
    """The modules that layer `layer` has, of those that can be recomputed."""
    if not model.is_moe_layer(layer):
        return ("attention", "mlp")
    shared: tuple[Part, ...] = ("shared_experts",) if model.moe.num_shared_experts else ()
    return ("attention", "moe", "experts", *shared)


def options(model: ModelConfig, layer: int) -> tuple[Parts, ...]:
    """Everything that a layer can recompute, no part within another, and BLOCK."""
    names = parts_of_layer(model, layer)
    choices: list[Parts] = []
    for chosen in product((False, True), repeat=len(names)):
        parts: frozenset[Part] = frozenset(name for name, is_in in zip(names, chosen, strict=True) if is_in)
        if "moe" not in parts or parts.isdisjoint(("experts", "shared_experts")):
            choices.append(parts)
    return (*choices, BLOCK)


def plan_of(config: RecomputeConfig, model: ModelConfig) -> dict[int, Parts]:
    """What `config` recomputes of each layer, for every mode but auto.

    Raises ValueError: for a module that no layer has.
    """
    assert config.mode != "auto", "auto depends on the schedule"
    if config.mode == "none":
        return {}
    layers = range(0, model.num_layers + model.mtp.num_modules, config.every)
    if config.mode == "full":
        return dict.fromkeys(layers, BLOCK)
    plan: dict[int, Parts] = {}
    for layer in layers:
        plan[layer] = frozenset(part for part in parts_of_layer(model, layer) if part in config.modules)
    for name in config.modules:
        if not any(name in parts for parts in plan.values()):
            there = sorted({part for layer in layers for part in parts_of_layer(model, layer)})
            raise ValueError(
                f"recompute.modules={list(config.modules)}: no layer that recompute.every={config.every} takes has "
                f"{name}; they have {', '.join(there)}"
            )
    return plan
