"""An operator process: `python -m tests.recorded.operating URL FILE ORDERS BEGAN`.

It runs the commands of the file ORDERS, a JSON list of [seconds, [word, ...]], each no sooner than its time after BEGAN
(of the monotonic clock), those of one time in parallel. Commands whose time is over at its start are skipped.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path

from tests.recorded.history import Record

TIMEOUT_S = 60.0


def main(url: str, file: str, orders: str, began: str) -> None:
    record, environment = Record(Path(file)), {**os.environ, "SUBLET_DATABASE_URL": url}
    begins_s = time.monotonic() - float(began)
    for at_s, together in itertools.groupby(json.loads(Path(orders).read_text()), itemgetter(0)):
        if at_s < begins_s:
            continue
        time.sleep(max(float(began) + at_s - time.monotonic(), 0.0))
        given = [(words, _give(record, words, environment)) for _, words in together]
        for words, process in given:
            _await(record, words, process)


def _give(record: Record, words: Sequence[str], environment: dict[str, str]) -> subprocess.Popen[str]:
    record.write("order", words=words)
    command = [sys.executable, "-m", "sublet.cli", *words]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True
    )


def _await(record: Record, words: Sequence[str], process: subprocess.Popen[str]) -> None:
    try:
        said, _ = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        said, _ = process.communicate()
    record.write("ordered", words=words, code=process.returncode, said=said[-400:])


if __name__ == "__main__":
    main(*sys.argv[1:])
