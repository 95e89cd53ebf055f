"""Counters of a connection, on both sides; a snapshot is a frozen value."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from sublet_protocol.pubsub.agent_side_events import ConnectionLostReason


class NodeSideCounters(Struct, frozen=True):
    """Counters of the node's side, over all its subscribers of this incarnation."""

    batches: int = 0  # executed
    duplicate_batches: int = 0  # answered again, not executed again
    commands: int = 0  # in executed batches
    rejected_commands: int = 0  # of these, answered with an error
    polls: int = 0  # asked
    empty_polls: int = 0  # held to their end without a message
    deliveries: int = 0  # handed out, each counted once
    redeliveries: int = 0  # handed out again without an acknowledgement
    gaps: int = 0  # handed out
    dropped: int = 0  # messages that these gaps stand for
    incarnations: int = 0  # subscriber ids that were new
    expired: int = 0  # subscriber ids dropped after their silence
    expelled: int = 0  # subscriber ids dropped because they broke a rule
    unknown_subscriber_replies: int = 0  # calls answered "unknown subscriber"


class AgentSideCounters(Struct, frozen=True):
    """Counters of the agent's side, over all its incarnations with one node."""

    batches: int  # sent for the first time
    duplicate_batches: int  # sent again under the same number
    commands: int  # in batches sent for the first time
    rejected_commands: int  # answered with an error
    polls: int  # begun
    empty_polls: int  # answered with nothing
    deliveries: int  # seen, each once
    redeliveries: int  # brought again, and dropped
    gaps: int  # seen
    incarnations: int
    connections_lost: Mapping[ConnectionLostReason, int]  # by reason; an incarnation that ends regularly is not lost
