"""The help of every bench: what it measures, its keys with their defaults, and how long it takes."""

from __future__ import annotations

from counterflow.launch.help.text import Command

_KEYS = "[KEY=VALUE ...]"
_HEADING = "its keys, with their defaults:"

BENCHES: dict[str, Command] = {
    "schedules": Command(
        summary="how close the runtime comes to its schedules, beside torch's runtime",
        argument=_KEYS,
        options_heading=_HEADING,
        about="""\
            With sleeping stages (every F, I and W sleeps, transfers are real) the ranks run side by side on any
            number of cores, and what a step takes beyond the simulation is the runtime's own; then a small Llama
            computes for real on two ranks. torch.distributed.pipelining runs the same stages, step by step in turn.
            On a busy machine every figure rises.""",
        options=(
            ("mode=both", "sleep, compute or both"),
            ("schedules=[]", "which, as in [1f1b,zbv]; []: every one that takes the sizes"),
            ("num_microbatches=[32]", "micro-batches of a step, one row for each"),
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
            rows.json, schedules.png and .svg.
            --json: rows [{schedule, num_stages, num_microbatches, measured_idle, theory_idle, ratio_to_torch}],
            compute_rows [{schedule, tokens_per_s, ratio_to_torch_1f1b, ratio_to_limit}].""",
    ),
    "p2p": Command(
        summary="whether transfers in chunks (comm.p2p_chunk_bytes) pay",
        argument=_KEYS,
        options_heading=_HEADING,
        about="""\
            Transfers of an activation, and steps of sleeping stages, in chunks and whole by turns, over loopback and
            over an emulated link of limited rate (network namespaces: Linux, root).""",
        options=(
            ("tensor_mib=[4]", "sizes of the activation"),
            ("chunk_kib=[256,1024]", "sizes of the chunks"),
            ("mbit_per_s=[1000]", "emulated links; [] for loopback only"),
            ("num_ranks=4", "ranks of the pipeline"),
            ("action_ms=30", "time of one F, I or W of a stage"),
            ("repeats=9", "counted transfers and steps of each"),
        ),
        examples=(
            ("counterflow bench p2p", "loopback and one emulated link"),
            ("counterflow bench p2p mbit_per_s=[200,1000]", "two emulated links"),
        ),
        output="rows.json, a table.",
    ),
    "overlap": Command(
        summary="how much of the experts' exchange of tokens the pairs of a schedule hide",
        argument=_KEYS,
        options_heading=_HEADING,
        about="""\
            Steps with overlapped pairs and without by turns, on four ranks over a slow network (namespaces where they
            are allowed, else a wait per byte): the share of the exchange that is hidden, and what a step gains.""",
        options=(
            ("mode=sleep", "sleep, compute or both"),
            ("schedules=[dualpipe]", "dualpipe, dualpipe_v, interleaved_1f1b: those that have pairs"),
            ("num_microbatches=20", "micro-batches of a step"),
            ("phase_ms=20", "time of a sleeping phase"),
            ("alltoall_share=0.35", "of a layer's time, by which the tokens' size is chosen"),
            ("mbit_per_s=400", "rate of the links"),
            ("network=auto", "namespaces, injected (a wait per byte) or auto"),
            ("tokens=512", "of a micro-batch"),
            ("repeats=5", "counted steps of each"),
        ),
        examples=(
            ("counterflow bench overlap", "dualpipe; about two minutes"),
            ("counterflow bench overlap schedules=[dualpipe_v,interleaved_1f1b]", "two others"),
        ),
        output="""\
            rows.json, overlap_*.png and .svg: a step with overlap above one without.
            --json: rows [{schedule, alltoall_share, hidden_share, speedup, step_s, step_s_without, ...}].""",
    ),
    "optimizer": Command(
        summary="what optimizer.post_validation gains",
        argument=_KEYS,
        options_heading=_HEADING,
        about="""\
            Rows of steps of sleeping stages that wait for the gradient norm of all ranks, that do not, and of which
            every other one has to be undone and made again.""",
        options=(
            ("schedules=[1f1b,zb1p,zb_h2,zbv,dualpipe]", "which"),
            ("num_ranks=4", "ranks of the pipeline"),
            ("num_microbatches=8", "micro-batches of a step"),
            ("action_ms=30", "time of one F, I or W of a stage"),
            ("num_steps=6", "steps of a row"),
            ("repeats=3", "counted rows of each"),
        ),
        examples=(("counterflow bench optimizer", "five schedules; about five minutes"),),
        output="rows.json, a table.",
    ),
    "compression": Command(
        summary="what compressed reductions of gradients send, lose and take",
        argument=_KEYS,
        options_heading=_HEADING,
        about="""\
            On the gradient of a model, over links without a limit and with one, in turn: the gain in step time beside
            the one that the bytes predict.""",
        options=(
            ("methods=[onebit,int8,int4,fp8,topk,powersgd]", "which"),
            ("model=small", "whose gradient"),
            ("num_ranks=2", "ranks that reduce"),
            ("everywhere=true", "every rank gets the whole sum (ZeRO 0); false: its own range"),
            ("mbit_per_s=200", "rate of the emulated link; null for loopback only"),
            ("compute_ms=0", "compute of a step that stands beside the reduction"),
            ("repeats=5", "counted reductions of each"),
        ),
        examples=(("counterflow bench compression", "six methods, on a slow link too; about two minutes"),),
        output="rows.json, a table.",
    ),
    "deepspeed": Command(
        summary="DeepSpeed's engine (zero.engine=deepspeed) beside our own sharding",
        argument=_KEYS,
        options_heading=_HEADING,
        about="""\
            Both train one model in fp32 on gloo ranks, step by step in turn: how far losses and gradient norms differ,
            and how long a step takes. It holds where no loss differs by more than 1e-4.""",
        options=(
            ("stages=[0,1,2,3]", "of ZeRO, one row for each"),
            ("model=tiny", "which"),
            ("data_parallel_size=2", "ranks that share data out"),
            ("tensor_parallel_size=1", "ranks that share a layer out"),
            ("num_microbatches=2", "micro-batches of a step"),
            ("num_steps=20", "of each engine"),
        ),
        examples=(
            ("counterflow bench deepspeed", "four stages on two ranks; about five minutes"),
            ("counterflow bench deepspeed tensor_parallel_size=2 stages=[3]", "on four ranks"),
        ),
        output="""\
            rows.json, a table.
            --json: rows [{stage, loss_difference, norm_difference, holds, time_ratio, native, deepspeed}], holds.""",
    ),
    "memory": Command(
        summary="the activations a rank holds, recomputed or offloaded, and what that costs in time",
        argument=_KEYS,
        options_heading=_HEADING,
        about="""\
            Steps of one small Llama that keeps everything, recomputes its attention or all of it, and offloads by lru
            and by schedule within budgets, in turn: the most activations of each rank beside what is predicted, the
            time of a step, and what copies make it wait. Copies are held to a rate at which they matter.""",
        options=(
            ("schedule=gpipe", "the more micro-batches live at once, the lower a budget can be"),
            ("num_ranks=2", "ranks of the pipeline"),
            ("num_microbatches=12", "micro-batches of a step"),
            ("budgets=[0.2,0.4,0.6,0.8]", "shares of what the rank that holds most would hold"),
            ("tier=disk", "where activations go: host or disk"),
            ("copy_share=0.8", "what moving out takes of the forward's time"),
            ("hidden_size=256", "of the model"),
            ("num_layers=4", "of the model"),
            ("tokens=512", "of a micro-batch"),
            ("repeats=5", "counted steps of each"),
        ),
        examples=(
            ("counterflow bench memory", "twelve cases; about three minutes"),
            ("counterflow bench memory schedule=zbv budgets=[0.5]", "another schedule"),
        ),
        output="""\
            rows.json, memory.png and .svg: the time of a step over the most that a rank holds.
            --json: rows [{name, budget_bytes, peak_bytes, simulated_peak_bytes, step_ratio, stall_s,
            simulated_stall_s, moved_bytes, hit_rate, ...}], copy_bytes_per_s.""",
    ),
}
