"""Whatever becomes of pushed heads, a session finds what is in the log, soon, and looks no more often than it must."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from sublet_borrower.new_data.head_poll_scheduler import (
    HeadPollScheduler,
    HeadPollSchedulerSettings,
    HeadPushed,
    HeadsRead,
    HeadSubscriptionId,
    StreamsCaughtUp,
)
from sublet_protocol.tick import Tick

S = HeadPollSchedulerSettings()
STREAMS = (1, 2, 3)


class Reader:
    """A session that reads what is new at once, on a log that grows; notifications are lost, late or repeated."""

    def __init__(self) -> None:
        self.machine = HeadPollScheduler(S)
        self.now = 0.0
        self.heads = dict.fromkeys(STREAMS, 0)
        self.read = dict.fromkeys(STREAMS, 0)
        self.grown_at = dict.fromkeys(STREAMS, 0.0)
        self.follows: dict[int, HeadSubscriptionId] = {}
        self.looks = 0
        self.decide(StreamsCaughtUp(self.ends()))

    def ends(self) -> dict[int, tuple[int, int]]:
        return {stream_id: (50, head) for stream_id, head in self.read.items()}

    def decide(self, event: StreamsCaughtUp | HeadPushed | HeadsRead | Tick) -> None:
        outcome = self.machine.decide(event, self.now)
        for follow in outcome.unsubscribe:
            assert self.follows.pop(follow.stream_id) == follow, "what is dropped was made"
        for follow in outcome.subscribe:
            assert follow.stream_id not in self.follows, "a stream is followed under one id"
            self.follows[follow.stream_id] = follow
        if outcome.poll:
            self.looks += 1
            assert self.looks < 5_000, "heads that nobody can find are looked for without end"
            self.decide(HeadsRead({stream_id: self.heads[stream_id] for stream_id in outcome.poll}))
        for stream_id in (*outcome.new_heads, *outcome.read):
            self.read[stream_id] = self.heads[stream_id]
        if outcome.read:
            self.looks += 1
            self.decide(HeadsRead({stream_id: self.heads[stream_id] for stream_id in outcome.read}))
        if outcome.new_heads or outcome.read:
            self.decide(StreamsCaughtUp(self.ends()))
        settled = outcome.poll or outcome.new_heads or outcome.read
        self.wake_at = self.machine.decide(Tick(), self.now).wake_at if settled else outcome.wake_at

    def pass_time(self, until: float) -> None:
        while self.wake_at is not None and self.wake_at <= until:
            self.now = max(self.now, self.wake_at)
            self.decide(Tick())
        self.now = until

    def check(self) -> None:
        for stream_id in STREAMS:
            late = self.now - self.grown_at[stream_id] > S.poll_max_with_push_s + S.push_late_s
            assert not late or self.read[stream_id] == self.heads[stream_id], "nothing stays unseen for long"


STEP = st.tuples(
    st.floats(0.0, 0.5),
    st.sampled_from(STREAMS),
    st.sampled_from(["append", "append", "push", "push", "stale", "invented", "rest"]),
)


@settings(max_examples=200)
@given(st.lists(STEP, max_size=60))
def test_all_is_found_whatever_is_pushed(steps: list[tuple[float, int, str]]) -> None:
    reader = Reader()
    stale = dict(reader.follows)
    for pause_s, stream_id, what in steps:
        reader.pass_time(reader.now + pause_s)
        reader.check()
        match what:
            case "append":
                if reader.read[stream_id] == reader.heads[stream_id]:
                    reader.grown_at[stream_id] = reader.now
                reader.heads[stream_id] += 1
            case "push":
                reader.decide(HeadPushed(reader.follows[stream_id], reader.heads[stream_id]))
            case "stale":
                reader.decide(HeadPushed(stale[stream_id], reader.heads[stream_id]))
            case "invented":
                reader.decide(HeadPushed(reader.follows[stream_id], reader.heads[stream_id] + 7))
            case _:
                pass
    reader.pass_time(reader.now + S.poll_max_with_push_s + S.push_late_s + 0.01)
    assert reader.read == reader.heads


@settings(max_examples=50)
@given(st.booleans())
def test_a_quiet_minute_costs_few_looks(pushed: bool) -> None:
    reader = Reader()
    if pushed:
        reader.heads[1] += 1
        reader.decide(HeadPushed(reader.follows[1], 1))
    before = reader.looks
    reader.pass_time(60.0)
    assert reader.looks - before < 60 / (S.poll_max_with_push_s if pushed else S.poll_max_s) * 1.2 + 30
