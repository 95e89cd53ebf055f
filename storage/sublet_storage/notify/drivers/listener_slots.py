"""Slots for a few consumers that listen directly to what publishers send to nodes.

Each NOTIFY wakes every connection of its database that listens. So the number of slots is limited; each is an advisory
lock, which ends with its connection. Without one, heads come through the leader's node. Sequence numbers are ignored,
and there is no catch-up: what is missed here is found when heads are polled.
"""

from __future__ import annotations

import os
import zlib
from typing import Any, Final

import psycopg

from sublet_protocol.domain.limits import parse_natural
from sublet_protocol.domain.settings_base import parse_number
from sublet_protocol.domain.subscriptions import MAX_OFFSET
from sublet_storage.db.bounded_connection import is_direct
from sublet_storage.db.connect import resolve_schema_name
from sublet_storage.notify.changes import STREAM, ChangeNotification, MalformedNotification
from sublet_storage.notify.codec import decode
from sublet_storage.notify.drivers.postgres import DRIVER, channel_name, decode_payload, start_listening

VARIABLE: Final = "SUBLET_NOTIFY_DIRECT_LISTENERS"
DEFAULT_LISTENER_SLOTS: Final = 8
MAX_LISTENER_SLOTS: Final = 1000

LOCK_CLASS: Final = zlib.crc32(b"sublet listener slots") & 0x7FFFFFFF
"""The class of the locks: the same for all schemas, since a NOTIFY wakes every listener of the database."""

_TAKE = """
select slot from generate_series(1, %(slots)s) slot
 where exists (select from node where notify_driver = %(driver)s and expires_at > clock_timestamp())
   and pg_try_advisory_lock(%(class)s, slot) limit 1"""


def direct_listener_slots() -> int:
    """Return how many slots a database has, by this process's setting; 0: it takes none. Raise `InvalidSetting`."""
    slots: int = parse_number(
        VARIABLE, os.environ.get(VARIABLE, str(DEFAULT_LISTENER_SLOTS)), DEFAULT_LISTENER_SLOTS, MAX_LISTENER_SLOTS
    )
    return slots


def acquire_listener_slot(connection: psycopg.Connection[Any]) -> bool:
    """Listen on this connection from now on, if a slot is free and some node listens the same way.
    Return whether this connection listens.

    Never through a pooler that shares the server's connections: the server's process is another there than the one that
    the connection began with.
    """
    if not is_direct(connection):
        return False
    parameters = {"slots": direct_listener_slots(), "driver": DRIVER, "class": LOCK_CLASS}
    if connection.execute(_TAKE, parameters).fetchone() is None:
        return False
    start_listening(connection, channel_name(resolve_schema_name(opened=connection)))
    return True


def decode_heads(payload: bytes) -> dict[int, int]:
    """Return {stream: head} of a payload; empty if it has no changes of streams, or is not ours."""
    try:
        message = decode(decode_payload(payload) or b"")
    except MalformedNotification:
        return {}
    if not isinstance(message, ChangeNotification) or message.channel != STREAM:
        return {}
    versions = {parse_natural(change.key, MAX_OFFSET): change.version for change in message.changes}
    return {stream_id: version // 2 for stream_id, version in versions.items() if stream_id is not None}
