"""Checks session epochs: rejects epochs never drawn, and names of another principal.

Otherwise any client could lock a session's name for ever. If a node receives a higher epoch than its last one, it
queries the last one drawn; the requests wait for the answer.
"""

from __future__ import annotations

from sublet_leader.node.caller_counts import CallerCounts
from sublet_leader.node.events import AgentMessageReceived, ReadSessionEpoch, SessionEpochRead
from sublet_protocol.domain.subscriptions import Subscription
from sublet_protocol.messages.borrower_leader import BorrowerEndReason, Invalidate, LeaderWanted

MAX_REMEMBERED = 10_000
"""Maximum number of names whose last epoch is remembered, with its principal; beyond it, the one queried the
longest time ago is dropped."""

Waiter = tuple[AgentMessageReceived, LeaderWanted]


class DrawnSessionEpochs:
    """Tracks drawn epochs in memory only: all of it can be queried again. `query_counts`: the node's bound on
    concurrent queries."""

    def __init__(self, query_counts: CallerCounts) -> None:
        self._query_counts = query_counts
        self._last: dict[tuple[Subscription, str], tuple[str | None, int]] = {}
        self._waiting: dict[ReadSessionEpoch, dict[tuple[str, str], Waiter]] = {}
        self._first: dict[ReadSessionEpoch, tuple[str, str]] = {}
        self._callers: dict[ReadSessionEpoch, str] = {}
        self._asked: dict[tuple[str, str], ReadSessionEpoch] = {}

    def is_drawn(self, subscription: Subscription, received: AgentMessageReceived, wanted: LeaderWanted) -> bool:
        """Return whether the request has no epoch, or one known to have been drawn for its name, and the name is known
        to be its principal's."""
        if not wanted.session_epoch and (not wanted.session or received.principal is None):
            return True
        principal, last = self._last.get((subscription, wanted.session or ""), (None, -1))
        return received.principal == principal and wanted.session_epoch <= last

    def add_waiter(
        self, subscription: Subscription, received: AgentMessageReceived, wanted: LeaderWanted
    ) -> tuple[ReadSessionEpoch, ...]:
        """Add a request that waits for the database; a repeated one replaces the one before, under another name too.
        Return the query to make: none if it is under way, or at the bound on queries; then the request is repeated."""
        question, key = _question(subscription, received, wanted), (received.agent, wanted.borrower_id)
        is_first = question not in self._waiting
        if is_first and not self._query_counts.add(received.caller):
            return ()
        if self._asked.get(key) != question:
            self.remove_waiter(*key)
        if is_first:
            self._first[question] = key
            self._callers[question] = received.caller
        self._waiting.setdefault(question, {})[key] = received, wanted
        self._asked[key] = question
        return (question,) if is_first else ()

    def remove_waiter(self, agent: str, borrower_id: str) -> None:
        """Remove a borrower that may be waiting."""
        question = self._asked.pop((agent, borrower_id), None)
        if question is not None:
            del self._waiting[question][agent, borrower_id]

    def take_answer(self, answer: SessionEpochRead) -> tuple[list[Waiter], list[tuple[str, Invalidate]]]:
        """Return the requests to continue, and the rejections: only of the request it was queried for, as the others
        may have drawn theirs since; of all, if the name is not the principal's. If the database did not answer, none
        continues, and all will be repeated."""
        question, last = answer.request, answer.last
        waiters, first = self._waiting.pop(question, {}), self._first.pop(question, None)
        for key in waiters:
            del self._asked[key]
        if (caller := self._callers.pop(question, None)) is not None:
            self._query_counts.remove(caller)
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
