"""Decodes Arrow batches of untrusted clients, without expanding them.

A few compressed bytes can stand for gigabytes, and so can a run or a dictionary: a batch is plain, in the one schema.
"""

from __future__ import annotations

import pyarrow as pa

from sublet_protocol.messages.feed import MAX_BATCH_BYTES, MAX_BATCH_MESSAGES, MAX_MESSAGE_BYTES
from sublet_protocol.messages.field_checks import MalformedMessage
from sublet_storage.log.column_encoding import BLOCK_SCHEMA
from sublet_storage.log.record_batch_header import envelope
from sublet_storage.producer.batches.input_conversion import check_sizes, to_record_batches

_HINT = "Write the batch in the schema of docs/feed.md, without compression"


def decode_batch(payload: bytes) -> pa.RecordBatch:
    """Return the messages of a batch, checked. Raises a `UsageError` that names what is wrong."""
    try:
        message = pa.ipc.read_message(payload)
        _check_plain(message)
        batch = pa.ipc.read_record_batch(message, BLOCK_SCHEMA)
        batch.validate(full=True)
    except (pa.ArrowException, OSError, EOFError, ValueError) as error:
        raise MalformedMessage(f"messages: not an Arrow record batch message ({error}). {_HINT}.") from None
    if batch.nbytes > MAX_BATCH_BYTES:
        raise MalformedMessage(f"messages: {batch.nbytes} bytes in columns, and the limit is {MAX_BATCH_BYTES}")
    (checked,) = to_record_batches(batch)
    check_sizes(checked, MAX_MESSAGE_BYTES)
    return checked


def _check_plain(message: pa.ipc.Message) -> None:
    """Its number of messages, and that it is not compressed, before anything is made of it."""
    found = envelope(message)
    if found.compressed:
        raise MalformedMessage(f"messages: a compressed record batch. {_HINT}.")
    if not 0 < found.count <= MAX_BATCH_MESSAGES:
        raise MalformedMessage(
            f"messages: {found.count} of them, and a batch has 1 to {MAX_BATCH_MESSAGES}. Send several."
        )
