"""The help texts of the command line."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import dedent

from counterflow.launch.help.bench import BENCHES
from counterflow.launch.help.text import Command

_LAYOUT = (
    ("parallel.tensor_parallel_size=2", "ranks that share each layer"),
    ("parallel.pipeline_parallel_size=2", "stages of layers, one after another"),
    ("parallel.data_parallel_size=2", "copies that each take a part of the batch"),
    ("schedule=dualpipe", "1f1b, interleaved_1f1b, zb1p, zbv, dualpipe_v, ... (a wrong name lists all)"),
    ("schedule.num_microbatches=8", "parts of a step's batch (dualpipe: even, >= 2 x stages)"),
)

COMMANDS: dict[str, Command] = {
    "train": Command(
        summary="train a model in the configured layout",
        about="""\
            Prepares the text, starts one process for each rank of the layout on this machine (or joins the ranks
            that torchrun started), trains, and logs loss, speed and the pipeline's measured bubble. Without any
            override it trains a small model on the sources of your Python, on 2 x 2 x 2 ranks with DualPipe and
            ZeRO-3: a few minutes on two cores.""",
        overrides=(
            *_LAYOUT,
            ("zero.stage=3", "0, 1, 2, 3: what is sharded over the copies"),
            ("model=tiny", "the model's shape; or model.num_layers=8 and so on"),
            ("data.sources=[/my/texts]", "folders or files: .txt .md .py .rst .jsonl"),
            ("training.num_steps=100", "optimizer steps"),
            ("precision=bf16", "fp32, bf16 or fp16, master weights in fp32; precision.optimizer_states=bf16"),
            ("skip_step=skip", "skip steps that are not finite or far outside of the last ones, in bounds"),
            (
                "recompute.mode=full",
                "full, selective (recompute.modules=[attention]), auto; recompute.every=2",
            ),
            ("compression=onebit", "gradients on the wire: none, onebit, int8, int4, fp8, topk, powersgd"),
            ("compression.weights=int8", "gathers of weights: none, int8, int4, fp8"),
            ("comm.pipeline_payload=fp8", "between stages: compute (as they are), bf16, fp8"),
            ("logger=jsonl", "none, jsonl, wandb (offline) or tensorboard"),
            ("checkpoint.resume=runs/...", "go on from a run's last checkpoint"),
        ),
        examples=(
            ("counterflow train", "the main job"),
            (
                "counterflow train parallel.pipeline_parallel_size=4 parallel.data_parallel_size=1",
                "four stages of two ranks",
            ),
            (
                "counterflow train --multirun schedule=gpipe,1f1b,dualpipe training.num_steps=20",
                "three runs and a table",
            ),
            (
                "torchrun --nnodes=2 --nproc-per-node=8 ... -m counterflow train parallel.data_parallel_size=4",
                "join torchrun's ranks: 2 x 2 x 4",
            ),
        ),
        output="""\
            runs/<date-time>-<config hash>/ (launcher.runs_dir, or --out): config.yaml, metrics.jsonl, the loss
            curve, checkpoints, W&B's offline folder; rank-<n>-error.txt where a rank failed.
            --json: run_dir, final_loss, validation_loss, tokens_per_s, bubble {measured, simulated, formula}.""",
        columns=("final_loss", "validation_loss", "tokens_per_s", "bubble.measured", "bubble.simulated"),
    ),
    "simulate": Command(
        summary="prove, simulate and draw a pipeline schedule; starts no rank",
        about="""\
            Generates the schedule, proves it (every micro-batch once, no deadlock), runs it on a simulated clock
            with the costs you give, and draws the timeline. Looks at the pipeline's size and the schedule only:
            the model need not fit.""",
        overrides=(
            (
                "schedule=dualpipe",
                "1f1b, zbv, dualpipe, ..., auto, csv (`counterflow simulate --help` lists all)",
            ),
            ("parallel.pipeline_parallel_size=8", "pipeline ranks"),
            ("schedule.num_microbatches=20", "micro-batches of a step, both directions"),
            ("schedule.costs.profile=FILE", "costs that `counterflow profile` measured"),
            ("schedule.costs.forward=1", "time of a forward; [1,2,1,1] gives one per stage"),
            ("schedule.costs.input_gradient=1", "time of an input gradient"),
            ("schedule.costs.weight_gradient=1", "time of a weight gradient"),
            ("schedule.costs.pair=2", "time of an overlapped pair (null: nothing hidden)"),
            (
                "schedule.path=FILE",
                "with schedule=csv: one row per rank, as torch.distributed.pipelining writes",
            ),
        ),
        examples=(
            (
                "counterflow simulate schedule=dualpipe parallel.pipeline_parallel_size=8 "
                "schedule.num_microbatches=20",
                "makespan 66, 6 idle",
            ),
            ("counterflow simulate schedule=1f1b schedule.costs.weight_gradient=0.8", "other costs"),
            (
                "counterflow simulate --json -m schedule=gpipe,1f1b,dualpipe schedule.num_microbatches=8,16,32",
                "a table of nine",
            ),
        ),
        output="""\
            runs/simulate-<schedule>-p<ranks>-m<micro-batches>-<hash>/ (or --out): timeline as SVG and PNG, the
            actions as CSV. --json: makespan, idle, peak_activations, bubble_makespan, bubble_span, volume, ...""",
        columns=("makespan", "idle", "peak_activations", "bubble_makespan", "bubble_span"),
    ),
    "plan": Command(
        summary="count a model's parameters and FLOPs; starts no rank",
        about="""\
            plan --model-only: parameters, those that a token passes, and training FLOPs per token of a shape, with
            what each layer has of them, as formulas say: nothing is built, so the largest shapes answer at once.
            Sequences have model.max_seq_length tokens. Searching a layout for a cluster is not there yet.""",
        overrides=(
            ("model=deepseek_v3_671b", "one of conf/model, or values of your own"),
            ("model.max_seq_length=4096", "tokens of the sequences that attention's FLOPs are counted at"),
            ("model.vocab_size=32000", "null takes the tokenizer's"),
            ("model.moe.num_experts_per_token=4", "routed experts that a token goes to"),
        ),
        examples=(
            (
                "counterflow plan --model-only model=deepseek_v3_671b",
                "671 B, 37 B active, 250 GFLOPs a token",
            ),
            ("counterflow plan --model-only --json model=mixtral_8x7b", "the same as JSON"),
            (
                "counterflow plan --model-only --multirun model=qwen3_235b_a22b,kimi_k2_1t",
                "a table; 'model=glob(*)' is every shape",
            ),
        ),
        output="""\
            Nothing is written. --json: parameters, active_parameters, embedding_parameters,
            training_flops_per_token, mtp, layers [{kind, first, count, attention, routed_experts, ...}].""",
        columns=("parameters", "active_parameters", "training_flops_per_token", "mtp.parameters"),
    ),
    "profile": Command(
        summary="measure what each pipeline stage costs here, for simulate and schedule=auto",
        about="""\
            Cuts the model into the schedule's stages, times F, I, W and B of each on one rank (or on the ranks of
            its tensor axis), and the link between two local ranks with messages of the real size. Writes a file
            that schedule.costs.profile reads.""",
        overrides=(
            ("model=tiny", "the model's shape"),
            ("parallel.pipeline_parallel_size=4", "pipeline ranks"),
            ("schedule=zbv", "whose stages: two a rank for the V-shaped ones, else one"),
            ("data.micro_batch_size=2", "samples of a micro-batch"),
            ("precision=bf16", "fp32, bf16 or fp16"),
        ),
        examples=(
            ("counterflow profile parallel.pipeline_parallel_size=4", "the stages of the default schedule"),
            (
                "counterflow profile schedule=zbv --out mine.json",
                "two stages a rank, into a file of your own",
            ),
            ("counterflow profile --multirun data.micro_batch_size=1,2,4", "a table of three sizes"),
        ),
        output="""\
            runs/profile-s<stages>-<hash>.json (or --out FILE.json, or --out DIR for DIR/profile.json).
            Use it: counterflow simulate schedule=auto schedule.costs.profile=FILE ...
            --json: path, num_stages, stages [{forward_s, ...}], activation_bytes, link, inflation.""",
        columns=("num_stages", "inflation", "link.latency_s", "link.bandwidth_bytes_per_s"),
    ),
    "parity": Command(
        summary="check a layout against one process: loss, gradients, parameters",
        about="""\
            Trains the same model, data and seed for five steps in the configured layout and once more in one
            process, and prints the largest relative difference of loss, gradients and parameters. In fp32, losses
            and the first step's gradients are held to 1e-5, parameters to what Adam may make of rounding; the exit
            code is 1 where they miss it.""",
        overrides=(
            *_LAYOUT,
            ("zero.stage=3", "0, 1, 2, 3"),
            ("model.tie_embeddings=true", "tied embeddings"),
        ),
        examples=(
            ("counterflow parity", "the main job's layout"),
            ("counterflow parity schedule=1f1b zero.stage=2 parallel.tensor_parallel_size=1", "another"),
            ("counterflow parity --multirun zero.stage=0,1,2,3", "every ZeRO stage"),
        ),
        output="""\
            runs/<date-time>-parity-<config hash>/config.yaml (or --out).
            --json: loss_rel, grad_rel, param_rel, holds. `make parity` runs the whole grid.""",
        columns=("loss_rel", "grad_rel", "param_rel", "holds"),
    ),
    "memory": Command(
        summary="what each rank holds between steps, in bytes",
        about="""\
            Trains one step and prints, for each rank, the bytes of parameters, gradients and optimizer state that
            stay between steps, and the activations that were live at once beside what cost model and simulator say.""",
        overrides=(
            *_LAYOUT,
            ("zero.stage=3", "0, 1, 2, 3"),
            ("recompute.mode=full", "none, full, selective, auto: what is run again instead of kept"),
            ("model=small", "the model's shape"),
        ),
        examples=(
            ("counterflow memory", "the main job"),
            ("counterflow memory --multirun schedule=1f1b,dualpipe", "does the second copy cost memory?"),
            ("counterflow memory --multirun zero.stage=0,1,2,3", "what each ZeRO stage saves"),
            ("counterflow memory --multirun recompute.mode=none,full", "what recomputation saves"),
        ),
        output="""\
            runs/<date-time>-memory-<config hash>/config.yaml (or --out).
            --json: persistent_max, persistent_mean (bytes), ranks [{parameters, gradients, optimizer, ...}].""",
        columns=("persistent_max", "persistent_mean", "activations_max"),
    ),
    "timeline": Command(
        summary="draw a step of a run, measured above simulated, and where its time went",
        argument="RUN",
        about="""\
            Draws what each pipeline rank of a run did in one step: forward, backward, input and weight gradient,
            and idle time by its cause (waiting to receive, to send, for parameters, for the reduction of gradients).
            Below it stands the simulation of the same schedule at this step's mean costs. Prints seconds and share
            of every cause on every rank; they add up to the step.
            A run keeps the timeline of its last step; logger.timeline_interval_steps=50 keeps every fiftieth too.""",
        options=(("--step N", "which step, counted from 1; without it the last one kept"),),
        examples=(
            ("counterflow timeline runs/20260131-120000-1a2b3c4d", "the last step of this run"),
            ("counterflow timeline runs/20260131-120000-1a2b3c4d --step 50", "an earlier one"),
            ("counterflow timeline runs/20260131-120000-1a2b3c4d --json", "the account as JSON"),
        ),
        output="""\
            RUN/timeline/step-<n>: .svg, .png, .html (one page, zooms, needs no network), .trace.json (for
            ui.perfetto.dev), .json (the data).
            --json: step, step_s, makespan_s, bubble {measured, measured_span, simulated, simulated_span},
            work_inflation, account {category: seconds of each pipeline rank}, paths, ...""",
    ),
    "balance": Command(
        summary="place a run's experts by their recorded loads, and show what that gains",
        argument="RUN [KEY=VALUE ...]",
        about="""\
            Sums up how often the tokens of a run chose each expert, layer by layer, and places the experts on the
            ranks of an expert axis: in order, packed by load, and with spare slots for replicas of hot experts
            (groups to nodes, replicas to ranks, as DeepSeek's EPLB). Prints the largest load of a rank over the
            mean. In training, balance.interval_steps=N moves experts by the same rules, and
            balance.num_redundant_experts makes room for replicas.""",
        options=(
            ("num_ranks=8", "ranks of the expert axis"),
            (
                "num_redundant_experts=[0,1,2]",
                "slots of each rank for replicas, one placement for each number",
            ),
            ("num_nodes=2", "nodes over which the ranks spread"),
            ("num_groups=8", "equal blocks of experts, each of which stays on one node"),
            ("last_steps=100", "whose loads are taken; without it all"),
        ),
        examples=(
            ("counterflow balance runs/20260131-120000-1a2b3c4d", "on four ranks"),
            (
                "counterflow balance runs/20260131-120000-1a2b3c4d num_ranks=8 num_nodes=2 num_groups=4",
                "two nodes",
            ),
            (
                "counterflow balance runs/20260131-120000-1a2b3c4d last_steps=50 --json",
                "the placements as JSON",
            ),
        ),
        output="""\
            RUN/balance.png (or --out): loads of ranks by layer.
            --json: layers, before [of each layer], after {spare slots: [of each layer]}, placements {spare slots:
            [layer][rank][slot]}, png.""",
    ),
    "bench": Command(
        summary="measure the runtime, against its schedules, torch and slow links",
        argument="NAME [KEY=VALUE ...]",
        about="""\
            The project's own measurements, for anyone to run again. What is compared runs in turn, so that a busy
            machine slows both; quote the ratios, and the machine. `counterflow bench NAME --help` tells what one
            measures, its keys and how long it takes.""",
        options=tuple((name, bench.summary) for name, bench in BENCHES.items()),
        options_heading="benches:",
        examples=tuple(bench.examples[0] for bench in BENCHES.values()),
        output="""\
            runs/bench-NAME-<date-time>/ (or --out): rows.json with every figure, and the bench's pictures.
            --json: what rows.json holds.""",
    ),
}

# Options of the program that a command does not take: the first three do not take the config of a run.
_FOREIGN = {
    "timeline": ("--out", "--cfg", "--multirun", "--config-dir", "--model-only"),
    "bench": ("--cfg", "--multirun", "--config-dir", "--step", "--model-only"),
    "balance": ("--cfg", "--multirun", "--config-dir", "--step", "--model-only"),
    "plan": ("--out", "--step"),
}
_FOREIGN_TO_MOST = ("--step", "--model-only")

_OPTIONS = """\
options (anywhere on the line):
  --json             the last line of stdout is one JSON object (a list with --multirun); the rest goes to stderr
  --out DIR          write there instead of a new folder under runs/
  --cfg job          print the composed config and stop
  --multirun, -m     run every combination of a=1,2 b=x,y and print a table
  --config-dir DIR   look for config groups in DIR too (DIR/model/mine.yaml makes model=mine)
  --model-only       plan: count the model, search no layout
  --traceback        print the Python traceback of an error as well
  --help, -h         this text, or a command's
  --version          print the version

exit codes: 0 done, 1 the run failed, 2 a mistake on the command line or in the config, 130 Ctrl-C, 143 SIGTERM
"""


def foreign_options(command: str) -> tuple[str, ...]:
    """The options that `command` refuses, and its help leaves out."""
    return _FOREIGN.get(command, _FOREIGN_TO_MOST)


def program_help() -> str:
    """What `counterflow --help` prints."""
    lines = [
        "counterflow COMMAND [options] [KEY=VALUE ...]     (timeline: the folder of a run)",
        "",
        "Hybrid-parallel pretraining of language models: tensor x pipeline x data from one config.",
        "",
        "commands:",
        *(f"  {name:<10} {command.summary}" for name, command in COMMANDS.items()),
        "",
        "KEY=VALUE changes one value of the config (zero.stage=3); GROUP=CHOICE takes a prepared set of values",
        "(schedule=dualpipe). `counterflow train --cfg job` prints every key with its value.",
        "",
        "examples:",
        "  counterflow train                           a small model on eight local ranks, on any laptop",
        "  counterflow simulate schedule=dualpipe      its timeline, without starting a rank",
        "  counterflow train --help                    what train does and its most used keys",
        "",
    ]
    return "\n".join(lines) + "\n" + _OPTIONS


def command_help(name: str, words: Sequence[str] = ()) -> str:
    """What `counterflow NAME --help` prints; of bench with the name of one in `words`, what that one does."""
    command = COMMANDS[name]
    bench = next((word for word in words if word in BENCHES), None) if name == "bench" else None
    if bench is not None:
        command = BENCHES[bench]
    title = " ".join(filter(None, (name, bench)))
    rows = command.options or command.overrides
    width = max(len(text) for text, _ in rows) + 2
    lines = [
        f"counterflow {title} [options] {command.argument or '[KEY=VALUE ...]'}",
        "",
        dedent(command.about),
        "",
        command.heading,
        *(f"  {text:<{width}}{meaning}" for text, meaning in rows),
        "",
        "examples:",
        *(f"  {text}\n      {meaning}" for text, meaning in command.examples),
        "",
        "output:",
        *(f"  {line}" for line in dedent(command.output).splitlines()),
        "",
    ]
    refused = tuple(f"  {option}" for option in foreign_options(name))
    options = (line for line in _OPTIONS.splitlines() if not line.startswith(refused))
    return "\n".join(lines) + "\n" + "\n".join(options) + "\n"
