"""Maintenance of the database, by the node that leads the reserved leadership row."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import psycopg

from sublet_leader.jobs.maintenance_thread import MaintenanceJobThread
from sublet_protocol.domain.errors import StaleTerm, format_error
from sublet_storage.db.bounded_connection import BoundedConnection
from sublet_storage.db.connect import connect
from sublet_storage.db.store_connection import Guard
from sublet_storage.groups.admin import access_rules, access_tokens
from sublet_storage.groups.coordinator import history_queries, leadership
from sublet_storage.groups.model.records import MAINTENANCE
from sublet_storage.log import epoch_leases
from sublet_storage.notify import catch_up_reads
from sublet_storage.notify.changes import ObjectChange
from sublet_storage.notify.publisher import shared_publisher
from sublet_storage.objects import unreferenced_objects
from sublet_storage.producer import sink_staging
from sublet_storage.spaces import (
    empty_generation_cleanup,
    retention,
    small_block_compaction,
    space_changes,
    space_queries,
    tiering,
)
from sublet_storage.spaces.routing import Space
from sublet_storage.spaces.small_block_compaction import CompactionProgress
from sublet_storage.util.log_throttle import LogThrottle, error_signature, format_suppressed_count

log = logging.getLogger(__name__)

PASS_INTERVAL_S = 5.0
"""Between two passes."""

COMPACTION_S = 10.0
"""After this time a pass compacts no further stream: whoever publishes decides how long that takes."""

RECEIVE_TIMEOUT_S = 60.0
"""How long a silent server is waited for. Statements have no time limit, as the rows of a partition that is dropped are
read in one. Those that may take longer than this are transactions of their own: Postgres completes them though their
connection is gone, and the next pass waits for their locks no longer than for others."""

Publish = Callable[[Sequence[ObjectChange]], None]

MAX_LISTED = 5
"""Maximum number of failed steps of a pass that are logged one by one."""

RETRY_INTERVAL_S = 600.0
"""After which time a step that fails in each pass with the same cause is logged again."""

Steps = Callable[[psycopg.Connection[Any], Guard], Iterator[tuple[str, Callable[[], None]]]]
"""A pass, step by step, each with its name; a failed step does not stop the next."""


class MaintenanceThreads:
    """Two threads, as a payload location that hangs must not block the work in Postgres. `term` returns the term under
    which this node leads the maintenance at this moment, None if it does not.

    `history_retention_s`: how long the history of grants is retained. `grace_s`: how long objects that no block names
    any more are retained. `on_connected` is called with the name and the connection of each pass.
    """

    def __init__(
        self,
        url: str,
        term: Callable[[], int | None],
        history_s: float,
        every_s: float = PASS_INTERVAL_S,
        grace_s: float = unreferenced_objects.GRACE_S,
        on_connected: Callable[[str, BoundedConnection], object] = lambda *_: None,
    ) -> None:
        list_steps = partial(
            _list_steps,
            history_s=history_s,
            notify=shared_publisher(url).publish,
            collapse=empty_generation_cleanup.EmptyGenerationCleaner(),
            producers=retention.IdleProducerCleaner(),
            compaction=CompactionProgress(),
        )
        list_payload_steps = partial(_list_payload_steps, grace_s=grace_s)
        self._threads = [
            _PassThread("sublet maintenance", url, term, every_s, on_connected, list_steps),
            _PassThread("sublet payloads", url, term, every_s, on_connected, list_payload_steps),
        ]

    def start(self) -> None:
        """Start the maintenance."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End after the steps that are under way."""
        for thread in self._threads:
            thread.stop(0)


class _PassThread(MaintenanceJobThread):
    """A thread that repeats its pass."""

    def __init__(
        self,
        name: str,
        url: str,
        term: Callable[[], int | None],
        every_s: float,
        on_connected: Callable[[str, BoundedConnection], object],
        steps: Steps,
    ) -> None:
        super().__init__(
            name,
            partial(connect, url, lock_timeout_s=2.0, receive_timeout_s=RECEIVE_TIMEOUT_S),
            term,
            every_s,
            on_connected,
        )
        self._steps, self._log_throttle = steps, LogThrottle(RETRY_INTERVAL_S)

    def _work(self, connection: psycopg.Connection[Any], term: int) -> None:
        def guard(inside: psycopg.Connection[Any]) -> None:
            leadership.check_term(inside, MAINTENANCE, term)

        failed: list[str] = []
        done: list[str] = []
        for name, step in self._steps(connection, guard):
            if self.is_stopping:
                break
            try:
                step()
            except StaleTerm:
                raise
            except Exception as error:  # the error of one space or stream must not hold up the others
                if connection.closed:
                    raise
                if (suppressed := self._log_throttle.acquire(name, error_signature(error))) is not None:
                    failed.append(f"{name}: {format_error(error)}{format_suppressed_count(suppressed)}")
            else:
                done.append(name)
        self._log_recovered([*done, self._job])
        if failed:
            remark = ["and so on"] if failed[MAX_LISTED:] else []
            log.warning(
                "maintenance steps failed, retrying: step_count=%d: %s",
                len(failed),
                "; ".join(failed[:MAX_LISTED] + remark),
            )

    def _log_recovered(self, steps: Sequence[str]) -> None:
        if recovered := [name for name in steps if self._log_throttle.reset(name)]:
            log.info("maintenance steps recovered: %s", "; ".join(recovered))


def _list_steps(
    connection: psycopg.Connection[Any],
    guard: Guard,
    history_s: float,
    notify: Publish,
    collapse: empty_generation_cleanup.EmptyGenerationCleaner,
    producers: retention.IdleProducerCleaner,
    compaction: CompactionProgress,
) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield the steps in Postgres. Streams whose compaction is unfinished are compacted after others."""
    due: list[str] = []
    yield "search for spaces to roll over", lambda: due.extend(space_changes.list_overdue_rollovers(connection))
    for name in due:
        yield f"rollover of space {name}", partial(_roll_over, connection, guard, name, notify)
    yield "retention", partial(_retain, connection, guard)
    yield "cleanup of past generations", partial(_collapse, connection, guard, collapse)
    yield "expiry of epochs", partial(_expire_epochs, connection, guard)
    yield "cleanup of idle producers", partial(_delete_idle_producers, connection, guard, producers)
    yield "cleanup of staged blocks", partial(_delete_abandoned_blocks, connection)
    yield "cleanup of history", partial(_delete_old_history, connection, history_s)
    fragmented: list[int] = []
    yield (
        "search for fragmented streams",
        lambda: fragmented.extend(small_block_compaction.list_newly_fragmented(connection, guard, compaction)),
    )
    deadline = time.monotonic() + COMPACTION_S
    turns = {stream_id: turn for turn, stream_id in enumerate(compaction.unfinished)}
    for stream_id in sorted(fragmented, key=lambda stream_id: turns.get(stream_id, -1)):
        if time.monotonic() < deadline:
            yield f"compaction of stream {stream_id}", partial(_compact, connection, guard, stream_id, compaction)


def _list_payload_steps(
    connection: psycopg.Connection[Any], guard: Guard, grace_s: float
) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield the steps at the payload locations."""
    outside: list[Space] = []
    yield (
        "search for spaces with remote payloads",
        lambda: outside.extend(_list_spaces_with_remote_payloads(connection)),
    )
    for space in outside:
        yield f"tiering of space {space.name}", partial(_tier, connection, guard, space)
    yield "cleanup of unreferenced objects", partial(_delete_unreferenced_objects, connection, guard, grace_s)


def _roll_over(connection: psycopg.Connection[Any], guard: Guard, name: str, notify: Publish) -> None:
    if space_changes.roll_over_due(connection, guard, name):
        log.info("space rolled over: space=%s", name)
        notify(catch_up_reads.read_spaces(connection))


def _retain(connection: psycopg.Connection[Any], guard: Guard) -> None:
    if dropped := retention.apply_retention(connection, guard):
        log.info("generations expired: generation_ids=%s", dropped)


def _collapse(
    connection: psycopg.Connection[Any], guard: Guard, collapse: empty_generation_cleanup.EmptyGenerationCleaner
) -> None:
    if deleted := collapse(connection, guard):
        log.info("rows of past generations deleted: generation_ids=%s", deleted)


def _compact(connection: psycopg.Connection[Any], guard: Guard, stream_id: int, progress: CompactionProgress) -> None:
    saved = small_block_compaction.compact_stream(
        connection, stream_id, guard=guard, most_s=small_block_compaction.MAX_S, progress=progress
    )
    log.info("stream compacted: stream_id=%d saved_block_count=%d", stream_id, saved)


def _list_spaces_with_remote_payloads(connection: psycopg.Connection[Any]) -> list[Space]:
    """Return the spaces with a payload location. Payloads of a dropped space are not moved: nothing could bring them
    back."""
    return [space for space in space_queries.list_spaces(connection) if space.payload_location is not None]


def _tier(connection: psycopg.Connection[Any], guard: Guard, space: Space) -> None:
    moved = tiering.tier_space(connection, space, guard)
    if moved.blocks:
        log.info("payloads moved out: space=%s block_count=%d size_bytes=%d", space.name, moved.blocks, moved.size)


def _delete_unreferenced_objects(connection: psycopg.Connection[Any], guard: Guard, grace_s: float) -> None:
    if deleted := unreferenced_objects.delete_expired_objects(connection, guard, grace_s=grace_s):
        log.info("unreferenced objects deleted: object_count=%d", deleted)


def _expire_epochs(connection: psycopg.Connection[Any], guard: Guard) -> None:
    for space_id, producer_id in epoch_leases.expire(connection, guard):
        log.warning("lease expired, epochs closed: producer_id=%s space_id=%d", producer_id, space_id)


def _delete_old_history(connection: psycopg.Connection[Any], history_s: float) -> None:
    if forgotten := history_queries.delete_old_history(connection, history_s):
        log.info("old history deleted: record_count=%d retention_s=%g", forgotten, history_s)
    history_queries.delete_old_session_epochs(connection, history_s)
    if deleted := access_rules.delete_past_changes(connection, history_s):
        log.info("old access history deleted: record_count=%d retention_s=%g", deleted, history_s)
    if deleted := access_tokens.delete_past_tokens(connection, history_s):
        log.info("expired access tokens deleted: token_count=%d retention_s=%g", deleted, history_s)


def _delete_idle_producers(
    connection: psycopg.Connection[Any], guard: Guard, producers: retention.IdleProducerCleaner
) -> None:
    producers(connection, guard)


def _delete_abandoned_blocks(connection: psycopg.Connection[Any]) -> None:
    if forgotten := sink_staging.delete_abandoned_blocks(connection):
        log.info("abandoned staged blocks deleted: block_count=%d", forgotten)
