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
        self._journal = simulation.journal
        self._lives, self._is_over = lives, is_over
        self._passed: dict[tuple[int, Named], int] = {}
        self._granted: set[tuple[int, int, int]] = set()

    def was_reset(self, at: Key) -> None:
        """An operator has set the stream to another position: what was had may come again."""
        self._passed = {known: count for known, count in self._passed.items() if known[0] != at[0]}

    def granted(self) -> set[tuple[int, int, int]]:
        """(group, stream, grant id) of all grants so far."""
        return set(self._granted)

    def failed_over(self) -> None:
        """What was had may come again."""
        self._passed.clear()

    def check_grant(self, at: Key, grant_id: int) -> None:
        """A stream is granted: of the keys that it has, everything that was published before is over."""
        self._granted.add((*at, grant_id))
        for key in set(self._journal.keys.get(at[1], ())):
            self._check(f"{at} is granted", at, key)

    def check_call(self, what: object, at: Key, offsets: Sequence[int]) -> None:
        """A call begins: of the keys in it, everything that was published before is over."""
        keys = self._journal.keys[at[1]]
        for key in {keys[offset] for offset in offsets}:
            self._check(what, at, key)

    def _check(self, what: object, at: Key, key: Named) -> None:
        parts, known = self._journal.parts[key], (at[0], key)
        passed = self._passed.get(known, 0)
        for part in parts[passed:]:
            before = at[0], part.stream_id
            if part.stream_id == at[1]:
                break
            if self._lives[at[0]].start(part.stream_id) is not None and not self._is_over(before, key, part.last):
                raise Violation(f"{what}, but of key {key} stream {part.stream_id}, to {part.last}, comes before")
            passed += 1
        self._passed[known] = passed
