"""The project's own measurements, for anyone to run again. What is compared runs in turn, so that a busy
machine slows both; quote the ratios, and the machine. `counterflow bench NAME --help` tells what one
measures, its keys and how long it takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from counterflow.launch.command import Command, Help, LaunchOptions, UsageError
from counterflow.launch.printing import did_you_mean, print_paths

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from counterflow.launch.bench.bench import Bench

_OUTPUT = """
    runs/bench-NAME-<date-time>/ (or --out): rows.json with every figure, and the bench's pictures.
    --json: what rows.json holds.
    """


def help_on(words: Sequence[str]) -> Help:
    """The help of the bench that `words` name, or that of all."""
    from inspect import cleandoc

    from counterflow.launch.bench.table import BENCHES

    for word in words:
        if word in BENCHES:
            return BENCHES[word].help
    return Help(
        argument="NAME [KEY=VALUE ...]",
        about=__doc__ or "",
        keys="\n".join(f"{bench.name}  {bench.summary}" for bench in BENCHES.values()),
        keys_heading="benches:",
        examples="\n".join(cleandoc(bench.examples).splitlines()[0] for bench in BENCHES.values()),
        output=_OUTPUT,
    )


def read(words: Sequence[str]) -> tuple[Bench, Any]:
    """The bench that `words` name, and its KEY=VALUE as its keys.

    Raises ValueError: for an unknown bench or key, or a value that does not fit.
    """
    from counterflow.launch.bench.table import BENCHES
    from counterflow.launch.keys import read_keys

    if not words or words[0] not in BENCHES:
        problem = "bench takes the name of one"
        if words:
            problem = f"{words[0]}: no such bench{did_you_mean(words[0], BENCHES)}"
        raise UsageError(f"{problem}; choose one of {', '.join(BENCHES)}, as in counterflow bench schedules")
    return BENCHES[words[0]], read_keys(BENCHES[words[0]].keys, words[1:])


def run(bench_and_keys: tuple[Bench, Any], options: LaunchOptions) -> dict[str, Any]:
    """`measure`, into --out or a new folder."""
    from datetime import datetime
    from pathlib import Path

    from rich.console import Console

    bench, keys = bench_and_keys
    folder = Path("runs") / f"bench-{bench.name}-{datetime.now():%Y%m%d-%H%M%S}"
    return measure(bench, keys, options.out or folder, console=Console())


def measure(bench: Bench, keys: Any, folder: Path, *, console: Console) -> dict[str, Any]:
    """Run the bench; write its rows and pictures to `folder`, return what --json prints.

    Raises ValueError: for keys that do not go together. RunFailedError: where a rank fails.
    """
    import json

    folder.mkdir(parents=True, exist_ok=True)
    measured = bench.measure(keys, folder, console)
    result: dict[str, Any] = {"bench": bench.name, "run_dir": str(folder), **measured}
    rows = folder / "rows.json"
    rows.write_text(json.dumps(result, indent=1) + "\n")
    print_paths(console, [(rows, "every figure")])
    return result


COMMAND = Command(
    name="bench",
    summary="measure the runtime, against its schedules, torch and slow links",
    help=help_on,
    read=read,
    run=run,
)
