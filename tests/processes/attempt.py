"""A task's attempt as an executor runs it, without Spark.

`python -m tests.processes.attempt URL SUBSCRIPTION FILE WORK SECONDS`: its function writes a line to FILE as
`tests.processes.consumer` does, works for SECONDS, and writes {"done": true}. WORK is how: `sleep`; `hold` the
interpreter, as C code may, in the first call only; `dodge` what would end it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import sys
import time
from pathlib import Path
from typing import Any

from sublet_borrower.consumer.runner import RetryPolicy
from sublet_borrower.settings import BorrowerSettings
from sublet_borrower.spark.job.driver_endpoint import DriverReportServer
from sublet_borrower.spark.job.exception_transport import unpack
from sublet_borrower.spark.job.task import TaskAttempt, TaskSpec, run_attempt
from sublet_borrower.streams.batch import Batch


class Function:
    """The user's."""

    def __init__(self, file: str, work: str, seconds: float) -> None:
        self._file, self._work, self._seconds = Path(file), work, seconds

    def __call__(self, batch: Batch) -> None:
        offsets = batch.table.column("offset").to_pylist()
        self.write({"stream": batch.stream_id, "grant": batch.grant_id, "offsets": offsets, "at": time.time()})
        getattr(self, f"_{self._work}")(batch)
        self.write({"done": True})

    def write(self, line: dict[str, Any]) -> None:
        """A line of the record, whole."""
        with self._file.open("a") as record:
            record.write(json.dumps(line) + "\n")

    def _sleep(self, batch: Batch) -> None:
        time.sleep(self._seconds)

    def _dodge(self, batch: Batch) -> None:
        end = time.monotonic() + self._seconds
        while time.monotonic() < end:
            with contextlib.suppress(SystemExit):
                time.sleep(0.1)

    def _hold(self, batch: Batch) -> None:
        """A foreign call that keeps the interpreter's lock, once."""
        ctypes.PyDLL(None).usleep(int(self._seconds * 1e6))
        self._seconds = 0.0


def main(url: str, subscription: str, file: str, work: str, seconds: str) -> None:
    """Until it gets SIGTERM."""
    function = Function(file, work, float(seconds))
    control = DriverReportServer("127.0.0.1", "127.0.0.1", lambda: None)
    task = TaskSpec(
        subscription,
        function,
        address=url,
        driver=control.address,
        token=control.token,
        driver_host="here",
        name="attempt",
        nodes=None,
        weight=1.0,
        starting_position="earliest",
        max_batch_bytes=1,
        whole_epochs=False,
        policy=RetryPolicy(),
        settings=BorrowerSettings.from_env(),
        schema="sublet",
        on_attempt=None,
    )
    summary = run_attempt(task, TaskAttempt(0, 0, f"attempt-{Path(file).stem}"))
    if summary.failure is not None:
        raise unpack(summary.failure)


if __name__ == "__main__":
    main(*sys.argv[1:])
