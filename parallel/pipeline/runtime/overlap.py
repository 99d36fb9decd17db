"""Overlapped pairs: one chunk's forward runs while another's backward waits for its tokens, and the other way round.

Source: the pairs of DualPipe (DeepSeek-V3 technical report, section 3.2.1, arXiv 2412.19437).

Note [What hides what]
An expert layer exchanges tokens twice on the way forward (dispatch, combine) and twice on the way back. Each
exchange starts its transfer and then calls `Interleaver.wait`, a communication point. There the half that waits
first computes the weight gradients it has filed so far, and then lets the other half run up to that one's next
point. The backward goes first, so that in every layer

    combine_B  | attn_F                      dispatch_F | mlp_B
    dispatch_B | mlp_W + mlp_F               combine_F  | attn_B + attn_W

where the left is on its way while the right is computed. A half with points left when the other has ended waits
for its transfers as it would alone; that time is recorded as exposed, and so is every wait outside of pairs.

Note [The baton]
Each half has a thread, because autograd cannot be suspended in any other way, but only the one that holds the
baton runs. It changes hands at communication points and at the end of a half, nowhere else: so the order of
everything either half does, collectives over other axes among it, is that of the schedule and the model, the same
on every rank of those axes and in every run. The holder says whose point was reached, not the calling thread: on
a device autograd's own threads call the backward. The forward stays in the main thread, where autograd's
numbering of nodes, and with it the order of the backward, is what it is without pairs.

Hazard: the two halves share torch's random generators. A recomputation that draws numbers and comes to a point in
between would have the other half draw from its place; parallel/ops/recompute.py notices and raises.

On CUDA the transfers run on the communicator's own stream and `work.wait()` makes the current stream, which both
halves share, wait for them; the baton orders what is launched. That path has not run on a GPU yet.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack  # pyright: ignore[reportPrivateUsage]

from counterflow.parallel.pipeline.ir.trace import Activity, Recorder


class HalfAbandonedError(RuntimeError):
    """Raised at a communication point where the other half of the pair has failed, to end this one too."""


def _nothing() -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Half:
    """A forward or a backward to be run, with what is recorded of it.

    fill: computes what the half has put off and nobody waits for; called when one of its transfers has started.
    """

    stage: int
    microbatch: int
    activity: Activity
    run: Callable[[], None] = _nothing
    fill: Callable[[], None] = _nothing

    def __str__(self) -> str:
        return f"{self.stage}{self.activity.value}{self.microbatch}"


class _Side:
    """A half at work. other: the one it is paired with. slice_begin: since when it computes, None while it does not."""

    __slots__ = ("half", "is_finished", "other", "slice_begin", "turn")

    def __init__(self, half: Half) -> None:
        self.half = half
        self.other: _Side | None = None
        self.is_finished = False
        self.slice_begin: Any = None
        self.turn: SimpleQueue[None] = SimpleQueue()  # an entry: it has the baton


class Interleaver:
    """The communication point of a runtime's stages (parallel/expert): runs pairs, measures exposed transfers.

    overlap: False runs nothing together and only measures.
    num_handovers: how often the baton has changed hands at a point, over the life of the object.
    """

    def __init__(self, *, overlap: bool = True) -> None:
        self.overlap = overlap
        self.num_handovers = 0
        self._recorder: Recorder | None = None  # of the step under way
        self._holder: _Side | None = None
        self._failure: BaseException | None = None
        self._worker: _Worker | None = None
        self._stages_with_points: set[int] = set()

    @property
    def current(self) -> Half | None:
        """The half that runs; None outside of a step."""
        return None if self._holder is None else self._holder.half

    def has_points(self, stage: int) -> bool:
        """Whether a forward of `stage` has come to a communication point."""
        return stage in self._stages_with_points

    @contextmanager
    def step(self, recorder: Recorder) -> Generator[None]:
        """A step of the runtime runs within; what is exposed goes to `recorder`."""
        self._recorder = recorder
        try:
            yield
        finally:
            self._recorder = self._holder = None
            if self._worker is not None:
                self._worker.close()
                self._worker = None

    def alone(self, half: Half) -> None:
        """What runs from here on is `half`, in no pair; the caller records it."""
        self._holder = _Side(half)

    def pair(self, forward: Half, backward: Half) -> None:
        """Run both halves to their ends, as Note [What hides what] says.

        Raises what the half that failed first raised; the other one is ended at its next point.
        """
        if self._worker is None:
            self._worker = _Worker()
        ahead, back = _Side(forward), _Side(backward)
        ahead.other, back.other = back, ahead
        self._failure = None
        self._holder = back
        back.turn.put(None)
        carried = _carry_state()
        ended = self._worker.start(lambda: carried(lambda: self._play(back)))
        self._play(ahead)
        ended.get()
        self._holder = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def wait(self, work: dist.Work | None) -> None:
        """A transfer has been started; returns when it is complete. None: it was complete at once."""
        side, recorder = self._holder, self._recorder
        if work is None or side is None or recorder is None:
            self.wait_here(work)
            return
        half, other = side.half, side.other
        self._stages_with_points.add(half.stage)
        half.fill()
        if other is not None:
            self._end_slice(side)
            if not other.is_finished:
                self.num_handovers += 1
                self._hand_over(other)
                side.turn.get()
            if self._failure is not None:
                raise HalfAbandonedError(
                    f"{half} is abandoned: {other.half}, which it is paired with, failed"
                )
        self.wait_here(work)
        if other is not None:
            side.slice_begin = recorder.now()

    def wait_here(self, work: dist.Work | None) -> None:
        """As `wait`, for a transfer too small to switch for: the sizes of an exchange, say."""
        if work is None:
            return
        side, recorder = self._holder, self._recorder
        if side is None or recorder is None:
            work.wait()
            return
        begin = recorder.now()
        work.wait()
        recorder.add(Activity.EXPERT_WAIT, side.half.stage, side.half.microbatch, begin)

    def _play(self, side: _Side) -> None:
        """A half from its first turn to its end; what it raises is kept, and the other half gets the baton."""
        assert side.other is not None
        assert self._recorder is not None
        try:
            side.turn.get()
            if self._failure is None:
                side.slice_begin = self._recorder.now()
                side.half.run()
        except BaseException as error:
            # The first failure is the cause; that of the other half follows from it.
            if self._failure is None:
                error.add_note(f"in {side.half}, paired with {side.other.half}")
                self._failure = error
        finally:
            self._end_slice(side)
            side.is_finished = True
            if not side.other.is_finished:
                self._hand_over(side.other)

    def _hand_over(self, to: _Side) -> None:
        self._holder = to
        to.turn.put(None)

    def _end_slice(self, side: _Side) -> None:
        if side.slice_begin is not None and self._recorder is not None:
            half = side.half
            self._recorder.add(half.activity, half.stage, half.microbatch, side.slice_begin)
            side.slice_begin = None


class _Worker:
    """A thread that runs one job after another; a job raises nothing."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[tuple[Callable[[], None], SimpleQueue[None]] | None] = SimpleQueue()
        # Daemon: where a step was interrupted twice it may still be in a transfer, and must not hold the process.
        self._thread = Thread(target=self._serve, name="backward half", daemon=True)
        self._thread.start()
        self._is_idle = True

    def start(self, job: Callable[[], None]) -> SimpleQueue[None]:
        """Run `job`; the queue has an entry once it has ended."""
        ended: SimpleQueue[None] = SimpleQueue()
        self._is_idle = False
        self._jobs.put((job, ended))
        return ended

    def close(self) -> None:
        """End the thread; it is waited for unless a job was left in the middle."""
        self._jobs.put(None)
        if self._is_idle:
            self._thread.join()

    def _serve(self) -> None:
        while (entry := self._jobs.get()) is not None:
            job, ended = entry
            try:
                job()
            finally:
                self._is_idle = True
                ended.put(None)


def _carry_state() -> Callable[[Callable[[], None]], None]:
    """This thread's torch state, taken now, for a function that is to run in another thread.

    Gradient and inference mode, autocast, the current stream, context variables, and modes that intercept operators
    (counters of FLOPs or memory), which see both halves in turns.
    """
    context = contextvars.copy_context()
    is_grad, is_inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    cuda = torch.cuda.is_initialized()
    stream = torch.cuda.current_stream() if cuda else None
    device_types = ("cpu", "cuda") if cuda else ("cpu",)
    autocast = [
        (each, torch.is_autocast_enabled(each), torch.get_autocast_dtype(each)) for each in device_types
    ]
    keeps_casts = torch.is_autocast_cache_enabled()
    modes = list(_get_current_dispatch_mode_stack())

    def run(function: Callable[[], None]) -> None:
        # Not `torch.autocast`: leaving it would empty the cache of casts, which all threads share.
        for device_type, is_enabled, dtype in autocast:
            torch.set_autocast_enabled(device_type, is_enabled)
            torch.set_autocast_dtype(device_type, dtype)
        torch.set_autocast_cache_enabled(keeps_casts)
        with (
            torch.inference_mode(is_inference),
            torch.set_grad_enabled(is_grad),
            nullcontext() if stream is None else torch.cuda.stream(stream),
            ExitStack() as stack,
        ):
            for mode in modes:
                stack.enter_context(mode)
            context.run(function)

    return run
