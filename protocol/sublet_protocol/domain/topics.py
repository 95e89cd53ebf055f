"""Topics, filters and their parts, checked once, where users give them.

The rules are MQTT 5's (section 4.7), and tighter in two: a topic is not so long, and `$` at the start of a topic or a
filter is rejected, because what begins with it (`$SYS/...`, `$share/...`) is never a message of a user. Empty levels
(`a//b`, `/a`) are legal, and differ from levels left out. A value of these types that exists is valid.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

from sublet_protocol.domain.bounded_cache import BoundedCache
from sublet_protocol.domain.errors import InvalidFilter, InvalidTopic, UsageError
from sublet_protocol.domain.limits import MAX_CACHED_FILTERS, MAX_TOPIC_BYTES, MAX_TOPIC_LEVELS

MAX_TIMELINE = 100
"""Longest name of a database's timeline, in characters."""
_REGEX_SPECIAL = frozenset(r"\.+*?()|[]{}^$")
_LITERAL, _ONE, _REST = range(3)
_Value = TypeVar("_Value")


def check_topic(text: str) -> str:
    """Return `text` if it is a topic that a message may be published to; raise `InvalidTopic` if not."""
    _check_text(InvalidTopic, "topic", text)
    for wildcard in "+#":
        if wildcard in text:
            rule = f"a topic has no wildcards, and this one contains {wildcard!r}"
            raise text_error(InvalidTopic, "topic", text, rule, "Publish to one exact topic")
    return text


@dataclass(frozen=True, slots=True)
class TopicFilter:
    """An MQTT topic filter: `+` stands for one level, a final `#` for its parent and all below."""

    text: str
    levels: tuple[str, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        _check_text(InvalidFilter, "filter", self.text)
        levels = tuple(self.text.split("/"))
        _check_wildcards(self.text, levels)
        object.__setattr__(self, "levels", levels)

    @classmethod
    def parse(cls, text: str) -> TopicFilter:
        """Read a filter; raise `InvalidFilter` where it breaks MQTT's rules."""
        return cls(text)

    def __str__(self) -> str:
        return self.text

    def matches(self, topic: str) -> bool:
        """Return whether the filter matches a valid topic."""
        levels, own = topic.split("/"), self.levels
        if own[-1] == "#":
            own = own[:-1]
            if len(levels) < len(own):
                return False
        elif len(levels) != len(own):
            return False
        return all(level in ("+", other_level) for level, other_level in zip(own, levels, strict=False))

    @property
    def regex(self) -> str:
        """Return the same test as an anchored RE2 pattern, which pyarrow and Python's `re.fullmatch` read alike."""
        return _regexes.get(self.text)

    def covers(self, other: TopicFilter) -> bool:
        """Return whether this filter matches every topic that `other` matches."""
        own_levels, other_levels = _expand(self.levels), _expand(other.levels)
        for level, other_level in zip(own_levels, other_levels, strict=False):
            if level == "#":
                return True
            if other_level == "#" or level not in ("+", other_level):
                return False
        return len(own_levels) == len(other_levels) or own_levels[len(other_levels) :] == ("#",)

    def intersects(self, other: TopicFilter) -> bool:
        """Return whether at least one topic is matched by both."""
        own_levels, other_levels = _expand(self.levels), _expand(other.levels)
        for level, other_level in zip(own_levels, other_levels, strict=False):
            if "#" in (level, other_level):
                return True
            if "+" not in (level, other_level) and level != other_level:
                return False
        longer, common = max(own_levels, other_levels, key=len), min(len(own_levels), len(other_levels))
        return longer[common:] in ((), ("#",))

    @property
    def specificity(self) -> tuple[int, ...]:
        """Return a sort key by which the more specific filter is first: level by level from the left, literal, `+`,
        `#`.

        Two different filters that match the same topic never have the same key.
        """
        return tuple({"+": _ONE, "#": _REST}.get(level, _LITERAL) for level in self.levels)


class FilterTree(Generic[_Value]):
    """A value for each of many filters, as a tree of their levels: the filters that cover another one are found without
    a look at the rest."""

    __slots__ = ("_children", "_value")

    def __init__(self) -> None:
        self._children: dict[str, FilterTree[_Value]] = {}
        self._value: _Value | None = None

    def add(self, filter: TopicFilter, value: _Value) -> None:
        """Store the filter's value, unless it has one."""
        node = self
        for level in _expand(filter.levels):
            child = node._children.get(level)
            if child is None:
                child = node._children[level] = FilterTree()
            node = child
        if node._value is None:
            node._value = value

    def find_covering(self, filter: TopicFilter) -> list[_Value]:
        """Return the value of each filter that covers this one, as `TopicFilter.covers` does."""
        nodes, found = [self], list[FilterTree[_Value]]()
        for level in _expand(filter.levels):
            names = {level, "+"} if level != "#" else ()
            children = [node._children for node in nodes]
            found += [each["#"] for each in children if "#" in each]
            nodes = [each[name] for each in children for name in names if name in each]
            if not nodes:
                break
        found += nodes
        found += [node._children["#"] for node in nodes if "#" in node._children]
        return [node._value for node in found if node._value is not None]


def _check_text(error: type[UsageError], subject: str, text: str) -> None:
    """Raise `error` unless the text follows the rules that topics and filters share."""
    if not text:
        raise text_error(
            error, subject, text, "it is empty, and needs a character", f"Give a {subject} such as orders/eu"
        )
    check_characters(error, subject, text)
    if (size := len(text.encode())) > MAX_TOPIC_BYTES:
        rule = f"it is {size} bytes of UTF-8 and the limit is {MAX_TOPIC_BYTES}"
        raise text_error(error, subject, text, rule, "Shorten it, and put the rest into the message's key or headers")
    if (levels := text.count("/") + 1) > MAX_TOPIC_LEVELS:
        rule = f"it has {levels} levels and the limit is {MAX_TOPIC_LEVELS}"
        raise text_error(error, subject, text, rule, "Put the rest into the message's key or headers")
    if text[0] == "$":
        rule = f"what begins with $ is reserved, and cannot be a {subject}"
        raise text_error(error, subject, text, rule, "Leave out the leading $")


def check_characters(error: type[UsageError], subject: str, text: str) -> None:
    """Raise `error` where the text cannot be stored: for NUL, or a lone surrogate."""
    if "\0" in text:
        raise text_error(error, subject, text, "the character NUL is not allowed", "Remove it")
    try:
        text.encode()
    except UnicodeEncodeError:
        rule = "it holds a lone surrogate, which is not UTF-8"
        raise text_error(error, subject, text, rule, "Decode the bytes with their true encoding first") from None


def _check_wildcards(text: str, levels: tuple[str, ...]) -> None:
    if "#" in text and ("#" in text[:-1] or levels[-1] != "#"):
        rule = "# stands alone in the last level"
        raise text_error(InvalidFilter, "filter", text, rule, "Write prefix/# for all that is under a prefix")
    if "+" in text and any("+" in level and level != "+" for level in levels):
        rule = "+ stands alone in its level"
        raise text_error(InvalidFilter, "filter", text, rule, "Write a/+/c, and filter further in your own code")


def text_error(error: type[UsageError], subject: str, text: str, rule: str, hint: str) -> UsageError:
    """Return the error, with the text (its beginning if it is long), the rule that it breaks, and a hint."""
    shown = repr(text) if len(text) <= 80 else repr(text[:80]) + f"... ({len(text)} characters)"
    return error(f"{subject} {shown}: {rule}. {hint}.")


def _expand(levels: tuple[str, ...]) -> tuple[str, ...]:
    """Return the levels with `#` replaced by `+/#`, and `/#` by `/+/#`: no topic is empty."""
    return (*levels[:-1], "+", "#") if levels in (("#",), ("", "#")) else levels


def _to_regex(text: str) -> str:
    if text == "#":
        return "(?s)^.*$"
    levels = text.split("/")
    suffix = "(?:/.*)?" if levels[-1] == "#" else ""
    prefix_levels = levels[:-1] if suffix else levels
    return "(?s)^" + "/".join("[^/]*" if level == "+" else _escape(level) for level in prefix_levels) + suffix + "$"


def _escape(level: str) -> str:
    """Return the level with what is special in RE2 escaped: it rejects some of the escapes that `re.escape` writes."""
    return "".join("\\" + c if c in _REGEX_SPECIAL else c for c in level)


_regexes = BoundedCache(_to_regex, MAX_CACHED_FILTERS)
