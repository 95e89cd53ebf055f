"""Runs one seed again, with its trace: `SEED=n pytest tests/simulation`."""

from __future__ import annotations

import os

from tests.simulation.__main__ import print_run


def test_one_seed() -> None:
    assert print_run(int(os.environ["SEED"])) == 0, "its trace is above"
