"""Shutdown of a task on a signal, when the executor or the driver is gone.

The running call is finished and counted, everything is handed over, then the process ends. A call that takes longer
than the handing over can wait is cut off by SystemExit.

A signal's handler interrupts the main thread at any point. So it only posts to the network loop, which
does the rest and takes its locks there.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any, Self

from sublet_borrower.util.network_loop import network_loop

SIGNALS = (signal.SIGTERM, signal.SIGHUP)
"""SIGHUP is what Spark's daemon sends its workers when the executor or the driver is gone."""


class ShutdownSignalHandler:
    """Handles the signals inside its `with` block; if one came, the block ends with SystemExit.

    `leave` is called at the first signal, on the network thread; a `user_call` that is still running `call_s` seconds
    later is cut off. Further signals have no effect.
    """

    def __init__(self, leave: Callable[[], None], call_s: float) -> None:
        self._leave, self._call_s = leave, call_s
        self.received_signal: int | None = None
        self.cut = False
        self._in_calls = self._time_is_over = False
        self._loop = network_loop()
        self._previous_handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._previous_handlers = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)
        if self.received_signal is not None:
            raise SystemExit(128 + self.received_signal)

    @contextlib.contextmanager
    def user_call(self) -> Iterator[None]:
        """Run the user's code within this block, and nowhere else."""
        self._in_calls = True
        try:
            yield
        finally:
            self._in_calls = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.received_signal is None:
            self.received_signal = number
            self._loop.call_soon_threadsafe(self._begin)
        elif self._time_is_over and self._in_calls:
            self.cut = True
            raise SystemExit(128 + self.received_signal)

    # --- on the loop ------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._loop.call_later(self._call_s, self._cut_off)
        self._leave()

    def _cut_off(self) -> None:
        """Send the signal to the main thread itself, which interrupts a sleep or a read too."""
        self._time_is_over = True
        thread = threading.main_thread().ident
        if self._in_calls and self.received_signal is not None and thread is not None:
            signal.pthread_kill(thread, self.received_signal)
