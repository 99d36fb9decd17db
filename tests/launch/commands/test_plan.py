"""`counterflow plan`: a model counted, as JSON and as one table of a sweep, layouts searched, and what is refused."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from counterflow.framework.config.tree import TrainConfig
from counterflow.launch.arguments import parse
from counterflow.launch.cli import main
from counterflow.launch.command import UsageError
from counterflow.launch.commands.plan import count_model, readable
from counterflow.models.config import ModelConfig
from tests.models.shapes import shape


def test_deepseek_v3() -> None:
    text = io.StringIO()
    result = count_model(TrainConfig(model=shape("deepseek_v3_671b")), console=Console(file=text, width=80))
    assert json.loads(json.dumps(result)) == result
    assert result["parameters"] == pytest.approx(671e9, rel=0.01)
    assert result["active_parameters"] - result["embedding_parameters"] == pytest.approx(36.7e9, rel=0.01)
    assert result["training_flops_per_token"] == pytest.approx(250e9, rel=0.01)
    assert result["mtp"]["parameters"] == pytest.approx(11.5e9, rel=0.01)
    assert (result["model"], result["seq_length"], result["vocab_size"]) == ("deepseek_v3_671b", 4096, 129280)
    layers = result["layers"]
    assert [(layer["kind"], layer["first"], layer["count"]) for layer in layers] == [
        ("dense", 0, 3),
        ("moe", 3, 58),
        ("mtp", 61, 1),
    ]
    of_layers = sum(layer["count"] * layer["parameters"] for layer in layers[:2])
    assert of_layers + result["embedding_parameters"] + result["head_parameters"] == result["parameters"]
    for shown in (
        "671.03 B",
        "36.63 B without the embedding",
        "250.45 G a token",
        "58 x moe",
        "1 x MTP",
        "router",
    ):
        assert shown in text.getvalue()
    assert max(map(len, text.getvalue().splitlines())) < 100


def test_a_dense_model_with_the_tokenizers_vocabulary() -> None:
    text = io.StringIO()
    result = count_model(TrainConfig(), console=Console(file=text, width=80))
    assert (result["mtp"], result["vocab_size"]) == (None, TrainConfig().tokenizer.vocab_size)
    assert result["active_parameters"] == result["parameters"]
    assert len(result["layers"]) == 1
    for absent in ("router", "MTP"):
        assert absent not in text.getvalue()


def test_flops_are_counted_at_the_models_sequence_length() -> None:
    def flops(length: int) -> int:
        config = TrainConfig(model=ModelConfig(max_seq_length=length))
        return count_model(config, console=Console(quiet=True))["training_flops_per_token"]

    # 4 layers, two products over 1024 keys more of 4 heads of 32, 2 FLOPs each, half of the keys, 3 times.
    assert flops(2048) - flops(1024) == 3 * 4 * 2 * 2 * 1024 * 128 // 2


def test_on_the_command_line(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model-only", "--json", "model=mixtral_8x7b"]) == 0
    out, err = capfd.readouterr()
    assert json.loads(out.splitlines()[-1])["parameters"] == 46_702_792_704
    assert "46.70 B" in err


def test_a_sweep_is_one_table(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model-only", "--json", "--multirun", "model=llama3_8b,qwen3_30b_a3b"]) == 0
    out, err = capfd.readouterr()
    results = json.loads(out.splitlines()[-1])
    assert [result["model"] for result in results] == ["llama3_8b", "qwen3_30b_a3b"]
    assert "30.53e9" in err
    assert "parameters of one layer" not in err


def test_layouts_are_not_planned_yet(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "model=tiny"]) == 2
    assert "add --model-only" in capfd.readouterr().err
    with pytest.raises(UsageError, match="--model-only: no option of train"):
        parse(["train", "--model-only"])


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0"), (999, "999"), (14336, "14.34 K"), (671.0264e9, "671.03 B"), (1.06e15, "1060.00 T")],
)
def test_readable(count: float, text: str) -> None:
    assert readable(count) == text


def test_layouts_of_a_cluster_as_json(capfd: pytest.CaptureFixture[str]) -> None:
    words = [
        "model=llama3_8b",
        "cluster=a100_16",
        "tokens=1e12",
        "global_batch=32",
        "model.max_seq_length=4096",
    ]
    assert main(["plan", "--json", *words]) == 0
    found = json.loads(capfd.readouterr().out.splitlines()[-1])
    first, *others = found["layouts"]
    assert found["config"] == first["config"]
    assert first["gpu_hours"] == pytest.approx(1e12 / first["tokens_per_s"] * 16 / 3600)
    assert first["dollars"] == pytest.approx(2.0 * first["gpu_hours"])
    assert all(other["seconds"] >= first["seconds"] for other in others)
    assert first["why"] == "the fastest that fits"


@pytest.mark.parametrize("word", ["tokens=-1", "tokens=many", "global_batch=1.5", "cluster=h900"])
def test_a_mistake_in_what_is_planned_for_is_told(word: str, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["model=llama3_8b", "cluster=a100_16", word]
    assert main(["plan", *words]) == 2
    assert word.partition("=")[0] in capfd.readouterr().err
