"""How far the host runs ahead of the device that it gives work to.

Note [Starved devices]
On a GPU an interval is measured by events in the device's stream: it lasts from when the device comes to its begin to
when it comes to its end, whether it computes in between or waits for the host to hand over the next kernel. Such waits
look busy, so a step that the host cannot keep up with has too small a measured bubble. What tells the two apart is when
the host handed over the last kernel of the interval: if the device was through with it right afterwards, it had been
waiting; if much later, it had work in store all along.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

# A kernel that was handed over runs some microseconds later; with less in store than this the device has run dry.
STARVED_S = 50e-6
# A step is bound by its host where that was so for more of its compute time.
HOST_BOUND_SHARE = 0.5


class Issued(NamedTuple):
    """One computation: when the device began and ended it, and when the host had handed all of it over.

    All in seconds from the start of the step, at which the device was idle.
    """

    start_s: float
    end_s: float
    issued_s: float

    @property
    def lead_s(self) -> float:
        return self.end_s - self.issued_s


class HostLead(NamedTuple):
    """Of one rank in a step. lead_s: the median over its computations of how long after the host the device ended them.

    starved_share: of its compute time, the share of computations that the device ended as soon as it had them.
    """

    lead_s: float
    starved_share: float

    @property
    def is_host_bound(self) -> bool:
        return self.starved_share > HOST_BOUND_SHARE


def host_lead(computations: Sequence[Issued]) -> HostLead | None:
    """Of a rank's computations in a step; None where there are none."""
    total_s = sum(each.end_s - each.start_s for each in computations)
    if not computations or total_s <= 0:
        return None
    starved_s = sum(each.end_s - each.start_s for each in computations if each.lead_s < STARVED_S)
    return HostLead(
        lead_s=statistics.median(each.lead_s for each in computations), starved_share=starved_s / total_s
    )
