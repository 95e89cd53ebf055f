"""Which epochs sessions may come with: none that was never drawn, or anybody could lock a session's name for ever.

A node asks the database what was drawn last for a name when it hears of a higher one; the requests wait for the answer.
"""

from __future__ import annotations

from sublet_leader.node.events import AgentMessageReceived
from sublet_protocol.domain.subscriptions import Subscription
from sublet_protocol.messages.borrower_leader import BorrowerEndReason, Invalidate, LeaderWanted

MAX_REMEMBERED = 10_000
"""Names of which the last draw is remembered; of more, the one that was asked about the longest time ago is not."""

SessionKey = tuple[Subscription, str]


def deny(wanted: LeaderWanted, last: int) -> Invalidate:
    """Return the answer to an epoch above the one that was drawn last for its name."""
    detail = (
        f"session epoch {wanted.session_epoch}: the last that was drawn for session {wanted.session!r} of "
        f"{wanted.subscription} is {last}. Draw one with next_session_epoch."
    )
    return Invalidate(wanted.borrower_id, 0, BorrowerEndReason.DENIED, detail)


class DrawnSessionEpochs:
    """Memory only: all of it can be asked again."""

    def __init__(self) -> None:
        self._last: dict[SessionKey, int] = {}
        self._waiting: dict[SessionKey, dict[tuple[str, str], AgentMessageReceived]] = {}

    def is_drawn(self, subscription: Subscription, wanted: LeaderWanted) -> bool:
        """Whether it has no epoch, or one that is known to have been drawn for its name."""
        if not wanted.session_epoch:
            return True
        return wanted.session_epoch <= self._last.get((subscription, wanted.session or ""), 0)

    def add_waiter(self, subscription: Subscription, received: AgentMessageReceived, wanted: LeaderWanted) -> bool:
        """Let a request wait for the database; a repeated one replaces the one before. True: it is to be asked."""
        key = (subscription, wanted.session or "")
        is_first = key not in self._waiting
        self._waiting.setdefault(key, {})[received.agent, wanted.borrower_id] = received
        return is_first

    def remove_waiter(self, agent: str, borrower_id: str) -> None:
        """Remove a borrower that may be waiting."""
        for waiting in self._waiting.values():
            waiting.pop((agent, borrower_id), None)

    def take_answer(self, subscription: Subscription, session: str, last: int | None) -> list[AgentMessageReceived]:
        """Remember what was drawn last; None: the database did not answer. Return the requests that waited for it."""
        if last is not None:
            self._last.pop((subscription, session), None)
            self._last[subscription, session] = last
            if len(self._last) > MAX_REMEMBERED:
                del self._last[next(iter(self._last))]
        return list(self._waiting.pop((subscription, session), {}).values())
