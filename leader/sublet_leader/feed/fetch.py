"""Reading for members of a group that are without access to the database, on the pool's threads.

A page is for a stream that was lent, and bears what `sublet_storage.log.log.since` answers. It may end before the block
does: positions are per message, so the next one goes on there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psycopg
import pyarrow as pa

from sublet_leader.feed.read import READ_BYTES, cut, encode
from sublet_protocol.domain.errors import Gone
from sublet_protocol.messages.feed_fetch import Found, Missing, Wanted
from sublet_storage.log import log as messages

PAGE_BYTES = 8 << 20
"""A page is cut off behind so much. Larger than what `READ_BYTES` of compressed messages mostly come to, as what is cut
off is read again."""


def read_page(conn: psycopg.Connection[Any], wanted: Wanted) -> Found | Missing:
    """What follows in the stream. Raises `BeyondHead`, `NotFound`, and `ValueTooLarge` for a message that cannot be
    sent."""
    try:
        page = messages.since(
            conn,
            wanted.stream_id,
            wanted.position,
            filter=wanted.filter,
            generation_id=wanted.generation_id,
            limit_bytes=min(wanted.limit_bytes, READ_BYTES),
        )
    except Gone as gone:
        return Missing(gone.oldest)
    if not page.batches:
        return Found(page.start, page.position, page.head, page.closed)
    whole = pa.Table.from_batches(page.batches)
    first = next(cut(whole, PAGE_BYTES))
    end = page.position if len(first) == len(whole) else first.column("offset")[-1].as_py() + 1
    return Found(page.start, end, page.head, page.closed, encode(first))


def read_heads(conn: psycopg.Connection[Any], stream_ids: Sequence[int]) -> dict[int, tuple[int, bool]]:
    """{stream: (head, closed)} of those that exist."""
    return {id: (head.head, head.closed) for id, head in messages.heads(conn, stream_ids).items()}
