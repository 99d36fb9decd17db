"""What the console shows, on a terminal and in a log."""

from __future__ import annotations

import io
import math
from dataclasses import replace

from counterflow.framework.metrics.console import ConsoleSink, duration, sparkline
from tests.framework.metrics.records import SUMMARY, record


class Terminal(io.StringIO):
    encoding = "utf-8"  # type: ignore[assignment]

    def isatty(self) -> bool:
        return True


class AsciiLog(io.StringIO):
    encoding = "ascii"  # type: ignore[assignment]


def run(stream: io.StringIO, total_steps: int = 30, **values: int) -> str:
    console = ConsoleSink(total_steps, stream=stream, **values)
    for step in range(values.get("first_step", 0), total_steps):
        console.log(record(step, validation_loss=2.0 if step == 11 else None))
    console.summary(SUMMARY)
    console.close("finished")
    return stream.getvalue()


def test_a_log_gets_a_line_now_and_then_and_the_table() -> None:
    lines = run(io.StringIO(), every=10).splitlines()
    assert lines[0] == "step 1/30  loss 5.0000  2,048 tokens/s  bubble 30.0 %  eta 14 s"
    assert [line.split()[1] for line in lines if line.startswith("step ")] == [
        "1/30",
        "10/30",
        "12/30",
        "20/30",
        "30/30",
    ]
    assert "validation 2.0000" in lines[2]
    text = "\n".join(lines)
    assert "\x1b" not in text
    assert "bubble, measured   30.0 %" in text
    assert "bubble, formula    none" in text
    assert "run folder         /runs/one\n" in text
    assert "W&B folder         /runs/one/wandb/offline-run-1" in text
    assert "steps              30 in 1:15" in text


def test_a_skipped_step_is_said_at_once_and_counted_at_the_end() -> None:
    console = ConsoleSink(30, stream=(stream := io.StringIO()), every=10)
    for step in range(5):
        console.log(record(step, skipped="the loss is nan (1 in a row, 1 in all)" if step == 3 else None))
    console.summary(replace(SUMMARY, num_skipped=1))
    lines = stream.getvalue().splitlines()
    assert lines[1] == "step 4 skipped: the loss is nan (1 in a row, 1 in all)"
    assert "steps skipped      1" in lines


def test_a_long_path_is_never_cut() -> None:
    path = "/a-long-folder" * 30 + "/[x]"
    console = ConsoleSink(1, stream=(stream := io.StringIO()))
    console.summary(replace(SUMMARY, run_dir=path))
    assert path in stream.getvalue()


def test_about_twenty_lines_a_run_by_default() -> None:
    lines = run(io.StringIO(), total_steps=1000).splitlines()
    assert 18 < sum(line.startswith("step ") for line in lines) < 25


def test_a_terminal_gets_a_progress_line_and_its_cursor_back() -> None:
    text = run(Terminal())
    assert "30/30" in text
    assert "step 12: validation loss 2.0000" in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1
    assert "█" in text


def test_a_resumed_run_counts_from_its_step() -> None:
    assert run(io.StringIO(), first_step=20, every=10).startswith("step 21/30 ")


def test_a_log_without_unicode_gets_an_ascii_curve() -> None:
    run(AsciiLog()).encode("ascii")


def test_sparkline() -> None:
    assert sparkline([], 5) == ""
    assert sparkline([8, 7, 6, 5, 4, 3, 2, 1], 8) == "█▇▆▅▄▃▂▁"
    assert sparkline([1, 1, 3, 3], 2) == "▁█"
    assert sparkline([2.0, 2.0], 9) == "▁▁"
    assert sparkline([1.0, math.nan, 2.0, math.inf], 4) == "▁!█!"
    assert len(sparkline(list(range(1000)), 40)) == 40


def test_duration() -> None:
    assert [duration(seconds) for seconds in (0.44, 9.5, 59.6, 61, 3600 * 25 + 62)] == [
        "0.4 s",
        "9.5 s",
        "1:00",
        "1:01",
        "25:01:02",
    ]
