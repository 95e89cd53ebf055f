"""A consumer that joins and leaves on command: `python -m bench._member URL SUBSCRIPTION FILE PAUSE_S`.

Its standard input has the commands `join` (open a session) and `leave` (drain and close it), a line each; the process
ends when it is closed. It writes a line {"stream", "grant", "at_us"} to FILE for the first batch under every grant: the
time at which `poll` returned it. PAUSE_S is the pause between two batches, during which the session handles revokes.
"""

from __future__ import annotations

import json
import queue
import sys
import threading
import time
from pathlib import Path

from sublet_borrower.consumer.session import Session

POLL_INTERVAL_S = 0.05
"""Interval at which it checks for commands while there is nothing to deliver."""


class Member:
    """Opens one session after another."""

    def __init__(self, url: str, subscription: str, file: Path, pause_s: float) -> None:
        self._url, self._subscription, self._pause_s = url, subscription, pause_s
        self._record = file.open("a")
        self._seen: set[tuple[int, int]] = set()
        self._said: queue.SimpleQueue[str] = queue.SimpleQueue()

    def apply_commands(self) -> None:
        """Execute commands until standard input is closed."""
        threading.Thread(target=self._listen, daemon=True).start()
        while self._said.get() == "join":
            with Session(self._subscription, self._url, starting_position="earliest", max_batch_bytes=1) as session:
                self._consume(session)

    def _listen(self) -> None:
        for line in sys.stdin:
            self._said.put(line.strip())
        self._said.put("end")

    def _consume(self, session: Session) -> None:
        while self._said.empty():
            batch = session.poll(POLL_INTERVAL_S)
            if batch is None:
                continue
            self._note(batch.stream_id, batch.grant_id, time.time_ns() // 1000)
            batch.ack()
            if self._pause_s:
                session.wait(self._pause_s)
        if self._said.get() == "end":
            self._said.put("end")

    def _note(self, stream: int, grant: int, at_us: int) -> None:
        if (stream, grant) not in self._seen:
            self._seen.add((stream, grant))
            self._record.write(json.dumps({"stream": stream, "grant": grant, "at_us": at_us}) + "\n")
            self._record.flush()


def main(url: str, subscription: str, file: str, pause_s: str) -> None:
    """Run the member."""
    Member(url, subscription, Path(file), float(pause_s)).apply_commands()


if __name__ == "__main__":
    main(*sys.argv[1:])
