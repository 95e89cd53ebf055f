"""A group's streams from one reset to the next: each grant belongs to one of these lives."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from dataclasses import dataclass

from sublet_storage.groups.model.records import HistoryRecord
from tests.recorded.history import Group, History

_WAS_AT = re.compile(r"was at (\d+)")


@dataclass(frozen=True, slots=True)
class Life:
    """What of a stream was to be given out between two resets: [start, end). `end` None: all that there is."""

    start: int
    end: int | None


class Lives:
    """Of one group. Grant ids only grow: those above a reset's came after it."""

    def __init__(self, history: History, group: Group) -> None:
        self._resets: dict[int, list[HistoryRecord]] = defaultdict(list)
        for line in history.resets(group):
            self._resets[line.stream_id].append(line)
        self._times = sorted({line.at_us for line in history.resets(group)})
        self._granted = {
            (line.stream_id, line.grant_id): line.at_us
            for line in history.lendings.get(group.name, ())
            if line.event == "grant"
        }

    def number(self, stream: int, grant: int) -> int:
        """Of the stream's own lives, in which a grant was."""
        return bisect_left([line.grant_id for line in self._resets[stream]], grant)

    def of(self, stream: int) -> list[Life]:
        """The stream's own lives, in order."""
        resets = self._resets[stream]
        starts = [0, *(line.position for line in resets)]
        ends = [int(found[1]) if (found := _WAS_AT.search(line.reason)) else 0 for line in resets]
        return [Life(start, end) for start, end in zip(starts, [*ends, None], strict=True)]

    def era(self, stream: int, grant: int) -> int:
        """How many resets of the group there had been when the stream was granted."""
        return bisect_right(self._times, self._granted.get((stream, grant), 0))

    def is_known(self, stream: int, grant: int) -> bool:
        """Whether history says that it was granted."""
        return (stream, grant) in self._granted
