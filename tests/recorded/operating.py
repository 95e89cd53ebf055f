"""An operator: `python -m tests.recorded.operating URL FILE ORDERS BEGAN`.

Gives the orders of the file ORDERS, a JSON list of [seconds, [word, ...]], on the command line, each no sooner than its
time after BEGAN (of the monotonic clock). Orders whose time is over when it begins are not given."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from tests.recorded.record import Record

TIMEOUT_S = 60.0


def main(url: str, file: str, orders: str, began: str) -> None:
    """Give all of them."""
    record = Record(Path(file))
    environment = {**os.environ, "SUBLET_DATABASE_URL": url}
    begins_s = time.monotonic() - float(began)
    for at_s, words in json.loads(Path(orders).read_text()):
        if at_s < begins_s:
            continue
        time.sleep(max(float(began) + at_s - time.monotonic(), 0.0))
        record.write("order", words=words)
        command = [sys.executable, "-m", "sublet.cli", *words]
        try:
            done = subprocess.run(
                command, check=False, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
            )
            said = (done.stdout + done.stderr)[-400:]
            record.write("ordered", words=words, code=done.returncode, said=said)
        except subprocess.TimeoutExpired:
            record.write("ordered", words=words, code=None, said="killed after its time")


if __name__ == "__main__":
    main(*sys.argv[1:])
