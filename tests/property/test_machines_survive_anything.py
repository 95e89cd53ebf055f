"""No message of a peer raises, whatever is in it: borrowers, agents, leaders and nodes go on (E7, R11, X4).

The messages are absurd (huge and negative ids, NaN, infinities, strange texts) but also often right by accident: ids
are drawn from those in use, so that they get past the first check.
"""

from __future__ import annotations

import math
from typing import Protocol, TypeVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sublet_borrower.machine import agent as agents
from sublet_borrower.machine.events import NodeLost, ProgressReported
from sublet_borrower.settings import BorrowerSettings
from sublet_leader.group.events import ForcedRevokeRequested
from sublet_leader.node import events
from sublet_protocol.domain.limits import MAX_WEIGHT, MIN_WEIGHT
from sublet_protocol.messages import borrower_leader as messages
from sublet_protocol.tick import Tick
from tests.kit import GRANT_KEY
from tests.unit.leader_bench import Bench
from tests.unit.test_node_machine import Play

T = TypeVar("T")
BIG = 2**63 - 1
ABSURD = st.sampled_from([0, 1, -1, BIG, -BIG - 1, 1_700_000_000_000_000])
FLOATS = st.one_of(st.floats(), st.sampled_from([1.0, math.nan, math.inf, -math.inf, 5e-324, 1e308]))
BORROWERS = st.sampled_from(["a/1", "a/2", "a/3", "b/1", "", "\ud800", "x" * 5000])
AGENTS = st.sampled_from(["a", "b", ""])
_GOOD, _BAD = ["$share/bench/#", "$share/g/#", "$queue/q/#"], ["$shared/g/#", "", "$share", "$share/\ud800/#"]
SUBSCRIPTIONS = st.sampled_from([*_GOOD, *_BAD, "$share/g/" + "a/" * 9000])
SETTINGS = settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
STREAMS = st.one_of(st.integers(1, 3), ABSURD)
STARTS = st.sampled_from(["latest", "earliest", "", "yesterday"])


class Draw(Protocol):
    """`st.DrawFn`, or the `draw` of a data object."""

    def __call__(self, strategy: st.SearchStrategy[T], /) -> T: ...


class Ids:
    """Draws from what is in use, now and then."""

    def __init__(self, grants: list[int], terms: list[int]) -> None:
        self.grants, self.terms = [*grants, 0], [*terms, 0]

    def progress(self, draw: Draw) -> messages.StreamProgress:
        return messages.StreamProgress(
            draw(STREAMS),
            self.grant(draw),
            draw(st.one_of(ABSURD, st.integers(0, 100))),
            draw(st.booleans()),
            delivered_end=draw(st.one_of(ABSURD, st.integers(0, 100))),
        )

    def grant(self, draw: Draw) -> int:
        return draw(st.one_of(st.sampled_from(self.grants), ABSURD))

    def term(self, draw: Draw) -> int:
        return draw(st.one_of(st.sampled_from(self.terms), ABSURD))

    def several(self, draw: Draw) -> tuple[messages.StreamProgress, ...]:
        return tuple(self.progress(draw) for _ in range(draw(st.integers(0, 3))))

    def to_leader(
        self, draw: Draw
    ) -> (
        messages.LeaderWanted | messages.Ping | messages.UpdateProgress | messages.RevokeFinished | messages.Disconnect
    ):
        """Draw any message to a leader."""
        who = draw(BORROWERS)
        match draw(st.integers(0, 6)):
            case 0 | 1:
                reclaim = tuple(
                    messages.HeldGrant(draw(STREAMS), self.grant(draw), draw(ABSURD))
                    for _ in range(draw(st.integers(0, 2)))
                )
                group_id = draw(st.sampled_from([None, None, 1, 2, -1, BIG]))
                leaving, predecessor = draw(st.booleans()), draw(st.one_of(st.none(), BORROWERS))
                weight = draw(st.floats(MIN_WEIGHT, MAX_WEIGHT))  # others are refused as they are decoded
                return messages.LeaderWanted(
                    who,
                    draw(SUBSCRIPTIONS),
                    group_id,
                    weight,
                    None,
                    leaving,
                    reclaim,
                    draw(STARTS),
                    predecessor,
                )
            case 2:
                return messages.Ping((who, draw(BORROWERS)), draw(FLOATS))
            case 3 | 4:
                return messages.UpdateProgress(who, self.term(draw), self.several(draw))
            case 5:
                return messages.RevokeFinished(who, self.term(draw), draw(STREAMS), self.grant(draw))
            case _:
                return messages.Disconnect(who, self.term(draw), self.several(draw))

    def to_borrower(self, draw: Draw) -> object:
        """Draw any message to a borrower."""
        who, term, stream_id, grant_id = draw(BORROWERS), self.term(draw), draw(STREAMS), self.grant(draw)
        match draw(st.integers(0, 6)):
            case 0:
                return messages.LeaderConnectResponse(who, term, draw(ABSURD), draw(st.sampled_from(["", "", "n9:1"])))
            case 1:
                return messages.PingResponse(who, term, draw(FLOATS), draw(FLOATS))
            case 2:
                numbers = draw(ABSURD), 1, draw(ABSURD), draw(ABSURD)
                return messages.Grant(who, term, stream_id, grant_id, *numbers, "#", draw(ABSURD), grant_key=GRANT_KEY)
            case 3:
                return messages.Revoke(who, term, stream_id, grant_id)
            case 4:
                return messages.Revoked(who, term, stream_id, grant_id, draw(st.sampled_from(messages.GrantEndOutcome)))
            case 5:
                return messages.ProgressSaved(who, term, stream_id, grant_id, draw(ABSURD))
            case _:
                return messages.Invalidate(who, term, draw(st.sampled_from(messages.BorrowerEndReason)))


@pytest.mark.conforms("E7", "E10", "X4")
@SETTINGS
@given(st.data())
def test_a_leader_survives_whatever_it_receives(data: st.DataObject) -> None:
    draw, bench = data.draw, Bench(shards=2)
    if draw(st.booleans()):
        bench.joined()
        if draw(st.booleans()):
            bench.lead()
    for _ in range(draw(st.integers(1, 25))):
        ids = Ids([row.grant_id for row in bench.store.rows(1).values()], [bench.term])
        match draw(st.integers(0, 9)):
            case 0:
                bench.tick(draw(st.sampled_from([0.0, 0.3, 1.1, 7.0, 31.0])))
            case 1 | 2 if bench.entries or bench.renew:
                bench.fail() if draw(st.integers(0, 5)) == 0 else bench.commit()
            case 3:
                bench.revoke(draw(STREAMS))
            case 4:
                bench.streams.rollover(1, 2)
            case _:
                bench.receive(ids.to_leader(draw), draw(AGENTS))
    assert bench.wake_at > bench.now, "or it would spin"


@pytest.mark.conforms("E7", "R11", "X4")
@SETTINGS
@given(st.data())
def test_a_node_survives_whatever_it_receives(data: st.DataObject) -> None:
    draw, play = data.draw, Play()
    play.do(events.NodeStarted())
    if draw(st.booleans()):
        play.granted()
    for _ in range(draw(st.integers(1, 25))):
        grants = [row.grant_id for row in play.store.rows(1).values()]
        ids = Ids(grants, [leader.term for leader in play.machine.leaders.values()])
        match draw(st.integers(0, 12)):
            case 0:
                play.do(Tick(), play.now + draw(st.sampled_from([0.0, 0.3, 1.1, 7.0, 12.0, 61.0])))
            case 1 | 2 | 3 | 4 if play.requests:
                commit = play.requests[0]
                play.answer()
                if draw(st.integers(0, 9)) == 0 and play.requests and commit is not play.requests[0]:
                    fail_first(play)
            case 5:
                forced = ForcedRevokeRequested((draw(STREAMS),), "operator")
                play.do(events.GroupLeaderEvent(draw(st.sampled_from([1, 2, BIG])), forced))
            case 6 if draw(st.integers(0, 9)) == 0:
                play.do(events.ShutdownRequested(play.now + 5.0))
            case _:
                play.do(events.AgentMessageReceived(draw(AGENTS), ids.to_leader(draw)))
    assert play.stories == []
    assert play.last.wake_at is None or play.last.wake_at > play.now or play.last.is_stopped


def fail_first(play: Play) -> None:
    """Fail the next request if it is a commit."""
    if isinstance(request := play.requests[0], events.CommitWrites):
        play.requests.pop(0)
        play.do(events.WritesCommitFailed(request, is_outcome_unknown=True))


@pytest.mark.conforms("E7", "E10")
@SETTINGS
@given(st.data())
def test_an_agent_survives_whatever_it_receives(data: st.DataObject) -> None:
    draw, now = data.draw, 0.0
    agent = agents.Agent("a", BorrowerSettings())
    agent.decide(agents.NodesDiscovered(("n1:1", "n2:1")), now)
    handles = 0
    ids = Ids([50, 60], [100, 200])
    for _ in range(draw(st.integers(1, 40))):
        now += draw(st.sampled_from([0.0, 0.01, 0.3, 1.1, 6.5]))
        match draw(st.integers(0, 9)):
            case 0:
                handles += 1
                outcome = agent.decide(agents.JoinGroup(handles, draw(SUBSCRIPTIONS)), now)
            case 1:
                outcome = agent.decide(agents.CloseSubscription(draw(st.integers(0, 3))), now)
            case 2:
                outcome = agent.decide(Tick(), now)
            case 3:
                outcome = agent.decide(NodeLost(draw(st.sampled_from(["n1:1", "n2:1", "n9:1", ""]))), now)
            case 4:
                nodes = draw(st.sampled_from([(), ("n1:1",), ("n1:1", "n2:1")]))
                outcome = agent.decide(agents.NodesDiscovered(nodes), now)
            case 5:
                progress = ProgressReported(draw(STREAMS), ids.grant(draw), draw(ABSURD), draw(st.booleans()))
                outcome = agent.decide(agents.SessionProgressReported(draw(st.integers(0, 3)), progress), now)
            case _:
                node = draw(st.sampled_from(["n1:1", "n2:1", "n9:1"]))
                outcome = agent.decide(agents.NodeMessageReceived(node, ids.to_borrower(draw)), now)  # type: ignore[arg-type]
    agent.decide(Tick(), now)
    outcome = agent.decide(Tick(), now)
    assert outcome.wake_at is None or outcome.wake_at > now, "or it would spin"
