"""Conditions of a batch read beside its filter: which blocks may match, and which messages do.

A block's row has the topics, times and epochs in the block: a block that cannot match is not fetched.
"""

from __future__ import annotations

from datetime import datetime

import pyarrow as pa
from msgspec import Struct

from sublet_protocol.domain.errors import InvalidEpoch
from sublet_protocol.domain.limits import MAX_EPOCH, MIN_EPOCH
from sublet_storage.util import arrow_compute as pc

BLOCK_MAY_MATCH = """
  (topics is null or exists (
     select from unnest(topics) as t(topic)
      where (%(only_topics)s::text[] is null or topic = any(%(only_topics)s::text[]))
        and starts_with(topic, %(prefix)s::text)))
  and last_timestamp >= coalesce(%(first)s::timestamptz, '-infinity')
  and first_timestamp <= coalesce(%(last)s::timestamptz, 'infinity')
  and (%(any_epoch)s::boolean
       or (jsonb_array_length(epoch_bounds #> '{greatest,0}') > 1
           or (epoch_bounds #>> '{greatest,0,0}')::bigint >= %(least)s::bigint
              and (epoch_bounds #>> '{least,0,0}')::bigint < %(beyond)s::bigint))"""
"""Of a block's row: whether such messages can be in it."""


class MessagePredicate(Struct, frozen=True):
    """The conditions that a message meets together; None: no condition.

    `topics`: one of these; `prefix`: how its topic begins. `min_timestamp` and `max_timestamp`: blocks are left out
    that have only earlier or only later timestamps, and of other blocks nothing is. `epochs`: from the first up to
    before the second; messages without an epoch do not match then.
    """

    topics: frozenset[str] | None = None
    prefix: str = ""
    min_timestamp: datetime | None = None
    max_timestamp: datetime | None = None
    epochs: tuple[int, int] | None = None

    def to_parameters(self) -> dict[str, object]:
        """Return the parameters of `BLOCK_MAY_MATCH`."""
        min_epoch, end_epoch = self.epochs or (MIN_EPOCH, MAX_EPOCH)
        return {
            "only_topics": None if self.topics is None else sorted(self.topics),
            "prefix": self.prefix,
            "first": self.min_timestamp,
            "last": self.max_timestamp,
            "any_epoch": self.epochs is None,
            "least": min_epoch,
            "beyond": end_epoch,
        }

    def filter_batch(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the messages of a block that match, but for their timestamps. Raise `InvalidEpoch`."""
        if self.topics is not None or self.prefix:
            batch = batch.filter(self._match_topics(batch))
        return batch if self.epochs is None else batch.filter(_match_epochs(batch.column("epoch"), *self.epochs))

    def may_match_topic(self, topic: str) -> bool:
        """Return whether messages of the topic can match."""
        return (self.topics is None or topic in self.topics) and topic.startswith(self.prefix)

    def _match_topics(self, batch: pa.RecordBatch) -> pa.Array:
        coded = batch.column("topic").dictionary_encode()
        return pa.array(map(self.may_match_topic, coded.dictionary.to_pylist()), pa.bool_()).take(coded.indices)


def _match_epochs(column: pa.Array, min_epoch: int, end_epoch: int) -> pa.Array:
    """Return which epochs of one number lie from the first up to before the second."""
    max_dimensions = pc.max(pc.list_value_length(column)).as_py() or 1
    if max_dimensions > 1:
        raise InvalidEpoch(
            f"epochs of {max_dimensions} numbers are among what the filter matches, and have no order of before and "
            "after. Read their space without startingEpoch and endingEpoch."
        )
    first = pc.list_element(column, 0)
    return pc.and_(pc.greater_equal(first, min_epoch), pc.less(first, end_epoch))
