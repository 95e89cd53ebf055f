"""Numbers of seeds, the tests for them, and the runs that they check.

`SIM_SEEDS` is the number of the seeds that are the same each time, `SIM_START` the first. With `SEED=n` there is only
the test of that seed.
"""

from __future__ import annotations

import os

import pytest

from tests.kit import REMARKS
from tests.simulation.runs import Figures, first_seed_of_today, run_seeds

SEEDS = int(os.environ.get("SIM_SEEDS", "200"))
START = int(os.environ.get("SIM_START", "0"))
SEEDS_OF_TODAY = 1000

collect_ignore = ["test_seeds.py" if "SEED" in os.environ else "test_one_seed.py"]


@pytest.fixture(scope="session", params=["fixed", pytest.param("today", marks=pytest.mark.long)])
def figures(request: pytest.FixtureRequest) -> Figures:
    """Return the figures of all seeds, which are also printed at the end: the fixed ones, and those of the day."""
    start, count = (START, SEEDS) if request.param == "fixed" else (first_seed_of_today(), SEEDS_OF_TODAY)
    found = run_seeds(range(start, start + count))
    request.config.stash.setdefault(REMARKS, []).append(f"simulation, seeds [{start}, {start + count}): {found}")
    return found
