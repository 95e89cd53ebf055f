"""The batches that a session is to give out again, before it reads on."""

from __future__ import annotations

import logging
from collections.abc import Callable

from sublet_borrower.streams.batch import Batch

log = logging.getLogger(__name__)

WARN_AFTER_FAILURES = 3


class RedeliveryQueue:
    """Batches that failed, or that no user has received. Not thread-safe but for `has_earlier`."""

    def __init__(self, subscription: str) -> None:
        self._subscription = subscription
        self._batches: list[Batch] = []

    def add(self, batch: Batch) -> None:
        """Add a batch, unless it is there."""
        if not any(known.is_same_as(batch) for known in self._batches):
            self._batches.append(batch)

    def add_failed(self, batch: Batch) -> None:
        """Add a batch whose work has failed."""
        batch.attempts.failures += 1
        if batch.attempts.failures == WARN_AFTER_FAILURES:
            text = "batch failed repeatedly: subscription=%s stream_id=%d start_offset=%d: if done, call batch.ack()"
            log.warning(text, self._subscription, batch.stream_id, batch.first)
        self.add(batch)

    def discard(self, batch: Batch) -> None:
        """Remove a batch that is given out."""
        self._batches = [known for known in self._batches if not known.is_same_as(batch)]

    def clear(self) -> None:
        """Remove all batches: their grants are over."""
        self._batches.clear()

    def next(self, allowed: Callable[[Batch], bool]) -> Batch | None:
        """Return what is left of the first batch of a stream that is still this session's and `allowed`. It stays until
        `discard`."""
        for batch in sorted(self._batches, key=lambda batch: batch.ticket):
            if not batch.is_outstanding:
                self._batches.remove(batch)
            elif allowed(batch):
                rest = batch.rest()
                self._batches[self._batches.index(batch)] = rest
                if len(rest):
                    return rest
                rest.acknowledge()  # what lies behind its last message does not match the filter
        return None

    def has_outstanding(self) -> bool:
        """Return whether a batch is still to be done by this session."""
        return any(batch.is_outstanding for batch in self._batches)

    def has_earlier(self, batch: Batch) -> bool:
        """Return whether a batch of the same stream is to be given out before this one. From any thread."""
        return any(
            known.stream_id == batch.stream_id and known.ticket < batch.ticket and known.is_outstanding
            for known in tuple(self._batches)
        )
