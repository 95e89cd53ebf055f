"""A ticket settles once, whoever reports its outcome, and however many do at the same time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from sublet_protocol.domain.errors import DatabaseUnreachable, UnknownOutcome
from sublet_storage.producer import delivery
from sublet_storage.producer.delivery import AppendedSpan, Delivery, DeliveryTimeout, Position, SharedPublishResult


class Turn:
    """A lock before which its first taker waits until another has had its turn."""

    def __init__(self, first: Callable[[], None]) -> None:
        self._lock = threading.Lock()
        self._first: Callable[[], None] | None = first

    def __enter__(self) -> None:
        first, self._first = self._first, None
        if first is not None:
            first()
        self._lock.acquire()

    def __exit__(self, *_: Any) -> None:
        self._lock.release()


def test_a_ticket_abandoned_while_others_settle_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        turn = Turn(lambda: ticket.fail(2, ValueError("first")))
        patched.setattr(delivery, "threading", SimpleNamespace(Lock=lambda: turn))
        ticket = SharedPublishResult(5)
        ticket.abandon(ValueError("the rest"))
    assert ticket.is_done
    with pytest.raises(ValueError, match="first"):
        ticket.wait(5)


def test_results_after_the_abandoning_change_nothing() -> None:
    ticket = SharedPublishResult(2)
    ticket.abandon(ValueError("abandoned"))
    ticket.complete_span(AppendedSpan(1, 0, range(2)))
    ticket.fail(2, ValueError("later"))
    assert ticket.is_done
    with pytest.raises(ValueError, match="abandoned"):
        ticket.wait(5)


def test_a_part_in_doubt_outweighs_one_that_failed() -> None:
    """Else whoever publishes what is certainly not stored again has that part twice."""
    ticket = SharedPublishResult(6)
    ticket.fail(1, UnknownOutcome("sent"))
    ticket.fail(2, DatabaseUnreachable("not sent"))
    ticket.complete_span(AppendedSpan(1, 0, range(3)))
    assert (str(ticket.error), ticket.stored_count) == ("sent", 3)
    assert Delivery(ticket, 2).result(0.0) == Position(1, 2), "of a part that is stored"
    with pytest.raises(UnknownOutcome, match="sent"):
        Delivery(ticket, 3).result(0.0)
    ticket = SharedPublishResult(2)
    ticket.fail(1, DatabaseUnreachable("not sent"))
    ticket.fail(1, UnknownOutcome("sent"))
    assert (str(ticket.error), ticket.stored_count) == ("sent", 0)


def test_the_timeout_counts_from_when_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is over is not tried where others failed while it waited, unless something was answered since."""
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    timeout = DeliveryTimeout(20.0)
    clock[0] = 115.0
    assert timeout.make_backoff(100.0).left_s == 5.0
    clock[0] = 125.0
    assert not timeout.is_over(100.0)
    timeout.record_timeout()
    assert [timeout.is_over(entered_at) for entered_at in (100.0, 105.0, 106.0)] == [True, True, False]
    clock[0] = 150.0
    assert [timeout.is_over(entered_at) for entered_at in (124.0, 126.0)] == [True, False]
    timeout.record_success()
    assert not timeout.is_over(100.0)
