"""What goes into the subscriber's machine and what comes out: events, instructions, and the status table's words."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum

from sublet_protocol.pubsub.model import Command, CommandError, Delivery


class Status(Enum):
    """What is true between this agent and this node."""

    IDLE = "idle"  # nothing is wanted and nothing waits: no subscriber id is in use
    FRESH = "fresh"  # a life has begun, and the node has not answered it yet
    CONNECTED = "connected"  # the node has answered in this life
    DOWN = "down"  # the connection was reported lost; nothing good has been heard since
    REFUSED = "refused"  # the node will never serve this agent: nothing is tried any more


class LostReason(StrEnum):
    """Why a connection is over."""

    UNREACHABLE = "unreachable"  # two calls of a kind failed in a row
    RESTARTED = "restarted"  # the node answered under another incarnation
    FORGOTTEN = "forgotten"  # the node does not know this subscriber id
    INCONSISTENT = "inconsistent"  # a message is missing without a gap: somebody is wrong
    OVERFLOW = "overflow"  # more commands were queued than the bound
    REFUSED = "refused"  # wrong protocol version or credentials; final


# --- events; commands are events too ---


@dataclass(frozen=True, slots=True)
class Listen:
    """Whether messages sent to this agent are wanted without a subscription: then a poll is held all the same."""

    wanted: bool


@dataclass(frozen=True, slots=True)
class BatchAnswered:
    """The node's receipt for a batch. `jitter` in [0, 1), as in all answers, spreads what many agents do next."""

    life: int
    number: int
    incarnation: str
    unknown: bool = False
    errors: tuple[CommandError, ...] = ()
    jitter: float = 0.0


@dataclass(frozen=True, slots=True)
class PollAnswered:
    """The end of a held poll."""

    life: int
    incarnation: str
    unknown: bool = False
    deliveries: tuple[Delivery, ...] = ()
    jitter: float = 0.0


@dataclass(frozen=True, slots=True)
class BatchFailed:
    """A batch had no answer."""

    life: int
    why: str
    jitter: float = 0.0


@dataclass(frozen=True, slots=True)
class PollFailed:
    """A poll had no answer."""

    life: int
    why: str
    jitter: float = 0.0


@dataclass(frozen=True, slots=True)
class PeerRefused:
    """The node refuses this agent as such."""

    life: int
    why: str


@dataclass(frozen=True, slots=True)
class Tick:
    """The time named by `wake_at` has come."""


Event = Command | Listen | BatchAnswered | PollAnswered | BatchFailed | PollFailed | PeerRefused | Tick


# --- instructions ---


@dataclass(frozen=True, slots=True)
class SendBatch:
    """Call `Commands`; answer with `BatchAnswered` or `BatchFailed`."""

    subscriber_id: str
    life: int
    number: int
    commands: tuple[Command, ...]


@dataclass(frozen=True, slots=True)
class StartPoll:
    """Call `Poll`; answer with `PollAnswered` or `PollFailed`."""

    subscriber_id: str
    life: int
    acknowledged: int
    incarnation: str
    hold_s: float


@dataclass(frozen=True, slots=True)
class CancelBatch:
    """Give up the batch under way; its life is over."""


@dataclass(frozen=True, slots=True)
class CancelPoll:
    """Give up the poll that is held; its answer is not wanted."""


@dataclass(frozen=True, slots=True)
class Deliver:
    """Hand these over, in order, before anything else is done."""

    deliveries: tuple[Delivery, ...]


@dataclass(frozen=True, slots=True)
class Refusals:
    """The node refused these commands, each for the reason beside it."""

    refused: tuple[tuple[Command, str], ...]


@dataclass(frozen=True, slots=True)
class Lost:
    """The connection is over, said once; `subscriptions` (channel, key or None) are declared again by themselves.

    Messages that were queued or unanswered are dropped: their senders know better what still holds.
    """

    reason: LostReason
    detail: str
    subscriptions: tuple[tuple[str, str | None], ...]

    @property
    def final(self) -> bool:
        """True where the node will never serve this agent."""
        return self.reason is LostReason.REFUSED


@dataclass(frozen=True, slots=True)
class StillLost:
    """The connection is lost still: said once to the subscriptions declared since that was said, which `lost` names."""

    lost: Lost


Instruction = SendBatch | StartPoll | CancelBatch | CancelPoll | Deliver | Refusals | Lost | StillLost


@dataclass(frozen=True, slots=True)
class Outcome:
    """What to do now, in this order, and when to come back at the latest."""

    sends: tuple[Instruction, ...]
    wake_at: float | None
