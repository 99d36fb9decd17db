"""Which layers of a module have weight gradients that can be deferred (weight_grad.py), and how they file them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from counterflow.parallel.ops.weight_grad import WeightGradSink, split_linear


@dataclass(frozen=True, slots=True, kw_only=True)
class Adoption:
    """Which parameters of a stage have a deferrable weight gradient, by name, and which do not.

    The gradients of `immediate` parameters (norms, embeddings, convolutions, layers of a kind that is not
    known here) are computed in I, together with the input gradient.
    """

    deferred: tuple[str, ...] = ()
    immediate: tuple[str, ...] = field(default=())


class SplitLayer(Protocol):
    """A layer written for deferral: it calls `split_linear` with its sink."""

    weight_grad_sink: WeightGradSink | None

    def deferrable_parameters(self) -> tuple[nn.Parameter, ...]:
        """Those whose gradient goes to the sink."""
        ...


def adopt(module: nn.Module, sink: WeightGradSink) -> Adoption:
    """Make every linear layer of `module` file its weight gradient in `sink`.

    A layer is a `SplitLayer` or exactly torch.nn.Linear with torch's forward. A subclass, or one whose forward was
    replaced (adapters do), may compute something else and keeps its own backward; so does one whose weight is computed
    from other parameters (parametrizations, torch.nn.utils.weight_norm).
    """
    deferred: set[int] = set()
    immediate: set[int] = set()
    for layer in module.modules():
        own_names = dict(layer.named_parameters(recurse=False))
        own = {id(parameter) for parameter in own_names.values()}
        here: set[int] = set()
        if hasattr(layer, "weight_grad_sink"):
            split = cast(SplitLayer, layer)
            split.weight_grad_sink = sink
            here = {id(parameter) for parameter in split.deferrable_parameters()}
        elif _is_adoptable(layer):
            layer.forward = _SplitForward(layer, sink)  # type: ignore[method-assign]
            here = {id(layer.weight), id(layer.bias)} & own
        deferred |= here
        immediate |= own - here
    # A tied embedding is both: part of its gradient comes with the input gradient.
    deferred -= immediate
    named = list(module.named_parameters())
    return Adoption(
        deferred=tuple(name for name, parameter in named if id(parameter) in deferred),
        immediate=tuple(name for name, parameter in named if id(parameter) not in deferred),
    )


def release(module: nn.Module, sink: WeightGradSink) -> None:
    """Undo `adopt`: the layers of `module` that file in `sink` compute their weight gradients themselves again."""
    for layer in module.modules():
        forward = layer.__dict__.get("forward")
        if isinstance(forward, _SplitForward) and forward.sink is sink:
            del layer.__dict__["forward"]
        elif getattr(layer, "weight_grad_sink", None) is sink:
            cast(SplitLayer, layer).weight_grad_sink = None


class _SplitForward:
    """In place of `layer.forward`; a copy of the layer (an average of weights, say) is a plain one.

    What is done to the layer later is seen at each call: where it is no plain linear, its class's forward runs.
    """

    def __init__(self, layer: nn.Linear, sink: WeightGradSink | None = None) -> None:
        self._layer, self.sink = layer, sink

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        layer, sink = self._layer, self.sink
        if sink is not None and len(args) == 1 and not kwargs and _is_plain(layer, args[0]):
            weight, bias = cast("tuple[nn.Parameter, nn.Parameter | None]", (layer.weight, layer.bias))
            return split_linear(args[0], weight, bias, sink, is_kept=True)
        return type(layer).forward(layer, *args, **kwargs)

    def __reduce__(self) -> tuple[type[_SplitForward], tuple[nn.Linear]]:
        return _SplitForward, (self._layer,)


def _is_adoptable(layer: nn.Module) -> bool:
    forward = layer.__dict__.get("forward")
    return (forward is None or isinstance(forward, _SplitForward)) and _is_linear(layer)


def _is_plain(layer: nn.Linear, x: object) -> bool:
    """Whether `layer`, called with `x`, computes what torch.nn.Linear does, and its gradients may be filed."""
    return (
        _is_linear(layer)
        and type(x) in (Tensor, nn.Parameter)
        # Hooks of the old kind are given what the layer's last operation gets and returns.
        and not (
            getattr(layer, "_backward_hooks", None) and not getattr(layer, "_is_full_backward_hook", None)
        )
    )


def _is_linear(layer: nn.Module) -> bool:
    """Whether `layer` is torch.nn.Linear as torch wrote it, with parameters of its own."""
    return (
        type(layer) is nn.Linear
        and _is_torchs(nn.Linear.forward)
        and F.linear is torch._C._nn.linear  # pyright: ignore
        and _is_own(layer.weight)
        and (cast("object", layer.bias) is None or _is_own(layer.bias))
    )


def _is_own(value: object) -> bool:
    # A subclass of Parameter, or one of another tensor's kind (quantised, distributed), multiplies in its own way.
    return type(value) is nn.Parameter and value.is_leaf


def _is_torchs(forward: object) -> bool:
    """Whether `forward` is torch's own function; somebody may have replaced it for all layers."""
    code = getattr(forward, "__code__", None)
    return code is not None and code.co_filename == _LINEAR_FILE


_LINEAR_FILE = nn.modules.linear.__file__
