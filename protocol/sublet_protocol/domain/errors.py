"""Everything that can go wrong by name.

Each message names the value, the rule it breaks and the remedy. `exit_code` is what the command line returns for it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence


class SubletError(Exception):
    """Base of every error this project raises on purpose."""

    exit_code = 1


class NodeBroken(SubletError):
    """A leader node broke a rule of its own, and has ended."""


class UsageError(SubletError):
    """The caller gave something that can never work."""

    exit_code = 2


class InvalidTopic(UsageError):
    """A topic that breaks MQTT 5's rules, or starts with `$`."""


class InvalidFilter(UsageError):
    """A topic filter that breaks MQTT 5's rules."""


class InvalidSubscription(UsageError):
    """Not `$share/GROUP/FILTER` or `$queue/GROUP/FILTER`."""


class InvalidSetting(UsageError):
    """A setting out of range, or settings that contradict each other."""


class InvalidEpoch(UsageError):
    """Not an integer or a tuple of as many integers as the space's epochs have."""


class EpochAlreadyCompleted(UsageError):
    """An epoch that nobody may publish any more, or that this publisher has given up."""


class EpochCapabilityExpired(UsageError):
    """A publisher did not renew its epochs within its lease, and they are closed."""


class ValueTooLarge(UsageError):
    """A message above the size limit; the limit is in the text."""


class PublisherClosed(UsageError):
    """Publishing after `close()`, or through a publisher that can never publish again."""


class NotFound(SubletError):
    """Named something that does not exist."""

    exit_code = 3


class UnknownSpace(NotFound):
    """A space of that name does not exist."""


class UndeclaredQueue(NotFound):
    """`$queue/...` groups are declared before they are used."""


class Conflict(SubletError):
    """It exists already, and is different."""

    exit_code = 4


class NodeNameTaken(Conflict):
    """Another live node has this name, for `remaining_s` more seconds unless it renews."""

    def __init__(self, name: str, address: str, remaining_s: float) -> None:
        self.name, self.address, self.remaining_s = name, address, remaining_s
        super().__init__(
            f"node name {name!r} belongs to the node at {address}, whose lease has {remaining_s:.1f} s left. "
            "Wait for its end, stop that node, or choose another --name."
        )


class BatchNumberConflict(Conflict):
    """A batch published through a node has a number that its producer has used for another batch, or has passed."""


class SinkBatchOutOfOrder(Conflict):
    """A batch of a sink that has published later ones."""

    def __init__(self, sink: str, batch: int, newest: int) -> None:
        self.sink, self.batch, self.newest = sink, batch, newest
        super().__init__(
            f"{sink}: batch {batch} is not stored now, as batch {newest} is stored already, and the batches of a sink "
            "come in order. Another process writes under this name, or did: end one of them, or give it a name of its "
            "own (a streaming query has one with each checkpoint)."
        )


class StagedBlocksLost(SubletError):
    """Of the messages that a write has staged, not all are there any more: nothing was stored."""

    def __init__(self, sink: str, batch: int, staged: int, remaining: int) -> None:
        self.sink, self.batch = sink, batch
        super().__init__(
            f"{sink}: of the {staged} messages of batch {batch} that its tasks have staged, {remaining} are there. "
            "They are lost when Postgres crashes, and removed after a day. Nothing of the batch is stored: write it "
            "again."
        )


class ProducerFenced(Conflict):
    """A newer incarnation of this producer is writing."""


class GrantLost(Conflict):
    """Progress under a grant that is over: the transaction that it was to be part of must not commit."""

    def __init__(self, group_id: int, stream_id: int, grant_id: int, position: int) -> None:
        self.group_id, self.stream_id, self.grant_id, self.position = group_id, stream_id, grant_id, position
        super().__init__(
            f"stream {stream_id} of group {group_id} is not held under grant {grant_id} with offset {position} within "
            "reach: progress counts only under the grant in force, and goes forward to the stream's head at most. "
            "Roll the transaction back; whoever the stream is granted to now does this work."
        )


class MicroBatchFenced(Conflict):
    """A micro-batch that its query must not write, or not any more: its transaction is rolled back."""

    def __init__(self, batch_id: int, detail: str, hint: str) -> None:
        self.batch_id = batch_id
        super().__init__(f"batch {batch_id} must not be written: {detail}. It is rolled back. {hint}.")


class Unauthenticated(SubletError):
    """The caller is not known: its credential is missing, or none that counts."""


class PermissionDenied(SubletError):
    """The caller is known, and no rule allows it this."""


class SchemaMismatch(Conflict):
    """The database's schema is older or newer than this program."""


class ProtocolMismatch(Conflict):
    """The peer uses another version of the protocol."""


class TlsFailed(SubletError):
    """A node and its client do not come to terms about TLS, and trying again changes nothing."""


class Unavailable(SubletError):
    """Nothing is wrong with the request; what it needs is not there now."""

    exit_code = 5


class TooManyGroups(Unavailable):
    """One principal has had as many groups made as it may for now."""


class SessionNameLocked(Unavailable):
    """An open transaction keeps a session's name locked: it has drawn an epoch for it."""


class DatabaseUnreachable(Unavailable):
    """No connection to Postgres."""


class PayloadUnavailable(Unavailable):
    """Messages lie outside of Postgres, at a place that is away. Nothing is lost: they are read when it is back."""


class PayloadObjectUnreadable(PayloadUnavailable):
    """Messages lie outside of Postgres, in an object that cannot be read, while others at its place can."""


class PoisonBlock(SubletError):
    """A block that cannot be decoded, wherever its payload lies: none of its messages are delivered.

    `offsets`: its first offset, and the one after its last. `detail`: what is wrong with it, and the hint. `before`:
    text in front of that.
    """

    _DESCRIBED = re.compile(
        r"stream (\d+): the block that begins at offset (\d+) and ends before offset (\d+) (.*)", re.S
    )

    def __init__(self, stream_id: int, offsets: tuple[int, int], detail: str, before: str = "") -> None:
        self.stream_id, self.offsets, self.detail = stream_id, offsets, detail
        where = f"stream {stream_id}: the block that begins at offset {offsets[0]} and ends before offset {offsets[1]}"
        super().__init__(f"{before}{where} {detail}")

    @classmethod
    def reported(cls, text: str) -> SubletError:
        """Return the error with a text that another process has sent."""
        found = cls._DESCRIBED.fullmatch(text)
        return cls(int(found[1]), (int(found[2]), int(found[3])), found[4]) if found else SubletError(text)


class PayloadDamaged(PoisonBlock):
    """A block lies outside of Postgres, and what is found there is not what was put there, or nothing is."""


class EmbeddedDirectoryUnusable(UsageError):
    """The embedded server cannot live there."""


class StaleTerm(SubletError):
    """A write under a term that is over. Not a failure: step down."""


class PositionGone(SubletError):
    """A position older than retention."""

    def __init__(self, stream_id: int, offset: int, oldest: int | None) -> None:
        self.stream_id, self.offset, self.oldest = stream_id, offset, oldest
        where = "nothing of it is left" if oldest is None else f"oldest is {oldest}"
        super().__init__(
            f"stream {stream_id}: offset {offset} is gone, {where}. "
            "Start from the oldest. A space created with a longer retention keeps more."
        )


class RangeLost(SubletError):
    """A query comes back to messages that it had begun, and others have got them; `ranges`: (stream, from, to)."""

    def __init__(self, session: str, ranges: Sequence[tuple[int, int, int]]) -> None:
        self.session, self.ranges = session, tuple(ranges)
        which = ", ".join(f"stream {stream_id}: [{start}, {end})" for stream_id, start, end in self.ranges)
        super().__init__(
            f"session {session!r} had begun messages that others may have got meanwhile: {which}. What of them it has "
            "written may be there twice: see the group's history. A longer inDoubtTimeout keeps them longer."
        )


class PositionBeyondHead(Conflict):
    """A position after the end of its stream, or of another timeline: the database is not the one it was saved for, was
    restored, or a standby was promoted."""


class TimelineChanged(PositionBeyondHead):
    """What is being read was granted, or planned, on another timeline of the database."""


class SubscriptionEnded(SubletError):
    """The group grants this session nothing any more; `reason` is why."""

    def __init__(self, subscription: str, reason: str, detail: str = "") -> None:
        self.subscription, self.reason = subscription, reason
        super().__init__(f"{subscription} ended: {reason}" + (f" ({detail})" if detail else ""))


class UserFunctionFailed(SubletError):
    """The user's function kept raising; `record` is the record it failed on, and nothing after it was acknowledged."""

    def __init__(self, stream_id: int, offset: int, record: str, tries: int, error: str) -> None:
        self.stream_id, self.offset = stream_id, offset
        super().__init__(
            f"the function failed {tries} times in a row at stream {stream_id}, offset {offset}{record}: {error}. "
            "Progress ends before this record: mend the function, or let it pass over this record, and start again. "
            "With Policy(keep=TOPIC) such a record is published there, and the run goes on."
        )


class UnknownOutcome(Unavailable):
    """The connection was lost during a commit: its changes may or may not have been written."""
