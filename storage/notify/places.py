"""Places for a few readers that listen at the database themselves, to what publishers tell nodes.

Each NOTIFY wakes every connection of its database that listens. So there are only so many places, each an advisory
lock, which ends with its connection. Whoever has none hears from its leader's node, as everybody does of what is missed
here: numbers are not looked at, and nothing is made good.
"""

from __future__ import annotations

import zlib
from typing import Any

import psycopg

from storage.connect import schema_name
from storage.notify.codec import decode
from storage.notify.model import STREAM, Envelope, MalformedMessage
from storage.notify.postgres import ENDPOINT, channel_of, from_payload, listen

PLACES = 8
LONGEST_ID = 19
"""In digits: of 63 bits."""

_TAKE = """
select place from generate_series(1, %(places)s) place
 where exists (select from node where notify = %(endpoint)s and expires_at > clock_timestamp())
   and pg_try_advisory_lock(%(class)s, place) limit 1"""


def take_place(connection: psycopg.Connection[Any]) -> bool:
    """Listen on this connection from now on, if a place is free and some node listens the same way.

    Never through a pooler that lends the server's connections to others: the server's process is another there than the
    one that the connection began with.
    """
    row = connection.execute("select pg_backend_pid()").fetchone()
    if row != (connection.info.backend_pid,):
        return False
    places = {"places": PLACES, "endpoint": ENDPOINT, "class": _class()}
    if connection.execute(_TAKE, places).fetchone() is None:
        return False
    listen(connection, channel_of(schema_name()))
    return True


def heads_of(payload: bytes) -> dict[int, int]:
    """{stream: head} of what was said; nothing of what is not news of streams, or not ours."""
    try:
        message = decode(from_payload(payload) or b"")
    except MalformedMessage:
        return {}
    if not isinstance(message, Envelope) or message.channel != STREAM:
        return {}
    return {int(change.key): change.version // 2 for change in message.changes if _is_id(change.key)}


def _is_id(key: str) -> bool:
    return key.isdecimal() and len(key) <= LONGEST_ID


def _class() -> int:
    """Of the locks: those of another schema are others."""
    return zlib.crc32(f"sublet places {schema_name()}".encode()) & 0x7FFFFFFF
