"""How many seeds are run, which tests there are then, and the one run that they all look at.

`SIM_SEEDS` says how many seeds, `SIM_START` from where. With `SEED=n` there is nothing but that one seed's test.
"""

from __future__ import annotations

import os

import pytest

from tests.kit import REMARKS
from tests.simulation.runs import Figures, run_seeds

SEEDS = int(os.environ.get("SIM_SEEDS", "1000"))
START = int(os.environ.get("SIM_START", "0"))

collect_ignore = ["test_seeds.py" if "SEED" in os.environ else "test_one_seed.py"]


@pytest.fixture(scope="session")
def figures(request: pytest.FixtureRequest) -> Figures:
    """What all the seeds together amounted to, which is also shown at the end."""
    found = run_seeds(range(START, START + SEEDS))
    request.config.stash.setdefault(REMARKS, []).append(f"simulation: {found}")
    return found
