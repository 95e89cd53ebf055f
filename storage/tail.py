"""Reading what a filter matches, across all streams and generations, without a group and without a trace.

A stream is read only when its parents have been read to their ends, so that messages of one key come in the order they
were published. Between different streams there is no order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import psycopg
import pyarrow as pa

from protocol.errors import Gone
from protocol.words import Filter
from storage import log
from storage.catalogue import filled

Begin = str | int | datetime
"""Where to begin in the streams there are: `earliest`, `latest`, an offset, or a time (of the database's clock)."""

_STREAMS = """
select s.stream_id, s.generation_id, s.head, s.state = 'closed', n.state = 'gone', s.parents
  from stream s join generation n using (generation_id)
 where n.filter = any(case when s.state = 'open' then %(open)s::text[] else %(closed)s::text[] end)
 order by s.generation_id, s.stream_id"""


@dataclass(slots=True)
class Place:
    """How far one stream was read. `target`: where it ended when the tail began. `done`: there will never be more."""

    stream_id: int
    generation_id: int
    head: int
    closed: bool
    parents: tuple[int, ...]
    position: int = 0
    target: int = 0
    done: bool = False


@dataclass(slots=True)
class Tail:
    """All matching streams, and how far each was read. `on_gone` is told of what retention has taken. Not thread-safe.

    Streams that open later are read from their beginning.
    """

    conn: psycopg.Connection[Any]
    filter: Filter
    begin: Begin = "latest"
    on_gone: Callable[[Gone], None] = lambda _: None
    _places: dict[int, Place] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for place in self._matching():
            place.target = place.head
            place.position = self._first_position(place)
            place.done = place.done or (place.closed and place.position == place.head)
            self._places[place.stream_id] = place

    def pages(self) -> Iterator[pa.Table]:
        """Everything unread that is there now, stream by stream, a page of each in turn; then it ends."""
        self._look()
        while self._may_read():
            for place in self._may_read():
                yield from self._read(place)

    @property
    def caught_up(self) -> bool:
        """True once everything that was there at the beginning has been read."""
        return all(place.done or place.position >= place.target for place in self._places.values())

    def _may_read(self) -> list[Place]:
        return [place for place in self._places.values() if self._unread(place) and self._is_its_turn(place)]

    @staticmethod
    def _unread(place: Place) -> bool:
        return not place.done and place.position < place.head

    def _is_its_turn(self, place: Place) -> bool:
        """Parents that are unknown here hold nothing that matches."""
        parents = (self._places.get(parent) for parent in place.parents)
        return all(parent is None or parent.done for parent in parents)

    def _read(self, place: Place) -> Iterator[pa.Table]:
        try:
            page = log.since(
                self.conn, place.stream_id, place.position, filter=self.filter, generation_id=place.generation_id
            )
        except Gone as gone:
            self.on_gone(gone)
            place.position = place.head if gone.oldest is None else gone.oldest
            place.done = place.closed and gone.oldest is None
            return
        place.position, place.head, place.closed, place.done = page.position, page.head, page.closed, page.finished
        if page.batches:
            yield pa.Table.from_batches(page.batches)

    def _look(self) -> None:
        """Heads as they are now; where a stream was closed, its children too."""
        watched = [place.stream_id for place in self._places.values() if not place.done]
        closed = not watched
        for stream_id, head in log.heads(self.conn, watched).items():
            place = self._places[stream_id]
            closed = closed or head.closed != place.closed
            place.head, place.closed = head.head, head.closed
            place.done = head.closed and place.position >= head.head
        if closed:
            for place in self._matching():
                self._places.setdefault(place.stream_id, place)

    def _matching(self) -> list[Place]:
        """By the filters that generations were filled under, in one snapshot: a rollover is whole or not yet there."""
        with self.conn.transaction():
            self.conn.execute("set transaction isolation level repeatable read, read only")
            wanted = filled(self.conn).wanted(self.filter)
            parameters = {
                "open": [filter.text for filter, now in wanted.items() if now],
                "closed": [filter.text for filter in wanted],
            }
            return [_place(*row) for row in self.conn.execute(_STREAMS, parameters)]

    def _first_position(self, place: Place) -> int:
        if place.done or self.begin == "latest":
            return place.head
        if isinstance(self.begin, datetime):
            return log.position_at(self.conn, place.stream_id, self.begin)
        return min(self.begin, place.head) if isinstance(self.begin, int) else 0


def _place(stream_id: int, generation_id: int, head: int, closed: bool, gone: bool, parents: list[int]) -> Place:
    done = gone or (closed and head == 0)
    return Place(stream_id, generation_id, head, closed, tuple(parents), done=done)
