"""The table of reasons why a stream stands still: each line, and the order in which they are asked."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sublet_storage.groups.status.diagnosis import QUIET_S, RULES, ruled
from sublet_storage.groups.status.diagnosis_model import Frontier, GroupState, Parent, Reason, StreamState

LED = GroupState(
    subscription="$share/billing/orders/#",
    paused=None,
    led_by="n1",
    last_led_by="n1",
    nodes=1,
    draining=(),
    held=1,
    skips_gone=False,
    atomic=False,
)
UNLED = replace(LED, led_by=None, nodes=2)
FREE = StreamState(12, "free", 4, 10, False, 6, age_s=60.0, rested_s=60.0)
HELD = replace(FREE, status="held", owner="etl", rested_s=1.0)
DROPPED = replace(FREE, gone=True, lag=None, dropped="orders")
QUOTED = "'$share/billing/orders/#'"
FRONT = Frontier("orders", "7", ("closing",))
PARENTS = (Parent(3, "held", 5, 9), Parent(4, "free", 0, 2))


@pytest.mark.conforms("A7")
@pytest.mark.parametrize(
    ("reason", "group", "stream", "because", "remedy"),
    [
        (Reason.FINISHED, LED, replace(FREE, status="finished"), "consumed to its end", None),
        (
            Reason.BLOCKED, LED, replace(FREE, status="blocked", lag=None, blocked_because="lost 5 times"),
            "it is blocked: lost 5 times", f"groups reset {QUOTED} --stream 12 --to-current",
        ),
        (
            Reason.BLOCKED, LED, replace(FREE, status="blocked", lag=None, gone=True),
            "it is blocked", f"groups reset {QUOTED} --stream 12 --to-earliest",
        ),
        (
            Reason.BLOCKED, replace(LED, atomic=True), replace(FREE, status="blocked", lag=None),
            "no reason is recorded", f"groups reset {QUOTED} --to-earliest",
        ),
        (
            Reason.GONE, LED, replace(FREE, gone=True, lag=None), "from offset 4 on: with its leader's next look it is "
            "blocked", f"groups reset {QUOTED} --stream 12 --to-earliest",
        ),
        (Reason.GONE, replace(LED, skips_gone=True), replace(FREE, gone=True, lag=None), "finished without them", None),
        (
            Reason.GONE, LED, DROPPED,
            "with the space orders, which was dropped, or by its retention: with its leader's next look it is blocked",
            f"(in one: with --stream N): sublet groups reset {QUOTED} --to-current",
        ),
        (Reason.GONE, replace(LED, skips_gone=True), DROPPED, "the space orders, which was dropped", None),
        (
            Reason.BLOCKED, LED, replace(DROPPED, status="blocked", blocked_because="offset 4 is gone by retention"),
            "it is blocked: messages that the group had not consumed are gone",
            f"sublet groups reset {QUOTED} --to-current",
        ),
        (
            Reason.BLOCKED, replace(LED, atomic=True), replace(DROPPED, status="blocked"), "orders, which was dropped",
            f"sublet groups reset {QUOTED} --to-earliest",
        ),
        (
            Reason.BLOCKED, LED, replace(DROPPED, gone=False, status="blocked", blocked_because="lost 5 times"),
            "it is blocked: lost 5 times", "--stream 12 --to-current",
        ),
        (
            Reason.PAUSED, replace(LED, paused="repairs"), FREE, "the group is paused: repairs",
            f"groups resume {QUOTED}",
        ),
        (Reason.PAUSED, replace(LED, paused=""), HELD, "no reason is recorded; etl has not handed it", "resume"),
        (Reason.NO_NODE, replace(UNLED, nodes=0), HELD, "no node is there", "sublet leader"),
        (
            Reason.NO_NODE, replace(UNLED, nodes=0, draining=("n 1", "n2")), FREE, "that are there drain: n 1, n2",
            "sublet nodes drain 'n 1' --undo",
        ),
        (Reason.NO_LEADER, UNLED, HELD, "n1 led the group last, and nobody has taken over", "sublet doctor"),
        (Reason.NO_MEMBER, replace(UNLED, held=0), FREE, "no consumer has asked for it", f"sublet consume {QUOTED}"),
        (Reason.REVOKED, LED, replace(HELD, revoked_because="balance"), "back from etl: balance", "in hand is done"),
        (Reason.CAUGHT_UP, LED, replace(HELD, lag=0), "there is nothing to consume", None),
        (
            Reason.UNREADABLE, LED,
            replace(HELD, rested_s=90.0, unreadable_because="the block that ends before offset 9.", unreadable_s=75.0),
            "etl has it and cannot read on, for 75 s now: the block", f"{QUOTED} --stream 12 --to-offset 9",
        ),
        (Reason.UNREADABLE, LED, replace(HELD, unreadable_because="it is away"), "is away", "goes on when"),
        (
            Reason.UNREADABLE, replace(LED, atomic=True),
            replace(HELD, waits_for=FRONT, unreadable_because="ends before offset 9"),
            "cannot read on", f"groups reset {QUOTED} --to-epoch EPOCH",
        ),
        (Reason.EPOCHS, LED, replace(HELD, waits_for=FRONT), "space orders from 7 on", "publisher.advance"),
        (
            Reason.EPOCHS, LED, replace(HELD, waits_for=replace(FRONT, holders=())), "nobody holds it",
            "A node completes it",
        ),
        (
            Reason.STALLED, LED, replace(HELD, rested_s=30.0), "nothing for 30 s: it stands at offset 4, 6 behind",
            "Look what etl is doing",
        ),
        (Reason.CONSUMING, LED, HELD, "etl consumes it", None),
        (
            Reason.RESERVED, LED, replace(FREE, status="reserved", owner="etl", kept_s=90.0), "session etl, 90 s more",
            f"groups reset {QUOTED} --stream 12 --to-current --force",
        ),
        (
            Reason.RESERVED, replace(LED, atomic=True), replace(FREE, status="reserved", owner="etl", kept_s=-1.0),
            "has not come back in time", f"groups reset {QUOTED} --to-earliest --force",
        ),
        (
            Reason.PARENTS, LED, replace(FREE, parents=PARENTS), "3 (held, at 5 of 9), 4 (free, at 0 of 2)",
            f"sublet groups why {QUOTED} --stream 3",
        ),
        (Reason.PARENTS, LED, replace(FREE, parents=PARENTS * 2), "of 9) and 1 more", "--stream 3"),
        (Reason.KEPT, LED, replace(FREE, owner="etl", kept_s=45.0), "for its return, 45 s more", "Start etl again"),
        (
            Reason.NO_MEMBER_HEARD, replace(LED, held=0), FREE, "n1 leads the group, and no consumer has a",
            f"groups watch {QUOTED}",
        ),
        (Reason.TO_BE_LENT, LED, FREE, "it is free, and n1 lends it next", f"groups watch {QUOTED}"),
    ],
)  # fmt: skip
def test_each_reason_has_its_words_and_says_what_helps(
    reason: Reason, group: GroupState, stream: StreamState, because: str, remedy: str | None
) -> None:
    ruling = ruled(group, stream)
    assert ruling.reason is reason
    assert because in ruling.because
    assert ruling.remedy is None if remedy is None else remedy in (ruling.remedy or "")


@pytest.mark.conforms("A7")
@pytest.mark.parametrize("atomic", [False, True])
def test_the_way_past_a_damaged_block_can_be_pasted(atomic: bool) -> None:
    said = "stream 12: the block that begins at offset 4 and ends before offset 9 lies at 'offset 7', and"
    past = f": sublet groups reset {QUOTED} " + ("--to-epoch EPOCH" if atomic else "--stream 12 --to-offset 9")
    for stream in (replace(HELD, unreadable_because=said), replace(FREE, status="blocked", blocked_because=said)):
        assert (ruled(replace(LED, atomic=atomic), stream).remedy or "").endswith(past)


def test_the_table_has_each_reason_once() -> None:
    assert sorted(rule.reason for rule in RULES) == sorted(Reason)


@pytest.mark.conforms("A7")
def test_what_ends_a_stream_comes_before_what_stops_its_group_and_that_before_what_it_waits_for() -> None:
    stopped = replace(UNLED, paused="repairs", nodes=0, held=0)
    assert ruled(stopped, replace(FREE, status="blocked")).reason is Reason.BLOCKED
    assert ruled(stopped, replace(FREE, parents=PARENTS)).reason is Reason.PAUSED
    assert ruled(replace(stopped, paused=None), replace(FREE, lag=0)).reason is Reason.NO_NODE
    assert ruled(LED, replace(FREE, lag=0, parents=PARENTS)).reason is Reason.CAUGHT_UP


@pytest.mark.conforms("A7")
def test_a_holder_is_slow_only_where_messages_have_waited_as_long_as_it_was_silent() -> None:
    slow = replace(HELD, age_s=QUIET_S, rested_s=QUIET_S)
    assert ruled(LED, slow).reason is Reason.STALLED
    assert ruled(LED, replace(slow, age_s=QUIET_S - 1)).reason is Reason.CONSUMING, "it has just come"
    assert ruled(LED, replace(slow, rested_s=QUIET_S - 1)).reason is Reason.CONSUMING, "it goes on"
