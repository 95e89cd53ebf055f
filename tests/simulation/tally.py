"""Which (status, event) pairs of the machines' tables occurred, counted from outside while simulations run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any
from unittest import mock

from borrower.machine import borrower as borrower_machine
from leader.election import machine as election_machine
from leader.group import assignments

Pair = tuple[str, Enum, Enum]
"""(the machine's name, status, kind of event)."""

TABLES = {
    "borrower": borrower_machine.TABLE,
    "election": election_machine.TABLE,
    "assignment": assignments.TABLE,
}


class _Row(dict[Any, Any]):
    """A row that tells what is looked up in it."""

    def __init__(self, row: dict[Any, Any], note: Callable[[Any], None]) -> None:
        super().__init__(row)
        self._note = note

    def __getitem__(self, kind: Any) -> Any:
        self._note(kind)
        return super().__getitem__(kind)


@contextmanager
def counting() -> Iterator[Counter[Pair]]:
    """Count every look-up in the machines' tables."""
    seen: Counter[Pair] = Counter()
    with (
        mock.patch.object(borrower_machine, "TABLE", _watched("borrower", seen)),
        mock.patch.object(election_machine, "TABLE", _watched("election", seen)),
        mock.patch.object(assignments, "TABLE", _watched("assignment", seen)),
    ):
        yield seen


def _watched(machine: str, seen: Counter[Pair]) -> dict[Any, _Row]:
    def noting(status: Enum) -> Callable[[Enum], None]:
        def note(kind: Enum) -> None:
            seen[machine, status, kind] += 1

        return note

    return {status: _Row(dict(row), noting(status)) for status, row in TABLES[machine].items()}
