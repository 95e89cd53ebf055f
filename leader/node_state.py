"""What a node can say of itself at one moment: for whoever watches it, and for tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from protocol.session.counters import PublisherCounters


@dataclass(frozen=True, slots=True)
class NodeState:
    """`agents` are connected, and `held_polls` of them wait at this instant. `news`: what was heard by push, missed,
    healed and read again (`Ears.counters`), `heads`: {stream: head} as far as news and catch-ups have told; both empty
    where nothing is pushed. `leaks`: what the session remembers in vain."""

    agents: int
    held_polls: int
    session: PublisherCounters
    leaks: tuple[str, ...]
    news: Mapping[str, int] = field(default_factory=dict)
    heads: Mapping[int, int] = field(default_factory=dict)
