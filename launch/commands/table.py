"""The table of commands, in the order of `counterflow --help`: a command is a module here and its line below."""

from __future__ import annotations

from counterflow.launch.command import Command
from counterflow.launch.commands import (
    balance,
    bench,
    doctor,
    memory,
    parity,
    plan,
    profile,
    reproduce,
    simulate,
    timeline,
    train,
)

COMMANDS: dict[str, Command] = {
    module.COMMAND.name: module.COMMAND
    for module in (
        train,
        simulate,
        plan,
        reproduce,
        profile,
        parity,
        memory,
        timeline,
        balance,
        bench,
        doctor,
    )
}
