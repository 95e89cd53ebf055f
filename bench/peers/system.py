"""Interface of a system that can be measured."""

from __future__ import annotations

from contextlib import AbstractContextManager
from enum import Enum
from pathlib import Path
from typing import Protocol

from bench.peers.load import Load, Recorder

MAX_UNACKNOWLEDGED = 4000
"""Messages that a peer's publisher may have unacknowledged; ours bounds its buffer by itself."""


class SystemUnavailable(Exception):
    """Raised if a system cannot be measured here; the message has the reason and a hint."""


class Role(Enum):
    """Role of a system in the comparison."""

    OURS = "ours"  # it is measured
    PEER = "peer"  # what ours is compared with
    LIMIT = "limit"  # what ours is built on, used alone


class System(Protocol):
    """A message system under one setting."""

    @property
    def key(self) -> str:
        """Return its name on the command line."""
        ...

    @property
    def name(self) -> str:
        """Return its name on the page."""
        ...

    @property
    def setting(self) -> str:
        """Return what distinguishes it from others of the same name."""
        ...

    @property
    def role(self) -> Role:
        """Return its role in the comparison."""
        ...

    @property
    def is_durable(self) -> bool:
        """Return whether a message that was acknowledged survives a crash of the machine."""
        ...

    def missing(self) -> str | None:
        """Return what is not installed, and a hint; None if nothing is missing."""
        ...

    def serve(self, directory: Path) -> AbstractContextManager[str]:
        """Run its server, with all its files in `directory`; yield the address for the two ends. Raise
        `SystemUnavailable` if it fails."""
        ...

    def publish(self, address: str, topic: str, load: Load) -> None:
        """Publish under a load, one message per call, until all are acknowledged."""
        ...

    def consume(self, address: str, topic: str, recorder: Recorder) -> None:
        """Consume and acknowledge until the recorder has its last message. A topic has one consumer in its life."""
        ...
