"""Further predictions: against transformers' MTP modules, what each predicts, and the model cut into stages."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

from counterflow.models.config import ModelConfig
from counterflow.models.hf.config import to_hf_config
from counterflow.models.hf.files import write_folder
from counterflow.models.hf.weights import to_hf
from counterflow.models.mtp import IGNORED, shifted
from counterflow.models.transformer import TransformerStage, materialize
from counterflow.parallel.collectives import Axis
from counterflow.parallel.parameters import placement_of
from tests.models.hf.model import build, router_biases, sample, state_of
from tests.models.hf.tiny_shapes import DEEPSEEK_V3, VOCAB
from tests.models.placement import assert_close_to_scale, grad_of

NUM_LAYERS = DEEPSEEK_V3.num_layers


def load_module(module: torch.nn.Module, tensors: dict[str, Tensor], layer: int) -> None:
    """Fill transformers' MTP module, whose block keeps all experts in one, with the layer `layer` of a checkpoint."""
    prefix = f"model.layers.{layer}."
    found = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
    experts = range(DEEPSEEK_V3.moe.num_experts)

    def stacked(part: str) -> Tensor:
        return torch.stack([found.pop(f"mlp.experts.{index}.{part}_proj.weight") for index in experts])

    values = {
        "mtp_block.mlp.experts.gate_up_proj": torch.cat((stacked("gate"), stacked("up")), dim=1),
        "mtp_block.mlp.experts.down_proj": stacked("down"),
        "post_norm.weight": found.pop("shared_head.norm.weight"),
    }
    del found["shared_head.head.weight"], found["embed_tokens.weight"]
    own = ("enorm.weight", "hnorm.weight", "eh_proj.weight")
    values |= {name if name in own else f"mtp_block.{name}": value for name, value in found.items()}
    module.load_state_dict(values)


def test_logits_are_those_of_transformers(tmp_path: Path) -> None:
    stage = build(DEEPSEEK_V3)
    tensors = to_hf(state_of(stage), DEEPSEEK_V3)
    write_folder(tmp_path, to_hf_config(DEEPSEEK_V3, vocab_size=VOCAB, max_positions=64), tensors)
    assert json.loads((tmp_path / "config.json").read_text())["num_nextn_predict_layers"] == 2
    main = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager", dtype=torch.float32)
    reference = MtpModel(main, 2).eval()
    for index, module in enumerate(reference.layers):
        load_module(module, tensors, NUM_LAYERS + index)

    tokens, targets = sample(VOCAB)
    state = main.model(input_ids=tokens).last_hidden_state
    logits, hidden = stage(tokens)
    assert_close_to_scale(hidden, state)
    assert_close_to_scale(logits, main(input_ids=tokens).logits)
    predictions = stage.mtp_predictions(hidden, targets)
    assert len(predictions) == 2
    length = tokens.shape[1]
    inputs = targets
    for index, (found, _) in enumerate(predictions):
        positions = torch.arange(length)[None] + index + 1
        state = reference.forward_layer(index, state, positions, None, input_ids=inputs)
        known = length - index  # what stands at the end has no token to come from
        expected = reference.shared_head(state)
        assert (found[:, :known] - expected[:, :known]).abs().max() <= 1e-4
        inputs = torch.nn.functional.pad(inputs[:, 1:], (0, 1))


def test_a_module_predicts_the_token_after_the_next() -> None:
    stage, (tokens, targets) = build(DEEPSEEK_V3), sample(VOCAB)
    _, hidden = stage(tokens)
    (_, first), (_, second) = stage.mtp_predictions(hidden, targets)
    assert first[:, :-1].equal(targets[:, 1:])
    assert second[:, :-2].equal(targets[:, 2:])
    assert (first[:, -1:] == IGNORED).all()
    assert (second[:, -2:] == IGNORED).all()
    assert shifted(targets).equal(first)


def test_what_needs_an_ignored_token_is_not_predicted() -> None:
    """Position 5's next token is not known: module 0 has no input there, and no target at position 4."""
    stage, (tokens, targets) = build(DEEPSEEK_V3), sample(VOCAB)
    targets = targets.clone()
    targets[0, 5] = IGNORED
    _, hidden = stage(tokens)
    (_, first), (_, second) = stage.mtp_predictions(hidden, targets)
    length = targets.shape[1]
    assert (first[0] == IGNORED).nonzero().flatten().tolist() == [4, 5, length - 1]
    assert (second[0] == IGNORED).nonzero().flatten().tolist() == [3, 4, 5, length - 2, length - 1]


def test_a_module_sees_no_later_token() -> None:
    """The prediction at position 6 is of token 8 (of 9, by the second) and may depend on tokens to 7 (to 8)."""
    stage, (tokens, targets) = build(DEEPSEEK_V3), sample(VOCAB)
    text = torch.cat((tokens, targets[:, -1:]), dim=1)

    def logits(changed: int | None) -> list[Tensor]:
        words = text.clone()
        if changed is not None:
            words[:, changed] = (words[:, changed] + 1) % VOCAB
        _, hidden = stage(words[:, :-1])
        return [found[:, 6] for found, _ in stage.mtp_predictions(hidden, words[:, 1:])]

    before = logits(None)
    for index in range(2):
        assert torch.equal(logits(8 + index)[index], before[index])
        assert not torch.allclose(logits(7 + index)[index], before[index])


def last_stage(config: ModelConfig) -> TransformerStage:
    stage = TransformerStage(
        config,
        range(2, NUM_LAYERS),
        first=False,
        last=True,
        tensor=Axis(),
        sequence_parallel=False,
        vocab_size=VOCAB,
    )
    materialize(stage, device="cpu", seed=5)
    return stage


def test_a_last_stage_has_an_equal_copy_of_the_embedding() -> None:
    for tied, copy in ((False, "mtp.embedding.weight"), (True, "head.weight")):
        config = replace(DEEPSEEK_V3, tie_embeddings=tied)
        whole = dict(build(config).named_parameters())
        stage = last_stage(config)
        parameters = dict(stage.named_parameters())
        assert placement_of(parameters[copy]).tied_to == "embedding.weight"
        assert torch.equal(parameters[copy], whole["embedding.weight"])
        names = set(whole) | {copy}
        assert set(parameters) <= names
        assert "embedding.weight" not in parameters
        assert ("mtp.embedding.weight" in parameters) != tied


def test_stages_in_a_row_give_the_gradients_of_the_whole() -> None:
    whole = build(DEEPSEEK_V3)
    values = dict(whole.named_parameters())
    first = TransformerStage(
        DEEPSEEK_V3,
        range(2),
        first=True,
        last=False,
        tensor=Axis(),
        sequence_parallel=False,
        vocab_size=VOCAB,
    )
    materialize(first, device="cpu", seed=5)
    stages = (first, last_stage(DEEPSEEK_V3))
    tokens, targets = sample(VOCAB)

    def loss_of(stage: TransformerStage, logits: Tensor, hidden: Tensor) -> Tensor:
        pairs = [(logits, targets), *stage.mtp_predictions(hidden, targets)]
        return sum(
            (
                torch.nn.functional.cross_entropy(found.flatten(0, 1), wanted.flatten(), ignore_index=IGNORED)
                for found, wanted in pairs
            ),
            start=torch.zeros(()),
        )

    biases = router_biases(whole)
    with torch.no_grad():
        for stage in stages:
            for name, parameter in stage.named_parameters():
                parameter.copy_(values[placement_of(parameter).tied_to or name])
            for name, bias in router_biases(stage).items():
                bias.copy_(biases[name])
    loss = loss_of(whole, *whole(tokens))
    loss.backward()
    logits, hidden = stages[1](stages[0](tokens))
    other = loss_of(stages[1], logits, hidden)
    assert torch.equal(other, loss)
    other.backward()
    grads: dict[str, Tensor] = {}
    for stage in stages:
        for name, parameter in stage.named_parameters():
            source = placement_of(parameter).tied_to or name
            grads[source] = grads.get(source, torch.zeros(())) + grad_of(parameter)
    assert set(grads) == set(values)
    for name, grad in grads.items():
        assert_close_to_scale(grad, grad_of(values[name]), name)
