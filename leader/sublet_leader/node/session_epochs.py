"""Which epochs sessions may come with: none that was never drawn, or anybody could lock a session's name for ever; and
where callers are known, none under another principal's name.

When a node receives a higher one than it knows of, it queries what was drawn last; the requests wait for the answer.
"""

from __future__ import annotations

from sublet_leader.node.caller_counts import CallerCounts
from sublet_leader.node.events import AgentMessageReceived, ReadSessionEpoch, SessionEpochRead
from sublet_protocol.domain.subscriptions import Subscription
from sublet_protocol.messages.borrower_leader import BorrowerEndReason, Invalidate, LeaderWanted

MAX_REMEMBERED = 10_000
"""Names, each with its principal, of which the last draw is remembered; of more, the one that was asked about the
longest time ago is not."""

Waiter = tuple[AgentMessageReceived, LeaderWanted]


class DrawnSessionEpochs:
    """Memory only: all of it can be queried again. `query_counts`: the node's bound on what is queried at a time."""

    def __init__(self, query_counts: CallerCounts) -> None:
        self._query_counts = query_counts
        self._last: dict[ReadSessionEpoch, int] = {}
        self._waiting: dict[ReadSessionEpoch, dict[tuple[str, str], Waiter]] = {}
        self._first: dict[ReadSessionEpoch, tuple[str, str]] = {}
        self._callers: dict[ReadSessionEpoch, str] = {}
        self._asked: dict[tuple[str, str], ReadSessionEpoch] = {}

    def is_drawn(self, subscription: Subscription, received: AgentMessageReceived, wanted: LeaderWanted) -> bool:
        """Whether it has no epoch, or one that is known to have been drawn for its name, which is its principal's."""
        return wanted.session_epoch <= self._last.get(_question(subscription, received, wanted), 0)

    def add_waiter(
        self, subscription: Subscription, received: AgentMessageReceived, wanted: LeaderWanted
    ) -> tuple[ReadSessionEpoch, ...]:
        """Let a request wait for the database; a repeated one replaces the one before, under another name too. Return
        what is to be queried: nothing where that is under way, or as much as may be; then it is repeated."""
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
        """Return the requests that go on, and the answers to those that do not: only to the one that it was queried
        for, as the others may have drawn theirs since; to all, where the name is not the principal's. Where the
        database did not answer none goes on, and all will be repeated."""
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
        self._last.pop(question, None)
        self._last[question] = last
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
