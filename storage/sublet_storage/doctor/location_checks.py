"""Checks payload locations from here by writing, reading and deleting an object in each."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from functools import partial
from typing import Any

import psycopg
from psycopg import sql

from sublet_protocol.domain.errors import PayloadUnavailable
from sublet_storage.doctor.checks import DoctorCheckResult, Severity
from sublet_storage.objects.location import PayloadStoreLocation, parse_location, parse_stored_location
from sublet_storage.objects.object_stores import ASK_DOCTOR, ObjectStore, PayloadObjectNotFound, get_store
from sublet_storage.objects.parallel_calls import TO_CHANGE, TO_READ, run_single
from sublet_storage.spaces.rollover import partition_table
from sublet_storage.spaces.tiering import STREAMS_TO_TIER

_SPACES = """
select space_id, name, case when dropped_at is null then payload_location end, payload_locations_of(space_id) from space
 where payload_location is not null or payload_locations <> '{}' order by name, space_id"""

_TIERED = """
select distinct generation_id from stream s join generation g using (generation_id)
 where g.space_id = %(space)s and g.state <> 'gone' and s.tiered_offset is not null"""

_NAMED = "select from {block} where starts_with(uri, %s) limit 1"

_WAITING = "select count(*) from payload_object where space_id = %(space)s and starts_with(uri, %(prefix)s)"

_STUCK = "select count(*) from payload_object where orphaned_at is not null and delete_failed_at is not null"

_TO_TIER = f"""
select s.generation_id, s.stream_id, coalesce(s.tiered_offset, 0)
  from ({STREAMS_TO_TIER}) s join generation g using (generation_id) where g.state <> 'gone'"""

# Of a stream the next block, in its partition: for the table itself the server would look up, and lock, all of them.
_DUE_FOR = """
select extract(epoch from clock_timestamp() - least(case when g.state = 'closed' then g.closed_at end,
                                                    b.appended_at + make_interval(secs => p.tier_after_s)))::float8
  from generation g join space p using (space_id)
  cross join (
    select appended_at from {block}
     where generation_id = %(generation)s and stream_id = %(stream)s and end_offset > %(offset)s
     order by end_offset limit 1) b
 where g.generation_id = %(generation)s"""

LATE_S = 6 * 3600.0
"""From which delay on moving is reported: after a rollover it takes its time."""


def check_locations(conn: psycopg.Connection[Any]) -> Iterator[DoctorCheckResult]:
    """Yield a finding for each location that a space uses, and one if payloads are long due there, or objects cannot be
    deleted."""
    for space_id, name, text, used in conn.execute(_SPACES).fetchall():
        locations = {location.prefix: location for location in map(parse_stored_location, used)}
        present = None if text is None else parse_location(text).prefix
        if text is not None:
            locations.setdefault(parse_location(text).prefix, parse_location(text))
        for prefix, location in sorted(locations.items()):
            if prefix == present:
                yield _check_current(name, location)
                yield from _check_overdue(conn, space_id, name, location)
            else:
                yield from _check_former(conn, space_id, name, location)
    (row,) = conn.execute(_STUCK).fetchall()
    if row[0]:
        detail = f"{row[0]} objects that no block names could not be deleted"
        yield DoctorCheckResult(
            "payloads", Severity.WARNING, detail, "See the log of the node that runs maintenance: it has the reason."
        )


def _check_current(space: str, location: PayloadStoreLocation) -> DoctorCheckResult:
    """Check the location that payloads are moved to: a node has to write there, while consumers only read."""
    store, detail = get_store(location), f"space {space} at {location}"
    try:
        if location.marker:
            run_single(store, TO_CHANGE, store.check_marker)
    except PayloadUnavailable as error:
        return _make_unavailable_finding(Severity.ERROR, space, error)
    try:
        run_single(store, TO_CHANGE, partial(_probe, store))
    except PayloadUnavailable as error:
        if not location.marker:
            return _make_unavailable_finding(Severity.ERROR, space, error)
        problem = str(error).partition(". ")[0]
        hint = "Where consumers run that is well. Nodes have to write and delete there: run it where they do."
        return DoctorCheckResult(
            "payloads", Severity.WARNING, f"{detail}: it can be read, and not written: {problem}", hint
        )
    except PayloadObjectNotFound:
        hint = "See who else writes there, or deletes: a lifecycle rule of the bucket, say."
        return DoctorCheckResult("payloads", Severity.ERROR, f"{detail}: what was written is not there", hint)
    return DoctorCheckResult("payloads", Severity.OK, detail)


def _check_overdue(
    conn: psycopg.Connection[Any], space_id: int, space: str, location: PayloadStoreLocation
) -> Iterator[DoctorCheckResult]:
    """Yield a finding for payloads that should have been moved and still fill Postgres."""
    due_times = [_read_overdue_s(conn, *stream) for stream in conn.execute(_TO_TIER, {"space": space_id}).fetchall()]
    if late := [due_s for due_s in due_times if due_s > LATE_S]:
        detail = f"space {space}: payloads of {len(late)} streams should have been moved to {location} long ago"
        hint = (
            "The log of the node that runs maintenance has what could not be moved, and why. Where it has nothing, "
            "the space was given this location a short while ago, or more comes in than is moved, as blocks are small: "
            "docs/payloads.md says what moving takes."
        )
        yield DoctorCheckResult(
            "payloads", Severity.WARNING, f"{detail}, the oldest {max(late) / 3600:.0f} h ago", hint
        )


def _read_overdue_s(conn: psycopg.Connection[Any], generation_id: int, stream_id: int, offset: int) -> float:
    """Return for how many seconds the next block of the stream has been due to be moved."""
    parameters = {"generation": generation_id, "stream": stream_id, "offset": offset}
    with contextlib.suppress(psycopg.errors.UndefinedTable):  # dropped meanwhile
        statement = sql.SQL(_DUE_FOR).format(block=partition_table(generation_id))
        if (row := conn.execute(statement, parameters).fetchone()) and row[0] is not None:
            return float(row[0])
    return 0.0


def _check_former(
    conn: psycopg.Connection[Any], space_id: int, space: str, location: PayloadStoreLocation
) -> Iterator[DoctorCheckResult]:
    """Check a former location, which matters as long as it still has payloads."""
    prefix = f"{location.prefix}/"
    parameters = {"space": space_id, "prefix": prefix}
    tiered = conn.execute(_TIERED, parameters).fetchall()
    is_named = any(_names_objects(conn, generation_id, prefix) for (generation_id,) in tiered)
    ((waiting,),) = conn.execute(_WAITING, parameters).fetchall()
    if not (is_named or waiting):
        return
    store = get_store(location)
    try:
        run_single(store, TO_READ, store.check_marker)
    except PayloadUnavailable as error:
        if is_named:
            yield _make_unavailable_finding(Severity.ERROR, space, error)
            return
        detail = f"space {space}: {waiting} objects wait to be deleted at {location}, which is away"
        hint = (
            "No message lies there. Bring it back, or where it is gone for good forget them: docs/payloads.md says how."
        )
        yield DoctorCheckResult("payloads", Severity.WARNING, detail, hint)
    else:
        if is_named:
            yield DoctorCheckResult(
                "payloads", Severity.OK, f"space {space} at {location}, where nothing is moved to any more"
            )


def _names_objects(conn: psycopg.Connection[Any], generation_id: int, prefix: str) -> bool:
    statement = sql.SQL(_NAMED).format(block=partition_table(generation_id))
    with contextlib.suppress(psycopg.errors.UndefinedTable):  # dropped meanwhile
        return conn.execute(statement, (prefix,)).rowcount > 0
    return False


def _make_unavailable_finding(state: Severity, space: str, error: PayloadUnavailable) -> DoctorCheckResult:
    problem, _, hint = str(error).removesuffix(f" {ASK_DOCTOR}").partition(". ")
    return DoctorCheckResult("payloads", state, f"space {space}: {problem}", hint.partition(". ")[2] or None)


def _probe(store: ObjectStore) -> None:
    name, payload = f".sublet-probe-{secrets.token_hex(8)}", secrets.token_bytes(64)
    store.put(name, payload)
    try:
        if bytes(memoryview(store.get(name, 65))) != payload:
            raise PayloadObjectNotFound
    finally:
        store.delete(name)
