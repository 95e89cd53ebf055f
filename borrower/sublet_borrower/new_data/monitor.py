"""Where a session learns that a stream goes on: from what is pushed, and from the log itself. See `Following`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from sublet_borrower.new_data.head_tracker import (
    AtEnd,
    FollowId,
    Following,
    FollowingEvent,
    Looked,
    NewsCounters,
    Pushed,
)
from sublet_borrower.util.clock import clock

Heads = Callable[[Iterable[int]], list[tuple[int, int]]]
"""Asks the log where these streams end; nothing where it does not answer."""


class Followed(Protocol):
    """The streams to look out for; `Handler` says more."""

    def ends(self) -> dict[int, tuple[int, int]]: ...

    def note_heads(self, heads: Iterable[tuple[int, int]]) -> None: ...

    def note_said(self, heads: Iterable[tuple[int, int]]) -> None: ...


class Lookout:
    """The shell around the pure `Following`. `follow` and `unfollow` ask for news by push, and for no more of them."""

    def __init__(
        self, handler: Followed, heads: Heads, follow: Callable[[FollowId], None], unfollow: Callable[[FollowId], None]
    ) -> None:
        self._machine = Following()
        self._handler, self._heads = handler, heads
        self._follow, self._unfollow = follow, unfollow
        self._look_at = float("-inf")

    @property
    def wait_s(self) -> float:
        """Until it wants to look again; 0: now."""
        return max(self._look_at - clock(), 0.0)

    @property
    def counters(self) -> NewsCounters:
        """What was found how, since the session began."""
        return self._machine.counters

    def pushed(self, news: Pushed) -> None:
        """Somebody says that a stream goes on."""
        self._do(news)

    def look(self) -> bool:
        """See which streams are read to their ends by now, and look at those whose silence is over; True for news."""
        return self._do(AtEnd(self._handler.ends()))

    def _do(self, event: FollowingEvent) -> bool:
        outcome = self._machine.decide(event, clock())
        for follow in outcome.unfollow:
            self._unfollow(follow)
        for follow in outcome.follow:
            self._follow(follow)
        self._handler.note_said(outcome.news.items())
        self._look_at = float("inf") if outcome.wake_at is None else outcome.wake_at
        if outcome.look:
            asked_at = clock()
            heads = self._heads(outcome.look)
            self._handler.note_heads(heads)
            return self._do(Looked(dict(heads), clock() - asked_at)) or bool(outcome.news)
        return bool(outcome.news)
