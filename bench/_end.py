"""One end of a system under measurement, run as a process.

`python -m bench._end publish SYSTEM ADDRESS TOPIC RATE WARM_UP_S SECONDS` and `python -m bench._end consume SYSTEM
ADDRESS TOPIC FILE`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from bench.peers.known import SYSTEMS
from bench.peers.load import Load, Recorder


def publish(system: str, address: str, topic: str, rate: str, warm_up_s: str, seconds: str) -> None:
    """Publish under this load."""
    SYSTEMS[system].publish(address, topic, Load(int(rate), float(warm_up_s), float(seconds)))


def consume(system: str, address: str, topic: str, file: str) -> None:
    """Consume, and write what is measured to the file."""
    SYSTEMS[system].consume(address, topic, Recorder(Path(file)))


if __name__ == "__main__":
    end = publish if sys.argv[1] == "publish" else consume
    end(*sys.argv[2:])
