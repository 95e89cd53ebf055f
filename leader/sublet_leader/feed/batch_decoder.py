"""Checks the batches that clients without access to the database publish.

A few compressed bytes can expand to gigabytes, and so can run-end or dictionary encoding: only plain batches of the one
schema are accepted.
"""

from __future__ import annotations

import pyarrow as pa

from sublet_protocol.domain.errors import UsageError
from sublet_protocol.messages.feed_messages import MAX_BATCH_BYTES, MAX_BATCH_MESSAGES, MAX_MESSAGE_BYTES
from sublet_protocol.messages.field_checks import MalformedMessage
from sublet_storage.log.arrow_batch_decoder import InvalidRecordBatch, decode_published_batch
from sublet_storage.producer.batches.input_conversion import check_sizes, to_record_batches

_HINT = "Write the batch in the schema of docs/feed.md, without compression, or send several"


def decode_batch(payload: bytes) -> pa.RecordBatch:
    """Return the messages of a batch, checked. Raise a `UsageError` that names what is wrong."""
    try:
        batch = decode_published_batch(payload, MAX_BATCH_MESSAGES, MAX_BATCH_BYTES)
    except InvalidRecordBatch as error:
        raise MalformedMessage(f"messages: not an Arrow record batch message of ours ({error}). {_HINT}.") from None
    if batch["epoch"].null_count < batch.num_rows:
        raise UsageError("messages with an epoch: only a Publisher with access to the database can have them. Use one.")
    (checked,) = to_record_batches(batch)
    check_sizes(checked, MAX_MESSAGE_BYTES)
    return checked
