"""Recomputation: a part of a model keeps its inputs only, and is run again where its gradient is wanted.

The method is Chen et al.'s (arXiv 1604.06174). torch.utils.checkpoint is the reference this is tested against. It is
not the base, because of split backwards, sharded parameters and chunks that overlap:

Note [What runs twice, and what once]
The first pass runs without gradients. The backward runs the part again with gradients and differentiates that at
once, within the backward that asked for it: so in I layers file their weight gradients in the stage's store as ever,
W finds their inputs there, and neither runs anything again. Gradients of other parameters are accumulated, and their
hooks called, as ever. Whatever looks at `torch.is_grad_enabled` sees one pass of each: routers count in the second
(models/router.py), and their losses enter there.

Note [The same numbers]
The second pass reads the parameters that are there then: UNSHARD has made them whole before any backward. It runs
under the first pass's autocast, and with its random numbers where it drew any; then the generators are put back. What
random numbers a pass draws must be its own: where another chunk computes in between
(parallel/pipeline/runtime/overlap.py)
and draws some too, the state at the end is not the first pass's, and that is an error, not a wrong gradient.

Note [Collectives]
The second pass runs every collective of the part again, within the backward, and comes to its communication points
(parallel/expert/exchange.py) again: the ranks of an axis do so in the same order, as they do in the first.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from counterflow.parallel.dry import is_dry

T = TypeVar("T")


def recompute(function: Callable[..., T], *args: Any) -> T:
    """`function(*args)`, a tensor or a tuple of tensors, of which only the tensors in `args` are kept for a backward.

    function: it depends on its arguments and on parameters alone, gives the same again, and leaves its arguments as
        they are. Tensors that need a gradient are arguments themselves, not parts of one.
    Without gradients it is a plain call.

    Raises ValueError: where an argument holds a tensor that needs a gradient, or `function` changes an argument.
    TypeError: where it returns something else. RuntimeError: in the backward, where it gives something else.
    """
    if not torch.is_grad_enabled():
        return function(*args)
    for arg in args:
        if not isinstance(arg, Tensor) and any(tensor.requires_grad for tensor in _tensors_in(arg)):
            raise ValueError(
                f"an argument of {_name(function)}, a {type(arg).__name__}, holds a tensor that needs a gradient, and "
                "a recomputed function's gradients go to its arguments; pass that tensor as an argument"
            )
    # Something that needs a gradient, so that there is a backward where parameters alone need one.
    anchor = torch.empty(0, requires_grad=True)
    apply = cast(Callable[..., T], _Recompute.apply)  # pyright: ignore[reportUnknownMemberType]
    return apply(function, anchor, *args)


def recompute_module(module: nn.Module) -> None:
    """Make every call of `module` recomputed, in place: its parameters keep their names.

    It is called with positional arguments, see `recompute`. Hooks on parts of it run in both passes.
    Raises ValueError: where it is recomputed already, or a part of it is, or it is a linear layer, which keeps nothing
    but its input. At the first call, where it is a part of such a module.
    """
    if type(module) is nn.Linear or hasattr(module, "weight_grad_sink"):
        raise ValueError(
            f"{type(module).__name__}: a linear layer keeps its input only, so there is nothing to recompute; "
            "recompute what it is a part of"
        )
    _refuse_nested(module)
    module.forward = _RecomputedForward(module)  # type: ignore[method-assign]


class _RecomputedForward:
    """In place of `module.forward`; an object and no closure, for a copy of the module to have its own."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._earlier: Callable[..., Any] | None = module.__dict__.get("forward")
        self._is_checked = False

    def __call__(self, *args: Any) -> Any:
        if not self._is_checked:
            _refuse_nested(self._module, parts_only=True)
            self._is_checked = True
        return recompute(self._run, *args)

    def _run(self, *args: Any) -> Any:
        if self._earlier is not None:
            return self._earlier(*args)
        return type(self._module).forward(self._module, *args)

    def __repr__(self) -> str:
        return f"recomputed {type(self._module).__name__}"


def _refuse_nested(module: nn.Module, *, parts_only: bool = False) -> None:
    for name, part in module.named_modules():
        if isinstance(part.__dict__.get("forward"), _RecomputedForward) and (name or not parts_only):
            what = f"its part {name} is" if name else "it is"
            raise ValueError(
                f"{type(module).__name__}: {what} recomputed already, and would be run three times; recompute one of "
                "both"
            )


class _Recompute(torch.autograd.Function):
    """function, anchor, *args -> what `function` gives. Backward: Note [What runs twice, and what once]."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Any], anchor: Tensor, *args: Any) -> Any:
        where = [index for index, arg in enumerate(args) if isinstance(arg, Tensor)]
        tensors = cast("list[Tensor]", [args[index] for index in where])
        versions = [tensor._version for tensor in tensors]
        device_types = sorted({"cpu", *(tensor.device.type for tensor in tensors)})
        before = _random_state(tensors)
        outputs = function(*args)
        after = _random_state(tensors)
        if versions != [tensor._version for tensor in tensors]:
            raise ValueError(
                f"{_name(function)} changes an argument in place, so it cannot be run on it again; let it change a copy"
            )
        _tuple_of(function, outputs)
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        ctx.function, ctx.where = function, where
        ctx.others = tuple(None if isinstance(arg, Tensor) else arg for arg in args)
        ctx.autocast = [_Autocast.of(device_type) for device_type in device_types]
        ctx.random = None if _is_equal(before, after) else (before, after)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        tensors = [
            tensor.detach().requires_grad_(ctx.needs_input_grad[2 + index])
            for tensor, index in zip(ctx.saved_tensors, ctx.where, strict=True)
        ]
        args = list(ctx.others)
        for tensor, index in zip(tensors, ctx.where, strict=True):
            args[index] = tensor
        with torch.enable_grad(), _resumed(ctx.autocast), _drawing(ctx.function, ctx.random, tensors):
            outputs = _tuple_of(ctx.function, ctx.function(*args))
        if len(outputs) != len(grads):
            raise RuntimeError(
                f"{_name(ctx.function)} gave {len(grads)} tensors, and {len(outputs)} when it was run again"
            )
        pairs = [
            (out, grad)
            for out, grad in zip(outputs, grads, strict=True)
            if grad is not None and out.requires_grad
        ]
        del outputs
        if pairs:
            torch.autograd.backward([out for out, _ in pairs], [grad for _, grad in pairs])
        found: list[Tensor | None] = [None] * len(args)
        for tensor, index in zip(tensors, ctx.where, strict=True):
            found[index] = tensor.grad
        return None, None, *found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Autocast:
    device_type: str
    enabled: bool
    dtype: torch.dtype
    cache_enabled: bool

    @staticmethod
    def of(device_type: str) -> _Autocast:
        return _Autocast(
            device_type=device_type,
            enabled=torch.is_autocast_enabled(device_type),
            dtype=torch.get_autocast_dtype(device_type),
            cache_enabled=torch.is_autocast_cache_enabled(),
        )


@contextmanager
def _resumed(states: list[_Autocast]) -> Generator[None]:
    """Within: the autocast that these say, where it is another than now."""
    with ExitStack() as stack:
        for state in states:
            if state != _Autocast.of(state.device_type):
                stack.enter_context(
                    torch.autocast(
                        state.device_type,
                        dtype=state.dtype,
                        enabled=state.enabled,
                        cache_enabled=state.cache_enabled,
                    )
                )
        yield


RandomState = dict[torch.device, Tensor]


def _random_state(tensors: list[Tensor]) -> RandomState:
    """Of the generators that a computation on `tensors` draws from: the host's, and their devices'.

    None of tensors without values (a dry run), for which nothing is drawn.
    """
    if any(map(is_dry, tensors)):
        return {}
    state = {torch.device("cpu"): torch.get_rng_state()}
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        state[device] = torch.cuda.get_rng_state(device)
    return state


def _set_random_state(state: RandomState) -> None:
    for device, of_device in state.items():
        if device.type == "cuda":
            torch.cuda.set_rng_state(of_device, device)
        else:
            torch.set_rng_state(of_device)


def _is_equal(one: RandomState, other: RandomState) -> bool:
    return all(torch.equal(state, other[device]) for device, state in one.items())


@contextmanager
def _drawing(
    function: Callable[..., Any], states: tuple[RandomState, RandomState] | None, tensors: list[Tensor]
) -> Generator[None]:
    """Within: the random numbers drawn between the two states; None: there were none."""
    if states is None:
        yield
        return
    now = _random_state(tensors)
    begin, end = states
    _set_random_state(begin)
    try:
        yield
        if not _is_equal(_random_state(tensors), end):
            raise RuntimeError(
                f"{_name(function)} drew other random numbers when it was run again: it is not deterministic, or "
                "another computation drew some meanwhile; recompute it without overlapping it (schedule.overlap=false)"
            )
    finally:
        _set_random_state(now)


def _tuple_of(function: Callable[..., Any], outputs: Any) -> tuple[Tensor, ...]:
    values = cast("tuple[Any, ...]", outputs) if isinstance(outputs, tuple) else (outputs,)
    if not all(isinstance(value, Tensor) for value in values):
        raise TypeError(
            f"{_name(function)} returned {type(outputs).__name__}; a recomputed function returns a tensor or a tuple "
            "of tensors"
        )
    return values


def _tensors_in(value: Any) -> Generator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in cast("dict[Any, Any]", value).values():
            yield from _tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in cast("list[Any]", value):
            yield from _tensors_in(item)


def _name(function: Callable[..., Any]) -> str:
    owner = getattr(function, "__self__", None)
    if isinstance(owner, _RecomputedForward):
        return repr(owner)
    return getattr(function, "__qualname__", repr(function))
