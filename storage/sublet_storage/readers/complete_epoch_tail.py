"""Reads all streams that match a filter in entire epochs, without a group (after Strymon's subscriber).

First comes a snapshot of the frontiers; from then on data, and the lower frontier whenever it has moved. A frontier is
returned only after all that was published in the epochs that it completes.

Heads and frontiers are taken in one statement, the streams are read up to these heads, then the frontier is returned:
what was published in an epoch that it has passed lies below these heads, by the order in which publishers write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import psycopg
import pyarrow as pa
from msgspec import Struct

from sublet_protocol.domain.epoch_frontiers import (
    LowerFrontier,
    UpperFrontier,
    lower_frontier_from_json,
    upper_frontier_from_json,
)
from sublet_protocol.domain.errors import PositionGone, UsageError
from sublet_protocol.domain.topics import TopicFilter
from sublet_storage.db.bounded_connection import get_timeline
from sublet_storage.log import fetch as message_log
from sublet_storage.log.complete_epoch_filter import (
    CompleteEpochFilter,
    EpochStartingPosition,
    ExcludedEpochs,
    active_epochs,
)
from sublet_storage.readers.tail import MultiStreamReader, StreamCursor, list_matching_streams
from sublet_storage.spaces.space_queries import find_spaces_that_matched

_READ: Final = """
select s.stream_id, s.head, s.state = 'closed', n.state = 'gone', s.space_id, p.lower_frontier
  from stream s join generation n using (generation_id) join space p on p.space_id = s.space_id
 where s.stream_id = any(%s::bigint[])"""

_SPACES: Final = "select space_id, lower_frontier, lost_upper_frontier from space where space_id = any(%s::bigint[])"

_BEGUN: Final = """
select space_id, upper_frontier from stream where space_id = any(%s::bigint[]) and upper_frontier is not null"""

_UPPER: Final = "select space_id, upper_frontier from stream where stream_id = %s"


class FrontierSnapshot(Struct, frozen=True):
    """The start of a reader. `lower`: it gets epochs at or after these only (None: any); `upper`: the greatest that
    have begun and are not completed, or, of all history, that have begun."""

    lower: LowerFrontier | None
    upper: UpperFrontier


class EpochTailMessages(Struct, frozen=True):
    """Messages of one stream, in `DELIVERED_SCHEMA`."""

    table: pa.Table


EpochTailItem = FrontierSnapshot | EpochTailMessages | LowerFrontier
"""Epochs that are not at or after a `LowerFrontier` are completed, and were delivered completely or not at all."""


class _StreamSnapshot(Struct, frozen=True):
    """The heads of all streams that are read, and the frontiers of the spaces of those that are open."""

    heads: dict[int, message_log.HeadState]
    lowers: dict[int, LowerFrontier | None]


class EpochTailReader:
    """A reader of the messages that match a filter, in entire epochs. It has no connection: each call is given one. Not
    thread-safe.

    `starting_position`: `latest`, the epochs that begin after the snapshot; `active`, those too that are not completed,
    from history; `earliest`, all of which retention has taken nothing. Of a space whose topics another has meanwhile
    there is no epoch that has begun and is not completed: part of it may come when it gets them back. Messages without
    an epoch are always returned: from the snapshot on, or from history. `entire=False`: all messages, epochs in part
    too. `on_data_loss` is called with messages that retention has taken; where entire epochs were among them
    `read_available` raises `PositionGone`.

    Raises `InvalidEpoch` where the spaces' epochs cannot be compared.
    """

    def __init__(
        self,
        conn: psycopg.Connection[Any],
        filter: TopicFilter,
        starting_position: str = "latest",
        *,
        entire: bool = True,
        on_data_loss: Callable[[PositionGone], None] = lambda _: None,
    ) -> None:
        begin = _parse_start(starting_position, entire)
        with conn.transaction():
            conn.execute("set transaction isolation level repeatable read, read only")
            streams = list_matching_streams(conn, filter)
            ids = {cursor.space_id for cursor in streams.cursors} | set(find_spaces_that_matched(conn, filter))
            spaces = conn.execute(_SPACES, (list(ids),)).fetchall()
            begun = conn.execute(_BEGUN, (list(ids),)).fetchall() if begin is EpochStartingPosition.LATEST else []
        start = "latest" if begin is EpochStartingPosition.LATEST else "earliest"
        self._reading = MultiStreamReader(conn, filter, start, streams)
        self._selection, self.snapshot = _make_selection(begin, streams.cursors, spaces, begun)
        self._needs_complete, self._on_data_loss = entire, on_data_loss
        self._introduced = False
        self._torn: PositionGone | None = None

    def read_available(self, conn: psycopg.Connection[Any]) -> Iterator[EpochTailItem]:
        """Iterate over everything unread that is there now, then the lower frontier if it has moved; then it ends.

        The very first item is the snapshot. Raise `PositionGone` when retention was faster, and an epoch is
        incomplete; like a `Tail` where payloads cannot be read, and over a connection to another timeline.
        """
        self._reading.check_timeline(get_timeline(conn))
        if self._torn is not None:
            raise self._torn
        if not self._introduced:
            self._introduced = True
            yield self.snapshot
        snapshot = self._read_snapshot(conn)
        while due := self._list_due_cursors(snapshot):
            for cursor in due:
                yield from self._read(conn, cursor, snapshot)
        self._reading.raise_read_error()  # before the frontier is returned
        previous_frontier, self._selection = self._selection.announced, self._selection.advanced_to(snapshot.lowers)
        if self._selection.announced is not None and self._selection.announced != previous_frontier:
            yield self._selection.announced

    def _read_snapshot(self, conn: psycopg.Connection[Any]) -> _StreamSnapshot:
        """Return all matching streams, of one instant: while some were closed, others have opened that are not known
        yet."""
        while True:
            snapshot = _read_snapshot(conn, self._reading.open_streams)
            self._reading.set_heads(snapshot.heads)
            if not self._reading.is_stale:
                return snapshot
            self._reading.refresh_streams(conn)
            if not self._reading.open_streams:
                return _StreamSnapshot({}, {})

    def _list_due_cursors(self, snapshot: _StreamSnapshot) -> list[StreamCursor]:
        """Return the streams that are to be read before the frontier may be returned, as far as it is their turn."""
        heads = snapshot.heads
        return [
            p for p in self._reading.readable_cursors() if p.stream_id in heads and p.position < heads[p.stream_id].head
        ]

    def _read(
        self, conn: psycopg.Connection[Any], cursor: StreamCursor, snapshot: _StreamSnapshot
    ) -> Iterator[EpochTailMessages]:
        end = snapshot.heads[cursor.stream_id].head if snapshot.lowers.get(cursor.space_id) is None else None
        step = self._reading.read(conn, cursor, excluded=self._get_excluded_epochs(cursor.space_id), end=end)
        if step.gone is not None:
            self._handle_loss(conn, step.gone)
        if step.batches:
            yield EpochTailMessages(pa.Table.from_batches(step.batches))

    def _get_excluded_epochs(self, space_id: int) -> ExcludedEpochs | None:
        return self._selection.excluded_in(space_id) if self._needs_complete else None

    def _handle_loss(self, conn: psycopg.Connection[Any], gone: PositionGone) -> None:
        row = conn.execute(_UPPER, (gone.stream_id,)).fetchone()
        if self._needs_complete and (row is None or self._selection.may_need(row[0], upper_frontier_from_json(row[1]))):
            self._torn = gone
            raise gone
        self._on_data_loss(gone)


def _parse_start(starting_position: str, entire: bool) -> EpochStartingPosition:
    if starting_position not in list(EpochStartingPosition):
        raise UsageError(
            f"starting position {starting_position!r}: whole epochs are read from {', '.join(EpochStartingPosition)}. "
            "Give one of these."
        )
    if starting_position == EpochStartingPosition.ACTIVE and not entire:
        raise UsageError(
            "starting position 'active' is for whole epochs. Begin at latest or earliest to read them in part."
        )
    return EpochStartingPosition(starting_position)


def _make_selection(
    begin: EpochStartingPosition,
    cursors: list[StreamCursor],
    spaces: list[tuple[Any, ...]],
    begun_in_streams: list[tuple[Any, ...]],
) -> tuple[CompleteEpochFilter, FrontierSnapshot]:
    lowers = {space_id: lower_frontier_from_json(lower) for space_id, lower, _ in spaces}
    gone_frontiers = {space_id: upper_frontier_from_json(lost) for space_id, _, lost in spaces}
    open = {cursor.space_id for cursor in cursors if not cursor.is_closed}
    begun = [gone_frontiers[space_id] for space_id in open]
    begun += [upper_frontier_from_json(cursor.greatest) for cursor in cursors if cursor.space_id in open]
    for cursor in cursors:
        if cursor.is_gone:
            gone_frontiers[cursor.space_id] = gone_frontiers[cursor.space_id].join(
                upper_frontier_from_json(cursor.greatest)
            )
    begun_elsewhere = {space_id: UpperFrontier() for space_id in lowers.keys() - open}
    for space_id, upper in [*begun_in_streams, *((cursor.space_id, cursor.greatest) for cursor in cursors)]:
        if space_id in begun_elsewhere:
            begun_elsewhere[space_id] = begun_elsewhere[space_id].join(upper_frontier_from_json(upper))
    excluded_by_space = {
        space_id: ExcludedEpochs(
            gone_frontiers[space_id],
            lowers[space_id] if begin is EpochStartingPosition.ACTIVE else None,
            upper,
            lowers[space_id],
        )
        for space_id, upper in begun_elsewhere.items()
    }
    elsewhere = {space_id: gone_frontiers[space_id].join(upper) for space_id, upper in begun_elsewhere.items()}
    compared = {space_id: lowers[space_id] for space_id in open}
    selection = CompleteEpochFilter.starting_at(
        begin, compared, begun, [gone_frontiers[space_id] for space_id in open], excluded_by_space, elsewhere
    )
    return selection, FrontierSnapshot(
        selection.announced, active_epochs(UpperFrontier().join(*begun), selection.announced)
    )


def _read_snapshot(conn: psycopg.Connection[Any], stream_ids: list[int]) -> _StreamSnapshot:
    heads: dict[int, message_log.HeadState] = {}
    lowers: dict[int, LowerFrontier | None] = {}
    for stream_id, head, closed, gone, space_id, lower in conn.execute(_READ, (stream_ids,), prepare=True):
        heads[stream_id] = message_log.HeadState(head, closed, gone)
        if not closed:
            lowers[space_id] = lower_frontier_from_json(lower)
    deleted_heads = message_log.read_ends(conn, [stream_id for stream_id in stream_ids if stream_id not in heads])
    return _StreamSnapshot(heads | deleted_heads, lowers)
