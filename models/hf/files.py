"""Folders of Hugging Face checkpoints: config.json and safetensors files, in one piece or in several with an index."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

_CONFIG, _WEIGHTS, _INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"


def read_folder(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What config.json holds, and every tensor.

    MTP modules that config.json counts and the files lack are counted as none: transformers writes a DeepSeek-V3 so.

    Raises ValueError: where a file is missing or does not parse. Only safetensors are read, never pickles.
    """
    try:
        values: dict[str, Any] = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise ValueError(f"{folder / _CONFIG}: holds no JSON object; download the checkpoint again")
        if (folder / _INDEX).is_file():
            index: dict[str, Any] = json.loads((folder / _INDEX).read_text(encoding="utf-8"))
            names = sorted(set(index["weight_map"].values()))
        else:
            names = [_WEIGHTS]
        if any(Path(name).name != name for name in names):
            raise ValueError(
                f"{folder / _INDEX}: names files outside of its folder; download the checkpoint again"
            )
        tensors: dict[str, Tensor] = {}
        for name in names:
            tensors |= load_file(folder / name)
    except (OSError, KeyError, json.JSONDecodeError, SafetensorError) as error:
        raise ValueError(
            f"{folder}: not a whole Hugging Face checkpoint ({type(error).__name__}: {error}); it needs {_CONFIG} and "
            f"{_WEIGHTS}, or {_INDEX} and the files it names"
        ) from error
    return _with_modules_there(values, tensors), tensors


def _with_modules_there(values: dict[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """`values` with the number of MTP modules that `tensors` have, where they have none or `values` do not say."""
    num_layers = values.get("num_hidden_layers")
    if values.get("model_type") != "deepseek_v3" or not isinstance(num_layers, int):
        return values
    layers = {int(found[1]) for name in tensors if (found := re.match(r"(?:model\.)?layers\.(\d+)\.", name))}
    num_modules = sum(layer >= num_layers for layer in layers)
    counts = {name: values.get(name) for name in ("num_nextn_predict_layers", "num_mtp_layers")}
    if num_modules and any(count is not None for count in counts.values()):
        return values
    return {name: value for name, value in values.items() if name not in counts} | {
        "num_nextn_predict_layers": num_modules
    }


def write_folder(
    folder: Path,
    values: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    *,
    max_file_bytes: int = 5_000_000_000,
) -> None:
    """Write config.json and the tensors, in files of at most `max_file_bytes` (or one tensor)."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _CONFIG).write_text(json.dumps(dict(values), indent=2) + "\n", encoding="utf-8")
    files: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if files[-1] and size + tensor.nbytes > max_file_bytes:
            files.append({})
            size = 0
        # Two names may stand for one tensor, which a file cannot say.
        files[-1][name] = tensor.clone() if _is_shared(tensor, files[-1]) else tensor
        size += tensor.nbytes
    if len(files) == 1:
        save_file(files[0], folder / _WEIGHTS, metadata={"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    for number, file in enumerate(files, start=1):
        name = f"model-{number:05}-of-{len(files):05}.safetensors"
        save_file(file, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(file, name)
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
        "weight_map": weight_map,
    }
    (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _is_shared(tensor: Tensor, others: Mapping[str, Tensor]) -> bool:
    storage = tensor.untyped_storage().data_ptr()
    return any(other.untyped_storage().data_ptr() == storage for other in others.values())
