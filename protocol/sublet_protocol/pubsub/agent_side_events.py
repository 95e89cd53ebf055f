"""Events, actions and statuses of the agent-side machine."""

from __future__ import annotations

from enum import Enum, StrEnum

from msgspec import Struct

from sublet_protocol.pubsub.model import Command, CommandRefusal, SequencedMessage
from sublet_protocol.tick import Tick


class ConnectionStatus(Enum):
    """The statuses of the connection between an agent and a node."""

    IDLE = "idle"  # nothing is subscribed and nothing waits: no subscriber id is in use
    CONNECTING = "connecting"  # an incarnation has begun, and the node has not answered it yet
    CONNECTED = "connected"  # the node has answered this incarnation
    DISCONNECTED = "disconnected"  # the connection was reported lost; no call has succeeded since
    REJECTED = "rejected"  # the node will never serve this agent: nothing is tried any more


class ConnectionLostReason(StrEnum):
    """The reasons why a connection is over."""

    UNREACHABLE = "unreachable"  # two calls of a kind failed in a row
    RESTARTED = "restarted"  # the node answered under another incarnation
    EXPIRED = "expired"  # the node does not know this subscriber id
    INCONSISTENT = "inconsistent"  # a message is missing without a gap: one side is wrong
    OVERFLOW = "overflow"  # more commands were queued than the bound
    REJECTED = "rejected"  # wrong protocol version or credentials; final


# --- events; commands are events too ---


class CommandsReplied(Struct, frozen=True):
    """The node's receipt for a batch. `jitter` in [0, 1), as in all answers, spreads what many agents do next."""

    subscriber_incarnation: int
    number: int
    node_incarnation: str
    is_unknown: bool = False
    errors: tuple[CommandRefusal, ...] = ()
    jitter: float = 0.0


class PollReplied(Struct, frozen=True):
    """The end of a held poll."""

    subscriber_incarnation: int
    node_incarnation: str
    is_unknown: bool = False
    deliveries: tuple[SequencedMessage, ...] = ()
    jitter: float = 0.0


class CommandsUnanswered(Struct, frozen=True):
    """The event that a batch was not answered."""

    subscriber_incarnation: int
    reason: str
    jitter: float = 0.0


class PollUnanswered(Struct, frozen=True):
    """The event that a poll was not answered."""

    subscriber_incarnation: int
    reason: str
    jitter: float = 0.0


class ConnectionRejected(Struct, frozen=True):
    """The event that the node rejects this agent as such."""

    subscriber_incarnation: int
    reason: str


Event = Command | CommandsReplied | PollReplied | CommandsUnanswered | PollUnanswered | ConnectionRejected | Tick


# --- instructions ---


class SendCommands(Struct, frozen=True):
    """The action to call `Commands`; answer with `CommandsReplied` or `CommandsUnanswered`."""

    subscriber_id: str
    subscriber_incarnation: int
    number: int
    commands: tuple[Command, ...]


class CallPoll(Struct, frozen=True):
    """The action to call `Poll`; answer with `PollReplied` or `PollUnanswered`."""

    subscriber_id: str
    subscriber_incarnation: int
    acknowledged: int
    node_incarnation: str
    hold_s: float


class CancelCommandsCall(Struct, frozen=True):
    """The action to cancel the batch under way; its incarnation has ended."""


class CancelPollCall(Struct, frozen=True):
    """The action to cancel the poll that is held; its answer is not needed."""


class Deliver(Struct, frozen=True):
    """The action to pass these to their callbacks, in order, before anything else is done."""

    deliveries: tuple[SequencedMessage, ...]


class ReportRejectedCommands(Struct, frozen=True):
    """The report that the node refused these commands, each with its reason."""

    rejected: tuple[tuple[Command, str], ...]


class ReportConnectionLost(Struct, frozen=True):
    """The report that the connection is lost, once; `subscriptions` (channel, key or None) are declared again by
    themselves.

    Messages that were queued or unanswered are dropped: their senders decide what is still valid.
    """

    reason: ConnectionLostReason
    detail: str
    subscriptions: tuple[tuple[str, str | None], ...]

    @property
    def is_final(self) -> bool:
        """Return whether the node will never serve this agent."""
        return self.reason is ConnectionLostReason.REJECTED


class ReportConnectionStillLost(Struct, frozen=True):
    """The report that the connection is still lost: once to the subscriptions declared since, which `lost` names."""

    lost: ReportConnectionLost


Instruction = (
    SendCommands
    | CallPoll
    | CancelCommandsCall
    | CancelPollCall
    | Deliver
    | ReportRejectedCommands
    | ReportConnectionLost
    | ReportConnectionStillLost
)


class AgentSideOutcome(Struct, frozen=True):
    """The actions to carry out now, in this order, and the latest time for the next event."""

    sends: tuple[Instruction, ...]
    wake_at: float | None
