"""Signals that end a command: held back while it must not be broken into, and not for ever. And the input of one, which
nothing cuts short unnoticed."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from io import FileIO

import pytest

from sublet.cli.base.command import SignalReceived, defer_signals, handle_signals
from sublet.cli.messages.input_records import read_lines
from sublet.cli.messages.publish import InputInterrupted, InputSignalHandler
from sublet_protocol.domain.errors import SubletError

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture(autouse=True)
def _no_handler_is_left_behind() -> Iterator[None]:
    # Whoever runs the tests may ignore some of them: nohup does, and a shell in the background.
    outside = {number: signal.signal(number, signal.SIG_DFL) for number in SIGNALS}
    before = [signal.getsignal(number) for number in SIGNALS]
    yield
    assert [signal.getsignal(number) for number in SIGNALS] == before
    for number, handler in outside.items():
        signal.signal(number, handler)


def reported(*numbers: signal.Signals, then: Exception | None = None) -> tuple[list[signal.Signals], int]:
    """Which of these signals found the work going on, one after the other, and which of them ended it."""
    done: list[signal.Signals] = []

    def work() -> None:
        with defer_signals():
            for number in numbers:
                signal.raise_signal(number)
                done.append(number)
            if then is not None:
                raise then

    with pytest.raises(SignalReceived) as ended:
        work()
    return done, ended.value.number


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_waits_for_the_end_of_the_work(number: signal.Signals) -> None:
    assert reported(number) == ([number], number)


def test_a_second_one_breaks_in() -> None:
    assert reported(signal.SIGINT, signal.SIGTERM) == ([signal.SIGINT], signal.SIGINT)


def test_a_command_ends_by_its_signal_and_no_error() -> None:
    """Such as one that follows from it."""
    assert reported(signal.SIGTERM, then=ConnectionError("the server got a signal too"))[1] == signal.SIGTERM


def test_an_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with defer_signals():
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_second_signal_aborts_what_is_published() -> None:
    handle = InputSignalHandler()
    handle(signal.SIGINT, None)
    assert handle.number == signal.SIGINT
    with FileIO(os.devnull) as source, pytest.raises(InputInterrupted):
        handle.wrap_read(source, "stdin")(1)
    with pytest.raises(KeyboardInterrupt):
        handle(signal.SIGTERM, None)


class NonBlockingInput(FileIO):
    """A pipe's end; `on_empty` is called where a read has found that nothing is there yet."""

    def __init__(self, descriptor: int, on_empty: Callable[[], None]) -> None:
        os.set_blocking(descriptor, False)
        super().__init__(descriptor)
        self._on_empty = on_empty

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(size)
        if data is None:
            self._on_empty()
        return data


def test_a_slow_input_has_not_ended() -> None:
    reader, writer = os.pipe()
    parts = [b"a\nb", b"c\n"]

    def go_on() -> None:
        if parts:
            os.write(writer, parts.pop(0))
        else:
            os.close(writer)

    with NonBlockingInput(reader, go_on) as source:
        assert list(read_lines(InputSignalHandler().wrap_read(source, "stdin"))) == [[b"a"], [b"bc"]]


def test_a_signal_ends_the_wait_for_more_input() -> None:
    reader, writer = os.pipe()
    handle = InputSignalHandler()
    interrupt = threading.Timer(0.05, signal.pthread_kill, (threading.get_ident(), signal.SIGTERM))
    with (
        FileIO(writer, "w"),
        NonBlockingInput(reader, interrupt.start) as source,
        handle_signals(handle),
        pytest.raises(InputInterrupted),
    ):
        handle.wrap_read(source, "stdin")(1)
    assert handle.number == signal.SIGTERM


def test_an_input_that_cannot_be_read_on_is_named() -> None:
    """And what was read before is published and counted, as before any other `SubletError`."""
    reader, writer = os.pipe()
    with FileIO(reader), FileIO(writer) as source:
        read = InputSignalHandler().wrap_read(source, "orders.txt")
        with pytest.raises(SubletError, match=r"^orders.txt cannot be read any further: Bad file descriptor\."):
            read(1)
