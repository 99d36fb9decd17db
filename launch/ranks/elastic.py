"""Local ranks through torch's elastic launcher: started together, watched, and ended together.

The ranks are forked from this process, which has imported torch once. Whatever ends one of them ends all: an
exception, a signal, Ctrl-C on the launcher, even SIGKILL on the launcher. The launcher names the first cause and
leaves no process behind, those that the ranks themselves started included.

Keep this process free of compute threads (no tensor arithmetic, no tokenizer) before `run_local`: a fork copies
locks, but not the threads that hold them.

Note [Ranks start together]
One thread there always is: the store's server, which looks up the name of every peer that connects, under a lock
of the C library that a fork does not reset (seen: glibc 2.36, resolv_conf). A rank that is forked at that moment
would wait for the lock for ever in its own first connection. So no rank connects before all have been forked.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from counterflow.framework.errors import RunFailedError, RunInterruptedError, StoppedError
from counterflow.launch.ranks.environment import check_single_start, socket_environment
from counterflow.launch.ranks.failure import RankExit, describe, error_path, keep
from counterflow.launch.ranks.reports import Report, Reports, explain

_POLL_S = 0.05
_START_POLL_S = 0.002
# A rank that lost a peer waits this long before it leaves, so that the launcher sees the peer's own end first.
_HOLD_SECONDARY_S = 2.0
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankPlan:
    """What a rank's process needs to know before its entry runs."""

    control_dir: Path
    run_dir: Path
    reports: Sequence[Report]
    launcher_pid: int
    num_ranks: int
    num_threads: int
    hidden: Mapping[str, str]
    environment: Mapping[str, str]


@dataclass(slots=True)
class _Stop:
    """The signal that asked the launcher to stop, and how often it was asked."""

    signal_number: int | None = None
    requests: int = 0


def run_local(
    entry: Callable[..., Any],
    args: Sequence[Any],
    *,
    num_ranks: int,
    run_dir: Path,
    threads_per_rank: int | None = None,
    grace_s: float = 5.0,
    hidden: Mapping[str, str] | None = None,
    environment: Mapping[str, str] | None = None,
) -> list[Any]:
    """`entry(*args)` on `num_ranks` local processes; what each returned, by rank (must pickle).

    Each rank has RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set, and ignores SIGINT: the launcher
    decides. SIGTERM ends it, unless it installs a handler; then it has `grace_s` before SIGKILL.
    hidden: what stands in messages and tracebacks in place of a value (framework/redaction.py, `hidden_values`).

    environment: variables that each rank has besides, before it does anything.

    Every port that the launcher and its ranks listen on is of the loopback address (launch/ranks/loopback.py).

    Raises ConfigError: where torchrun, Slurm or MPI has started several copies of this process.
    Raises RunFailedError: naming the rank that failed first and why; its traceback is in `run_dir`.
    Raises RunInterruptedError: on SIGINT, SIGTERM or SIGHUP to this process, once every rank has ended.
    """
    check_single_start(os.environ)
    # Asked through NVML, whether there are GPUs leaves CUDA untouched, and only then may a process fork.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from counterflow.launch.ranks import loopback

    loopback.register()
    reports = Reports(num_ranks)
    control_dir = Path(tempfile.mkdtemp(prefix=".ranks-", dir=run_dir))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=control_dir.name,
        role="rank",
        rdzv_backend=loopback.BACKEND,
        local_addr=loopback.ADDRESS,
        max_restarts=0,
        monitor_interval=_POLL_S,
        start_method="fork" if sys.platform == "linux" else "spawn",
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
        # The other signals are handled here, so that a second one does not cut the shutdown short.
        signals_to_handle="SIGQUIT",
        shutdown_timeout=int(grace_s),
    )
    plan = _RankPlan(
        control_dir=control_dir,
        run_dir=run_dir,
        reports=reports.of_rank,
        launcher_pid=os.getpid(),
        num_ranks=num_ranks,
        num_threads=threads_per_rank or max(1, _num_cores() // num_ranks),
        hidden=hidden or {},
        environment=environment or {},
    )
    stop = _Stop()
    watcher = _Watcher(control_dir, num_ranks, grace_s, stop, reports)
    failures: dict[int, Any] = {}
    results: dict[int, Any] | None = None
    try:
        with _no_leftovers(), _quiet(), _signals(stop, SignalException):
            watcher.start()
            try:
                results = elastic_launch(config, _rank_main)(entry, args, plan)
            except ChildFailedError as error:
                failures = error.failures
            except SignalException as error:
                stop.signal_number = stop.signal_number or error.sigval
            finally:
                watcher.finish()
        if stop.signal_number is not None:
            raise _interrupted(stop.signal_number, num_ranks)
        if results is None:
            raise _failed(watcher, failures, plan)
        return [results[rank] for rank in range(num_ranks)]
    finally:
        reports.close()
        shutil.rmtree(control_dir, ignore_errors=True)


def _rank_main(entry: Callable[..., Any], args: Sequence[Any], plan: _RankPlan) -> Any:
    """A rank's process: `entry(*args)`, its failure recorded. Never raises."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != plan.launcher_pid:
        os._exit(1)  # the launcher died before the kernel was told to tell us
    logging.disable(logging.NOTSET)
    # The tokenizer library warns when it finds itself in a forked process, unless this is set.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.update({**socket_environment(), **plan.environment})
    rank = int(os.environ["RANK"])
    (plan.control_dir / f"pid-{rank}").write_text(str(os.getpid()))
    _wait_for_all_ranks(plan)
    report = plan.reports[rank]
    report.ready()

    import torch

    torch.set_num_threads(plan.num_threads)
    try:
        result = entry(*args)
    except BaseException as error:
        record = describe(rank, error, plan.hidden)
        report.failed(record)  # before any disk is written to: it may be full, and that the cause
        if isinstance(error, StoppedError):
            os._exit(128 + signal.SIGTERM)  # asked to; it left everything in order
        if not_kept := keep(error_path(plan.run_dir, rank), record.traceback):
            report.failed(replace(record, not_kept=not_kept))
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        if record.secondary:
            time.sleep(_HOLD_SECONDARY_S)
        os._exit(1)  # threads that would not end must not keep a failed rank alive
    report.done()
    return result


def _wait_for_all_ranks(plan: _RankPlan) -> None:
    """Return once every rank's process is there (Note [Ranks start together]); the launcher ends us if one dies."""
    for rank in range(plan.num_ranks):
        while not (plan.control_dir / f"pid-{rank}").exists():
            time.sleep(_START_POLL_S)


class _Watcher(threading.Thread):
    """Sees how each rank's process ends, and kills what does not end in time.

    torch's launcher reports one failure and gives the others 30 s; this thread looks at every exit (without
    reaping it, which stays torch's part) and holds the launcher to `grace_s`.
    """

    def __init__(
        self, control_dir: Path, num_ranks: int, grace_s: float, stop: _Stop, reports: Reports
    ) -> None:
        super().__init__(name="rank-watcher", daemon=True)
        self.exits: list[RankExit] = []
        self.killed: set[int] = set()
        self._control_dir = control_dir
        self.num_ranks = num_ranks
        self._grace_s = grace_s
        self._stop_request = stop
        self.reports = reports
        self._finished = threading.Event()
        self._gone: set[int] = set()

    def finish(self) -> None:
        self._finished.set()
        if self.ident is not None:
            self.join()

    def run(self) -> None:
        if not hasattr(os, "pidfd_open"):
            return
        poller = select.poll()
        pids: dict[int, tuple[int, int]] = {}
        deadline: float | None = None
        try:
            while not self._finished.is_set():
                self._register(poller, pids)
                is_ending = deadline is not None
                failed = [
                    self._look(poller, *pids[fd], fd, is_ending) for fd, _ in poller.poll(_POLL_S * 1000)
                ]
                if any(error.waited for error in self.reports.errors()):
                    # A rank that waited too long lingers before it leaves: the others can still be asked.
                    self.reports.ask_for_stacks(each for each in pids.values() if each[0] not in self._gone)
                if deadline is None and (any(failed) or self._stop_request.requests):
                    deadline = time.monotonic() + self._grace_s
                late = deadline is not None and time.monotonic() >= deadline
                if late or self._stop_request.requests > 1:
                    self._kill(pids)
        finally:
            for fd in pids:
                os.close(fd)

    def _register(self, poller: select.poll, pids: dict[int, tuple[int, int]]) -> None:
        registered = {rank for rank, _ in pids.values()}
        for rank in range(self.num_ranks):
            if rank in registered:
                continue
            with contextlib.suppress(OSError, ValueError):
                pid = int((self._control_dir / f"pid-{rank}").read_text())
                fd = os.pidfd_open(pid)
                pids[fd] = (rank, pid)
                poller.register(fd, select.POLLIN)

    def _look(self, poller: select.poll, rank: int, pid: int, fd: int, is_ending: bool) -> bool:
        """Whether this rank, which has just ended, failed."""
        time_s = time.time()
        poller.unregister(fd)
        self._gone.add(rank)
        code, is_seen = 0, False
        # Where torch was quicker to reap it, the code is 0, or torch reports the failure with its code.
        with contextlib.suppress(ChildProcessError):
            status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if status is not None:
                is_seen = True
                code = status.si_status if status.si_code == os.CLD_EXITED else -status.si_status
        failed = code != 0 or not self.reports.is_done(rank)
        # While the run is being ended SIGTERM is torch's own, most likely, and so is what torch has reaped: no cause.
        if is_ending and (code == -signal.SIGTERM or not is_seen):
            self.killed.add(rank)
        if failed and rank not in self.killed:
            self.exits.append(RankExit(rank=rank, pid=pid, code=code, time_s=time_s))
        return failed

    def _kill(self, pids: dict[int, tuple[int, int]]) -> None:
        for fd, (rank, _) in pids.items():
            if rank not in self._gone and rank not in self.killed:
                self.killed.add(rank)  # its end is no cause of the failure
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(fd, signal.SIGKILL)


def _failed(watcher: _Watcher, failures: dict[int, Any], plan: _RankPlan) -> RunFailedError:
    exits = {end.rank: end for end in watcher.exits}
    for rank, failure in failures.items():
        if rank in watcher.killed:
            continue
        time_s = exits[rank].time_s if rank in exits else float(failure.timestamp)
        exits[rank] = RankExit(rank=rank, pid=failure.pid, code=failure.exitcode, time_s=time_s)
    cause = explain(watcher.reports, list(exits.values()), plan.run_dir)
    if cause is None:
        return RunFailedError("the ranks ended without a word; run again with --traceback")
    return RunFailedError(cause.message, rank=cause.rank, details=cause.details)


def _interrupted(signal_number: int, num_ranks: int) -> RunInterruptedError:
    by = "Ctrl-C" if signal_number == signal.SIGINT else signal.Signals(signal_number).name
    ranks = "its rank has ended" if num_ranks == 1 else f"its {num_ranks} ranks have ended"
    return RunInterruptedError(f"stopped by {by}; {ranks}", signal_number=signal_number)


@contextlib.contextmanager
def _signals(stop: _Stop, raised: Callable[..., Exception]) -> Iterator[None]:
    """The first stop signal ends the ranks in order, a second kills them at once."""
    launcher_pid = os.getpid()

    def handle(signal_number: int, _frame: FrameType | None) -> None:
        if os.getpid() != launcher_pid:
            os._exit(128 + signal_number)  # a rank that has not come as far as ignoring it
        stop.requests += 1
        if stop.requests == 1:
            stop.signal_number = signal_number
            raise raised("stopped", signal.SIGTERM)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (*_STOP_SIGNALS, signal.SIGQUIT)}
    for number in _STOP_SIGNALS:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No log lines of torch's launcher: each failure is told once, by us."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            # Python 3.12 warns of any fork beside other threads; the store's server thread is one.
            warnings.filterwarnings("ignore", message=".*multi-threaded, use of fork.*")
            yield
    finally:
        logging.disable(disabled)


@contextlib.contextmanager
def _no_leftovers() -> Iterator[None]:
    """Ends every process that came to be inside, orphans of the ranks included (Linux)."""
    before = set(_children())
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        # First let what the ranks started (a logger's service) end by itself.
        for sent, wait_s in ((None, 3.0), (signal.SIGTERM, 1.0), (signal.SIGKILL, 2.0)):
            if not _wait_for_children(before, sent, wait_s):
                break
        _prctl(_PR_SET_CHILD_SUBREAPER, 0)


def _wait_for_children(before: set[int], sent: signal.Signals | None, wait_s: float) -> bool:
    """Send `sent` to every new child and reap for `wait_s`; whether some are left."""
    deadline = time.monotonic() + wait_s
    while left := [pid for pid in _children() if pid not in before]:
        for pid in left:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                if sent is not None:
                    os.kill(pid, sent)
                os.waitpid(pid, os.WNOHANG)
        if time.monotonic() > deadline:
            return True
        time.sleep(_POLL_S)
    return False


def _children() -> list[int]:
    """Processes whose parent is this one, from /proc; none where there is no /proc."""
    found: list[int] = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            # The name stands in parentheses and may hold anything.
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[1]) == os.getpid():
                found.append(int(path.parent.name))
    return found


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
