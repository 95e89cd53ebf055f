"""Whole worlds from seeds, with everything in them that goes wrong in the real one.

`SEED=n pytest tests/simulation` repeats one with its trace; `SIM_SEEDS` says how many are run, `SIM_START` from where.
"""

from __future__ import annotations

import os
import sys

import pytest

from tests.simulation.exceptions import EXCEPTIONS
from tests.simulation.runs import Figures, all_pairs, run_seeds
from tests.simulation.simulation import Simulation

ENOUGH_FOR_ALL_PAIRS = 1000
SHOWN_LINES = 400

ONE_SEED = os.environ.get("SEED")
SEEDS = int(os.environ.get("SIM_SEEDS", "1000"))
START = int(os.environ.get("SIM_START", "0"))


@pytest.fixture(scope="module")
def figures(request: pytest.FixtureRequest) -> Figures:
    """What all the seeds together amounted to, which is also shown."""
    found = run_seeds(range(START, START + SEEDS))
    reporter = request.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None:
        reporter.write_line(f"\nsimulation: {found}")
    return found


@pytest.mark.skipif(ONE_SEED is None, reason="SEED=n repeats one seed")
def test_one_seed() -> None:
    simulation = Simulation(int(ONE_SEED or 0), trace=True)
    try:
        simulation.run()
    except Exception:
        sys.stdout.write("\n".join((simulation.world.lines or [])[-SHOWN_LINES:]))
        raise


@pytest.mark.skipif(ONE_SEED is not None, reason="SEED is set: only that one is run")
@pytest.mark.timeout(1800)
@pytest.mark.conforms("E7", "E8", "E9", "E10", "E13", "E14", "E16", "E17", "E18", "E21", "E29", "E31", "E32")
def test_no_seed_breaks_a_rule(figures: Figures) -> None:
    shown = "\n".join(f"SEED={seed}: {wrong[:600]}" for seed, wrong in sorted(figures.failures)[:10])
    assert not figures.failures, f"{len(figures.failures)} of {figures.seeds} seeds:\n{shown}"


@pytest.mark.skipif(ONE_SEED is not None, reason="SEED is set: only that one is run")
def test_the_seeds_were_worth_running(figures: Figures) -> None:
    assert figures.seeds == SEEDS
    assert figures.still == [], "seeds in which nothing was lent show nothing"
    assert figures.with_crash >= figures.seeds / 2
    assert figures.repeats > 0, "if nothing is ever delivered twice, no forced move was ever in the middle of anything"


@pytest.mark.skipif(ONE_SEED is not None, reason="SEED is set: only that one is run")
@pytest.mark.skipif(SEEDS < ENOUGH_FOR_ALL_PAIRS, reason="too few seeds for every pair to occur")
def test_every_pair_of_the_tables_occurs_or_is_excused(figures: Figures) -> None:
    missing = all_pairs() - EXCEPTIONS - set(figures.pairs)
    assert not missing, sorted(f"{machine}: {s.name} {k.name}" for machine, s, k in missing)


def test_no_excuse_is_out_of_date() -> None:
    assert all_pairs() >= EXCEPTIONS
