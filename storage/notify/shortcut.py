"""The short way of news: from the connection that appends to those of a few readers, with no node between them.

Each NOTIFY wakes every connection of its database that listens, whoever it is meant for, and transactions that say it
commit one after the other. So there are only so many places to listen at, each an advisory lock, which ends with its
connection; and nobody waits to speak. Whoever has no place hears from its leader's node, as everybody does of whatever
is left out here: nothing is numbered, and nothing is made good.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection
from typing import Any

import psycopg
from psycopg import sql

from storage.connect import schema_name
from storage.notify.postgres import ENDPOINT, channel_of

PLACES = 8
MOST_STREAMS = 200
"""Whose heads one NOTIFY has room for, as long as the numbers may be; of the others the nodes tell."""

PAUSE_S = 0.001
"""For each that listens: what one publisher's notifications are apart at least."""
LONGEST_PAUSE_S = 0.1
LONGEST_PAIR = 39
"""Two numbers of 63 bits."""

_TAKE = """
select place from generate_series(1, %(places)s) place
 where exists (select from node where notify = %(endpoint)s and expires_at > clock_timestamp())
   and pg_try_advisory_lock(%(class)s, place) limit 1"""

_TAKEN = """
select count(*) from pg_locks where locktype = 'advisory' and objsubid = 2 and classid = %s and objid > 0 and granted
   and database = (select oid from pg_database where datname = current_database())"""

# Who says NOTIFY keeps others from it until its commit is done: whoever finds somebody at it does not wait.
_SAY = """
select pg_notify(%s, (select string_agg(stream_id || ':' || head, ' ') from stream where stream_id = any(%s::bigint[])))
 where pg_try_advisory_xact_lock(%s, 0)"""


def take_place(connection: psycopg.Connection[Any]) -> bool:
    """Listen on this connection from now on, if a place is free and LISTEN and NOTIFY is what some node uses too.

    Never through a pooler that lends the server's connections to others: the server's process is another there than the
    one that the connection began with.
    """
    row = connection.execute("select pg_backend_pid()").fetchone()
    if row != (connection.info.backend_pid,):
        return False
    places = {"places": PLACES, "endpoint": ENDPOINT, "class": _places()}
    if connection.execute(_TAKE, places).fetchone() is None:
        return False
    connection.execute(sql.SQL("listen {}").format(sql.Identifier(_channel())))
    return True


def listeners(connection: psycopg.Connection[Any]) -> int:
    """How many places are taken."""
    row = connection.execute(_TAKEN, (_places(),)).fetchone()
    return 0 if row is None else int(row[0])


def say(connection: psycopg.Connection[Any], stream_ids: Collection[int]) -> psycopg.Cursor[Any]:
    """Let them know with this transaction where these streams end in it. No row: somebody else says something now."""
    heard_of = list(stream_ids)[:MOST_STREAMS]
    return connection.execute(_SAY, (_channel(), heard_of, _places()), prepare=True)


class Pace:
    """When one publisher may say something: the more seldom the more there are to listen, and to speak."""

    def __init__(self) -> None:
        self._ready_at = -math.inf
        self._least_s = self._pause_s = 0.0

    def may_speak(self, listeners: int, now: float) -> bool:
        """Whether it is time. Somebody must listen."""
        self._least_s = PAUSE_S * listeners
        return listeners > 0 and now >= self._ready_at

    def spoke(self, alone: bool, now: float) -> None:
        """It was done at that time, or not, as another publisher was about it."""
        longer_s = max(2 * self._pause_s, PAUSE_S) if not alone else self._pause_s / 2
        self._pause_s = min(max(longer_s, self._least_s), LONGEST_PAUSE_S)
        self._ready_at = now + self._pause_s


def heads_of(payload: bytes) -> dict[int, int]:
    """{stream: head} of what was said; what is not one of ours is left out."""
    pairs = (pair.partition(b":") for pair in payload.split() if len(pair) <= LONGEST_PAIR)
    return {int(stream_id): int(head) for stream_id, _, head in pairs if stream_id.isdigit() and head.isdigit()}


def _places() -> int:
    """The class of the locks: those of another schema are others."""
    return zlib.crc32(f"sublet shortcut {schema_name()}".encode()) & 0x7FFFFFFF


def _channel() -> str:
    return channel_of(f"{schema_name()}_heads")
