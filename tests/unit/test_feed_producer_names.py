"""The ids of those who publish through nodes."""

from __future__ import annotations

import pytest

from sublet_leader.feed.publish import make_producer_id
from sublet_protocol.gate.audit import RefusalLog
from sublet_protocol.gate.gate import Caller


@pytest.mark.conforms("X5")
def test_a_slash_makes_no_producer_anothers() -> None:
    def named(principal: str, name: str) -> str:
        return make_producer_id(Caller(principal, "", "Publish", None, RefusalLog()), name)

    assert named("user:a", "b/p") != named("user:a/b", "p")
    assert named("user:a%2Fb", "p") != named("user:a/b", "p")
    assert named("user:a", "b/p") == "feed/user:a/b/p"
