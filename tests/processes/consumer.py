"""A consumer: `python -m tests.processes.consumer URL SUBSCRIPTION FILE [PAUSE_S]`.

Writes a line {"stream", "grant", "offsets", "at"} to FILE for every batch it is given, before the batch is
acknowledged, then works on it for PAUSE_S. SIGTERM makes it leave gracefully.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path

from borrower.session import Session


def main(url: str, subscription: str, file: str, pause_s: str = "0") -> None:
    """Consume until SIGTERM."""
    with Path(file).open("a") as record, Session(subscription, url, start="earliest", batch_bytes=1) as session:
        signal.signal(signal.SIGTERM, lambda *_: session.drain())
        record.write(json.dumps({"ready": True}) + "\n")
        record.flush()
        for batch in session:
            offsets = batch.table.column("offset").to_pylist()
            line = {"stream": batch.stream_id, "grant": batch.grant_id, "offsets": offsets, "at": time.time()}
            record.write(json.dumps(line) + "\n")
            record.flush()
            time.sleep(float(pause_s))


if __name__ == "__main__":
    main(*sys.argv[1:])
