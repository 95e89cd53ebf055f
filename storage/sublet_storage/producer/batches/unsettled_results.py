"""What was published and is not settled yet, and the advances to other epochs in between."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Sequence

from sublet_protocol.domain.epoch_frontiers import Epoch
from sublet_storage.producer.batches.pending_block import PendingBlock
from sublet_storage.producer.delivery import SharedPublishResult


class UnsettledResults:
    """The results of messages and of advances, in the order of publishing. Not thread-safe. An exception of a signal
    handler leaves each method done or not."""

    def __init__(self) -> None:
        self._results: dict[SharedPublishResult, bool] = {}  # True: a caller waits in a flush for it
        self._advances: deque[tuple[SharedPublishResult, Sequence[Epoch]]] = deque()

    def __contains__(self, result: SharedPublishResult) -> bool:
        return result in self._results

    @property
    def has_advances(self) -> bool:
        """Return whether an advance waits."""
        return bool(self._advances)

    @property
    def is_flushing(self) -> bool:
        """Return whether a caller waits for a flush: flushed messages came before all that are not."""
        return next(iter(self._results.values()), False)

    def add(self, result: SharedPublishResult) -> None:
        """Add it as the last, unless it is here."""
        self._results.setdefault(result, False)

    def remove(self, result: SharedPublishResult) -> None:
        """Remove it if it is here."""
        self._results.pop(result, None)

    def flush(self) -> list[SharedPublishResult]:
        """Return all, which a caller waits for from now on."""
        results = list(self._results)
        self._results = dict.fromkeys(results, True)
        return results

    def clear(self) -> list[SharedPublishResult]:
        """Remove all; return them."""
        results = list(self._results)
        self._results.clear()
        self._advances.clear()
        return results

    def add_advance(self, epochs: Sequence[Epoch]) -> SharedPublishResult:
        """Add an advance to these epochs, behind all that is here."""
        result = SharedPublishResult(1)
        try:
            self._results[result] = False
            self._advances.append((result, epochs))
        except BaseException:
            self.remove_advance(result)
            raise
        return result

    def remove_advance(self, result: SharedPublishResult) -> None:
        """Remove the last advance, if it is this."""
        if self._advances and self._advances[-1][0] is result:
            self._advances.pop()
        self.remove(result)

    def find_due_advance(self, loads: Iterable[PendingBlock]) -> Sequence[Epoch] | None:
        """Return where the last advance goes that has nothing before it but these loads; None if there is none."""
        if not self._advances:
            return None
        counts: Counter[SharedPublishResult] = Counter()
        for load in loads:
            for piece in load.pieces:
                counts[piece.ticket] += piece.count
        count = self._count_done(lambda result: result.pending_count <= counts[result])
        return self._advances[count - 1][1] if count else None

    def complete_advance(self, epochs: Sequence[Epoch]) -> None:
        """Complete the advances up to that with these epochs."""
        is_complete = False
        while not is_complete:
            result, queued_epochs = self._advances.popleft()
            del self._results[result]
            result.complete_empty()
            is_complete = queued_epochs is epochs

    def fail_advances(self, error: Exception, failed: Collection[SharedPublishResult]) -> None:
        """Fail the advances, except those with nothing left before them; without anything that has `failed`, all."""
        done_count = self._count_done(lambda result: not result.pending_count and result not in failed) if failed else 0
        while len(self._advances) > done_count:
            result, _ = self._advances.pop()
            del self._results[result]
            result.abandon(error)

    def _count_done(self, is_done: Callable[[SharedPublishResult], bool]) -> int:
        """Return how many advances have nothing before them but what is done."""
        count = 0
        for result in self._results:
            if count < len(self._advances) and result is self._advances[count][0]:
                count += 1
            elif not is_done(result):
                break
        return count
