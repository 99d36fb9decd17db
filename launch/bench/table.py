"""The table of benches, in the order of `counterflow bench --help`: a bench is a module here and its line below."""

from __future__ import annotations

from counterflow.launch.bench import (
    compression,
    deepspeed,
    faults,
    memory,
    optimizer,
    overlap,
    p2p,
    schedules,
    zero,
)
from counterflow.launch.bench.bench import Bench

BENCHES: dict[str, Bench] = {
    module.BENCH.name: module.BENCH
    for module in (schedules, p2p, overlap, optimizer, compression, deepspeed, memory, zero, faults)
}
