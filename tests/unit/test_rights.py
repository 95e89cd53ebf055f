"""Rights: which rule allows what, and what no rule allows."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import pytest

from sublet_protocol.domain.access.rights import AccessRule, AccessRules, Right, check_principal, parse_right
from sublet_protocol.domain.access.token import NewToken, check_token, hash_token, parse_token_id
from sublet_protocol.domain.errors import InvalidSetting, UsageError
from sublet_protocol.domain.topics import TopicFilter
from tests.kit import same_name


def rule(principal: str, right: Right, filter: str, group: str = "*") -> AccessRule:
    return AccessRule(principal, right, TopicFilter(filter), group)


RULES = (
    rule("user:etl", Right.PUBLISH, "orders/#"),
    rule("user:spark", Right.JOIN, "orders/#", "billing"),
    rule("user:spark", Right.JOIN, "logs/+", "team-*"),
    rule("user:ops", Right.OPERATE, "#"),
    rule("*", Right.READ, "public/#"),
)


@pytest.mark.parametrize(
    ("principal", "right", "asked", "group", "allowed"),
    [
        ("user:etl", Right.PUBLISH, "orders/eu", None, 0),
        ("user:etl", Right.PUBLISH, "orders", None, 0),
        ("user:etl", Right.PUBLISH, "order", None, None),
        ("user:etl", Right.READ, "orders/eu", None, None),
        ("user:other", Right.PUBLISH, "orders/eu", None, None),
        ("user:spark", Right.JOIN, "orders/#", "billing", 1),
        ("user:spark", Right.JOIN, "orders/+/x", "billing", 1),
        ("user:spark", Right.JOIN, "#", "billing", None),
        ("user:spark", Right.JOIN, "orders/#", "billing2", None),
        ("user:spark", Right.JOIN, "orders/#", None, None),
        ("user:spark", Right.JOIN, "logs/a", "team-a", 2),
        ("user:spark", Right.JOIN, "logs/a", "steam-a", None),
        ("user:spark", Right.WATCH, "orders/#", "billing", None),
        ("user:ops", Right.WATCH, "orders/#", "billing", 3),
        ("user:ops", Right.OPERATE, "#", None, 3),
        ("user:ops", Right.PUBLISH, "orders/eu", None, None),
        ("user:ops", Right.JOIN, "orders/eu", "billing", None),
        ("user:anyone", Right.READ, "public/a", None, 4),
        ("user:anyone", Right.READ, "public/+", None, 4),
        ("user:anyone", Right.READ, "+/a", None, None),
    ],
)
def test_one_rule_covers_what_is_asked(
    principal: str, right: Right, asked: str, group: str | None, allowed: int | None
) -> None:
    found = AccessRules(RULES).find_rule(principal, right, TopicFilter(asked), group)
    assert found == (None if allowed is None else RULES[allowed])


def test_several_rules_do_not_add_up() -> None:
    halves = AccessRules([rule("user:a", Right.READ, "a/b"), rule("user:a", Right.READ, "a/+/#")])
    assert halves.find_rule("user:a", Right.READ, TopicFilter("a/+")) is not None
    assert halves.find_rule("user:a", Right.READ, TopicFilter("a/#")) is None


def count_lines(work: Callable[[], object]) -> int:
    """Return how many lines of Python are executed for the work."""
    lines, before = 0, sys.gettrace()

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace

    gc.disable()  # a finalizer's lines would count
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
        gc.enable()
    return lines


@pytest.mark.conforms("X4")
@pytest.mark.parametrize(
    ("right", "filter", "group"),
    [
        (Right.PUBLISH, "tenant-{}/#", "*"),
        (Right.PUBLISH, "tenant/+/{}", "*"),
        (Right.JOIN, "tenant-{}/#", "team"),
        (Right.JOIN, "#", "team-{}"),
        (Right.WATCH, "tenant-{}/#", "team-{}-*"),
    ],
)
def test_many_rules_take_no_longer_than_few(right: Right, filter: str, group: str) -> None:
    """None is looked at that is of another topic or group: a batch has 10 000 topics, and a principal any number of
    rules."""

    def count(number: int) -> int:
        granted = [rule("user:a", right, filter.format(n), group.format(n)) for n in range(100, 100 + number)]
        rights, asked = AccessRules(granted), TopicFilter("tenant-1/eu/1")
        return count_lines(lambda: rights.find_rule("user:a", right, asked, "team-1"))

    assert count(300) == count(3)


def test_without_rules_nothing_is_allowed() -> None:
    for right in Right:
        assert AccessRules().find_rule("user:a", right) is None
        assert not AccessRules().has_right("user:a", right)


HINTS = {"etl": "etl", "a b": "NAME", "user:": "NAME"}
"""What is written for what is no principal."""


@pytest.mark.parametrize(
    ("take", "text", "rule"),
    [
        *((check_principal, text, "principal") for text in ("", "etl", "user:", "user:a b", "user:*", "user:\n", "*")),
        (check_principal, "user:" + "x" * 251, "principal"),
        *((check_principal, text, f"Write user:{name}\\.$") for text, name in HINTS.items()),
        (partial(check_principal, may_be_anybody=True), "etl", "principal"),
        *((partial(rule, "user:a", Right.JOIN, "a"), text, "group") for text in ("", "a*b", "**", "a/b", "+", "a\0")),
        *((partial(rule, "user:a", Right.JOIN, "a"), text, "at most 255") for text in ("x" * 256, "x" * 256 + "*")),
        (partial(rule, "user:a", Right.PUBLISH, "a"), "billing", "Leave --group out"),
        (parse_right, "write", "publish, read, join, watch, operate"),
    ],
    ids=same_name,
)
def test_what_is_part_of_no_rule_is_refused(take: Callable[[str], object], text: str, rule: str) -> None:
    with pytest.raises(UsageError, match=rule):
        take(text)


def test_the_longest_names_are_part_of_rules() -> None:
    assert check_principal("user:" + "x" * 250)
    for pattern in ("x" * 255, "x" * 255 + "*"):
        assert rule("user:a", Right.JOIN, "a", pattern).group == pattern


def test_a_token_is_drawn_and_found_by_its_id() -> None:
    new = NewToken.draw()
    token = new.token.reveal()
    assert parse_token_id(token) == new.token_id
    assert (len(token), len(new.token_id), new.digest) == (4 + 8 + 1 + 43, 8, hash_token(token))
    assert token not in repr(new)
    check_token(token)


@pytest.mark.parametrize(
    "token", ["", "sub_", "sub_abcdefgh_x", "SUB_abcdefgh_" + "x" * 43, "sub_abcdefgh_" + "é" * 43]
)
def test_what_is_no_token_has_no_id(token: str) -> None:
    assert parse_token_id(token) is None
    with pytest.raises(InvalidSetting, match="access token, of"):
        check_token(token)
