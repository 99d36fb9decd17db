"""How far a host runs ahead, from the times of events that are given."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from counterflow.parallel.pipeline.ir import trace
from counterflow.parallel.pipeline.ir.host_lead import HostLead, Issued, host_lead
from counterflow.parallel.pipeline.ir.trace import Activity, Recorder


def step(launch_s: float, kernel_s: float, num_kernels: int = 100) -> list[Issued]:
    """Ten computations of so many kernels, each handed over in `launch_s`; the device does one in `kernel_s`."""
    host = device = 0.0
    found: list[Issued] = []
    for _ in range(10):
        begin = max(device, host)
        for _ in range(num_kernels):
            host += launch_s
            device = max(device, host) + kernel_s
        found.append(Issued(start_s=begin, end_s=device, issued_s=host))
    return found


def test_a_device_with_work_in_store_is_busy() -> None:
    found = host_lead(step(launch_s=5e-6, kernel_s=50e-6))
    assert found is not None
    assert found.lead_s == pytest.approx((50e-6 - 5e-6) * 550, rel=0.02)
    assert found.starved_share == 0
    assert not found.is_host_bound


def test_a_device_that_waits_for_each_kernel_is_starved() -> None:
    found = host_lead(step(launch_s=20e-6, kernel_s=4e-6))
    assert found is not None
    assert found.lead_s == pytest.approx(4e-6), "the last kernel"
    assert found.starved_share == 1
    assert found.is_host_bound


def test_a_share_counts_by_time() -> None:
    starved, busy = Issued(0.0, 1.0, 1.0), Issued(1.0, 4.0, 2.0)
    assert host_lead([starved, busy]) == HostLead(lead_s=1.0, starved_share=0.25)
    assert host_lead([]) is None


class Event:
    """Of a device on which each moment comes `lead_s` after the host's."""

    clock = iter(range(1000))
    lead_s = 2.0

    def __init__(self, enable_timing: bool) -> None:
        self.time = 0.0

    def record(self) -> None:
        self.time = next(self.clock) + self.lead_s

    def elapsed_time(self, other: Any) -> float:
        return (other.time - self.time) * 1e3


def test_a_recorder_on_a_gpu_keeps_both_clocks() -> None:
    Event.clock = iter(range(1000))
    with (
        mock.patch("torch.cuda.Event", Event),
        mock.patch("torch.cuda.synchronize"),
        mock.patch.object(trace.time, "perf_counter", side_effect=map(float, range(1000))),
    ):
        recorder = Recorder(torch.device("cuda", 0))
        Event.lead_s = 5.0
        with recorder.record(Activity.FORWARD, 0, 0):
            pass
        with recorder.record(Activity.OPTIMIZER):
            pass
        found = recorder.trace()
    assert found.host_lead is not None
    # The host's clock was read once more, before the first event; the device fell behind by three since.
    assert found.host_lead.lead_s == pytest.approx(5 - 2 - 1)
    assert [each.activity for each in found.intervals] == [Activity.FORWARD, Activity.OPTIMIZER]
    assert Recorder(torch.device("cpu")).trace().host_lead is None
