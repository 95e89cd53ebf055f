"""Fetches the next messages of a session's streams, and records which cannot be read, and why."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol, TypeVar

from sublet_borrower.streams.complete_epoch_stream import CompleteEpochStream
from sublet_borrower.streams.granted_stream import GrantedStream
from sublet_borrower.streams.session_assignment import SessionAssignment
from sublet_protocol.domain.errors import (
    PageUnreadable,
    PayloadObjectUnreadable,
    PayloadUnavailable,
    PoisonBlock,
    PositionBeyondHead,
    PositionGone,
    TimelineChanged,
)
from sublet_protocol.domain.topics import TopicFilter
from sublet_storage.log.fetch import MATCH_ALL, LogPage
from sublet_storage.readers.epoch_steps import BlockEpochSummaries, BlockRun, EpochStep

log = logging.getLogger(__name__)

UNREADABLE_RETRY_S = 10.0
"""After which a stream whose next payload or page was unreadable is read again: it may have been repaired."""

UNAVAILABLE_RETRY_S = 1.0
"""After which a stream whose next payload's location did not answer is read again."""

MayRead = Callable[[GrantedStream], bool]
"""Whether the stream may be read now, by its grant."""

T = TypeVar("T")


class GrantedStreamReader(Protocol):
    """A reader of granted streams: `DatabaseMessageReader` or `NodeMessageReader`. Both are tested by
    `tests/contract/test_readers.py`."""

    def warm_up(self, filter: TopicFilter = MATCH_ALL) -> None: ...

    def fetch(self, granted: GrantedStream, allowed: MayRead) -> LogPage | None: ...

    def fetch_block_summaries(self, granted: CompleteEpochStream) -> BlockEpochSummaries | None: ...

    def fetch_frontiers(self, stream_ids: Iterable[int]) -> Mapping[int, BlockEpochSummaries]: ...

    def fetch_heads(self, stream_ids: Iterable[int]) -> list[tuple[int, int]]: ...

    def close(self) -> None: ...


class SessionStreamFetcher:
    """The streams of one session, read a page at a time. `max_batch_bytes`: about how large a step of epochs may be.
    `whole_epochs`: make each batch as large as it must be to hold whole epochs."""

    def __init__(
        self,
        subscription: str,
        reader: GrantedStreamReader,
        assignment: SessionAssignment,
        max_batch_bytes: int,
        *,
        whole_epochs: bool,
    ) -> None:
        self._subscription, self._reader, self._assignment = subscription, reader, assignment
        self._max_batch_bytes, self._whole_epochs = max_batch_bytes, whole_epochs

    def fetch(self, granted: GrantedStream, may_read: MayRead) -> LogPage | None:
        """Return the next page of the stream; None where it cannot be had now."""
        return self._try_to_read(granted, lambda: self._reader.fetch(granted, may_read))

    def fetch_epochs(self, granted: CompleteEpochStream, may_read: MayRead) -> bool:
        """Read on in the step that has begun, or begin the next. Return whether the stream has moved on, or cannot be
        read on: if not, it is the next stream's turn."""
        if granted.next_run is None:
            return self._begin_step(granted)
        return self._continue_step(granted, *granted.next_run, may_read)

    def _continue_step(self, granted: CompleteEpochStream, step: EpochStep, run: BlockRun, may_read: MayRead) -> bool:
        page = self.fetch(granted, may_read)
        if page is None:
            return granted.is_unreadable
        if not granted.add_page(page, step, run, atomic=self._whole_epochs):
            self._assignment.mark_skipped(granted, granted.ticket)
        return True

    def _begin_step(self, granted: CompleteEpochStream) -> bool:
        """Begin the next step, if need be after reading which epochs of what follows are completed. Return whether the
        stream has moved on, or cannot be read on, as `fetch_epochs` does."""
        known_end = granted.step_planner.scanned
        has_step = granted.begin_step(self._max_batch_bytes)
        if not has_step:
            summaries = self._try_to_read(granted, lambda: self._reader.fetch_block_summaries(granted))
            if summaries is None:
                return granted.is_unreadable
            granted.add_summaries(summaries)
            has_step = granted.begin_step(self._max_batch_bytes)
        if has_step:
            self._assignment.report(granted)
        return has_step or granted.step_planner.scanned > known_end or not granted.may_have_more

    def _try_to_read(self, granted: GrantedStream, read: Callable[[], T | None]) -> T | None:
        """Return what follows in the stream. One that cannot be read on from there is handed back to its leader, which
        is logged once; one that may be repaired is tried again.
        """
        try:
            result = read()
        except (PayloadUnavailable, PageUnreadable, TimelineChanged) as error:  # the last until it is granted anew
            unreadable = isinstance(error, PayloadObjectUnreadable | PageUnreadable)
            self._defer(granted, error, UNREADABLE_RETRY_S if unreadable else UNAVAILABLE_RETRY_S)
            return None
        except (PoisonBlock, PositionBeyondHead) as error:
            if self._assignment.end_unreadable(granted, error):
                text = "stream unreadable, handed back: subscription=%s stream_id=%d: %s"
                log.warning(text, self._subscription, granted.stream_id, error)
            return None
        except PositionGone as error:
            granted.is_unreadable = True
            text = "messages gone, stream no longer read: subscription=%s stream_id=%d: %s"
            log.warning(text, self._subscription, granted.stream_id, error)
            return None
        if result is not None and self._assignment.mark_readable(granted):
            log.info("stream readable again: subscription=%s stream_id=%d", self._subscription, granted.stream_id)
        return result

    def _defer(self, granted: GrantedStream, error: Exception, retry_s: float) -> None:
        """Try the stream again later. It is logged once, also where many streams wait for one location."""
        if self._assignment.defer(granted, error, time.monotonic(), retry_s):
            text = "stream unreadable, retrying: subscription=%s stream_id=%d: %s"
            log.warning(text, self._subscription, granted.stream_id, error)


def fetch_heads_and_frontiers(
    reader: GrantedStreamReader, assignment: SessionAssignment, stream_ids: Iterable[int]
) -> list[tuple[int, int]]:
    """Return (stream, head) of each, after reading what is completed by now where a stream waits for epochs."""
    if waiting := assignment.streams_waiting_for_epochs():
        assignment.update_frontiers(reader.fetch_frontiers(granted.stream_id for granted in waiting))
    return reader.fetch_heads(stream_ids)
