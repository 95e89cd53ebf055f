"""Topics, filters, subscriptions and starts: the words that users write, checked once, where they come in.

The rules are MQTT 5's (section 4.7), plus one of ours: `$` at the start of a topic or a filter is refused,
because what begins with it (`$SYS/...`, `$share/...`) is never a message of a user. Empty levels (`a//b`,
`/a`) are legal, and differ from levels left out. A value of these types that exists is valid.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import ClassVar, Literal

from protocol.errors import InvalidFilter, InvalidSubscription, InvalidTopic, UsageError

MAX_TOPIC_BYTES = 65535
"""MQTT's limit for a topic name or a topic filter, in bytes of UTF-8."""

MAX_GROUP_CHARACTERS = 255
"""Longest group name, in characters."""

MAX_OFFSET = 2**63 - 1
"""The largest offset that a stream could ever reach."""

MAX_TIMELINE = 100
"""Longest name of a database's timeline, in characters."""

GroupKind = Literal["share", "queue"]
StartPolicy = Literal["latest", "earliest", "time", "offset"]

_KINDS: dict[str, GroupKind] = {"$share": "share", "$shared": "share", "$queue": "queue"}
_REGEX_SPECIAL = frozenset(r"\.+*?()|[]{}^$")
_LITERAL, _ONE, _REST = range(3)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_OFFSET = "offset:"


def check_topic(text: str) -> str:
    """Return `text` if it is a topic that a message may be published to; raise `InvalidTopic` if not."""
    _check_text(InvalidTopic, "topic", text)
    for wildcard in "+#":
        if wildcard in text:
            rule = f"a topic has no wildcards, and this one contains {wildcard!r}"
            raise _refused(InvalidTopic, "topic", text, rule, "Publish to one exact topic")
    return text


@dataclass(frozen=True, slots=True)
class Filter:
    """An MQTT topic filter: `+` stands for one level, a final `#` for its parent and all below."""

    text: str
    levels: tuple[str, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        _check_text(InvalidFilter, "filter", self.text)
        levels = tuple(self.text.split("/"))
        _check_wildcards(self.text, levels)
        object.__setattr__(self, "levels", levels)

    @classmethod
    def parse(cls, text: str) -> Filter:
        """Read a filter; raise `InvalidFilter` where it breaks MQTT's rules."""
        return cls(text)

    def __str__(self) -> str:
        return self.text

    def matches(self, topic: str) -> bool:
        """True if a message published to `topic` (a valid one) is meant."""
        levels, mine = topic.split("/"), self.levels
        if mine[-1] == "#":
            mine = mine[:-1]
            if len(levels) < len(mine):
                return False
        elif len(levels) != len(mine):
            return False
        return all(want in ("+", have) for want, have in zip(mine, levels, strict=False))

    @property
    def regex(self) -> str:
        """The same test as an anchored RE2 pattern, which pyarrow and Python's `re.fullmatch` read alike."""
        return _regex(self.levels)

    def covers(self, other: Filter) -> bool:
        """True if every topic that `other` matches is matched by this filter too."""
        mine, theirs = _spelled_out(self.levels), _spelled_out(other.levels)
        for want, have in zip(mine, theirs, strict=False):
            if want == "#":
                return True
            if have == "#" or want not in ("+", have):
                return False
        return len(mine) == len(theirs) or mine[len(theirs) :] == ("#",)

    def intersects(self, other: Filter) -> bool:
        """True if at least one topic is matched by both."""
        mine, theirs = _spelled_out(self.levels), _spelled_out(other.levels)
        for one, two in zip(mine, theirs, strict=False):
            if "#" in (one, two):
                return True
            if "+" not in (one, two) and one != two:
                return False
        longer, common = max(mine, theirs, key=len), min(len(mine), len(theirs))
        return longer[common:] in ((), ("#",))

    @property
    def specificity(self) -> tuple[int, ...]:
        """Sorts the more specific filter first: level by level from the left, literal, `+`, `#`.

        Two different filters that match one and the same topic never have the same key.
        """
        return tuple({"+": _ONE, "#": _REST}.get(level, _LITERAL) for level in self.levels)


@dataclass(frozen=True, slots=True)
class Subscription:
    """What a group is named by: its kind, its name and its filter. `str()` is the one canonical spelling."""

    kind: GroupKind
    group: str
    filter: Filter

    def __post_init__(self) -> None:
        if self.kind not in _KINDS.values():
            rule, remedy = (
                "a group's kind is 'share' or 'queue'",
                "Write $share/GROUP/FILTER or $queue/GROUP/FILTER",
            )
            raise _refused(InvalidSubscription, "kind", self.kind, rule, remedy)
        _check_group(self.group)

    @classmethod
    def parse(cls, text: str) -> Subscription:
        """Read `$share/GROUP/FILTER` (or `$shared/`) or `$queue/GROUP/FILTER`.

        Raises `InvalidSubscription` for its shape or the group's name, `InvalidFilter` for the filter in it. Control
        characters are refused here alone, so that a group that has some can still be read from where it is stored.
        """
        found = cls.stored(text)
        _check_controls(InvalidSubscription, "group", found.group)
        _check_controls(InvalidFilter, "filter", found.filter.text)
        return found

    @classmethod
    def stored(cls, text: str) -> Subscription:
        """Read one that is stored somewhere: `parse` without the rule about control characters."""
        prefix, _, rest = text.partition("/")
        group, slash, filter_text = rest.partition("/")
        if prefix not in _KINDS or not slash:
            rule = "a shared subscription is $share/GROUP/FILTER or $queue/GROUP/FILTER"
            remedy = "Quote it in a shell: '$share/billing/orders/#'"
            raise _refused(InvalidSubscription, "subscription", text, rule, remedy)
        return cls(_KINDS[prefix], group, Filter(filter_text))

    def __str__(self) -> str:
        return f"${self.kind}/{self.group}/{self.filter.text}"


@dataclass(frozen=True, slots=True)
class Start:
    """Where a group begins in the streams that are there when it is created; later ones it reads whole.

    `value` is microseconds since 1970 for `time`, an offset for `offset`, else 0. `str()` is the canonical spelling.
    """

    policy: StartPolicy
    value: int = 0

    LATEST: ClassVar[Start]
    """With what comes."""
    EARLIEST: ClassVar[Start]
    """With all that is stored."""

    @classmethod
    def at(cls, timestamp_us: int) -> Start:
        """With the first message stored at or after that time (the database's clock, microseconds since 1970)."""
        try:
            _EPOCH + timestamp_us * _MICROSECOND
        except OverflowError:
            rule = "a time is microseconds since 1970, in the years 1 to 9999"
            raise _refused(UsageError, "start", str(timestamp_us), rule, "Correct it") from None
        return cls("time", timestamp_us)

    @classmethod
    def offset(cls, offset: int) -> Start:
        """With that offset in each open stream; with what comes where a stream is not so long."""
        if not 0 <= offset <= MAX_OFFSET:
            rule = f"an offset is a whole number from 0 to {MAX_OFFSET}"
            raise _refused(UsageError, "start", f"{_OFFSET}{offset}", rule, "Correct it")
        return cls("offset", offset)

    @property
    def time(self) -> datetime:
        """When, for the policy `time`."""
        return _EPOCH + self.value * _MICROSECOND

    @classmethod
    def parse(cls, text: str) -> Start:
        """Read `latest`, `earliest`, `offset:N` or an ISO 8601 time with its time zone. Raises `UsageError`."""
        if text in _BY_NAME:
            return _BY_NAME[text]
        digits = text.removeprefix(_OFFSET)
        if digits != text and digits.isascii() and digits.isdigit() and len(digits) <= len(str(MAX_OFFSET)):
            return cls.offset(int(digits))
        try:
            when = datetime.fromisoformat(text)
            if when.tzinfo is not None:
                return cls.at((when - _EPOCH) // _MICROSECOND)
            remedy = "Add the time zone: Z for UTC, or +01:00 say"
        except (ValueError, OverflowError):
            remedy = "Write one of them"
        rule = "a group starts at latest, earliest, offset:N, or a time with its time zone such as 2026-11-21T10:00:00Z"
        raise _refused(UsageError, "start", text, rule, remedy)

    def __str__(self) -> str:
        match self.policy:
            case "time":
                return self.time.isoformat().replace("+00:00", "Z")
            case "offset":
                return f"{_OFFSET}{self.value}"
            case policy:
                return policy


@dataclass(frozen=True, slots=True)
class Bookmark:
    """How far a reader has come: the next offset in each stream that it has not read to its end.

    Of the streams up to `known` all others have been read; those after it will be read from their beginning.
    `timeline`: of the database, on another one of which these offsets may be those of other messages; None: not known.
    `str()` and `parse` keep it as text.
    """

    known: int = 0
    offsets: Mapping[int, int] = field(default_factory=dict)
    timeline: str | None = None

    def __post_init__(self) -> None:
        numbers = (self.known, *self.offsets, *self.offsets.values())
        if any(type(number) is not int or not 0 <= number <= MAX_OFFSET for number in numbers):
            rule = f"streams and offsets are whole numbers from 0 to {MAX_OFFSET}"
            raise _refused(UsageError, "bookmark", str(self), rule, "Take it from a reader's `positions`")
        if self.timeline is not None and not (
            isinstance(self.timeline, str) and 0 < len(self.timeline) <= MAX_TIMELINE
        ):
            rule = f"a timeline is a text of 1 to {MAX_TIMELINE} characters"
            raise _refused(UsageError, "bookmark", str(self), rule, "Take it from a reader's `positions`")

    @classmethod
    def of(cls, offsets: Mapping[int, int]) -> Bookmark:
        """These streams from there on, and no others, not even their children."""
        return cls(MAX_OFFSET, dict(offsets))

    @classmethod
    def parse(cls, text: str) -> Bookmark:
        """Read what `str()` wrote. Raises `UsageError`."""
        try:
            read = json.loads(text)
            offsets = {int(stream): offset for stream, offset in read["offsets"].items()}
            return cls(read["known"], offsets, read.get("timeline"))
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            rule = 'a bookmark is {"known": N, "offsets": {"STREAM": OFFSET, ...}, "timeline": "NAME"}'
            raise _refused(UsageError, "bookmark", text, rule, "Take it from a reader's `positions`") from None

    def __str__(self) -> str:
        timeline = {} if self.timeline is None else {"timeline": self.timeline}
        return json.dumps(
            {"known": self.known, "offsets": {str(id): at for id, at in self.offsets.items()}, **timeline}
        )


Start.LATEST = Start("latest")
Start.EARLIEST = Start("earliest")
_BY_NAME = {str(start): start for start in (Start.LATEST, Start.EARLIEST)}


def _check_text(error: type[UsageError], what: str, text: str) -> None:
    """The rules that topics and filters share."""
    if not text:
        raise _refused(error, what, text, "it is empty, and needs a character", f"Give a {what} such as orders/eu")
    _check_characters(error, what, text)
    if len(text) * 4 > MAX_TOPIC_BYTES and (size := len(text.encode())) > MAX_TOPIC_BYTES:
        rule = f"it is {size} bytes of UTF-8 and the limit is {MAX_TOPIC_BYTES}"
        raise _refused(error, what, text, rule, "Shorten it, and put the rest into the message's key or headers")
    if text[0] == "$":
        rule = f"what begins with $ is reserved, and cannot be a {what}"
        raise _refused(error, what, text, rule, "Leave out the leading $")


def _check_characters(error: type[UsageError], what: str, text: str) -> None:
    if "\0" in text:
        raise _refused(error, what, text, "the character NUL is not allowed", "Remove it")
    try:
        text.encode()
    except UnicodeEncodeError:
        rule = "it holds a lone surrogate, which is not UTF-8"
        raise _refused(error, what, text, rule, "Decode the bytes with their true encoding first") from None


def _check_controls(error: type[UsageError], what: str, text: str) -> None:
    """Asked of what a subscription is made of, which people read. Topics may hold them, as MQTT allows."""
    if any("\0" < character < " " or "\x7f" <= character <= "\x9f" for character in text):
        rule = f"a subscription's {what} has no control characters"
        raise _refused(error, what, text, rule, "Remove them; + and # match topics that have some")


def _check_wildcards(text: str, levels: tuple[str, ...]) -> None:
    if "#" in text and ("#" in text[:-1] or levels[-1] != "#"):
        rule = "# stands alone in the last level"
        raise _refused(InvalidFilter, "filter", text, rule, "Write prefix/# for all that is under a prefix")
    if "+" in text and any("+" in level and level != "+" for level in levels):
        rule = "+ stands alone in its level"
        raise _refused(InvalidFilter, "filter", text, rule, "Write a/+/c, and filter further in your own code")


def _check_group(group: str) -> None:
    remedy = "Choose a name such as billing: $share/billing/orders/#"
    if not group:
        raise _refused(InvalidSubscription, "group", group, "a group's name is not empty", remedy)
    if any(character in group for character in "/+#"):
        raise _refused(InvalidSubscription, "group", group, "a group's name has no /, + or #", remedy)
    if len(group) > MAX_GROUP_CHARACTERS:
        rule = f"a group's name has at most {MAX_GROUP_CHARACTERS} characters, this one has {len(group)}"
        raise _refused(InvalidSubscription, "group", group, rule, remedy)
    _check_characters(InvalidSubscription, "group", group)


def _refused(error: type[UsageError], what: str, text: str, rule: str, remedy: str) -> UsageError:
    shown = repr(text) if len(text) <= 80 else repr(text[:80]) + f"... ({len(text)} characters)"
    return error(f"{what} {shown}: {rule}. {remedy}.")


def _spelled_out(levels: tuple[str, ...]) -> tuple[str, ...]:
    """No topic is empty, so that `#` means `+/#`, and `/#`, whose parent would be the empty topic, means `/+/#`."""
    return (*levels[:-1], "+", "#") if levels in (("#",), ("", "#")) else levels


@lru_cache(maxsize=4096)
def _regex(levels: tuple[str, ...]) -> str:
    if levels == ("#",):
        return "(?s)^.*$"
    rest = "(?:/.*)?" if levels[-1] == "#" else ""
    named = levels[:-1] if rest else levels
    return "(?s)^" + "/".join("[^/]*" if level == "+" else _escaped(level) for level in named) + rest + "$"


def _escaped(level: str) -> str:
    """Only what RE2 calls special: it refuses some of the escapes that `re.escape` writes."""
    return "".join("\\" + c if c in _REGEX_SPECIAL else c for c in level)
