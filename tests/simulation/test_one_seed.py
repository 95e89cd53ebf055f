"""One seed again, with its trace: `SEED=n pytest tests/simulation`."""

from __future__ import annotations

import os
import sys

from tests.simulation.simulation import Simulation

SHOWN_LINES = 400


def test_one_seed() -> None:
    simulation = Simulation(int(os.environ["SEED"]), trace=True)
    try:
        simulation.run()
    except Exception:
        sys.stdout.write("\n".join((simulation.world.lines or [])[-SHOWN_LINES:]))
        raise
