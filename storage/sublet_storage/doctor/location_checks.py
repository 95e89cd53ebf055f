"""Whether the places of payloads can be reached from here: by writing, reading and deleting an object in each."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from functools import partial
from typing import Any

import psycopg

from sublet_protocol.domain.errors import PayloadUnavailable
from sublet_storage.doctor.checks import Finding, State
from sublet_storage.objects.location import Place, known, parse
from sublet_storage.objects.object_stores import ASK_DOCTOR, Missing, Store, store
from sublet_storage.objects.parallel_calls import TO_CHANGE, TO_READ, once

_SPACES = """
select space_id, name, case when dropped_at is null then payloads end, payload_places_of(space_id) from space
 where payloads is not null or payload_places <> '{}' order by name, space_id"""

_IS_NAMED = """
select exists (
  select from stream s join generation g using (generation_id)
    join block b on b.generation_id = s.generation_id and b.stream_id = s.stream_id
   where g.space_id = %(space)s and g.state <> 'gone' and s.tiered_offset is not null
     and starts_with(b.uri, %(prefix)s))"""

_WAITING = "select count(*) from payload_object where space_id = %(space)s and starts_with(uri, %(prefix)s)"

_STUCK = "select count(*) from payload_object where doomed_at is not null and tried_at is not null"

# Of each stream the first block that is still to be looked at: a stream that was gone through has none.
_OVERDUE = """
select count(*), max(extract(epoch from clock_timestamp() - due))::float8
  from (select least(case when g.state = 'closed' then g.closed_at end,
                     b.appended_at + make_interval(secs => p.tier_after_s)) as due
          from space p join generation g using (space_id) join stream s using (generation_id)
          cross join lateral (
            select b.appended_at from block b
             where b.generation_id = s.generation_id and b.stream_id = s.stream_id
               and b.end_offset > coalesce(s.tiered_offset, 0)
             order by b.end_offset limit 1) b
         where p.space_id = %(space)s and g.state <> 'gone' and coalesce(s.tiered_offset, 0) < s.head) waiting
 where due <= clock_timestamp() - make_interval(secs => %(late)s::float8)"""

LATE_S = 6 * 3600.0
"""What should have been moved so long ago is worth a word: after a rollover moving takes its time."""


def examine(conn: psycopg.Connection[Any]) -> Iterator[Finding]:
    """A finding for each place that a space uses, and one where payloads are long due there, or objects cannot be
    deleted."""
    for space_id, name, text, used in conn.execute(_SPACES).fetchall():
        places = {place.prefix: place for place in map(known, used)}
        present = None if text is None else parse(text).prefix
        if text is not None:
            places.setdefault(parse(text).prefix, parse(text))
        for prefix, place in sorted(places.items()):
            if prefix == present:
                yield _present(name, place)
                yield from _overdue(conn, space_id, name, place)
            else:
                yield from _former(conn, space_id, name, place)
    (row,) = conn.execute(_STUCK).fetchall()
    if row[0]:
        said = f"{row[0]} objects that no block names could not be deleted"
        yield Finding("payloads", State.WARNING, said, "See the log of the node that keeps house: it says why.")


def _present(space: str, place: Place) -> Finding:
    """Where payloads go: a node has to write there, while consumers read only."""
    there, said = store(place), f"space {space} at {place}"
    try:
        if place.marker:
            once(there, TO_CHANGE, there.check)
    except PayloadUnavailable as error:
        return _trouble(State.ERROR, space, error)
    try:
        once(there, TO_CHANGE, partial(_probe, there))
    except PayloadUnavailable as error:
        if not place.marker:
            return _trouble(State.ERROR, space, error)
        what = str(error).partition(". ")[0]
        hint = "Where consumers run that is well. Nodes have to write and delete there: run it where they do."
        return Finding("payloads", State.WARNING, f"{said}: it can be read, and not written: {what}", hint)
    except Missing:
        hint = "See who else writes there, or deletes: a lifecycle rule of the bucket, say."
        return Finding("payloads", State.ERROR, f"{said}: what was written is not there", hint)
    return Finding("payloads", State.OK, said)


def _overdue(conn: psycopg.Connection[Any], space_id: int, space: str, place: Place) -> Iterator[Finding]:
    """What is not moved stays in Postgres, which it fills."""
    ((streams, overdue_s),) = conn.execute(_OVERDUE, {"space": space_id, "late": LATE_S}).fetchall()
    if streams:
        said = f"space {space}: payloads of {streams} streams should have been moved to {place} long ago"
        hint = (
            "The log of the node that keeps house says what could not be moved, and why. Where it says nothing, the "
            "space was given this place a short while ago, or more comes in than is moved, as blocks are small: "
            "docs/payloads.md says what moving takes."
        )
        yield Finding("payloads", State.WARNING, f"{said}, the oldest {overdue_s / 3600:.0f} h ago", hint)


def _former(conn: psycopg.Connection[Any], space_id: int, space: str, place: Place) -> Iterator[Finding]:
    """Where payloads went once: it matters as long as something lies there."""
    asked = {"space": space_id, "prefix": f"{place.prefix}/"}
    ((is_named,),) = conn.execute(_IS_NAMED, asked).fetchall()
    ((waiting,),) = conn.execute(_WAITING, asked).fetchall()
    if not (is_named or waiting):
        return
    there = store(place)
    try:
        once(there, TO_READ, there.check)
    except PayloadUnavailable as error:
        if is_named:
            yield _trouble(State.ERROR, space, error)
            return
        said = f"space {space}: {waiting} objects wait to be deleted at {place}, which is away"
        hint = (
            "No message lies there. Bring it back, or where it is gone for good forget them: docs/payloads.md says how."
        )
        yield Finding("payloads", State.WARNING, said, hint)
    else:
        if is_named:
            yield Finding("payloads", State.OK, f"space {space} at {place}, where nothing is moved to any more")


def _trouble(state: State, space: str, error: PayloadUnavailable) -> Finding:
    what, _, remedy = str(error).removesuffix(f" {ASK_DOCTOR}").partition(". ")
    return Finding("payloads", state, f"space {space}: {what}", remedy.partition(". ")[2] or None)


def _probe(place: Store) -> None:
    name, payload = f".sublet-probe-{secrets.token_hex(8)}", secrets.token_bytes(64)
    place.put(name, payload)
    try:
        if bytes(memoryview(place.get(name, 65))) != payload:
            raise Missing
    finally:
        place.delete(name)
