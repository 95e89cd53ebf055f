"""Objects that no block names: registered before they are written, until they are deleted.

A row of `payload_object` is one of two things. Either a process is writing the object, and will have a block name it,
deleting the row in the same transaction; or it is orphaned, and is deleted at any moment after its grace. A process
that writes so slowly that the object was orphaned meanwhile finds no row to delete, and leaves the block as it is.

The grace is for a database that is restored from a backup, or a standby that takes over and is behind: blocks there may
name what is orphaned here. What no block ever named has none.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final

import psycopg
from msgspec import Struct

from sublet_protocol.domain.errors import PayloadUnavailable
from sublet_storage.db.connect import prune_to
from sublet_storage.db.store_connection import Guard
from sublet_storage.objects.location import NAME, PayloadStoreLocation, parse_stored_location
from sublet_storage.objects.object_stores import ObjectUnusable, get_store
from sublet_storage.objects.parallel_calls import TO_CHANGE, run_parallel, run_single

ABANDONED_S: Final = 3600.0
"""After how long an object that no block names is orphaned."""

GRACE_S: Final = 7 * 86400.0
"""How long objects are retained after the last block that named them."""

MAX_OBJECTS: Final = 1000
CHUNK: Final = 64
MAX_S: Final = 10.0
"""A pass ends soon after this time; the next goes on."""

_NOTE = """
insert into payload_object (uri, space_id, generation_id, stream_id, end_offset, orphaned_at)
select uri, %(space)s, %(generation)s, %(stream)s, ends, {orphaned_at}
  from unnest(%(uris)s::text[], %(ends)s::bigint[]) as o (uri, ends) order by uri
on conflict (uri) do update set orphaned_at = coalesce(payload_object.orphaned_at, excluded.orphaned_at, '-infinity')"""

_INTEND = _NOTE.format(orphaned_at="null::timestamptz")
_ORPHAN_NAMED = _NOTE.format(orphaned_at="clock_timestamp()")
_ORPHAN_UNNAMED = _NOTE.format(orphaned_at="timestamptz '-infinity'")

_CLAIM = "delete from payload_object where uri = any(%s) and orphaned_at is null returning uri"

_ABANDON = """
update payload_object set orphaned_at = '-infinity'
 where orphaned_at is null and registered_at <= statement_timestamp() - make_interval(secs => %s::float8)"""

# Of the statement: a time that changes while it runs is not looked up in an index.
_IS_DUE = "orphaned_at <= statement_timestamp() - make_interval(secs => %(grace)s::float8)"
_DUE = f"from payload_object where space_id = %(space)s and {_IS_DUE} and delete_failed_at is null"
_STUCK = f"from payload_object where space_id = %(space)s and {_IS_DUE} and delete_failed_at is not null"

_SPACES = (
    "select space_id from space where payload_locations <> '{}' and exists (select from payload_object) order by 1"
)

_LOCATIONS = f"""
select location from unnest(payload_locations_of(%(space)s)) as location
 where exists (select {_DUE}) or exists (select {_STUCK}) order by 1"""

# By an index no more than this number are looked at; those that could not be deleted come after all others. That no
# block names one is so by the rules above; it is looked at all the same, as nothing brings a payload back.
_IS_THERE = "starts_with(uri, %(prefix)s) and substr(uri, length(%(prefix)s::text) + 1) ~ %(name)s"
_PICKED = f"""
select uri, generation_id
  from ((select * {_DUE} and {_IS_THERE} order by orphaned_at limit %(most)s)
        union all
        (select * {_STUCK} and {_IS_THERE} order by delete_failed_at limit %(most)s)) o limit %(most)s"""

_NAMED = """
select uri, exists (
         select from block b where b.generation_id = any(%(generations)s::bigint[])
            and b.generation_id = o.generation_id and b.stream_id = o.stream_id
            and b.end_offset = o.end_offset and b.uri = o.uri)
       or not check_partition(o.generation_id, o.stream_id)
  from payload_object o where uri = any(%(uris)s)"""

_GONE = "delete from payload_object where uri = any(%s)"
_DELETE_FAILED = "update payload_object set delete_failed_at = clock_timestamp() where uri = any(%s)"

Connection = psycopg.Connection[Any]


class BlockOwner(Struct, frozen=True):
    """The space, generation and stream of an object's block."""

    space_id: int
    generation_id: int
    stream_id: int


def register_objects(conn: Connection, owner: BlockOwner, planned: Sequence[tuple[str, int]]) -> None:
    """Write down (uri, end offset) of objects that are about to be written."""
    _record_uris(conn, _INTEND, owner, planned)


def mark_for_deletion(
    conn: Connection, owner: BlockOwner, objects: Sequence[tuple[str, int]], *, was_named: bool
) -> None:
    """Mark these objects for deletion: no block names them, from this transaction on. `was_named`: one did before, and
    may still do so in a backup."""
    _record_uris(conn, _ORPHAN_NAMED if was_named else _ORPHAN_UNNAMED, owner, objects)


def claim_objects(conn: Connection, uris: Sequence[str]) -> set[str]:
    """Return those of them that blocks may name, if they do so in this transaction."""
    return {row[0] for row in conn.execute(_CLAIM, (list(uris),))}


def delete_expired_objects(
    conn: Connection,
    guard: Guard | None = None,
    abandoned_s: float = ABANDONED_S,
    grace_s: float = GRACE_S,
    most_s: float = MAX_S,
) -> int:
    """Delete orphaned objects whose grace is over, some thousand of each location, for about `most_s`; return their
    number. Abandoned ones are orphaned before. Autocommit.

    Raise `PayloadUnavailable` when all that can be deleted has been: the others are tried again.
    """
    spaces = conn.execute(_SPACES).fetchall()
    if not spaces:
        return 0
    deadline = time.monotonic() + most_s
    with conn.transaction():
        if guard is not None:
            guard(conn)
        conn.execute(_ABANDON, (abandoned_s,))
    deleted = 0
    problems: list[Exception] = []
    for (space_id,) in spaces:
        parameters = {"space": space_id, "grace": grace_s, "name": f"^{NAME}$", "most": MAX_OBJECTS}
        for (text,) in conn.execute(_LOCATIONS, parameters).fetchall():
            location = parse_stored_location(text)
            try:
                uris = _pick_objects(conn, {**parameters, "prefix": f"{location.prefix}/"})
                deleted += _delete(conn, location, uris, deadline, problems)
            except PayloadUnavailable as error:
                problems.append(error)
    if problems:
        raise problems[0]
    return deleted


def _pick_objects(conn: Connection, parameters: dict[str, object]) -> list[str]:
    """Return the objects to be deleted at a location. Those that a block names are tried last from then on, like those
    that cannot be deleted."""
    picked = conn.execute(_PICKED, parameters).fetchall()
    parameters = {"uris": [row[0] for row in picked], "generations": prune_to({row[1] for row in picked})}
    is_named = dict(conn.execute(_NAMED, parameters, prepare=False).fetchall())
    conn.execute(_DELETE_FAILED, ([uri for uri in is_named if is_named[uri]],))
    return [uri for uri, _ in picked if is_named.get(uri) is False]


def _record_uris(conn: Connection, statement: str, owner: BlockOwner, uris: Sequence[tuple[str, int]]) -> None:
    if uris:
        parameters = {
            "space": owner.space_id,
            "generation": owner.generation_id,
            "stream": owner.stream_id,
            "uris": [uri for uri, _ in uris],
            "ends": [end_offset for _, end_offset in uris],
        }
        conn.execute(statement, parameters)


def _delete(
    conn: Connection, location: PayloadStoreLocation, uris: Sequence[str], deadline: float, problems: list[Exception]
) -> int:
    """Delete objects and then their rows, and return how many: an object that cannot be deleted keeps its row, and
    holds up no other."""
    deleted, store = 0, get_store(location)

    def delete(uri: str) -> None:
        store.delete(uri[len(location.prefix) + 1 :])

    for first in range(0, len(uris), CHUNK):
        if time.monotonic() >= deadline:
            break
        chunk = uris[first : first + CHUNK]
        run_single(store, TO_CHANGE, store.check_marker)
        outcomes = run_parallel(store, TO_CHANGE, delete, chunk)
        run_single(
            store, TO_CHANGE, store.check_marker
        )  # an object missing from a location that is away is not deleted
        deleted_uris = [uri for uri, outcome in zip(chunk, outcomes, strict=True) if outcome is None]
        conn.execute(_GONE, (deleted_uris,))
        conn.execute(_DELETE_FAILED, ([uri for uri in chunk if uri not in deleted_uris],))
        deleted += len(deleted_uris)
        problems += [outcome for outcome in outcomes if isinstance(outcome, ObjectUnusable)][:1]
        errors = [outcome for outcome in outcomes if outcome is not None and not isinstance(outcome, ObjectUnusable)]
        if errors:
            problems.append(errors[0])
            break
    return deleted
