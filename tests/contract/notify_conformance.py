"""What every notification driver must do, whoever wrote it: `checks`, run one by one on a `Subject`.

For a driver of your own, registered in the entry point group `sublet.notify`, and with this repository on PYTHONPATH:

    import pytest
    from tests.contract.notify_conformance import Subject, checks

    class Mine(Subject):
        def cut(self, receiver): ...          # and `rubbish` and `deaf`, see Subject

    @pytest.mark.parametrize("check", checks("mine"), ids=lambda check: check.__name__)
    def test_my_driver(check):
        check(Mine("mine", DATABASE_URL))

Those are left out that ask for what the driver's capabilities deny. None of them looks at a driver's name.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from sublet_storage.notify.drivers.base import (
    NotificationDriver,
    NotificationDriverCapabilities,
    NotificationReceiver,
    NotificationSender,
)
from sublet_storage.notify.drivers.registry import driver_name, load_driver
from tests.kit import eventually
from tests.processes.forking import in_a_child

BLOCKED_S = 60.0
"""1500 sends of which each waits, be it for a moment, take longer."""
ROOT = Path(__file__).parents[2]

Check = Callable[["Subject"], None]
Need = Callable[[NotificationDriverCapabilities], bool]
_CHECKS: dict[Check, Need] = {}


class Subject:
    """A driver under test, and what the suite needs to do to it. The last three are asked of those that push."""

    def __init__(self, name: str, url: str) -> None:
        self.name, self.url = name, url

    def driver(self) -> NotificationDriver:
        """Return the driver, found by its entry point."""
        return load_driver(self.name)(self.url)

    def cut(self, receiver: NotificationReceiver) -> None:
        """Break the way to this receiver as the world might; the driver restores it by itself."""
        raise NotImplementedError

    def rubbish(self, receiver: NotificationReceiver) -> None:
        """Bring to this receiver, from outside, whatever it should never see. None of it may count as a message."""
        raise NotImplementedError

    def deaf(self) -> AbstractContextManager[str]:
        """Yield the endpoint of a receiver that takes nothing."""
        raise NotImplementedError


class Received:
    """A receiver, and all that it reported, in order: `connected`, `lost`, and messages."""

    def __init__(self, driver: NotificationDriver) -> None:
        self.reported: list[str | bytes] = []
        self.fails = False
        self.receiver = driver.open_receiver(self._message, lambda: self.reported.append("connected"), self._lost)
        eventually(lambda: self.reported, message="on_connected is never called")

    @property
    def messages(self) -> list[bytes]:
        """Return the messages received so far."""
        return [each for each in list(self.reported) if isinstance(each, bytes)]

    @property
    def events(self) -> list[str]:
        """Return the reports of connections and losses so far, in order."""
        return [each for each in list(self.reported) if isinstance(each, str)]

    def _message(self, message: bytes) -> None:
        self.reported.append(message)
        if self.fails:
            raise ValueError("this handler fails")

    def _lost(self) -> None:
        self.reported.append("lost")


@contextlib.contextmanager
def receiving(driver: NotificationDriver, count: int = 1) -> Iterator[list[Received]]:
    """So many open receivers; each is closed afterwards, and must have begun with being connected."""
    received = [Received(driver) for _ in range(count)]
    try:
        yield received
    finally:
        for each in received:
            each.receiver.close()
            assert each.reported[0] == "connected", "something was reported before on_connected"


@contextlib.contextmanager
def sending(
    driver: NotificationDriver, received: Sequence[Received], count: int = 1
) -> Iterator[list[NotificationSender]]:
    """So many open senders towards these receivers, closed afterwards."""
    senders = [driver.open_sender([each.receiver.endpoint for each in received]) for _ in range(count)]
    try:
        yield senders
    finally:
        for sender in senders:
            sender.close()


@contextlib.contextmanager
def connected(driver: NotificationDriver) -> Iterator[tuple[Received, NotificationSender]]:
    """One of each."""
    with receiving(driver) as (received,), sending(driver, [received]) as (sender,):
        yield received, sender


def check_if(able: Need) -> Callable[[Check], Check]:
    """Make it a check of the drivers with these capabilities."""

    def register(check: Check) -> Check:
        _CHECKS[check] = able
        return check

    return register


check = check_if(lambda can: True)
check_of_push = check_if(lambda can: can.is_push)


def arrives(sender: NotificationSender, received: Received, message: bytes) -> None:
    """Send it, again and again, until it is there: for ways that are only just being restored."""

    def reported() -> bool:
        sender.send(message)
        return message in received.messages

    eventually(reported, 20, "nothing arrives any more", every_s=0.05)


def large(driver: NotificationDriver) -> bytes:
    """Return a message of 64 KiB, or of as many bytes as the driver takes."""
    return b"x" * min(driver.capabilities.payload_limit or 1 << 16, 1 << 16)


def all_of(received: Sequence[Received], fact: Callable[[Received], bool]) -> None:
    """Wait until it is true of each of them."""
    eventually(
        lambda: all(fact(each) for each in received), 10, lambda: f"{[each.reported[-9:] for each in received]}"[:800]
    )


# --- the checks -----------------------------------------------------------------------------------------------------


@check
def it_goes_by_its_name(subject: Subject) -> None:
    """The driver's name is its entry point's, and its endpoints begin with it and are short lines of plain text."""
    driver = subject.driver()
    assert driver.name == subject.name
    with receiving(driver) as (received,):
        endpoint = received.receiver.endpoint
        assert driver_name(endpoint) == subject.name
        assert re.fullmatch("[!-~]{1,255}", endpoint)


@check_if(lambda can: not can.is_push)
def without_push_nothing_arrives(subject: Subject) -> None:
    """A driver without push sends nothing, and `send` does not raise."""
    driver = subject.driver()
    with receiving(driver) as (received,):
        with sending(driver, [received]) as (sender,):
            sender.send(b"message")
        assert received.reported == ["connected"]


@check_of_push
def messages_arrive_complete_at_every_receiver(subject: Subject) -> None:
    """Test several receivers and several senders with any bytes."""
    driver = subject.driver()
    odd = [b"", b"\0", b"plain", "ä→𝄞".encode(), b"\xff\xfe", bytes(range(256)), b"'\\\"\r\n", b"t0", b"b0%"]
    with receiving(driver, 3) as received, sending(driver, received, 2) as senders:
        sent = {bytes([number]) + message for number in range(2) for message in odd} | {b""}
        for number, sender in enumerate(senders):
            for message in odd:
                sender.send(bytes([number]) + message)
            sender.send(b"")
        all_of(received, lambda each: set(each.messages) == sent)
        assert [sender.dropped for sender in senders] == [0, 0]


@check_of_push
def equal_messages_are_not_folded(subject: Subject) -> None:
    """A message that is sent twice arrives twice."""
    driver = subject.driver()
    with connected(driver) as (received, sender):
        for _ in range(50):
            sender.send(b"again")
        least = 50 - sender.dropped if driver.capabilities.is_lossless else 2
        eventually(lambda: received.messages.count(b"again") >= least)


@check_of_push
def the_payload_limit_holds(subject: Subject) -> None:
    """Up to the limit a message arrives, whatever bytes it consists of; a longer one is counted, and harms nobody."""
    driver = subject.driver()
    limit = driver.capabilities.payload_limit
    longest = [byte * (limit or 1 << 20) for byte in (b"a", b"\0", b"\xff", b"\x80")]
    with connected(driver) as (received, sender):
        for message in longest:
            sender.send(message)
            all_of([received], lambda each: each.messages[-1:] == [message])  # noqa: B023
        assert sender.dropped == 0
        if limit is not None:
            sender.send(b"a" * (limit + 1))
            assert sender.dropped == 1
        sender.send(b"next")
        eventually(lambda: b"next" in received.messages)
        assert received.messages == [*longest, b"next"]


@check_if(lambda can: can.is_push and can.is_ordered)
def a_senders_messages_keep_their_order(subject: Subject) -> None:
    """Applies to drivers that declare it."""
    driver = subject.driver()
    with receiving(driver) as (received,), sending(driver, [received], 2) as senders:
        for number in range(500):
            for name, sender in zip((b"a", b"b"), senders, strict=True):
                sender.send(b"%s%06d" % (name, number))
        eventually(lambda: {b"a000499", b"b000499"} <= set(received.messages))
        for name in (b"a", b"b"):
            own = [message for message in received.messages if message.startswith(name)]
            assert own == sorted(own)


@check_if(lambda can: can.is_push and can.is_lossless)
def what_is_not_counted_as_dropped_arrives(subject: Subject) -> None:
    """Send more at once than a driver accepts that declares to lose nothing."""
    driver = subject.driver()
    with receiving(driver, 2) as received, sending(driver, received) as (sender,):
        for number in range(5000):
            sender.send(b"%d" % number)
        arrives(sender, received[0], b"last")
        all_of(received, lambda each: b"last" in each.messages)
        all_of(received, lambda each: len([m for m in each.messages if m != b"last"]) >= 5000 - sender.dropped)


@check_of_push
def a_path_that_breaks_is_reported_and_comes_back(subject: Subject) -> None:
    """Lost, then connected again, by itself; then messages arrive."""
    with connected(subject.driver()) as (received, sender):
        arrives(sender, received, b"before")
        subject.cut(received.receiver)
        eventually(lambda: received.events[:2] == ["connected", "lost"], message=lambda: f"reported {received.events}")
        eventually(lambda: received.events[2:] == ["connected"], message=lambda: f"reported {received.events}")
        arrives(sender, received, b"after")


@check_of_push
def a_send_never_blocks(subject: Subject) -> None:
    """A send returns at once without a receiver, and with one that takes nothing."""
    driver = subject.driver()
    with receiving(driver) as (gone,):
        nobody = gone.receiver.endpoint
    message = large(driver)
    with subject.deaf() as deaf:
        for endpoint in (nobody, deaf):
            sender = driver.open_sender([endpoint])
            begun = time.monotonic()
            for _ in range(1500):
                sender.send(message)
            sender.close()
            assert time.monotonic() - begun < BLOCKED_S, driver_name(endpoint)


@check_of_push
def who_takes_nothing_holds_up_nobody_else(subject: Subject) -> None:
    """Messages to two endpoints arrive at one while the other takes nothing."""
    driver = subject.driver()
    message = large(driver)
    with subject.deaf() as deaf, receiving(driver) as (received,):
        sender = driver.open_sender([deaf, received.receiver.endpoint])
        for _ in range(1500):
            sender.send(message)
        arrives(sender, received, b"received")
        sender.close()


@check_of_push
def what_was_sent_last_arrives(subject: Subject) -> None:
    """A sender that is opened, used and closed at once, as a short-lived process does, loses nothing."""
    driver = subject.driver()
    with receiving(driver) as (received,):
        for attempt in range(1 if driver.capabilities.is_lossless else 3):
            with sending(driver, [received]) as (sender,):
                sender.send(b"%d" % attempt)
        eventually(lambda: received.messages)


@check_of_push
def a_handler_that_raises_stops_nothing(subject: Subject) -> None:
    """The next message is passed to the handler all the same."""
    driver = subject.driver()
    with connected(driver) as (received, sender):
        received.fails = True
        arrives(sender, received, b"first")
        arrives(sender, received, b"second")
        assert received.events == ["connected"] or not driver.capabilities.is_lossless


@check_of_push
def rubbish_on_the_wire_is_survived(subject: Subject) -> None:
    """An invalid message is dropped, and the next one arrives."""
    with connected(subject.driver()) as (received, sender):
        arrives(sender, received, b"before")
        subject.rubbish(received.receiver)
        arrives(sender, received, b"after")
        assert set(received.messages) == {b"before", b"after"}


@check
def endpoints_that_are_none_are_survived(subject: Subject) -> None:
    """An unreachable endpoint in the directory affects neither the caller nor other endpoints."""
    driver = subject.driver()
    with receiving(driver) as (received,):
        nonsense = [f"{subject.name}:{rest}" for rest in ("", "\n", "tcp://nowhere:99999?key=x")]
        sender = driver.open_sender([*nonsense, "", "other:x", received.receiver.endpoint])
        sender.send(b"message")
        if driver.capabilities.is_push:
            arrives(sender, received, b"message")
        sender.close()
        alone = driver.open_sender([])
        alone.send(b"to nobody")
        alone.close()
        assert set(received.messages) <= {b"message"}


@check
def closing_lets_go_of_everything(subject: Subject) -> None:
    """No thread, file or callback remains; closing again is harmless, and a closed sender only counts."""
    before = _possessions()
    driver = subject.driver()
    assert _possessions() <= before, "a driver that nothing was asked of has opened something"
    with receiving(driver, 2) as received, sending(driver, received, 2) as senders:
        for sender in senders:
            sender.send(b"message")
        if driver.capabilities.is_push:
            all_of(received, lambda each: bool(each.messages))
    reported = [list(each.reported) for each in received]
    for close in [sender.close for sender in senders] + [each.receiver.close for each in received]:
        close()
    dropped = senders[0].dropped
    senders[0].send(b"too late")
    assert senders[0].dropped == dropped + driver.capabilities.is_push
    eventually(lambda: _possessions() <= before, message=lambda: f"left: {_possessions() - before}")
    assert [list(each.reported) for each in received] == reported


@check_of_push
def a_fork_shares_nothing(subject: Subject) -> None:
    """The copies in a forked process send nothing and close nothing, and it can open its own. In a process of its own,
    as what others have left in this one must not come along."""
    command = [sys.executable, "-m", "tests.contract.notify_conformance", subject.name, subject.url]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]


def checks(name: str) -> list[Check]:
    """Return the checks that a driver has to pass."""
    can = load_driver(name)("postgresql:///nowhere").capabilities
    return [check for check, able in _CHECKS.items() if able(can)]


def _possessions() -> set[str]:
    """Threads of Python, threads of the system, and open files with what they are."""
    found = {f"thread {thread.name} {thread.ident}" for thread in threading.enumerate()}
    found |= {f"task {task}" for task in os.listdir("/proc/self/task")}
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.add(f"{number} {Path('/proc/self/fd', number).readlink()}")
    return found


def _check_a_fork(name: str, url: str) -> None:
    driver = load_driver(name)(url)
    with connected(driver) as (received, sender):
        arrives(sender, received, b"before")

        def in_the_child() -> None:
            sender.send(b"of the copy")
            assert sender.dropped == 1, "the copy has sent"
            sender.close()
            received.receiver.close()
            own = driver.open_sender([received.receiver.endpoint])
            own.send(b"of the child")
            own.close()

        in_a_child(in_the_child)
        eventually(lambda: b"of the child" in received.messages)
        arrives(sender, received, b"after")
        assert set(received.messages) == {b"before", b"of the child", b"after"}
        assert sender.dropped == 0


if __name__ == "__main__":
    _check_a_fork(sys.argv[1], sys.argv[2])
