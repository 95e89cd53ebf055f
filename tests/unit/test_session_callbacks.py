"""Whose callback is called for what."""

from __future__ import annotations

import pytest

from sublet_protocol.pubsub.agent_side_events import ConnectionLostReason, ReportConnectionLost
from sublet_protocol.pubsub.callback_registry import CallbackRegistry
from sublet_protocol.pubsub.model import MailboxOverflow, SequencedMessage

ALL, KEY = ("logs", None), ("logs", "k")


class Calls:
    """Callbacks that note their names."""

    def __init__(self, **subjects: tuple[str, str | None]) -> None:
        self.calls: list[str] = []
        self.callbacks = CallbackRegistry(
            lambda delivery: self.calls.append("own"), lambda lost: self.calls.append("own")
        )
        for name, subject in subjects.items():
            self.put(subject, name)

    def put(self, subject: tuple[str, str | None], name: str) -> None:
        self.callbacks.register(subject, lambda delivery: self.calls.append(name), lambda lost: self.calls.append(name))

    def said(self) -> list[str]:
        calls, self.calls = self.calls, []
        return calls


def lost(
    *subjects: tuple[str, str | None], reason: ConnectionLostReason = ConnectionLostReason.UNREACHABLE
) -> ReportConnectionLost:
    return ReportConnectionLost(reason, "why", subjects)


@pytest.mark.conforms("R3")
def test_the_nearest_callback_is_called() -> None:
    calls = Calls()
    message = SequencedMessage(1, "logs", "k", "m")
    for subject, name in ((None, "own"), (ALL, "all"), (KEY, "key")):
        if subject is not None:
            calls.put(subject, name)
        calls.callbacks.deliver([message])
        assert calls.said() == [name]
    calls.callbacks.deliver([SequencedMessage(2, "logs", "other", "m"), SequencedMessage(3, "price", "k", "m")])
    assert calls.said() == ["all", "own"]
    calls.callbacks.register(KEY, None, lambda lost: None)  # a failure callback alone takes no messages
    calls.callbacks.deliver([message])
    assert calls.said() == ["all"]
    calls.callbacks.unregister(ALL)
    calls.callbacks.deliver([message])
    assert calls.said() == ["own"]


@pytest.mark.conforms("R10")
def test_a_gap_is_one_call_of_each_callback() -> None:
    calls = Calls(all=ALL, key=KEY, price=("price", None))

    def shared(delivery: SequencedMessage) -> None:
        calls.calls.append("shared")

    for number in range(5):
        calls.callbacks.register(("logs", str(number)), shared, None)
    calls.callbacks.deliver([SequencedMessage(1, "", "", MailboxOverflow(3, ("logs", "chat")))])
    assert calls.said() == ["own", "all", "key", "shared"]


@pytest.mark.conforms("R9")
def test_a_loss_is_one_call_of_each_it_names(caplog: pytest.LogCaptureFixture) -> None:
    """And of none where it names what has no callback, or one for messages alone."""
    calls = Calls(all=ALL, key=KEY)
    calls.callbacks.register(("logs", "for messages"), lambda delivery: None, None)
    calls.put(("logs", "not in it"), "none")
    calls.callbacks.notify_lost(lost(KEY, ALL, ("logs", "without a callback"), ("logs", "for messages")))
    assert calls.said() == ["own", "key", "all"]
    assert not caplog.records, "and that is no error"
    calls.callbacks.notify_failed(lost(ALL))
    assert calls.said() == ["all"]


@pytest.mark.conforms("R9")
def test_a_final_loss_forgets_the_subscription() -> None:
    calls = Calls(key=KEY, all=ALL)
    calls.callbacks.notify_rejected(KEY, "no")
    assert calls.said() == ["key"]
    assert calls.callbacks.subjects() == (ALL,)
    calls.callbacks.notify_lost(lost(KEY, ALL, reason=ConnectionLostReason.REJECTED))
    assert calls.said() == ["own", "all"]
    assert calls.callbacks.subjects() == ()


def test_a_callback_that_raises_harms_nobody() -> None:
    calls = Calls()

    def raising(lost: ReportConnectionLost) -> None:
        calls.callbacks.unregister(KEY)
        raise RuntimeError("mine")

    calls.callbacks.register(("logs", "bad"), None, raising)
    calls.put(KEY, "key")
    calls.put(ALL, "all")
    calls.callbacks.notify_lost(lost(("logs", "bad"), KEY, ALL))
    assert calls.said() == ["own", "all"]
