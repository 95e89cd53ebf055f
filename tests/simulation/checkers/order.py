"""The messages of one key come in the order in which they were published, whatever lies between their streams (W3,
E21, E33). Known are what publishers wrote, and what users have had; not who is whose parent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tests.simulation.checkers.lives import Key, Lives, Violation
from tests.simulation.journal import Key as Named

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation


class Order:
    """`is_over(group and stream, key, offset)`: whether the group has nothing more to come of that key up to there."""

    def __init__(self, simulation: Simulation, lives: Lives, is_over: Callable[[Key, Named, int], bool]) -> None:
        self._journal, self._lives, self._is_over = simulation.journal, lives, is_over
        self._passed: dict[tuple[int, Named], int] = {}

    def begin_anew(self, group_id: int) -> None:
        """An operator has set the group to other positions: what is to come may be come again."""
        self._passed = {at: count for at, count in self._passed.items() if at[0] != group_id}

    def check_call(self, what: object, at: Key, offsets: Sequence[int]) -> None:
        """A call begins: of the keys in it, everything that was published before is over."""
        keys = self._journal.keys[at[1]]
        for key in {keys[offset] for offset in offsets}:
            self._check(what, at, key)

    def check_grant(self, what: object, at: Key) -> None:
        """A stream is lent: of the keys that it has, everything that was published before is over."""
        for key in set(self._journal.keys.get(at[1], ())):
            self._check(what, at, key)

    def _check(self, what: object, at: Key, key: Named) -> None:
        parts, known = self._journal.parts[key], (at[0], key)
        passed = self._passed.get(known, 0)
        for part in parts[passed:]:
            if part.stream_id == at[1]:
                break
            wanted = self._lives[at[0]].start(part.stream_id) is not None
            if wanted and not self._is_over((at[0], part.stream_id), key, part.last):
                raise Violation(f"{what}, but of key {key} stream {part.stream_id}, to {part.last}, comes before")
            passed += 1
        self._passed[known] = passed
