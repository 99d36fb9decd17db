"""The `counterflow` command, and other programs, in a process of their own, forked from one that has imported all.

A command as a user starts it spends most of a small run's time on importing torch. Here that is paid once: a server
without threads of its own imports everything, and each command is a fork of it.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from multiprocessing.context import ForkServerContext
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[1]
_PRELOADED = (
    "hydra",
    "counterflow.launch.cli",
    "counterflow.launch.compose",
    "counterflow.launch.ranks.elastic",
    "counterflow.launch.preflight",
    "counterflow.launch.joining",
    "counterflow.launch.sweep",
    "counterflow.framework.checks.memory",
    "counterflow.framework.checks.parity",
    "counterflow.framework.checks.profile",
    "counterflow.framework.trainer.loop",
    "torch._dynamo",  # by the first step of an optimizer, in every rank, and by a dry run
    "torch.distributed.launcher.api",
    "matplotlib.backends.backend_agg",
    "matplotlib.backends.backend_svg",
    "matplotlib.figure",
    "tests.warm",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """How a command ended, and what it wrote."""

    returncode: int | None
    stdout: str
    stderr: str


def run_command(
    words: Sequence[str],
    folder: Path,
    *,
    environment: Mapping[str, str] | None = None,
    timeout_s: float = 240.0,
) -> Done:
    """`counterflow WORDS` in `folder`, with one compute thread; `environment` is put on top of the tests' own.

    Raises AssertionError: where it has not ended in time; it is killed then.
    """
    with TemporaryDirectory(prefix="counterflow-command-") as name:
        streams = Path(name)
        process = _server().Process(
            target=_main, args=(tuple(words), folder, dict(environment or {}), streams)
        )
        process.start()
        process.join(timeout_s)
        late = process.is_alive()
        if late:
            process.kill()
            process.join()
        out, err = ((streams / each).read_text() for each in ("stdout", "stderr"))
        assert not late, f"{' '.join(words)} has not ended in {timeout_s} s:\n{out}{err}"
        return Done(returncode=process.exitcode, stdout=out, stderr=err)


class Started:
    """A program that runs, leader of a session of its own; its output can be read while it runs."""

    def __init__(
        self,
        main: Callable[[], int],
        arguments: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._folder = TemporaryDirectory(prefix="counterflow-program-")
        self.streams = Path(self._folder.name)
        for name in ("stdout", "stderr"):
            os.mkfifo(self.streams / name)
        self._process = _server().Process(
            target=_program, args=(main, tuple(arguments), dict(environment or {}), self.streams)
        )
        self._process.start()
        # Each waits for the program to open its end, in the same order.
        self.stdout, self.stderr = ((self.streams / name).open() for name in ("stdout", "stderr"))

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def holders(self) -> list[int]:
        """The live processes that have an output of this program open: its own, and what it has started."""
        found: list[int] = []
        for path in Path("/proc").glob("[0-9]*"):
            if int(path.name) == os.getpid():
                continue
            try:
                open_files = [os.readlink(each) for each in (path / "fd").iterdir()]
            except OSError:
                continue
            if any(name.startswith(f"{self.streams}/") for name in open_files):
                found.append(int(path.name))
        return found

    def finish(self) -> tuple[int, str, str]:
        """Its exit code and the rest of what it wrote, once it has ended and nobody holds its output."""
        out, err = self.stdout.read(), self.stderr.read()
        self._process.join()
        assert self._process.exitcode is not None
        return self._process.exitcode, out, err

    def close(self) -> None:
        """Let go of the output; the program has ended."""
        self._process.join()
        self.stdout.close()
        self.stderr.close()
        self._folder.cleanup()


def free_port() -> int:
    """A port of this host that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@cache
def _server() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    # The server is a Python of its own: it finds the project by this, and starts no compute threads by that.
    paths = [str(ROOT / ".src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    os.environ["OMP_NUM_THREADS"] = "1"
    context.set_forkserver_preload(list(_PRELOADED))
    return context


def _main(words: tuple[str, ...], folder: Path, environment: dict[str, str], streams: Path) -> None:
    os.chdir(folder)
    from counterflow.launch.cli import main

    _program(main, words, environment, streams)


def _program(
    main: Callable[[], int], arguments: tuple[str, ...], environment: dict[str, str], streams: Path
) -> None:
    os.setsid()
    for number, each in ((1, "stdout"), (2, "stderr")):
        file = os.open(streams / each, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, number)
        os.close(file)
    os.environ.update(environment)
    sys.argv = ["counterflow", *arguments]
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(code)
