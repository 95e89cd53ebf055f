"""Publishing of records that a function cannot process to the dead-letter topic.

The record and the progress behind it are one transaction: it is published once, and never both published and delivered
again.
"""

from __future__ import annotations

import base64
import json
from typing import Any

import psycopg
import pyarrow as pa

from sublet_protocol.domain.limits import MAX_HEADER_BYTES, MAX_HEADERS
from sublet_storage.producer.batches.input_conversion import compute_header_size, size_of
from sublet_storage.producer.outbox_conversion import publish_in_transaction
from sublet_storage.producer.publisher import MAX_MESSAGE_BYTES

SHOWN_ERROR = 2000
"""A longer error text is cut, in characters."""


def publish_dead_letter(
    connection: psycopg.Connection[Any], topic: str, record: pa.Table, stream_id: int, error: str
) -> None:
    """Publish the one record of the table to `topic` in the open transaction: key, value, timestamp and headers as they
    were, and headers with its origin and the error. Where these do not all fit, its own headers are left out, the last
    first, and then the end of the error.
    """
    row = record.to_pylist()[0]
    origin = {"topic": row["topic"], "stream_id": stream_id, "offset": row["offset"], "error": ""}
    added = [(f"sublet.{name}", _make_storable(str(value))) for name, value in origin.items()]
    room = min(MAX_HEADER_BYTES, MAX_MESSAGE_BYTES - size_of(topic, row["key"], row["value"], None))
    room -= sum(compute_header_size(name, text.encode()) for name, text in added)
    shown = _make_storable(error[:SHOWN_ERROR]).encode()[: max(room, 0)]
    added[-1] = (added[-1][0], shown.decode(errors="ignore"))
    room -= len(shown)
    headers: list[tuple[str, Any]] = []
    for header in (row["headers"] or ())[: MAX_HEADERS - len(added)]:
        name, value = _make_storable(header["key"]), header["value"]
        room -= compute_header_size(name, value)
        if room < 0:
            break
        headers.append((name, _encode_value(value)))
    headers += added
    publish_in_transaction(connection, topic, row["value"], row["key"], json.dumps(headers), row["timestamp"])


def _make_storable(text: str) -> str:
    """Return the text with what Postgres rejects replaced."""
    return text.replace("\0", "\ufffd").encode("utf-8", "replace").decode()


def _encode_value(value: bytes | None) -> dict[str, str] | None:
    return None if value is None else {"base64": base64.b64encode(value).decode()}
