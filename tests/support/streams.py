"""Streams as the catalogue has them."""

from __future__ import annotations

from typing import Any

import psycopg

from sublet_storage.spaces.routing import StreamCatalogRow


def open_streams(conn: psycopg.Connection[Any]) -> tuple[StreamCatalogRow, ...]:
    """Of all spaces, in the order of ids."""
    rows = conn.execute(
        "select stream_id, space_id, generation_id, hash_from::text, hash_to::text, head"
        " from stream where state = 'open' order by stream_id"
    )
    return tuple(
        StreamCatalogRow(stream_id, space_id, generation_id, int(low), int(high), head)
        for stream_id, space_id, generation_id, low, high, head in rows
    )
