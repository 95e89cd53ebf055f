"""The table of reasons why a stream stands still: each line, and the order in which they are asked."""

from __future__ import annotations

import re
from functools import partial
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
    subscription="$share/billing/orders/#", paused=None, leader="n1", last_leader="n1", nodes=1, draining=(), held=1,
    may_skip_lost_data=False, is_atomic=False,
)  # fmt: skip
FREE = StreamDiagnosisFacts(
    group_id=1, stream_id=12, space="orders", generation_id=1, status="free", position=4, head=10, head_state="open",
    lag=6, age_s=60.0, borrower_id=None, agent=None, session=None, reserved_s=None, grant_id=1,
    lost_message_count=0, blocked_reason=None, unreadable_reason=None, unreadable_s=None, idle_s=60.0,
)  # fmt: skip
led, free, held = partial(replace, LED), partial(replace, FREE), partial(replace, FREE, status="held", session="etl")
UNLED, ATOMIC, SKIPS = led(leader=None, nodes=2), led(is_atomic=True), led(may_skip_lost_data=True)
HELD = held(idle_s=1.0)
BLOCKED = free(status="blocked", lag=None)
DROPPED = free(head_state="gone", lag=None, dropped_space="orders")
QUOTED = "'$share/billing/orders/#'"
RESET = f"groups reset {QUOTED}"
FRONT = AwaitedEpochs("orders", "7", ("closing",))
PARENTS = (ParentStream(3, "held", 5, 9), ParentStream(4, "free", 0, 2))
S = StallReason


@pytest.mark.conforms("A7")
@pytest.mark.parametrize(
    ("reason", "group", "stream", "because", "remedy"),
    [
        (S.FINISHED, LED, free(status="finished"), "consumed to its end", None),
        (S.BLOCKED, LED, replace(BLOCKED, blocked_reason="lost 5 times"), "it is blocked: lost 5 times",
         f"{RESET} --stream 12 --to-current"),
        (S.BLOCKED, LED, free(status="blocked", blocked_reason="offset 9 is beyond the head 7"),
         "offset 9 is beyond the head 7", f"{RESET} --stream 12 --to-offset 7"),
        (S.BLOCKED, LED, replace(BLOCKED, head_state="gone"), "it is blocked", f"{RESET} --stream 12 --to-earliest"),
        (S.BLOCKED, ATOMIC, BLOCKED, "no reason is recorded", f"{RESET} --to-earliest"),
        (S.GONE, LED, free(head_state="gone", lag=None), "from offset 4 on: with its leader's next look it is blocked",
         f"{RESET} --stream 12 --to-earliest"),
        (S.GONE, SKIPS, free(head_state="gone", lag=None), "finished without them", None),
        (S.GONE, LED, DROPPED,
         "with the space orders, which was dropped, or by its retention: with its leader's next look it is blocked",
         f"(in one: with --stream N): sublet {RESET} --to-current"),
        (S.GONE, SKIPS, DROPPED, "the space orders, which was dropped", None),
        (S.BLOCKED, LED, replace(DROPPED, status="blocked", blocked_reason="offset 4 is gone by retention"),
         "it is blocked: messages that the group had not consumed are gone", f"sublet {RESET} --to-current"),
        (S.BLOCKED, ATOMIC, replace(DROPPED, status="blocked"), "orders, which was dropped",
         f"sublet {RESET} --to-earliest"),
        (S.BLOCKED, LED, replace(DROPPED, head_state="open", status="blocked", blocked_reason="lost 5 times"),
         "it is blocked: lost 5 times", "--stream 12 --to-current"),
        (S.BLOCKED, LED, replace(DROPPED, position=10, status="blocked", blocked_reason="lost 5 times"),
         "it is blocked: lost 5 times", "--stream 12 --to-current"),
        (S.PAUSED, led(paused="repairs"), FREE, "the group is paused: repairs", f"groups resume {QUOTED}"),
        (S.PAUSED, led(paused=""), HELD, "no reason is recorded; etl has not handed it", "resume"),
        (S.NO_NODE, replace(UNLED, nodes=0), HELD, "no node is there", "sublet leader"),
        (S.NO_NODE, replace(UNLED, nodes=0, draining=("n 1", "n2")), FREE, "that are there drain: n 1, n2",
         "sublet nodes drain 'n 1' --undo"),
        (S.NO_LEADER, UNLED, HELD, "n1 led the group last, and nobody has taken over", "sublet doctor"),
        (S.NO_MEMBER, replace(UNLED, held=0), FREE, "no consumer has asked for it", f"sublet consume {QUOTED}"),
        (S.REVOKED, LED, replace(HELD, revoke_reason="rebalance"), "back from etl: rebalance", "in hand is done"),
        (S.CAUGHT_UP, LED, replace(HELD, lag=0), "there is nothing to consume", None),
        (S.UNREADABLE, LED,
         held(idle_s=90.0, unreadable_reason="the block that ends before offset 9.", unreadable_s=75.0),
         "etl has it and cannot read on, for 75 s now: the block", f"{QUOTED} --stream 12 --to-offset 9"),
        (S.UNREADABLE, LED, replace(HELD, unreadable_reason="it is away"), "is away", "goes on when"),
        (S.UNREADABLE, ATOMIC, replace(HELD, waits_for=FRONT, unreadable_reason="ends before offset 9"),
         "cannot read on", f"{RESET} --to-epoch EPOCH"),
        (S.WAITING_FOR_EPOCHS, LED, replace(HELD, waits_for=FRONT), "space orders from 7 on", "publisher.advance"),
        (S.WAITING_FOR_EPOCHS, LED, replace(HELD, waits_for=replace(FRONT, producers=())), "nobody holds it",
         "A node completes it"),
        (S.STALLED, LED, held(idle_s=30.0), "nothing for 30 s: it stands at offset 4, 6 behind",
         "Look what etl is doing"),
        (S.CONSUMING, LED, HELD, "etl consumes it", None),
        (S.RESERVED, LED, free(status="reserved", session="etl", reserved_s=90.0), "session etl, 90 s more",
         f"{RESET} --stream 12 --to-current --force"),
        (S.RESERVED, ATOMIC, free(status="reserved", session="etl", reserved_s=0.0), "has not come back in time",
         f"{RESET} --to-earliest --force"),
        (S.RESERVED, LED, free(status="reserved", session="etl"), "has not come back in time", "--to-current --force"),
        (S.WAITING_FOR_PARENTS, LED, free(parents=PARENTS), "3 (held, at 5 of 9), 4 (free, at 0 of 2)",
         f"sublet groups why {QUOTED} --stream 3"),
        (S.WAITING_FOR_PARENTS, LED, free(parents=PARENTS * 2), "of 9) and 1 more", "--stream 3"),
        (S.RESERVED_FOR_SESSION, LED, free(session="etl", reserved_s=45.0), "for its return, 45 s more",
         "Start etl again"),
        (S.FORMER_HOLDER, LED, free(taken_s=3.0), "taken from its holder 3 s ago, by a reset or with the group before "
         "this one, and n1 grants it when that one may begin no more calls: 20 s after, by default", None),
        (S.MEMBERS_SILENT, led(held=0), FREE, "n1 leads the group, and no consumer has a", f"groups watch {QUOTED}"),
        (S.GRANT_PENDING, LED, FREE, "it is free, and n1 grants it next", f"groups watch {QUOTED}"),
    ],
)  # fmt: skip
def test_each_reason_has_what_helps(
    reason: StallReason, group: GroupDiagnosisFacts, stream: StreamDiagnosisFacts, because: str, remedy: str | None
) -> None:
    found = diagnose(group, stream)
    assert found.reason is reason
    assert because in found.detail
    assert found.hint is None if remedy is None else remedy in (found.hint or "")


@pytest.mark.conforms("A7")
@pytest.mark.parametrize("atomic", [False, True])
def test_the_way_past_a_damaged_block_can_be_pasted(atomic: bool) -> None:
    said = "stream 12: the block that begins at offset 4 and ends before offset 9 lies at 'offset 7', and"
    past = f": sublet {RESET} " + ("--to-epoch EPOCH" if atomic else "--stream 12 --to-offset 9")
    for stream in (replace(HELD, unreadable_reason=said), free(status="blocked", blocked_reason=said)):
        assert (diagnose(led(is_atomic=atomic), stream).hint or "").endswith(past)


def test_the_table_has_each_reason_once() -> None:
    assert sorted(rule.reason for rule in RULES) == sorted(StallReason)


SLOW = held(age_s=QUIET_S, idle_s=QUIET_S)
STOPPED = replace(UNLED, paused="repairs", nodes=0, held=0)


@pytest.mark.conforms("A7")
@pytest.mark.parametrize(
    ("group", "stream", "reason"),
    [
        (STOPPED, free(status="blocked"), S.BLOCKED),
        (STOPPED, free(parents=PARENTS), S.PAUSED),
        (replace(STOPPED, paused=None), free(lag=0), S.NO_NODE),
        (LED, free(lag=0, parents=PARENTS), S.CAUGHT_UP),
        (LED, free(head_state="gone", position=10, lag=0), S.CAUGHT_UP),
        (LED, free(session="etl", reserved_s=0.0), S.GRANT_PENDING),
        (led(nodes=0), FREE, S.GRANT_PENDING),
        (LED, free(revoke_reason="rebalance"), S.GRANT_PENDING),
        (LED, SLOW, S.STALLED),
        (LED, replace(SLOW, age_s=QUIET_S - 1), S.CONSUMING),
        (LED, replace(SLOW, idle_s=QUIET_S - 1), S.CONSUMING),
        (LED, free(taken_s=SILENT_MEMBER_S - 1), S.FORMER_HOLDER),
        (LED, free(taken_s=SILENT_MEMBER_S), S.GRANT_PENDING),
    ],
)
def test_reasons_come_in_their_order(
    group: GroupDiagnosisFacts, stream: StreamDiagnosisFacts, reason: StallReason
) -> None:
    """What ends a stream comes before what stops its group, and that before what it waits for; a holder is slow only
    where messages waited as long as it was silent, and a former one is waited for until its time."""
    assert diagnose(group, stream).reason is reason


def test_the_page_on_groups_has_every_reason() -> None:
    page = (Path(__file__).parents[2] / "docs" / "groups.md").read_text()
    table = page.partition("| reason | the stream |")[2].partition("\n\n")[0]
    assert sorted(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == sorted(StallReason)
