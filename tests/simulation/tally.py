"""Counts which (status, event) pairs of the machines' tables occur while simulations run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from enum import Enum
from typing import Any
from unittest import mock

from sublet_borrower.machine.transitions import ACTIONS as BORROWER
from sublet_leader.election.transitions import TRANSITIONS as ELECTION
from sublet_leader.group.grant_transitions import TRANSITIONS as ASSIGNMENT

Pair = tuple[str, Enum, Enum]
"""(the machine's name, status, kind of event)."""

TABLES: dict[str, Mapping[Any, Mapping[Any, Any]]] = {
    "borrower": BORROWER,
    "election": ELECTION,
    "assignment": ASSIGNMENT,
}
_READ_BY = {
    "borrower": "sublet_borrower.machine.borrower.ACTIONS",
    "election": "sublet_leader.election.machine.TRANSITIONS",
    "assignment": "sublet_leader.group.assignment_manager.TRANSITIONS",
}
"""Name of each machine's table where the machine reads it."""


class _Row(dict[Any, Any]):
    """A row that reports its look-ups."""

    def __init__(self, row: Mapping[Any, Any], note: Callable[[Any], None]) -> None:
        super().__init__(row)
        self._note = note

    def __getitem__(self, kind: Any) -> Any:
        self._note(kind)
        return super().__getitem__(kind)


@contextmanager
def counting() -> Iterator[Counter[Pair]]:
    """Count every look-up in the machines' tables."""
    seen: Counter[Pair] = Counter()
    with ExitStack() as stack:
        for machine, place in _READ_BY.items():
            stack.enter_context(mock.patch(place, _watched(machine, seen)))
        yield seen


def _watched(machine: str, seen: Counter[Pair]) -> dict[Any, _Row]:
    def noting(status: Enum) -> Callable[[Enum], None]:
        def note(kind: Enum) -> None:
            seen[machine, status, kind] += 1

        return note

    return {status: _Row(row, noting(status)) for status, row in TABLES[machine].items()}
