"""The table of reasons why a stream stands still: each line, and the order in which they are asked."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from msgspec.structs import replace

from sublet_storage.groups.status.diagnosis import QUIET_S, RULES, SILENT_MEMBER_S, diagnose
from sublet_storage.groups.status.diagnosis_facts import (
    AwaitedEpochs,
    GroupDiagnosisFacts,
    ParentStream,
    StallReason,
    StreamDiagnosisFacts,
)

LED = GroupDiagnosisFacts(
    subscription="$share/billing/orders/#",
    paused=None,
    leader="n1",
    last_leader="n1",
    nodes=1,
    draining=(),
    held=1,
    may_skip_lost_data=False,
    is_atomic=False,
)
UNLED = replace(LED, leader=None, nodes=2)
FREE = StreamDiagnosisFacts(
    group_id=1, stream_id=12, space="orders", generation_id=1, status="free", position=4, head=10, head_state="open",
    lag=6, age_s=60.0, borrower_id=None, agent=None, session=None, reserved_s=None, grant_id=1,
    lost_message_count=0, blocked_reason=None, unreadable_reason=None, unreadable_s=None, idle_s=60.0,
)  # fmt: skip
HELD = replace(FREE, status="held", session="etl", idle_s=1.0)
DROPPED = replace(FREE, head_state="gone", lag=None, dropped_space="orders")
QUOTED = "'$share/billing/orders/#'"
FRONT = AwaitedEpochs("orders", "7", ("closing",))
PARENTS = (ParentStream(3, "held", 5, 9), ParentStream(4, "free", 0, 2))


@pytest.mark.conforms("A7")
@pytest.mark.parametrize(
    ("reason", "group", "stream", "because", "remedy"),
    [
        (StallReason.FINISHED, LED, replace(FREE, status="finished"), "consumed to its end", None),
        (
            StallReason.BLOCKED, LED, replace(FREE, status="blocked", lag=None, blocked_reason="lost 5 times"),
            "it is blocked: lost 5 times", f"groups reset {QUOTED} --stream 12 --to-current",
        ),
        (
            StallReason.BLOCKED, LED, replace(FREE, status="blocked", blocked_reason="offset 9 is beyond the head 7"),
            "offset 9 is beyond the head 7", f"groups reset {QUOTED} --stream 12 --to-offset 7",
        ),
        (
            StallReason.BLOCKED, LED, replace(FREE, status="blocked", lag=None, head_state="gone"),
            "it is blocked", f"groups reset {QUOTED} --stream 12 --to-earliest",
        ),
        (
            StallReason.BLOCKED, replace(LED, is_atomic=True), replace(FREE, status="blocked", lag=None),
            "no reason is recorded", f"groups reset {QUOTED} --to-earliest",
        ),
        (
            StallReason.GONE, LED, replace(FREE, head_state="gone", lag=None),
            "from offset 4 on: with its leader's next look it is "
            "blocked", f"groups reset {QUOTED} --stream 12 --to-earliest",
        ),
        (StallReason.GONE, replace(LED, may_skip_lost_data=True), replace(FREE, head_state="gone", lag=None),
         "finished without them", None),
        (
            StallReason.GONE, LED, DROPPED,
            "with the space orders, which was dropped, or by its retention: with its leader's next look it is blocked",
            f"(in one: with --stream N): sublet groups reset {QUOTED} --to-current",
        ),
        (StallReason.GONE, replace(LED, may_skip_lost_data=True), DROPPED, "the space orders, which was dropped", None),
        (
            StallReason.BLOCKED, LED,
            replace(DROPPED, status="blocked", blocked_reason="offset 4 is gone by retention"),
            "it is blocked: messages that the group had not consumed are gone",
            f"sublet groups reset {QUOTED} --to-current",
        ),
        (
            StallReason.BLOCKED, replace(LED, is_atomic=True), replace(DROPPED, status="blocked"),
            "orders, which was dropped",
            f"sublet groups reset {QUOTED} --to-earliest",
        ),
        (
            StallReason.BLOCKED, LED,
            replace(DROPPED, head_state="open", status="blocked", blocked_reason="lost 5 times"),
            "it is blocked: lost 5 times", "--stream 12 --to-current",
        ),
        (
            StallReason.PAUSED, replace(LED, paused="repairs"), FREE, "the group is paused: repairs",
            f"groups resume {QUOTED}",
        ),
        (StallReason.PAUSED, replace(LED, paused=""), HELD, "no reason is recorded; etl has not handed it", "resume"),
        (StallReason.NO_NODE, replace(UNLED, nodes=0), HELD, "no node is there", "sublet leader"),
        (
            StallReason.NO_NODE, replace(UNLED, nodes=0, draining=("n 1", "n2")), FREE, "that are there drain: n 1, n2",
            "sublet nodes drain 'n 1' --undo",
        ),
        (StallReason.NO_LEADER, UNLED, HELD, "n1 led the group last, and nobody has taken over", "sublet doctor"),
        (StallReason.NO_MEMBER, replace(UNLED, held=0), FREE, "no consumer has asked for it",
         f"sublet consume {QUOTED}"),
        (StallReason.REVOKED, LED, replace(HELD, revoke_reason="rebalance"), "back from etl: rebalance",
         "in hand is done"),
        (StallReason.CAUGHT_UP, LED, replace(HELD, lag=0), "there is nothing to consume", None),
        (
            StallReason.UNREADABLE, LED,
            replace(HELD, idle_s=90.0, unreadable_reason="the block that ends before offset 9.", unreadable_s=75.0),
            "etl has it and cannot read on, for 75 s now: the block", f"{QUOTED} --stream 12 --to-offset 9",
        ),
        (StallReason.UNREADABLE, LED, replace(HELD, unreadable_reason="it is away"), "is away", "goes on when"),
        (
            StallReason.UNREADABLE, replace(LED, is_atomic=True),
            replace(HELD, waits_for=FRONT, unreadable_reason="ends before offset 9"),
            "cannot read on", f"groups reset {QUOTED} --to-epoch EPOCH",
        ),
        (StallReason.WAITING_FOR_EPOCHS, LED, replace(HELD, waits_for=FRONT), "space orders from 7 on",
         "publisher.advance"),
        (
            StallReason.WAITING_FOR_EPOCHS, LED, replace(HELD, waits_for=replace(FRONT, producers=())),
            "nobody holds it",
            "A node completes it",
        ),
        (
            StallReason.STALLED, LED, replace(HELD, idle_s=30.0), "nothing for 30 s: it stands at offset 4, 6 behind",
            "Look what etl is doing",
        ),
        (StallReason.CONSUMING, LED, HELD, "etl consumes it", None),
        (
            StallReason.RESERVED, LED, replace(FREE, status="reserved", session="etl", reserved_s=90.0),
            "session etl, 90 s more",
            f"groups reset {QUOTED} --stream 12 --to-current --force",
        ),
        (
            StallReason.RESERVED, replace(LED, is_atomic=True),
            replace(FREE, status="reserved", session="etl", reserved_s=-1.0),
            "has not come back in time", f"groups reset {QUOTED} --to-earliest --force",
        ),
        (
            StallReason.WAITING_FOR_PARENTS, LED, replace(FREE, parents=PARENTS),
            "3 (held, at 5 of 9), 4 (free, at 0 of 2)",
            f"sublet groups why {QUOTED} --stream 3",
        ),
        (StallReason.WAITING_FOR_PARENTS, LED, replace(FREE, parents=PARENTS * 2), "of 9) and 1 more", "--stream 3"),
        (StallReason.RESERVED_FOR_SESSION, LED, replace(FREE, session="etl", reserved_s=45.0),
         "for its return, 45 s more", "Start etl again"),
        (
            StallReason.MEMBERS_SILENT, replace(LED, held=0), FREE, "n1 leads the group, and no consumer has a",
            f"groups watch {QUOTED}",
        ),
        (StallReason.GRANT_PENDING, LED, FREE, "it is free, and n1 grants it next", f"groups watch {QUOTED}"),
    ],
)  # fmt: skip
def test_each_reason_has_what_helps(
    reason: StallReason, group: GroupDiagnosisFacts, stream: StreamDiagnosisFacts, because: str, remedy: str | None
) -> None:
    transition = diagnose(group, stream)
    assert transition.reason is reason
    assert because in transition.detail
    assert transition.hint is None if remedy is None else remedy in (transition.hint or "")


@pytest.mark.conforms("A7")
@pytest.mark.parametrize("atomic", [False, True])
def test_the_way_past_a_damaged_block_can_be_pasted(atomic: bool) -> None:
    said = "stream 12: the block that begins at offset 4 and ends before offset 9 lies at 'offset 7', and"
    past = f": sublet groups reset {QUOTED} " + ("--to-epoch EPOCH" if atomic else "--stream 12 --to-offset 9")
    for stream in (replace(HELD, unreadable_reason=said), replace(FREE, status="blocked", blocked_reason=said)):
        assert (diagnose(replace(LED, is_atomic=atomic), stream).hint or "").endswith(past)


@pytest.mark.conforms("A7")
def test_a_former_holder_is_waited_for_until_its_time() -> None:
    assert diagnose(LED, replace(FREE, taken_s=SILENT_MEMBER_S - 1)).reason is StallReason.FORMER_HOLDER
    assert diagnose(LED, replace(FREE, taken_s=SILENT_MEMBER_S)).reason is StallReason.GRANT_PENDING


def test_the_table_has_each_reason_once() -> None:
    assert sorted(rule.reason for rule in RULES) == sorted(StallReason)


@pytest.mark.conforms("A7")
def test_reasons_come_in_their_order() -> None:
    """What ends a stream comes before what stops its group, and that before what it waits for."""
    stopped = replace(UNLED, paused="repairs", nodes=0, held=0)
    assert diagnose(stopped, replace(FREE, status="blocked")).reason is StallReason.BLOCKED
    assert diagnose(stopped, replace(FREE, parents=PARENTS)).reason is StallReason.PAUSED
    assert diagnose(replace(stopped, paused=None), replace(FREE, lag=0)).reason is StallReason.NO_NODE
    assert diagnose(LED, replace(FREE, lag=0, parents=PARENTS)).reason is StallReason.CAUGHT_UP


@pytest.mark.conforms("A7")
def test_a_holder_is_slow_only_where_messages_waited() -> None:
    """As long as it was silent."""
    slow = replace(HELD, age_s=QUIET_S, idle_s=QUIET_S)
    assert diagnose(LED, slow).reason is StallReason.STALLED
    assert diagnose(LED, replace(slow, age_s=QUIET_S - 1)).reason is StallReason.CONSUMING, "it has just come"
    assert diagnose(LED, replace(slow, idle_s=QUIET_S - 1)).reason is StallReason.CONSUMING, "it goes on"


def test_the_page_on_groups_has_every_reason() -> None:
    page = (Path(__file__).parents[2] / "docs" / "groups.md").read_text()
    table = page.partition("| reason | the stream |")[2].partition("\n\n")[0]
    assert sorted(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == sorted(StallReason)
