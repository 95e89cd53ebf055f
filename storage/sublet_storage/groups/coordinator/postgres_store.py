"""`GroupStore` on Postgres."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from shlex import quote

import psycopg

from sublet_protocol.domain.errors import MalformedRow, Unavailable, UnknownOutcome, format_error
from sublet_protocol.domain.subscriptions import Subscription
from sublet_storage.db.bounded_connection import BoundedConnection
from sublet_storage.db.clock import Clock, read_database_user
from sublet_storage.db.connect import connect
from sublet_storage.db.store_connection import Connection, GroupStoreConnection, TransactionRolledBack
from sublet_storage.groups.coordinator import group_lifecycle, leadership, lending_statements, session_name_owners
from sublet_storage.groups.coordinator.leader_commits import commit_batch, elect, make_busy_result
from sublet_storage.groups.model.desired_state import GroupCommand
from sublet_storage.groups.model.group_errors import (
    check_batch,
    check_same_group,
    check_same_options,
    row_locked_error,
    stale_term_error,
    undeclared_queue_error,
)
from sublet_storage.groups.model.lending_row import to_lending
from sublet_storage.groups.model.options import DEFAULTS
from sublet_storage.groups.model.records import (
    Group,
    GroupOptions,
    GroupWriteResult,
    GroupWrites,
    HistoryRecord,
    LeaderLivenessLock,
    Leadership,
    Lending,
    StartingPosition,
)
from sublet_storage.node_directory import NodeIncarnation
from sublet_storage.util.log_throttle import LogThrottle, format_suppressed_count

LOCK_TIMEOUT_S = 1.0
STATEMENT_TIMEOUT_S = 2.5
"""Below the margin of the trust window: a statement must not outlive the leader's right to make it."""
TRANSACTION_STATEMENTS = 5
"""How many statements' time a transaction may take; a leader that freezes while it sends one keeps its rows locked for
no longer (Postgres 17 on)."""

MAX_REFUSALS = 12
"""In one commit, in the time in which a lock is waited for as often: enough to find one group among 2000."""
SEPARATION_S = 60.0
"""For how long a group that was rejected is written apart from others, which wait for it no more."""

_log = logging.getLogger(__name__)


class PostgresGroupStore:
    """`GroupStore` on one connection, opened when first needed and again after it is lost, for several threads in turn.

    `clock` (microseconds since 1970) replaces the database's in tests. Sessions that stall in the middle of a
    transaction are ended by the server after the statement timeout, so that a frozen node holds no lock for long.
    """

    def __init__(
        self,
        database: str | Callable[[], BoundedConnection],
        clock: Clock | None = None,
        *,
        lock_timeout_s: float = LOCK_TIMEOUT_S,
        statement_timeout_s: float = STATEMENT_TIMEOUT_S,
        receive_timeout_s: float | None = None,
    ) -> None:
        def from_url() -> BoundedConnection:
            assert isinstance(database, str)
            return connect(
                database,
                application_name="sublet groups",
                lock_timeout_s=lock_timeout_s,
                statement_timeout_s=statement_timeout_s,
                tcp_timeout_s=statement_timeout_s,
                idle_in_transaction_timeout_s=statement_timeout_s,
                transaction_timeout_s=TRANSACTION_STATEMENTS * statement_timeout_s,
                receive_timeout_s=receive_timeout_s or 2 * statement_timeout_s,
            )

        self._connection = GroupStoreConnection(from_url if isinstance(database, str) else database)
        self._clock = clock
        self._log_throttle = LogThrottle()
        self._rejected: dict[int, float] = {}
        self._suspected: dict[int, float] = {}
        self._refusals_s = MAX_REFUSALS * lock_timeout_s

    def close(self) -> None:
        """Close the connection; a later call opens another."""
        self._connection.close()

    # --- groups -------------------------------------------------------------------------------------------------

    def open_group(
        self,
        subscription: Subscription,
        start: StartingPosition = StartingPosition.LATEST,
        principal: str | None = None,
    ) -> Group:
        """See `GroupStore`."""
        group = self.find_live_group(subscription)
        if group is None and subscription.kind == "queue":
            raise undeclared_queue_error(subscription)
        return group or self._create(subscription, GroupOptions(start), principal)

    def declare_group(
        self, subscription: Subscription, options: GroupOptions = DEFAULTS, principal: str | None = None
    ) -> Group:
        """See `GroupStore`."""
        group = self.find_live_group(subscription) or self._create(subscription, options, principal)
        return check_same_options(group, options)

    def find_group(self, group_id: int) -> Group | None:
        """See `GroupStore`."""
        return self._connection.read(lambda connection: group_lifecycle.find_by_id(connection, group_id))

    def find_live_group(self, subscription: Subscription) -> Group | None:
        """See `GroupStore`."""
        return self._connection.read(lambda connection: group_lifecycle.find_live(connection, subscription))

    def delete_group(self, subscription: Subscription, user: str = "", group_id: int | None = None) -> int | None:
        """See `GroupStore`."""
        group, now_us = self.find_live_group(subscription), self._get_now_us()
        if group is None:
            return None
        check_same_group(group, group_id)
        try:
            deleted = self._connection.write(
                lambda connection: group_lifecycle.delete(connection, group.group_id, now_us, user)
            )
        except TransactionRolledBack as error:
            if isinstance(error.__cause__, psycopg.errors.QueryCanceled):
                raise TransactionRolledBack(
                    f"group {str(subscription)!r}: its rows, one for each stream of its filter, were not deleted in "
                    f"the time of a statement: `sublet groups delete {quote(str(subscription))}` may take a minute."
                ) from error
            if not isinstance(error.__cause__, psycopg.errors.LockNotAvailable):
                raise
            locker = self._connection.read(
                lambda connection: lending_statements.find_locker(connection, group.group_id)
            )
            raise row_locked_error(subscription, "it has", locker) from error
        return group.group_id if deleted else None

    def apply_command(self, subscription: Subscription, command: GroupCommand, user: str = "") -> Group | None:
        """See `GroupStore`."""
        group, now_us = self.find_live_group(subscription), self._get_now_us()
        if group is None:
            return None
        return self._connection.write(
            lambda connection: group_lifecycle.apply_command(connection, group, command, now_us, user)
        )

    def user(self) -> str:
        """Return the user of the commands that this store executes, for history."""
        return self._connection.read(read_database_user)

    def read_last_session_epoch(self, subscription: Subscription, session: str) -> int:
        """See `GroupStore`."""
        return self._connection.read(
            lambda connection: session_name_owners.read_last_epoch(connection, subscription, session)
        )

    def bind_session(self, subscription: Subscription, session: str, principal: str) -> None:
        """See `GroupStore`."""
        self._connection.write(
            lambda connection: session_name_owners.bind(connection, subscription, session, principal)
        )

    def history(self, group_id: int) -> tuple[HistoryRecord, ...]:
        """See `GroupStore`."""
        return self._connection.read(lambda connection: lending_statements.read_history(connection, group_id))

    # --- leadership ---------------------------------------------------------------------------------------------

    def read_leaderships(self, leadership_ids: Sequence[int]) -> dict[int, Leadership]:
        """See `GroupStore`."""
        now_us = self._get_now_us()
        return self._connection.read(lambda connection: leadership.read_leaderships(connection, leadership_ids, now_us))

    def claim(
        self,
        leadership_id: int,
        node: NodeIncarnation,
        lease_s: float,
        lock_key: int | None = None,
        rival: LeaderLivenessLock | None = None,
    ) -> Leadership:
        """See `GroupStore`."""
        now_us = self._get_now_us()
        current = self.read_leaderships((leadership_id,)).get(leadership_id)
        if current is not None and current.remaining_s > 0 and (rival is None or rival != current.lock):
            return current
        return self._connection.write(
            lambda connection: elect(connection, leadership_id, node, lease_s, now_us, lock_key, rival)
        )

    def renew(
        self, node: NodeIncarnation, terms: Mapping[int, int], lease_s: float, lock_key: int | None = None
    ) -> frozenset[int]:
        """See `GroupStore`. Where a row is locked for too long, the others are renewed without it."""
        now_us = self._get_now_us()

        def attempt(wait: bool) -> frozenset[int]:
            return self._connection.write(
                lambda connection: leadership.renew(connection, node, terms, lease_s, now_us, lock_key, wait=wait)
            )

        try:
            return attempt(wait=True)
        except TransactionRolledBack as error:
            if (suppressed_count := self._log_throttle.acquire("renew")) is not None:
                text = "leases locked, renewing the others: %s%s"
                _log.warning(text, error, format_suppressed_count(suppressed_count))
            return attempt(wait=False)

    def release(self, node: NodeIncarnation, terms: Mapping[int, int]) -> frozenset[int]:
        """See `GroupStore`."""
        now_us = self._get_now_us()
        return self._connection.write(lambda connection: leadership.release(connection, node, terms, now_us))

    # --- a leader's reads and writes ----------------------------------------------------------------------------

    def load(self, group_id: int, term: int) -> tuple[Lending, ...]:
        """See `GroupStore`."""
        now_us = self._get_now_us()

        def read(connection: Connection) -> tuple[Lending, ...]:
            rows = lending_statements.read_unfinished(connection, group_id, now_us)
            leader = leadership.read_leaderships(connection, (group_id,), now_us).get(group_id)
            if leader is None or leader.term != term or leader.remaining_s <= 0:
                raise stale_term_error(group_id, term)
            ancestors = lending_statements.read_unfinished_ancestors(connection, (row for row, _, _ in rows))
            return tuple(
                to_lending(row, stream, at_us, ancestors.get((group_id, row.stream_id), ()))
                for row, stream, at_us in rows
            )

        return self._connection.read(read)

    def commit(self, batch: Sequence[GroupWrites]) -> tuple[GroupWriteResult, ...]:
        """See `GroupStore`. If the server rejects the entire batch, or one group's part of it has what was not foreseen
        here, its halves are tried, down to single groups: they are BUSY, and come behind the others, by themselves,
        until they have been written for a while. Where that goes on, so is all that was not tried, for leases are not
        renewed meanwhile. A part that cost the connection is tried in halves by later calls: the database may be gone.
        """
        check_batch(batch)
        now_us = self._get_now_us()
        results: dict[int, GroupWriteResult] = {}
        waiting, rejected_count, began = self._divide(batch), 0, time.monotonic()
        while waiting:
            part = waiting.pop()
            try:
                part_results = self._connection.write(partial(commit_batch, batch=part, now_us=now_us))
            except Exception as error:
                is_lost = isinstance(error, Unavailable) and not isinstance(error, TransactionRolledBack)
                is_unknown = isinstance(error, UnknownOutcome)
                rejected_count += 1
                self._note_rejected(part)
                if is_lost and (len(part) == len(batch) or not (results or is_unknown)):
                    raise
                self._log_rejection(part, error)
                is_over = is_lost or rejected_count >= MAX_REFUSALS or time.monotonic() > began + self._refusals_s
                middle = len(part) // 2
                if middle and not is_over:
                    waiting += [part[middle:], part[:middle]]
                    continue
                part_results = tuple(make_busy_result(writes, is_outcome_unknown=is_unknown) for writes in part)
                if is_over:
                    results.update((writes.group_id, make_busy_result(writes)) for part in waiting for writes in part)
                    waiting = []
            results.update((result.group_id, result) for result in part_results)
        return tuple(results[writes.group_id] for writes in batch)

    def _divide(self, batch: Sequence[GroupWrites]) -> list[Sequence[GroupWrites]]:
        """Return the parts of the batch that are tried in transactions of their own, the first one last."""
        now = time.monotonic()
        self._rejected = {group_id: until for group_id, until in self._rejected.items() if until > now}
        self._suspected = {group_id: until for group_id, until in self._suspected.items() if until > now}
        groups = {writes.group_id: writes for writes in batch}
        rejected = [groups.pop(group_id) for group_id in self._rejected if group_id in groups]
        suspected = [groups.pop(group_id) for group_id in self._suspected if group_id in groups]
        middle = len(suspected) // 2
        singles = ([writes] for writes in rejected[:MAX_REFUSALS])
        parts = ([*groups.values()], suspected[:middle], suspected[middle:], *singles, rejected[MAX_REFUSALS:])
        return [part for part in reversed(parts) if part]

    def _note_rejected(self, part: Sequence[GroupWrites]) -> None:
        """Have a group come last, by itself, in later calls, and several, unless they do already, in halves."""
        until = time.monotonic() + SEPARATION_S
        if len(part) == 1:
            self._suspected.pop(part[0].group_id, None)
            self._rejected.pop(part[0].group_id, None)
            self._rejected[part[0].group_id] = until
        elif group_ids := [writes.group_id for writes in part if writes.group_id not in self._rejected]:
            self._suspected = dict.fromkeys(group_ids, until)

    def _log_rejection(self, part: Sequence[GroupWrites], error: Exception) -> None:
        if len(part) > 1:
            if (suppressed_count := self._log_throttle.acquire("commit")) is not None:
                text = "group writes rejected, retrying in halves: group_count=%d: %s%s"
                _log.warning(text, len(part), error, format_suppressed_count(suppressed_count))
        elif (suppressed_count := self._log_throttle.acquire(part[0].group_id)) is not None:
            _log_rejected(part[0].group_id, error, suppressed_count)

    # --- small parts --------------------------------------------------------------------------------------------

    def _get_now_us(self) -> int | None:
        return self._clock() if self._clock else None

    def _create(self, subscription: Subscription, options: GroupOptions, principal: str | None = None) -> Group:
        """Create it, or find the one that was just created by another process; if that is deleted already, once
        more. Raise `TooManyGroups`."""
        now_us = self._get_now_us()
        while True:
            try:
                created = self._connection.write(
                    lambda connection: group_lifecycle.create(connection, subscription, options, now_us, principal)
                )
            except TransactionRolledBack as error:
                if isinstance(error.__cause__, psycopg.errors.QueryCanceled):
                    raise TransactionRolledBack(
                        f"group {str(subscription)!r}: its rows, one for each stream of its filter, were not made in "
                        "the time of a statement. It is tried again; where it has too many streams, `sublet groups "
                        f"create {quote(str(subscription))} --from {options.starting_position}` may take a minute."
                    ) from error
                raise
            group = created or self.find_live_group(subscription)
            if group is not None:
                return group


def _log_rejected(group_id: int, error: Exception, suppressed_count: int) -> None:
    """Log the error: a lock timeout, or a lost connection, in one line, an unforeseen error with its traceback."""
    foreseen = isinstance(error, Unavailable | MalformedRow)
    level, exc_info = (logging.WARNING, None) if foreseen else (logging.ERROR, error)
    text, detail = "group write rejected: group_id=%d: %s%s", format_error(error)
    _log.log(level, text, group_id, detail, format_suppressed_count(suppressed_count), exc_info=exc_info)
