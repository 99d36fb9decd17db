"""NVIDIA's apex, where it is: found by what it offers, never by its name alone, and said why it is not used.

The package `apex` of PyPI is another project; NVIDIA's is installed from its source. Looking for it imports nothing,
so that it can be done before ranks start; what is done with it is in framework/optim/updaters/apex.py.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Kernel = Literal["auto", "torch", "apex"]
KernelUse = Literal["optimizer", "norm"]
# What each use needs: modules of the package, and the compiled extension behind them.
_NEEDED = {"optimizer": ("optimizers", "amp_C"), "norm": ("normalization", "fused_layer_norm_cuda")}
_SETTINGS = {"optimizer": "optimizer.kernel", "norm": "precision.norm_kernel"}
_ABSENT = "the package apex is not installed"
_NO_GPU = "apex computes on a GPU and there is none"
_INSTALL = "install NVIDIA's from https://github.com/NVIDIA/apex with its CUDA extensions"


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelChoice:
    """What computes, and why: `reason` is a part of a sentence. is_surprising: a package apex is there and not used."""

    kernel: Literal["torch", "apex"]
    reason: str
    is_surprising: bool = False


def why_no_apex(use: KernelUse, num_gpus: int) -> str | None:
    """Why apex cannot be used here for `use`; None: it can."""
    try:
        spec = importlib.util.find_spec("apex")
    except (ImportError, ValueError) as error:
        return f"looking for the package apex failed ({error})"
    if spec is None:
        return _ABSENT
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    offered = {path.stem for folder in folders for path in folder.iterdir()} if folders else set[str]()
    if not {"optimizers", "normalization"} & offered:
        where = spec.origin or (str(folders[0]) if folders else "apex")
        return f"the package apex at {where} is not NVIDIA's but the unrelated one of PyPI"
    module, extension = _NEEDED[use]
    if module not in offered:
        return f"NVIDIA's apex here has no apex.{module}"
    if importlib.util.find_spec(extension) is None:
        return f"NVIDIA's apex was built without its extension {extension}"
    if num_gpus == 0:
        return _NO_GPU
    return None


def choose_kernel(use: KernelUse, wanted: Kernel, num_gpus: int) -> KernelChoice:
    """The kernel for `use`, by the value of its setting.

    Raises ValueError: where apex is asked for and cannot be used.
    """
    if wanted == "torch":
        return KernelChoice(kernel="torch", reason="as configured")
    problem = why_no_apex(use, num_gpus)
    if problem is None:
        return KernelChoice(kernel="apex", reason="NVIDIA's apex and a GPU are there")
    if wanted == "apex":
        remedy = "" if problem == _NO_GPU else f"{_INSTALL}, or "
        raise ValueError(f"{_SETTINGS[use]}=apex: {problem}; {remedy}set {_SETTINGS[use]}=auto")
    return KernelChoice(kernel="torch", reason=problem, is_surprising=problem != _ABSENT)
