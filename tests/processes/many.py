"""One agent with many subscriptions: `python -m tests.processes.many URL FILE PATTERN COUNT`.

It subscribes to PATTERN with {} replaced by 0, 1, ... COUNT - 1, and consumes nothing. Every time it is given or loses
a stream it writes {"group": number, "stream", "grant", "held": true or false} to FILE. It ends with SIGTERM.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
from pathlib import Path
from typing import Any, TextIO

from sublet_borrower.agent.agent_loop import AgentLoop
from sublet_borrower.agent.session_event_queue import SessionEventQueue
from sublet_borrower.machine.agent import SubscriptionClosed
from sublet_borrower.machine.events import StreamGranted, StreamRemoved
from sublet_borrower.settings import BorrowerSettings
from sublet_storage.db.connect import connect
from sublet_storage.node_directory import list_live_nodes

POLL_INTERVAL_S = 0.05


def main(url: str, file: str, pattern: str, count: str) -> None:
    over = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: over.set())

    def find() -> list[str]:
        with connect(url) as connection:
            return [node.address for node in list_live_nodes(connection)]

    agent = AgentLoop(find, BorrowerSettings.from_env())
    inboxes = [SessionEventQueue() for _ in range(int(count))]
    for number, inbox in enumerate(inboxes):
        agent.subscribe(pattern.replace("{}", str(number)), inbox)
    with Path(file).open("a") as record:
        while not over.wait(POLL_INTERVAL_S):
            for number, inbox in enumerate(inboxes):
                _write(record, number, inbox)
            record.flush()


def _write(record: TextIO, number: int, inbox: SessionEventQueue) -> None:
    line: dict[str, Any]
    for event in inbox.take():
        match event:
            case StreamGranted(grant):
                line = {"group": number, "stream": grant.stream_id, "grant": grant.grant_id, "held": True}
            case StreamRemoved(stream_id, grant_id):
                line = {"group": number, "stream": stream_id, "grant": grant_id, "held": False}
            case SubscriptionClosed(reason=reason):
                line = {"group": number, "ended": reason.value}
            case _:
                continue
        record.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
