"""The work of a task on a batch: records it, then simulates work."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from sublet.demo.flights import find_rows


def record_and_work(directory: str, seconds_per_message: float, batch: Any) -> None:
    """Record every delivered message in this process's own file, before progress can be reported."""
    record = {
        "stream_id": batch.stream_id,
        "grant_id": batch.grant_id,
        "offsets": batch.table.column("offset").to_pylist(),
        "rows": find_rows(batch.table.column("value")),
        "at": time.time(),
    }
    with (Path(directory) / f"{os.getpid()}.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")
    time.sleep(len(batch) * seconds_per_message)
