"""What rules allow is what a walk through all of them finds; that filters cover what they should is a law of topics."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sublet_protocol.domain.access.rights import ANYBODY, AccessRule, AccessRules, Right
from sublet_protocol.domain.topics import TopicFilter

WORDS = ("a", "b", "")
DEPTH = 4


@st.composite
def filters(draw: st.DrawFn) -> TopicFilter:
    levels = draw(st.lists(st.sampled_from((*WORDS, "+")), max_size=DEPTH - 1))
    if draw(st.booleans()) or not any(levels):
        levels = [*levels, draw(st.sampled_from(("#", "a")))]
    return TopicFilter("/".join(levels[: DEPTH - 1] if levels[-1] != "#" else levels[-(DEPTH - 1) :]) or "#")


PRINCIPALS = ("user:a", "user:b")
RIGHTS = (Right.PUBLISH, Right.WATCH, Right.OPERATE)
WIDE = tuple(map(TopicFilter, ("#", "+/#", "a/#", "a/+", "+/+", "/#")))
GROUPS = ("", "t", "te", "team", "team-a", "*", "t*", "te*", "team-*", "team-a*", "x")
rules = st.builds(
    lambda principal, right, filter, group: AccessRule(
        principal, right, filter, group if right.is_on_groups and group else ANYBODY
    ),
    st.sampled_from((*PRINCIPALS, ANYBODY)),
    st.sampled_from(RIGHTS),
    st.sampled_from(WIDE) | filters(),
    st.sampled_from(GROUPS),
)


def find_first(
    granted: list[AccessRule], principal: str, right: Right, asked: TopicFilter, group: str | None
) -> AccessRule | None:
    """Go through all rules: those of the right before those of one that includes it, one's own before everybody's."""
    for included in right.included_in:
        for whose in (principal, ANYBODY):
            for rule in granted:
                if (rule.principal, rule.right) == (whose, included) and rule.filter.covers(asked):
                    prefix = rule.group.removesuffix("*")
                    is_prefix = prefix != rule.group and group is not None and group.startswith(prefix)
                    if rule.group in (ANYBODY, group) or is_prefix:
                        return rule
    return None


@pytest.mark.conforms("X1")
@given(
    st.lists(rules, max_size=20),
    st.sampled_from(PRINCIPALS),
    st.sampled_from(RIGHTS),
    filters(),
    st.sampled_from((None, *GROUPS)),
)
def test_the_first_rule_that_allows_it_is_found(
    granted: list[AccessRule], principal: str, right: Right, asked: TopicFilter, group: str | None
) -> None:
    """As by going through all of them, one by one."""
    found = AccessRules(granted).find_rule(principal, right, asked, group)
    assert found is find_first(granted, principal, right, asked, group)
