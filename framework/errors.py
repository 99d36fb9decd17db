"""Errors that reach a person as one message, without a traceback."""

from __future__ import annotations

from collections.abc import Sequence


class ConfigError(ValueError):
    """One or more mistakes in a config, each a sentence with the value, the rule and a remedy."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        if len(self.problems) == 1:
            super().__init__(self.problems[0])
        else:
            listed = "\n".join(f"  - {problem}" for problem in self.problems)
            super().__init__(f"{len(self.problems)} problems in the config:\n{listed}")


class RunFailedError(RuntimeError):
    """A rank ended the run. `rank` is the one that failed first; `details` is its traceback, where it has one."""

    def __init__(self, message: str, *, rank: int | None = None, details: str | None = None) -> None:
        super().__init__(message)
        self.rank = rank
        self.details = details


class StoppedError(RuntimeError):
    """Ranks were asked to stop by SIGTERM, and the run has stopped after a step."""


class RunInterruptedError(RuntimeError):
    """A person or the system stopped the run by `signal_number`."""

    def __init__(self, message: str, *, signal_number: int) -> None:
        super().__init__(message)
        self.signal_number = signal_number
