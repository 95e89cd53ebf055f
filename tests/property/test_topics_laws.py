"""Filters against brute force: all topics of up to four levels over a small alphabet."""

from __future__ import annotations

import itertools
import re

import pyarrow as pa
import pyarrow.compute as pc
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sublet_protocol.domain.topics import TopicFilter

ALPHABET = ("a", "b", "")
FRESH = "z"  # a level that no filter names
TOPICS = [
    topic
    for depth in range(1, 5)
    for levels in itertools.product((*ALPHABET, FRESH), repeat=depth)
    if (topic := "/".join(levels))
]

LEVELS = st.lists(st.sampled_from((*ALPHABET, "+")), min_size=0, max_size=3)
FILTERS = (
    st.tuples(LEVELS, st.booleans())
    .map(lambda parts: "/".join((*parts[0], *(["#"] if parts[1] else []))))
    .filter(bool)
    .map(TopicFilter)
)
TEXT_FILTERS = (
    st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="/+#\0$")), min_size=1, max_size=3)
    .map("/".join)
    .filter(bool)
)


def matched(one: TopicFilter) -> set[str]:
    return {topic for topic in TOPICS if one.matches(topic)}


@settings(max_examples=300)
@given(FILTERS, FILTERS)
@example(TopicFilter("+/#"), TopicFilter("#"))
@example(TopicFilter("a"), TopicFilter("a/#"))
@example(TopicFilter("/+/#"), TopicFilter("/#"))
def test_covers_is_inclusion(one: TopicFilter, other: TopicFilter) -> None:
    assert one.covers(other) == (matched(other) <= matched(one))


@settings(max_examples=300)
@given(FILTERS, FILTERS)
@example(TopicFilter("a/#"), TopicFilter("a"))
@example(TopicFilter("/#"), TopicFilter("+"))
def test_intersects_is_a_common_topic(one: TopicFilter, other: TopicFilter) -> None:
    assert one.intersects(other) == other.intersects(one) == bool(matched(one) & matched(other))


@given(FILTERS, FILTERS)
def test_one_of_two_that_match_is_more_specific(one: TopicFilter, other: TopicFilter) -> None:
    if one != other and matched(one) & matched(other):
        assert one.specificity != other.specificity


@given(FILTERS)
def test_the_regex_matches_what_the_filter_does(one: TopicFilter) -> None:
    by_arrow = pc.match_substring_regex(pa.array(TOPICS), one.regex).to_pylist()
    expected = [one.matches(topic) for topic in TOPICS]
    assert by_arrow == expected
    assert [re.fullmatch(one.regex, topic) is not None for topic in TOPICS] == expected


@given(TEXT_FILTERS, TEXT_FILTERS)
def test_any_text_is_literal_in_the_regex(text: str, other: str) -> None:
    topics = [text, other, text + "\n", text + "/x"]
    for one in (TopicFilter(text), TopicFilter(text + "/#")):
        by_arrow = pc.match_substring_regex(pa.array(topics), one.regex).to_pylist()
        assert by_arrow == [one.matches(topic) for topic in topics]
