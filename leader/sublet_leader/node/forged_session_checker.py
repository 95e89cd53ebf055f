"""Checks session epochs: rejects epochs never drawn, and names of another principal.

Otherwise any client could lock a session's name for ever. If a node receives a higher epoch than its last one, it
queries the last one drawn; the requests wait for the answer.
"""

from __future__ import annotations

from msgspec.structs import replace

from sublet_leader.node.caller_count_limit import CallerCountLimit
from sublet_leader.node.events import AgentMessageReceived, ReadSessionEpoch, SessionEpochRead
from sublet_protocol.domain.subscriptions import Subscription
from sublet_protocol.messages.borrower_leader import BorrowerEndReason, Invalidate, LeaderWanted

MAX_REMEMBERED = 10_000
"""Maximum number of names whose last epoch is remembered, with its principal; beyond it, the one queried the
longest time ago is dropped."""

Waiter = tuple[AgentMessageReceived, LeaderWanted]


class ForgedSessionChecker:
    """Tracks drawn epochs in memory only: all of it can be queried again. `query_counts`: the node's bound on
    concurrent queries."""

    def __init__(self, query_counts: CallerCountLimit) -> None:
        self._query_counts = query_counts
        self._last_epochs: dict[tuple[Subscription, str], tuple[str | None, int]] = {}
        self._waiting: dict[ReadSessionEpoch, dict[tuple[str, str], Waiter]] = {}
        self._first_waiters: dict[ReadSessionEpoch, tuple[str, str]] = {}
        self._callers: dict[ReadSessionEpoch, str] = {}
        self._questions: dict[tuple[str, str], ReadSessionEpoch] = {}

    def is_drawn(self, subscription: Subscription, received: AgentMessageReceived, request: LeaderWanted) -> bool:
        """Return whether the request has no epoch, or one known to have been drawn for its name, and the name is known
        to be its principal's."""
        if not request.session_epoch and (not request.session or received.principal is None):
            return True
        principal, last_epoch = self._last_epochs.get((subscription, request.session or ""), (None, -1))
        return received.principal == principal and request.session_epoch <= last_epoch

    def add_waiter(
        self, subscription: Subscription, received: AgentMessageReceived, request: LeaderWanted
    ) -> tuple[ReadSessionEpoch, ...]:
        """Add a request that waits for the database; a repeated one replaces the one before, under another name too.
        Return the query to make: none if it is under way, or at the bound on queries; then the request is repeated."""
        question, key = _make_query(subscription, received, request), (received.agent, request.borrower_id)
        is_first = question not in self._waiting
        if is_first and not self._query_counts.add(received.caller):
            return ()
        if self._questions.get(key) != question:
            self.remove_waiter(*key)
        if is_first:
            self._first_waiters[question] = key
            self._callers[question] = received.caller
        self._waiting.setdefault(question, {})[key] = received, request
        self._questions[key] = question
        return (question,) if is_first else ()

    def remove_waiter(self, agent: str, borrower_id: str) -> None:
        """Remove a borrower that may be waiting."""
        question = self._questions.pop((agent, borrower_id), None)
        if question is not None:
            del self._waiting[question][agent, borrower_id]

    def take_answer(self, answer: SessionEpochRead) -> tuple[list[Waiter], list[tuple[str, Invalidate]]]:
        """Return the requests to continue, and the rejections: only of the request it was queried for, as the others
        may have drawn theirs since; of all that have an epoch, if the name is not the principal's: the others, to which
        it is only for display, continue without it. If the database did not answer, none continues, and all will be
        repeated."""
        question, last_epoch = answer.request, answer.last
        waiters, first_key = self._waiting.pop(question, {}), self._first_waiters.pop(question, None)
        for key in waiters:
            del self._questions[key]
        if (caller := self._callers.pop(question, None)) is not None:
            self._query_counts.remove(caller)
        if last_epoch is None:
            return [], []
        if answer.denied is not None:
            unnamed = [_drop_name(received, w) for received, w in waiters.values() if not w.session_epoch]
            return unnamed, [(r.agent, _make_denial(w, answer.denied)) for r, w in waiters.values() if w.session_epoch]
        name = question.subscription, question.session
        self._last_epochs.pop(name, None)
        self._last_epochs[name] = question.principal, last_epoch
        if len(self._last_epochs) > MAX_REMEMBERED:
            del self._last_epochs[next(iter(self._last_epochs))]
        first_waiter = waiters.pop(first_key, None) if first_key is not None else None
        if first_waiter is None:
            return list(waiters.values()), []
        if first_waiter[1].session_epoch > last_epoch:
            return list(waiters.values()), [(first_waiter[0].agent, _deny(first_waiter[1], last_epoch))]
        return [first_waiter, *waiters.values()], []


def _make_query(subscription: Subscription, received: AgentMessageReceived, request: LeaderWanted) -> ReadSessionEpoch:
    return ReadSessionEpoch(subscription, request.session or "", received.principal)


def _drop_name(received: AgentMessageReceived, request: LeaderWanted) -> Waiter:
    request = replace(request, session=None)
    return replace(received, message=request), request


def _deny(request: LeaderWanted, last_epoch: int) -> Invalidate:
    detail = (
        f"session epoch {request.session_epoch}: the last that was drawn for session {request.session!r} of "
        f"{request.subscription} is {last_epoch}. Draw one with next_session_epoch."
    )
    return _make_denial(request, detail)


def _make_denial(request: LeaderWanted, detail: str) -> Invalidate:
    return Invalidate(request.borrower_id, 0, BorrowerEndReason.DENIED, detail)
