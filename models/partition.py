"""Cuts a model into pipeline stages of equal cost, not of equal layer counts: embedding and head weigh too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from counterflow.models.config import ModelConfig
from counterflow.models.cost import head_forward_flops, layer_forward_flops, layer_indices

# What a byte of memory traffic counts in FLOPs, for the embedding, which multiplies nothing. Processors differ
# by a factor of thirty; measured on CPU, 10 puts the embedding of small models within 2x of its time.
_FLOPS_PER_BYTE = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSlice:
    """What one stage holds: `layers` by global index, the embedding if `first`; norm, head and MTP if `last`."""

    layers: range
    first: bool
    last: bool


def partition(
    config: ModelConfig, num_stages: int, *, seq_length: int, vocab_size: int
) -> tuple[StageSlice, ...]:
    """Cut the model into `num_stages` stages, in order, so that the costliest costs the least possible.

    Among the cuts with that maximum, the most even one (least sum of squares). A stage may hold the embedding
    or the head alone; none is empty.

    Raises ValueError: where there are more stages than layers + 2.
    """
    embedding = _embedding_cost(config, seq_length=seq_length, vocab_size=vocab_size)
    layers = [
        3 * layer_forward_flops(config, index, seq_length=seq_length) for index in layer_indices(config)
    ]
    modules = layers[config.num_layers :]
    head = 3 * head_forward_flops(config, vocab_size=vocab_size)
    # The head and all that needs its stage: each MTP module applies it once more, and the embedding too.
    end = head + sum(module + head + embedding for module in modules)
    costs = [embedding, *layers[: config.num_layers], end]
    if not 1 <= num_stages <= len(costs):
        raise ValueError(
            f"{num_stages} pipeline stages: model.num_layers={config.num_layers} gives from 1 to {len(costs)}, "
            "a layer, the embedding or the head for each; use fewer stages or more layers"
        )
    bounds = balanced_cuts(costs, num_stages)
    return tuple(
        StageSlice(
            layers=range(max(start - 1, 0), min(stop - 1, config.num_layers)),
            first=start == 0,
            last=stop == len(costs),
        )
        for start, stop in pairwise(bounds)
    )


def balanced_cuts(costs: Sequence[int], num_parts: int) -> list[int]:
    """Bounds of `num_parts` non-empty runs of `costs`: run i is costs[bounds[i]:bounds[i + 1]].

    Exact: the largest run is the smallest possible, and under that limit the sum of squares is.
    """
    assert 1 <= num_parts <= len(costs)
    sums = [0, *accumulate(costs)]
    limit, _ = _best_cuts(sums, num_parts, limit=None)
    _, bounds = _best_cuts(sums, num_parts, limit=limit)
    return bounds


def _best_cuts(sums: Sequence[int], num_parts: int, *, limit: int | None) -> tuple[int, list[int]]:
    """The least maximum of run costs, or with `limit` on every run the least sum of squares; and its bounds.

    best[parts][stop] is the least value of cutting the first `stop` items into `parts` runs; cuts[parts][stop]
    is the start of the last of them.
    """
    num_items = len(sums) - 1
    best: list[dict[int, int]] = [{0: 0}]
    cuts: list[dict[int, int]] = [{}]
    for parts in range(1, num_parts + 1):
        best.append({})
        cuts.append({})
        for stop in range(parts, num_items - (num_parts - parts) + 1):
            for start, value in best[parts - 1].items():
                run = sums[stop] - sums[start]
                if start >= stop or (limit is not None and run > limit):
                    continue
                total = max(value, run) if limit is None else value + run * run
                if stop not in best[parts] or total < best[parts][stop]:
                    best[parts][stop], cuts[parts][stop] = total, start
    bounds = [num_items]
    for parts in range(num_parts, 0, -1):
        bounds.append(cuts[parts][bounds[-1]])
    return best[num_parts][num_items], bounds[::-1]


def _embedding_cost(config: ModelConfig, *, seq_length: int, vocab_size: int) -> int:
    """Per token, as FLOPs: a row read and written forward and backward, and the dense gradient of the table,
    which each micro-batch (of one sequence or more) fills, reads and adds."""
    elements = 4 * config.hidden_size + 3 * vocab_size * config.hidden_size // seq_length
    return 4 * _FLOPS_PER_BYTE * elements
