"""What the tests' tasks run. Python workers import it: standard library only."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass
class Recorder:
    """A function that writes each batch to its attempt's file before progress is made, then works for `pause_s`.

    A batch with a message whose value is `slow_value` takes `slow_s` instead; one whose value is `bad_value` fails,
    and at `exit_value` it calls `sys.exit(3)`.
    """

    directory: str
    pause_s: float = 0.0
    slow_value: bytes | None = None
    slow_s: float = 0.0
    bad_value: bytes | None = None
    exit_value: bytes | None = None

    def begin(self, attempt: Any) -> None:
        self._write({"session": attempt.session, "partition": attempt.partition, "pid": os.getpid()})

    def __call__(self, batch: Any) -> None:
        values = batch.table.column("value").to_pylist()
        if self.bad_value in values and self.bad_value is not None:
            raise ValueError("cannot work on this")
        if self.exit_value in values and self.exit_value is not None:
            sys.exit(3)
        offsets = batch.table.column("offset").to_pylist()
        epochs = [epoch and epoch[0] for epoch in batch.table.column("epoch").to_pylist()]
        line = {"stream": batch.stream_id, "grant": batch.grant_id, "offsets": offsets, "at": time.time()}
        self._write(line if epochs == [None] * len(epochs) else {**line, "epochs": epochs})
        time.sleep(self.slow_s if self.slow_value in values and self.slow_value is not None else self.pause_s)

    def _write(self, line: dict[str, Any]) -> None:
        """To the task attempt's own file, whole lines only."""
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        name = f"p{context.partitionId()}-a{context.attemptNumber()}-t{context.taskAttemptId()}-{os.getpid()}.jsonl"
        with Path(self.directory, name).open("a") as record:
            record.write(json.dumps(line) + "\n")


@dataclass(frozen=True)
class AttemptRecord:
    """What one task attempt has written so far."""

    session: str
    partition: int
    pid: int
    lines: tuple[dict[str, Any], ...]


def attempts(directory: Path) -> list[AttemptRecord]:
    """Of every attempt that has begun, in no order."""
    found = []
    for path in sorted(directory.glob("*.jsonl")):
        lines = [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        if lines:
            found.append(AttemptRecord(lines[0]["session"], lines[0]["partition"], lines[0]["pid"], tuple(lines[1:])))
    return found
