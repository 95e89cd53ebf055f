"""A leader node: `python -m tests.processes.node URL NAME`. Prints its address once it serves."""

from __future__ import annotations

import asyncio
import os
import sys

from leader.listen import Listen
from leader.node import NodeServer
from leader.settings import LeaderSettings


def main(url: str, name: str) -> None:
    """Serve until SIGTERM."""

    def announce(text: str) -> None:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()

    notify = os.environ.get("SUBLET_NOTIFY", "poll")
    listen = Listen.parse("127.0.0.1:0", insecure=False)
    asyncio.run(NodeServer(url, name, listen, LeaderSettings.from_env(), announce, notify).run())


if __name__ == "__main__":
    main(*sys.argv[1:])
