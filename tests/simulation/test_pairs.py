"""The runs show the machines' whole tables, but for what is excused by name."""

from __future__ import annotations

import pytest

from tests.simulation.exceptions import EXCEPTIONS
from tests.simulation.runs import Figures, all_pairs


@pytest.mark.timeout(1800)
def test_every_pair_of_the_tables_occurs_or_is_excused(figures: Figures) -> None:
    missing = all_pairs() - EXCEPTIONS - set(figures.pairs)
    assert not missing, sorted(f"{machine}: {s.name} {k.name}" for machine, s, k in missing)


def test_no_excuse_is_out_of_date() -> None:
    assert all_pairs() >= EXCEPTIONS
