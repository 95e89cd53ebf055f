"""What a node hears of changes in the database, once for all its agents, and passes on: heads of streams to who follows
them, new streams to its leaders.

Nothing here is believed: news makes agents and leaders look earlier than they would have looked anyway.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable

from protocol.events import StreamHead
from protocol.session.publisher import SessionPublisher
from protocol.session.values import Channel
from storage.notify import snapshot
from storage.notify.driver import Driver
from storage.notify.ears import Ears
from storage.notify.model import SPACE, STREAM, Change, NotifySettings

MOST_DIGITS = 19
"""A stream id has no more."""


class Hub:
    """Made and used on the node's loop; listens from the beginning to `close`. Raises what the driver raises.

    On the loop it calls `streams_changed()` when some were opened or closed, and `grown(stream_id)`.
    """

    def __init__(
        self,
        url: str,
        driver: Driver,
        publisher: SessionPublisher,
        streams_changed: Callable[[], None],
        grown: Callable[[int], None],
        settings: NotifySettings | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._publisher, self._streams_changed, self._grown = publisher, streams_changed, grown
        self._lock = threading.Lock()
        self._followed: set[int] = set()
        self._news: deque[Change] = deque()
        self._ears = Ears(url, driver, snapshot.reading(self._wanted), self._heard, settings=settings)

    @property
    def endpoint(self) -> str:
        """What publishers must know to reach this node."""
        return self._ears.endpoint

    @property
    def ears(self) -> Ears:
        """What is known, and how it became known."""
        return self._ears

    def followed(self, key: str, wanted: bool) -> None:
        """Somebody follows that stream now and is told what is known of it, or nobody does any more. A catch-up reads
        those alone that are followed, and only their heads are kept for who subscribes later."""
        if not key.isdecimal() or len(key) > MOST_DIGITS:
            return
        with self._lock:
            (self._followed.add if wanted else self._followed.discard)(int(key))
        if not wanted:
            self._publisher.retract(Channel.STREAM, key)
        elif (known := self._ears.get(STREAM, key)) is not None:
            self._tell(known)
        else:
            self._ears.ask(STREAM)

    def close(self) -> None:
        """Listen no more; blocks for a moment."""
        self._ears.close()

    def _wanted(self) -> frozenset[int]:
        with self._lock:
            return frozenset(self._followed)

    def _heard(self, change: Change) -> None:
        """On the thread of the ears. The loop is woken once for all that has come until it is there."""
        self._news.append(change)
        if len(self._news) == 1:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits for news any more
                self._loop.call_soon_threadsafe(self._pass_on)

    def _pass_on(self) -> None:
        streams_changed = False
        while self._news:
            change = self._news.popleft()
            if change.kind == STREAM:
                self._tell(change)
            streams_changed = streams_changed or change.kind == SPACE
        if streams_changed:
            self._streams_changed()

    def _tell(self, change: Change) -> None:
        """A head is in the version itself; what else a publisher says of it is not looked at."""
        if change.deleted or not change.key.isdecimal() or len(change.key) > MOST_DIGITS:
            return
        head, closed = divmod(change.version, 2)
        told = StreamHead(int(change.key), head, bool(closed))
        self._grown(told.stream_id)
        if told.stream_id in self._followed:
            self._publisher.publish(Channel.STREAM, change.key, told, change.version)
