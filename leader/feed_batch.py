"""Reading the Arrow of a stranger: nothing in it is believed before it was looked at, and it never grows by being read.

A few compressed bytes can stand for gigabytes, and so can a run or a dictionary: a batch is plain, in the one schema.
"""

from __future__ import annotations

import struct

import pyarrow as pa

from protocol.codec import MalformedMessage
from protocol.feed import MAX_BATCH_BYTES, MAX_BATCH_MESSAGES, MAX_MESSAGE_BYTES
from storage.layout import BLOCK_SCHEMA
from storage.publish.columns import check_sizes, normalise

_REMEDY = "Write the batch in the schema of docs/feed.md, without compression"
_HEADER, _LENGTH, _COMPRESSION = 2, 0, 3
"""Where the fields stand in the tables `Message` and `RecordBatch` of Arrow's Message.fbs."""


def read_batch(payload: bytes) -> pa.RecordBatch:
    """The messages of a batch, checked. Raises a `UsageError` that names what is wrong."""
    try:
        message = pa.ipc.read_message(payload)
        _check_plain(message)
        batch = pa.ipc.read_record_batch(message, BLOCK_SCHEMA)
        batch.validate(full=True)
    except (pa.ArrowException, OSError, EOFError, struct.error) as error:
        raise MalformedMessage(f"messages: not an Arrow record batch message ({error}). {_REMEDY}.") from None
    if batch.nbytes > MAX_BATCH_BYTES:
        raise MalformedMessage(f"messages: {batch.nbytes} bytes in columns, and the limit is {MAX_BATCH_BYTES}")
    (checked,) = normalise(batch)
    check_sizes(checked, MAX_MESSAGE_BYTES)
    return checked


def _check_plain(message: pa.ipc.Message) -> None:
    """Its number of messages, and that it is not compressed, before anything is made of it."""
    if message.type != "record batch":
        raise MalformedMessage(f"messages: Arrow's {message.type!r}, and not a record batch. {_REMEDY}.")
    metadata = message.metadata.to_pybytes()
    header = _field(metadata, _offset(metadata, 0), _HEADER)
    if header is None:
        raise MalformedMessage(f"messages: a record batch without a header. {_REMEDY}.")
    table = _offset(metadata, header)
    if _field(metadata, table, _COMPRESSION) is not None:
        raise MalformedMessage(f"messages: a compressed record batch. {_REMEDY}.")
    length = _field(metadata, table, _LENGTH)
    count = 0 if length is None else struct.unpack_from("<q", metadata, length)[0]
    if not 0 < count <= MAX_BATCH_MESSAGES:
        raise MalformedMessage(f"messages: {count} of them, and a batch has 1 to {MAX_BATCH_MESSAGES}. Send several.")


def _offset(data: bytes, at: int) -> int:
    """Where the flatbuffer's offset at that place leads."""
    return int(at + struct.unpack_from("<I", data, at)[0])


def _field(data: bytes, table: int, index: int) -> int | None:
    """Where a field of a flatbuffer's table stands; None if it is absent."""
    vtable = table - struct.unpack_from("<i", data, table)[0]
    if vtable < 0 or 6 + 2 * index > struct.unpack_from("<H", data, vtable)[0]:
        return None
    offset = struct.unpack_from("<H", data, vtable + 4 + 2 * index)[0]
    return table + offset if offset else None
