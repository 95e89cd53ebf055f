"""A consumer: `python -m tests.processes.consumer URL SUBSCRIPTION FILE [PAUSE_S [NAME]]`.

Writes a line {"stream", "grant", "offsets", "at"} to FILE for every batch it is given, before the batch is
acknowledged, works on it for PAUSE_S, and writes {"done": [stream, first offset], "head_counters": how it has learned
of new messages so far, "connections": what has happened between it and each node}. NAME is a stable session's. SIGTERM
makes it leave gracefully and write both once more; where its subscription ends, it writes {"ended": reason} and fails.
Of an atomic group it writes {"consumed": [epoch, ...]} whenever it is notified how far that has come.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

from msgspec.structs import asdict

from sublet_borrower.consumer.session import Session
from sublet_protocol.domain.epoch_frontiers import GroupFrontier
from sublet_protocol.domain.errors import SubscriptionEnded


def main(url: str, subscription: str, file: str, pause_s: str = "0", name: str = "") -> None:
    with Path(file).open("a") as record:

        def write(line: dict[str, Any]) -> None:
            record.write(json.dumps(line) + "\n")
            record.flush()

        def announced(found: GroupFrontier) -> None:
            write({"consumed": found.consumed.least})

        with Session(
            subscription,
            url,
            starting_position="earliest",
            max_batch_bytes=1,
            name=name or None,
            on_epochs_consumed=announced,
        ) as session:
            signal.signal(signal.SIGTERM, lambda *_: session.drain())
            write({"ready": True})
            try:
                for batch in session:
                    offsets = batch.table.column("offset").to_pylist()
                    write({"stream": batch.stream_id, "grant": batch.grant_id, "offsets": offsets, "at": time.time()})
                    time.sleep(float(pause_s))
                    write({"done": [batch.stream_id, offsets[0]], **_how(session)})
            except SubscriptionEnded as end:
                write({"ended": end.reason})
                raise
            write(_how(session))


def _how(session: Session) -> dict[str, Any]:
    connections = {node: asdict(counters) for node, counters in session.connections.items()}
    return {"head_counters": asdict(session.head_counters), "connections": connections}


if __name__ == "__main__":
    main(*sys.argv[1:])
