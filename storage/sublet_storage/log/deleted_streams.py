"""Streams whose rows maintenance has deleted: whether any message was lost with them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import psycopg

_MISSING = """
select u.stream_id, u.stream_id <= ever.lost
  from unnest(%(streams)s::bigint[]) as u (stream_id), (
    select (select coalesce(max(stream_id), 0) from lost_generation) as lost,
           (select max(stream_id) from stream) as newest) as ever
 where u.stream_id between 1 and greatest(ever.lost, ever.newest)
   and not exists (select from stream s where s.stream_id = u.stream_id)"""


def find_deleted_streams(conn: psycopg.Connection[Any], stream_ids: Iterable[int]) -> dict[int, bool]:
    """Return {stream: whether it had messages, as far as is known} for those of these streams whose rows maintenance
    has deleted."""
    rows = conn.execute(_MISSING, {"streams": list(stream_ids)}).fetchall()
    return dict(rows)
