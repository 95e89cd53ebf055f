"""SQL that looks up the row of a stream.

Each append updates it in place. While a transaction stays open vacuum keeps all versions of it, and an index has the
newest first only when it is read backwards; for `stream_id = X` the planner would drop the order.
"""

from __future__ import annotations


def newest_stream(stream_id: str) -> str:
    """Return the expression of a table, to be named by the caller, that has the row of that stream, or none."""
    return f"(select * from stream where stream_id between {stream_id} and {stream_id} order by stream_id desc limit 1)"
