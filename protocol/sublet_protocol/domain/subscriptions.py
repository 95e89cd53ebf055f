"""Subscriptions, starting positions and bookmarks, parsed and checked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import ClassVar, Literal

from msgspec import Struct, field

from sublet_protocol.domain.errors import InvalidFilter, InvalidSubscription, UsageError
from sublet_protocol.domain.limits import MAX_GROUP_CHARACTERS, parse_natural
from sublet_protocol.domain.topics import MAX_TIMELINE, TopicFilter, check_characters, text_error

MAX_OFFSET = 2**63 - 1
"""The largest offset that a stream could ever reach."""

GroupKind = Literal["share", "queue"]
StartingPositionKind = Literal["latest", "earliest", "time", "offset"]

_KINDS: dict[str, GroupKind] = {"$share": "share", "$shared": "share", "$queue": "queue"}
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_SETTING = "starting_position"
_OFFSET = "offset:"
_OFFSET_RULE = f"an offset is a whole number from 0 to {MAX_OFFSET}"


class Subscription(Struct, frozen=True):
    """A group's kind, name and filter. `str()` is the one canonical spelling."""

    kind: GroupKind
    group: str
    filter: TopicFilter

    def __post_init__(self) -> None:
        if self.kind not in _KINDS.values():
            rule, hint = (
                "a group's kind is 'share' or 'queue'",
                "Write $share/GROUP/FILTER or $queue/GROUP/FILTER",
            )
            raise text_error(InvalidSubscription, "kind", self.kind, rule, hint)
        _check_group(self.group)

    @classmethod
    def parse(cls, text: str) -> Subscription:
        """Read `$share/GROUP/FILTER` (or `$shared/`) or `$queue/GROUP/FILTER`.

        Raise `InvalidSubscription` for its shape or the group's name, `InvalidFilter` for the filter in it. Control
        characters are refused here alone, so that a group that has some can still be read from where it is stored.
        """
        subscription = cls.parse_stored(text)
        _check_controls(InvalidSubscription, "group", subscription.group)
        _check_controls(InvalidFilter, "filter", subscription.filter.text)
        return subscription

    @classmethod
    def parse_stored(cls, text: str) -> Subscription:
        """Read one that is stored somewhere: `parse` without the rule about control characters."""
        prefix, _, group_and_filter = text.partition("/")
        group, slash, filter_text = group_and_filter.partition("/")
        if prefix not in _KINDS or not slash:
            rule = "a shared subscription is $share/GROUP/FILTER or $queue/GROUP/FILTER"
            hint = "Quote it in a shell: '$share/billing/orders/#'"
            raise text_error(InvalidSubscription, "subscription", text, rule, hint)
        return cls(_KINDS[prefix], group, TopicFilter(filter_text))

    def __str__(self) -> str:
        return f"${self.kind}/{self.group}/{self.filter.text}"


class StartingPosition(Struct, frozen=True):
    """The position where a group begins in the streams that exist when it is created; it reads later streams
    completely.

    `value` is microseconds since 1970 for `to_datetime`, an offset for `at_offset`, else 0. `str()` is the canonical
    spelling.
    """

    policy: StartingPositionKind
    value: int = 0

    LATEST: ClassVar[StartingPosition]
    """At the end of each stream."""
    EARLIEST: ClassVar[StartingPosition]
    """At the oldest message of each stream."""

    @classmethod
    def at_time(cls, timestamp_us: int, name: str = _SETTING) -> StartingPosition:
        """Return the position of the first message stored at or after that time (the database's clock, microseconds
        since 1970). Raise `UsageError`.
        """
        try:
            _EPOCH + timestamp_us * _MICROSECOND
        except OverflowError:
            rule = "a time is microseconds since 1970, in the years 1 to 9999"
            raise text_error(UsageError, name, str(timestamp_us), rule, "Correct it") from None
        return cls("time", timestamp_us)

    @classmethod
    def at_offset(cls, offset: int, name: str = _SETTING) -> StartingPosition:
        """Return the position at that offset in each open stream, or at the end of a shorter one. Raise
        `UsageError`.
        """
        if not 0 <= offset <= MAX_OFFSET:
            raise text_error(UsageError, name, f"{_OFFSET}{offset}", _OFFSET_RULE, "Correct it")
        return cls("offset", offset)

    @property
    def to_datetime(self) -> datetime:
        """Return the time of a `time` position."""
        return _EPOCH + self.value * _MICROSECOND

    @classmethod
    def parse(cls, text: str, name: str = _SETTING) -> StartingPosition:
        """Read `latest`, `earliest`, `offset:N` or an ISO 8601 time with its time zone. Raise `UsageError`, which lists
        what `name` may be.
        """
        if text in _BY_NAME:
            return _BY_NAME[text]
        if text.startswith(_OFFSET):
            offset = parse_natural(text[len(_OFFSET) :], MAX_OFFSET)
            if offset is None:
                raise text_error(UsageError, name, text, _OFFSET_RULE, "Correct it")
            return cls("offset", offset)
        try:
            when = datetime.fromisoformat(text)
            if when.tzinfo is not None:
                return cls.at_time((when - _EPOCH) // _MICROSECOND, name)
            hint = "Add the time zone: Z for UTC, or +01:00 say"
        except (ValueError, OverflowError):
            hint = "Write one of them"
        rule = "a group starts at latest, earliest, offset:N, or a time with its time zone such as 2026-11-21T10:00:00Z"
        raise text_error(UsageError, name, text, rule, hint)

    def __str__(self) -> str:
        match self.policy:
            case "time":
                return self.to_datetime.isoformat().replace("+00:00", "Z")
            case "offset":
                return f"{_OFFSET}{self.value}"
            case policy:
                return policy


class Bookmark(Struct, frozen=True):
    """The position of a reader: the next offset in each stream that it has not read to its end.

    Of the streams up to `known` all others are read to their end; those after it are read from their beginning.
    `timeline`: of the database; on another timeline these offsets may belong to other messages; None: not known.
    `str()` and `parse` convert it to and from text.
    """

    known: int = 0
    offsets: Mapping[int, int] = field(default_factory=dict)
    timeline: str | None = None

    def __post_init__(self) -> None:
        numbers = (self.known, *self.offsets, *self.offsets.values())
        if any(type(number) is not int or not 0 <= number <= MAX_OFFSET for number in numbers):
            rule = f"streams and offsets are whole numbers from 0 to {MAX_OFFSET}"
            raise text_error(UsageError, "bookmark", str(self), rule, "Take it from a reader's `positions`")
        if self.timeline is not None and not (
            isinstance(self.timeline, str) and 0 < len(self.timeline) <= MAX_TIMELINE
        ):
            rule = f"a timeline is a text of 1 to {MAX_TIMELINE} characters"
            raise text_error(UsageError, "bookmark", str(self), rule, "Take it from a reader's `positions`")

    @classmethod
    def of(cls, offsets: Mapping[int, int]) -> Bookmark:
        """Return these streams from there on, and no others, not even their children."""
        return cls(MAX_OFFSET, dict(offsets))

    @classmethod
    def parse(cls, text: str) -> Bookmark:
        """Read what `str()` wrote. Raise `UsageError`."""
        try:
            read = json.loads(text)
            offsets = {int(stream): offset for stream, offset in read["offsets"].items()}
            return cls(read["known"], offsets, read.get("timeline"))
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            rule = 'a bookmark is {"known": N, "offsets": {"STREAM": OFFSET, ...}, "timeline": "NAME"}'
            raise text_error(UsageError, "bookmark", text, rule, "Take it from a reader's `positions`") from None

    def __str__(self) -> str:
        timeline = {} if self.timeline is None else {"timeline": self.timeline}
        return json.dumps(
            {"known": self.known, "offsets": {str(id): at for id, at in self.offsets.items()}, **timeline}
        )


StartingPosition.LATEST = StartingPosition("latest")
StartingPosition.EARLIEST = StartingPosition("earliest")
_BY_NAME = {str(start): start for start in (StartingPosition.LATEST, StartingPosition.EARLIEST)}


def _check_controls(error: type[UsageError], part: str, text: str) -> None:
    """Check a part of a subscription, which people read; topics may have such characters, as MQTT allows."""
    if any(character < " " or "\x7f" <= character <= "\x9f" for character in text):
        rule = f"a subscription's {part} has no control characters"
        raise text_error(error, part, text, rule, "Remove them; + and # match topics that have some")


def _check_group(group: str) -> None:
    hint = "Choose a name such as billing: $share/billing/orders/#"
    if not group:
        raise text_error(InvalidSubscription, "group", group, "a group's name is not empty", hint)
    if any(character in group for character in "/+#"):
        raise text_error(InvalidSubscription, "group", group, "a group's name has no /, + or #", hint)
    if len(group) > MAX_GROUP_CHARACTERS:
        rule = f"a group's name has at most {MAX_GROUP_CHARACTERS} characters, this one has {len(group)}"
        raise text_error(InvalidSubscription, "group", group, rule, hint)
    check_characters(InvalidSubscription, "group", group)
