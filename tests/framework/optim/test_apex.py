"""apex is found by what it offers; the unrelated package is named; the choice and its reason are said."""

from __future__ import annotations

import importlib
import inspect
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.adamw import adamw

from counterflow.framework.optim.apex import choose_kernel, why_no_apex
from counterflow.framework.optim.config import OptimizerConfig
from counterflow.framework.optim.updaters.apex import ApexAdamW, use_apex_norms
from counterflow.framework.optim.updaters.updater import TorchAdamW
from counterflow.models.norm import LayerNorm, RMSNorm
from tests.framework.optim.updaters.test_updater import parts_of, run_updater


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that Python finds packages in first; none of what is called apex is imported yet."""
    for name in [name for name in sys.modules if name.split(".")[0] == "apex"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    yield tmp_path
    importlib.invalidate_caches()


def make(root: Path, *files: str) -> None:
    for file in files:
        path = root / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("raise AssertionError('looking for it must not import it')\n")


NVIDIA = ("apex/__init__.py", "apex/optimizers/__init__.py", "apex/normalization/__init__.py")


def test_nothing_there(packages: Path) -> None:
    assert why_no_apex("optimizer", 1) == "the package apex is not installed"
    choice = choose_kernel("optimizer", "auto", 1)
    assert (choice.kernel, choice.reason) == ("torch", "the package apex is not installed")


def test_the_unrelated_package_is_named(packages: Path) -> None:
    make(packages, "apex/__init__.py", "apex/models.py", "apex/views.py", "apex/lib/libapex.py")
    choice = choose_kernel("norm", "auto", 1)
    assert choice.kernel == "torch"
    assert f"the package apex at {packages / 'apex/__init__.py'} is not NVIDIA's" in choice.reason
    with pytest.raises(
        ValueError,
        match=r"^optimizer.kernel=apex: the package apex at .* unrelated one of PyPI; install NVIDIA's from",
    ):
        choose_kernel("optimizer", "apex", 1)


@pytest.mark.parametrize(("use", "extension"), [("optimizer", "amp_C"), ("norm", "fused_layer_norm_cuda")])
def test_nvidias(packages: Path, use: Literal["optimizer", "norm"], extension: str) -> None:
    make(packages, *NVIDIA)
    assert f"built without its extension {extension}" in str(why_no_apex(use, 1))
    make(packages, f"{extension}.py")
    importlib.invalidate_caches()
    assert why_no_apex(use, 1) is None
    assert choose_kernel(use, "auto", 1).kernel == "apex"
    assert choose_kernel(use, "torch", 1).kernel == "torch"
    assert choose_kernel(use, "auto", 0).reason == "apex computes on a GPU and there is none"
    with pytest.raises(ValueError, match=r"apex computes on a GPU and there is none; set .*kernel=auto"):
        choose_kernel(use, "apex", 0)


def test_a_part_of_nvidias(packages: Path) -> None:
    make(packages, "apex/__init__.py", "apex/normalization/__init__.py", "amp_C.py")
    assert "has no apex.optimizers" in str(why_no_apex("optimizer", 1))


# What NVIDIA documents, as read in its source (https://github.com/NVIDIA/apex): the signatures that our calls must fit,
# with the file and commit of each. Of C++ functions (pybind11) every argument is positional.
DOCUMENTED = {
    # apex/optimizers/fused_adam.py at f7fa414; 004da4e has capturable and use_master behind them
    "FusedAdam": "params, lr=1e-3, bias_correction=True, betas=(0.9, 0.999), eps=1e-8, adam_w_mode=True, "
    "weight_decay=0., amsgrad=False, set_grad_none=True",
    "FusedAdam.step": "closure=None, grads=None, output_params=None, scale=None, grad_norms=None",
    # apex/multi_tensor_apply/multi_tensor_apply.py at 16fadfe; it calls op(chunk_size, noop_flag, lists, *args)
    "multi_tensor_applier": "op, noop_flag_buffer, tensor_lists, *args",
    # csrc/amp_C_frontend.cpp at 093bab6: returns (norm, norm of each tensor)
    "multi_tensor_l2norm": "chunk_size, noop_flag, tensor_lists, per_tensor_python, /",
    # apex/normalization/fused_layer_norm.py at 3c53cf8
    "fused_rms_norm_affine": "input, weight, normalized_shape, eps=1e-6, memory_efficient=False",
    "fused_layer_norm_affine": "input, weight, bias, normalized_shape, eps=1e-6, memory_efficient=False",
}
# What FusedAdam.step reads and writes: `group["step"]`, raised before use, and these of `self.state[parameter]`.
FUSED_ADAM_STATE = ("exp_avg", "exp_avg_sq")


def bound(name: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """The arguments of a call of what is documented as `name`, by their names; TypeError where it does not fit."""
    signature = inspect.signature(eval(f"lambda {DOCUMENTED[name]}: None"))
    call = signature.bind(*args, **kwargs)
    call.apply_defaults()
    return dict(call.arguments)


class DocumentedFusedAdam(torch.optim.Optimizer):
    """Takes the documented call and computes by torch's AdamW on what FusedAdam reads."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        call = bound("FusedAdam", *args, **kwargs)
        assert not call["amsgrad"], "FusedAdam raises"
        assert call["adam_w_mode"], "decay would be added to the gradient"
        self.bias_correction = call["bias_correction"]
        defaults = {name: call[name] for name in ("lr", "bias_correction", "betas", "eps", "weight_decay")}
        super().__init__(call["params"], defaults)

    @torch.no_grad()
    def step(self, *args: Any, **kwargs: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        call = bound("FusedAdam.step", *args, **kwargs)
        assert set(call.values()) == {None}, "FusedAdam raises for arguments of former versions"
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for master in group["params"]:
                assert master.dtype == torch.float32
                assert set(self.state[master]) == set(FUSED_ADAM_STATE)
                mean, square = (self.state[master][name] for name in FUSED_ADAM_STATE)
                adamw(
                    [master],
                    [master.grad],
                    [mean],
                    [square],
                    [],
                    [torch.tensor(float(group["step"] - 1))],
                    amsgrad=False,
                    beta1=group["betas"][0],
                    beta2=group["betas"][1],
                    lr=group["lr"],
                    weight_decay=group["weight_decay"],
                    eps=group["eps"],
                    maximize=False,
                )


def test_the_call_of_fused_adam_is_the_documented_one() -> None:
    """Steps and moments reach it: as torch's AdamW, over steps at several rates."""
    config = OptimizerConfig()
    results = [
        run_updater(updater, parts_of(updater, config))
        for updater in (ApexAdamW(config, DocumentedFusedAdam), TorchAdamW(config))
    ]
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    assert all(math.isfinite(float(tensor.sum())) for tensor in results[0])


def test_the_call_of_the_norm_of_many_tensors_is_the_documented_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def applier(*args: Any, **kwargs: Any) -> Any:
        call = bound("multi_tensor_applier", *args, **kwargs)
        return call["op"](2048 * 32, call["noop_flag_buffer"], call["tensor_lists"], *call["args"])

    def l2norm(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        call = bound("multi_tensor_l2norm", *args)
        assert call["noop_flag"].dtype == torch.int32
        assert not call["per_tensor_python"]
        (tensors,) = call["tensor_lists"]
        return torch.cat([tensor.flatten() for tensor in tensors]).norm().reshape(1), torch.empty(0)

    modules = {
        "apex.multi_tensor_apply": {"multi_tensor_applier": applier},
        "amp_C": {"multi_tensor_l2norm": l2norm},
    }
    for name, members in modules.items():
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**members))
    squares = ApexAdamW.squares([torch.tensor([3.0, 4.0]), torch.tensor([[12.0]])])
    assert squares.dtype == torch.float64
    assert squares.item() == pytest.approx(169.0)


def test_the_calls_of_fused_norms_are_the_documented_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    def rms(*args: Any, **kwargs: Any) -> torch.Tensor:
        call = bound("fused_rms_norm_affine", *args, **kwargs)
        return F.rms_norm(call["input"], tuple(call["normalized_shape"]), call["weight"], call["eps"])

    def layer(*args: Any, **kwargs: Any) -> torch.Tensor:
        call = bound("fused_layer_norm_affine", *args, **kwargs)
        shape = tuple(call["normalized_shape"])
        return F.layer_norm(call["input"], shape, call["weight"], call["bias"], call["eps"])

    fused = SimpleNamespace(fused_rms_norm_affine=rms, fused_layer_norm_affine=layer)
    monkeypatch.setitem(sys.modules, "apex.normalization.fused_layer_norm", fused)
    x = torch.randn(3, 8)
    for kind in (RMSNorm, LayerNorm):
        norm = kind(8, eps=1e-5, partial_over_tensor=False).to_empty(device="cpu")
        for parameter in norm.parameters():
            nn.init.normal_(parameter)
        expected = norm(x)
        use_apex_norms(norm)
        torch.testing.assert_close(norm(x), expected)


def test_another_call_does_not_fit() -> None:
    with pytest.raises(TypeError):
        bound("FusedAdam", [], foreach=True)
    with pytest.raises(TypeError):
        bound("multi_tensor_l2norm", 1, torch.zeros(1), per_tensor_python=False)
