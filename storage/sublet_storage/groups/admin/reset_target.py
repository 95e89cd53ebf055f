"""The target of `groups reset` (earliest, latest, a time, an offset), before it is resolved for each stream."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from msgspec import Struct

from sublet_protocol.domain.epoch_frontiers import Epoch, check_epoch
from sublet_protocol.domain.errors import UsageError
from sublet_protocol.domain.subscriptions import MAX_OFFSET, StartingPosition

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class ResetTarget(Struct, frozen=True):
    """`kind` is one of earliest, latest, current, offset, shift, time, epoch and given; the others are what it needs.

    `value`: an offset, messages to go forward (or back), or microseconds since 1970; `offsets_by_stream`: {stream:
    offset}, which were taken on that `timeline` of the database, if that is known."""

    kind: str
    value: int = 0
    epoch: Epoch = ()
    offsets_by_stream: tuple[tuple[int, int], ...] = ()
    timeline: str | None = None

    @classmethod
    def earliest(cls) -> ResetTarget:
        """Return the target of the oldest messages that retention has left."""
        return cls("earliest")

    @classmethod
    def latest(cls) -> ResetTarget:
        """Return the target that skips all present messages."""
        return cls("latest")

    @classmethod
    def current(cls) -> ResetTarget:
        """Return the target of the present position: streams that were blocked are granted again."""
        return cls("current")

    @classmethod
    def offset(cls, offset: int) -> ResetTarget:
        """Return the target of that offset in every stream, or its end. Raise `UsageError`."""
        if not 0 <= offset <= MAX_OFFSET:
            raise UsageError(
                f"offset {offset}: an offset is a whole number from 0 to {MAX_OFFSET}. Correct it; to go back by a "
                "number of messages, shift (--shift-by with a negative number)."
            )
        return cls("offset", offset)

    @classmethod
    def shift(cls, count: int) -> ResetTarget:
        """Return the target that is a number of messages on, or back, in every stream; not beyond its ends. Raise
        `UsageError`."""
        if abs(count) > MAX_OFFSET:
            raise UsageError(
                f"shift by {count}: no stream is so long: it is from -{MAX_OFFSET} to {MAX_OFFSET}. Correct it, or "
                "reset to the earliest or the latest."
            )
        return cls("shift", count)

    @classmethod
    def time(cls, moment: datetime) -> ResetTarget:
        """Return the target of the first message appended at that time or later in every stream. Raise `UsageError`
        for a time without a zone, or outside of the years 1 to 9999 in UTC."""
        if moment.utcoffset() is None:
            raise UsageError(f"time {moment}: it has no time zone. Write 2026-01-31T12:00:00Z, say.")
        try:
            return cls("time", (moment.astimezone(UTC) - _EPOCH) // timedelta(microseconds=1))
        except OverflowError:
            raise UsageError(f"time {moment}: in UTC it is not in the years 1 to 9999. Give one of them.") from None

    @classmethod
    def at_epoch(cls, epoch: object) -> ResetTarget:
        """Return the target of the first block with that epoch, or one after it, in every stream. Raise
        `InvalidEpoch`."""
        return cls("epoch", epoch=check_epoch(epoch))

    @classmethod
    def offsets(cls, offsets: Mapping[int, int], timeline: str | None = None) -> ResetTarget:
        """Return the target of these offsets of these streams, and no others. Raise `UsageError`."""
        for stream_id, offset in offsets.items():
            if not (0 < stream_id <= MAX_OFFSET and 0 <= offset <= MAX_OFFSET):
                raise UsageError(f"stream {stream_id}, offset {offset}: both are numbers, from 1 and from 0.")
        if not offsets:
            raise UsageError("no stream is given. Give at least one, with its offset.")
        return cls("given", offsets_by_stream=tuple(sorted(offsets.items())), timeline=timeline)

    @property
    def epoch_start(self) -> StartingPosition:
        """Return the starting position by which an atomic group gets its first epochs after the reset."""
        return StartingPosition.LATEST if self.kind == "latest" else StartingPosition.EARLIEST

    def __str__(self) -> str:
        match self.kind:
            case "offset":
                return f"offset {self.value}"
            case "shift":
                return f"shifted by {self.value:+d}"
            case "time":
                return f"time {StartingPosition.at_time(self.value)}"
            case "epoch":
                return f"epoch {self.epoch[0] if len(self.epoch) == 1 else self.epoch}"
            case "given":
                return "the offsets that were given"
            case _:
                return self.kind

    def to_parameters(self) -> dict[str, Any]:
        """Return the parameters of a statement: kind, value, epoch, streams, offsets."""
        return {
            "kind": self.kind,
            "value": self.value,
            "epoch": list(self.epoch),
            "given_streams": [stream_id for stream_id, _ in self.offsets_by_stream],
            "given_offsets": [offset for _, offset in self.offsets_by_stream],
        }
