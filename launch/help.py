"""The help texts of the command line."""

from __future__ import annotations

from dataclasses import dataclass
from textwrap import dedent


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """summary: one line. about: what it does. overrides: the most used ones, (text, meaning). output: where
    results go. columns: dotted names of the result that a sweep's table shows. argument: what the command takes
    where that is not a config, and then `options`, its own ones.
    """

    summary: str
    about: str
    examples: tuple[tuple[str, str], ...]
    output: str
    overrides: tuple[tuple[str, str], ...] = ()
    columns: tuple[str, ...] = ()
    argument: str = ""
    options: tuple[tuple[str, str], ...] = ()


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
            ("precision=bf16", "fp32 or bf16, master weights in fp32"),
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
                "torchrun --nnodes=2 --nproc-per-node=8 ... -m launch.train parallel.data_parallel_size=4",
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
            ("schedule=dualpipe", "one of conf/schedule: gpipe, 1f1b, zbv, ..., auto, csv"),
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
            ("precision=bf16", "fp32 or bf16"),
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
            process, and prints the largest relative difference of loss, gradients and parameters. In fp32, loss
            and gradients are held to 1e-5; the exit code is 1 where they miss it.""",
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
            stay between steps, and the activations that were live at once beside the simulator's figure.""",
        overrides=(*_LAYOUT, ("zero.stage=3", "0, 1, 2, 3"), ("model=small", "the model's shape")),
        examples=(
            ("counterflow memory", "the main job"),
            ("counterflow memory --multirun schedule=1f1b,dualpipe", "does the second copy cost memory?"),
            ("counterflow memory --multirun zero.stage=0,1,2,3", "what each ZeRO stage saves"),
        ),
        output="""\
            runs/<date-time>-memory-<config hash>/config.yaml (or --out).
            --json: persistent_max, persistent_mean (bytes), ranks [{parameters, gradients, optimizer, ...}].""",
        columns=("persistent_max", "persistent_mean"),
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
    "bench": Command(
        summary="measure the runtime against its schedules and against torch's",
        argument="schedules [KEY=VALUE ...]",
        about="""\
            bench schedules: how close the runtime comes to its schedules. With sleeping stages (every F, I and W
            sleeps, transfers are real) the ranks run side by side on any number of cores, and what a step takes
            beyond the simulation is the runtime's own; then a small Llama computes for real on two ranks.
            torch.distributed.pipelining runs the same stages, step by step in turn. Quote ratios, and the machine:
            on a busy one every figure rises.""",
        options=(
            ("mode=both", "sleep, compute or both"),
            ("schedules=[1f1b,zbv]", "which; without it every one that takes the sizes"),
            ("num_microbatches=[20,32]", "micro-batches of a step, one row for each"),
            ("num_ranks=8", "ranks of the sleeping pipeline"),
            ("action_ms=30", "time of one F, I or W of a stage"),
            ("repeats=5", "counted steps of each"),
        ),
        examples=(
            ("counterflow bench schedules", "everything; about ten minutes"),
            (
                "counterflow bench schedules mode=sleep schedules=[dualpipe] num_microbatches=[20,32]",
                "two rows",
            ),
            ("counterflow bench schedules mode=compute repeats=3", "real compute only"),
        ),
        output="""\
            runs/bench-schedules-<date-time>/ (or --out): rows.json, schedules.png and .svg.
            --json: rows [{schedule, num_stages, num_microbatches, measured_idle, theory_idle, ratio_to_torch}],
            compute_rows [{schedule, tokens_per_s, ratio_to_torch_1f1b, ratio_to_limit}].""",
    ),
}

_OPTIONS = """\
options (anywhere on the line):
  --json             the last line of stdout is one JSON object (a list with --multirun); the rest goes to stderr
  --out DIR          write there instead of a new folder under runs/
  --cfg job          print the composed config and stop
  --multirun, -m     run every combination of a=1,2 b=x,y and print a table
  --config-dir DIR   look for config groups in DIR too (DIR/model/mine.yaml makes model=mine)
  --traceback        print the Python traceback of an error as well
  --help, -h         this text, or a command's
  --version          print the version

exit codes: 0 done, 1 the run failed, 2 a mistake on the command line or in the config, 130 Ctrl-C, 143 SIGTERM
"""


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


def command_help(name: str) -> str:
    """What `counterflow NAME --help` prints."""
    command = COMMANDS[name]
    rows = command.options or command.overrides
    width = max(len(text) for text, _ in rows) + 2
    lines = [
        f"counterflow {name} [options] {command.argument or '[KEY=VALUE ...]'}",
        "",
        dedent(command.about),
        "",
        "its own options:" if command.options else "most used keys:",
        *(f"  {text:<{width}}{meaning}" for text, meaning in rows),
        "",
        "examples:",
        *(f"  {text}\n      {meaning}" for text, meaning in command.examples),
        "",
        "output:",
        *(f"  {line}" for line in dedent(command.output).splitlines()),
        "",
    ]
    return "\n".join(lines) + "\n" + _OPTIONS
