"""The position of a feed's reader, and which pages it takes; pure.

A page has the id of the call it answers, its start and its end. Only the direct successor of what was taken last, under
the id of the call that is under way, moves the reader on; so even if a node or the network fails, each message comes
once and none is skipped.
"""

from __future__ import annotations

from enum import Enum
from itertools import count

from sublet_protocol.domain.subscriptions import Bookmark
from sublet_protocol.messages.feed_messages import FeedPage


class FeedPageAcceptance(Enum):
    """The outcome of offering a page to the cursor."""

    ADVANCED = "advanced"  # it was the successor: its messages are next
    HEARTBEAT = "heartbeat"  # it was a bookmark or a heartbeat
    STALE = "stale"  # it was of an older call, or a repeat; nothing has changed
    GAP = "gap"  # something is missing before it; nothing has changed, and a new call has to begin


class FeedCursor:
    """The position of a feed's reader. `bookmark`: how far it has come; None until a node has sent where the beginning
    is.
    """

    def __init__(self, name: str) -> None:
        self._ids = (f"{name}.{number}" for number in count(1))
        self.subscription = next(self._ids)
        self._known = 0
        self._timeline: str | None = None
        self._offsets: dict[int, int] | None = None
        self._previous: tuple[int, int] | None = None

    @property
    def bookmark(self) -> Bookmark | None:
        """Return a copy."""
        return None if self._offsets is None else Bookmark(self._known, dict(self._offsets), self._timeline)

    def new_subscription_id(self) -> str:
        """Return a new id, for another call; pages under the older ones are discarded from now on."""
        self.subscription = next(self._ids)
        return self.subscription

    def accept(self, page: FeedPage) -> FeedPageAcceptance:
        """Move on, if the page is the next."""
        if page.subscription_id != self.subscription:
            return FeedPageAcceptance.STALE
        if page.bookmark is not None:
            return self._take_bookmark(page.bookmark)
        if not page.stream_id:
            return FeedPageAcceptance.HEARTBEAT
        at = None if self._offsets is None else self._offsets.get(page.stream_id)
        if self._offsets is None or at is None:
            return FeedPageAcceptance.GAP
        if page.start != at:
            return FeedPageAcceptance.STALE if page.position <= at else FeedPageAcceptance.GAP
        self._previous = page.stream_id, at
        self._offsets[page.stream_id] = page.position
        if page.is_gone and page.oldest_offset is None:
            del self._offsets[page.stream_id]  # nothing will come of it: in a bookmark it would be reported again
        return FeedPageAcceptance.ADVANCED

    def confirm(self) -> None:
        """Note that the page that was accepted last has been given out."""
        self._previous = None

    def go_back(self) -> None:
        """Go back before the page that was accepted last, unless it has been given out."""
        if self._offsets is not None and self._previous is not None:
            stream_id, at = self._previous
            self._offsets[stream_id] = at

    def _take_bookmark(self, bookmark: Bookmark) -> FeedPageAcceptance:
        """Accept streams that were not known; of those that were the bookmark must be equal."""
        offsets = self._offsets
        if offsets is not None and (
            bookmark.known < self._known or any(offsets.get(id, at) != at for id, at in bookmark.offsets.items())
        ):
            return FeedPageAcceptance.GAP
        self._known, self._offsets = bookmark.known, dict(bookmark.offsets)
        self._timeline = bookmark.timeline or self._timeline
        return FeedPageAcceptance.HEARTBEAT
