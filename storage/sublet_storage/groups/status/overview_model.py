"""Plain values of the tables about groups: leaders, streams, members and lag."""

from __future__ import annotations

import json
from datetime import datetime
from functools import lru_cache

from msgspec import Struct, field

from sublet_storage.groups.coordinator.history_queries import NewestHistory
from sublet_storage.groups.model.desired_state import GroupDesiredState
from sublet_storage.groups.model.options import GroupOptions


class LeaderRow(Struct, frozen=True):
    """The present leader, or the last one; `remaining_s` <= 0: the lease has run out."""

    group_id: int
    node: str
    address: str
    term: int
    remaining_s: float


class StreamView(Struct, frozen=True):
    """One stream of one group. `age_s`: how long its oldest unread message has been waiting; None: nothing waits.

    `head_state` is open, closed or gone. `reserved_s`: for how much longer the
    free stream is reserved for `session`. `blocked_reason` is set for a blocked stream, `unreadable_reason` for one
    that its holder has reported as unreadable for `unreadable_s`.
    """

    group_id: int
    stream_id: int
    space: str
    generation_id: int
    status: str
    position: int
    head: int
    head_state: str
    lag: int | None
    age_s: float | None
    borrower_id: str | None
    agent: str | None
    session: str | None
    reserved_s: float | None
    grant_id: int
    lost_message_count: int
    blocked_reason: str | None
    unreadable_reason: str | None
    unreadable_s: float | None


class MemberRow(Struct, frozen=True):
    """A borrower that holds streams."""

    borrower_id: str
    agent: str | None
    session: str | None
    streams: tuple[int, ...]


class StreamReservationRow(Struct, frozen=True):
    """A session that has left, and the streams that are reserved for it for `remaining_s` at most."""

    session: str
    streams: tuple[int, ...]
    remaining_s: float


class GroupFrontierRow(Struct, frozen=True):
    """The progress of an atomic group in a space: the least epochs that it has not consumed (None: none is consumed),
    and of those that are not completed (None: there are none)."""

    space: str
    consumed: list[list[int]] | None
    completed: list[list[int]] | None
    moved_at: datetime


class StreamCounts(Struct, frozen=True):
    """A group's streams in numbers: {status: count}; the sum and maximum of the known lags (None: none is known), the
    number of unknown ones, and the number of unreadable streams."""

    statuses: dict[str, int]
    known_lag: int
    max_lag: int | None
    unknown_lag_count: int
    unreadable_count: int


NO_STREAMS = StreamCounts({}, 0, None, 0, 0)


class StoredGroup(Struct, frozen=True):
    """A group that is not deleted. Its options and desired state stay JSON until read: lists of groups are long.

    `created_at`: None for a time that Python has not, as an operator can write it. `after_generation`: up to this
    generation it has the rows that it is to have.
    """

    group_id: int
    kind: str
    name: str
    filter: str
    starting_position: str
    options_json: str
    desired_state_json: str
    created_at: datetime | None
    after_generation: int

    @property
    def options(self) -> GroupOptions:
        """Return the options with which it was created."""
        return _decode_options(self.starting_position, self.options_json)

    @property
    def desired_state(self) -> GroupDesiredState:
        """Return its desired state."""
        return _decode_desired_state(self.desired_state_json)

    @property
    def subscription(self) -> str:
        """Return its subscription in canonical form."""
        return f"${self.kind}/{self.name}/{self.filter}"


@lru_cache(maxsize=1024)
def _decode_options(start: str, document: str) -> GroupOptions:
    """Return the options, cached since most groups have the same."""
    return GroupOptions.from_row(start, json.loads(document))


@lru_cache(maxsize=1024)
def _decode_desired_state(document: str) -> GroupDesiredState:
    return GroupDesiredState.from_json(json.loads(document))


class GroupOverview(Struct, frozen=True):
    """One group at one instant.

    `streams` (and so `members` and `reserved_sessions`), `epochs` and `forced` are set only if they were requested.
    `forced`: the recent moves after which messages in [position, redelivery_end) may have been seen twice.
    """

    group: StoredGroup
    leader: LeaderRow | None
    counts: StreamCounts
    streams: tuple[StreamView, ...] = ()
    forced: NewestHistory = field(default_factory=NewestHistory)
    epochs: tuple[GroupFrontierRow, ...] = ()

    @property
    def has_leader(self) -> bool:
        """Return whether it has a leader now."""
        return self.leader is not None and self.leader.remaining_s > 0

    @property
    def known_lag(self) -> int:
        """Return the sum of all known lags."""
        return self.counts.known_lag

    @property
    def unknown_lag_count(self) -> int:
        """Return the number of streams whose lag is unknown."""
        return self.counts.unknown_lag_count

    @property
    def lag(self) -> int | None:
        """Return the lag of the entire group; None if a part of it is unknown."""
        return None if self.unknown_lag_count else self.known_lag

    @property
    def statuses(self) -> dict[str, int]:
        """Return {status: number of streams}."""
        return self.counts.statuses

    @property
    def members(self) -> tuple[MemberRow, ...]:
        """Return the borrowers that hold streams, by borrower id."""
        held_streams: dict[str, list[StreamView]] = {}
        for stream in self.streams:
            if stream.borrower_id is not None:
                held_streams.setdefault(stream.borrower_id, []).append(stream)
        return tuple(
            MemberRow(borrower_id, streams[0].agent, streams[0].session, tuple(stream.stream_id for stream in streams))
            for borrower_id, streams in sorted(held_streams.items())
        )

    @property
    def reserved_sessions(self) -> tuple[StreamReservationRow, ...]:
        """Return the sessions for which streams are reserved, by name."""
        reserved_streams: dict[str, list[StreamView]] = {}
        for stream in self.streams:
            if stream.session is not None and stream.reserved_s is not None:
                reserved_streams.setdefault(stream.session, []).append(stream)
        return tuple(
            StreamReservationRow(
                session,
                tuple(stream.stream_id for stream in streams),
                max(stream.reserved_s or 0.0 for stream in streams),
            )
            for session, streams in sorted(reserved_streams.items())
        )
