"""Publishing: from `publish()` to a durable offset in the log.

What is published waits in a queue per stream (`send_buffer`). One thread (`sender`) takes from every queue what waits
there, makes it a block (a few, where more waits than a block shall hold) and appends all in one transaction: what is
published meanwhile is the next. So blocks and transactions are as large as the load asks for, without a timer, and at
most one transaction is under way.

A block carries the producer, its incarnation and a sequence per stream. After a lost connection the same block is sent
again under the same sequence, and the log answers whether it was stored already. A stream that was closed meanwhile
reports that; then everything waiting for closed streams is routed again (`batches.routing_table`), oldest first, before
anything new is let in. That is why a message is stored once, and messages of one key in the order of their publication,
across lost connections and rollovers.

A `Delivery` stands for a message until it is durable. The buffer is bounded: a publisher that outruns the database is
made to wait, and nothing is ever dropped in silence.

A write by many processes goes another way: each makes blocks (`batches.sink_block_builder`) and stages them, and one
transaction publishes all (`sink_staging`).
"""

from sublet_storage.producer.async_publisher import AsyncPublisher
from sublet_storage.producer.delivery import AppendedSpan, BatchDelivery, Delivery, Position
from sublet_storage.producer.publisher import Publisher

__all__ = ["AppendedSpan", "AsyncPublisher", "BatchDelivery", "Delivery", "Position", "Publisher"]
