"""Overrides to a config, and the words for overrides that are wrong."""

from __future__ import annotations

from itertools import zip_longest
from pathlib import Path

import pytest
import yaml

from counterflow.framework.config.mapping import config_hash, from_mapping, to_mapping
from counterflow.framework.config.tree import TrainConfig
from counterflow.framework.errors import ConfigError
from counterflow.launch.cli import main
from counterflow.launch.compose import (
    compose_config,
    compose_mapping,
    compose_recorded,
    config_file_text,
    expand_sweep,
    find_choices,
    to_yaml,
)


def test_the_embedded_default_is_the_main_job() -> None:
    config = compose_config([])
    assert (
        config.parallel.tensor_parallel_size,
        config.parallel.pipeline_parallel_size,
        config.parallel.data_parallel_size,
    ) == (2, 2, 2)
    assert (config.schedule.name, config.zero.stage) == ("dualpipe", 3)
    assert config.schedule.num_microbatches >= 2 * config.parallel.pipeline_parallel_size


def test_every_default_stands_in_its_dataclass() -> None:
    """Groups hold choices only: with the plain choices, the composed config is the dataclasses' own."""
    plain = ["experiment=smoke", "schedule=1f1b", "logger=wandb", "checkpoint=default", "model.name=llama"]
    composed = compose_mapping([*plain, "training.num_steps=100", "training.log_interval_steps=10"])
    assert composed == to_mapping(TrainConfig())


def test_overrides_reach_groups_and_values() -> None:
    config = compose_config(
        ["schedule=1f1b", "schedule.num_microbatches=20", "zero.stage=2", "data.sources=[/a b,/c]", "seed=3"]
    )
    assert (config.schedule.name, config.schedule.num_microbatches) == ("1f1b", 20)
    assert (config.zero.stage, config.seed) == (2, 3)
    assert config.data.sources == ("/a b", "/c")


def choices_together() -> list[list[str]]:
    """The first choice of every group, then the second of each that has one, and so on; an experiment by itself."""
    groups = dict(find_choices().groups)
    alone = [[f"experiment={name}"] for name in groups.pop("experiment")]
    files = {"file": ["tokenizer.path=tokenizer.json"]}
    return alone + [
        [
            word
            for group, name in zip(groups, names, strict=True)
            if name
            for word in (f"{group}={name}", *files.get(name, []))
        ]
        for names in zip_longest(*groups.values())
    ]


@pytest.mark.parametrize("overrides", choices_together(), ids=" ".join)
def test_every_choice_composes(overrides: list[str]) -> None:
    compose_config(overrides)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("shedule=1f1b", "shedule: the config has no such key; did you mean schedule?"),
        (
            "schedule=dualpip",
            "schedule=dualpip: no such choice (did you mean dualpipe?); schedule is one of 1f1b, ",
        ),
        ("schedule=null", "schedule=null: no such choice; schedule is one of"),
        ("logger=[wandb]", "logger=[wandb]: no such choice"),
        ("zero={stag:3}", "zero.stag: the config has no such key; did you mean zero.stage?"),
        ("tensor_parallel_size=2", "did you mean parallel.tensor_parallel_size?"),
        ("foo", "'foo': not an override; write KEY=VALUE"),
        ("data.text_field=[a", "'data.text_field=[a': '[a' does not parse as a value of data.text_field"),
        ("schedule=gpipe,1f1b", "several values; add --multirun"),
        ("+a=1", "+a=1: keys are neither added nor deleted"),
        ("~seed", "~seed: keys are neither added nor deleted"),
        ("hydra.verbose=true", "Hydra's own settings are not used here"),
        ("schedule@x=gpipe", "packages (@) are not used here; write schedule=VALUE"),
        ("seed=${nope}", "seed: Interpolation key 'nope' not found"),
        ("zero.stage=5", "zero.stage=5: must be one of 0, 1, 2, 3"),
    ],
)
def test_a_wrong_override_is_told_in_one_line(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose_config([override])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_wrong_overrides_are_told_together() -> None:
    with pytest.raises(ConfigError) as caught:
        compose_config(["sede=1", "schedule=x", "seed=1"])
    assert len(caught.value.problems) == 2


def test_a_sweep_is_every_combination() -> None:
    choices = find_choices()
    combinations = expand_sweep(
        ["schedule=gpipe,1f1b", "seed=range(1,3)", "data.sources=[a,b]", "zero.stage=choice(0,3)"], choices
    )
    assert len(combinations) == 8
    assert combinations[0] == ["schedule=gpipe", "seed=1", "data.sources=[a,b]", "zero.stage=0"]
    assert combinations[-1] == ["schedule=1f1b", "seed=2", "data.sources=[a,b]", "zero.stage=3"]
    assert expand_sweep(["seed=1"], choices) == [["seed=1"]]


def test_a_sweep_over_a_group_by_pattern() -> None:
    assert expand_sweep(["memory=glob(zero*)"], find_choices()) == [
        [f"memory=zero{stage}"] for stage in range(4)
    ]
    with pytest.raises(ConfigError, match="memory is one of zero0"):
        expand_sweep(["memory=glob(x*)"], find_choices())


def test_a_folder_of_own_groups(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("num_layers: 12\n")
    (tmp_path / "model" / "slip.yaml").write_text("num_layer: 12\n")
    assert compose_config(["model=mine"], tmp_path).model.num_layers == 12
    with pytest.raises(ConfigError, match=r"model\.num_layer: .*did you mean model\.num_layers"):
        compose_config(["model=slip"], tmp_path)
    with pytest.raises(ConfigError, match="no such choice"):
        compose_config(["model=mine"])
    with pytest.raises(ConfigError, match="no such folder"):
        compose_config([], tmp_path / "nowhere")


def test_the_written_config_reads_back() -> None:
    config = compose_config(["optimizer.eps=1e-9", "model.tie_embeddings=true", "data.text_field=null_"])
    text = config_file_text(config, ["counterflow", "train"])
    assert text.splitlines()[0] == f"# config hash {config_hash(config)}"
    again = from_mapping(
        TrainConfig, yaml.safe_load(to_yaml(to_mapping(config))) | {"optimizer": {"eps": 1e-9}}
    )
    assert again == config


def test_what_the_environment_said_is_written_as_its_interpolation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CF_TEXTS", "/data/of/someone")
    overrides = [
        "data.sources=['${oc.env:CF_TEXTS}/a','https://me:pass@host/b']",
        "logger.project=${launcher.runs_dir}",
        "launcher.runs_dir=${oc.env:CF_TEXTS}/runs",
        "training.log_interval_steps=${training.eval_interval_steps}",
    ]
    config = compose_config(overrides)
    assert config.logger.project == "/data/of/someone/runs"
    recorded = compose_recorded(overrides)
    text = config_file_text(config, ["counterflow", "train", "https://me:pass@host/b"], recorded.mapping)
    written = yaml.safe_load(text)
    assert written["data"]["sources"] == ["${oc.env:CF_TEXTS}/a", "https://me:***@host/b"]
    assert written["launcher"]["runs_dir"] == "${oc.env:CF_TEXTS}/runs"
    assert written["logger"]["project"] == "${launcher.runs_dir}"
    assert written["training"]["log_interval_steps"] == config.training.eval_interval_steps
    assert "someone" not in text
    assert "pass@" not in text
    assert recorded.values["/data/of/someone"] == "${oc.env:CF_TEXTS}"


def test_an_error_does_not_tell_what_the_environment_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CF_TEXTS", "/nowhere/of/someone")
    assert main(["train", "experiment=smoke", "data.sources=['${oc.env:CF_TEXTS}/a']", "--json"]) == 2
    out, err = capsys.readouterr()
    assert "${oc.env:CF_TEXTS}/a" in err
    assert "someone" not in out + err


def test_keys_that_were_renamed_are_read_under_their_old_names(caplog: pytest.LogCaptureFixture) -> None:
    old = compose_config(["brakes=skip", "brakes.max_total=7", "model=tiny_mixtral", "balance.spare_slots=1"])
    new = compose_config(
        ["skip_step=skip", "skip_step.max_total=7", "model=tiny_mixtral", "balance.num_redundant_experts=1"]
    )
    assert old == new
    assert "brakes is called skip_step now" in caplog.text
    assert from_mapping(TrainConfig, {"brakes": {"max_total": 7}}).skip_step.max_total == 7
