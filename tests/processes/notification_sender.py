"""Sends notifications until it is killed: `python -m tests.processes.notification_sender DRIVER URL ENDPOINT NAME`.

Every few milliseconds `NAME 0`, `NAME 1`, ... With a further argument `fork` it has a child that does nothing and
outlives it: the copies of what was open stay open.
"""

from __future__ import annotations

import os
import sys
import time

from sublet_storage.notify.drivers.registry import load_driver

INTERVAL_S = 0.005
CHILD_LIVES_S = 30


def main(driver: str, url: str, endpoint: str, name: str, fork: str = "") -> None:
    sender = load_driver(driver)(url).open_sender([endpoint])
    number = 0
    while True:
        sender.send(f"{name} {number}".encode())
        number += 1
        if fork and number == 100:
            child = os.fork()
            if child == 0:
                time.sleep(CHILD_LIVES_S)
                os._exit(0)
            sys.stdout.write(f"{child}\n")
            sys.stdout.flush()
        time.sleep(INTERVAL_S)


if __name__ == "__main__":
    main(*sys.argv[1:])
