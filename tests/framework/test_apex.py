"""apex is found by what it offers; the unrelated package is named; the choice and its reason are said."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from framework.apex import choose_kernel, why_no_apex
from framework.apex_kernels import ApexAdamW
from framework.optimizer_config import OptimizerConfig
from framework.updaters import TorchAdamW
from tests.framework.test_updaters import parts_of, run_updater


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


class FusedAdam(torch.optim.Optimizer):
    """Reads and keeps what apex's does: the step in the group, two moments in the state."""

    def __init__(
        self,
        params: Any,
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        adam_w_mode: bool,
        bias_correction: bool,
    ) -> None:
        assert adam_w_mode
        assert bias_correction
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            group["step"] += 1
            beta1, beta2 = group["betas"]
            for master in group["params"]:
                mean, square = (self.state[master][name] for name in ("exp_avg", "exp_avg_sq"))
                mean.mul_(beta1).add_(master.grad, alpha=1 - beta1)
                square.mul_(beta2).add_(master.grad.square(), alpha=1 - beta2)
                scale = (square / (1 - beta2 ** group["step"])).sqrt() + group["eps"]
                change = mean / (1 - beta1 ** group["step"]) / scale + group["weight_decay"] * master
                master.sub_(group["lr"] * change)


def test_steps_and_moments_reach_fused_adam() -> None:
    """With an optimizer of apex's shape in its place: as torch's AdamW, over steps at several rates."""
    config = OptimizerConfig()
    results = [
        run_updater(updater, parts_of(updater, config))
        for updater in (ApexAdamW(config, FusedAdam), TorchAdamW(config))
    ]
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    assert all(math.isfinite(float(tensor.sum())) for tensor in results[0])
