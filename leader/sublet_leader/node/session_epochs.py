"""Which epochs sessions may come with: none that was never drawn, or anybody could lock a session's name for ever; and
where callers are known, none under another principal's name.

When a node receives a higher one than it knows of, it queries what was drawn last; the requests wait for the answer.
"""

from __future__ import annotations

from sublet_leader.node.events import AgentMessageReceived, ReadSessionEpoch, SessionEpochRead
from sublet_protocol.domain.subscriptions import Subscription
from sublet_protocol.messages.borrower_leader import BorrowerEndReason, Invalidate, LeaderWanted

MAX_REMEMBERED = 10_000
"""Names of which the last draw is remembered, with the principal that was asked about; of more, the one that was asked
about the longest time ago is not."""

Waiter = tuple[AgentMessageReceived, LeaderWanted]


class DrawnSessionEpochs:
    """Memory only: all of it can be queried again."""

    def __init__(self) -> None:
        self._last: dict[tuple[Subscription, str], tuple[str | None, int]] = {}
        self._waiting: dict[ReadSessionEpoch, dict[tuple[str, str], Waiter]] = {}
        self._first: dict[ReadSessionEpoch, tuple[str, str]] = {}

    def is_drawn(self, subscription: Subscription, received: AgentMessageReceived, wanted: LeaderWanted) -> bool:
        """Whether its epoch is known to have been drawn for its name, if it has one, and the name to be no other
        principal's."""
        if not wanted.session_epoch and (not wanted.session or received.principal is None):
            return True
        principal, last = self._last.get((subscription, wanted.session or ""), (None, -1))
        return received.principal == principal and wanted.session_epoch <= last

    def add_waiter(
        self, subscription: Subscription, received: AgentMessageReceived, wanted: LeaderWanted
    ) -> ReadSessionEpoch | None:
        """Let a request wait for the database; a repeated one replaces the one before. Return what is to be queried,
        None where that is under way."""
        question, key = _question(subscription, received, wanted), (received.agent, wanted.borrower_id)
        is_first = question not in self._waiting
        if is_first:
            self._first[question] = key
        self._waiting.setdefault(question, {})[key] = received, wanted
        return question if is_first else None

    def remove_waiter(self, agent: str, borrower_id: str) -> None:
        """Remove a borrower that may be waiting."""
        for waiting in self._waiting.values():
            waiting.pop((agent, borrower_id), None)

    def take_answer(self, answer: SessionEpochRead) -> tuple[list[Waiter], list[tuple[str, Invalidate]]]:
        """Return the requests that go on, and the answers to those that do not: only to the one that it was queried
        for, as the others may have drawn theirs since; to all, where the name is not the principal's. Where the
        database did not answer none goes on, and all will be repeated."""
        question, last = answer.request, answer.last
        waiters, first = self._waiting.pop(question, {}), self._first.pop(question, None)
        if last is None:
            return [], []
        if answer.denied is not None:
            return [], [(r.agent, _denied(wanted, answer.denied)) for r, wanted in waiters.values()]
        name = question.subscription, question.session
        self._last.pop(name, None)
        self._last[name] = question.principal, last
        if len(self._last) > MAX_REMEMBERED:
            del self._last[next(iter(self._last))]
        asked = waiters.pop(first, None) if first is not None else None
        if asked is None:
            return list(waiters.values()), []
        if asked[1].session_epoch > last:
            return list(waiters.values()), [(asked[0].agent, _deny(asked[1], last))]
        return [asked, *waiters.values()], []


def _question(subscription: Subscription, received: AgentMessageReceived, wanted: LeaderWanted) -> ReadSessionEpoch:
    return ReadSessionEpoch(subscription, wanted.session or "", received.principal)


def _deny(wanted: LeaderWanted, last: int) -> Invalidate:
    detail = (
        f"session epoch {wanted.session_epoch}: the last that was drawn for session {wanted.session!r} of "
        f"{wanted.subscription} is {last}. Draw one with next_session_epoch."
    )
    return _denied(wanted, detail)


def _denied(wanted: LeaderWanted, detail: str) -> Invalidate:
    return Invalidate(wanted.borrower_id, 0, BorrowerEndReason.DENIED, detail)
