"""Searches the layout of a training run on a cluster: tensor x pipeline x data x expert ranks, schedule,
micro-batch and recomputation, ranked by the throughput of the simulated step, within memory. Starts no rank.
Beside the config's keys: cluster=h800_2048, one of conf/cluster (_COUNT: another number of devices) or a file;
tokens=14.8e12 of the whole run; global_batch=15360 sequences of a step, 8 for each device where it is left out.
With --model-only: parameters, those that a token passes, and training FLOPs per token of a shape, with what each
layer has of them. Nothing is built, so the largest shapes answer at once. Sequences have model.max_seq_length tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from counterflow.launch.command import Command, Help, LaunchOptions, Option, UsageError
from counterflow.launch.printing import new_table, print_lines

if TYPE_CHECKING:
    from rich.console import Console

    from counterflow.framework.config.tree import TrainConfig
    from counterflow.models.cost import LayerCost, ModelCost

_HELP = Help(
    about=__doc__ or "",
    keys="""
        model=deepseek_v3_671b  one of conf/model, or values of your own
        model.max_seq_length=4096  tokens of the sequences that attention's FLOPs are counted at
        model.vocab_size=32000  null takes the tokenizer's
        model.moe.num_experts_per_token=4  routed experts that a token goes to""",
    examples="""
        counterflow plan model=deepseek_v3_671b cluster=h800_2048 tokens=14.8e12  the best layouts, hours and cost
        counterflow plan --model-only model=deepseek_v3_671b  671 B, 37 B active, 250 GFLOPs a token
        counterflow plan --model-only --json model=mixtral_8x7b  the same as JSON
        counterflow plan --model-only --multirun model=qwen3_235b_a22b,kimi_k2_1t  \
a table; 'model=glob(*)' is every shape""",
    output="""
        Nothing is written. --json: layouts [{tensor, pipeline, data, expert, schedule, num_microbatches,
        seconds, tokens_per_s, mfu, bubble, memory_bytes, gpu_hours, dollars, why, ...}], nearly [...], config (words
        of `counterflow train` for the first), num_candidates, num_simulated.
        With --model-only: parameters, active_parameters, embedding_parameters,
        training_flops_per_token, mtp, layers [{kind, first, count, attention, routed_experts, ...}].""",
)
# Rows of the table of layers: heading, and the field of the record.
_PARTS = (
    ("attention", "attention"),
    ("router", "router"),
    ("routed experts", "routed_experts"),
    ("MLP or shared", "dense_mlp"),
    ("norms, rest", "rest"),
    ("together", "parameters"),
    ("active", "active_parameters"),
)


def run(config: TrainConfig, options: LaunchOptions) -> dict[str, Any]:
    """`count_model` or `plan_layouts`, printed. Raises UsageError: with neither a cluster nor --model-only."""
    from rich.console import Console

    if not options.own["model_only"]:
        if not options.own["cluster"]:
            raise UsageError(
                "plan: no cluster is named; add cluster=h800_2048 (one of conf/cluster) to search its layouts, or "
                "add --model-only to count the model"
            )
        from counterflow.launch.planning import plan_layouts

        return plan_layouts(config, options, console=Console(quiet=options.in_sweep))

    # A sweep ends in one table of all.
    return count_model(config, console=Console(quiet=options.in_sweep))


def count_model(config: TrainConfig, *, console: Console) -> dict[str, Any]:
    """Print parameters, active parameters and FLOPs per token of `config.model`, and what each layer has of them.

    Sequences have model.max_seq_length tokens; the vocabulary is the model's or, where it has none, the tokenizer's.
    Returns what `--json` prints. parameters, active_parameters and the FLOPs are of the model that is left after
    training; `mtp` has what MTP modules add, or None.
    """
    from dataclasses import asdict

    from counterflow.models.cost import model_cost

    vocab_size = config.expected_vocab_size
    seq_length = config.model.max_seq_length
    whole = model_cost(config.model, seq_length=seq_length, vocab_size=vocab_size)
    cost = whole.without_mtp
    full = model_cost(
        config.model, seq_length=seq_length, vocab_size=vocab_size, causal_halved=False
    ).without_mtp
    mtp = None
    if config.model.mtp.num_modules:
        mtp = {
            "num_modules": config.model.mtp.num_modules,
            "parameters": whole.parameters - cost.parameters,
            "active_parameters": whole.active_parameters - cost.active_parameters,
            "training_flops_per_token": whole.training_flops_per_token - cost.training_flops_per_token,
        }
    result = {
        "model": config.model.name,
        "seq_length": seq_length,
        "vocab_size": vocab_size,
        "parameters": cost.parameters,
        "active_parameters": cost.active_parameters,
        "embedding_parameters": cost.embedding_parameters,
        "head_parameters": cost.head_parameters,
        "forward_flops_per_token": cost.forward_flops_per_token,
        "training_flops_per_token": cost.training_flops_per_token,
        "training_flops_per_token_without_causal_halving": full.training_flops_per_token,
        "mtp": mtp,
        "layers": [{**asdict(layer), "parameters": layer.parameters} for layer in whole.layers],
    }
    _print(console, config.model.name, cost, full, mtp)
    _print_layers(console, whole)
    return result


def _print(console: Console, name: str, cost: ModelCost, full: ModelCost, mtp: dict[str, Any] | None) -> None:
    active = cost.active_parameters
    lines = [
        f"{name}: sequences of {cost.seq_length:,} tokens, vocabulary of {cost.vocab_size:,}",
        f"parameters          {readable(cost.parameters)}",
        f"active for a token  {readable(active)}; {readable(active - cost.embedding_parameters)} without the embedding",
        f"training FLOPs      {readable_flops(cost.training_flops_per_token)} a token, causal attention halved; "
        f"{readable_flops(full.training_flops_per_token)} with it whole",
    ]
    if mtp is not None:
        lines.append(
            f"MTP adds            {readable(mtp['parameters'])} parameters, {readable(mtp['active_parameters'])} "
            f"active, {readable_flops(mtp['training_flops_per_token'])} training FLOPs a token"
        )
    print_lines(console, *lines)


def _print_layers(console: Console, cost: ModelCost) -> None:
    """A column for each kind of layer, a row for each part."""
    columns = ("", *map(_layers_text, cost.layers), "embedding", "norm, head")
    table = new_table("parameters of one layer", columns, left=("",))
    ends = {"parameters", "active_parameters"}
    for title, name in _PARTS:
        values = [getattr(run, name) for run in cost.layers]
        if any(values):
            both = (cost.embedding_parameters, cost.head_parameters) if name in ends else (0, 0)
            table.add_row(title, *[readable(value) if value else "" for value in (*values, *both)])
    flops = [run.forward_flops_per_token for run in cost.layers]
    of_layers = sum(run.count * run.forward_flops_per_token for run in cost.layers)
    head = cost.forward_flops_per_token - of_layers
    table.add_row("forward FLOPs", *map(readable_flops, flops), "", readable_flops(head))
    kept = [f"{run.activation_bytes / 2**20:,.0f} MiB" for run in cost.layers]
    table.add_row("activations", *kept, "", "")
    notes = ["FLOPs: of a token; activations: in bf16, of one sequence, whole"]
    if any(run.kind == "mtp" for run in cost.layers):
        notes.append("MTP: with the head once more")
    table.caption = "; ".join(notes)
    console.print(table)


def _layers_text(run: LayerCost) -> str:
    if run.kind == "mtp":
        return f"{run.count} x MTP"
    last = run.first + run.count - 1
    return f"{run.count} x {run.kind}\n{run.first} to {last}" if run.count > 1 else f"1 x {run.kind}\n{last}"


def readable(count: float) -> str:
    """As `671.03 B`, for parameters."""
    return _scaled(count, ("", " K", " M", " B", " T"))


def readable_flops(count: float) -> str:
    """As `250.45 G`, with SI prefixes as FLOPs have them."""
    return _scaled(count, ("", " K", " M", " G", " T", " P"))


def _scaled(count: float, units: Sequence[str]) -> str:
    for unit in units:
        if abs(count) < 1000 or unit == units[-1]:
            return f"{count:.0f}" if unit == "" else f"{count:.2f}{unit}"
        count /= 1000
    raise AssertionError("the last unit takes any count")


COMMAND = Command(
    name="plan",
    summary="search the fastest layout for a cluster, or count a model; starts no rank",
    help=_HELP,
    run=run,
    check=lambda config: None,
    columns=("parameters", "active_parameters", "training_flops_per_token", "mtp.parameters"),
    options=(Option("--model-only", "plan: count the model, search no layout"),),
    own_keys=("cluster", "tokens", "global_batch"),
    takes_out=False,
)
