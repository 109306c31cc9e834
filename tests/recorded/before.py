"""Costs and names as they were before the simulator knew some waits, to see what difference these make.

Sums of gradients over tensor-parallel ranks and over the model's ends or copies, and the norm of the
gradients with its sums, were not simulated; and ``braid`` was what is called ``braid:w`` now.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final
from unittest.mock import patch

from braid.scheduling.analytic import analytic_profile
from braid.scheduling.profile import Profile

FREE: Final = ("tp/all_reduce", "pp/all_reduce")
"""Transfers that took no time."""
FORMER: Final = {"braid": "braid:w"}
"""What schedules are called now, by their former name."""


@contextmanager
def former_costs() -> Iterator[None]:
    """While it lasts, modelled costs leave out what was not simulated."""

    def without(*arguments: Any) -> Profile:
        profile = analytic_profile(*arguments)
        free = {
            key: replace(profile.transfers[key], latency_ns=0.0, ns_per_byte=0.0)
            for key in FREE
            if key in profile.transfers
        }
        return replace(profile, transfers={**profile.transfers, **free}, norm_ns_per_parameter=0.0)

    with patch("braid.scheduling.planner.decide.analytic_profile", without):
        yield
