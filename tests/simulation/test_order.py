"""Tests of the order checker, which checks all preceding streams, not only the parents."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tests.simulation.checkers.deliveries import Order
from tests.simulation.checkers.lives import Violation
from tests.simulation.publishing import Part

KEY = ("orders/new", 1)
CHECKS: list[Callable[[Order], None]] = [
    lambda order: order.check_grant((1, 3), 1),
    lambda order: order.check_call("a call", (1, 3), [0]),
]


def order(unfinished: int | None) -> Order:
    """Return the order of a key with a message in each of three streams, of which one may be unfinished."""
    journal = SimpleNamespace(keys={3: [KEY]}, parts={KEY: [Part(stream, 0) for stream in (1, 2, 3)]})
    simulation: Any = SimpleNamespace(journal=journal)
    lives: Any = {1: SimpleNamespace(start=lambda _: 0)}
    return Order(simulation, lives, lambda at, key, last: at[1] != unfinished)


@pytest.mark.conforms("E33")
@pytest.mark.parametrize("check", CHECKS, ids=["grant", "call"])
def test_what_lies_before_a_stream_must_be_over(check: Callable[[Order], None]) -> None:
    check(order(None))
    for unfinished in (1, 2):
        with pytest.raises(Violation, match=f"stream {unfinished}, to 0, comes before"):
            check(order(unfinished))
