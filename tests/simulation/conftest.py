"""How many seeds are run, which tests there are then, and the runs that they look at.

`SIM_SEEDS` says how many seeds of those that are the same each time, `SIM_START` from where. With `SEED=n` there is
nothing but that one seed's test.
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
    """What all the seeds together amounted to, which is also shown at the end: those that are the same each time, and
    those of the day."""
    start, count = (START, SEEDS) if request.param == "fixed" else (first_seed_of_today(), SEEDS_OF_TODAY)
    found = run_seeds(range(start, start + count))
    request.config.stash.setdefault(REMARKS, []).append(f"simulation, seeds [{start}, {start + count}): {found}")
    return found
