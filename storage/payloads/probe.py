"""Whether the places of payloads can be reached from here: by writing, reading and deleting an object in each."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

import psycopg

from protocol.errors import PayloadUnavailable
from storage.checkup import Finding, State
from storage.payloads.place import parse
from storage.payloads.stores import Missing, Store, store

OLD_S = 86400.0
"""Objects that wait so long to be deleted are worth a word."""

_SPACES = """
select coalesce(p.name, ''), place, place = any(p.payload_places), place = p.payloads and p.dropped_at is null
  from space p cross join lateral (
    select distinct unnest(p.payload_places || case when p.dropped_at is null then p.payloads end) as place) places
 where place is not null order by 1, 2"""

_WAITING = """
select count(*), extract(epoch from clock_timestamp() - min(at))::float8 from payload_object where doomed"""


def examine(conn: psycopg.Connection[Any]) -> Iterator[Finding]:
    """A finding for each place of each space, and one where objects wait long to be deleted."""
    for space, place, is_used, is_written in conn.execute(_SPACES).fetchall():
        yield _place(space, place, is_used, is_written)
    (row,) = conn.execute(_WAITING).fetchall()
    if row[0] and row[1] > OLD_S:
        said = f"{row[0]} objects wait to be deleted, the oldest for {row[1]:.0f} s"
        yield Finding(
            "payloads", State.WARNING, said, "See the log of the nodes: the one that keeps house deletes them."
        )


def _place(space: str, text: str, is_used: bool, is_written: bool) -> Finding:
    place = store(parse(text))
    said = f"space {space} at {place.place}"
    try:
        if is_used:
            place.check()
        if is_written:
            _probe(place)
    except PayloadUnavailable as error:
        what, _, remedy = str(error).partition(". ")
        return Finding("payloads", State.ERROR, f"space {space}: {what}", remedy.partition(". ")[2] or None)
    except Missing:
        hint = "See who else writes there, or deletes: a lifecycle rule of the bucket, say."
        return Finding("payloads", State.ERROR, f"{said}: what was written is not there", hint)
    return Finding("payloads", State.OK, said)


def _probe(place: Store) -> None:
    name, payload = f".sublet-probe-{secrets.token_hex(8)}", secrets.token_bytes(64)
    place.put(name, payload)
    try:
        if bytes(memoryview(place.get(name, 65))) != payload:
            raise Missing
    finally:
        place.delete(name)
