"""What those who watch a group are sent: nothing before it is written, everything in its order, and who leads."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from sublet_leader.group.members import Member
from sublet_leader.group.watch_events import GroupWatchEvent, transient_record
from sublet_leader.node.events import (
    CommitWrites,
    LeaderLookupCompleted,
    LookUpLeader,
    ShutdownRequested,
    WatcherLeaderQueryReceived,
    WritesCommitFailed,
)
from sublet_leader.node.group_event_publisher import (
    MAX_MEMBERS,
    MAX_QUERIES,
    MAX_QUERIES_OF_CALLER,
    GroupEventPublisher,
    WatcherLeaderQueryReply,
    parse_leader_query,
    to_group_event,
)
from sublet_protocol.domain.errors import UsageError
from sublet_protocol.domain.subscriptions import Subscription
from sublet_protocol.messages.head_and_group_events import GroupEventPayload
from sublet_protocol.pubsub.model import Channel
from sublet_protocol.tick import Tick
from sublet_storage.groups.model.records import GroupOptions, HistoryRecord, StartingPosition
from tests.unit.leader_bench import Bench, granted
from tests.unit.test_node_machine import SETTINGS, SUBSCRIPTION, WANTED, Play


def events(play: Play) -> list[str]:
    """What was sent since the last look."""
    names = [each.record.event for each in play.reported]
    play.reported.clear()
    return names


def members(bench: Bench) -> list[tuple[str, str | None]]:
    """What was sent of them since the last look."""
    reported = [(line.event, line.borrower_id) for line in bench.reported]
    bench.reported.clear()
    return reported


def under_way(play: Play) -> CommitWrites:
    """A first subscriber is there, and two grants for it are being written."""
    play.join()
    play.do(Tick(), play.now + SETTINGS.rebalance_debounce_s + 0.001)
    return play.take(CommitWrites)


# --- the node ---------------------------------------------------------------------------------------------------------


def test_a_grant_is_reported_when_it_is_written() -> None:
    play = Play()
    request = under_way(play)
    assert events(play) == ["takeover", "join"]
    play.do(play.execute(request))
    assert [(each.record.event, each.record.stream_id) for each in play.reported] == [("grant", 1), ("grant", 2)]
    assert {each.subscription for each in play.reported} == {SUBSCRIPTION}
    assert tuple(each.record for each in play.reported) == play.store.history(1)[1:], "the very lines, with their time"


@pytest.mark.parametrize(("unknown", "then"), [(False, []), (True, ["step_down"])])
def test_what_is_not_known_as_written_is_not_reported(unknown: bool, then: list[str]) -> None:
    play = Play()
    request = under_way(play)
    play.reported.clear()
    play.do(WritesCommitFailed(request, unknown))
    assert events(play) == then


def test_what_a_former_leader_wrote_is_reported() -> None:
    play = Play()
    request = under_way(play)
    play.reported.clear()
    written = play.execute(request)
    play.do(ShutdownRequested(play.now))
    play.do(written)
    assert events(play) == ["step_down", "grant", "grant"]


def test_each_leader_reports_when_it_begins_and_ends() -> None:
    first = Play()
    first.granted()
    first.reported.clear()
    first.do(ShutdownRequested(first.now + 5))
    first.settle()
    (ended,) = (each.record for each in first.reported)
    assert (ended.event, ended.reason) == ("step_down", "the node is shutting down")
    second = Play("n2", first.store)
    second.now = first.now
    second.join("b/1")
    takeover = second.reported[0].record
    assert (takeover.event, takeover.reason) == ("takeover", "node n2 leads")
    assert takeover.term == second.machine.leaders[1].term > ended.term


def test_one_look_answers_all_who_ask_who_leads() -> None:
    play = Play()
    for subscriber in ("w.1", "w.2", "w.1"):
        play.do(WatcherLeaderQueryReceived(subscriber, WANTED, subscriber))
    assert play.requests == [LookUpLeader(WANTED)]
    nobody = play.answer().leader_locations
    assert [(a.subscriber_ids, a.group, a.leadership) for a in nobody] == [(("w.1", "w.2"), None, None)]
    assert play.store.find_live_group(WANTED) is None, "asking has created nothing"
    play.granted()
    play.do(WatcherLeaderQueryReceived("w.1", WANTED, "user"))
    (answer,) = play.answer().leader_locations
    assert answer.group == play.store.find_live_group(WANTED)
    assert answer.leadership is not None
    assert (answer.leadership.node, answer.subscription) == (play.ref, SUBSCRIPTION)
    assert [member.agent for member in answer.members or ()] == ["a"]
    play.now += SETTINGS.lease_duration_s
    play.do(WatcherLeaderQueryReceived("w.1", WANTED, "user"))
    (answer,) = play.do(play.execute(play.take(LookUpLeader))).leader_locations
    assert (answer.group, answer.leadership) == (play.store.find_live_group(WANTED), None), "its lease is over"


def test_an_unanswered_question_may_be_asked_again() -> None:
    """An answer to what nobody asks any more has no effect."""
    play = Play()
    for _ in range(2):
        play.do(WatcherLeaderQueryReceived("w.1", WANTED, "user"))
        request = play.take(LookUpLeader)
        for _ in range(2):
            assert play.do(LeaderLookupCompleted(request, is_answered=False)).leader_locations == ()


def test_not_more_is_looked_up_than_the_limit() -> None:
    """Of one caller, and of all; what is answered counts no more."""
    play = Play()
    for _ in range(MAX_QUERIES_OF_CALLER):
        play.do(WatcherLeaderQueryReceived("w.1", Subscription.parse("$share/g0/#"), "user"))
    for number in range(MAX_QUERIES_OF_CALLER + 5):
        play.do(WatcherLeaderQueryReceived("w.1", Subscription.parse(f"$share/g{number}/#"), "user"))
    assert len(play.requests) == MAX_QUERIES_OF_CALLER
    play.do(WatcherLeaderQueryReceived("w.1", Subscription.parse("$share/g0/#"), "user"))
    assert len(play.requests) == MAX_QUERIES_OF_CALLER, "that one is looked up already"
    play.answer()
    play.do(LeaderLookupCompleted(play.waiting(LookUpLeader)[-1], is_answered=False))
    play.requests.pop()
    for number in range(MAX_QUERIES):
        play.do(WatcherLeaderQueryReceived("w.1", Subscription.parse(f"$share/h{number}/#"), f"user {number % 40}"))
    play.do(WatcherLeaderQueryReceived("w.1", Subscription.parse("$share/last/#"), "user"))
    assert len(play.waiting(LookUpLeader)) == MAX_QUERIES


# --- members ----------------------------------------------------------------------------------------------------------


def test_each_join_of_a_member_has_its_end() -> None:
    bench = Bench(2)
    bench.join("a/1")
    bench.join("b/1", session="second")
    bench.join("a/2", predecessor="a/1")
    assert members(bench) == [("join", "a/1"), ("join", "b/1"), ("join", "a/2"), ("leave", "a/1")]
    bench.leave(borrower_id="b/1")
    (left,) = bench.reported
    assert (left.agent, left.session, left.term, left.stream_id) == ("b", "second", bench.term, 0)
    bench.pass_time(bench.settings.eviction_timeout_s + 1)
    assert members(bench) == [("leave", "b/1"), ("evict", "a/2")]


def test_a_member_has_left_when_that_is_written() -> None:
    bench = granted()
    bench.reported.clear()
    bench.leave(bench.said(7))
    assert members(bench) == []
    bench.settle()
    assert members(bench) == [("leave", "a/1")]


def test_of_two_under_one_name_the_older_is_fenced() -> None:
    """Also where it comes too late."""
    bench = Bench(options=GroupOptions(StartingPosition.EARLIEST, session_expiry_s=60))
    bench.join("a/1", session="worker", session_epoch=1)
    bench.join("b/1", session="worker", session_epoch=2)
    assert members(bench) == [("join", "a/1"), ("fence", "a/1"), ("join", "b/1")]
    bench.join("a/2", session="worker", session_epoch=1)
    assert members(bench) == [("fence", "a/2")]


# --- what is sent -----------------------------------------------------------------------------------------------------

LINE = HistoryRecord(1_700_000_000_000_000, 7, 3, "force_release", "evicted", 17, "a/1", "a", 5, 9, True, 8, "worker")


def event_of(record: HistoryRecord, at_us: int = 1) -> dict[str, object]:
    event = to_group_event(GroupWatchEvent(SUBSCRIPTION, record), "n1", at_us)
    return dict(json.loads(event.payload))


def test_an_event_has_only_what_applies() -> None:
    assert event_of(LINE, LINE.at_us) == {
        "at": "2023-11-14T22:13:20Z", "event": "force_release", "group_id": 7, "subscription": SUBSCRIPTION,
        "node": "n1", "term": 9, "stream_id": 3, "grant_id": 17, "position": 5, "redelivery_end": 8, "forced": True,
        "reason": "evicted",
        "borrower_id": "a/1", "agent": "a", "session": "worker",
    }  # fmt: skip
    of_group = event_of(transient_record(7, 9, "step_down", "idle"))
    assert set(of_group) == {"at", "event", "group_id", "subscription", "node", "term", "reason"}
    start = event_of(replace(LINE, position=0, redelivery_end=None, is_forced=False))
    assert (start["position"], start["forced"], "redelivery_end" in start) == (0, False, False)


def test_only_what_is_watched_is_published() -> None:
    """Under the node's time where it has none."""
    published: list[tuple[str, str, object]] = []
    watched = GroupEventPublisher("n1", lambda *reported: published.append(reported), lambda: 1_700_000_001_000_000)
    joined = GroupWatchEvent(SUBSCRIPTION, transient_record(7, 9, "join", "joined", "a/1", "a"))
    line = GroupWatchEvent(SUBSCRIPTION, LINE)
    watched.publish([joined])
    watched.set_interest("$share/other/#", True)
    watched.publish([joined])
    assert published == []
    watched.set_interest(None, True)
    watched.publish([joined, line])
    assert [(channel, key) for channel, key, _ in published] == [(Channel.GROUP, SUBSCRIPTION)] * 2
    bodies = [json.loads(body.payload) for _, _, body in published if isinstance(body, GroupEventPayload)]
    assert [body["at"] for body in bodies] == ["2023-11-14T22:13:21Z", "2023-11-14T22:13:20Z"]
    watched.set_interest(None, False)
    watched.set_interest(SUBSCRIPTION, True)
    watched.publish([line])
    assert len(published) == 3


def test_who_leads_reports_who_is_connected() -> None:
    watched = GroupEventPublisher("n1", lambda *reported: None, lambda: 1)
    known = tuple(Member(f"a/{number:06}", "a", 1.0, None, 0.0) for number in range(MAX_MEMBERS + 1))
    answer = WatcherLeaderQueryReply(("w.1",), SUBSCRIPTION, None, None, known)
    reported = json.loads(watched.leader_event(answer).payload)
    assert reported["members"][0] == {"borrower_id": "a/000000", "agent": "a", "session": None}
    assert len(reported["members"]) == MAX_MEMBERS
    assert "members" not in json.loads(
        watched.leader_event(WatcherLeaderQueryReply(("w.1",), SUBSCRIPTION, None, None)).payload
    )


def test_a_question_names_a_subscription() -> None:
    for payload in (b"", b"\xff", b"7", b"{}", b'{"watch": 7}', b"[" * 100_000, b'{"watch": "a/b"}'):
        with pytest.raises(UsageError):
            parse_leader_query(GroupEventPayload(payload))
    assert parse_leader_query(GroupEventPayload(b'{"watch": "$shared/g/#"}')) == WANTED
    assert parse_leader_query(GroupEventPayload(b'{"watch": "$share/a\\u001b/#"}')).group == "a\x1b", (
        "a group of old may be named so"
    )
