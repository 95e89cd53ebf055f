"""The objects that no block names: written down before they are there, and until they are gone.

A row of `payload_object` is one of two things. Either somebody is writing the object, and will have a block name it,
taking the row away in the same transaction; or it is doomed, and may be deleted at any moment. Who writes so slowly
that the object was doomed meanwhile finds no row to take, and leaves the block as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import psycopg

from protocol.errors import PayloadUnavailable
from storage.payloads.place import located
from storage.payloads.stores import store
from storage.payloads.together import together
from storage.turnover import Guard

ABANDONED_S: Final = 3600.0
"""An object that was not named for so long after it was written down is nobody's any more."""

MOST: Final = 1000

_INTEND = """
insert into payload_object (uri, space_id, generation_id, stream_id, end_offset, doomed)
select uri, %(space)s, %(generation)s, %(stream)s, ends, %(doomed)s
  from unnest(%(uris)s::text[], %(ends)s::bigint[]) as o (uri, ends)
on conflict (uri) do update set doomed = true"""

_CLAIM = "delete from payload_object where uri = any(%s) and not doomed returning uri"

_ABANDON = """
update payload_object set doomed = true
 where not doomed and at <= clock_timestamp() - make_interval(secs => %s::float8)"""

# That no block names it is so by the rules above; it is looked at all the same, as nothing brings a payload back.
_DOOMED = """
select o.uri, p.payload_places from payload_object o join space p using (space_id)
 where o.doomed and o.space_id = %s and not exists (
   select from block b where b.generation_id = o.generation_id and b.stream_id = o.stream_id
      and b.end_offset = o.end_offset and b.uri = o.uri)
 order by o.at limit %s"""

Connection = psycopg.Connection[Any]


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose block an object is for."""

    space_id: int
    generation_id: int
    stream_id: int


def intend(conn: Connection, owner: Owner, planned: Sequence[tuple[str, int]]) -> None:
    """Write down (uri, end offset) of objects that are about to be written."""
    _note(conn, owner, planned, doomed=False)


def doom(conn: Connection, owner: Owner, lost: Sequence[tuple[str, int]]) -> None:
    """Have these deleted: no block names them, from this transaction on."""
    _note(conn, owner, lost, doomed=True)


def claim(conn: Connection, uris: Sequence[str]) -> set[str]:
    """Those of them that blocks may name, if they do so in this transaction."""
    return {row[0] for row in conn.execute(_CLAIM, (list(uris),))}


def sweep(conn: Connection, guard: Guard | None = None, abandoned_s: float = ABANDONED_S) -> int:
    """Delete doomed objects, some thousand of each space; how many. What is abandoned is doomed before. Autocommit.

    Raises `PayloadUnavailable` when all that can be reached has been dealt with: the others are tried again.
    """
    with conn.transaction():
        if guard is not None:
            guard(conn)
        conn.execute(_ABANDON, (abandoned_s,))
    spaces = conn.execute("select distinct space_id from payload_object where doomed order by 1").fetchall()
    deleted = 0
    away: PayloadUnavailable | None = None
    for (space_id,) in spaces:
        try:
            deleted += _delete(conn, conn.execute(_DOOMED, (space_id, MOST)).fetchall())
        except PayloadUnavailable as error:
            away = away or error
    if away is not None:
        raise away
    return deleted


def _note(conn: Connection, owner: Owner, uris: Sequence[tuple[str, int]], doomed: bool) -> None:
    if uris:
        parameters = {
            "space": owner.space_id,
            "generation": owner.generation_id,
            "stream": owner.stream_id,
            "uris": [uri for uri, _ in uris],
            "ends": [end_offset for _, end_offset in uris],
            "doomed": doomed,
        }
        conn.execute(_INTEND, parameters)


def _delete(conn: Connection, rows: Sequence[tuple[str, list[str]]]) -> int:
    """A row goes after its object. One whose place the space does not know stays, and so does its object."""
    deletions: list[tuple[str, Callable[[], None]]] = []
    for uri, places in rows:
        found = located(uri, places)
        if found is not None:
            place, name = found
            deletions.append((uri, lambda place=place, name=name: store(place).delete(name.text)))  # type: ignore[misc]
    for place in {found[0] for uri, places in rows if (found := located(uri, places)) is not None}:
        store(place).check()
    together(lambda one: one[1](), deletions)
    conn.execute("delete from payload_object where uri = any(%s) and doomed", ([uri for uri, _ in deletions],))
    return len(deletions)
