"""What a system must offer to be measured."""

from __future__ import annotations

from contextlib import AbstractContextManager
from enum import Enum
from pathlib import Path
from typing import Protocol

from bench.peers.load import Load, Recorder

MAX_UNACKNOWLEDGED = 4000
"""So many messages a peer's publisher may have on their way; ours bounds its buffer by itself."""


class LeftOut(Exception):
    """This system cannot be measured here; the message says why and what helps."""


class Role(Enum):
    """What a system stands there for."""

    OURS = "ours"  # it is measured
    PEER = "peer"  # it is what ours is measured by
    LIMIT = "limit"  # what ours is made of, without ours


class System(Protocol):
    """A message system under one setting."""

    @property
    def key(self) -> str:
        """Its name on the command line."""
        ...

    @property
    def name(self) -> str:
        """Its name for people."""
        ...

    @property
    def setting(self) -> str:
        """What distinguishes it from others of the same name."""
        ...

    @property
    def role(self) -> Role:
        """What it stands there for."""
        ...

    @property
    def is_durable(self) -> bool:
        """Whether a message that was acknowledged survives a crash of the machine."""
        ...

    def missing(self) -> str | None:
        """What is not installed, and the remedy; None: nothing."""
        ...

    def serve(self, directory: Path) -> AbstractContextManager[str]:
        """Run its server, with all its files in `directory`; the address for the two ends. Raises `LeftOut`."""
        ...

    def publish(self, address: str, topic: str, load: Load) -> None:
        """Publish under a load, one message per call, until all are acknowledged."""
        ...

    def consume(self, address: str, topic: str, recorder: Recorder) -> None:
        """Consume and acknowledge until the recorder has its last message. A topic has one consumer in its life."""
        ...
