"""Topics, filters and subscriptions: what is legal, what is refused and how the refusal reads."""

from __future__ import annotations

import pickle
import re

import pytest

from sublet_protocol.domain.errors import InvalidFilter, InvalidSubscription, InvalidTopic, UsageError
from sublet_protocol.domain.subscriptions import MAX_OFFSET, StartingPosition, Subscription
from sublet_protocol.domain.topics import TopicFilter, check_topic


@pytest.mark.parametrize(
    "topic", ["a", "orders/eu", "/", "a//b", "/a/", "grüße/东京", "a$b", "x" * 4096, "é" * 2048, "/" * 127]
)
def test_legal_topics_come_back_unchanged(topic: str) -> None:
    assert check_topic(topic) == topic


@pytest.mark.parametrize(
    ("topic", "rule"),
    [
        ("", "empty"),
        ("a/+", "wildcards"),
        ("a/#", "wildcards"),
        ("a\0b", "NUL"),
        ("\ud800", "surrogate"),
        ("$SYS/broker", "reserved"),
        ("x" * 4097, "4097 bytes"),
        ("+" * 80, "\\+': a topic has no wildcards"),
        ("+" * 81, "81 characters"),
        ("/" * 128, "129 levels"),
        ("é" * 2049, "4098 bytes"),
    ],
)
def test_a_topic_is_refused_with_the_rule(topic: str, rule: str) -> None:
    with pytest.raises(InvalidTopic, match=rule) as refusal:
        check_topic(topic)
    assert re.fullmatch(r"topic .{,290}\.", str(refusal.value).encode().decode(), re.DOTALL), "it is sent, too"


@pytest.mark.parametrize("text", ["#", "+", "a/#", "+/+", "/+", "a//#", "a b/+"])
def test_legal_filters(text: str) -> None:
    assert str(TopicFilter.parse(text)) == text


@pytest.mark.parametrize(
    "text", ["", "a#", "#/a", "a/#/b", "a+", "+a/b", "a/b+", "\0", "\udfff", "$SYS/#", "x" * 65536]
)
@pytest.mark.conforms("E24")
def test_malformed_filters_are_refused(text: str) -> None:
    with pytest.raises(InvalidFilter):
        TopicFilter.parse(text)


@pytest.mark.parametrize(
    ("filter_text", "yes", "no"),
    [
        ("sport/#", ["sport", "sport/", "sport/a/b"], ["sports", "a/sport", "/sport"]),
        ("#", ["a", "/", "a/b"], []),
        ("+", ["a"], ["/a", "a/", "a/b"]),
        ("/+", ["/a", "/"], ["a", "/a/b"]),
        ("a/+/c", ["a/b/c", "a//c"], ["a/c", "a/b/c/d"]),
        ("a.c", ["a.c"], ["abc"]),
    ],
)
def test_matching_follows_mqtt(filter_text: str, yes: list[str], no: list[str]) -> None:
    matched = [topic for topic in yes + no if TopicFilter(filter_text).matches(topic)]
    assert matched == yes


def test_the_more_specific_filter_sorts_first() -> None:
    texts = ["orders", "orders/eu", "orders/+", "orders/+/x", "orders/#", "+/eu", "+/#", "#"]
    ordered = sorted(map(TopicFilter, reversed(texts)), key=lambda one: one.specificity)
    assert [str(one) for one in ordered] == texts


def test_a_subscription_is_read_into_its_parts() -> None:
    subscription = Subscription.parse("$share/billing/orders/+/#")
    assert (subscription.kind, subscription.group, subscription.filter.text) == ("share", "billing", "orders/+/#")
    assert Subscription.parse("$shared/billing/orders/+/#") == subscription, "another spelling"
    assert str(subscription) == "$share/billing/orders/+/#"


@pytest.mark.conforms("E24")
def test_canonical_text_keeps_every_subscription_apart() -> None:
    longest = "é" * 255
    texts = [
        "$share/a/b/c",
        "$share/a/b",
        "$share/a//b",
        "$queue/a/b",
        "$share/b/a",
        "$share/a/+",
        "$share/a/#",
        f"$share/{longest}/a/#",
        "$share/g\u0301/a",
        "$share/\u01f5/a",
        "$share/a b/c d",
        "$share/~/\xa0",
    ]
    subscriptions = [Subscription.parse(text) for text in texts]
    assert len(set(subscriptions)) == len(texts)
    assert [str(one) for one in subscriptions] == texts


@pytest.mark.conforms("E24")
@pytest.mark.parametrize(
    ("text", "rule"),
    [
        *((text, "a shared subscription is") for text in ("orders/#", "$share", "$share/g", "$SHARE/g/a")),
        ("$share//a", "not empty"),
        *((f"$share/{group}/c", "no /, \\+ or #") for group in ("a+b", "a#")),
        ("$share/" + "g" * 256 + "/a", "at most 255"),
        ("$queue/g\0/a", "NUL"),
        ("$queue/\ud800/a", "surrogate"),
        *((f"$share/{group}/a", "no control characters") for group in ("evil\x1b]0;P\a", "a\nb", "a\x9fb")),
    ],
)
def test_a_malformed_subscription_is_refused(text: str, rule: str) -> None:
    with pytest.raises(InvalidSubscription, match=rule) as refusal:
        Subscription.parse(text)
    str(refusal.value).encode()


@pytest.mark.conforms("E24")
@pytest.mark.parametrize("text", ["$share/g/", "$share/g/a#", "$share/g/$share/h/a", "$share/g/a\tb", "$share/g/\x7f"])
def test_a_malformed_filter_of_a_subscription(text: str) -> None:
    with pytest.raises(InvalidFilter):
        Subscription.parse(text)


def test_words_are_values() -> None:
    one = Subscription.parse("$share/g/a/#")
    assert pickle.loads(pickle.dumps(one)) == one
    assert hash(TopicFilter("a/#")) == hash(TopicFilter("a/#"))
    with pytest.raises(InvalidSubscription):
        Subscription("shared", "g", TopicFilter("a"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "start", "canonical"),
    [
        ("latest", StartingPosition.LATEST, "latest"),
        ("earliest", StartingPosition.EARLIEST, "earliest"),
        ("offset:0", StartingPosition.at_offset(0), "offset:0"),
        ("offset:007", StartingPosition.at_offset(7), "offset:7"),
        (f"offset:{MAX_OFFSET}", StartingPosition.at_offset(MAX_OFFSET), f"offset:{MAX_OFFSET}"),
        ("1970-01-01T00:00:00Z", StartingPosition.at_time(0), "1970-01-01T00:00:00Z"),
        ("1970-01-01T01:00:01.5+01:00", StartingPosition.at_time(1_500_000), "1970-01-01T00:00:01.500000Z"),
        ("2026-11-21T10:00:00-02:00", StartingPosition.at_time(1_795_262_400_000_000), "2026-11-21T12:00:00Z"),
    ],
)
def test_a_start_is_read_and_spelled_in_one_way(text: str, start: StartingPosition, canonical: str) -> None:
    assert StartingPosition.parse(text) == start
    assert str(start) == canonical
    assert StartingPosition.parse(canonical) == start


def test_an_offset_has_its_bounds() -> None:
    assert [StartingPosition.at_offset(offset).value for offset in (0, MAX_OFFSET)] == [0, MAX_OFFSET]
    for offset in (-1, MAX_OFFSET + 1):
        with pytest.raises(UsageError, match=f"offset:{offset}.* from 0 to {MAX_OFFSET}"):
            StartingPosition.at_offset(offset)


@pytest.mark.parametrize(
    ("text", "reported"),
    [
        *((text, "Write one of them") for text in ("yesterday", "", "LATEST", "2026-13-21T10:00:00Z")),
        *((f"offset:{n}", f"from 0 to {2**63 - 1}") for n in ("", "-1", "²", "9" * 19, "9" * 5000)),
        *((text, "Add the time zone") for text in ("2026-11-21", "2026-11-21T10:00:00")),
        ("0001-01-01T00:00:00+05:00", "in the years 1 to 9999"),
    ],
)
def test_a_start_that_is_none_is_refused(text: str, reported: str) -> None:
    with pytest.raises(UsageError) as refused:
        StartingPosition.parse(text)
    assert str(refused.value).startswith("starting_position ")
    assert reported in str(refused.value)
    assert len(str(refused.value)) < 400
