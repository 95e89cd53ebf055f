"""Checks session epochs: rejects epochs never drawn, and names of another principal.

Otherwise any client could lock a session's name for ever. If a node receives a higher epoch than its last one, it
queries the last one drawn; the requests wait for the answer.
"""

from __future__ import annotations

from sublet_leader.node.events import AgentMessageReceived, ReadSessionEpoch, SessionEpochRead
from sublet_protocol.domain.subscriptions import Subscription
from sublet_protocol.messages.borrower_leader import BorrowerEndReason, Invalidate, LeaderWanted

MAX_REMEMBERED = 10_000
"""Maximum number of names whose last epoch is remembered, with its principal; beyond it, the one queried the longest time
ago is dropped."""

Waiter = tuple[AgentMessageReceived, LeaderWanted]


class DrawnSessionEpochs:
    """Tracks drawn epochs in memory only: all of it can be queried again."""

    def __init__(self) -> None:
        self._last: dict[tuple[Subscription, str], tuple[str | None, int]] = {}
        self._waiting: dict[ReadSessionEpoch, dict[tuple[str, str], Waiter]] = {}
        self._first: dict[ReadSessionEpoch, tuple[str, str]] = {}

    def is_drawn(self, subscription: Subscription, received: AgentMessageReceived, wanted: LeaderWanted) -> bool:
        """Return whether the request has no epoch, or one known to have been drawn for its name, and the name is known
        to be its principal's."""
        if not wanted.session_epoch and (not wanted.session or received.principal is None):
            return True
        principal, last = self._last.get((subscription, wanted.session or ""), (None, -1))
        return received.principal == principal and wanted.session_epoch <= last

    def add_waiter(
        self, subscription: Subscription, received: AgentMessageReceived, wanted: LeaderWanted
    ) -> ReadSessionEpoch | None:
        """Add a request that waits for the database; a repeated one replaces the one before. Return the query to make,
        None if it is under way."""
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
        """Return the requests to continue, and the rejections: only of the request it was queried for, as the others
        may have drawn theirs since; of all, if the name is not the principal's. If the database did not answer, none
        continues, and all will be repeated."""
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
