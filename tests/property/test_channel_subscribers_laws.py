"""The table of subscriptions, small as it is kept, answers as a plain set of them would."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sublet_protocol.pubsub.channel_subscribers import SubscriptionIndex

NAMES, CHANNELS, KEYS = ("a", "b", "c"), ("logs", "price"), ("k", "l", None)
STEP = st.tuples(st.booleans(), st.sampled_from(NAMES), st.sampled_from(CHANNELS), st.sampled_from(KEYS))


@pytest.mark.conforms("R3")
@settings(max_examples=300)
@given(st.lists(STEP, max_size=60))
def test_the_index_is_the_set_of_subscriptions(steps: list[tuple[bool, str, str, str | None]]) -> None:
    index = SubscriptionIndex()
    model: set[tuple[str, str, str | None]] = set()
    for adds, name, channel, key in steps:
        others = {one for one in model if one[1:] == (channel, key)}
        if adds:
            assert index.add(name, channel, key) == (not others)
            model.add((name, channel, key))
        else:
            assert index.remove(name, channel, key) == (others == {(name, channel, key)})
            model.discard((name, channel, key))
        assert set(index.entries()) == model
        assert len(index) == len({one[1:] for one in model})
        for one in CHANNELS:
            readers = {name for name, channel, key in model if channel == one and key in ("k", None)}
            assert set(index.subscribers(one, "k")) == readers
    for entry in model:
        index.remove(*entry)
    assert len(index) == 0
