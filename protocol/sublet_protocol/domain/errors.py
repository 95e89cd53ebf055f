"""Every public error, by name.

Each message names the value, the rule it breaks and a hint. `exit_code` is what the command line returns for it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence


class SubletError(Exception):
    """The base of every error this project raises on purpose."""

    exit_code = 1

    def __reduce__(self) -> tuple[object, ...]:
        """Return what pickles it: its text and attributes, as many classes are made from other arguments. Without it a
        pool of processes breaks, or waits for ever, when one is raised in it."""
        return _make_copy, (type(self), self.args), self.__dict__


class NodeInvariantViolated(SubletError):
    """An error for a leader node that broke a rule of its own, and has ended."""


class UsageError(SubletError):
    """An argument that can never work."""

    exit_code = 2


class InvalidTopic(UsageError):
    """A topic that breaks MQTT 5's rules, or starts with `$`."""


class InvalidFilter(UsageError):
    """A topic filter that breaks MQTT 5's rules."""


class InvalidSubscription(UsageError):
    """A text other than `$share/GROUP/FILTER` or `$queue/GROUP/FILTER`."""


class InvalidSetting(UsageError):
    """A setting out of range, or settings that contradict each other."""


class InvalidEpoch(UsageError):
    """A value other than an integer or a tuple of as many integers as the space's epochs have."""


class EpochAlreadyCompleted(UsageError):
    """An epoch that may no longer be published, or that this publisher has given up."""


class EpochCapabilityExpired(UsageError):
    """A publisher that did not renew its epochs within its lease; they are closed."""


class ValueTooLarge(UsageError):
    """A message above the size limit; the limit is in the text."""


class PublisherClosed(UsageError):
    """A publish call after `close()`, or through a publisher that can never publish again."""


class NotFound(SubletError):
    """A name of something that does not exist."""

    exit_code = 3


class UnknownSpace(NotFound):
    """A name of no space."""


class UndeclaredQueue(NotFound):
    """A `$queue/...` group that was used before it was declared."""


class Conflict(SubletError):
    """What is asked for contradicts what is there: an object that differs, another holder, a newer producer."""

    exit_code = 4


class NodeNameTaken(Conflict):
    """A name that another live node has, for `remaining_s` more seconds unless it renews."""

    def __init__(self, name: str, address: str, remaining_s: float) -> None:
        self.name, self.address, self.remaining_s = name, address, remaining_s
        super().__init__(
            f"node name {name!r} belongs to the node at {address}, whose lease has {remaining_s:.1f} s left. "
            "Wait for its end, stop that node, or choose another --name."
        )


class BatchNumberConflict(Conflict):
    """A batch published through a node with a number that its producer has used for another batch, or has passed."""


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
    """A write whose staged messages are no longer complete: nothing was stored."""

    def __init__(self, sink: str, batch: int, staged: int, remaining: int) -> None:
        self.sink, self.batch = sink, batch
        super().__init__(
            f"{sink}: of the {staged} messages of batch {batch} that its tasks have staged, {remaining} are there. "
            "They are lost when Postgres crashes, and removed after a day. Nothing of the batch is stored: write it "
            "again."
        )


class ProducerFenced(Conflict):
    """A producer of which a newer incarnation is writing."""


class GrantLost(Conflict):
    """Progress under a grant that is over: the transaction that includes it must not commit."""

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
    """A caller that is not authenticated: its credential is missing or not valid."""


class PermissionDenied(SubletError):
    """A request that no rule allows to this caller."""


class SchemaMismatch(Conflict):
    """A database whose schema is older or newer than this program."""


class ProtocolMismatch(Conflict):
    """A peer that uses another version of the protocol."""


class TlsFailed(SubletError):
    """A connection on which a node and its client disagree about TLS; a retry cannot fix it."""


class Unavailable(SubletError):
    """A valid request for something that is not available now."""

    exit_code = 5


class TooManyGroups(Unavailable):
    """A principal that has created as many groups as it may for now."""


class SessionRowLocked(Unavailable):
    """An open transaction keeps a session's name locked: it has drawn an epoch for it."""


class DatabaseUnreachable(Unavailable):
    """A failed connection to Postgres."""


class PayloadUnavailable(Unavailable):
    """Messages outside of Postgres, at a location that is away. Nothing is lost: they are read when it is back."""


class PayloadObjectUnreadable(PayloadUnavailable):
    """Messages outside of Postgres, in an object that cannot be read, while others at its location can."""


class PageUnreadable(Unavailable):
    """Messages of a stream that no node sends in a way that this program can read; other streams may be read."""


class PoisonBlock(SubletError):
    """A block that cannot be decoded, wherever its payload lies: none of its messages are delivered.

    `offsets`: its first offset, and the one after its last. `detail`: what is wrong with it, and the hint. `prefix`:
    text in front of that. `run_end`: no block from this one to that offset can be decoded.
    """

    _DESCRIBED = re.compile(
        r"stream (\d+): the block that begins at offset (\d+) and ends before offset (\d+) (.*?)"
        r"(?: None from there to offset (\d+) can be decoded\.)?",
        re.S,
    )

    def __init__(
        self, stream_id: int, offsets: tuple[int, int], detail: str, prefix: str = "", run_end: int = 0
    ) -> None:
        self.stream_id, self.offsets, self.detail = stream_id, offsets, detail
        self.run_end = max(run_end, offsets[1])
        block = f"stream {stream_id}: the block that begins at offset {offsets[0]} and ends before offset {offsets[1]}"
        run = f" None from there to offset {run_end} can be decoded." if run_end > offsets[1] else ""
        super().__init__(f"{prefix}{block} {detail}{run}")

    @classmethod
    def from_text(cls, text: str) -> SubletError:
        """Return the error with a text that another process has sent."""
        match = cls._DESCRIBED.fullmatch(text)
        if match is None:
            return SubletError(text)
        return cls(int(match[1]), (int(match[2]), int(match[3])), match[4], run_end=int(match[5] or 0))


class PayloadDamaged(PoisonBlock):
    """A block outside of Postgres whose object is missing, or is not what was stored."""


class MalformedRow(SubletError, ValueError):
    """A stored value that this program never writes. Whoever may write rows by SQL wrote it."""


class EmbeddedDirectoryUnusable(UsageError):
    """A directory in which the embedded server cannot run."""


class StaleTerm(SubletError):
    """A write under a term that is over. Not a failure: step down."""


class PositionGone(SubletError):
    """A position older than retention."""

    def __init__(self, stream_id: int, offset: int, oldest: int | None) -> None:
        self.stream_id, self.offset, self.oldest = stream_id, offset, oldest
        remainder, hint = f"oldest is {oldest}", "Start from the oldest. A space with a longer retention keeps more."
        if oldest is None:
            remainder, hint = "nothing of it is left", "Retention took it, or its space was dropped."
        super().__init__(f"stream {stream_id}: offset {offset} is gone, {remainder}. {hint}")


class InDoubtRangeReassigned(SubletError):
    """A query's begun messages that other members have got meanwhile; `ranges`: (stream, from, to)."""

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
    """A read that was granted, or planned, on another timeline of the database."""


class SubscriptionEnded(SubletError):
    """The end of a session's subscription: the group grants it nothing any more; `reason` is why."""

    def __init__(self, subscription: str, reason: str, detail: str = "") -> None:
        self.subscription, self.reason = subscription, reason
        super().__init__(f"{subscription} ended: {reason}" + (f" ({detail})" if detail else ""))


class UserFunctionFailed(SubletError):
    """A user's function that kept raising; `offset` is that of the record it failed on, in an atomic group the first of
    the batch, and nothing from there on was acknowledged.

    `end`: of an atomic batch, of which no record is processed alone.
    """

    def __init__(
        self, stream_id: int, offset: int, record: str, tries: int, error: str, *, end: int | None = None
    ) -> None:
        self.stream_id, self.offset = stream_id, offset
        if end is None:
            location, rest = f"at stream {stream_id}, offset {offset}{record}", "this record"
            hint = " With RetryPolicy(dead_letter_topic=TOPIC) such a record is published there, and the run goes on."
        else:
            location = f"in offsets [{offset}, {end}) of stream {stream_id}, whose epochs are processed entirely"
            rest, hint = "these offsets", ""
        super().__init__(
            f"the function failed {tries} times in a row {location}: {error}. Progress ends before {rest}: mend the "
            f"function, or let it pass over what it cannot process, and start again.{hint}"
        )


class UnknownOutcome(Unavailable):
    """A connection lost during a commit, whose changes may or may not have been written."""


def _make_copy(kind: type[SubletError], texts: tuple[object, ...]) -> SubletError:
    return kind.__new__(kind, *texts)


def format_error(error: BaseException) -> str:
    """Return an error's text in one line, without the full stop at its end; its class's name if it has no text."""
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__
