"""Rules of commands that compare or count: what `counterflow parity` and `counterflow memory` cannot judge."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from counterflow.framework.checks.rules.rule import WITH_DEEPSPEED, Command, Finding, Nodes, Rule
from counterflow.framework.config.tree import TrainConfig
from counterflow.framework.planning.workload import Workload

# Steps that parity compares.
PARITY_STEPS = 5


def _row(
    command: Command,
    example: Nodes,
    setting: str,
    refuses: Callable[[TrainConfig], bool],
    reason: str,
    remedy: str,
) -> Rule:
    """A rule of `command` that refuses a value of one setting."""

    def find(workload: Workload) -> Iterator[Finding]:
        if refuses(workload.config):
            value: object = workload.config
            for name in setting.split("."):
                value = getattr(value, name)
            yield Finding(value=f"{setting}={value}", reason=reason, remedy=remedy)

    return Rule(name=f"{command}: {setting}", find=find, example=example, command=command)


_ROUNDED = "what is rounded differs from one process, and parity is to 1e-5"

RULES = (
    _row(
        "memory",
        WITH_DEEPSPEED,
        "zero.engine",
        lambda config: config.zero.engine != "native",
        "what it holds is not known here",
        "set zero.engine=native, or look at peak_memory_bytes in the records of a run",
    ),
    _row(
        "parity",
        WITH_DEEPSPEED,
        "zero.engine",
        lambda config: config.zero.engine != "native",
        "its gradients are its own business",
        "set zero.engine=native; `counterflow bench deepspeed` compares its losses and norms with ours",
    ),
    _row(
        "parity",
        {"compression": {"method": "int8"}},
        "compression.method",
        lambda config: config.compression.method != "none",
        "compressed gradients are not those of one process, and parity is to 1e-5",
        "set compression=none",
    ),
    _row(
        "parity",
        {"compression": {"weights": "int8"}, "zero": {"stage": 1}},
        "compression.weights",
        lambda config: config.compression.weights != "none",
        "rounded weights are not those of one process, and parity is to 1e-5",
        "set compression.weights=none",
    ),
    _row(
        "parity",
        {"comm": {"pipeline_payload": "bf16"}},
        "comm.pipeline_payload",
        lambda config: config.comm.pipeline_payload != "compute",
        "activations are rounded on their way, and parity is to 1e-5",
        "set comm.pipeline_payload=compute",
    ),
    _row(
        "parity",
        {"precision": {"compute": "fp16"}},
        "precision.compute",
        lambda config: config.precision.compute == "fp16",
        "a step whose gradients overflow is skipped, and parity compares every step",
        "set precision=fp32 or precision=bf16",
    ),
    _row(
        "parity",
        {"precision": {"reduce": "bf16"}},
        "precision.reduce",
        lambda config: config.precision.reduce != "fp32",
        _ROUNDED,
        "set precision.reduce=fp32",
    ),
    _row(
        "parity",
        {"precision": {"optimizer_states": "bf16"}},
        "precision.optimizer_states",
        lambda config: config.precision.optimizer_states != "fp32",
        _ROUNDED,
        "set precision.optimizer_states=fp32",
    ),
    _row(
        "parity",
        {"precision": {"linear": "fp8"}},
        "precision.linear",
        lambda config: config.precision.linear != "compute",
        _ROUNDED,
        "set precision.linear=compute",
    ),
    _row(
        "parity",
        {
            "model": {"moe": {"num_experts": 4}},
            "parallel": {"data_parallel_size": 2, "expert_parallel_size": 2},
            "balance": {"interval_steps": PARITY_STEPS},
        },
        "balance.interval_steps",
        lambda config: config.balance.interval_steps >= PARITY_STEPS,
        f"no expert moves in the {PARITY_STEPS} steps that parity compares",
        f"set balance.interval_steps to less than {PARITY_STEPS}, or to 0",
    ),
    _row(
        "parity",
        {
            "model": {"moe": {"num_experts": 4}},
            "parallel": {"data_parallel_size": 2, "expert_parallel_size": 2},
            "comm": {"expert_payload": "bf16"},
        },
        "comm.expert_payload",
        lambda config: config.comm.expert_payload != "compute" and config.parallel.expert_parallel_size > 1,
        "hidden states are rounded on their way, and parity is to 1e-5",
        "set comm.expert_payload=compute",
    ),
)
