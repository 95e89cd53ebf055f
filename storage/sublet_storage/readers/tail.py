"""Reads all streams and generations that match a filter, without a group.

A stream is read only when all its ancestors have been read to their ends, whatever lies between, so that messages of
one key come in the order they were published. Between different streams there is no order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import psycopg
import pyarrow as pa
from msgspec import Struct

from sublet_protocol.domain.errors import PayloadUnavailable, PoisonBlock, PositionBeyondHead, PositionGone, SubletError
from sublet_protocol.domain.subscriptions import Bookmark
from sublet_protocol.domain.topics import TopicFilter
from sublet_storage.db.bounded_connection import check_timeline, get_timeline
from sublet_storage.log import fetch as message_log
from sublet_storage.log.complete_epoch_filter import ExcludedEpochs
from sublet_storage.log.deleted_streams import find_deleted_streams
from sublet_storage.spaces.routing import find_candidate_filters
from sublet_storage.spaces.space_queries import MAY_MATCH, read_matching_filters

TailStart = str | int | datetime | Bookmark
"""Where to begin in the streams there are: `earliest`, `latest`, an offset, a time (of the database's clock), or where
an earlier reader of the same filter was."""

_STREAMS = f"""
select s.stream_id, s.generation_id, s.head, s.state = 'closed', n.state = 'gone', array(select unnest(s.parents)),
       s.space_id, s.upper_frontier
  from stream s join generation n using (generation_id)
 where {MAY_MATCH} and s.stream_id > %(after)s
 order by s.generation_id, s.stream_id"""

_NEWEST = """
select greatest((select max(stream_id) from stream), (select max(stream_id) from lost_generation), 0)"""

_LOST = "select filter, stream_id from lost_generation where stream_id > %(known)s order by stream_id"

# Of spaces that were there with it all the time since.
_FILTERS_SINCE = "select filter from space where dropped_at is null and filter_since <= %(known)s"


class StreamCursor(Struct):
    """The position of a reader in one stream. `initial_head`: the head when the reader began. `is_done`: no message is
    left, now or later.

    `greatest`: the greatest epochs in it when it was found. `read_error`: why its next messages could not be read.
    """

    stream_id: int
    generation_id: int
    head: int
    is_closed: bool
    is_gone: bool
    parents: list[int]
    space_id: int
    greatest: list[list[int]] | None
    position: int = 0
    initial_head: int = 0
    is_done: bool = False
    read_error: SubletError | None = None


class MatchingStreams(Struct, frozen=True):
    """The streams that match a filter, of one instant. `newest`: of all streams there are. `lost`: the deleted streams
    newer than `known` that had messages for the filter, the newest of each filter of spaces."""

    cursors: list[StreamCursor]
    newest: int
    lost: list[int]


class TailPage(Struct, frozen=True):
    """The result of one read of one stream: the matching messages from `start` up to before `position`.

    `gone`: retention has taken what was at `start`; reading goes on at `position`.
    """

    stream_id: int
    start: int
    position: int
    batches: tuple[pa.RecordBatch, ...] = ()
    gone: PositionGone | None = None


class MultiStreamReader:
    """A reader of all matching streams. It holds no connection: each call is given one. Not thread-safe.

    Streams that open later are read from their beginning. `streams`: what `list_matching_streams` has just returned, if
    the caller has called it.
    """

    def __init__(
        self,
        conn: psycopg.Connection[Any],
        filter: TopicFilter,
        begin: TailStart = "latest",
        streams: MatchingStreams | None = None,
    ) -> None:
        self.filter = filter
        self._timeline = get_timeline(conn)
        if isinstance(begin, Bookmark):
            check_timeline(conn, begin.timeline, "the bookmark")
        self._cursors: dict[int, StreamCursor] = {}
        self._waiting: set[int] | None = None
        known = begin.known if isinstance(begin, Bookmark) else None
        matching_streams = list_matching_streams(conn, filter, known=known) if streams is None else streams
        self._known = matching_streams.newest
        self._closures = False
        if isinstance(begin, Bookmark):
            _check_unread(begin.offsets, matching_streams.newest)
            missing_streams = find_deleted_streams(
                conn, begin.offsets.keys() - {cursor.stream_id for cursor in matching_streams.cursors}
            )
            self._add_lost(
                {
                    stream_id: begin.offsets[stream_id]
                    for stream_id, had_messages in missing_streams.items()
                    if had_messages
                }
            )
        self._add_lost(dict.fromkeys(matching_streams.lost, 0))
        for cursor in matching_streams.cursors:
            cursor.initial_head, cursor.position = cursor.head, _find_first_position(conn, cursor, begin)
            self._add(cursor)
        self._remove_done()

    @property
    def is_caught_up(self) -> bool:
        """Return whether everything that was there at the beginning has been read."""
        return all(cursor.is_done or cursor.position >= cursor.initial_head for cursor in self._cursors.values())

    @property
    def stream_count(self) -> int:
        """Return the number of streams that it has: of those that are read to their ends only what others wait for."""
        return len(self._cursors)

    @property
    def open_streams(self) -> list[int]:
        """Return the streams that may get more messages."""
        return [cursor.stream_id for cursor in self._cursors.values() if not cursor.is_done]

    @property
    def spaces(self) -> set[int]:
        """Return the spaces of the streams that may get more messages."""
        return {cursor.space_id for cursor in self._cursors.values() if not cursor.is_done}

    @property
    def bookmark(self) -> Bookmark:
        """Return how far it has come."""
        offsets = {cursor.stream_id: cursor.position for cursor in self._cursors.values() if not cursor.is_done}
        return Bookmark(self._known, offsets, self._timeline)

    @property
    def is_stale(self) -> bool:
        """Return whether there may be streams that it does not have: one was closed, or none may get more messages."""
        return self._closures or not self.open_streams

    def readable_cursors(self) -> list[StreamCursor]:
        """Return the streams of which there is something to read now, each for a step or more."""
        waiting = self._find_waiting()
        return [each for each in self._cursors.values() if self._is_unread(each) and each.stream_id not in waiting]

    def raise_read_error(self) -> None:
        """Raise the error of a stream whose payloads could not be read, if there is one: `PoisonBlock`,
        `PayloadUnavailable`. Call it when no stream can be read; all such streams may be read again then."""
        errors = [cursor.read_error for cursor in self._cursors.values() if cursor.read_error is not None]
        for cursor in self._cursors.values():
            cursor.read_error = None
        if errors:
            raise next((each for each in errors if isinstance(each, PoisonBlock)), errors[0])

    def read(
        self,
        conn: psycopg.Connection[Any],
        cursor: StreamCursor,
        limit_bytes: int = message_log.PAGE_BYTES,
        excluded: ExcludedEpochs | None = None,
        end: int | None = None,
    ) -> TailPage:
        """Return the next page of a stream, at least one block; without the epochs that are to be left out, and up to
        before the offset `end`, which lies ahead. Nothing where a payload cannot be had: others come first, then
        `raise_read_error`.

        Raise `PositionBeyondHead` over a connection to another timeline of the database than that of the beginning.
        """
        start = cursor.position
        self.check_timeline(get_timeline(conn))
        try:
            page = message_log.fetch(
                conn,
                cursor.stream_id,
                start,
                filter=self.filter,
                generation_id=cursor.generation_id,
                excluded=excluded,
                limit_bytes=limit_bytes,
            )
        except PositionGone as gone:
            cursor.position = cursor.head if gone.oldest is None else gone.oldest
            self._set_done(cursor, cursor.is_closed and gone.oldest is None)
            return TailPage(cursor.stream_id, start, cursor.position, gone=gone)
        except (PoisonBlock, PayloadUnavailable) as error:
            cursor.read_error = error
            return TailPage(cursor.stream_id, start, start)
        page = page if end is None else page.truncate(end)
        self._closures = self._closures or page.is_closed != cursor.is_closed
        cursor.position, cursor.head, cursor.is_closed = page.position, page.head, page.is_closed
        self._set_done(cursor, page.is_finished)
        return TailPage(cursor.stream_id, start, page.position, page.batches)

    def set_heads(self, heads: Mapping[int, message_log.HeadState]) -> None:
        """Set the heads of streams as read from the log. Raise `PositionBeyondHead` if more was read than there is."""
        self.check_heads(heads)
        self.update_heads(heads)

    def check_heads(self, heads: Mapping[int, message_log.HeadState]) -> None:
        """Raise `PositionBeyondHead` if more was read of a stream than it has by these heads."""
        for stream_id in self._find_beyond_head(heads):
            raise message_log.beyond_head_error(stream_id, self._cursors[stream_id].position, heads[stream_id].head)

    def refresh_heads(self, conn: psycopg.Connection[Any]) -> None:
        """Read the heads of its streams, see `set_heads`."""
        self.set_heads(message_log.read_heads_or_ends(conn, self.open_streams))

    def is_beyond(self, heads: Mapping[int, message_log.HeadState]) -> bool:
        """Return whether more was read of a stream than it has by these heads."""
        return bool(self._find_beyond_head(heads))

    def _find_beyond_head(self, heads: Mapping[int, message_log.HeadState]) -> list[int]:
        return [
            stream_id
            for stream_id, head in heads.items()
            if (cursor := self._cursors.get(stream_id)) is not None and cursor.position > head.head
        ]

    def update_heads(self, heads: Mapping[int, message_log.HeadState]) -> None:
        """Set the heads of streams to these hints."""
        for stream_id, head in heads.items():
            cursor = self._cursors.get(stream_id)
            if cursor is None or cursor.is_done or head.head < cursor.head:
                continue
            self._closures = self._closures or (head.is_closed and not cursor.is_closed)
            end = max(cursor.head, cursor.position + 1) if head.head == message_log.UNKNOWN else head.head
            cursor.head, cursor.is_closed = end, cursor.is_closed or head.is_closed
            self._set_done(cursor, cursor.is_closed and cursor.position >= cursor.head)

    def check_timeline(self, timeline: str | None) -> None:
        """Raise `PositionBeyondHead` where the database is on another timeline than at the beginning."""
        if timeline not in (None, self._timeline):
            raise PositionBeyondHead(
                f"{self.filter}: the database has gone over to another timeline since the reading began, a standby was"
                " promoted: before the offsets that were reached may lie other messages now. Begin again at a time, or "
                "at earliest."
            )

    def refresh_streams(self, conn: psycopg.Connection[Any]) -> MultiStreamReader:
        """Add streams that have opened, and remove those that are done; return this reader.

        Rollovers exclude each other, so that what comes into view has larger ids than what was there.
        """
        self._closures = False
        matching_streams = list_matching_streams(conn, self.filter, after_stream_id=self._known, known=self._known)
        _check_unread({each.stream_id: each.position for each in self._cursors.values()}, matching_streams.newest)
        self._known = matching_streams.newest
        self._add_lost(dict.fromkeys(matching_streams.lost, 0))
        for cursor in matching_streams.cursors:
            self._add(cursor)
        self._remove_done()
        return self

    def _set_done(self, cursor: StreamCursor, is_done: bool) -> None:
        if cursor.is_done != is_done:
            cursor.is_done, self._waiting = is_done, None

    def _add(self, cursor: StreamCursor) -> None:
        cursor.is_done = cursor.is_closed and cursor.position == cursor.head
        self._cursors[cursor.stream_id], self._waiting = cursor, None

    def _add_lost(self, offsets: Mapping[int, int]) -> None:
        """Add streams that no longer exist, to be read once and found gone."""
        for stream_id, offset in offsets.items():
            self._add(StreamCursor(stream_id, 0, offset + 1, True, True, [], 0, None, offset, offset + 1))

    def _remove_done(self) -> None:
        """Remove the cursors that are done, except those that others wait for."""
        waiting = self._find_waiting()
        self._cursors = {
            stream_id: cursor
            for stream_id, cursor in self._cursors.items()
            if stream_id in waiting or not cursor.is_done
        }

    @staticmethod
    def _is_unread(cursor: StreamCursor) -> bool:
        return cursor.position < cursor.head and cursor.read_error is None

    def _find_waiting(self) -> set[int]:
        """Return those with an ancestor that was not read to its end; parents come before their children here. Such as
        are unknown here hold nothing that matches. The set is stored until a stream is read to its end, or comes."""
        if self._waiting is not None:
            return self._waiting
        waiting: set[int] = set()
        for stream_id, cursor in self._cursors.items():
            above = (self._cursors.get(parent) for parent in cursor.parents)
            if any(parent is not None and (not parent.is_done or parent.stream_id in waiting) for parent in above):
                waiting.add(stream_id)
        self._waiting = waiting
        return waiting


@dataclass(slots=True)
class Tail:
    """Reads all messages that match over one connection, a page at a time; see `MultiStreamReader`. Not thread-safe.

    `on_data_loss` is called with what retention has taken.
    """

    conn: psycopg.Connection[Any]
    filter: TopicFilter
    start: TailStart = "latest"
    on_data_loss: Callable[[PositionGone], None] = lambda _: None
    _reading: MultiStreamReader = field(init=False)

    def __post_init__(self) -> None:
        self._reading = MultiStreamReader(self.conn, self.filter, self.start)

    @property
    def is_caught_up(self) -> bool:
        """Return whether everything that was there at the beginning has been read."""
        return self._reading.is_caught_up

    @property
    def bookmark(self) -> Bookmark:
        """Return how far it has come."""
        return self._reading.bookmark

    def pages(self) -> Iterator[pa.Table]:
        """Yield everything unread that is there now, stream by stream, a page of each in turn.

        Raise `PayloadUnavailable` and `PoisonBlock` of streams that could not be read on, after all others were.
        """
        reading = self._reading
        reading.refresh_heads(self.conn)
        reading.check_timeline(get_timeline(self.conn))
        if reading.is_stale:
            reading.refresh_streams(self.conn)
        while turn := reading.readable_cursors():
            for cursor in turn:
                step = reading.read(self.conn, cursor)
                if step.gone is not None:
                    self.on_data_loss(step.gone)
                if step.batches:
                    yield pa.Table.from_batches(step.batches)
        reading.raise_read_error()


def list_matching_streams(
    conn: psycopg.Connection[Any], filter: TopicFilter, after_stream_id: int = 0, known: int | None = None
) -> MatchingStreams:
    """Return the streams that match, with ids above `after_stream_id`, by the filters that generations were filled
    under, in one snapshot. `known`: the newest stream when that was done before; None: never, so that nothing is
    lost."""
    with conn.transaction():
        conn.execute("set transaction isolation level repeatable read, read only")
        parameters = {**read_matching_filters(conn, filter), "after": after_stream_id}
        cursors = [StreamCursor(*row) for row in conn.execute(_STREAMS, parameters)]
        ((newest,),) = conn.execute(_NEWEST).fetchall()
        return MatchingStreams(cursors, newest, [] if known is None else _list_lost(conn, filter, known))


def _list_lost(conn: psycopg.Connection[Any], filter: TopicFilter, known: int) -> list[int]:
    rows = conn.execute(_LOST, {"known": known}).fetchall()
    if not rows:
        return []
    since = [TopicFilter(text) for (text,) in conn.execute(_FILTERS_SINCE, {"known": known}).fetchall()]
    return [each for text, each in rows if (own := TopicFilter(text)) in find_candidate_filters(filter, [own, *since])]


def _check_unread(offsets: Mapping[int, int], newest: int) -> None:
    """Raise `PositionBeyondHead` where messages were read of streams after `newest`, which the database never had."""
    unknown = [stream_id for stream_id, offset in offsets.items() if stream_id > newest and offset > 0]
    if unknown:
        raise PositionBeyondHead(
            f"stream {min(unknown)}: messages of it were read, and this database has never had it. Is it another one, "
            "or was it restored from a backup? Begin again at a time, or at earliest."
        )


def _find_first_position(conn: psycopg.Connection[Any], cursor: StreamCursor, begin: TailStart) -> int:
    """Return where to begin in a stream. Raise `PositionBeyondHead` for a bookmark that cannot be."""
    if isinstance(begin, Bookmark):
        return _find_marked_position(cursor, begin)
    if begin == "latest" or cursor.is_gone:
        return cursor.head
    if isinstance(begin, datetime):
        try:
            return message_log.offset_at_time(conn, cursor.stream_id, begin)
        except PositionGone:  # deleted since it was listed
            return cursor.head
    return min(begin, cursor.head) if isinstance(begin, int) else 0


def _find_marked_position(cursor: StreamCursor, begin: Bookmark) -> int:
    """Return the position of a stream by the bookmark; known streams that it does not name were read to their ends."""
    position = begin.offsets.get(cursor.stream_id, cursor.head if cursor.stream_id <= begin.known else 0)
    if position > cursor.head:
        raise PositionBeyondHead(
            f"stream {cursor.stream_id}: offset {position} of the bookmark is beyond the head {cursor.head}. Is it of "
            "another database, or was this one restored from a backup? Begin again at a time, or at earliest."
        )
    return position
